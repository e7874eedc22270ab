// Activations → codes and scales in the order that the GEMM reads, and t = x · proj_down.
//
// STORE says what a code is: NIBBLES, of 4 bits; BYTES, the same 4-bit number as e4m3; VALUES, 8 bits of e4m3 with one scale
// a row, absmax / 448, without clip; FLOATS, 4 bits of e2m1 with an e4m3 scale for 16 channels, without clip. x is read once; for
// VALUES, whose scale must be known first, a second time from the second-level cache, and the blocks of a panel are a cluster.
//
// A block takes one panel of 16 rows and one share of the groups; its warps take the groups in turn. A warp has HALVES = 2
// halves of the panel's rows, g and g+8, or, where one group's latency is all that counts, 1: two warps to a group.
//
//   x            (m, k) SCALAR, rows row_stride apart, 16-byte aligned
//   row_factor   (m) float32 or null: x is first normalized, x ← round(norm_weight · round(x · row_factor)), each
//   norm_weight  (k) SCALAR           product rounded to SCALAR as a module of its own would do
//
//   down         proj_down, float16, in the order `down`, padded to all groups
//   inv_smooth   (k) float32 or null
//   codes        (panels, groups, 2, 32) uint2; else e4m3 in the order `fp8`, with `rows` rows
//   scales       (panels, groups, 16) float32; BYTES: in the order `token_scales`; VALUES: (rows); FLOATS: words of four e4m3
//   t            (gridDim.y, rows, rank) float32: partial sums of x · proj_down, one per share of the groups; row-major, for BYTES
//                and VALUES in the order `token_t`
// Rows from m on, up to whole panels, and groups from k/64 on are written as zeros. A block makes RANK columns of t; a rank beyond what
// registers hold is cut over gridDim.z, whose first part also makes the codes.
//
// A lane holds, of a row, the channels 32·ks + 8·(lane % 4) .. +7 of a group, for ks = 0, 1: a 16-byte load is one code word
// later, the Hadamard stages 1, 2, 4, 32 stay in registers and 8, 16 are two shuffles, and the same registers are operand
// a of x · proj_down.
#include "common.cuh"
#if STORE == 2
#include "bulk.cuh"
#elif STORE == 3
#include "e2m1.cuh"
#endif

enum Store { NIBBLES, BYTES, VALUES, FLOATS };
constexpr int WARPS = 8;
constexpr int GROUPS = WARPS * HALVES / 2;  // that a block has at a time
constexpr int TILES = RANK / 8;
constexpr int THREADS = WARPS * 32;
#define INFINITE __int_as_float(0x7f800000)

struct Input {
    const SCALAR* x;
    long long row_stride;
    int m, k;
};

// A lane's operands of one group that are older than the kernel before: read where they are used, or read ahead of the wait.
struct Lent {
    const SCALAR* norm_weight;  // null for none
    const float* inv_smooth;    // null for none
    const uint4* down;

    __device__ __forceinline__ uint4 norm(int ks) const { return *reinterpret_cast<const uint4*>(norm_weight + ks * 32); }
    __device__ __forceinline__ float4 smooth(int ks, int i) const { return *reinterpret_cast<const float4*>(inv_smooth + ks * 32 + i * 4); }
    __device__ __forceinline__ uint4 columns(int tile, int ks) const { return down[tile * 64 + ks]; }
    __device__ __forceinline__ void load(const Lent& from) { *this = from; }
};
struct Held {
    uint4 norms[2];
    float4 smooths[2][2];
    uint4 downs[TILES > 0 ? TILES : 1][2];

    __device__ __forceinline__ void load(const Lent& from) {
#pragma unroll
        for (int ks = 0; ks < 2; ks++) {
            if (from.norm_weight) norms[ks] = from.norm(ks);
            if (from.inv_smooth)
#pragma unroll
                for (int i = 0; i < 2; i++) smooths[ks][i] = from.smooth(ks, i);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) downs[tile][ks] = from.columns(tile, ks);
        }
    }
    __device__ __forceinline__ uint4 norm(int ks) const { return norms[ks]; }
    __device__ __forceinline__ float4 smooth(int ks, int i) const { return smooths[ks][i]; }
    __device__ __forceinline__ uint4 columns(int tile, int ks) const { return downs[tile][ks]; }
};
#if HALVES == 1
using Older = Held;
#else
using Older = Lent;  // registers are short, and other warps have work while one waits
#endif

// One row's 16 values of a group; zeros outside.
__device__ __forceinline__ void load_row(uint4 (&raw)[2], const Input& in, int row, int column) {
    raw[0] = raw[1] = make_uint4(0, 0, 0, 0);
    if (row < in.m && column < in.k) {
        const uint4* from = reinterpret_cast<const uint4*>(in.x + row * in.row_stride + column);
        raw[0] = from[0];
        raw[1] = from[32 / 8];
    }
}

__device__ __forceinline__ void unpack8(float (&v)[8], uint4 words) {
    const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = widen(SCALAR(), w[i]);
        v[2 * i] = pair.x;
        v[2 * i + 1] = pair.y;
    }
}

// float32 values, normalized on the way if they are to be.
__device__ __forceinline__ void unpack_row(float (&v)[2][8], const uint4 (&raw)[2], bool normalize, float factor, const Older& older) {
#pragma unroll
    for (int ks = 0; ks < 2; ks++) {
        unpack8(v[ks], raw[ks]);
        if (!normalize) continue;
        float weight[8];
        unpack8(weight, older.norm(ks));
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            float2 n = widen(SCALAR(), narrow(SCALAR(), v[ks][i] * factor, v[ks][i + 1] * factor));
            n = widen(SCALAR(), narrow(SCALAR(), n.x * weight[i], n.y * weight[i + 1]));
            v[ks][i] = n.x;
            v[ks][i + 1] = n.y;
        }
    }
}

// sums += rows · proj_down of one group, 8 · TILES columns. Slot c of a product is channel 2·kp of the lane's eight, slot
// c+4 is channel 2·kp + 1.
__device__ __forceinline__ void multiply_down(float (&sums)[TILES > 0 ? TILES : 1][4], const float (&upper)[2][8], const float (&lower)[2][8], const Older& older) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
        for (int ks = 0; ks < 2; ks++) {
            const uint4 b = older.columns(tile, ks);
            const u32 pairs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int kp = 0; kp < 4; kp++) {
                const float2 d = widen(f16(), pairs[kp]);
                mma_tf32(sums[tile], upper[ks][2 * kp], lower[ks][2 * kp], upper[ks][2 * kp + 1], lower[ks][2 * kp + 1], d.x, d.y);
            }
        }
}

// The 64-point transform of one row's group, spread over four lanes; stages in the order of the contract.
__device__ __forceinline__ void hadamard(float (&v)[2][8], int lane) {
#pragma unroll
    for (int h = 1; h < 8; h *= 2)
#pragma unroll
        for (int ks = 0; ks < 2; ks++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (!(i & h)) {
                    const float a = v[ks][i], b = v[ks][i + h];
                    v[ks][i] = a + b;
                    v[ks][i + h] = a - b;
                }
#pragma unroll
    for (int h = 1; h < 4; h *= 2) {
        const float sign = lane & h ? -1.f : 1.f;  // a product with ±1 is exact: one operation, rounded once
#pragma unroll
        for (int ks = 0; ks < 2; ks++)
#pragma unroll
            for (int i = 0; i < 8; i++) v[ks][i] = fmaf(v[ks][i], sign, __shfl_xor_sync(FULL_WARP, v[ks][i], h));
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float a = v[0][i], b = v[1][i];
        v[0][i] = (a + b) * 0.125f;
        v[1][i] = (a - b) * 0.125f;
    }
}

// Adding 1.5 · 2^23 rounds to an integer, half to even, and leaves it in the low bits; the clamp may come first, its bounds
// being integers.
constexpr float ROUND = 12582912.f;
__device__ __forceinline__ float clamped(float v) { return fminf(fmaxf(v, -8.f), 7.f); }

// Codes of eight channels in one word.
__device__ __forceinline__ u32 encode(const float (&v)[8], float factor) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) word |= (__float_as_uint(clamped(v[i] * factor) + ROUND) & 0xfu) << (4 * i);
    return word;
}

#if STORE == 1 || STORE == 2
// Four values, two channels apart, as e4m3: integers exactly, else rounded to nearest even, within ±448.
__device__ __forceinline__ u32 encode_bytes(const float* v, float factor) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float a = v[4 * i] * factor, b = v[4 * i + 2] * factor;
        if (STORE == BYTES) {
            a = (clamped(a) + ROUND) - ROUND;
            b = (clamped(b) + ROUND) - ROUND;
        }
        u16 pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
        word |= static_cast<u32>(pair) << (16 * i);
    }
    return word;
}
#endif

// v ← v · inv_smooth of the lane's channels.
__device__ __forceinline__ void smooth_row(float (&v)[2][8], const Older& older) {
#pragma unroll
    for (int ks = 0; ks < 2; ks++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 f = older.smooth(ks, i);
            v[ks][i * 4] *= f.x;
            v[ks][i * 4 + 1] *= f.y;
            v[ks][i * 4 + 2] *= f.z;
            v[ks][i * 4 + 3] *= f.w;
        }
}

// The largest magnitude of one row's group, in all four lanes; NaN if one is.
__device__ __forceinline__ float largest(const float (&v)[2][8]) {
    float most = 0.f;
#pragma unroll
    for (int ks = 0; ks < 2; ks++)
#pragma unroll
        for (int i = 0; i < 8; i++) most = max_nan(most, fabsf(v[ks][i]));
    most = max_nan(most, __shfl_xor_sync(FULL_WARP, most, 1));
    return max_nan(most, __shfl_xor_sync(FULL_WARP, most, 2));
}

struct Scale {
    float scale, factor;  // factor: the reciprocal, or 0
    __device__ __forceinline__ void set(float most) {
        scale = __fdiv_rn(most, STORE == VALUES ? 448.f : 7.f);
        factor = scale > 0.f ? __frcp_rn(scale) : 0.f;
    }
};

// Makes v ready for the codes: a product may be a NaN (of the input, or 0 · Inf), its code is 0. → the factor.
__device__ __forceinline__ float without_nan(float (&v)[2][8], float most, float factor) {
    if (most < INFINITE && factor < INFINITE) return factor;
#pragma unroll
    for (int ks = 0; ks < 2; ks++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float product = v[ks][i] * factor;
            v[ks][i] = product == product ? product : 0.f;
        }
    return 1.f;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    quantize_lora_down(const SCALAR* x, long long row_stride, int m, int k, int groups,
                       const uint4* __restrict__ down, const float* __restrict__ inv_smooth, int rotation, float clip,
                       const float* row_factor, const SCALAR* __restrict__ norm_weight,
                       unsigned char* __restrict__ codes, float* __restrict__ scales, float* __restrict__ t, int rank, int rows) {
    let_next_kernel_start();
    const Input in = {x, row_stride, m, k};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_half = HALVES == 1 ? warp % 2 : 0;
    const int panel = blockIdx.x, row = panel * PANEL + first_half * 8 + lane / 4, lane_column = lane % 4 * 8;
    const int share = (groups + gridDim.y - 1) / gridDim.y;
    const int begin = blockIdx.y * share + warp * HALVES / 2, end = min(groups, static_cast<int>(blockIdx.y + 1) * share);
    const bool few = panel * PANEL + 8 >= m;  // no row in the second half
    const uint4* block_down = down + (blockIdx.z * TILES * 32 + lane) * 2;
    float sums[TILES > 0 ? TILES : 1][4] = {};

    // What does not come from the kernel before is on its way while that one still runs: into registers where a warp has
    // one group, else into the second-level cache.
    auto lent = [&](int group) {
        const int column = group * GROUP + lane_column;
        const bool inside = column < k;
        return Lent{inside && row_factor ? norm_weight + column : nullptr, inside && inv_smooth ? inv_smooth + column : nullptr, block_down + group * rank * 8};
    };
    Older older = {};
    if (HALVES == 1) {
        if (begin < end) older.load(lent(begin));
    } else {
        for (int group = begin; group < end && group * GROUP < k; group += GROUPS) {
            if (inv_smooth) prefetch(inv_smooth + group * GROUP + lane * 2);
            if (row_factor) prefetch(norm_weight + group * GROUP + lane * 2);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) prefetch(block_down + group * rank * 8 + tile * 64);
        }
    }
    wait_for_previous_kernel();
    float factor[HALVES] = {};
    if (row_factor)
#pragma unroll
        for (int h = 0; h < HALVES; h++) factor[h] = row + 8 * h < m ? row_factor[row + 8 * h] : 0.f;

#if STORE == 2
    // The largest magnitude of every row: of this block's groups, then of those of all blocks of the panel, a cluster.
    __shared__ float warp_most[WARPS][PANEL], block_most[PANEL];
    float row_most[2] = {};
    for (int group = begin; group < end && group * GROUP < k; group += GROUPS) {
        const int column = group * GROUP + lane_column;
        older.load(lent(group));
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint4 raw[2];
            float v[2][8];
            load_row(raw, in, row + 8 * h, column);
            unpack_row(v, raw, row_factor, factor[h], older);
            if (inv_smooth) smooth_row(v, older);
            if (rotation) hadamard(v, lane);
            row_most[h] = max_nan(row_most[h], largest(v));
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++)
        if (lane % 4 == 0) warp_most[warp][lane / 4 + 8 * h] = row_most[h];
    __syncthreads();
    if (threadIdx.x < PANEL) {
        float most = 0.f;
        for (int w = 0; w < WARPS; w++) most = max_nan(most, warp_most[w][threadIdx.x]);
        block_most[threadIdx.x] = most;
    }
    cluster_arrive();
    cluster_wait();
    Scale row_scale[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        row_most[h] = 0.f;
        for (int share = 0; share < gridDim.y; share++) row_most[h] = max_nan(row_most[h], load_of_block(&block_most[lane / 4 + 8 * h], share));
        row_scale[h].set(row_most[h]);
        if (warp == 0 && lane % 4 == 0 && !blockIdx.y && !blockIdx.z) scales[row + 8 * h] = row_scale[h].scale;
    }
#endif

    uint4 next[HALVES][2];
#pragma unroll
    for (int h = 0; h < HALVES; h++) load_row(next[h], in, row + 8 * h, begin * GROUP + lane_column);
    auto use_group = [&](int group) {
        const int column = group * GROUP + lane_column, after = group + GROUPS < end ? column + GROUPS * GROUP : k;
        float v[2][2][8] = {};  // a warp with one half multiplies it as the first, by zeros for the second
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            unpack_row(v[h], next[h], row_factor && column < k, factor[h], older);
            if (HALVES == 2) load_row(next[h], in, row + 8 * h, after);  // else there is no group after
        }
        if constexpr (RANK > 0)
            if (HALVES == 2 || !first_half || !few) multiply_down(sums, v[0], v[1], older);
        if (blockIdx.z) return;
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const int half = first_half + h, quad = lane / 4;
            const bool used = !half || !few;
            [[maybe_unused]] float most = 0.f;
            [[maybe_unused]] Scale scale = {};
            if (used) {
                if (inv_smooth && column < k) smooth_row(v[h], older);
                if (rotation) hadamard(v[h], lane);
#if STORE == 2
                most = row_most[h];
                scale = row_scale[h];
#else
                most = largest(v[h]);
                if (clip != 1.f) most = most * clip;
                scale.set(most);
#endif
                if (STORE != FLOATS) scale.factor = without_nan(v[h], most, scale.factor);
            }
#if STORE == 0
            const long long tile = static_cast<long long>(panel) * groups + group;
            const uint2 code = used ? make_uint2(encode(v[h][0], scale.factor), encode(v[h][1], scale.factor)) : make_uint2(0, 0);
            reinterpret_cast<uint2*>(codes)[(tile * 2 + half) * 32 + lane] = code;
            if (lane % 4 == 0) scales[tile * PANEL + quad * scales_ml + half * scales_ms] = scale.scale;
#elif STORE == 3
            const long long tile = static_cast<long long>(panel) * groups + group;
            u32 four;
            reinterpret_cast<uint2*>(codes)[(tile * 2 + half) * 32 + lane] = encode_group(v[h], four);
            if (lane % 4 == 0) reinterpret_cast<u32*>(scales)[tile * PANEL + half * 8 + quad] = four;
#else
            const long long stage = static_cast<long long>(group / 2) * rows;
            unsigned char* to = codes + stage * (2 * GROUP) + (panel * 2 + half) * fp8_mg + group % 2 * 2 * fp8_ks + quad * fp8_ml + lane % 4 * fp8_kl;
#pragma unroll
            for (int ks = 0; ks < 2; ks++)
#pragma unroll
                for (int parity = 0; parity < 2; parity++)
                    *reinterpret_cast<u32*>(to + ks * fp8_ks + parity * fp8_kp) = used ? encode_bytes(v[h][ks] + parity, scale.factor) : 0u;
            if (STORE == BYTES && lane % 4 == 0)
                scales[stage * 2 + panel * token_scales_ma + group % 2 * token_scales_kg + quad / 2 * token_scales_mc + half * token_scales_mb + quad % 2] = scale.scale;
#endif
        }
    };
    if (HALVES == 1) {
        if (begin < end) use_group(begin);
    } else {
        for (int group = begin; group < end; group += GROUPS) {
            older.load(lent(group));
            use_group(group);
        }
    }

#if STORE == 2
    cluster_arrive();  // this block has read the others' largest magnitudes
#endif

    // The warps' sums, added in the order of the warps: the same bits in every run.
    constexpr int WIDTH = RANK % 32 ? 16 : 32;
    __shared__ float partial[GROUPS][PANEL][WIDTH];
    const int slot = warp * HALVES / 2;
#pragma unroll
    for (int first = 0; first < RANK; first += WIDTH) {
        if (first) __syncthreads();  // the sums of the columns before are read
#pragma unroll
        for (int i = 0; i < WIDTH / 8; i++) {
            const int column = i * 8 + lane % 4 * 2;
            const float* s = sums[first / 8 + i];
            *reinterpret_cast<float2*>(&partial[slot][first_half * 8 + lane / 4][column]) = make_float2(s[0], s[1]);
            if (HALVES == 2) *reinterpret_cast<float2*>(&partial[slot][lane / 4 + 8][column]) = make_float2(s[2], s[3]);
        }
        __syncthreads();  // all partial sums are written
        for (int i = threadIdx.x; i < PANEL * WIDTH; i += THREADS) {
            float sum = 0.f;
#pragma unroll
            for (int g = 0; g < GROUPS; g++) sum += partial[g][i / WIDTH][i % WIDTH];
            const int row = panel * PANEL + i / WIDTH, column = blockIdx.z * RANK + first + i % WIDTH;
#if STORE == 0 || STORE == 3
            t[(static_cast<long long>(blockIdx.y) * rows + row) * rank + column] = sum;
#else
            const long long tile = static_cast<long long>(blockIdx.y) * (rank / 16) + column / 16;
            t[tile * rows * 16 + row / 8 * token_t_mp + column / 8 % 2 * token_t_jh + row % 8 * token_t_ml + column % 8] = sum;
#endif
        }
    }
#if STORE == 2
    cluster_wait();  // the others have read this block's
#endif
}
