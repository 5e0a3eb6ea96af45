// The ranks' partial sums added up, the residual added to that, and its RMS norm: one launch.
//
// One block a row, the same row on every rank. It stores this rank's partial sums into every peer's
// memory, raises a flag there, waits for the peers' flags, and finds all it needs in its own memory.
//
// A rank's memory, the same on all of them (symmetric_rows.py):
//   u32 rounds[MAX_ROWS]               how often a row was summed; read and written by this rank
//   u32 flags[MAX_ROWS][RANKS]         the round in which that rank's partial sums came
//   slots[2][MAX_ROWS][RANKS][SIZE]    partial sums, of even and of odd rounds
//
// Guarantees
// - Every rank adds the residual and all parts in the order of ranks, in float32, so all get the same
//   bits.
// - Nothing is ever reset: flags count up, so a graph may be replayed any number of times.
// Why two halves are enough: a peer writes round n + 2 of a row only after a kernel in which it saw
// this rank's flag of round n + 1; this rank raised that after the kernel of round n had ended, in
// which it read that round's slots. Rounds are a row's own: steps of other sizes do not matter.
// Assumes
// - All ranks launch the same operations in the same order.
// - All blocks are resident at once: at most BLOCKS_PER_SM for each multiprocessor.
#include "device.cuh"

constexpr u64 PATIENCE_NS = (u64)PATIENCE_S * 1000000000ull;
constexpr int BLOCKS_PER_SM = 2;
constexpr size_t ROW_BYTES = (size_t)SIZE * ELEMENT_BYTES;
constexpr size_t SLOTS_AT = (size_t)MAX_ROWS * (1 + RANKS) * sizeof(u32);  // MAX_ROWS: of 128 bytes

struct Memories {
    u64 of[8];  // by rank, as this one sees them
};

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// All that this block's threads wrote before the last barrier is seen by who sees the flag.
__device__ __forceinline__ void raise(u32* flag, u32 round) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(round) : "memory");
}

__device__ __forceinline__ u32 look(const u32* flag) {
    u32 round;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(round) : "l"(flag) : "memory");
    return round;
}

// A peer may be a round ahead. One that never comes ends this process with a launch failure.
__device__ __forceinline__ void await(const u32* flag, u32 round) {
    u64 begun = nanoseconds();
    while ((int)(look(flag) - round) < 0)
        if (nanoseconds() - begun > PATIENCE_NS) __trap();
}

// Into L2, where a step's weights have pushed it out.
__device__ __forceinline__ void prefetch(const Element* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

__device__ __forceinline__ u32* flag_of(u64 memory, int row, int rank) {
    return (u32*)memory + MAX_ROWS + row * RANKS + rank;
}

__device__ __forceinline__ Element* slot_of(u64 memory, u32 round, int row, int rank) {
    size_t slot = ((size_t)(round & 1) * MAX_ROWS + row) * RANKS + rank;
    return (Element*)(memory + SLOTS_AT + slot * ROW_BYTES);
}

// residual += the sum of all ranks' x; out = norm(residual). x, residual, out [n, SIZE].
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    reduce_norm(const __grid_constant__ Memories memories, const Element* x, Element* residual,
                const Element* weight, Element* out, int rank, float eps) {
    constexpr int GROUPS = SIZE / 8;
    __shared__ float scratch[32];
    int row = blockIdx.x;
    size_t at = (size_t)row * SIZE;
    x += at, residual += at, out += at;
    u64 own = memories.of[rank];
    u32* rounds = (u32*)own + row;

#pragma unroll
    for (int g = 0; g < VECTORS; g++) prefetch(weight + 8 * min(threadIdx.x + g * THREADS, GROUPS - 1));
    wait_for_previous();
    let_next_start();
    u32 round = *(volatile u32*)rounds + 1;
    float sum[VECTORS][8];
#pragma unroll
    for (int g = 0; g < VECTORS; g++) {
        int group = threadIdx.x + g * THREADS;
        if (group >= GROUPS) continue;
        float part[8];
        load8(x, group, part);
        load8(residual, group, sum[g]);
#pragma unroll
        for (int r = 0; r < RANKS; r++)
            if (r != rank) store8(slot_of(memories.of[r], round, row, rank), group, part);
    }
    __syncthreads();
    if (threadIdx.x < RANKS && threadIdx.x != rank) {
        raise(flag_of(memories.of[threadIdx.x], row, rank), round);
        await(flag_of(own, row, threadIdx.x), round);
    }
    __syncthreads();
    if (threadIdx.x == 0) *rounds = round;

    float squares = 0.f;
#pragma unroll
    for (int g = 0; g < VECTORS; g++) {
        int group = threadIdx.x + g * THREADS;
        if (group >= GROUPS) continue;
        float part[8];
#pragma unroll
        for (int r = 0; r < RANKS; r++) {
            load8(r == rank ? x : slot_of(own, round, row, r), group, part);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[g][i] += part[i];
        }
        round8(sum[g]);  // once, before it is normed
        store8(residual, group, sum[g]);
#pragma unroll
        for (int i = 0; i < 8; i++) squares += sum[g][i] * sum[g][i];
    }
    float inverse = rsqrtf(block_sum(squares, scratch) / (float)SIZE + eps);
#pragma unroll
    for (int g = 0; g < VECTORS; g++) {
        int group = threadIdx.x + g * THREADS;
        if (group >= GROUPS) continue;
        float w[8];
        load8(weight, group, w);
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] *= sum[g][i] * inverse;
        store8(out, group, w);
    }
}
