// One key-value head in decode attention: preparing its query and new key, and adding tiles up.
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
