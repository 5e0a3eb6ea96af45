// What a step descriptor changes in the rows' state, and what its prefill tokens need to be computed.
#include "device.cuh"

// Words of a descriptor's header and of its entries, as in engine/descriptor.py.
enum { FLAGS = 3, JOINED, PAGE_WRITES, SEGMENTS, PREFILL_TOKENS, DECODE, HEADER_WORDS = 16 };
enum { SAME_DECODE_ROWS = 1, JOINED_WORDS = 8, PAGE_WRITE_WORDS = 3, SEGMENT_WORDS = 4 };

// Begins decode launch launches[0], and counts it: its place of the ring at `changes` (host_ring.py),
// copied to shared memory, for one block of CHANGE_WORDS / 4 threads. The host's memory is a microsecond or
// two away: so all of the place is asked for at once, whatever is in it, and past every cache, for it is
// written anew.
__device__ __forceinline__ const int* fetch_changes(const int* changes, int* launches) {
    __shared__ int4 fetched[CHANGE_WORDS / 4];
    int launch = __ldcg(launches);
    changes += (size_t)(launch % PLACES) * CHANGE_WORDS;
    fetched[threadIdx.x] = __ldcv((const int4*)changes + threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) *launches = (launch + 1) & COUNT_MASK;
    return (const int*)fetched;
}

// A row or a page table entry is named once; decode_rows[capacity] is filled up with the dummy row, or
// stays as it is. Any grid, of the descriptor in `block`; with `launches` as `fetch_changes`, of what the
// ring at `block` has for the decode launch that begins.
extern "C" __global__ void apply_changes(const int* block, int* launches, int* decode_rows,
                                         int capacity, int dummy_row, int* page_table,
                                         int max_pages, int* lengths, float* temperature,
                                         int* top_k, float* top_p, float* min_p, int* seed_lo,
                                         int* seed_hi) {
    wait_for_previous();
    let_next_start();
    if (launches) block = fetch_changes(block, launches);
    int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    int joined = block[JOINED], writes = block[PAGE_WRITES], segments = block[SEGMENTS];
    const int* at = block + HEADER_WORDS;
    for (int i = first; i < joined; i += step) {
        const int* words = at + JOINED_WORDS * i;
        int row = words[0];
        temperature[row] = __int_as_float(words[1]);
        top_k[row] = words[2];
        top_p[row] = __int_as_float(words[3]);
        min_p[row] = __int_as_float(words[4]);
        seed_lo[row] = words[5];
        seed_hi[row] = words[6];
    }
    at += JOINED_WORDS * joined;
    for (int i = first; i < writes; i += step) {
        const int* write = at + PAGE_WRITE_WORDS * i;
        page_table[(size_t)write[0] * max_pages + write[1]] = write[2];
    }
    at += PAGE_WRITE_WORDS * writes;
    for (int i = first; i < segments; i += step) {
        const int* segment = at + SEGMENT_WORDS * i;
        lengths[segment[0]] = segment[1] + segment[2];
    }
    if (block[FLAGS] & SAME_DECODE_ROWS) return;
    at += SEGMENT_WORDS * segments + block[PREFILL_TOKENS];
    int decodes = block[DECODE];
    for (int i = first; i < capacity; i += step) decode_rows[i] = i < decodes ? at[i] : dummy_row;
}

// The last i in [0, count) with starts[i] <= at: runs of no length are passed over.
__device__ __forceinline__ int run_of(const int* starts, int count, int at) {
    int low = 0, high = count;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (starts[middle] <= at) low = middle;
        else high = middle;
    }
    return low;
}

// One thread per position of the segments: where its key and value lie. Runs of positions
// [0, start + count) if `whole`, else [start, start + count), one after another; `starts` says where
// each run begins. positions may be null.
extern "C" __global__ void position_slots(const int* segments, const int* starts,
                                          int segment_count, int total, int whole,
                                          const int* page_table, int max_pages, int page_size,
                                          int* positions, int* slots) {
    wait_for_previous();
    let_next_start();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= total) return;
    int s = run_of(starts, segment_count, i);
    int position = i - starts[s] + (whole ? 0 : segments[4 * s + 1]);
    int page = page_table[(size_t)segments[4 * s] * max_pages + position / page_size];
    slots[i] = page * page_size + position % page_size;
    if (positions) positions[i] = position;
}

// What each of a small step's tokens is, for one block of at least `capacity` threads: the segments'
// tokens, those of decode_rows[decodes], whose lengths grow by one, then the dummy row's up to
// `capacity`. sampled_rows[i] is the row whose next token comes of token i, or the dummy row.
extern "C" __global__ void prepare_tokens(const int* segments, const int* tokens,
                                          int prefill, const int* decode_rows,
                                          int decodes, int capacity, int dummy_row,
                                          const int* last_token, int* lengths,
                                          const int* page_table, int max_pages, int page_size,
                                          int* ids, int* positions, int* slots, int* kv_lens,
                                          int* rows, int* sampled_rows) {
    wait_for_previous();
    let_next_start();
    int i = threadIdx.x, id = 0, position = 0, row = dummy_row, sampled = dummy_row;
    if (i >= capacity) return;
    if (i < prefill) {
        int begin = 0;  // of its segment; there are few
        const int* segment = segments;
        while (i - begin >= segment[2]) begin += segment[2], segment += 4;
        id = tokens[i], row = segment[0], position = segment[1] + i - begin;
        if (segment[3] && i - begin == segment[2] - 1) sampled = row;
    } else if (i < prefill + decodes) {
        row = sampled = decode_rows[i - prefill];
        id = last_token[row], position = lengths[row];
        lengths[row] = position + 1;
    }
    int page = row == dummy_row ? 0 : page_table[(size_t)row * max_pages + position / page_size];
    ids[i] = id;
    positions[i] = position;
    slots[i] = page * page_size + position % page_size;
    kv_lens[i] = position + 1;
    rows[i] = row;
    sampled_rows[i] = sampled;
}

// out[0][i] = keys[slots[i]], out[1][i] = values[slots[i]]; a token is `vectors` times 16 bytes.
// Grid (blocks, 2).
extern "C" __global__ void gather_tokens(const uint4* keys, const uint4* values, const int* slots,
                                         int tokens, int vectors, uint4* out) {
    wait_for_previous();
    let_next_start();
    const uint4* from = blockIdx.y ? values : keys;
    uint4* to = out + (size_t)blockIdx.y * tokens * vectors;
    size_t all = (size_t)tokens * vectors;
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step)
        to[i] = from[(size_t)slots[i / vectors] * vectors + i % vectors];
}
