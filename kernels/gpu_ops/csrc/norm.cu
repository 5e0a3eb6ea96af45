// RMS norm with what comes before it: nothing, a residual sum (of one tensor or of a product's parts), or
// an embedding look-up.
//
// One block a row; a thread holds VECTORS groups of 8 elements, group g at 8 * (thread + g * threads),
// so a row is read once and lives in registers. size is a multiple of 8 and at most
// 8 * VECTORS * threads. The sum of squares is float32, in an order that only size decides.
#include "device.cuh"

enum Before { NOTHING, ADD, LOOK_UP };

struct Row {
    const Element* at;
    __device__ void load(int group, float (&x)[8]) const { load8(at, group, x); }
};

// A row of a product whose k was shared out: the parts add up, always in the same order, to a sum that
// is rounded as the whole product's would be.
struct Parts {
    const float* at;
    int count;
    size_t apart;  // elements
    __device__ void load(int group, float (&x)[8]) const {
        for (int i = 0; i < 8; i++) x[i] = 0.f;
#pragma unroll 4
        for (int part = 0; part < count; part++) {
            const float4* from = (const float4*)(at + part * apart) + 2 * group;
            float4 a = from[0], b = from[1];
            x[0] += a.x, x[1] += a.y, x[2] += a.z, x[3] += a.w;
            x[4] += b.x, x[5] += b.y, x[6] += b.z, x[7] += b.w;
        }
        round8(x);
    }
};

template <int BEFORE, class In>
__device__ __forceinline__ void norm_row(const In& in, Element* residual,
                                         const Element* weight, Element* out, int groups,
                                         float eps) {
    __shared__ float scratch[32];
    float x[VECTORS][8];
    float squares = 0.f;
#pragma unroll
    for (int g = 0; g < VECTORS; g++) {
        int at = threadIdx.x + g * blockDim.x;
        if (at >= groups) continue;
        in.load(at, x[g]);
        if (BEFORE == ADD) {
            float r[8];
            load8(residual, at, r);
#pragma unroll
            for (int i = 0; i < 8; i++) x[g][i] += r[i];
            round8(x[g]);  // the sum is rounded before it is normed
        }
        if (BEFORE != NOTHING) store8(residual, at, x[g]);
#pragma unroll
        for (int i = 0; i < 8; i++) squares += x[g][i] * x[g][i];
    }
    float inverse = rsqrtf(block_sum(squares, scratch) / (float)(groups * 8) + eps);
#pragma unroll
    for (int g = 0; g < VECTORS; g++) {
        int at = threadIdx.x + g * blockDim.x;
        if (at >= groups) continue;
        float w[8];
        load8(weight, at, w);
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] *= x[g][i] * inverse;
        store8(out, at, w);
    }
}

// out[n, size] = norm(x[n, size]); rows of x are `stride` elements apart.
extern "C" __global__ void rms_norm(const Element* x, const Element* weight, Element* out, int size,
                                    int stride, float eps) {
    wait_for_previous();
    let_next_start();
    size_t row = blockIdx.x;
    norm_row<NOTHING>(Row{x + row * stride}, nullptr, weight, out + row * size, size / 8, eps);
}

// residual += x; out = norm(residual).
extern "C" __global__ void add_rms_norm(const Element* x, Element* residual, const Element* weight,
                                        Element* out, int size, float eps) {
    wait_for_previous();
    let_next_start();
    size_t at = (size_t)blockIdx.x * size;
    norm_row<ADD>(Row{x + at}, residual + at, weight, out + at, size / 8, eps);
}

// residual += the sum of parts[count, n, size]; out = norm(residual).
extern "C" __global__ void add_parts_rms_norm(const float* parts, int count, Element* residual,
                                              const Element* weight, Element* out, int size,
                                              float eps) {
    wait_for_previous();
    let_next_start();
    size_t at = (size_t)blockIdx.x * size;
    Parts in = {parts + at, count, (size_t)gridDim.x * size};
    norm_row<ADD>(in, residual + at, weight, out + at, size / 8, eps);
}

// residual = table[id]; out = norm(residual). An id outside the table reads row 0.
extern "C" __global__ void embed_rms_norm(const int* ids, const Element* table,
                                          const Element* weight, Element* residual, Element* out,
                                          int size, int vocabulary, float eps) {
    wait_for_previous();
    let_next_start();
    u32 id = ids[blockIdx.x];
    if (id >= (u32)vocabulary) id = 0;
    size_t at = (size_t)blockIdx.x * size;
    norm_row<LOOK_UP>(Row{table + (size_t)id * size}, residual + at, weight, out + at, size / 8, eps);
}
