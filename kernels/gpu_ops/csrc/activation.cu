// silu(gate) * up, eight elements a thread.
#include "device.cuh"

// gate_up[n, 2 * size]: gate, then up; out[n, size]. size is a multiple of 8.
extern "C" __global__ void silu_mul(const Element* gate_up, Element* out, int rows, int size) {
    wait_for_previous();
    let_next_start();
    int groups = size / 8;
    long long total = (long long)rows * groups;
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= total) return;
    long long row = at / groups, group = at % groups;
    long long from = row * 2 * groups + group;
    float gate[8], up[8];
    load8(gate_up, from, gate);
    load8(gate_up, from + groups, up);
#pragma unroll
    for (int i = 0; i < 8; i++) up[i] *= gate[i] / (1.f + __expf(-gate[i]));
    store8(out, at, up);
}
