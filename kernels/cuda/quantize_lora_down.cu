// Activations → 4-bit codes and scales in the order that the GEMM reads, and t = x · proj_down; x is read once.
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
//   codes        (panels, groups, 2, 32) uint2
//   scales       (panels, groups, 16) float32
//   t            (gridDim.y, panels · 16, rank) float32: partial sums of x · proj_down, one per share of the groups
// Rows from m on and groups from k/64 on are written as zeros. A block makes RANK columns of t; a rank beyond what
// registers hold is cut over gridDim.z, whose first part also makes the codes.
//
// A lane holds, of a row, the channels 32·ks + 8·(lane % 4) .. +7 of a group, for ks = 0, 1: a 16-byte load is one code word
// later, the Hadamard stages 1, 2, 4, 32 stay in registers and 8, 16 are two shuffles, and the same registers are operand
// a of x · proj_down.
#include "common.cuh"

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

// Codes of eight channels in one word. Adding 1.5 · 2^23 rounds to an integer, half to even, and leaves it in the low
// bits; the clamp may come first, its bounds being integers.
__device__ __forceinline__ u32 encode(const float (&v)[8], float factor) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float code = fminf(fmaxf(v[i] * factor, -8.f), 7.f) + 12582912.f;
        word |= (__float_as_uint(code) & 0xfu) << (4 * i);
    }
    return word;
}

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

// One row's group of smoothed x → its codes and scale. v is overwritten.
__device__ __forceinline__ void quantize_row(float (&v)[2][8], int rotation, float clip, int lane, uint2* code, float* row_scale) {
    if (rotation) hadamard(v, lane);
    float most = 0.f;
#pragma unroll
    for (int ks = 0; ks < 2; ks++)
#pragma unroll
        for (int i = 0; i < 8; i++) most = max_nan(most, fabsf(v[ks][i]));
    most = max_nan(most, __shfl_xor_sync(FULL_WARP, most, 1));
    most = max_nan(most, __shfl_xor_sync(FULL_WARP, most, 2));
    if (clip != 1.f) most = most * clip;
    const float scale = __fdiv_rn(most, 7.f);
    float factor = scale > 0.f ? __frcp_rn(scale) : 0.f;
    if (!(most < INFINITE && factor < INFINITE)) {  // a product may be a NaN (of the input, or 0 · Inf): code 0
#pragma unroll
        for (int ks = 0; ks < 2; ks++)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float product = v[ks][i] * factor;
                v[ks][i] = product == product ? product : 0.f;
            }
        factor = 1.f;
    }
    *code = make_uint2(encode(v[0], factor), encode(v[1], factor));
    if (lane % 4 == 0) *row_scale = scale;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    quantize_lora_down(const SCALAR* x, long long row_stride, int m, int k, int groups,
                       const uint4* __restrict__ down, const float* __restrict__ inv_smooth, int rotation, float clip,
                       const float* row_factor, const SCALAR* __restrict__ norm_weight,
                       uint2* __restrict__ codes, float* __restrict__ scales, float* __restrict__ t, int rank) {
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
        const long long tile = static_cast<long long>(panel) * groups + group;
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const int half = first_half + h;
            uint2* code = codes + (tile * 2 + half) * 32 + lane;
            float* row_scale = scales + tile * PANEL + lane / 4 * scales_ml + half * scales_ms;
            if (!half || !few) {
                if (inv_smooth && column < k) smooth_row(v[h], older);
                quantize_row(v[h], rotation, clip, lane, code, row_scale);
            } else {
                *code = make_uint2(0, 0);
                if (lane % 4 == 0) *row_scale = 0.f;
            }
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
            const long long at = static_cast<long long>(blockIdx.y * gridDim.x + panel) * PANEL + i / WIDTH;
            t[at * rank + blockIdx.z * RANK + first + i % WIDTH] = sum;
        }
    }
}
