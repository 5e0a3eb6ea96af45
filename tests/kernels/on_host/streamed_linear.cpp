// csrc/streamed_linear.cu as a function of host memory; the test puts the kernel's text in KERNEL.
#include "device.h"
#include KERNEL

static int copied(char* message, const char* what) { strncpy(message, what, 199); return 1; }

// 0, or 1 and what went wrong in `message` [200].
extern "C" int run(const u16* weight, const u16* x, const u16* norm, u16* out, int rows, int outputs,
                   int size, int blocks, float eps, int seed, char* message) {
    TensorMap weight_map = {weight, size, outputs, 64, COPY_ROWS};
    TensorMap x_map = {x, size, rows, 64, 8 * COLUMNS};
    chance.seed(seed);
    try {
        for (int block = 0; block < blocks; block++)
            run_block(block, CONSUMERS + 32, [&] {
                streamed_linear(weight_map, x_map, norm, out, rows, outputs, size / (64 * BOXES), eps);
            });
    } catch (const std::exception& error) { return copied(message, error.what()); }
    return 0;
}
