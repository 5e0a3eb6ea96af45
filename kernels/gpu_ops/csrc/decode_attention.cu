// Attention of one query token per sequence over paged keys and values: the decode step.
//
// A block is persistent. It takes spans of the plan (prepare.cu): equal runs of 16-token tiles over
// all sequences laid end to end, so that blocks finish together whatever the lengths are. One warp
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
#include "device.cuh"

constexpr int TILE = 16;
constexpr int TOKEN_BYTES = HEADS * HEAD_DIM * 2;
constexpr int TOKEN_STRIDE = TOKEN_BYTES + 16;
constexpr int TILE_BYTES = TILE * TOKEN_STRIDE;
constexpr int QUERY_BYTES = HEADS * GROUP * HEAD_DIM * 2;
constexpr int STAGE_BYTES = 2 * TILE_BYTES + QUERY_BYTES;
constexpr int DIM_STEPS = HEAD_DIM / 16;
constexpr int PAIRS = (GROUP + 1) / 2;    // query heads are held two by two
constexpr int PART_LANES = 8 * PAIRS;     // lanes of a warp that hold query heads that exist
constexpr int PART_VECTORS = DIM_STEPS * PART_LANES;  // float4 of one head's part of a sequence
constexpr float LOG2_E = 1.4426950408889634f;
static_assert(GROUP <= 8 && HEAD_DIM % 16 == 0 && HEAD_DIM <= 128);

// What a tile is, told by the streaming warp to the computing ones.
struct Tile {
    int sequence;  // -1: no more
    int tokens;    // that exist, of TILE
    int first, last;  // of this sequence in this span
    int span, first_span, last_span;  // of the sequence
    int unused;
};

struct Arguments {
    const u16 *q, *k_cache, *v_cache;
    u16* out;
    const int *page_table, *rows, *kv_lens;
    const int* sequence_tile;
    const int2* sequence_span;
    const int *span_tile, *span_sequence;
    float4* parts;   // [2 * spans, kv_heads, PART_VECTORS]
    float2* sums;    // [2 * spans, kv_heads, 2 * PAIRS] the largest score, the sum of weights
    int* arrived;    // [sequences, kv_heads]
    int* tickets;    // [2, head groups]
    int spans, kv_heads, max_pages, page_shift, window;
    float scale;
};

// --- barriers and copies ------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}
__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals));
}
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}
// Keys and values are read once a step: they should not push weights and activations out of L2.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u64* barrier,
                                     u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// --- tensor cores -------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrices(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
}
__device__ __forceinline__ u32 transposed(u32 matrix) {
    u32 result;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(matrix));
    return result;
}
__device__ __forceinline__ void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- the streaming warp -------------------------------------------------------------------------

struct Ring {
    u64 full[STAGES], empty[STAGES];
    Tile tiles[STAGES];
};

// Fills the ring. All 32 lanes run it: lane t copies the key, lane 16 + t the value of token t.
struct Streamer {
    const Arguments& args;
    Ring* ring;
    u32 stages;  // shared address of stage 0
    int head0, lane;
    u64 policy;
    int filled = 0;        // tiles so far
    int page_index = -1;   // of the sequence's pages: the one `page` is
    int page = 0;
    bool waited = false;   // for the previous kernel
    const u16* query_due = nullptr;  // a query that stage 0 lacks, as it could not be read yet

    __device__ void wait_once() {
        if (waited) return;
        waited = true;
        wait_for_previous();
        let_next_start();
        if (query_due && lane == 0)
            copy(stages + 2 * TILE_BYTES, query_due, QUERY_BYTES, &ring->full[0], policy);
    }

    __device__ void copy_query(int stage, const u16* query) {
        if (!waited) query_due = query;  // only the very first tile
        else if (lane == 0)
            copy(stages + stage * STAGE_BYTES + 2 * TILE_BYTES, query, QUERY_BYTES,
                 &ring->full[stage], policy);
    }

    // Keys [token0, token0 + tile.tokens) of the sequence whose page list is `pages`.
    __device__ void push(const Tile& tile, const int* pages, int token0, bool has_newest) {
        int stage = filled % STAGES, token = token0 + lane % 16;
        bool mine = lane % 16 < tile.tokens;
        if (mine && token >> args.page_shift != page_index) {
            page_index = token >> args.page_shift;
            page = pages[page_index];
        }
        if (has_newest || filled >= STAGES || (tile.first && filled)) wait_once();
        barrier_wait(&ring->empty[stage], (filled / STAGES + 1) & 1);
        if (lane == 0) {
            ring->tiles[stage] = tile;
            u32 bytes = 2 * tile.tokens * TOKEN_BYTES + (tile.first ? QUERY_BYTES : 0);
            barrier_expect(&ring->full[stage], bytes);
        }
        __syncwarp();
        if (mine) {
            int slot = (page << args.page_shift) + (token & ((1 << args.page_shift) - 1));
            size_t from = ((size_t)slot * args.kv_heads + head0) * HEAD_DIM;
            u32 to = stages + stage * STAGE_BYTES + lane / 16 * TILE_BYTES +
                     lane % 16 * TOKEN_STRIDE;
            copy(to, (lane < 16 ? args.k_cache : args.v_cache) + from, TOKEN_BYTES,
                 &ring->full[stage], policy);
        }
        if (tile.first)
            copy_query(stage, args.q + ((size_t)tile.sequence * args.kv_heads + head0) * GROUP *
                                           HEAD_DIM);
        filled++;
    }

    __device__ void stream_span(int span) {
        int at = args.span_tile[span], end = args.span_tile[span + 1];
        int sequence = at < end ? args.span_sequence[span] : 0;
        for (; at < end; sequence++) {
            int begin = args.sequence_tile[sequence];
            int stop = min(end, args.sequence_tile[sequence + 1]);
            int2 spans = args.sequence_span[sequence];
            int kv_len = args.kv_lens[sequence];
            int row = args.rows ? args.rows[sequence] : sequence;
            int key0 = args.window > 0 ? max(0, kv_len - args.window) : 0;
            page_index = -1;
            for (int first = 1; at < stop; at++, first = 0) {
                int token0 = key0 + (at - begin) * TILE;
                int tokens = max(0, min(TILE, kv_len - token0));
                Tile tile = {sequence, tokens, first, at + 1 == stop, span, spans.x, spans.y, 0};
                push(tile, args.page_table + (size_t)row * args.max_pages, token0,
                     token0 + TILE >= kv_len);
            }
        }
    }

    __device__ void run() {
        for (int span = blockIdx.x; span < args.spans;) {
            stream_span(span);
            span = next_span();
        }
        wait_once();  // every block, so that this kernel ends after the one before it
        push({-1, 0, 0, 0, 0, 0, 0, 0}, nullptr, 0, false);
    }

    __device__ int next_span() {
        if (args.spans <= gridDim.x) return args.spans;
        int* ticket = args.tickets + blockIdx.y;
        int* leavers = ticket + gridDim.y;
        int span = 0;
        if (lane == 0) {
            span = gridDim.x + atomicAdd(ticket, 1);
            if (span >= args.spans && atomicAdd(leavers, 1) == gridDim.x - 1)
                *ticket = 0, *leavers = 0;
        }
        return __shfl_sync(FULL, span, 0);
    }
};

// --- the computing warps ------------------------------------------------------------------------

// One key-value head's part of a sequence. A lane holds query heads 2 * (lane % 4) and the next;
// of the scores, tokens lane / 4 and 8 more; of the output, dimensions 16 i + lane / 4 and 8 more.
struct Head {
    u32 query[DIM_STEPS][2];
    float out[DIM_STEPS][4];
    float most[2], sum[2];  // `sum` over this lane's tokens only

    __device__ void start(const unsigned char* queries, int lane) {
        int head = lane / 4;
#pragma unroll
        for (int i = 0; i < DIM_STEPS; i++) {
            const u32* at = (const u32*)(queries + head * HEAD_DIM * 2) + 8 * i + lane % 4;
            query[i][0] = head < GROUP ? at[0] : 0;
            query[i][1] = head < GROUP ? at[4] : 0;
            out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0.f;
        }
        most[0] = most[1] = -INF;
        sum[0] = sum[1] = 0.f;
    }

    // Rows past the last token repeat it: what lies there is left over, and may not be a number.
    __device__ void add_tile(u32 keys, u32 values, int tokens, float scale, int lane) {
        u32 a[4];
        float even[4] = {}, odd[4] = {};
        u32 row = min(lane % 16, tokens - 1);
        u32 from = keys + row * TOKEN_STRIDE + lane / 16 * 16;
#pragma unroll
        for (int i = 0; i < DIM_STEPS; i++) {
            load_matrices(a, from + i * 32);
            multiply_add(i % 2 ? odd : even, a, query[i][0], query[i][1]);
        }
        float score[4];
        for (int i = 0; i < 4; i++) score[i] = (even[i] + odd[i]) * scale;
        if (lane / 4 >= tokens) score[0] = score[1] = -INF;
        if (lane / 4 + 8 >= tokens) score[2] = score[3] = -INF;
        float weight[4];
        soft_max(score, weight);
        u32 b0 = transposed(pair(weight[0], weight[1]));
        u32 b1 = transposed(pair(weight[2], weight[3]));
        row = min(lane % 8 + lane / 16 * 8, tokens - 1);
        from = values + row * TOKEN_STRIDE + lane / 8 % 2 * 16;
#pragma unroll
        for (int i = 0; i < DIM_STEPS; i++) {
            load_matrices_transposed(a, from + i * 32);
            multiply_add(out[i], a, b0, b1);
        }
    }

    __device__ void soft_max(const float (&score)[4], float (&weight)[4]) {
        float larger[2];
        for (int h = 0; h < 2; h++) {
            float x = fmaxf(score[h], score[h + 2]);
            for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(FULL, x, step));
            larger[h] = fmaxf(x, most[h]);
        }
        if (__any_sync(FULL, larger[0] > most[0] || larger[1] > most[1])) {
            for (int h = 0; h < 2; h++) {
                float shrink = exp2f(most[h] - larger[h]);
                most[h] = larger[h];
                sum[h] *= shrink;
#pragma unroll
                for (int i = 0; i < DIM_STEPS; i++) out[i][h] *= shrink, out[i][h + 2] *= shrink;
            }
        }
        for (int i = 0; i < 4; i++) {
            weight[i] = exp2f(score[i] - most[i % 2]);
            sum[i % 2] += weight[i];
        }
    }

    __device__ void add_up_sums() {
        for (int h = 0; h < 2; h++)
            for (int step = 4; step < 32; step *= 2)
                sum[h] += __shfl_xor_sync(FULL, sum[h], step);
    }
};

// Writes dimensions dim and dim + 8 of query heads `head` and the next, of those in the group.
__device__ __forceinline__ void write_four(u16* heads, int head, int dim, float4 x, float inverse0,
                                           float inverse1) {
    u16* at = heads + head * HEAD_DIM + dim;
    at[0] = bf16(x.x * inverse0);
    at[8] = bf16(x.z * inverse0);
    if (head + 1 >= GROUP) return;
    at[HEAD_DIM] = bf16(x.y * inverse1);
    at[HEAD_DIM + 8] = bf16(x.w * inverse1);
}

__device__ __forceinline__ float inverse_or_zero(float sum) { return sum > 0.f ? 1.f / sum : 0.f; }

// Where a span's part of a sequence lies: a span holds parts of at most one sequence that began
// before it and one that goes on after it.
__device__ __forceinline__ size_t part_slot(int span, bool began_before) {
    return 2 * (size_t)span + (began_before ? 0 : 1);
}

struct Merger {
    const Arguments& args;
    int kv_head, lane;

    __device__ u16* out_heads(int sequence) const {
        return args.out + ((size_t)sequence * args.kv_heads + kv_head) * GROUP * HEAD_DIM;
    }

    __device__ void write_whole(const Head& head, int sequence) const {
        if (lane % 4 >= PAIRS) return;
        float inverse0 = inverse_or_zero(head.sum[0]), inverse1 = inverse_or_zero(head.sum[1]);
#pragma unroll
        for (int i = 0; i < DIM_STEPS; i++) {
            const float* x = head.out[i];
            write_four(out_heads(sequence), lane % 4 * 2, 16 * i + lane / 4,
                       make_float4(x[0], x[1], x[2], x[3]), inverse0, inverse1);
        }
    }

    __device__ void write_part(const Head& head, const Tile& tile) const {
        size_t slot = part_slot(tile.span, tile.span > tile.first_span) * args.kv_heads + kv_head;
        if (lane % 4 < PAIRS) {
            float4* parts = args.parts + slot * PART_VECTORS + lane % 4 * 8 + lane / 4;
#pragma unroll
            for (int i = 0; i < DIM_STEPS; i++) {
                const float* x = head.out[i];
                __stcg(parts + i * PART_LANES, make_float4(x[0], x[1], x[2], x[3]));
            }
            if (lane / 4 == 0)
                for (int h = 0; h < 2; h++)
                    __stcg(args.sums + slot * 2 * PAIRS + lane % 4 * 2 + h,
                           make_float2(head.most[h], head.sum[h]));
        }
        __threadfence();
        __syncwarp();
        int before = 0;
        int* arrived = args.arrived + (size_t)tile.sequence * args.kv_heads + kv_head;
        if (lane == 0) {
            before = atomicAdd(arrived, 1);
            if (before == tile.last_span - tile.first_span) *arrived = 0;
        }
        if (__shfl_sync(FULL, before, 0) < tile.last_span - tile.first_span) return;
        __threadfence();
        merge(tile);
    }

    __device__ size_t slot_of(int part, const Tile& tile) const {
        return part_slot(tile.first_span + part, part > 0) * args.kv_heads + kv_head;
    }

    // Weighs each part by its share of the whole sum, then adds the parts in their order.
    __device__ void merge(const Tile& tile) const {
        int parts = tile.last_span - tile.first_span + 1;
        float most[2 * PAIRS], sum[2 * PAIRS];
#pragma unroll
        for (int h = 0; h < 2 * PAIRS; h++) most[h] = -INF, sum[h] = 0.f;
        for (int p = lane; p < parts; p += 32) {
            const float2* sums = args.sums + slot_of(p, tile) * 2 * PAIRS;
#pragma unroll
            for (int h = 0; h < 2 * PAIRS; h++) {
                float2 part = __ldcg(sums + h);
                float larger = fmaxf(most[h], part.x);
                sum[h] = sum[h] * exp2f(most[h] - larger) + part.y * exp2f(part.x - larger);
                most[h] = larger;
            }
        }
#pragma unroll
        for (int h = 0; h < 2 * PAIRS; h++) {
            float larger = warp_max(most[h]);
            sum[h] = warp_sum(most[h] == -INF ? 0.f : sum[h] * exp2f(most[h] - larger));
            most[h] = larger;
        }
#pragma unroll
        for (int j = 0; j < (PART_VECTORS + 31) / 32; j++) {
            int vector = lane + 32 * j;
            if (PART_VECTORS % 32 && vector >= PART_VECTORS) continue;
            int pair_index = vector % PART_LANES / 8;
            float most0 = 0.f, most1 = 0.f, sum0 = 0.f, sum1 = 0.f;
#pragma unroll
            for (int h = 0; h < PAIRS; h++)
                if (h == pair_index) {
                    most0 = most[2 * h], most1 = most[2 * h + 1];
                    sum0 = sum[2 * h], sum1 = sum[2 * h + 1];
                }
            float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 8
            for (int p = 0; p < parts; p++) {
                size_t slot = slot_of(p, tile);
                float4 x = __ldcg(args.parts + slot * PART_VECTORS + vector);
                float4 s = __ldcg((const float4*)args.sums + slot * PAIRS + pair_index);
                float w0 = exp2f(s.x - most0), w1 = exp2f(s.z - most1);
                total.x += w0 * x.x, total.y += w1 * x.y, total.z += w0 * x.z, total.w += w1 * x.w;
            }
            write_four(out_heads(tile.sequence), pair_index * 2,
                       vector / PART_LANES * 16 + vector % 8, total, inverse_or_zero(sum0),
                       inverse_or_zero(sum1));
        }
    }
};

__device__ __forceinline__ void compute(const Arguments& args, Ring* ring, u32 stages,
                                        const unsigned char* stage_memory, int head0) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Merger merger = {args, head0 + warp, lane};
    Head head;
    for (int taken = 0;; taken++) {
        int stage = taken % STAGES;
        barrier_wait(&ring->full[stage], taken / STAGES & 1);
        __syncwarp();
        Tile tile = ring->tiles[stage];
        if (tile.sequence < 0) return;
        u32 keys = stages + stage * STAGE_BYTES + warp * HEAD_DIM * 2;
        if (tile.first)
            head.start(stage_memory + stage * STAGE_BYTES + 2 * TILE_BYTES +
                           warp * GROUP * HEAD_DIM * 2,
                       lane);
        if (tile.tokens)
            head.add_tile(keys, keys + TILE_BYTES, tile.tokens, args.scale * LOG2_E, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(&ring->empty[stage]);
        if (!tile.last) continue;
        head.add_up_sums();
        if (tile.first_span == tile.last_span) merger.write_whole(head, tile.sequence);
        else merger.write_part(head, tile);
    }
}

// q, out [sequences, kv_heads * GROUP, HEAD_DIM]; caches [pages, page size, kv_heads, HEAD_DIM].
// Grid (blocks, kv_heads / HEADS), (HEADS + 1) warps, STAGES * STAGE_BYTES + sizeof(Ring) shared.
extern "C" __global__ void __launch_bounds__((HEADS + 1) * 32, 1)
    decode_attention(const u16* q, const u16* k_cache, const u16* v_cache, u16* out,
                     const int* page_table, const int* rows, const int* kv_lens,
                     const int* sequence_tile, const int2* sequence_span, const int* span_tile,
                     const int* span_sequence, float4* parts, float2* sums, int* arrived,
                     int* tickets, int spans, int kv_heads, int max_pages, int page_shift,
                     int window, float scale) {
    extern __shared__ __align__(128) unsigned char memory[];
    Arguments args = {q, k_cache, v_cache, out, page_table, rows, kv_lens, sequence_tile,
                      sequence_span, span_tile, span_sequence, parts, sums, arrived, tickets,
                      spans, kv_heads, max_pages, page_shift, window, scale};
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
    } else {
        Streamer streamer = {args, ring, shared_address(memory), head0, (int)threadIdx.x % 32,
                             read_once()};
        streamer.run();
    }
}
