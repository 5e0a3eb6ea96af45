// A row of logits in chunks, and reductions over a block: what sample.cu and sample_filter.cuh share.
#pragma once
#include "device.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int GROUPS = 16 / ELEMENT_BYTES;  // of eight logits, a thread and chunk: 32 KiB a chunk
constexpr int CHUNK = THREADS * GROUPS * 8;
constexpr int MAX_CHUNKS = THREADS;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 NONE = 0xffffffffu;
// A float's order as an unsigned integer; of a bf16 only the upper bits differ.
constexpr int KEY_SHIFT = ELEMENT_BYTES == 4 ? 0 : 16;

__device__ __forceinline__ u32 order_of(float x) {
    u32 bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float of_order(u32 order) {
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}
__device__ __forceinline__ u32 key_of(float x) { return order_of(x) >> KEY_SHIFT; }

// --- reductions over the block: every thread gets the result; scratch is free before and after ---

__device__ __forceinline__ float block_largest(float x) {
    __shared__ u32 scratch[WARPS];
    u32 order = __reduce_max_sync(FULL, order_of(x));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = order;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) order = max(order, scratch[w]);
    return of_order(order);
}

__device__ __forceinline__ u32 block_least(u32 x) {
    __shared__ u32 scratch[WARPS];
    x = __reduce_min_sync(FULL, x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) x = min(x, scratch[w]);
    return x;
}

// The sum of a small count over the threads before this one; `total` gets all.
__device__ __forceinline__ int count_before(int own, int& total) {
    __shared__ int scratch[WARPS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, up_to = own;
    for (int step = 1; step < 32; step *= 2) {
        int left = __shfl_up_sync(FULL, up_to, step);
        if (lane >= step) up_to += left;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = up_to;
    __syncthreads();
    int before = 0;
    total = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) before += scratch[w];
        total += scratch[w];
    }
    return before + up_to - own;
}

template <int COUNT>
__device__ __forceinline__ void block_sums(float (&x)[COUNT]) {
    __shared__ float scratch[WARPS][COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = warp_sum(x[i]);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        for (int i = 0; i < COUNT; i++) scratch[threadIdx.x / 32][i] = x[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        x[i] = scratch[0][i];
        for (int w = 1; w < WARPS; w++) x[i] += scratch[w][i];
    }
}

// The sum over the threads before this one; `total` gets all.
__device__ __forceinline__ double sum_before(double own, double& total) {
    __shared__ double scratch[WARPS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double up_to = own;
    for (int step = 1; step < 32; step *= 2) {
        double left = __shfl_up_sync(FULL, up_to, step);
        if (lane >= step) up_to += left;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = up_to;
    __syncthreads();
    double before = 0.;
    total = 0.;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) before += scratch[w];
        total += scratch[w];
    }
    return before + up_to - own;
}

__device__ __forceinline__ double block_total(double own) {
    double total;
    sum_before(own, total);
    return total;
}

// --- a row ----------------------------------------------------------------------------------------

// A chunk in shared memory. Group g of a thread is group(g) of the row: a warp's lie together, so that
// lanes, then g, then warps are the order of ids. A thread reads only what it has loaded itself.
struct Piece {
    Element* logits;  // [GROUPS, THREADS, 8]
    int first;
    __device__ int group(int g) const { return first + g * 32; }
    static __device__ int first_group(int chunk) {
        return chunk * (CHUNK / 8) + threadIdx.x / 32 * (GROUPS * 32) + threadIdx.x % 32;
    }
    __device__ Element* at(int g) const { return logits + (g * THREADS + threadIdx.x) * 8; }
    __device__ void get(int g, float (&x)[8]) const { load8(at(g), 0, x); }
};

__device__ __forceinline__ void load_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                     (u32)__cvta_generic_to_shared(to)),
                 "l"(from)
                 : "memory");
}
__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last `OPEN` closed groups of loads have arrived.
template <int OPEN>
__device__ __forceinline__ void wait_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(OPEN) : "memory");
}

struct Row {
    const Element* logits;
    int size, aligned;  // whether groups of eight may be read at once
    float per_logit;    // log2(e) / temperature
    float largest;      // logit
    u32 least_key;      // of those that stay
    float least_mass;   // min_p

    // Starts to load a chunk, as one group of loads; past the end it holds -INF.
    __device__ Piece load(int chunk, Element* buffer) const {
        Piece piece = {buffer, Piece::first_group(chunk)};
#pragma unroll 1
        for (int g = 0; g < GROUPS; g++) {
            int from = 8 * piece.group(g);
            if (aligned && from + 8 <= size) {
#pragma unroll
                for (int part = 0; part < ELEMENT_BYTES / 2; part++)
                    load_async((uint4*)piece.at(g) + part, (const uint4*)(logits + from) + part);
            } else {
#pragma unroll 1
                for (int i = 0; i < 8; i++)
                    piece.at(g)[i] = from + i < size ? logits[from + i] : minus_infinity();
            }
        }
        close_group();
        return piece;
    }
    static __device__ Element minus_infinity() {
#if ELEMENT_BYTES == 4
        return -INF;
#else
        return 0xff80;
#endif
    }

    // Eight logits from `from`, a multiple of 8; -INF past the end.
    __device__ void read(int from, float (&x)[8]) const {
        if (aligned && from + 8 <= size) {
            load8(logits + from, 0, x);
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = -INF;
            if (from + i >= size) continue;
#if ELEMENT_BYTES == 4
            x[i] = logits[from + i];
#else
            x[i] = low(logits[from + i]);
#endif
        }
    }

    __device__ float mass(float logit) const { return exp2f((logit - largest) * per_logit); }
    __device__ float kept_mass(float logit) const {
        float e = mass(logit);
        return key_of(logit) >= least_key && e >= least_mass ? e : 0.f;
    }
};

// Calls visit(piece, chunk) for each chunk of the row in turn, the next one's loads in flight. Two
// buffers.
template <class Visit>
__device__ __forceinline__ void for_each_chunk(const Row& row, int chunks, Element* buffers,
                                               Visit visit) {
    Piece piece = row.load(0, buffers);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk++) {
        Piece next = piece;
        if (chunk + 1 < chunks) next = row.load(chunk + 1, buffers + (chunk + 1) % 2 * CHUNK);
        else close_group();
        wait_groups<1>();
        visit(piece, chunk);
        piece = next;
    }
}
