// Attention of one query token per sequence over paged keys and values: the decode step.
//
// A block is persistent. It takes spans of the plan (prepare.cu): equal runs of 16-token tiles over
// all sequences laid end to end, so that blocks finish together whatever the lengths are. One thread
// streams: a bulk copy per token brings HEADS key or value heads (contiguous in memory) into a ring
// of STAGES tiles, rows padded by 16 bytes to spread over the banks. HEADS warps compute, one per
// key-value head, with the tile as the tensor cores' 16-row operand:
//     scores^T [16 tokens, 8 heads] = K [16, d] Q^T [d, 8],   O^T [d, 8] += V^T [d, 16] P^T [16, 8]
// so the GROUP query heads of a key-value head share one pass over its keys.
//
// A sequence that several spans hold parts of is merged by whichever warp finishes its head's last
// part: parts are added in their order, so the result does not depend on who that is.
//
// Must stay true
// - k_cache and v_cache hold what earlier steps wrote; only each sequence's last key is new, and
//   only it and q are read after the wait for the previous kernel.
// - `arrived` and `tickets` are 0 between launches: the last to use one sets it back.
// - Output of a sequence without keys is 0.
#include "decode_head.cuh"
#include "pipeline.cuh"

// --- the streaming thread -----------------------------------------------------------------------

struct Ring {
    u64 full[STAGES], empty[STAGES];
    Tile tiles[STAGES];
};

// Fills the ring. One thread runs it.
struct Streamer {
    const Arguments& args;
    Ring* ring;
    u32 stages;  // shared address of stage 0
    int head0;
    u64 policy;
    int stage = 0, turn = 0, filled = 0;  // stage and turn of the ring; tiles so far
    bool waited = false;                  // for the previous kernel
    const u16* query_due = nullptr;       // a query that stage 0 lacks: not to be read yet

    __device__ void wait_once() {
        if (waited) return;
        waited = true;
        wait_for_previous();
        let_next_start();
        if (query_due)
            copy(stages + 2 * TILE_BYTES, query_due, QUERY_BYTES, &ring->full[0], policy);
    }

    __device__ void copy_query(const u16* query) {
        if (!waited) query_due = query;  // only the very first tile
        else
            copy(stages + stage * STAGE_BYTES + 2 * TILE_BYTES, query, QUERY_BYTES,
                 &ring->full[stage], policy);
    }

    // The tile's keys and values begin at `slot`.
    __device__ void push(const Tile& tile, size_t slot, bool has_newest) {
        if (has_newest || filled >= STAGES || (tile.first && filled)) wait_once();
        barrier_wait(&ring->empty[stage], (turn + 1) & 1);
        ring->tiles[stage] = tile;
        u64* full = &ring->full[stage];
        barrier_expect(full, 2 * tile.tokens * TOKEN_BYTES + (tile.first ? QUERY_BYTES : 0));
        size_t step = (size_t)args.kv_heads * HEAD_DIM;
        const u16* keys = args.k_cache + slot * step + head0 * HEAD_DIM;
        const u16* values = args.v_cache + slot * step + head0 * HEAD_DIM;
        u32 to = stages + stage * STAGE_BYTES;
#pragma unroll 4
        for (int t = 0; t < tile.tokens; t++) {
            copy(to, keys, TOKEN_BYTES, full, policy);
            copy(to + TILE_BYTES, values, TOKEN_BYTES, full, policy);
            to += TOKEN_STRIDE, keys += step, values += step;
        }
        if (tile.first)
            copy_query(args.q + ((size_t)tile.sequence * args.kv_heads + head0) * GROUP * HEAD_DIM);
        filled++;
        if (++stage == STAGES) stage = 0, turn++;
    }

    // Tiles [at, end) of a sequence; `page` is that of tile `at`, or -1.
    __device__ void stream(const Sequence& own, int index, int at, int end, int span, int page) {
        int row = args.rows ? args.rows[index] : own.row;
        const int* pages = args.page_table + (size_t)row * args.max_pages;
        int from = args.window > 0 ? own.kv_len - args.window : 0;  // the first key seen
        int offset_mask = (1 << args.page_shift) - 1;
        int key = own.first_key + (at - own.begin) * TILE;
        for (int first = 1; at < end; at++, key += TILE, first = 0) {
            if (page < 0 || (key & offset_mask) == 0) {
                if (!(first && page >= 0)) page = pages[key >> args.page_shift];
            }
            int tokens = max(0, min(TILE, own.kv_len - key));
            Tile tile = {index, max(0, from - key), tokens, first, at + 1 == end, span,
                         own.first_span, own.last_span};
            size_t slot = ((size_t)page << args.page_shift) + (key & offset_mask);
            push(tile, slot, key + TILE >= own.kv_len);
        }
    }

    __device__ void run() {
        for (int index = blockIdx.x; index < args.spans; index = next_span()) {
            Span span = args.plan_spans[index];
            if (span.begin == span.end) break;
            Sequence own = span.first;
            int page = span.page;
            for (int at = span.begin, sequence = span.sequence;;) {
                int end = min(span.end, own.end);
                stream(own, sequence, at, end, index, page);
                at = end, page = -1;
                if (at == span.end) break;
                own = args.plan_sequences[++sequence];
            }
        }
        if (args.spans > gridDim.x) leave();
        wait_once();  // every block, so that this kernel ends after the one before it
        push({-1, 0, 0, 0, 0, 0, 0, 0}, 0, false);
    }

    // Tickets for the spans beyond a block's own; the last block to leave sets them back.
    __device__ int next_span() {
        if (args.spans <= gridDim.x) return args.spans;
        return gridDim.x + atomicAdd(args.tickets + blockIdx.y, 1);
    }
    __device__ void leave() {
        int* leavers = args.tickets + gridDim.y + blockIdx.y;
        if (atomicAdd(leavers, 1) == gridDim.x - 1) args.tickets[blockIdx.y] = *leavers = 0;
    }
};

// --- the computing warps ------------------------------------------------------------------------

__device__ __forceinline__ void compute(const Arguments& args, Ring* ring, u32 stages,
                                        const unsigned char* stage_memory, int head0) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Merger merger = {args, head0 + warp, lane};
    float scale = args.scale * LOG2_E;
    Head head;
    for (int stage = 0, turn = 0;;) {
        barrier_wait(&ring->full[stage], turn & 1);
        __syncwarp();
        Tile tile = ring->tiles[stage];
        if (tile.sequence < 0) return;
        u32 keys = stages + stage * STAGE_BYTES + warp * HEAD_DIM * 2;
        if (tile.first)
            head.start(stage_memory + stage * STAGE_BYTES + 2 * TILE_BYTES +
                           warp * GROUP * HEAD_DIM * 2,
                       lane);
        if (tile.tokens)
            head.add_tile(keys, keys + TILE_BYTES, tile.skip, tile.tokens, scale, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(&ring->empty[stage]);
        if (tile.last) merger.finish(head, tile);
        if (++stage == STAGES) stage = 0, turn++;
    }
}

// q, out [sequences, kv_heads * GROUP, HEAD_DIM]; caches [pages, page size, kv_heads, HEAD_DIM].
// Grid (blocks, kv_heads / HEADS), (HEADS + 1) warps, STAGES * (STAGE_BYTES + 48) bytes shared. The
// page size is a multiple of TILE.
extern "C" __global__ void __launch_bounds__((HEADS + 1) * 32, 1)
    decode_attention(const u16* q, const u16* k_cache, const u16* v_cache, u16* out,
                     const int* page_table, const int* rows, const Sequence* plan_sequences,
                     const Span* plan_spans, float4* parts, float2* sums, int* arrived,
                     int* tickets, int spans, int kv_heads, int max_pages, int page_shift, int window, float scale) {
    extern __shared__ __align__(128) unsigned char memory[];
    Arguments args = {q, k_cache, v_cache, out, page_table, rows, plan_sequences, plan_spans, parts,
                      sums, arrived, tickets, spans, kv_heads, max_pages, page_shift, window, scale};
    Ring* ring = (Ring*)(memory + STAGES * STAGE_BYTES);
    int head0 = blockIdx.y * HEADS;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&ring->full[s], 1);
            barrier_init(&ring->empty[s], HEADS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x / 32 < HEADS) {
        compute(args, ring, shared_address(memory), memory, head0);
    } else if (threadIdx.x == HEADS * 32) {
        Streamer streamer = {args, ring, shared_address(memory), head0, read_once()};
        streamer.run();
    }
}
