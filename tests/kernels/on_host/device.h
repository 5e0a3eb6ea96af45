// What csrc/ asks of a CUDA device, on the host: a block's threads are fibers that take turns in a random
// order, copies arrive in a random order some turns later, and warps meet for what they do together.
// Covers what streamed_linear.cu uses. Times nothing and proves nothing about memory ordering.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
struct float2 { float x, y; };
static float2 make_float2(float x, float y) { return {x, y}; }
using std::min;
static float rsqrtf(float x) { return 1.f / std::sqrt(x); }
static float fast_exp(float x) { return std::exp(x); }
#define __expf fast_exp
constexpr u32 FULL = 0xffffffffu;

static float of_bits(u32 x) { float y; memcpy(&y, &x, 4); return y; }
static u32 bits_of(float x) { u32 y; memcpy(&y, &x, 4); return y; }
static u32 rounded_bits(float x) { u32 y = bits_of(x); return (y + 0x7fff + (y >> 16 & 1)) >> 16; }
static float low(u32 pair) { return of_bits(pair << 16); }
static float high(u32 pair) { return of_bits(pair & 0xffff0000u); }
static u32 pair(float a, float b) { return rounded_bits(a) | rounded_bits(b) << 16; }

// --- fibers

struct Index { int x, y; };
static Index threadIdx, blockIdx;
struct Fiber { ucontext_t context; std::vector<char> stack; bool done; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static std::mt19937 chance;
static std::vector<std::function<void()>> flying;  // copies under way
static int idle_turns;

static void take_turns() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }

struct Meeting { int count = 0, generation = 0; };
static std::map<int, Meeting> meetings;
static void meet(int which, int threads) {
    Meeting& at = meetings[which];
    int generation = at.generation;
    if (++at.count == threads) {
        at.count = 0, at.generation++, idle_turns = 0;
        return;
    }
    while (at.generation == generation) take_turns();
}
static void __syncthreads() { meet(-1, (int)fibers.size()); }
static void named_barrier(int name, int threads) { meet(-1 - name, threads); }
static void __syncwarp() { meet(threadIdx.x / 32, 32); }

// Every lane shows its value and sees those of its warp.
template <class T>
static std::vector<T> shown(const T& own) {
    static std::map<int, std::vector<T>> all;
    int warp = threadIdx.x / 32;
    if (all[warp].empty()) all[warp].resize(32);
    all[warp][threadIdx.x % 32] = own;
    __syncwarp();
    std::vector<T> seen = all[warp];
    __syncwarp();
    return seen;
}
static float __shfl_xor_sync(u32, float x, int step) { return shown(x)[threadIdx.x % 32 ^ step]; }
static void wait_for_previous() {}
static void let_next_start() {}

// --- shared memory, barriers, copies

alignas(1024) unsigned char memory[1 << 18];
constexpr u32 MEMORY_AT = 512;  // not a multiple of 1024: the kernel has to align its ring
static u32 shared_address(const void* p) { return (u32)((const unsigned char*)p - memory) + MEMORY_AT; }
static unsigned char* at_address(u32 address) {
    if (address < MEMORY_AT || address - MEMORY_AT >= sizeof memory) throw std::out_of_range("shared");
    return memory + (address - MEMORY_AT);
}

struct Barrier { int arrivals, pending, bytes, phase; };
static std::map<const u64*, Barrier> barriers;
static void settle(Barrier& b) {
    if (b.pending == 0 && b.bytes == 0) b.pending = b.arrivals, b.phase ^= 1, idle_turns = 0;
}
static void barrier_init(u64* b, u32 arrivals) { barriers[b] = {(int)arrivals, (int)arrivals, 0, 0}; }
static void barrier_arrive(u64* b) { barriers[b].pending--; settle(barriers[b]); }
static void barrier_expect(u64* b, u32 bytes) { barriers[b].bytes += bytes; barrier_arrive(b); }
static void barrier_wait(u64* b, u32 parity) {
    while ((u32)barriers[b].phase == parity) take_turns();
}
static void fly(u64* barrier, int bytes, std::function<void()> copy) {
    flying.push_back([=] { copy(); barriers[barrier].bytes -= bytes; settle(barriers[barrier]); });
}
static u64 read_once() { return 0; }
static void copy(u32 to, const void* from, u32 bytes, u64* barrier, u64) {
    fly(barrier, bytes, [=] { memcpy(at_address(to), from, bytes); });
}

struct TensorMap {
    const u16* at;
    int size, rows, box_size, box_rows;
};
static void copy_tile(u32 to, const TensorMap* map, int k, int row, u64* barrier, u64 = 0) {
    TensorMap m = *map;
    if (to % 1024) throw std::invalid_argument("a swizzled tile begins at a multiple of 1024 bytes");
    fly(barrier, m.box_size * m.box_rows * 2, [=] {
        for (int r = 0; r < m.box_rows; r++)
            for (int i = 0; i < m.box_size; i++) {
                bool inside = row + r < m.rows && k + i < m.size;
                u16 value = inside ? m.at[(size_t)(row + r) * m.size + k + i] : 0;
                int chunk = (i / 8) ^ (r % 8);
                memcpy(at_address(to + r * 128 + chunk * 16 + i % 8 * 2), &value, 2);
            }
    });
}

// --- tensor cores

static void load_matrices(u32 (&a)[4], u32 address) {
    auto addresses = shown(address);
    int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) memcpy(a + i, at_address(addresses[8 * i + lane / 4] + lane % 4 * 4), 4);
}
struct Operands { u32 a[4], b[2]; };
static void multiply_add(float (&sums)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    auto all = shown(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
    for (int j = 0; j < 4; j++)
        for (int k = 0; k < 16; k++) {
            int lane = k % 8 / 2, row = g % 8, column = 2 * c + j % 2;
            u32 x = all[4 * row + lane].a[j / 2 + k / 8 * 2], w = all[4 * column + lane].b[k / 8];
            sums[j] += k % 2 ? high(x) * high(w) : low(x) * low(w);
        }
}

// --- a launch

static std::function<void()> body;
static void run_fiber() {
    body();
    fibers[threadIdx.x].done = true;
    take_turns();
}
static void land_one() {
    if (flying.empty()) return;
    std::swap(flying[chance() % flying.size()], flying.back());
    auto land = flying.back();
    flying.pop_back();
    land();
}
static void run_block(int block, int threads, std::function<void()> kernel) {
    blockIdx = {block, 0}, body = kernel, idle_turns = 0;
    meetings.clear(), barriers.clear(), flying.clear();
    for (auto& byte : memory) byte = 0xff;  // NaN where nothing was written
    fibers = std::vector<Fiber>(threads);
    for (auto& fiber : fibers) {
        fiber.stack.resize(1 << 16);
        getcontext(&fiber.context);
        fiber.context.uc_stack = {fiber.stack.data(), 0, fiber.stack.size()};
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (int left = threads; left;) {
        int first = chance() % threads;
        for (int i = 0; i < threads; i++) {
            int thread = (first + i) % threads;
            if (fibers[thread].done) continue;
            threadIdx = {thread, 0};
            swapcontext(&scheduler, &fibers[thread].context);
            left -= fibers[thread].done;
        }
        if (chance() % 4 == 0) land_one();
        if (++idle_turns > 2000 && flying.empty()) throw std::runtime_error("nothing moves");
    }
    if (!flying.empty()) throw std::runtime_error("a block ended before its copies arrived");
}
