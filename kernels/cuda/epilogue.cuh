// What follows the groups' sums of a warp's panel of 16 rows by 4 strips of 16 columns: the columns' factors and bias, the low rank.
#include "common.cuh"

enum Out { F16, BF16, F32 };  // y's type, known at run time: a branch at the end in place of three kernels

__device__ __forceinline__ void store_as(int out, void* y, long long at, float a) {
    if (out == F16) store_one(static_cast<f16*>(y) + at, a);
    else if (out == BF16) store_one(static_cast<bf16*>(y) + at, a);
    else store_one(static_cast<f32*>(y) + at, a);
}
__device__ __forceinline__ void store_pair_as(int out, void* y, long long at, float a, float b) {
    if (out == F16) store_pair(static_cast<f16*>(y) + at, a, b);
    else if (out == BF16) store_pair(static_cast<bf16*>(y) + at, a, b);
    else store_pair(static_cast<f32*>(y) + at, a, b);
}

// sums[strip][half][row g: columns 2c, 2c+1; row g+8: the same] ← sums · factor + bias.
//   factor, bias  packed float32, of the first strip on; bias may be null
__device__ __forceinline__ void scale_columns(float (&sums)[4][2][4], const float* factor, const float* bias, int lane) {
#pragma unroll
    for (int strip = 0; strip < 4; strip++) {
        const int at = strip * channel_na + lane % 4 * channel_nc;
        const float4 f = *reinterpret_cast<const float4*>(factor + at);
        float4 b = make_float4(0.f, 0.f, 0.f, 0.f);
        if (bias) b = *reinterpret_cast<const float4*>(bias + at);
        const float factors[4] = {f.x, f.y, f.z, f.w}, offsets[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                sums[strip][half][i] = fmaf(sums[strip][half][i], factors[half * 2 + i % 2], offsets[half * 2 + i % 2]);
    }
}

// sums += t · proj_upᵀ. t goes in two tf32 parts, 22 bits of it; proj_up is exact in tf32. Slot c of the product is column 2c,
// slot c+4 is column 2c + 1, which are one float2 of t and one packed pair of proj_up.
//   t     the row g of the panel, (shares, share_stride / rank, rank): their sum over shares is x · proj_down
//   up    packed float16 proj_up, of the first strip on
__device__ __forceinline__ void add_low_rank(float (&sums)[4][2][4], const float* t, int shares, int share_stride, int rank,
                                             const uint4* up, int lane) {
#pragma unroll 1
    for (int tile = 0; tile < rank / 16; tile++) {
        float high[2][4] = {}, low[2][4];  // [8 columns of t][operand a]
        const float* from = t + tile * 16 + lane % 4 * 2;
#pragma unroll 2
        for (int share = 0; share < shares; share++, from += share_stride)
#pragma unroll
            for (int i = 0; i < 4; i++) {  // [8 columns][row g, g+8]
                const float2 part = *reinterpret_cast<const float2*>(from + i % 2 * 8 * rank + i / 2 * 8);
                high[i / 2][i % 2] += part.x;
                high[i / 2][2 + i % 2] += part.y;
            }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float sum = high[i / 4][i % 4];
            high[i / 4][i % 4] = tf32_part(sum);
            low[i / 4][i % 4] = sum - high[i / 4][i % 4];
        }
#pragma unroll
        for (int strip = 0; strip < 4; strip++) {
            const uint4 words = up[(strip * (rank / 16) + tile) * 32 + lane];
            const u32 pairs[4] = {words.x, words.y, words.z, words.w};  // [half of the strip][8 columns of t]
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float2 b = widen(f16(), pairs[half * 2 + j]);
                    mma_tf32(sums[strip][half], low[j][0], low[j][1], low[j][2], low[j][3], b.x, b.y);
                    mma_tf32(sums[strip][half], high[j][0], high[j][1], high[j][2], high[j][3], b.x, b.y);
                }
        }
    }
}

// The panel from (row, column) on → y (m, n), row-major; what lies outside is not stored. Of 16-bit types two neighbours of four lanes
// exchange pairs, so that each stores four columns and the four a whole sector.
__device__ __forceinline__ void store_rows(int out, void* y, const float (&sums)[4][2][4], int row, int column, int m, int n, int lane) {
#pragma unroll
    for (int strip = 0; strip < 4; strip++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            const float* first = sums[strip][0] + lower * 2;
            const float* second = sums[strip][1] + lower * 2;
            const int to_row = row + lower * 8 + lane / 4;
            int to_column = column + strip * 16 + lane % 4 * 2;
            const long long at = static_cast<long long>(to_row) * n;
            if (n % 4 == 0 && out != F32) {
                u32 words[2] = {narrow(f16(), first[0], first[1]), narrow(f16(), second[0], second[1])};
                if (out == BF16) words[0] = narrow(bf16(), first[0], first[1]), words[1] = narrow(bf16(), second[0], second[1]);
                const bool odd = lane % 2;
                const u32 other = __float_as_uint(__shfl_xor_sync(FULL_WARP, __uint_as_float(odd ? words[0] : words[1]), 1));
                to_column += odd ? 6 : 0;
                if (to_row < m && to_column < n)
                    *reinterpret_cast<uint2*>(static_cast<u16*>(y) + at + to_column) = odd ? make_uint2(other, words[1]) : make_uint2(words[0], other);
                continue;
            }
#pragma unroll
            for (int half = 0; half < 2; half++, to_column += 8) {
                const float* pair = half ? second : first;
                if (to_row >= m || to_column >= n) continue;
                if (n % 2 == 0) {
                    store_pair_as(out, y, at + to_column, pair[0], pair[1]);
                } else {
                    store_as(out, y, at + to_column, pair[0]);
                    if (to_column + 1 < n) store_as(out, y, at + to_column + 1, pair[1]);
                }
            }
        }
}
