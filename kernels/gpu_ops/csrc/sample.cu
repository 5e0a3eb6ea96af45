// A token id per row of logits, by the definition in ops.py: `sample`.
//
// One launch. A block reads one chunk of CHUNK logits of one row: its largest logit and the mass
// beside it. The block that finishes a row's last chunk draws: it finds the chunk in which the
// running mass passes u times the whole, reads that chunk again, and finds the id. A row with filters
// first looks for the smallest logit that stays, by a search over the bits of a float that re-reads
// the row from L2; other rows do not pay for it.
//
// A row's id depends on that row alone: chunks, and the order of every sum, are fixed by the
// vocabulary's size. `arrived` is 0 between launches.
#include "device.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int GROUPS = 8;  // of eight logits, a thread and chunk
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

// Philox4x32-10 (Salmon et al., SC'11), word 0 of the block at counter (position, 0, 0, 0).
__device__ __forceinline__ u32 random_word(u32 key0, u32 key1, u32 position) {
    u32 a = position, b = 0, c = 0, d = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 high0 = __umulhi(0xD2511F53u, a), low0 = 0xD2511F53u * a;
        u32 high1 = __umulhi(0xCD9E8D57u, c), low1 = 0xCD9E8D57u * c;
        a = high1 ^ b ^ key0, b = low1, c = high0 ^ d ^ key1, d = low0;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    return a;
}

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

// --- a row ----------------------------------------------------------------------------------------

// A thread's logits of one chunk, as they lie in memory: group g is group(g) of the row. A warp's lie
// together, so that lanes, then g, then warps are the order of ids.
struct Piece {
#if ELEMENT_BYTES == 4
    float4 raw[GROUPS][2];
#else
    uint4 raw[GROUPS];
#endif
    int first;
    __device__ int group(int g) const { return first + g * 32; }
    __device__ void get(int g, float (&x)[8]) const { load8((const Element*)(raw + g), 0, x); }
};

struct Row {
    const Element* logits;
    int size, aligned;  // whether groups of eight may be read at once
    float per_logit;    // log2(e) / temperature
    float largest;      // logit
    u32 least_key;      // of those that stay
    float least_mass;   // min_p

    // All loads of a piece are in flight together; past the end it holds -INF.
    __device__ void read(int chunk, Piece& piece) const {
        piece.first = chunk * (CHUNK / 8) + threadIdx.x / 32 * (GROUPS * 32) + threadIdx.x % 32;
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            int at = 8 * piece.group(g);
            float x[8];
            if (aligned && at + 8 <= size) {
                load8(logits + at, 0, x);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    x[i] = -INF;
                    if (at + i < size) {
#if ELEMENT_BYTES == 4
                        x[i] = logits[at + i];
#else
                        x[i] = low(logits[at + i]);
#endif
                    }
                }
            }
            store8((Element*)(piece.raw + g), 0, x);
        }
    }

    __device__ float mass(float logit) const { return exp2f((logit - largest) * per_logit); }
    __device__ float kept_mass(float logit) const {
        float e = mass(logit);
        return key_of(logit) >= least_key && e >= least_mass ? e : 0.f;
    }
};

// A chunk's largest logit, the lowest id that has it, and its mass relative to that logit.
struct __align__(16) ChunkSum {
    float largest, mass;
    u32 id, unused;
};

__device__ __forceinline__ ChunkSum sum_chunk(const Row& row, int chunk) {
    Piece piece;
    row.read(chunk, piece);
    float own = -INF;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float x[8];
        piece.get(g, x);
#pragma unroll
        for (int i = 0; i < 8; i++) own = fmaxf(own, x[i]);
    }
    float largest = block_largest(own);
    u32 id = NONE;
    if (own == largest) {
#pragma unroll
        for (int g = GROUPS - 1; g >= 0; g--) {
            float x[8];
            piece.get(g, x);
#pragma unroll
            for (int i = 7; i >= 0; i--)
                if (x[i] == largest) id = 8 * piece.group(g) + i;
        }
    }
    id = block_least(id);
    // A greedy row needs no mass, and a chunk of -INF has none.
    if (row.per_logit == 0.f || largest == -INF) return {largest, 0.f, id, 0};
    float mass[1] = {0.f};
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float x[8];
        piece.get(g, x);
#pragma unroll
        for (int i = 0; i < 8; i++) mass[0] += exp2f((x[i] - largest) * row.per_logit);
    }
    block_sums(mass);
    return {largest, mass[0], id, 0};
}

// The smallest key that stays: the largest t for which k logits, or a mass of `needed`, are >= t.
// Either condition may be off (k = 0, needed = INF); with too little of both, everything stays.
// Keys from that of `least_logit` on are searched, three at a time.
__device__ u32 find_least_key(const Row& row, int chunks, int k, float needed, float least_logit) {
    u32 low = key_of(least_logit), high = key_of(row.largest) + 1;
    while (high - low > 1) {
        u32 at[3];
        float sums[6] = {};  // counts, exact below 2^24, and masses
        for (int j = 0; j < 3; j++) at[j] = low + max(1u, (u32)((u64)(high - low) * (j + 1) / 4));
        for (int chunk = 0; chunk < chunks; chunk++) {
            Piece piece;
            row.read(chunk, piece);
#pragma unroll
            for (int g = 0; g < GROUPS; g++) {
                float x[8];
                piece.get(g, x);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    u32 key = key_of(x[i]);
                    float mass = row.mass(x[i]);
#pragma unroll
                    for (int j = 0; j < 3; j++)
                        if (key >= at[j]) sums[j] += 1.f, sums[3 + j] += mass;
                }
            }
        }
        block_sums(sums);
        for (int j = 2; j >= 0; j--) {
            if ((k > 0 && sums[j] >= (float)k) || sums[3 + j] >= needed) {
                low = at[j];
                break;
            }
            high = at[j];
        }
    }
    return low;
}

// What stays of each chunk, into masses[chunks].
__device__ void sum_kept(const Row& row, float* masses, int chunks) {
    for (int chunk = 0; chunk < chunks; chunk++) {
        Piece piece;
        row.read(chunk, piece);
        float stays[1] = {0.f};
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            float x[8];
            piece.get(g, x);
#pragma unroll
            for (int i = 0; i < 8; i++) stays[0] += row.kept_mass(x[i]);
        }
        block_sums(stays);
        if (threadIdx.x == 0) masses[chunk] = stays[0];
    }
    __syncthreads();
}

// In the warp that has it: the first id at which the mass, `passed` before this warp, exceeds `target`;
// or, should sums in another order fall short of it, the last id that stays.
__device__ u32 find_in_warp(const Row& row, const Piece& piece, double passed, double target) {
    int lane = threadIdx.x % 32;
    u32 found = NONE, last = 0;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float x[8];
        piece.get(g, x);
        float own = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = row.kept_mass(x[i]);
            own += x[i];
            if (x[i] > 0.f) last = 8 * piece.group(g) + i;
        }
        float up_to = own;
        for (int step = 1; step < 32; step *= 2) {
            float left = __shfl_up_sync(FULL, up_to, step);
            if (lane >= step) up_to += left;
        }
        float left = (float)(target - passed) - (up_to - own);  // to the target, from this lane on
        if (found == NONE && own > left) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                left -= x[i];
                if (found == NONE && x[i] > 0.f && left < 0.f) found = 8 * piece.group(g) + i;
            }
        }
        passed += (double)__shfl_sync(FULL, up_to, 31);
    }
    found = __reduce_min_sync(FULL, found);
    last = __reduce_max_sync(FULL, last);
    return found != NONE ? found : last;
}

// The first id, in order, at which the running mass exceeds u times the whole.
// masses[chunks] is what stays of each chunk, relative to the row's largest logit.
__device__ u32 draw(const Row& row, const float* masses, int chunks, double u) {
    __shared__ int chunk, chosen_warp;
    __shared__ u32 found;
    __shared__ double before_chunk;
    if (threadIdx.x == 0) chunk = chosen_warp = 0, before_chunk = 0.;
    double own = threadIdx.x < chunks ? (double)masses[threadIdx.x] : 0., total;
    double before = sum_before(own, total);
    double target = u * total;
    if (own > 0. && before <= target) atomicMax(&chunk, (int)threadIdx.x);
    __syncthreads();
    if (threadIdx.x == chunk) before_chunk = before;
    Piece piece;
    row.read(chunk, piece);
    float own_piece = 0.f;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        float x[8];
        piece.get(g, x);
#pragma unroll
        for (int i = 0; i < 8; i++) own_piece += row.kept_mass(x[i]);
    }
    own = own_piece;
    before = sum_before(own, total);
    __syncthreads();
    before += before_chunk;
    if (own > 0. && before <= target) atomicMax(&chosen_warp, (int)threadIdx.x / 32);
    // Of the warp's first lane: the mass before the warp.
    before = __shfl_sync(FULL, before, 0);
    __syncthreads();
    if (threadIdx.x / 32 == chosen_warp) {
        u32 id = find_in_warp(row, piece, before, target);
        if (threadIdx.x % 32 == 0) found = id;
    }
    __syncthreads();
    return found;
}

struct Filters {
    int top_k;
    float top_p, min_p;
};

// Sets what of the row stays, and masses[chunks] to it.
__device__ void filter(Row& row, Filters filters, float* masses, int chunks) {
    bool by_rank = filters.top_k > 0 && filters.top_k < row.size, by_mass = filters.top_p < 1.f;
    row.least_mass = filters.min_p;
    if (by_rank || by_mass) {
        double whole;
        sum_before(threadIdx.x < chunks ? (double)masses[threadIdx.x] : 0., whole);
        // Further down than this lies less than 1 - p of the mass, whatever the logits are; and
        // 2^-200 of the largest is nothing.
        float depth = -200.f;
        if (by_mass && !by_rank)
            depth = fmaxf(depth, log2f((1.f - filters.top_p) * (float)whole / row.size));
        row.least_key = find_least_key(row, chunks, by_rank ? filters.top_k : 0,
                                       by_mass ? filters.top_p * (float)whole : INF,
                                       row.largest + depth / row.per_logit);
    }
    sum_kept(row, masses, chunks);
}

// logits[n, size], rows `stride` apart -> ids[n], and last_token[rows[n]] where given.
// Parameters are per row of logits, or, with `rows`, at rows[n]; position is per row of logits.
// sums [n, chunks], grid (chunks, n).
extern "C" __global__ void __launch_bounds__(THREADS, ELEMENT_BYTES == 4 ? 2 : 3)
    sample(const Element* logits, const int* rows, const float* temperature, const int* top_k,
           const float* top_p, const float* min_p, const int* seed_lo, const int* seed_hi,
           const int* position, int* ids, int* last_token, ChunkSum* sums, int* arrived, int size,
           int stride) {
    __shared__ float masses[MAX_CHUNKS];
    __shared__ int arrivals;
    int index = blockIdx.y, chunks = gridDim.x;
    int state = rows ? rows[index] : index;
    float heat = temperature[state];
    wait_for_previous();
    let_next_start();
    Row row = {logits + (size_t)index * stride, size, stride % 8 == 0,
               heat > 0.f ? LOG2_E / heat : 0.f, 0.f, 0, 0.f};
    ChunkSum* row_sums = sums + (size_t)index * chunks;
    ChunkSum sum = sum_chunk(row, blockIdx.x);
    if (threadIdx.x == 0) {
        row_sums[blockIdx.x] = sum;
        __threadfence();
        arrivals = atomicAdd(arrived + index, 1);
        if (arrivals == chunks - 1) arrived[index] = 0;
        __threadfence();
    }
    __syncthreads();
    if (arrivals < chunks - 1) return;

    float4 mine = make_float4(-INF, 0.f, __uint_as_float(NONE), 0.f);
    if (threadIdx.x < chunks) mine = __ldcg((const float4*)(row_sums + threadIdx.x));
    row.largest = block_largest(mine.x);
    u32 id = block_least(mine.x == row.largest ? __float_as_uint(mine.z) : NONE);
    if (heat > 0.f) {
        masses[threadIdx.x] = mine.y > 0.f ? mine.y * row.mass(mine.x) : 0.f;
        Filters filters = {top_k[state], top_p[state], min_p[state]};
        bool any = filters.top_k > 0 || filters.top_p < 1.f || filters.min_p > 0.f;
        __syncthreads();
        if (any) filter(row, filters, masses, chunks);
        u32 word = random_word(seed_lo[state], seed_hi[state], position[index]);
        id = draw(row, masses, chunks, (double)word / 4294967296.);
    }
    if (threadIdx.x == 0) {
        id = min(id, (u32)size - 1);  // a row of NaN has no largest
        ids[index] = id;
        if (last_token) last_token[state] = id;
    }
}
