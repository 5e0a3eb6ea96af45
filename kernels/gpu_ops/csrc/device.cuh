// What every kernel here uses: bf16 in pairs, reductions, programmatic dependent launch.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define INF __int_as_float(0x7f800000)
constexpr u32 FULL = 0xffffffffu;

// Programmatic dependent launch; cuda_launch.py has the two rules.
__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void let_next_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// A pair of bf16 lies in a u32: the first in the low half.
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ u32 pair(float first, float second) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
}
__device__ __forceinline__ u16 bf16(float value) { return (u16)pair(value, 0.f); }

// Eight bf16 in 16 bytes.
__device__ __forceinline__ void unpack(uint4 v, float (&x)[8]) {
    x[0] = low(v.x), x[1] = high(v.x), x[2] = low(v.y), x[3] = high(v.y);
    x[4] = low(v.z), x[5] = high(v.z), x[6] = low(v.w), x[7] = high(v.w);
}
__device__ __forceinline__ uint4 pack(const float (&x)[8]) {
    return make_uint4(pair(x[0], x[1]), pair(x[2], x[3]), pair(x[4], x[5]), pair(x[6], x[7]));
}

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(FULL, x, step);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
    for (int step = 16; step; step >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, step));
    return x;
}

// A tensor's element is bf16, or float where the program is compiled with ELEMENT_BYTES = 4. Group g
// of eight elements is the unit of access; `round8` rounds to what a store and a load would give.
#if ELEMENT_BYTES == 4
typedef float Element;
__device__ __forceinline__ void load8(const Element* from, size_t g, float (&x)[8]) {
    float4 a = ((const float4*)from)[2 * g], b = ((const float4*)from)[2 * g + 1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
__device__ __forceinline__ void store8(Element* to, size_t g, const float (&x)[8]) {
    ((float4*)to)[2 * g] = make_float4(x[0], x[1], x[2], x[3]);
    ((float4*)to)[2 * g + 1] = make_float4(x[4], x[5], x[6], x[7]);
}
__device__ __forceinline__ void round8(float (&)[8]) {}
#else
typedef u16 Element;
__device__ __forceinline__ void load8(const Element* from, size_t g, float (&x)[8]) {
    unpack(((const uint4*)from)[g], x);
}
__device__ __forceinline__ void store8(Element* to, size_t g, const float (&x)[8]) {
    ((uint4*)to)[g] = pack(x);
}
__device__ __forceinline__ void round8(float (&x)[8]) { unpack(pack(x), x); }
#endif

// The sum over all threads of a block of at most 1024, in every thread; always in the same order.
// `scratch` is shared, 32 floats; the caller keeps others from using it before the next barrier.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    int warps = blockDim.x / 32;
    x = warp_sum(x);
    if (warps == 1) return x;
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float part = threadIdx.x % 32 < warps ? scratch[threadIdx.x % 32] : 0.f;
    return warp_sum(part);
}
