// Tensor maps, as gpu_ops/cuda_tensor_map.py makes them, and the copy of a tile that one describes.
#pragma once
#include "pipeline.cuh"

struct __align__(64) TensorMap {
    u64 words[16];
};

// The map's box at element `k` of row `row`; what lies outside the tensor arrives as zeros.
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, int k, int row,
                                          u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(k), "r"(row), "r"(shared_address(barrier))
        : "memory");
}
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, int k, int row, u64* barrier,
                                          u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(k), "r"(row), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
