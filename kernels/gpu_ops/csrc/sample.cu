// A token id per row of logits, by the definition in ops.py: `sample`.
//
// One launch. A block reads one chunk of CHUNK logits of one row: its largest logit and the mass
// beside it. The block that finishes a row's last chunk draws: it finds the chunk in which the
// running mass passes u times the whole, reads that chunk again, and finds the id. A row with filters
// first looks for the smallest logit that stays, by bisection over the bits of a float, re-reading
// the row from L2 each time; other rows do not pay for it.
//
// A row's id depends on that row alone: chunks, and the order of every sum, are fixed by the
// vocabulary's size. `arrived` is 0 between launches.
#include "device.cuh"

constexpr int THREADS = 256;
constexpr int GROUPS = 2;  // of eight logits, a thread and chunk
constexpr int CHUNK = THREADS * GROUPS * 8;
constexpr int MAX_CHUNKS = THREADS;
constexpr float LOG2_E = 1.4426950408889634f;
// A float's order as an unsigned integer; of a bf16 only the upper bits differ.
constexpr int KEY_SHIFT = ELEMENT_BYTES == 4 ? 0 : 16;

__device__ __forceinline__ u32 key_of(float x) {
    u32 bits = __float_as_uint(x);
    return (bits & 0x80000000u ? ~bits : bits | 0x80000000u) >> KEY_SHIFT;
}
__device__ __forceinline__ float value_of(u32 key) {
    key <<= KEY_SHIFT;
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

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

// Reductions over the block: every thread gets the result. They begin with a barrier, so that one
// scratch serves them all.
template <class T, class Join>
__device__ __forceinline__ T over_block(T x, Join join) {
    __shared__ T scratch[THREADS / 32];
    for (int step = 16; step; step >>= 1) x = join(x, __shfl_xor_sync(FULL, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
    for (int w = 1; w < THREADS / 32; w++) x = join(x, scratch[w]);
    return x;
}
struct Sum {
    template <class T>
    __device__ T operator()(T a, T b) const { return a + b; }
};
struct Largest {
    template <class T>
    __device__ T operator()(T a, T b) const { return a > b ? a : b; }
};

// The sum over the threads before this one; `total` gets all.
__device__ __forceinline__ double before_in_block(double own, double& total) {
    __shared__ double scratch[THREADS / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double up_to = own;
    for (int step = 1; step < 32; step *= 2) {
        double left = __shfl_up_sync(FULL, up_to, step);
        if (lane >= step) up_to += left;
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = up_to;
    __syncthreads();
    double before = 0.;
    total = 0.;
    for (int w = 0; w < THREADS / 32; w++) {
        if (w < warp) before += scratch[w];
        total += scratch[w];
    }
    return before + up_to - own;
}

struct Row {
    const Element* logits;
    int size, aligned;  // whether groups of eight may be read at once
    float per_logit;    // log2(e) / temperature
    float largest;      // logit
    u32 least_key;      // of those that stay
    float least_mass;   // min_p

    // Eight logits at 8 * group; -INF past the end.
    __device__ void read(int group, float (&x)[8]) const {
        if (aligned && 8 * group + 8 <= size) {
            load8(logits, group, x);
            return;
        }
        for (int i = 0; i < 8; i++) {
            x[i] = -INF;
            if (8 * group + i >= size) continue;
#if ELEMENT_BYTES == 4
            x[i] = logits[8 * group + i];
#else
            x[i] = low(logits[8 * group + i]);
#endif
        }
    }

    __device__ float mass(float logit) const { return exp2f((logit - largest) * per_logit); }
    __device__ float kept_mass(float logit) const {
        float e = mass(logit);
        return key_of(logit) >= least_key && e >= least_mass ? e : 0.f;
    }
};

// A chunk's largest logit and the lowest id that has it, and its mass relative to that logit.
struct ChunkSum {
    u32 key, id;
    float largest, mass;
};

__device__ __forceinline__ ChunkSum sum_chunk(const Row& row, int chunk) {
    float x[GROUPS][8];
    u64 best = 0;
    int group0 = chunk * (CHUNK / 8) + threadIdx.x;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        row.read(group0 + g * THREADS, x[g]);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u32 id = 8 * (group0 + g * THREADS) + i;
            u64 candidate = (u64)key_of(x[g][i]) << 32 | (0xffffffffu - id);
            if (id < row.size && candidate > best) best = candidate;
        }
    }
    best = over_block(best, Largest());
    ChunkSum sum = {(u32)(best >> 32), 0xffffffffu - (u32)best, 0.f, 0.f};
    sum.largest = value_of(sum.key);
    float mass = 0.f;
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int i = 0; i < 8; i++) mass += exp2f((x[g][i] - sum.largest) * row.per_logit);
    // A greedy row needs no mass, and a chunk of -INF has none.
    bool counts = row.per_logit > 0.f && sum.largest > -INF;
    sum.mass = counts ? over_block(mass, Sum()) : 0.f;
    return sum;
}

// The smallest key that stays: the largest t for which k logits, or a mass of `needed`, are >= t.
// Either condition may be off (k = 0, needed = INF); with too little of both, everything stays.
__device__ u32 least_key(const Row& row, int k, float needed, float least_logit) {
    u32 low = key_of(least_logit), high = key_of(row.largest) + 1;
    while (high - low > 1) {
        u32 middle = low + (high - low) / 2;
        int count = 0;
        float mass = 0.f;
        for (int group = threadIdx.x; 8 * group < row.size; group += THREADS) {
            float x[8];
            row.read(group, x);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (key_of(x[i]) >= middle) count++, mass += row.mass(x[i]);
        }
        count = over_block(count, Sum());
        mass = over_block(mass, Sum());
        if ((k > 0 && count >= k) || mass >= needed) low = middle;
        else high = middle;
    }
    return low;
}

// The first id, in order, at which the running mass exceeds u times the whole.
// masses[chunks] is what stays of each chunk, relative to the row's largest logit.
__device__ u32 draw(const Row& row, const float* masses, int chunks, double u) {
    __shared__ int chosen, found, last;
    __shared__ double mass_before;
    if (threadIdx.x == 0) chosen = 0, found = row.size, last = 0, mass_before = 0.;
    double own = threadIdx.x < chunks ? (double)masses[threadIdx.x] : 0., total;
    double before = before_in_block(own, total);
    double target = u * total;
    if (own > 0. && before <= target) atomicMax(&chosen, (int)threadIdx.x);
    __syncthreads();
    if (threadIdx.x == chosen) mass_before = before;
    __syncthreads();
    double passed = mass_before;
    for (int g = 0; g < GROUPS; g++) {
        int group = chosen * (CHUNK / 8) + g * THREADS + threadIdx.x;
        float x[8];
        double mass = 0., whole;
        row.read(group, x);
        for (int i = 0; i < 8; i++) mass += (double)(x[i] = row.kept_mass(x[i]));
        double at = passed + before_in_block(mass, whole);
        for (int i = 0; i < 8; i++) {
            at += (double)x[i];
            if (x[i] > 0.f) {
                atomicMax(&last, 8 * group + i);
                if (at > target) {
                    atomicMin(&found, 8 * group + i);
                    break;
                }
            }
        }
        passed += whole;
    }
    __syncthreads();
    // Sums of a chunk in two orders differ in their last bits: then its last id is the one.
    return found < row.size ? found : last;
}

// logits[n, size], rows `stride` apart -> ids[n], and last_token[rows[n]] where given.
// Parameters are per row of logits, or, with `rows`, at rows[n]; position is per row of logits.
// sums [n, chunks], grid (chunks, n).
extern "C" __global__ void __launch_bounds__(THREADS)
    sample(const Element* logits, const int* rows, const float* temperature, const int* top_k,
           const float* top_p, const float* min_p, const int* seed_lo, const int* seed_hi,
           const int* position, int* ids, int* last_token, ChunkSum* sums, int* arrived, int size,
           int stride) {
    __shared__ float masses[MAX_CHUNKS];
    __shared__ int arrivals;
    int index = blockIdx.y, chunks = gridDim.x;
    int state = rows ? rows[index] : index;
    float heat = temperature[state];
    wait_for_previous();
    let_next_start();
    Row row = {logits + (size_t)index * stride, size, stride % 8 == 0,
               heat > 0.f ? LOG2_E / heat : 0.f, 0.f, 0, 0.f};
    ChunkSum* row_sums = sums + (size_t)index * chunks;
    ChunkSum sum = sum_chunk(row, blockIdx.x);
    if (threadIdx.x == 0) {
        __stcg((uint4*)(row_sums + blockIdx.x),
               make_uint4(sum.key, sum.id, __float_as_uint(sum.largest),
                          __float_as_uint(sum.mass)));
        __threadfence();
        arrivals = atomicAdd(arrived + index, 1);
        if (arrivals == chunks - 1) arrived[index] = 0;
        __threadfence();
    }
    __syncthreads();
    if (arrivals < chunks - 1) return;

    uint4 mine = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < chunks) mine = __ldcg((const uint4*)(row_sums + threadIdx.x));
    u64 best = threadIdx.x < chunks ? (u64)mine.x << 32 | (0xffffffffu - mine.y) : 0;
    best = over_block(best, Largest());
    u32 id = 0xffffffffu - (u32)best;
    if (heat > 0.f) {
        row.largest = value_of((u32)(best >> 32));
        float mass = threadIdx.x < chunks
                         ? __uint_as_float(mine.w) * row.mass(__uint_as_float(mine.z)) : 0.f;
        masses[threadIdx.x] = mass;
        int k = top_k[state];
        float p = top_p[state], least = min_p[state];
        bool by_rank = k > 0 && k < size, by_mass = p < 1.f;
        if (by_rank || by_mass || least > 0.f) {
            row.least_mass = least;
            float whole = (float)over_block((double)mass, Sum());
            // Ids this far down cannot matter to the nucleus: all of them hold less than 1 - p.
            float depth = by_mass && !by_rank ? log2f((1.f - p) * whole / size) : -INF;
            if (by_rank || by_mass)
                row.least_key = least_key(row, by_rank ? k : 0, by_mass ? p * whole : INF,
                                          row.largest + fmaxf(depth, -200.f) / row.per_logit);
            for (int chunk = 0; chunk < chunks; chunk++) {
                float stays = 0.f;
                for (int g = 0; g < GROUPS; g++) {
                    float x[8];
                    row.read(chunk * (CHUNK / 8) + g * THREADS + threadIdx.x, x);
                    for (int i = 0; i < 8; i++) stays += row.kept_mass(x[i]);
                }
                stays = over_block(stays, Sum());
                if (threadIdx.x == 0) masses[chunk] = stays;
            }
        }
        __syncthreads();
        u32 word = random_word(seed_lo[state], seed_hi[state], position[index]);
        id = draw(row, masses, chunks, (double)word / 4294967296.);
    }
    if (threadIdx.x == 0) {
        id = min(id, (u32)size - 1);  // a row of NaN has no largest
        ids[index] = id;
        if (last_token) last_token[state] = id;
    }
}
