// q and k heads: RMS norm, rotation; k and v heads: stored into their pages.
//
// HEAD_DIM / 16 lanes work on one head: lane i holds dimensions [8 i, 8 i + 8) and their partners
// HEAD_DIM / 2 further on, so a rotation needs no exchange. A block takes blockDim.x / LANES
// consecutive (token, head) pairs.
#include "device.cuh"

constexpr int LANES = HEAD_DIM / 16;

// The lanes of a warp that work on this lane's head: heads diverge, so sums name their lanes.
__device__ __forceinline__ u32 head_mask() {
    int first = threadIdx.x % 32 / LANES * LANES;
    return ((1u << LANES) - 1) << first;
}

__device__ __forceinline__ float head_sum(float x, u32 mask) {
#pragma unroll
    for (int step = LANES / 2; step; step >>= 1) x += __shfl_xor_sync(mask, x, step);
    return x;
}

__device__ __forceinline__ void normalise(float (&a)[8], float (&b)[8], const Element* weight,
                                          u32 mask, int lane, float eps) {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) squares += a[i] * a[i] + b[i] * b[i];
    float inverse = rsqrtf(head_sum(squares, mask) / HEAD_DIM + eps);
    float wa[8], wb[8];
    load8(weight, lane, wa);
    load8(weight, lane + LANES, wb);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] *= inverse * wa[i], b[i] *= inverse * wb[i];
    // The reference rounds here; so that greedy ids agree, so do we.
    round8(a);
    round8(b);
}

__device__ __forceinline__ void rotate(float (&a)[8], float (&b)[8], const float (&cosine)[8],
                                       const float (&sine)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float x = a[i], y = b[i];
        a[i] = x * cosine[i] - y * sine[i];
        b[i] = y * cosine[i] + x * sine[i];
    }
}

__device__ __forceinline__ void load8_f32(const float* from, int g, float (&x)[8]) {
    float4 a = ((const float4*)from)[2 * g], b = ((const float4*)from)[2 * g + 1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// qkv[n, (q_heads + 2 kv_heads) * HEAD_DIM] -> q[n, q_heads * HEAD_DIM], and the caches at slots[n].
// Norms where weights are given. cos_sin[positions, HEAD_DIM]: cosines, then sines.
// positions and slots were written at least two kernels ago: they are read before the wait.
extern "C" __global__ void qk_norm_rope_store(const Element* qkv, const Element* q_weight,
                                              const Element* k_weight, const float* cos_sin,
                                              const int* positions, const int* slots, Element* q,
                                              Element* k_cache, Element* v_cache, int tokens,
                                              int q_heads, int kv_heads, float eps) {
    int heads = q_heads + 2 * kv_heads;
    int index = (int)((blockIdx.x * blockDim.x + threadIdx.x) / LANES);
    bool inside = index < tokens * heads;
    int token = inside ? index / heads : 0, head = inside ? index % heads : 0;
    int lane = threadIdx.x % LANES;
    float cosine[8], sine[8];
    const float* angles = cos_sin + (size_t)positions[token] * HEAD_DIM;
    load8_f32(angles, lane, cosine);
    load8_f32(angles, lane + LANES, sine);
    size_t slot = slots[token];
    wait_for_previous();
    let_next_start();
    if (!inside) return;
    const Element* in = qkv + (size_t)index * HEAD_DIM;
    bool is_value = head >= q_heads + kv_heads, is_query = head < q_heads;
    float a[8], b[8];
    load8(in, lane, a);
    load8(in, lane + LANES, b);
    if (!is_value) {
        if (q_weight) normalise(a, b, is_query ? q_weight : k_weight, head_mask(), lane, eps);
        rotate(a, b, cosine, sine);
    }
    Element* out;
    if (is_query) {
        out = q + ((size_t)token * q_heads + head) * HEAD_DIM;
    } else {
        int kv_head = head - q_heads - (is_value ? kv_heads : 0);
        out = (is_value ? v_cache : k_cache) + (slot * kv_heads + kv_head) * HEAD_DIM;
    }
    store8(out, lane, a);
    store8(out, lane + LANES, b);
}
