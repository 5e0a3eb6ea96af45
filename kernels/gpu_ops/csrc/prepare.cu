// What a decode step derives from its rows' state, and how attention's work is shared out.
//
// One block. Both kernels end in `share_out`: each sequence's keys are cut into tiles of TILE tokens,
// the tiles of all sequences laid end to end, and that line cut into equal spans, one block's each.
#include "plan.cuh"

struct Plan {
    Sequence* sequences;  // [sequences]
    Span* spans;          // [spans]; those without work are last
};

// The tiles before thread t's own; `total` gets all. `scratch` is shared, 33 ints.
__device__ __forceinline__ int tiles_before(int own, int* scratch, int& total) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int up_to = own;
    for (int step = 1; step < 32; step *= 2) {
        int left = __shfl_up_sync(FULL, up_to, step);
        if (lane >= step) up_to += left;
    }
    if (lane == 31) scratch[warp] = up_to;
    __syncthreads();
    if (warp == 0) {
        int sum = lane < blockDim.x / 32 ? scratch[lane] : 0;
        for (int step = 1; step < 32; step *= 2) {
            int left = __shfl_up_sync(FULL, sum, step);
            if (lane >= step) sum += left;
        }
        scratch[lane] = sum;
    }
    __syncthreads();
    total = scratch[blockDim.x / 32 - 1];
    return up_to - own + (warp ? scratch[warp - 1] : 0);
}

// The last i in [0, count) with starts[i] <= tile; starts ascends and starts[0] <= tile.
__device__ __forceinline__ int last_at_or_before(const int* starts, int count, int tile) {
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (starts[middle] <= tile) low = middle;
        else high = middle;
    }
    return low;
}

// The first key that a tile holds: whole tiles, so that a tile lies in one page.
__device__ __forceinline__ int first_key(int kv_len, int window) {
    return window > 0 ? max(0, kv_len - window) / TILE * TILE : 0;
}
__device__ __forceinline__ int tiles_of(int kv_len, int window) {
    int keys = kv_len - first_key(kv_len, window);
    return max(1, (keys + TILE - 1) / TILE);  // an empty sequence too: its result is written as 0
}

// Shared: dynamic, (sequences + 1) + (spans + 1) ints. `kv_lens` may be written by this block. Without
// `rows` sequence i is row i of the page table, and attention looks for its pages itself.
__device__ __forceinline__ void share_out(const int* kv_lens, const int* rows, int sequences,
                                          const int* page_table, int max_pages, int page_shift,
                                          int window, Plan plan, int spans, int min_tiles) {
    extern __shared__ int starts[];
    __shared__ int scratch[33];
    int* bounds = starts + sequences + 1;
    int each = (sequences + blockDim.x - 1) / blockDim.x;
    int begin = min((int)threadIdx.x * each, sequences), end = min(begin + each, sequences);
    int own = 0, total;
    for (int i = begin; i < end; i++) own += tiles_of(kv_lens[i], window);
    int at = tiles_before(own, scratch, total);
    for (int i = begin; i < end; i++) {
        starts[i] = at;
        at += tiles_of(kv_lens[i], window);
    }
    if (threadIdx.x == 0) starts[sequences] = total;

    int filled = max(1, min(spans, total / min_tiles));  // spans with work
    for (int s = threadIdx.x; s <= spans; s += blockDim.x)
        bounds[s] = (int)((long long)total * min(s, filled) / filled);
    __syncthreads();
    for (int i = threadIdx.x; i < sequences; i += blockDim.x) {
        int kv_len = kv_lens[i];
        plan.sequences[i] = {starts[i], starts[i + 1], kv_len, rows ? rows[i] : i,
                             last_at_or_before(bounds, filled, starts[i]),
                             last_at_or_before(bounds, filled, starts[i + 1] - 1),
                             first_key(kv_len, window), 0};
    }
    __syncthreads();
    for (int s = threadIdx.x; s < spans; s += blockDim.x) {
        Span span = {bounds[s], bounds[s + 1], 0, 0, {}};
        if (s < filled) {
            span.sequence = last_at_or_before(starts, sequences, span.begin);
            span.first = plan.sequences[span.sequence];
            int key = span.first.first_key + (span.begin - span.first.begin) * TILE;
            const int* pages = page_table + (size_t)span.first.row * max_pages;
            span.page = rows ? pages[key >> page_shift] : -1;
        }
        plan.spans[s] = span;
    }
}

extern "C" __global__ void plan_decode(const int* kv_lens, int sequences, int window,
                                       Sequence* plan_sequences, Span* plan_spans, int spans,
                                       int min_tiles) {
    wait_for_previous();
    let_next_start();
    share_out(kv_lens, nullptr, sequences, nullptr, 0, 0, window, {plan_sequences, plan_spans},
              spans, min_tiles);
}

// One decode step of rows[n]: a row's last token goes to position lengths[row], which then grows by
// one. `dummy_row` fills a bucket up: it stays at position 0 of page 0.
extern "C" __global__ void prepare_decode(const int* rows, int sequences, int dummy_row,
                                          const int* last_token, int* lengths,
                                          const int* page_table, int max_pages, int page_shift,
                                          int* ids, int* positions, int* slots, int* kv_lens,
                                          int window, Sequence* plan_sequences, Span* plan_spans,
                                          int spans, int min_tiles) {
    wait_for_previous();
    let_next_start();
    for (int i = threadIdx.x; i < sequences; i += blockDim.x) {
        int row = rows[i];
        bool padding = row == dummy_row;
        int position = padding ? 0 : lengths[row];
        int page = padding ? 0 : page_table[(size_t)row * max_pages + (position >> page_shift)];
        ids[i] = padding ? 0 : last_token[row];
        positions[i] = position;
        slots[i] = (page << page_shift) + (position & ((1 << page_shift) - 1));
        kv_lens[i] = position + 1;
        if (!padding) lengths[row] = position + 1;
    }
    __syncthreads();
    share_out(kv_lens, rows, sequences, page_table, max_pages, page_shift, window,
              {plan_sequences, plan_spans}, spans, min_tiles);
}
