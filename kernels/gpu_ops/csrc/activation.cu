// silu(gate) * up, eight elements a thread.
#include "device.cuh"

// gate_up[n, 2 * size]: gate, then up; out[n, size]. size is a multiple of 8. Grid (n, size / 8 rounded
// up to whole blocks): no division.
extern "C" __global__ void silu_mul(const Element* gate_up, Element* out, int size) {
    wait_for_previous();
    let_next_start();
    int groups = size / 8, group = blockIdx.y * blockDim.x + threadIdx.x;
    if (group >= groups) return;
    size_t at = (size_t)blockIdx.x * groups + group;
    size_t from = (size_t)blockIdx.x * 2 * groups + group;
    float gate[8], up[8];
    load8(gate_up, from, gate);
    load8(gate_up, from + groups, up);
#pragma unroll
    for (int i = 0; i < 8; i++) up[i] *= gate[i] / (1.f + __expf(-gate[i]));
    store8(out, at, up);
}
