// Sampling with filters: top-k, top-p, min-p.
//
// The largest logit of each thread's piece of the row is known. From those, and from the mass that is
// needed, follows a bound below which nothing stays; most often only a few dozen logits reach it: they
// are collected, and each looks at all others to see whether it stays and what mass lies before it.
// Rows where more reach it take the slow way: a search over the bits of a float, re-reading the row.
#pragma once
#include "logits.cuh"

constexpr int CANDIDATES = 1024;
constexpr int MAX_MAXIMA_CHUNKS = 32;  // whose maxima fit into shared memory

struct Filters {
    int top_k;
    float top_p, min_p;
    bool by_rank, by_mass;
    float whole = 0.f, needed = INF;  // mass: of the row or of what top_k leaves, and for top_p

    __device__ Filters(int k, float p, float least, int size)
        : top_k(k), top_p(p), min_p(least), by_rank(k > 0 && k < size),
          by_mass(p < 1.f) {}
    __device__ bool any() const { return by_rank || by_mass || min_p > 0.f; }
    // The mass that top_p is a share of.
    __device__ void set_whole(double mass) {
        whole = (float)mass;
        if (by_mass) needed = top_p * whole;
    }
};

// In shared memory, over the two buffers of chunks.
struct Candidates {
    float maxima[MAX_MAXIMA_CHUNKS * THREADS];
    float logit[CANDIDATES], mass[CANDIDATES], kept[CANDIDATES];
    u32 id[CANDIDATES];
};

// The k-th largest of the pieces' maxima, which at least k logits reach; -INF if there are fewer.
__device__ float kth_maximum(const float* maxima, int chunks, int k) {
    u32 low = 0, high = (0xffffffffu >> KEY_SHIFT);
    if (k > chunks * THREADS) return -INF;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        int count = 0, total;
        for (int c = 0; c < chunks; c++)
            count += key_of(maxima[c * THREADS + threadIdx.x]) >= middle;
        count_before(count, total);
        if (total >= k) low = middle;
        else high = middle;
    }
    return of_order(low << KEY_SHIFT);
}

// A logit that all that stay reach; with top_k and top_p both, all that top_k leaves, since top_p is of
// their mass.
__device__ float bound_of(const Row& row, const Filters& filters, const float* maxima, int chunks) {
    constexpr float MARGIN = 0.01f;  // against rounding, in powers of two of the mass
    float depth = -INF;
    // Further down than this lies less than 1 - p of the mass, whatever the logits are.
    if (filters.by_mass) depth = log2f((1.f - filters.top_p) * filters.whole / row.size);
    if (filters.min_p > 0.f) depth = fmaxf(depth, log2f(filters.min_p));
    if (filters.by_rank && filters.by_mass) depth = -INF;
    float bound = row.largest + (depth - MARGIN) / row.per_logit;
    if (filters.by_rank && maxima)
        bound = fmaxf(bound, kth_maximum(maxima, chunks, filters.top_k));
    return bound;
}

// All logits from `bound` on, in an order that the row decides. Returns how many there are: over
// CANDIDATES, none are written.
__device__ int collect(const Row& row, float bound, int chunks, Candidates& candidates) {
    int own = 0, count = 0;
    for (int writing = 0; writing < 2; writing++) {
#pragma unroll 1
        for (int c = 0; c < chunks; c++) {
            if (!(candidates.maxima[c * THREADS + threadIdx.x] >= bound)) continue;
#pragma unroll 4
            for (int g = 0; g < GROUPS; g++) {
                int id = 8 * (Piece::first_group(c) + g * 32);
                float x[8];
                row.read(id, x);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    if (!(x[i] >= bound)) continue;
                    if (writing) candidates.logit[own] = x[i], candidates.id[own] = id + i;
                    own++;
                }
            }
        }
        if (!writing) own = count_before(own, count);
        if (count > CANDIDATES) return count;
    }
    __syncthreads();
    return count;
}

// The id drawn among the candidates.
__device__ u32 draw_of(const Row& row, Filters& filters, Candidates& all, int count, double u) {
    for (int i = threadIdx.x; i < count; i += THREADS) all.mass[i] = row.mass(all.logit[i]);
    __syncthreads();
    // First the mass above each that top_k leaves, and the mass of all those; then what stays.
    float ranked_mass = 0.f;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        int larger = 0;
        float above = 0.f, logit = all.logit[i];
#pragma unroll 4
        for (int j = 0; j < count; j++)
            if (all.logit[j] > logit) larger++, above += all.mass[j];
        bool ranked = !filters.by_rank || larger < filters.top_k;
        all.kept[i] = ranked ? above : INF;
        if (ranked) ranked_mass += all.mass[i];
    }
    if (filters.by_rank) filters.set_whole(block_total(ranked_mass));
    float kept_mass = 0.f;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        float above = all.kept[i];
        bool stays = (above < filters.needed || above == 0.f) && all.mass[i] >= filters.min_p;
        kept_mass += all.kept[i] = stays ? all.mass[i] : 0.f;
    }
    double total = block_total(kept_mass);
    double target = u * total;
    u32 found = NONE, last = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) {
        if (all.kept[i] == 0.f) continue;
        double up_to = all.kept[i];
        u32 id = all.id[i];
#pragma unroll 4
        for (int j = 0; j < count; j++)
            if (all.id[j] < id) up_to += (double)all.kept[j];
        if (up_to > target) found = min(found, id);
        last = max(last, id);
    }
    found = block_least(found);
    last = NONE - block_least(NONE - last);
    return found != NONE ? found : last;
}

// The smallest key that stays: the largest t for which k logits, or a mass of `needed`, are >= t.
// Either condition may be off (k = 0, needed = INF); with too little of both, everything stays.
// Keys from that of `least_logit` on are searched, three at a time.
__device__ u32 find_least_key(const Row& row, int chunks, Element* buffers, int k, float needed,
                              float least_logit) {
    u32 low = key_of(least_logit), high = key_of(row.largest) + 1;
    while (high - low > 1) {
        u32 at[3];
        float sums[6] = {};  // counts, exact below 2^24, and masses
        for (int j = 0; j < 3; j++) at[j] = low + max(1u, (u32)((u64)(high - low) * (j + 1) / 4));
        for_each_chunk(row, chunks, buffers, [&](const Piece& piece, int) {
#pragma unroll 1
            for (int g = 0; g < GROUPS; g++) {
                float x[8];
                piece.get(g, x);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    u32 key = key_of(x[i]);
                    float mass = row.mass(x[i]);
#pragma unroll
                    for (int j = 0; j < 3; j++)
                        if (key >= at[j]) sums[j] += 1.f, sums[3 + j] += mass;
                }
            }
        });
        block_sums(sums);
        for (int j = 2; j >= 0; j--) {
            if ((k > 0 && sums[j] >= (float)k) || sums[3 + j] >= needed) {
                low = at[j];
                break;
            }
            high = at[j];
        }
    }
    return low;
}

// What stays of each chunk, into masses[chunks].
__device__ void sum_kept(const Row& row, float* masses, int chunks, Element* buffers) {
    for_each_chunk(row, chunks, buffers, [&](const Piece& piece, int chunk) {
        float stays[1] = {0.f};
#pragma unroll 1
        for (int g = 0; g < GROUPS; g++) {
            float x[8];
            piece.get(g, x);
#pragma unroll
            for (int i = 0; i < 8; i++) stays[0] += row.kept_mass(x[i]);
        }
        block_sums(stays);
        if (threadIdx.x == 0) masses[chunk] = stays[0];
    });
    __syncthreads();
}

// Sets what of the row stays, and masses[chunks] to it, with the whole row read several times.
// Nothing below `least_logit` stays.
__device__ void filter_slowly(Row& row, Filters& filters, float* masses, int chunks,
                              Element* buffers, float least_logit) {
    // 2^-200 of the largest is nothing.
    least_logit = fmaxf(least_logit, row.largest - 200.f / row.per_logit);
    if (filters.by_rank) {
        row.least_key = find_least_key(row, chunks, buffers, filters.top_k, INF, least_logit);
        least_logit = of_order(row.least_key << KEY_SHIFT);
    }
    if (filters.by_rank && filters.by_mass) {
        sum_kept(row, masses, chunks, buffers);
        filters.set_whole(block_total(threadIdx.x < chunks ? (double)masses[threadIdx.x] : 0.));
    }
    if (filters.by_mass)
        row.least_key = find_least_key(row, chunks, buffers, 0, filters.needed, least_logit);
    row.least_mass = filters.min_p;
    sum_kept(row, masses, chunks, buffers);
}
