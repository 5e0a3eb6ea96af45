// x Wᵀ for some dozens of rows of x, with what comes before and after it.
//
// NORMED: the rows of x are yet to be divided by the root of their mean square. `squares_in` has, by
// tile of the product that made them and by row, sums of squares; the division comes last.
// AFTER = SILU_MUL: the weight is gate, then up. AFTER = ADD: the product is added to the residual,
// and out is the sum times the next norm's weight, with its `squares_out`.
//
// A block owns 64 rows of W and COLUMNS rows of x, one product of a warpgroup at a time over 64 of k.
// SPLITS blocks, a cluster, share k out and add up through each other's shared memory. One thread
// streams tiles into a ring. W never changes, so the ring's W halves are requested before the wait
// for the previous kernel: weights arrive while other kernels run.
//
// The tile of W is [4, 2, 8] rows by its tensor map: 64 rows in a row, or, for SILU_MUL, 8 of the gate
// and the same 8 of up in turn, so that one lane's sums are a gate and its up.
//
// Compiled for sm_90a with COLUMNS (a multiple of 32 up to 192), SPLITS (a power of two up to 8),
// STAGES, NORMED, AFTER.
#include "tensor_map.cuh"
#include "warpgroup.cuh"

#define STORE 0
#define ADD 1
#define SILU_MUL 2

constexpr int ROWS = 64, BLOCK_K = 64;
constexpr int W_BYTES = ROWS * BLOCK_K * 2;
constexpr int X_BYTES = COLUMNS * BLOCK_K * 2;
constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
constexpr int CONSUMERS = 128;
constexpr int SUM_STRIDE = ROWS + 4;  // floats between columns: no bank conflicts
constexpr int OUTPUTS = AFTER == SILU_MUL ? ROWS / 2 : ROWS;

__device__ __forceinline__ void copy_weights(u32 to, const TensorMap* map, int k, int tile,
                                             u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %3, %4}], [%5];" ::"r"(to),
        "l"(map), "r"(k), "r"(0), "r"(tile * 4), "r"(shared_address(barrier))
        : "memory");
}

__device__ __forceinline__ int split_of_block() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return SPLITS > 1 ? rank : 0;
}
// All threads of the cluster's blocks; what they wrote to shared memory is seen after it.
__device__ __forceinline__ void meet() {
    if (SPLITS == 1) {
        __syncthreads();
        return;
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ float4 load_of(u32 address, int split) {
    if (SPLITS > 1)
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(split));
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address));
    return x;
}

// Eight sums over all splits, from float `at` of the sums on.
__device__ __forceinline__ void add_splits(u32 sums, int at, float (&x)[8]) {
    for (int i = 0; i < 8; i++) x[i] = 0.f;
#pragma unroll
    for (int split = 0; split < SPLITS; split++) {
        float4 a = load_of(sums + at * 4, split), b = load_of(sums + at * 4 + 16, split);
        x[0] += a.x, x[1] += a.y, x[2] += a.z, x[3] += a.w;
        x[4] += b.x, x[5] += b.y, x[6] += b.z, x[7] += b.w;
    }
}

__device__ __forceinline__ void stream(u32 stages, u64* full, u64* empty, const TensorMap* weight,
                                       const TensorMap* x, int tile, int column, int split,
                                       int blocks) {
    int k0 = split * blocks * BLOCK_K;
    int ahead = min(blocks, STAGES);
    for (int i = 0; i < ahead; i++) {
        barrier_expect(full + i, STAGE_BYTES);
        copy_weights(stages + i * STAGE_BYTES, weight, k0 + i * BLOCK_K, tile, full + i);
    }
    wait_for_previous();
    let_next_start();
    for (int i = 0; i < ahead; i++)
        copy_tile(stages + i * STAGE_BYTES + W_BYTES, x, k0 + i * BLOCK_K, column, full + i);
    for (int i = ahead; i < blocks; i++) {
        int stage = i % STAGES;
        u32 at = stages + stage * STAGE_BYTES;
        barrier_wait(empty + stage, (i / STAGES + 1) & 1);
        barrier_expect(full + stage, STAGE_BYTES);
        copy_weights(at, weight, k0 + i * BLOCK_K, tile, full + stage);
        copy_tile(at + W_BYTES, x, k0 + i * BLOCK_K, column, full + stage);
    }
}

__device__ __forceinline__ void multiply(float (&sums)[COLUMNS / 2], u32 stages, u64* full,
                                         u64* empty, int blocks) {
    for (int i = 0; i < COLUMNS / 2; i++) sums[i] = 0.f;
    for (int i = 0; i < blocks; i++) {
        int stage = i % STAGES;
        barrier_wait(full + stage, i / STAGES & 1);
        u64 a = operand(stages + stage * STAGE_BYTES);
        u64 b = operand(stages + stage * STAGE_BYTES + W_BYTES);
        begin_products();
#pragma unroll
        for (int k = 0; k < BLOCK_K / 16; k++) multiply_add_async(sums, a + 2 * k, b + 2 * k);
        close_products();
        // The products before these are done: their stage is free.
        wait_products<1>();
        if (i > 0 && threadIdx.x % 32 == 0) barrier_arrive(empty + (i - 1) % STAGES);
    }
    wait_products<0>();
}

// The block's sums, transposed: column by column.
__device__ __forceinline__ void lay_down(const float (&sums)[COLUMNS / 2], float* to) {
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; j++) {
        float* at = to + (8 * j + column) * SUM_STRIDE + row;
        at[0] = sums[4 * j];
        at[SUM_STRIDE] = sums[4 * j + 1];
        at[8] = sums[4 * j + 2];
        at[SUM_STRIDE + 8] = sums[4 * j + 3];
    }
}

struct Norm {
    const float* squares_in;  // [parts_in, rows]
    int parts_in;
    float size_in, eps;  // of x's rows
    u16* residual;       // [rows, outputs], read and written
    const u16* weight;   // [outputs], of the next norm
    float* squares_out;  // [outputs / ROWS, rows]
};

// What the block's columns are multiplied by, into `scales`.
__device__ __forceinline__ void load_scales(float* scales, const Norm& norm, int column0, int rows) {
    for (int column = threadIdx.x; column < COLUMNS; column += CONSUMERS) {
        int row = min(column0 + column, rows - 1);
        float sum = 0.f;
#pragma unroll 16
        for (int part = 0; part < norm.parts_in; part++) sum += norm.squares_in[part * rows + row];
        scales[column] = rsqrtf(sum / norm.size_in + norm.eps);
    }
}

// Eight of the residual grow by x; x becomes what the next product reads. Returns the sum of squares
// of a row's 64, in the first of the eight lanes that share a row.
__device__ __forceinline__ float add_to_residual(float (&x)[8], u16* residual, const u16* weight) {
    float before[8], scale[8], squares = 0.f;
    unpack(*(const uint4*)residual, before);
    unpack(*(const uint4*)weight, scale);
    unpack(pack(x), x);  // rounded, as the product apart would be
    for (int i = 0; i < 8; i++) x[i] += before[i];
    uint4 sum = pack(x);
    *(uint4*)residual = sum;
    unpack(sum, x);
    for (int i = 0; i < 8; i++) squares += x[i] * x[i], x[i] *= scale[i];
    u32 lanes = 0xffu << (threadIdx.x % 32 / 8 * 8);
    for (int step = 4; step; step >>= 1) squares += __shfl_xor_sync(lanes, squares, step);
    return squares;
}

// This block's share of the columns, to out[rows, outputs].
__device__ __forceinline__ void write(u32 sums, const float* scales, u16* out, const Norm& norm,
                                      int tile, int column0, int rows, int outputs, int split) {
    constexpr int OWN = COLUMNS / SPLITS, GROUPS = OUTPUTS / 8;
    for (int item = threadIdx.x; item < OWN * GROUPS; item += CONSUMERS) {
        int column = split * OWN + item / GROUPS, group = item % GROUPS, row = column0 + column;
        if (row >= rows) break;
        float x[8];
        int at = column * SUM_STRIDE + group * (AFTER == SILU_MUL ? 16 : 8);
        add_splits(sums, at, x);
        if (NORMED)
            for (int i = 0; i < 8; i++) x[i] *= scales[column];
        size_t to = (size_t)row * outputs + tile * OUTPUTS + group * 8;
        if (AFTER == SILU_MUL) {
            float up[8];
            add_splits(sums, at + 8, up);
            if (NORMED)
                for (int i = 0; i < 8; i++) up[i] *= scales[column];
            unpack(pack(up), up);  // rounded, as the product and its silu apart would be
            unpack(pack(x), x);
            for (int i = 0; i < 8; i++) x[i] = x[i] / (1.f + __expf(-x[i])) * up[i];
        } else if (AFTER == ADD) {
            const u16* weight = norm.weight + tile * OUTPUTS + group * 8;
            float squares = add_to_residual(x, norm.residual + to, weight);
            if (group == 0) norm.squares_out[tile * rows + row] = squares;
        }
        *(uint4*)(out + to) = pack(x);
    }
}

// Grid (outputs / OUTPUTS * SPLITS, rows / COLUMNS rounded up), clusters of SPLITS, 160 threads.
// `outputs` is the width of out; `blocks` of 64 k to each split.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32)
    decode_linear(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
                  u16* out, int rows, int outputs, int blocks, const float* squares_in, int parts_in,
                  float size_in, float eps, u16* residual, const u16* next_norm,
                  float* squares_out) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ float scales[COLUMNS];
    // Swizzling counts from multiples of 1024 bytes.
    u32 stages = (shared_address(memory) + 1023) / 1024 * 1024;
    float* sums_at = (float*)(memory + (stages - shared_address(memory)));
    Norm norm = {squares_in, parts_in, size_in, eps, residual, next_norm, squares_out};
    int split = split_of_block(), tile = blockIdx.x / SPLITS, column = blockIdx.y * COLUMNS;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, CONSUMERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < CONSUMERS) {
        float sums[COLUMNS / 2];
        if (NORMED || AFTER == ADD) wait_for_previous();  // of what these threads read themselves
        if (NORMED) load_scales(scales, norm, column, rows);
        multiply(sums, stages, full, empty, blocks);
        // All four warps must be done with the ring before the sums take its place.
        asm volatile("bar.sync 1, 128;" ::: "memory");
        lay_down(sums, sums_at);
    } else if (threadIdx.x == CONSUMERS) {
        stream(stages, full, empty, &weight, &x, tile, column, split, blocks);
    }
    __syncwarp();
    meet();
    if (threadIdx.x < CONSUMERS)
        write(stages, scales, out, norm, tile, column, rows, outputs, split);
    if (SPLITS > 1) meet();  // no block leaves while others read its sums
}
