// silu(gate) * up, eight elements a thread.
#include "fetch_ahead.cuh"

// gate_up[n, 2 * size]: gate, then up; out[n, size]. size is a multiple of 8. Grid (ahead_columns + n,
// size / 8 rounded up to whole blocks): no division.
extern "C" __global__ void silu_mul(const Element* gate_up, Element* out, int size,
                                    const unsigned char* ahead, int ahead_pieces, int ahead_apart,
                                    int ahead_columns) {
    int row = (int)blockIdx.x - ahead_columns;
    if (row < 0) {
        int blocks = ahead_columns * gridDim.y;
        fetch_ahead({ahead, ahead_pieces, ahead_apart, blocks},
                    blockIdx.y * ahead_columns + blockIdx.x, blocks);
    }
    wait_for_previous();
    let_next_start();
    int groups = size / 8, group = blockIdx.y * blockDim.x + threadIdx.x;
    if (row < 0 || group >= groups) return;
    size_t at = (size_t)row * groups + group;
    size_t from = (size_t)row * 2 * groups + group;
    float gate[8], up[8];
    load8(gate_up, from, gate);
    load8(gate_up, from + groups, up);
#pragma unroll
    for (int i = 0; i < 8; i++) up[i] *= gate[i] / (1.f + __expf(-gate[i]));
    store8(out, at, up);
}
