// Some of the next product's weights are brought into L2 by blocks of the small kernel before it, whose time
// would pass with memory idle. One piece in several, spread over the weights, so that the product finds
// a part of each stage there and still keeps memory busy from its first stage to its last.
#pragma once
#include "device.cuh"

constexpr int PIECE_BYTES = 1024;

struct Ahead {
    const unsigned char* weights;
    int pieces, apart;  // bytes between their beginnings
    int blocks;         // of this kernel's grid, the first ones: they do nothing else
};

// By block `block` of `blocks`. A warp issues such copies one by one, so all warps take some.
__device__ __forceinline__ void fetch_ahead(const Ahead& ahead, int block, int blocks) {
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    int first = (lane * warps + (int)threadIdx.x / 32) * blocks + block;
    for (int i = first; i < ahead.pieces; i += (int)blockDim.x * blocks)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                         ahead.weights + (size_t)i * ahead.apart),
                     "r"(PIECE_BYTES)
                     : "memory");
}
