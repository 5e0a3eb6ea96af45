// A token id per row of logits, by the definition in ops.py: `sample`.
//
// One launch. A block reads one chunk of CHUNK logits of one row: its largest logit and the mass
// beside it. The block that finishes a row's last chunk draws: it finds the chunk in which the
// running mass passes u times the whole, reads that chunk again, and finds the id. A row with filters
// draws as sample_filter.cuh says; other rows do not pay for it.
//
// A chunk lies in shared memory, and loops are not unrolled over it: this code runs once a step, so
// its instructions come from memory each time, and straight-line code took 20 us to arrive.
//
// A row's id depends on that row alone: chunks, and the order of every sum, are fixed by the
// vocabulary's size. `arrived` is 0 between launches.
#include "sample_filter.cuh"

// Philox4x32-10 (Salmon et al., SC'11), word 0 of the block at counter (position, 0, 0, 0).
__device__ __forceinline__ u32 random_word(u32 key0, u32 key1, u32 position) {
    u32 a = position, b = 0, c = 0, d = 0;
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 high0 = __umulhi(0xD2511F53u, a), low0 = 0xD2511F53u * a;
        u32 high1 = __umulhi(0xCD9E8D57u, c), low1 = 0xCD9E8D57u * c;
        a = high1 ^ b ^ key0, b = low1, c = high0 ^ d ^ key1, d = low0;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    return a;
}

// A chunk's largest logit, the lowest id that has it, and its mass relative to that logit.
struct __align__(16) ChunkSum {
    float largest, mass;
    u32 id, unused;
};

// `maxima`, where given, gets the largest logit of each thread's piece.
__device__ ChunkSum sum_chunk(const Row& row, int chunk, Element* buffer, float* maxima) {
    Piece piece = row.load(chunk, buffer);
    wait_groups<0>();
    float own = -INF, x[8];
#pragma unroll 2
    for (int g = 0; g < GROUPS; g++) {
        piece.get(g, x);
#pragma unroll
        for (int i = 0; i < 8; i++) own = fmaxf(own, x[i]);
    }
    if (maxima) __stcg(maxima + threadIdx.x, own);
    float largest = block_largest(own);
    u32 id = NONE;
    if (own == largest) {
#pragma unroll 1
        for (int g = GROUPS - 1; g >= 0; g--) {
            piece.get(g, x);
#pragma unroll
            for (int i = 7; i >= 0; i--)
                if (x[i] == largest) id = 8 * piece.group(g) + i;
        }
    }
    id = block_least(id);
    // A greedy row needs no mass, and a chunk of -INF has none.
    if (row.per_logit == 0.f || largest == -INF) return {largest, 0.f, id, 0};
    float mass[1] = {0.f};
#pragma unroll 2
    for (int g = 0; g < GROUPS; g++) {
        piece.get(g, x);
#pragma unroll
        for (int i = 0; i < 8; i++) mass[0] += exp2f((x[i] - largest) * row.per_logit);
    }
    block_sums(mass);
    return {largest, mass[0], id, 0};
}

// In the warp that has it: the first id at which the mass, `passed` before this warp, exceeds `target`;
// or, should sums in another order fall short of it, the last id that stays.
__device__ u32 find_in_warp(const Row& row, const Piece& piece, double passed, double target) {
    int lane = threadIdx.x % 32;
    u32 found = NONE, last = 0;
#pragma unroll 1
    for (int g = 0; g < GROUPS; g++) {
        float x[8];
        piece.get(g, x);
        float own = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = row.kept_mass(x[i]);
            own += x[i];
            if (x[i] > 0.f) last = 8 * piece.group(g) + i;
        }
        float up_to = own;
        for (int step = 1; step < 32; step *= 2) {
            float left = __shfl_up_sync(FULL, up_to, step);
            if (lane >= step) up_to += left;
        }
        float left = (float)(target - passed) - (up_to - own);  // to the target, from this lane on
        if (found == NONE && own > left) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                left -= x[i];
                if (found == NONE && x[i] > 0.f && left < 0.f) found = 8 * piece.group(g) + i;
            }
        }
        passed += (double)__shfl_sync(FULL, up_to, 31);
    }
    found = __reduce_min_sync(FULL, found);
    last = __reduce_max_sync(FULL, last);
    return found != NONE ? found : last;
}

// The first id, in order, at which the running mass exceeds u times the whole.
// masses[chunks] is what stays of each chunk, relative to the row's largest logit.
__device__ u32 draw(const Row& row, const float* masses, int chunks, Element* buffer, double u) {
    __shared__ int chunk, chosen_warp;
    __shared__ u32 found;
    __shared__ double before_chunk;
    if (threadIdx.x == 0) chunk = chosen_warp = 0, before_chunk = 0.;
    double own = threadIdx.x < chunks ? (double)masses[threadIdx.x] : 0., total;
    double before = sum_before(own, total);
    double target = u * total;
    if (own > 0. && before <= target) atomicMax(&chunk, (int)threadIdx.x);
    __syncthreads();
    if (threadIdx.x == chunk) before_chunk = before;
    Piece piece = row.load(chunk, buffer);
    wait_groups<0>();
    float own_piece = 0.f;
#pragma unroll 1
    for (int g = 0; g < GROUPS; g++) {
        float x[8];
        piece.get(g, x);
#pragma unroll
        for (int i = 0; i < 8; i++) own_piece += row.kept_mass(x[i]);
    }
    own = own_piece;
    before = sum_before(own, total);
    __syncthreads();
    before += before_chunk;
    if (own > 0. && before <= target) atomicMax(&chosen_warp, (int)threadIdx.x / 32);
    // Of the warp's first lane: the mass before the warp.
    before = __shfl_sync(FULL, before, 0);
    __syncthreads();
    if (threadIdx.x / 32 == chosen_warp) {
        u32 id = find_in_warp(row, piece, before, target);
        if (threadIdx.x % 32 == 0) found = id;
    }
    __syncthreads();
    return found;
}

// The same among what the filters leave.
__device__ u32 draw_filtered(Row& row, Filters& filters, float* masses, const float* maxima,
                             int chunks, Element* buffers, double u) {
    Candidates& candidates = *(Candidates*)buffers;
    filters.set_whole(block_total(threadIdx.x < chunks ? (double)masses[threadIdx.x] : 0.));
    if (maxima)
        for (int c = 0; c < chunks; c++)
            candidates.maxima[c * THREADS + threadIdx.x] =
                __ldcg(maxima + c * THREADS + threadIdx.x);
    float bound = bound_of(row, filters, maxima ? candidates.maxima : nullptr, chunks);
    int count = maxima ? collect(row, bound, chunks, candidates) : CANDIDATES + 1;
    if (count <= CANDIDATES) return draw_of(row, filters, candidates, count, u);
    __syncthreads();
    filter_slowly(row, filters, masses, chunks, buffers, bound);
    return draw(row, masses, chunks, buffers, u);
}

// logits[n, size], rows `stride` apart -> ids[n], and last_token[rows[n]] where given.
// Parameters are per row of logits, or, with `rows`, at rows[n]; position is per row of logits.
// sums [n, chunks], grid (chunks, n), two chunks of dynamic shared memory.
// host [PLACES, host_rows] (id, launch), in the host's memory (host_ring.py); may be null. This is part of
// launch launches[0] - 1.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    sample(const Element* logits, const int* rows, const float* temperature, const int* top_k,
           const float* top_p, const float* min_p, const int* seed_lo, const int* seed_hi,
           const int* position, int* ids, int* last_token, ChunkSum* sums, float* maxima, int* arrived,
           int size, int stride, int2* host, int host_rows, const int* launches) {
    extern __shared__ __align__(16) Element buffers[];
    __shared__ float masses[MAX_CHUNKS];
    __shared__ int arrivals;
    int index = blockIdx.y, chunks = gridDim.x;
    int state = rows ? rows[index] : index;
    float heat = temperature[state];
    Filters filters(top_k[state], top_p[state], min_p[state], size);
    bool filtered = heat > 0.f && filters.any();
    wait_for_previous();
    let_next_start();
    Row row = {logits + (size_t)index * stride, size, stride % 8 == 0,
               heat > 0.f ? LOG2_E / heat : 0.f, 0.f, 0, 0.f};
    ChunkSum* row_sums = sums + (size_t)index * chunks;
    maxima = chunks <= MAX_MAXIMA_CHUNKS ? maxima + (size_t)index * chunks * THREADS : nullptr;
    float* own_maxima = filtered && maxima ? maxima + blockIdx.x * THREADS : nullptr;
    ChunkSum sum = sum_chunk(row, blockIdx.x, buffers, own_maxima);
    if (threadIdx.x == 0) {
        row_sums[blockIdx.x] = sum;
        __threadfence();
        arrivals = atomicAdd(arrived + index, 1);
        if (arrivals == chunks - 1) arrived[index] = 0;
        __threadfence();
    }
    __syncthreads();
    if (arrivals < chunks - 1) return;

    float4 mine = make_float4(-INF, 0.f, __uint_as_float(NONE), 0.f);
    if (threadIdx.x < chunks) mine = __ldcg((const float4*)(row_sums + threadIdx.x));
    row.largest = block_largest(mine.x);
    u32 id = block_least(mine.x == row.largest ? __float_as_uint(mine.z) : NONE);
    if (heat > 0.f) {
        masses[threadIdx.x] = mine.y > 0.f ? mine.y * row.mass(mine.x) : 0.f;
        __syncthreads();
        u32 word = random_word(seed_lo[state], seed_hi[state], position[index]);
        double u = (double)word / 4294967296.;
        id = filtered ? draw_filtered(row, filters, masses, maxima, chunks, buffers, u)
                      : draw(row, masses, chunks, buffers, u);
    }
    if (threadIdx.x == 0) {
        id = min(id, (u32)size - 1);  // a row of NaN has no largest
        ids[index] = id;
        if (last_token) last_token[state] = id;
        if (host) {
            int launch = (__ldcg(launches) - 1) & COUNT_MASK;
            host[(size_t)(launch % PLACES) * host_rows + index] = make_int2(id, launch);
        }
    }
}
