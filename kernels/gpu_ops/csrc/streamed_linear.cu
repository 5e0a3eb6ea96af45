// x Wᵀ for at most 16 rows of x and a large W, with what comes before and after it: RMS norm, then a
// residual sum or silu · mul. Its time is that of reading W, which has to flow without a gap.
//
// A block owns GROUPS * 8 rows of W for the whole of k, so that every block reads as much; one thread
// streams 64 * BOXES of k a stage into a ring as deep as shared memory allows. W and the norm never
// change: a ring full of them is requested before the wait for the previous kernel, and by blocks
// that start as the previous kernel's blocks end, one by one. So memory is busy across kernels.
//
// The tensor cores take x as the 16-row operand and W as the 8-column one. A stage's k is shared out
// in SLICES of 32, a slice's groups among PARTS: eight warps, which add up through shared memory.
//
// NORM: x is scaled by `norm` and, at the end, by 1 / rms(x): the same as normed rows, but rounded
// before the scaling by 1 / rms instead of after.
// AFTER = SILU_MUL: W is gate, then up; a block owns GROUPS / 2 groups of each.
//
// Compiled with GROUPS, BOXES (1, 2 or 4), STAGES, COLUMNS (groups of 8 rows of x: 1 or 2), COPIES (of W
// for 64 of k; 2 for SILU_MUL), NORM, AFTER.
#include "tensor_core.cuh"
#include "tensor_map.cuh"

enum { STORE, ADD, SILU_MUL };  // AFTER
constexpr int WARPS = 8, CONSUMERS = 32 * WARPS;
constexpr int SLICES = 2 * BOXES, PARTS = WARPS / SLICES;
constexpr int EACH = (GROUPS + PARTS - 1) / PARTS;  // groups of a warp
constexpr int GROUP_BYTES = 8 * 128;                // 8 rows of 64 k, swizzled
constexpr int W_BYTES = BOXES * GROUPS * GROUP_BYTES;
constexpr int STAGE_BYTES = W_BYTES + BOXES * COLUMNS * GROUP_BYTES;
constexpr int NORM_BYTES = BOXES * 128;
constexpr int COPY_ROWS = GROUPS * 8 / COPIES;
constexpr int OUTPUTS = AFTER == SILU_MUL ? GROUPS * 4 : GROUPS * 8;
constexpr int SUM_STRIDE = (GROUPS * 8 + 31) / 32 * 32 + 8;  // floats: no bank conflicts
static_assert(SLICES * 8 * COLUMNS * SUM_STRIDE * 4 <= STAGES * STAGE_BYTES, "sums need the ring");
static_assert(GROUPS % COPIES == 0 && (AFTER != SILU_MUL || COPIES == 2), "copies are alike");

struct Ring {
    u32 stages, norms;  // shared addresses
    u64 *full, *empty;
};

struct Weights {
    const TensorMap* map;
    const u16* norm;
    int outputs;  // rows of W
    u64 policy;
};

__device__ __forceinline__ void request_weights(const Ring& ring, const Weights& w, int step) {
    int stage = step % STAGES;
    u64* full = ring.full + stage;
    barrier_expect(full, STAGE_BYTES + (NORM ? NORM_BYTES : 0));
#pragma unroll
    for (int box = 0; box < BOXES; box++)
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            u32 to = ring.stages + stage * STAGE_BYTES + (box * COPIES + i) * COPY_ROWS * 128;
            int apart = AFTER == SILU_MUL ? w.outputs / 2 : COPY_ROWS;
            int row = (int)blockIdx.x * OUTPUTS + i * apart;
            copy_tile(to, w.map, (step * BOXES + box) * 64, row, full, w.policy);
        }
    if (NORM)
        copy(ring.norms + stage * NORM_BYTES, w.norm + step * BOXES * 64, NORM_BYTES, full,
             w.policy);
}

__device__ __forceinline__ void request_columns(const Ring& ring, const TensorMap* x, int step) {
    int stage = step % STAGES;
#pragma unroll
    for (int box = 0; box < BOXES; box++)
        copy_tile(ring.stages + stage * STAGE_BYTES + W_BYTES + box * COLUMNS * GROUP_BYTES, x,
                  (step * BOXES + box) * 64, 0, ring.full + stage);
}

__device__ __forceinline__ void stream(const Ring& ring, const Weights& w, const TensorMap* x,
                                       int steps) {
    int ahead = min(steps, STAGES);
    for (int i = 0; i < ahead; i++) request_weights(ring, w, i);
    wait_for_previous();
    let_next_start();
    for (int i = 0; i < ahead; i++) request_columns(ring, x, i);
    for (int i = ahead; i < steps; i++) {
        barrier_wait(ring.empty + i % STAGES, (i / STAGES + 1) & 1);
        request_weights(ring, w, i);
        request_columns(ring, x, i);
    }
}

__device__ __forceinline__ u32 scaled(u32 x, u32 weight, float& squares) {
    float a = low(x), b = high(x);
    squares += a * a + b * b;
    return pair(a * low(weight), b * high(weight));
}

// One warp's share of the product: x's rows g and g + 8 (sums 0, 1 and 2, 3), of its groups.
struct Share {
    float sums[EACH][4] = {};
    float squares[COLUMNS] = {};
    int slice, part, lane;

    // `norm`: of this slice's k, from the lane's first on.
    __device__ void add_stage(u32 stage, const u32* norm) {
        // Matrix lane / 8 of four, 8 x 8 each: its row, and its 16 bytes of k as they lie swizzled.
        int row = lane % 8, chunk = (slice % 2 * 4 + lane / 8) ^ row;
        u32 at = stage + row * 128 + chunk * 16;
        u32 columns[2][4] = {};
#pragma unroll
        for (int t = 0; t < COLUMNS; t++) {
            load_matrices(columns[t],
                          at + W_BYTES + (slice / 2 * COLUMNS + t) * GROUP_BYTES);
            if (NORM)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    columns[t][i] = scaled(columns[t][i], norm[4 * i], squares[t]);
        }
        const u32 first[4] = {columns[0][0], columns[1][0], columns[0][1], columns[1][1]};
        const u32 second[4] = {columns[0][2], columns[1][2], columns[0][3], columns[1][3]};
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int group = part + PARTS * j;
            if (group >= GROUPS) continue;
            u32 w[4];
            load_matrices(w, at + (slice / 2 * GROUPS + group) * GROUP_BYTES);
            multiply_add(sums[j], first, w[0], w[1]);
            multiply_add(sums[j], second, w[2], w[3]);
        }
    }

    // To sums [SLICES][8 * COLUMNS][SUM_STRIDE] and squares [SLICES][8 * COLUMNS].
    __device__ void lay_down(float* all_sums, float* all_squares) {
        int g = lane / 4, c = lane % 4;
        float* to = all_sums + (slice * 8 * COLUMNS + g) * SUM_STRIDE + 2 * c;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int group = part + PARTS * j;
            if (group >= GROUPS) continue;
            *(float2*)(to + group * 8) = make_float2(sums[j][0], sums[j][1]);
            if (COLUMNS == 2)
                *(float2*)(to + 8 * SUM_STRIDE + group * 8) = make_float2(sums[j][2], sums[j][3]);
        }
        if (!NORM || part > 0) return;
#pragma unroll
        for (int t = 0; t < COLUMNS; t++) {
            squares[t] += __shfl_xor_sync(FULL, squares[t], 1);
            squares[t] += __shfl_xor_sync(FULL, squares[t], 2);
            if (c == 0) all_squares[slice * 8 * COLUMNS + 8 * t + g] = squares[t];
        }
    }
};

// Two outputs of row `column` of x, of all slices.
__device__ __forceinline__ float2 total(const float* sums, int column, int output) {
    float2 all = make_float2(0.f, 0.f);
#pragma unroll
    for (int s = 0; s < SLICES; s++) {
        float2 part = *(const float2*)(sums + (s * 8 * COLUMNS + column) * SUM_STRIDE + output);
        all.x += part.x, all.y += part.y;
    }
    return all;
}

__device__ __forceinline__ float inverse_rms(const float* squares, int column, int size, float eps) {
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < SLICES; s++) sum += squares[s * 8 * COLUMNS + column];
    return rsqrtf(sum / (float)size + eps);
}

__device__ __forceinline__ float rounded(float x) { return low(pair(x, 0.f)); }
__device__ __forceinline__ float silu_mul(float gate, float up) {
    gate = rounded(gate);
    return gate / (1.f + __expf(-gate)) * rounded(up);
}

// The block's outputs to out [rows, width].
__device__ __forceinline__ void write(const float* sums, const float* squares, u16* out, int rows,
                                      int width, int size, float eps) {
    for (int item = threadIdx.x; item < rows * (OUTPUTS / 2); item += CONSUMERS) {
        int column = item / (OUTPUTS / 2), output = item % (OUTPUTS / 2) * 2;
        int at = (int)blockIdx.x * OUTPUTS + output;
        if (at >= width) continue;
        u32* to = (u32*)(out + (size_t)column * width + at);
        float scale = NORM ? inverse_rms(squares, column, size, eps) : 1.f;
        float2 x = total(sums, column, output);
        x.x *= scale, x.y *= scale;
        if (AFTER == SILU_MUL) {
            float2 up = total(sums, column, OUTPUTS + output);
            x = make_float2(silu_mul(x.x, up.x * scale), silu_mul(x.y, up.y * scale));
        } else if (AFTER == ADD) {
            x = make_float2(rounded(x.x) + low(*to), rounded(x.y) + high(*to));
        }
        *to = pair(x.x, x.y);
    }
}

// weight [outputs, steps * 64 * BOXES], its map's box [COPY_ROWS, 64]; x [rows, ...], its map's box
// [8 * COLUMNS, 64]; norm of x's size. Out [rows, outputs], for ADD added to it, for SILU_MUL
// [rows, outputs / 2]. Grid (width / OUTPUTS rounded up), CONSUMERS + 32 threads, and
// STAGES * (STAGE_BYTES + NORM_BYTES) + 1024 bytes shared.
extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1)
    streamed_linear(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
                    const u16* norm, u16* out, int rows, int outputs, int steps, float eps) {
    extern __shared__ unsigned char memory[];
    __shared__ u64 full[STAGES], empty[STAGES];
    __shared__ float squares[SLICES * 8 * COLUMNS];
    // Swizzling counts from multiples of 1024 bytes.
    u32 base = shared_address(memory), stages = (base + 1023) / 1024 * 1024;
    unsigned char* ring_at = memory + (stages - base);
    Ring ring = {stages, stages + STAGES * STAGE_BYTES, full, empty};
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + s, 1);
            barrier_init(empty + s, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) stream(ring, {&weight, norm, outputs, read_once()}, &x, steps);
        return;
    }
    wait_for_previous();  // of what these threads read themselves, and write
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Share share = {};
    share.slice = warp % SLICES, share.part = warp / SLICES, share.lane = lane;
    const unsigned char* norms = ring_at + STAGES * STAGE_BYTES + share.slice * 64 + lane % 4 * 4;
    for (int i = 0; i < steps; i++) {
        int stage = i % STAGES;
        barrier_wait(full + stage, i / STAGES & 1);
        share.add_stage(stages + stage * STAGE_BYTES, (const u32*)(norms + stage * NORM_BYTES));
        __syncwarp();
        if (lane == 0) barrier_arrive(empty + stage);
    }
    // All warps must be done with the ring before the sums take its place.
    asm volatile("bar.sync 1, 256;" ::: "memory");
    share.lay_down((float*)ring_at, squares);
    asm volatile("bar.sync 1, 256;" ::: "memory");
    int width = AFTER == SILU_MUL ? outputs / 2 : outputs;
    write((const float*)ring_at, squares, out, rows, width, steps * 64 * BOXES, eps);
}
