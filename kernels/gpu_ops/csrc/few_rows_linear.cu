// x Wᵀ for few rows of x, with what comes before and after it: RMS norm, then a residual sum or
// silu · mul. For a decode step of few sequences, whose time is that of reading W.
//
// A block owns 16 rows of W and brings them into shared memory as one bulk copy each, before it
// waits for the previous kernel: W never changes, so its reading hides behind what ran before. Then
// 8 warps share SIZE out in blocks of 32, each with W as the tensor cores' 16-row operand and x as the
// 8-column one, and add up through shared memory. The tensor cores sum over k in any order, so a
// lane takes 8 consecutive k of a row at once: 16-byte accesses, no shuffles.
//
// NORM: x is scaled by `norm` and, at the end, by 1 / rms(x): the same as normed rows, but rounded
// before the scaling by 1 / rms instead of after.
//
// Compiled with SIZE (of x's rows, a multiple of 32), COLUMNS (groups of 8 rows of x), NORM and AFTER.
#include "pipeline.cuh"
#include "tensor_core.cuh"

enum { STORE, ADD, SILU_MUL };  // AFTER
constexpr int WARPS = 8;
constexpr int ROWS = 16;
constexpr int ROW_STRIDE = SIZE * 2 + 64;  // the pad keeps the rows of a 16-byte access apart
constexpr int BLOCKS = SIZE / 32;
constexpr int EACH = (BLOCKS + WARPS - 1) / WARPS;

struct Shared {
    u64 full;
    float squares[WARPS][8 * COLUMNS];
    float4 sums[WARPS][COLUMNS][32];
};

// Which row of W is row r of this block: for SILU_MUL 8 of the gate, then the same 8 of up.
__device__ __forceinline__ size_t weight_row(int r, int outputs) {
    if (AFTER != SILU_MUL) return (size_t)blockIdx.x * ROWS + r;
    return (size_t)blockIdx.x * 8 + r % 8 + (r < 8 ? 0 : outputs / 2);
}

__device__ __forceinline__ u32 scaled(u32 x, u32 weight, float& squares) {
    float a = low(x), b = high(x);
    squares += a * a + b * b;
    return pair(a * low(weight), b * high(weight));
}

__device__ __forceinline__ float rounded(float x) { return low(pair(x, 0.f)); }

// Outputs `row` and `row + 8` of the block for row `column` of x.
__device__ __forceinline__ void write_two(u16* out, int column, int row, int outputs, float first,
                                          float second) {
    if (AFTER == SILU_MUL) {
        float gate = rounded(first);
        size_t at = (size_t)column * (outputs / 2) + blockIdx.x * 8 + row;
        out[at] = bf16(gate / (1.f + __expf(-gate)) * rounded(second));
        return;
    }
    u16* at = out + (size_t)column * outputs + blockIdx.x * ROWS + row;
    if (AFTER == ADD) first = rounded(first) + low(at[0]), second = rounded(second) + low(at[8]);
    at[0] = bf16(first);
    at[8] = bf16(second);
}

// x[rows, SIZE], weight[outputs, SIZE], norm[SIZE] -> out[rows, outputs], for ADD added to it, for
// SILU_MUL [rows, outputs / 2]. rows <= 8 * COLUMNS; outputs a multiple of 16. Grid (outputs / 16),
// 256 threads, ROWS * ROW_STRIDE + sizeof(Shared) bytes shared.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    few_rows_linear(const u16* x, const u16* weight, const u16* norm, u16* out, int rows,
                    int outputs, float eps) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared* shared = (Shared*)(memory + ROWS * ROW_STRIDE);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    if (threadIdx.x == 0) {
        barrier_init(&shared->full, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        barrier_expect(&shared->full, ROWS * SIZE * 2);
        u64 policy = read_once();
        u32 to = shared_address(memory);
#pragma unroll 4
        for (int r = 0; r < ROWS; r++)
            copy(to + r * ROW_STRIDE, weight + weight_row(r, outputs) * SIZE, SIZE * 2,
                 &shared->full, policy);
    }
    uint4 scale[EACH];
    if (NORM)
        for (int i = 0; i < EACH; i++)
            if (warp + WARPS * i < BLOCKS)
                scale[i] = ((const uint4*)norm)[(warp + WARPS * i) * 4 + c];
    __syncthreads();
    wait_for_previous();
    let_next_start();

    uint4 columns[COLUMNS][EACH] = {};
    float squares[COLUMNS] = {};
#pragma unroll
    for (int t = 0; t < COLUMNS; t++)
#pragma unroll
        for (int i = 0; i < EACH; i++)
            if (8 * t + g < rows && warp + WARPS * i < BLOCKS)
                columns[t][i] = ((const uint4*)(x + (size_t)(8 * t + g) * SIZE))
                    [(warp + WARPS * i) * 4 + c];
    if (NORM) {
#pragma unroll
        for (int t = 0; t < COLUMNS; t++) {
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                uint4& v = columns[t][i];
                if (warp + WARPS * i < BLOCKS)
                    v = make_uint4(scaled(v.x, scale[i].x, squares[t]),
                                   scaled(v.y, scale[i].y, squares[t]),
                                   scaled(v.z, scale[i].z, squares[t]),
                                   scaled(v.w, scale[i].w, squares[t]));
            }
            squares[t] += __shfl_xor_sync(FULL, squares[t], 1);
            squares[t] += __shfl_xor_sync(FULL, squares[t], 2);
            if (c == 0) shared->squares[warp][8 * t + g] = squares[t];
        }
    }
    barrier_wait(&shared->full, 0);
    __syncwarp();
    float sums[COLUMNS][4] = {};
    const unsigned char* rows_at = memory + g * ROW_STRIDE + c * 16;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int block = warp + WARPS * i;
        if (block >= BLOCKS) continue;
        uint4 a = *(const uint4*)(rows_at + block * 64);
        uint4 b = *(const uint4*)(rows_at + 8 * ROW_STRIDE + block * 64);
        const u32 first[4] = {a.x, b.x, a.y, b.y}, second[4] = {a.z, b.z, a.w, b.w};
#pragma unroll
        for (int t = 0; t < COLUMNS; t++) {
            multiply_add(sums[t], first, columns[t][i].x, columns[t][i].y);
            multiply_add(sums[t], second, columns[t][i].z, columns[t][i].w);
        }
    }
#pragma unroll
    for (int t = 0; t < COLUMNS; t++)
        shared->sums[warp][t][lane] = make_float4(sums[t][0], sums[t][1], sums[t][2], sums[t][3]);
    __syncthreads();
    if (warp >= COLUMNS) return;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    float inverse[2] = {1.f, 1.f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        float4 part = shared->sums[w][warp][lane];
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    int column = 8 * warp + 2 * c;
    if (NORM)
        for (int j = 0; j < 2; j++) {
            float sum = 0.f;
            for (int w = 0; w < WARPS; w++) sum += shared->squares[w][column + j];
            inverse[j] = rsqrtf(sum / SIZE + eps);
        }
    if (column < rows)
        write_two(out, column, g, outputs, total.x * inverse[0], total.z * inverse[0]);
    if (column + 1 < rows)
        write_two(out, column + 1, g, outputs, total.y * inverse[1], total.w * inverse[1]);
}
