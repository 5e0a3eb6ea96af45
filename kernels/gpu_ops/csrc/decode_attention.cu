// Attention of one query token per sequence over paged keys and values: the decode step.
//
// A block is persistent: it takes one span of the plan (prepare.cu), an equal run of 16-token tiles of
// all sequences laid end to end, so that blocks finish together whatever the lengths are. STREAMERS
// threads, of a warp each, fill a ring of STAGES tiles: a bulk copy per token brings HEADS key or
// value heads (contiguous in memory), rows padded by 16 bytes to spread over the banks. HEADS warps
// compute, one per key-value head, with the tile as the tensor cores' 16-row operand:
//     scores^T [16 tokens, 8 heads] = K [16, d] Q^T [d, 8],   O^T [d, 8] += V^T [d, 16] P^T [16, 8]
// so the GROUP query heads of a key-value head share one pass over its keys.
//
// FUSED: the input is the product `qkv`, and this kernel also norms (FUSED == 2) and rotates q and
// the new k, and stores the new k and v. The block that has a sequence's last tile does the latter:
// it copies the raw k and v to where the last token lies in the tile.
//
// A sequence that several spans hold parts of is merged by whichever warp finishes its head's last
// part: parts are added in their order, so the result does not depend on who that is.
//
// Must stay true
// - k_cache and v_cache hold what earlier steps wrote; only each sequence's last key is new, and
//   only it and the queries are read after the wait for the previous kernel.
// - `arrived` is 0 between launches: the last to arrive sets it back.
// - Output of a sequence without keys is 0.
#include "decode_merge.cuh"
#include "pipeline.cuh"

constexpr int STREAMERS = 4;

struct Ring {
    u64 full[STAGES], empty[STAGES];
    Tile tiles[STAGES];
};

// Fills the ring. STREAMERS threads run it alike: each copies every STREAMERS-th token, as a bulk
// copy takes its thread about 90 cycles; the first also tells what the tile is.
struct Streamer {
    const Arguments& args;
    Ring* ring;
    u32 stages;  // shared address of stage 0
    int head0, number;
    u64 policy;
    int stage = 0, turn = 0, filled = 0;  // stage and turn of the ring; tiles so far
    bool waited = false;                  // for the previous kernel
    int query_due = -1;                   // the sequence whose query stage 0 lacks: not yet to be read

    __device__ void wait_once() {
        if (waited) return;
        waited = true;
        wait_for_previous();
        let_next_start();
        if (query_due >= 0) copy_query(0, query_due);
    }

    __device__ const u16* row_of_q(int sequence) const {
        int heads = args.kv_heads * (FUSED ? GROUP + 2 : GROUP);
        return args.q + (size_t)sequence * heads * HEAD_DIM;
    }
    __device__ void copy_query(int to_stage, int sequence) {
        copy(stages + to_stage * STAGE_BYTES + 2 * TILE_BYTES,
             row_of_q(sequence) + head0 * GROUP * HEAD_DIM, QUERY_BYTES, &ring->full[to_stage],
             policy);
    }

    // The tile's keys and values begin at `slot`.
    __device__ void push(const Tile& tile, size_t slot) {
        if (tile.newest >= 0 || filled >= STAGES || (tile.first && filled)) wait_once();
        barrier_wait(&ring->empty[stage], (turn + 1) & 1);
        u64* full = &ring->full[stage];
        u32 to = stages + stage * STAGE_BYTES;
        int own = max(0, (tile.tokens - number + STREAMERS - 1) / STREAMERS);
        u32 bytes = own * 2 * TOKEN_BYTES;
        bool angles = FUSED && (tile.first || tile.newest >= 0);
        if (number == 0) {
            ring->tiles[stage] = tile;
            bytes += (tile.first ? QUERY_BYTES : 0) + (angles ? ANGLE_BYTES : 0);
        }
        barrier_expect(full, bytes);
        size_t step = (size_t)args.kv_heads * HEAD_DIM;
        size_t from = slot * step + head0 * HEAD_DIM;
        const u16 *keys = args.k_cache + from, *values = args.v_cache + from;
        const u16* new_key = row_of_q(tile.sequence) + (args.kv_heads * GROUP + head0) * HEAD_DIM;
        int from_qkv = FUSED && tile.newest >= 0 ? tile.tokens - 1 : TILE;
#pragma unroll
        for (int t = number; t < TILE; t += STREAMERS)
            if (t < tile.tokens)
                copy(to + t * TOKEN_STRIDE, t == from_qkv ? new_key : keys + t * step, TOKEN_BYTES,
                     full, policy);
        to += TILE_BYTES;
#pragma unroll
        for (int t = number; t < TILE; t += STREAMERS)
            if (t < tile.tokens)
                copy(to + t * TOKEN_STRIDE, t == from_qkv ? new_key + step : values + t * step,
                     TOKEN_BYTES, full, policy);
        to += TILE_BYTES;
        if (number == 0) {
            if (tile.first && waited) copy_query(stage, tile.sequence);
            else if (tile.first) query_due = tile.sequence;
            if (angles)
                copy(to + QUERY_BYTES,
                     args.cos_sin + (size_t)tile.position * HEAD_DIM, ANGLE_BYTES, full, policy);
        }
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
            if (first ? page < 0 : (key & offset_mask) == 0) page = pages[key >> args.page_shift];
            size_t slot = ((size_t)page << args.page_shift) + (key & offset_mask);
            int tokens = max(0, min(TILE, own.kv_len - key));
            bool newest = tokens > 0 && key + TILE >= own.kv_len;
            push({index, max(0, from - key), tokens, first, at + 1 == end, span, own.first_span,
                  own.last_span, newest ? (int)slot + tokens - 1 : -1, own.kv_len - 1, 0, 0},
                 slot);
        }
    }

    __device__ void run() {
        Span span = args.plan_spans[blockIdx.x];
        Sequence own = span.first;
        int page = span.page;
        for (int at = span.begin, sequence = span.sequence; at < span.end;) {
            int end = min(span.end, own.end);
            stream(own, sequence, at, end, blockIdx.x, page);
            at = end, page = -1;
            if (at < span.end) own = args.plan_sequences[++sequence];
        }
        wait_once();  // every block, so that this kernel ends after the one before it
        push({-1, 0, 0, 0, 0, 0, 0, 0, -1, 0, 0, 0}, 0);
    }
};

__device__ __forceinline__ void compute(const Arguments& args, Ring* ring, unsigned char* memory,
                                        int head0) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Merger merger = {args, head0 + warp, lane};
    float scale = args.scale * LOG2_E;
    Head head;
    for (int stage = 0, turn = 0;;) {
        barrier_wait(&ring->full[stage], turn & 1);
        __syncwarp();
        Tile tile = ring->tiles[stage];
        if (tile.sequence < 0) return;
        unsigned char* keys = memory + stage * STAGE_BYTES + warp * HEAD_DIM * 2;
        const unsigned char* queries = memory + stage * STAGE_BYTES + 2 * TILE_BYTES;
        const float* cos_sin = (const float*)(queries + QUERY_BYTES);
        if (tile.first) {
            head.start(queries + warp * GROUP * HEAD_DIM * 2, lane);
            if (FUSED) head.turn_query(args.q_norm, args.eps, cos_sin, lane);
        }
        if (FUSED && tile.newest >= 0) {
            size_t to = ((size_t)tile.newest * args.kv_heads + head0 + warp) * HEAD_DIM;
            unsigned char* key = keys + (tile.tokens - 1) * TOKEN_STRIDE;
            turn_and_store_key((u32*)key, args.k_norm, args.eps, cos_sin, args.k_cache + to, lane);
            store_value((const u32*)(key + TILE_BYTES), args.v_cache + to, lane);
            order_before_copies();
            __syncwarp();
        }
        u32 at = shared_address(keys);
        if (tile.tokens) head.add_tile(at, at + TILE_BYTES, tile.skip, tile.tokens, scale, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(&ring->empty[stage]);
        if (tile.last) merger.finish(head, tile);
        if (++stage == STAGES) stage = 0, turn++;
    }
}

// q [sequences, kv_heads * GROUP, HEAD_DIM], or qkv [sequences, kv_heads * (GROUP + 2), HEAD_DIM];
// out as q; caches [pages, page size, kv_heads, HEAD_DIM], the page size a multiple of TILE.
// Grid (spans, kv_heads / HEADS), HEADS + STREAMERS warps, STAGES * (STAGE_BYTES + 64) bytes shared.
extern "C" __global__ void __launch_bounds__((HEADS + STREAMERS) * 32, 1)
    decode_attention(const u16* q, const u16* q_norm, const u16* k_norm, const float* cos_sin,
                     u16* k_cache, u16* v_cache, u16* out, const int* page_table, const int* rows,
                     const Sequence* plan_sequences, const Span* plan_spans, float4* parts,
                     float2* sums, int* arrived, int kv_heads, int max_pages, int page_shift,
                     int window, float scale, float eps) {
    extern __shared__ __align__(128) unsigned char memory[];
    Arguments args = {q, q_norm, k_norm, cos_sin, k_cache, v_cache, out, page_table, rows,
                      plan_sequences, plan_spans, parts, sums, arrived, kv_heads, max_pages,
                      page_shift, window, scale, eps};
    Ring* ring = (Ring*)(memory + STAGES * STAGE_BYTES);
    int head0 = blockIdx.y * HEADS;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&ring->full[s], STREAMERS);
            barrier_init(&ring->empty[s], HEADS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    int warp = threadIdx.x / 32;
    if (warp < HEADS) {
        compute(args, ring, memory, head0);
    } else if (threadIdx.x % 32 == 0) {
        Streamer streamer = {args, ring, shared_address(memory), head0, warp - HEADS, read_once()};
        streamer.run();
    }
}
