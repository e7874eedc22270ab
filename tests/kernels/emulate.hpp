// What a kernel's text needs to run on a CPU: CUDA's words, threads that take turns, and, in place of each function of
// common.cuh that is an instruction, the same in C++ after the PTX manual. Tensor-core products gather the fragments of the
// warp's 32 threads, so a wrong fragment order gives wrong numbers here too.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <ucontext.h>
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

using std::max;
using std::min;

#define __device__
#define __global__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one after the other
#define __CUDA_ARCH__ ARCHITECTURE

struct Index {
    int x, y, z;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(uint32_t a, uint32_t b) { return {a, b}; }
inline uint4 make_uint4(uint32_t a, uint32_t b, uint32_t c, uint32_t d) { return {a, b, c, d}; }
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }

// A CUDA thread: it runs until it has to wait for others, then the next one's turn comes.
struct Thread {
    Index of_block, block;
    int block_of_cluster;
    int cluster_phase;  // that it has arrived in
    std::atomic<bool> ended;
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    void* sanitizers;  // what ThreadSanitizer knows it by
};
static std::vector<Thread> threads;
static std::atomic<Thread*> running;
static std::atomic<bool> moved;  // whether one went on since all were asked
static ucontext_t caller;        // of the launch
#ifdef __SANITIZE_THREAD__
static void* const callers_sanitizers = __tsan_get_current_fiber();
#else
static void* const callers_sanitizers = nullptr;
#endif
static std::function<void()> kernel;
static Index gridDim;
inline Thread& host_own() { return *running.load(std::memory_order_relaxed); }
#define threadIdx (host_own().of_block)
#define blockIdx (host_own().block)

// Nothing is in order between threads but what barriers put in order: a switch itself tells the sanitizer nothing.
inline void host_switch(ucontext_t& from, ucontext_t& to, [[maybe_unused]] void* sanitizers) {
#ifdef __SANITIZE_THREAD__
    __tsan_switch_to_fiber(sanitizers, __tsan_switch_to_fiber_no_sync);
#endif
    swapcontext(&from, &to);
}
template <typename Ready>
inline void host_wait(Ready ready) {
    while (!ready()) host_switch(host_own().context, caller, callers_sanitizers);
    moved.store(true, std::memory_order_relaxed);
}

// Threads that have waited see what was done before the arrivals of this phase; two counts, as some may be in the next.
struct Barrier {
    int threads;
    std::atomic<int> all = 0, arrivals[2] = {0, 0};
    int arrive() {
        const int phase = all.fetch_add(1, std::memory_order_relaxed) / threads;
        arrivals[phase % 2].fetch_add(1, std::memory_order_release);
        return phase;
    }
    void wait(int phase) {
        host_wait([&] { return arrivals[phase % 2].load(std::memory_order_acquire) >= (phase / 2 + 1) * threads; });
    }
};

struct Lanes {  // of one warp: where its threads meet, and what they show each other
    Barrier barrier{32};
    uint32_t word[32][8];
};
struct Block {  // of the cluster that runs
    std::unique_ptr<Lanes[]> warps;
    Barrier barrier;
    unsigned char* memory;  // what the launch asks for
};
static std::unique_ptr<Block> blocks[2];
static std::unique_ptr<Barrier> cluster;

inline Block& own_block() { return *blocks[host_own().block_of_cluster]; }
inline Lanes& lanes() { return own_block().warps[threadIdx.x / 32]; }
inline void host_meet(Barrier& barrier) { barrier.wait(barrier.arrive()); }
inline void __syncthreads() { host_meet(own_block().barrier); }
inline void __syncwarp() { host_meet(lanes().barrier); }

inline uint32_t __float_as_uint(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
inline float __uint_as_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
inline float __int_as_float(int i) { return __uint_as_float(i); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    uint32_t picked = 0;
    for (int i = 0; i < 4; i++) picked |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return picked;
}
inline float __shfl_sync(uint32_t, float value, int from) {
    Lanes& all = lanes();
    all.word[threadIdx.x % 32][0] = __float_as_uint(value);
    __syncwarp();
    const float other = __uint_as_float(all.word[from][0]);
    __syncwarp();
    return other;
}
inline float __shfl_xor_sync(uint32_t all, float value, int mask) { return __shfl_sync(all, value, threadIdx.x % 32 ^ mask); }

// ---- functions of common.cuh

inline float float_of_half(uint32_t h) {
    _Float16 value;
    const uint16_t bits = h;
    memcpy(&value, &bits, 2);
    return value;
}
inline uint32_t half_of_float(float f) {
    const _Float16 value = f;
    uint16_t bits;
    memcpy(&bits, &value, 2);
    return bits;
}
inline uint32_t bfloat_of_float(float f) {
    const uint32_t u = __float_as_uint(f);
    return f != f ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
inline float2 host_widen(uint32_t pair) { return {float_of_half(pair & 0xffff), float_of_half(pair >> 16)}; }
inline uint32_t host_narrow_half(float a, float b) { return half_of_float(a) | half_of_float(b) << 16; }
inline uint32_t host_narrow_bfloat(float a, float b) { return bfloat_of_float(a) | bfloat_of_float(b) << 16; }
// Round to nearest even, at most ±448; a NaN has all bits but the sign.
inline uint32_t e4m3_of_float(float f) {
    if (f != f) return 0x7f;
    const float size = min(std::fabs(f), 448.f);
    const int exponent = size < 0x1p-6f ? -6 : std::ilogb(size);
    const int eighths = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));
    return (std::signbit(f) ? 0x80 : 0) | ((exponent + 6) * 8 + eighths);
}
inline uint32_t host_narrow_e4m3(float a, float b) { return e4m3_of_float(a) | e4m3_of_float(b) << 8; }
// Every byte's top bit, eight times.
inline uint32_t host_byte_signs(uint32_t word) { return (word >> 7 & 0x01010101u) * 255; }
inline float host_max_nan(float a, float b) { return a != a || b != b ? NAN : max(a, b); }
inline void host_copy_async(void* to, const void* from) { memcpy(to, from, 16); }

// d += a · b, 16 x 8 x 8; operands lose the bits below tf32's ten.
inline void host_mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    Lanes& all = lanes();
    const int lane = threadIdx.x % 32;
    const float own[6] = {a0, a1, a2, a3, b0, b1};
    for (int i = 0; i < 6; i++) all.word[lane][i] = __float_as_uint(own[i]) & 0xffffe000u;
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < 8; k++) {
            const float a = __uint_as_float(all.word[row % 8 * 4 + k % 4][k / 4 * 2 + row / 8]);
            const float b = __uint_as_float(all.word[column * 4 + k % 4][4 + k / 4]);
            sum += static_cast<double>(a) * b;
        }
        d[i] = sum;
    }
    __syncwarp();
}

inline float float_of_bfloat(uint32_t b) { return __uint_as_float(b << 16); }

// d += a · b, 16 x 8 x 16, of two packed values in a word.
template <typename Widen>
inline void host_mma_half(Widen widen, float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    Lanes& all = lanes();
    const int lane = threadIdx.x % 32;
    const uint32_t own[6] = {a0, a1, a2, a3, b0, b1};
    for (int i = 0; i < 6; i++) all.word[lane][i] = own[i];
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; k++) {
            const int at = k % 8 / 2, shift = k % 2 * 16;
            const float a = widen(all.word[row % 8 * 4 + at][k / 8 * 2 + row / 8] >> shift & 0xffff);
            const float b = widen(all.word[column * 4 + at][4 + k / 8] >> shift & 0xffff);
            sum += static_cast<double>(a) * b;
        }
        d[i] = sum;
    }
    __syncwarp();
}

// a · b + c of two packed values; in double it is exact before its one rounding for the values that occur here.
template <typename Widen, typename Narrow>
inline uint32_t host_fma_pair(Widen widen, Narrow narrow, uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const auto value = [&](uint32_t pair) { return static_cast<double>(widen(pair >> shift & 0xffff)); };
        d |= narrow(static_cast<float>(value(a) * value(b) + value(c))) << shift;
    }
    return d;
}

// d = a · b + c in integers: 16 x 8 x 32 of bytes, or 16 x 8 x 64 of nibbles.
inline void host_mma_integer(uint32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], uint32_t c0, uint32_t c1, uint32_t c2,
                             uint32_t c3) {
    constexpr int BITS = __CUDA_ARCH__ >= 900 ? 8 : 4, PER_WORD = 32 / BITS, K = 8 * PER_WORD;
    Lanes& all = lanes();
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; i++) all.word[lane][i] = a[i];
    for (int i = 0; i < 2; i++) all.word[lane][4 + i] = b[i];
    __syncwarp();
    const uint32_t c[4] = {c0, c1, c2, c3};
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        int sum = static_cast<int>(c[i]);
        for (int k = 0; k < K; k++) {
            const int at = k % (K / 2) / PER_WORD, shift = 32 - BITS - k % PER_WORD * BITS, upper = k / (K / 2);
            const int x = static_cast<int>(all.word[row % 8 * 4 + at][upper * 2 + row / 8] << shift) >> (32 - BITS);
            const int y = static_cast<int>(all.word[column * 4 + at][4 + upper] << shift) >> (32 - BITS);
            sum += x * y;
        }
        d[i] = sum;
    }
    __syncwarp();
}

inline uint32_t host_multiply_halves(uint32_t a, uint32_t b) {
    const float2 x = host_widen(a), y = host_widen(b);
    return host_narrow_half(x.x * y.x, x.y * y.y);
}

// d += (a · a_scales) · (b · b_scales), 16 x 8 x 64, of 4-bit floating point; `thread` of every four lanes has b's scales.
inline void host_mma_scaled(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, uint32_t a_scales, uint32_t b_scales, int thread) {
    constexpr float LEVELS[8] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
    auto level = [&](uint32_t word, int at) { return LEVELS[word >> 4 * at & 7] * (word >> 4 * at & 8 ? -1.f : 1.f); };
    auto scale = [&](uint32_t word, int at) {
        const uint32_t byte = word >> 8 * at & 0xff, exponent = byte >> 3;
        return byte == 0x7f ? NAN : exponent ? std::ldexp(8.f + byte % 8, exponent - 10) : std::ldexp(byte, -9);
    };
    Lanes& all = lanes();
    const int lane = threadIdx.x % 32;
    const uint32_t own[8] = {a[0], a[1], a[2], a[3], b0, b1, a_scales, b_scales};
    for (int i = 0; i < 8; i++) all.word[lane][i] = own[i];
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < 64; k++) {
            const int quad = k % 32 / 8, upper = k / 32;
            const float x = level(all.word[row % 8 * 4 + quad][upper * 2 + row / 8], k % 8) * scale(all.word[row % 8 * 4 + row / 8][6], k / 16);
            const float y = level(all.word[column * 4 + quad][4 + upper], k % 8) * scale(all.word[column * 4 + thread][7], k / 16);
            sum += static_cast<double>(x) * y;
        }
        d[i] = sum;
    }
    __syncwarp();
}

// ---- functions of bulk.cuh

inline void host_cluster_arrive() { host_own().cluster_phase = cluster->arrive(); }
inline void host_cluster_wait() { cluster->wait(host_own().cluster_phase); }

// A barrier that counts arrivals and bytes, in the place of CUDA's.
struct HostBarrier {
    int8_t phase, all, left, none;
    int32_t bytes;  // that copies still owe
};
inline void host_barrier_init(unsigned long long& place, int arrivals) {
    place = std::bit_cast<unsigned long long>(HostBarrier{0, static_cast<int8_t>(arrivals), static_cast<int8_t>(arrivals), 0, 0});
}
inline void host_barrier_change(unsigned long long& place, int arrivals, int bytes) {
    std::atomic_ref<unsigned long long> state(place);
    unsigned long long before = state.load(std::memory_order_relaxed), after;
    do {
        HostBarrier barrier = std::bit_cast<HostBarrier>(before);
        barrier.left -= arrivals;
        barrier.bytes += bytes;
        if (!barrier.left && !barrier.bytes) {
            barrier.phase ^= 1;
            barrier.left = barrier.all;
        }
        after = std::bit_cast<unsigned long long>(barrier);
    } while (!state.compare_exchange_weak(before, after, std::memory_order_release, std::memory_order_relaxed));
}
inline void host_barrier_wait(unsigned long long& place, uint32_t parity) {
    std::atomic_ref<unsigned long long> state(place);
    host_wait([&] { return std::bit_cast<HostBarrier>(state.load(std::memory_order_acquire)).phase != static_cast<int>(parity); });
}
inline void host_bulk_copy(void* to, const void* from, int bytes, unsigned long long& barrier) {
    // by words: the sanitizer does not look into memcpy
    for (int i = 0; i < bytes / 4; i++) static_cast<uint32_t*>(to)[i] = static_cast<const uint32_t*>(from)[i];
    host_barrier_change(barrier, 0, -bytes);
}
template <typename T>
inline T* host_of_block(T* p, int block) {
    return reinterpret_cast<T*>(blocks[block]->memory + (reinterpret_cast<unsigned char*>(p) - own_block().memory));
}

// One thread, from its first block to its last; clusters of the grid, which lies along x, run one after the other.
inline void host_thread() {
    moved.store(true, std::memory_order_relaxed);
    const int blocks_of_cluster = cluster->threads / own_block().barrier.threads;
    for (int first = 0; first < gridDim.x * gridDim.y * gridDim.z; first += blocks_of_cluster) {
        const int block = first + host_own().block_of_cluster;
        blockIdx = {block % gridDim.x, block / gridDim.x % gridDim.y, block / gridDim.x / gridDim.y};
        kernel();
        host_cluster_arrive();
        host_cluster_wait();
    }
    host_own().ended.store(true, std::memory_order_release);
    host_switch(host_own().context, caller, callers_sanitizers);
}

// One launch. False: no thread can go on, as some wait at a barrier that others do not reach.
inline bool launch_on_host(Index grid, int threads_of_block, int blocks_of_cluster, std::function<void()> run) {
    alignas(16) static unsigned char memory[2][232448];
    constexpr size_t STACK = 1 << 18;
    gridDim = grid;
    kernel = run;
    cluster.reset(new Barrier{threads_of_block * blocks_of_cluster});
    for (int i = 0; i < blocks_of_cluster; i++)
        blocks[i].reset(new Block{std::make_unique<Lanes[]>(threads_of_block / 32), {threads_of_block}, memory[i]});
    threads = std::vector<Thread>(cluster->threads);
    for (size_t i = 0; i < threads.size(); i++) {
        Thread& thread = threads[i];
        thread.of_block = {static_cast<int>(i) % threads_of_block, 0, 0};
        thread.block_of_cluster = i / threads_of_block;
        thread.stack.reset(new char[STACK]);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get();
        thread.context.uc_stack.ss_size = STACK;
        makecontext(&thread.context, host_thread, 0);
#ifdef __SANITIZE_THREAD__
        thread.sanitizers = __tsan_create_fiber(0);
#endif
    }
    do {
        moved.store(false, std::memory_order_relaxed);
        for (Thread& thread : threads) {
            if (thread.ended.load(std::memory_order_acquire)) continue;
            running.store(&thread, std::memory_order_relaxed);
            host_switch(caller, thread.context, thread.sanitizers);
        }
    } while (moved.load(std::memory_order_relaxed));
#ifdef __SANITIZE_THREAD__
    for (Thread& thread : threads) __tsan_destroy_fiber(thread.sanitizers);
#endif
    return std::all_of(threads.begin(), threads.end(), [](const Thread& thread) { return thread.ended.load(std::memory_order_acquire); });
}
