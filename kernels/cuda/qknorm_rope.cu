// Per-head RMSNorm of q and k, then the half-split rotary embedding: (a, b) ← (a·cos − b·sin, b·cos + a·sin) for the
// channels i and i + HEAD_DIM/2. One warp a head of one token; q's heads first, then k's.
//
//   q, k              (tokens, heads, HEAD_DIM) SCALAR, tokens q_stride / k_stride apart, heads contiguous
//   q_norm, k_norm    (HEAD_DIM) SCALAR, or null for no norm (then neither is)
//   cosine, sine      (positions, HEAD_DIM) SCALAR; token i takes row i modulo positions
//   q_out, k_out      like q and k, contiguous
// The norm rounds x·factor and its product with the weight to SCALAR, as a module of its own would; the rotation is
// float32 with one rounding at the end.
#include "common.cuh"

constexpr int PER_LANE = HEAD_DIM / 64;  // pairs (i, i + HEAD_DIM/2) of one lane
constexpr int WARPS = 4;

__device__ __forceinline__ void load_lane(float (&v)[PER_LANE], const SCALAR* from) {
    if (PER_LANE == 2) {
        const float2 pair = widen(SCALAR(), *reinterpret_cast<const u32*>(from));
        v[0] = pair.x;
        v[PER_LANE - 1] = pair.y;
    } else {
        v[0] = widen(SCALAR(), from->bits).x;
    }
}

__device__ __forceinline__ float rounded(float a) { return widen(SCALAR(), narrow(SCALAR(), a, 0.f)).x; }

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    qknorm_rope(const SCALAR* __restrict__ q, long long q_stride, const SCALAR* __restrict__ k, long long k_stride,
                const SCALAR* __restrict__ q_norm, const SCALAR* __restrict__ k_norm, const SCALAR* __restrict__ cosine,
                const SCALAR* __restrict__ sine, SCALAR* __restrict__ q_out, SCALAR* __restrict__ k_out, int tokens,
                int q_heads, int k_heads, int positions, float epsilon) {
    const int heads = q_heads + k_heads;
    const long long item = static_cast<long long>(blockIdx.x) * WARPS + threadIdx.x / 32;
    const int token = static_cast<int>(item / heads), head = static_cast<int>(item % heads);
    if (token >= tokens) return;
    const int lane = threadIdx.x % 32, i = lane * PER_LANE;
    const bool is_q = head < q_heads;
    const SCALAR* from = (is_q ? q + token * q_stride + head * HEAD_DIM : k + token * k_stride + (head - q_heads) * HEAD_DIM) + i;
    SCALAR* to = (is_q ? q_out + (static_cast<long long>(token) * q_heads + head) * HEAD_DIM
                       : k_out + (static_cast<long long>(token) * k_heads + head - q_heads) * HEAD_DIM) + i;
    float a[PER_LANE], b[PER_LANE];
    load_lane(a, from);
    load_lane(b, from + HEAD_DIM / 2);
    const SCALAR* norm = is_q ? q_norm : k_norm;
    if (norm) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) sum = fmaf(a[j], a[j], fmaf(b[j], b[j], sum));
#pragma unroll
        for (int h = 16; h > 0; h /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, h);
        const float factor = __frcp_rn(__fsqrt_rn(sum * (1.f / HEAD_DIM) + epsilon));
        float wa[PER_LANE], wb[PER_LANE];
        load_lane(wa, norm + i);
        load_lane(wb, norm + i + HEAD_DIM / 2);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
            a[j] = rounded(wa[j] * rounded(a[j] * factor));
            b[j] = rounded(wb[j] * rounded(b[j] * factor));
        }
    }
    float ca[PER_LANE], cb[PER_LANE], sa[PER_LANE], sb[PER_LANE];
    const long long angle = static_cast<long long>(token % positions) * HEAD_DIM + i;
    load_lane(ca, cosine + angle);
    load_lane(cb, cosine + angle + HEAD_DIM / 2);
    load_lane(sa, sine + angle);
    load_lane(sb, sine + angle + HEAD_DIM / 2);
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
        store_one(to + j, fmaf(a[j], ca[j], -(b[j] * sa[j])));
        store_one(to + j + HEAD_DIM / 2, fmaf(b[j], cb[j], a[j] * sb[j]));
    }
}
