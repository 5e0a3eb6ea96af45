// Some of the next product's weights are brought into L2 by the kernel before it, while memory would be idle:
// by blocks of a small kernel that do nothing else, or as attention ends. One piece in several, spread over the weights, so that the product finds
// a part of each stage there and still keeps memory busy from its first stage to its last.
#pragma once
#include "device.cuh"

constexpr int PIECE_BYTES = 1024;

struct Ahead {
    const unsigned char* weights;
    int pieces, apart;  // bytes between their beginnings
};

__device__ __forceinline__ void fetch_pieces(const Ahead& ahead, int first, int step) {
    for (int i = first; i < ahead.pieces; i += step)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                         ahead.weights + (size_t)i * ahead.apart),
                     "r"(PIECE_BYTES)
                     : "memory");
}

// By all threads of block `block` of `blocks`. A warp issues such copies one by one, so all warps take
// some.
__device__ __forceinline__ void fetch_ahead(const Ahead& ahead, int block, int blocks) {
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    int thread = lane * warps + (int)threadIdx.x / 32;
    fetch_pieces(ahead, thread * blocks + block, (int)blockDim.x * blocks);
}
