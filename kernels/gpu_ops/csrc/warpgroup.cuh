// Products of a warpgroup with both operands in shared memory (wgmma, sm_90a): d [64, N] += a bᵀ over
// 16 of k. `a` [64, 16] and `b` [N, 16] lie in rows of 64 bf16 as the tensor copies write them with
// 128-byte swizzling, groups of eight rows 1024 bytes apart.
//
// Lane l of warp w holds of d the rows 16 w + l / 4 (d[4 j], d[4 j + 1]) and 8 further on (d[4 j + 2],
// d[4 j + 3]), at columns 8 j + 2 (l % 4) and the next.
#pragma once
#include "device.cuh"

// Of an operand at a shared address; its k advances by 2 for 16 elements.
__device__ __forceinline__ u64 operand(u32 address) {
    constexpr u64 SWIZZLED_128 = 1ull << 62, EIGHT_ROWS = 64ull << 32, UNUSED = 1ull << 16;
    return SWIZZLED_128 | EIGHT_ROWS | UNUSED | (address & 0x3ffff) >> 4;
}
__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void close_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int OPEN>
__device__ __forceinline__ void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(OPEN) : "memory");
}

// d is COLUMNS / 2 floats: a product for each number of columns, whose operands have to be spelled out.
#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32    \
    NAMES_16 ", " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48    \
    NAMES_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64    \
    NAMES_48 ", " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_80    \
    NAMES_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES_96    \
    NAMES_80 ", " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FLOATS_8(i)                                                                           \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define FLOATS_16(i) FLOATS_8(i), FLOATS_8(i + 8)
#define LIST_16 FLOATS_16(0)
#define LIST_32 LIST_16, FLOATS_16(16)
#define LIST_48 LIST_32, FLOATS_16(32)
#define LIST_64 LIST_48, FLOATS_16(48)
#define LIST_80 LIST_64, FLOATS_16(64)
#define LIST_96 LIST_80, FLOATS_16(80)
#define PRODUCT(COLUMNS, SUMS, A, B)                                                    \
    __device__ __forceinline__ void multiply_add_async(float (&d)[SUMS], u64 a, u64 b) {    \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32.bf16.bf16 {"     \
                     NAMES_##SUMS "}, %" #A ", %" #B ", 1, 1, 1, 0, 0;"                     \
                     : LIST_##SUMS                                                          \
                     : "l"(a), "l"(b));                                                     \
    }
PRODUCT(32, 16, 16, 17)
PRODUCT(64, 32, 32, 33)
PRODUCT(96, 48, 48, 49)
PRODUCT(128, 64, 64, 65)
PRODUCT(160, 80, 80, 81)
PRODUCT(192, 96, 96, 97)
#undef PRODUCT
