// NF4 → OUT, one block of threads for the 16384 weights whose 256 scales share a scale.
//
//   packed            (count / 2) bytes, two codes each     levels            (16) float32
//   absmax            (count / 64) codes of the scales      nested_quant_map  (256) float32
//   nested_absmax     (count / 16384) float32               out               (count) OUT
//
// A warp takes 2048 weights: 16 bytes of codes a lane and load, turned in shared memory so that neighbouring lanes write
// neighbouring 16 bytes. A lane makes one of the warp's 32 scales. The end of the matrix, less than a block's 16384
// weights, is done one byte at a time.
#include "nf4.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, WARP_WEIGHTS = NESTED_WEIGHTS / WARPS;
constexpr int CODES = 16 / sizeof(OUT);  // that make one store
static_assert(WARP_WEIGHTS == 32 * BLOCK, "a scale a lane");

// The level of code i of a word of eight; of a byte's two codes the high one is first. `levels` lies in shared memory: 16
// words in 16 banks, so that 32 lanes never wait for each other.
template <int i>
__device__ __forceinline__ float level_of(const float* levels, u32 word) {
    constexpr int SHIFT = i / 2 * 8 + (i % 2 ? 0 : 4) - 2;  // to a byte offset
    const u32 offset = (SHIFT < 0 ? word << 2 : word >> (SHIFT < 0 ? 0 : SHIFT)) & 0x3cu;
    return *reinterpret_cast<const float*>(reinterpret_cast<const char*>(levels) + offset);
}

__device__ __forceinline__ void store_codes(f32* to, const float* levels, u32 word, float scale) {
    *reinterpret_cast<float4*>(to) = make_float4(level_of<0>(levels, word) * scale, level_of<1>(levels, word) * scale,
                                                 level_of<2>(levels, word) * scale, level_of<3>(levels, word) * scale);
}
template <typename T>
__device__ __forceinline__ void store_codes(T* to, const float* levels, u32 word, float scale) {
    *reinterpret_cast<uint4*>(to) = make_uint4(narrow(T(), level_of<0>(levels, word) * scale, level_of<1>(levels, word) * scale),
                                               narrow(T(), level_of<2>(levels, word) * scale, level_of<3>(levels, word) * scale),
                                               narrow(T(), level_of<4>(levels, word) * scale, level_of<5>(levels, word) * scale),
                                               narrow(T(), level_of<6>(levels, word) * scale, level_of<7>(levels, word) * scale));
}
__device__ __forceinline__ u32 codes_at(f32*, const uint4* words, int i) { return reinterpret_cast<const u16*>(words)[i]; }
template <typename T>
__device__ __forceinline__ u32 codes_at(T*, const uint4* words, int i) { return reinterpret_cast<const u32*>(words)[i]; }

extern "C" __global__ void __launch_bounds__(THREADS)
    nf4_dequantize(const uint4* __restrict__ packed, const unsigned char* __restrict__ absmax, const float* __restrict__ levels,
                   const float* __restrict__ nested_absmax, const float* __restrict__ nested_quant_map, float offset, OUT* out, long long count) {
    __shared__ __align__(16) float table[16];
    __shared__ __align__(16) uint4 staged[WARPS][64];
    let_next_kernel_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long first = static_cast<long long>(blockIdx.x) * NESTED_WEIGHTS;
    const bool whole = first + NESTED_WEIGHTS <= count;
    if (threadIdx.x < 16) table[threadIdx.x] = levels[threadIdx.x];
    const float nested = nested_absmax[blockIdx.x];
    float scale = 0.f;
    if (first + threadIdx.x * BLOCK < count)
        scale = scale_of(nested_quant_map[absmax[first / BLOCK + threadIdx.x]], nested, offset);
    if (whole) {
        const uint4* from = packed + first / 32 + warp * 64 + lane;
        const uint4 a = load_once(from), b = load_once(from + 32);
        staged[warp][lane] = a;
        staged[warp][lane + 32] = b;
    }
    __syncthreads();             // the table is there, and the warp's codes
    wait_for_previous_kernel();  // it may read what `out` held
    OUT* to = out + first + warp * WARP_WEIGHTS;
    if (whole) {
#pragma unroll
        for (int i = 0; i < WARP_WEIGHTS / (32 * CODES); i++) {
            const int at = i * 32 + lane;
            const float s = __shfl_sync(FULL_WARP, scale, at * CODES / BLOCK);
            store_codes(to + at * CODES, table, codes_at(to, staged[warp], at), s);
        }
        return;
    }
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(packed) + first / 2 + warp * (WARP_WEIGHTS / 2);
    const long long left = count - first - warp * WARP_WEIGHTS;
    for (int i = 0; i < WARP_WEIGHTS / 64; i++) {
        const float s = __shfl_sync(FULL_WARP, scale, i);
        const int at = i * 64 + lane * 2;
        const u32 byte = at < left ? bytes[at / 2] : 0;
        if (at < left) store_one(to + at, level_of<0>(table, byte) * s);
        if (at + 1 < left) store_one(to + at + 1, level_of<1>(table, byte) * s);
    }
}
