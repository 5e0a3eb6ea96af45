// One key-value head in decode attention: adding tiles up, and merging the parts of a sequence.
// Compiled with HEADS, GROUP, HEAD_DIM, STAGES and FUSED (decode_attention.cu).
#pragma once
#include "plan.cuh"
#include "tensor_core.cuh"

constexpr int TOKEN_BYTES = HEADS * HEAD_DIM * 2;
constexpr int TOKEN_STRIDE = TOKEN_BYTES + 16;
constexpr int TILE_BYTES = TILE * TOKEN_STRIDE;
constexpr int QUERY_BYTES = HEADS * GROUP * HEAD_DIM * 2;
constexpr int ANGLE_BYTES = HEAD_DIM * 4;
constexpr int STAGE_BYTES = 2 * TILE_BYTES + QUERY_BYTES + (FUSED ? ANGLE_BYTES : 0);
constexpr int DIM_STEPS = HEAD_DIM / 16;
constexpr int PAIRS = (GROUP + 1) / 2;    // query heads are held two by two
constexpr int PART_LANES = 8 * PAIRS;     // lanes of a warp that hold query heads that exist
constexpr int PART_VECTORS = DIM_STEPS * PART_LANES;  // float4 of one head's part of a sequence
constexpr int FEW = 3;                    // other parts that are merged in registers
constexpr int MERGE_UNROLL = 8 / PAIRS;
constexpr float LOG2_E = 1.4426950408889634f;
static_assert(GROUP <= 8 && HEAD_DIM % 32 == 0 && HEAD_DIM <= 128);

// What a tile is, told by the streaming threads to the computing warps.
struct __align__(16) Tile {
    int sequence;     // -1: no more
    int skip, tokens; // tokens [skip, tokens) of the tile count
    int first, last;  // of this sequence in this span
    int span, first_span, last_span;  // of the sequence
    int newest;       // slot of its last token, if that is the sequence's newest; else -1
    int position;     // of the sequence's newest token
    int unused[2];
};

struct Arguments {
    const u16 *q, *q_norm, *k_norm;
    const float* cos_sin;
    u16 *k_cache, *v_cache, *out;
    const int *page_table, *rows;  // rows null: the plan has them
    const Sequence* plan_sequences;
    const Span* plan_spans;
    float4* parts;  // [2 * spans, kv_heads, PART_VECTORS]
    float2* sums;   // [2 * spans, kv_heads, 2 * PAIRS] the largest score, the sum of weights
    int* arrived;   // [sequences, kv_heads]
    int kv_heads, max_pages, page_shift, window;
    float scale, eps;
};

// A pair of dimensions (i, i + 1) and its partners HEAD_DIM / 2 further on, of one head.
struct Quad {
    float first[2], second[2];

    __device__ Quad(u32 a, u32 b) : first{low(a), high(a)}, second{low(b), high(b)} {}
    __device__ float squares() const {
        return first[0] * first[0] + first[1] * first[1] + second[0] * second[0] +
               second[1] * second[1];
    }
    // Rounded, as the norm of the reference is.
    __device__ void scale(float by, const u16* norm, int i) {
        u32 a = *(const u32*)(norm + i), b = *(const u32*)(norm + i + HEAD_DIM / 2);
        *this = Quad(pair(first[0] * by * low(a), first[1] * by * high(a)),
                     pair(second[0] * by * low(b), second[1] * by * high(b)));
    }
    __device__ void turn(const float* cos_sin, int i) {
        for (int j = 0; j < 2; j++) {
            float c = cos_sin[i + j], s = cos_sin[i + j + HEAD_DIM / 2];
            float x = first[j], y = second[j];
            first[j] = x * c - y * s;
            second[j] = y * c + x * s;
        }
    }
    __device__ u32 low_pair() const { return pair(first[0], first[1]); }
    __device__ u32 high_pair() const { return pair(second[0], second[1]); }
};

// The new key of one head, in shared memory: normed and rotated in place, and stored.
__device__ __forceinline__ void turn_and_store_key(u32* key, const u16* norm, float eps,
                                                   const float* cos_sin, u16* to, int lane) {
    bool active = lane < HEAD_DIM / 4;
    Quad quad(active ? key[lane] : 0, active ? key[lane + HEAD_DIM / 4] : 0);
    if (FUSED == 2) {
        float inverse = rsqrtf(warp_sum(quad.squares()) / HEAD_DIM + eps);
        if (active) quad.scale(inverse, norm, 2 * lane);
    }
    if (!active) return;
    quad.turn(cos_sin, 2 * lane);
    ((u32*)to)[lane] = key[lane] = quad.low_pair();
    ((u32*)to)[lane + HEAD_DIM / 4] = key[lane + HEAD_DIM / 4] = quad.high_pair();
}

__device__ __forceinline__ void store_value(const u32* value, u16* to, int lane) {
    for (int i = lane; i < HEAD_DIM / 2; i += 32) ((u32*)to)[i] = value[i];
}

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

    // Norms and rotates the query. A lane has of its head lane / 4 the dimensions 16 i + 2 (lane % 4),
    // the next, and those 8 further on.
    __device__ void turn_query(const u16* norm, float eps, const float* cos_sin, int lane) {
        constexpr int HALF = DIM_STEPS / 2;
        float squares = 0.f;
        if (FUSED == 2) {
#pragma unroll
            for (int i = 0; i < HALF; i++)
                for (int j = 0; j < 2; j++)
                    squares += Quad(query[i][j], query[i + HALF][j]).squares();
            squares += __shfl_xor_sync(FULL, squares, 1);
            squares += __shfl_xor_sync(FULL, squares, 2);
        }
        float inverse = rsqrtf(squares / HEAD_DIM + eps);
#pragma unroll
        for (int i = 0; i < HALF; i++)
            for (int j = 0; j < 2; j++) {
                int dim = 16 * i + 8 * j + lane % 4 * 2;
                Quad quad(query[i][j], query[i + HALF][j]);
                if (FUSED == 2) quad.scale(inverse, norm, dim);
                quad.turn(cos_sin, dim);
                query[i][j] = quad.low_pair();
                query[i + HALF][j] = quad.high_pair();
            }
    }

    // Rows past the last token repeat it: what lies there is left over, and may not be a number.
    __device__ void add_tile(u32 keys, u32 values, int skip, int tokens, float scale, int lane) {
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
        int token = lane / 4;
        if (token < skip || token >= tokens) score[0] = score[1] = -INF;
        if (token + 8 < skip || token + 8 >= tokens) score[2] = score[3] = -INF;
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

// Counters between the warps that hold parts of one sequence: an arrival publishes what the warp has
// written, and seeing one shows what its warp wrote.
__device__ __forceinline__ int arrivals(const int* counter) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}
__device__ __forceinline__ int arrive(int* counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}

struct Merger {
    const Arguments& args;
    int kv_head, lane;

    __device__ u16* out_heads(int sequence) const {
        return args.out + ((size_t)sequence * args.kv_heads + kv_head) * GROUP * HEAD_DIM;
    }
    __device__ size_t slot_of(int span, int first_span) const {
        return part_slot(span, span > first_span) * args.kv_heads + kv_head;
    }
    // Lanes hold vectors so that those that exist lie together.
    __device__ int own_vector() const { return lane % 4 * 8 + lane / 4; }

    __device__ void finish(Head& head, const Tile& tile) const {
        head.add_up_sums();
        int others = tile.last_span - tile.first_span;
        if (others > 0) {
            int* counter = args.arrived + (size_t)tile.sequence * args.kv_heads + kv_head;
            bool few = others <= FEW;
            // Often all others have come: then this part need not be written.
            int before = lane == 0 && few ? arrivals(counter) : 0;
            before = __shfl_sync(FULL, before, 0);
            if (before < others) {
                write_part(head, tile);
                __syncwarp();
                if (lane == 0) before = arrive(counter);
                before = __shfl_sync(FULL, before, 0);
                if (before < others) return;
            }
            if (lane == 0) *counter = 0;
            if (!few) {
                merge_many(tile);
                return;
            }
            merge_few(head, tile);
        }
        write_whole(head, tile.sequence);
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
        if (lane % 4 >= PAIRS) return;
        size_t slot = slot_of(tile.span, tile.first_span);
        float4* parts = args.parts + slot * PART_VECTORS + own_vector();
#pragma unroll
        for (int i = 0; i < DIM_STEPS; i++) {
            const float* x = head.out[i];
            __stcg(parts + i * PART_LANES, make_float4(x[0], x[1], x[2], x[3]));
        }
        if (lane < 4)
            for (int h = 0; h < 2; h++)
                __stcg(args.sums + slot * 2 * PAIRS + lane * 2 + h,
                       make_float2(head.most[h], head.sum[h]));
    }

    // Adds the other parts to this one, which is in registers. All are weighed first and then added
    // in their order, so that it does not matter whose registers those are.
    __device__ void merge_few(Head& head, const Tile& tile) const {
        if (lane % 4 >= PAIRS) return;
        int parts = tile.last_span - tile.first_span + 1, own = tile.span - tile.first_span;
        float4 sums[FEW + 1];
        float most0 = head.most[0], most1 = head.most[1];
#pragma unroll
        for (int p = 0; p <= FEW; p++) {
            sums[p] = make_float4(head.most[0], head.sum[0], head.most[1], head.sum[1]);
            if (p >= parts || p == own) continue;
            size_t slot = slot_of(tile.first_span + p, tile.first_span);
            sums[p] = __ldcg((const float4*)args.sums + slot * PAIRS + lane % 4);
            most0 = fmaxf(most0, sums[p].x), most1 = fmaxf(most1, sums[p].z);
        }
        float total[DIM_STEPS][4] = {};
        head.sum[0] = head.sum[1] = 0.f;
#pragma unroll
        for (int p = 0; p <= FEW; p++) {
            if (p >= parts) continue;
            float w0 = exp2f(sums[p].x - most0), w1 = exp2f(sums[p].z - most1);
            head.sum[0] += w0 * sums[p].y, head.sum[1] += w1 * sums[p].w;
            size_t slot = slot_of(tile.first_span + p, tile.first_span);
            const float4* part = args.parts + slot * PART_VECTORS + own_vector();
#pragma unroll
            for (int i = 0; i < DIM_STEPS; i++) {
                const float* mine = head.out[i];
                float4 x = p == own ? make_float4(mine[0], mine[1], mine[2], mine[3])
                                    : __ldcg(part + i * PART_LANES);
                total[i][0] += w0 * x.x, total[i][1] += w1 * x.y;
                total[i][2] += w0 * x.z, total[i][3] += w1 * x.w;
            }
        }
#pragma unroll
        for (int i = 0; i < DIM_STEPS; i++)
            for (int c = 0; c < 4; c++) head.out[i][c] = total[i][c];
    }

    // The same from memory, all lanes at work and many loads in flight.
    __device__ void merge_many(const Tile& tile) const {
        int parts = tile.last_span - tile.first_span + 1;
        float most[2 * PAIRS], sum[2 * PAIRS];
#pragma unroll
        for (int h = 0; h < 2 * PAIRS; h++) most[h] = -INF, sum[h] = 0.f;
        for (int p = lane; p < parts; p += 32) {
            const float2* sums =
                args.sums + slot_of(tile.first_span + p, tile.first_span) * 2 * PAIRS;
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
        constexpr int EACH = (PART_VECTORS + 31) / 32;
        float4 total[EACH] = {};
        float most0[EACH], most1[EACH], sum0[EACH], sum1[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++)
#pragma unroll
            for (int h = 0; h < PAIRS; h++)
                if (h == pair_of(j)) {
                    most0[j] = most[2 * h], most1[j] = most[2 * h + 1];
                    sum0[j] = sum[2 * h], sum1[j] = sum[2 * h + 1];
                }
#pragma unroll MERGE_UNROLL
        for (int p = 0; p < parts; p++) {
            size_t slot = slot_of(tile.first_span + p, tile.first_span);
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                if (PART_VECTORS % 32 && lane + 32 * j >= PART_VECTORS) continue;
                float4 x = __ldcg(args.parts + slot * PART_VECTORS + lane + 32 * j);
                float4 s = __ldcg((const float4*)args.sums + slot * PAIRS + pair_of(j));
                float w0 = exp2f(s.x - most0[j]), w1 = exp2f(s.z - most1[j]);
                total[j].x += w0 * x.x, total[j].y += w1 * x.y;
                total[j].z += w0 * x.z, total[j].w += w1 * x.w;
            }
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            int vector = lane + 32 * j;
            if (PART_VECTORS % 32 && vector >= PART_VECTORS) continue;
            write_four(out_heads(tile.sequence), pair_of(j) * 2,
                       vector / PART_LANES * 16 + vector % 8, total[j], inverse_or_zero(sum0[j]),
                       inverse_or_zero(sum1[j]));
        }
    }
    // Which pair of query heads this lane's j-th vector is of.
    __device__ int pair_of(int j) const { return (lane + 32 * j) % PART_LANES / 8; }
};
