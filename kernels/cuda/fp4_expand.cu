// 4-bit floating-point operands → bfloat16, row-major, for a GEMM of a tensor core that has no 4-bit ones.
//
// ROWS = 16: weights. A block takes a tile of 128 rows of one group of 64 channels, a thread 16 bytes.
//   codes     (n tiles, groups, 8, 32) uint4
//   scales    e4m3 in the order `fp4_wscales`: (n tiles, groups, 8, 4, 4) words
// ROWS = 8: activations. A warp takes 8 rows, a thread 8 bytes; rows from `rows` on do not exist.
//   codes     (panels, groups, 2, 32) uint2
//   scales    e4m3 in the order `fp4_scales`: (panels, groups, 2, 8) words
// expanded    (rows, groups · 64) bfloat16: code · scale, exact
#include "e2m1.cuh"

extern "C" __global__ void __launch_bounds__(256) fp4_expand(const u32* __restrict__ codes, const u32* __restrict__ scales,
                                                             uint4* __restrict__ expanded, int groups, int rows) {
    const int group = blockIdx.x, lane = threadIdx.x % 32, unit = blockIdx.y * 8 + threadIdx.x / 32;
    if (unit * ROWS >= rows) return;
#pragma unroll
    for (int half = 0; half < ROWS / 8; half++) {
        const int row = unit * ROWS + half * 8 + lane / 4;
        const u32 at = ROWS == 16 ? ((unit / 8 * groups + group) * 8 + unit % 8) * (4 * STRIP_VECTORS) + lane * 4 + half * 2
                                  : ((unit / 2 * groups + group) * 2 + unit % 2) * 64 + lane * 2;
        const u32 scale_at = ROWS == 16 ? (row / 128 * groups + group) * 128 + row % 8 * 16 + row / 8 % 4 * 4 + row / 32 % 4
                                        : (row / 16 * groups + group) * 16 + row % 16;
        const uint2 words = *reinterpret_cast<const uint2*>(codes + at);
        const u32 four = scales[scale_at] >> (lane % 4 / 2 * 8);
        uint4* to = expanded + (static_cast<long long>(row) * groups + group) * 8 + lane % 4;
        to[0] = expand_e2m1(words.x, widen_scale(four & 0xffu));
        to[4] = expand_e2m1(words.y, widen_scale(four >> 16 & 0xffu));
    }
}
