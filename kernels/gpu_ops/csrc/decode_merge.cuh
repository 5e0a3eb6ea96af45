// Writing a head's output in decode attention, and merging the parts of a sequence that several blocks
// hold. Compiled as decode_head.cuh.
#pragma once
#include "decode_head.cuh"

constexpr int FEW = 3;  // other parts that are merged in registers
constexpr int MERGE_UNROLL = 8 / PAIRS;

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
