// The NVFP4 linear for few rows: the 4-bit weights stream once through registers, which make them float16.
//
// A block takes a panel of 16 rows and 32 columns: two strips of 16 that lie 32 apart, so that a lane's scales of both are
// neighbours. Its warps share the groups, each a run of neighbours, DEPTH of them in flight. Weights are operand a (16 columns of
// W) and activations operand b (8 rows of x); a second half of the rows that does not exist costs nothing. The first loads of
// weights are on their way before the kernel that makes the activations has ended. Warps' sums are added in their order.
//
//   codes     (panels, groups, 2, 32) uint2       written by quantize_lora_down
//   scales    (panels, groups, 16) words of four e4m3
//   t         (shares, panels · 16, rank) float32, their sum over shares is x · proj_down
//   qweight   packed weight codes, (n tiles, groups, 8, 32) uint4
//   wscales   (n tiles, groups, 8, 4, 4) words of four e4m3
//   wcscale, bias  packed float32, (n tiles, 128); bias may be null
//   up        packed float16 proj_up, (n tiles · 8, rank / 16, 32) uint4
//   y         (m, n) of type `out`, row-major
#include "e2m1.cuh"
#include "epilogue.cuh"

constexpr int WARPS = 16;
constexpr int THREADS = WARPS * 32;
constexpr int DEPTH = 4;        // groups of weights on their way
constexpr int RANKS = 64;       // columns of t at a time
constexpr int ROW_STRIDE = 36;  // of 32 columns' sums, so that neither writing nor reading meets a bank twice

struct Weights {
    uint4 words[2];   // of the two strips
    uint2 scales[2];  // of the rows g and g + 8 in both strips
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fp4_small_m(const uint2* codes, const u32* scales, const float* t, int shares, const uint4* __restrict__ qweight,
                const u32* __restrict__ wscales, const float* __restrict__ wcscale, const uint2* __restrict__ up,
                const float* __restrict__ bias, void* y, int out, int m, int n, int groups, int rank) {
    __shared__ float partial[WARPS][PANEL][ROW_STRIDE];
    __shared__ float t_sums[PANEL][RANKS];
    let_next_kernel_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, panel = blockIdx.y;
    const int tile = blockIdx.x / 4, pair = blockIdx.x % 4 / 2, parity = blockIdx.x % 2;  // strips 4·pair + parity and 2 on
    const int run = (groups + WARPS - 1) / WARPS, begin = warp * run, end = min(begin + run, groups);
    const int first_tile = tile * groups + begin;
    const uint4* words = qweight + (first_tile * 8 + pair * 4 + parity) * STRIP_VECTORS + lane;
    const u32* word_scales = wscales + first_tile * 128 + lane / 4 * 16 + parity * 8 + pair * 2;
    Weights weights[DEPTH];
    auto load_weights = [&](int i) {  // of the i-th group from `words` on
        Weights& w = weights[i % DEPTH];
#pragma unroll
        for (int s = 0; s < 2; s++) {
            w.words[s] = load_once(words + (i * 8 + s * 2) * STRIP_VECTORS);
            w.scales[s] = *reinterpret_cast<const uint2*>(word_scales + i * 128 + s * 4);
        }
    };
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
        if (begin + i < end) load_weights(i);
    // A loop: within one straight piece of code the assembler moves the wait ahead of the loads.
    for (int i = threadIdx.x; i < rank / 2; i += THREADS) prefetch(up + (tile * 8 + pair * 4 + parity + i % 2 * 2) * rank * 4 + i / 2 * 16);
    wait_for_previous_kernel();

    const bool few = panel * PANEL + 8 >= m;  // no row in the second half
    const uint2* row_codes = codes + (panel * groups + begin) * 64 + lane;
    const u32* row_scales = scales + (panel * groups + begin) * PANEL + lane / 4;
    const u32 byte = lane % 4 / 2;  // the scale of this lane's first eight channels in a word; the second's is two on
    float sums[2][2][4] = {};            // [strip][half of the rows][columns g (0, 1), g+8 (2, 3); rows 2c (0, 2), 2c+1 (1, 3)]
    auto add_group = [&](const Weights& w, int i) {
        u32 x[2][2][4];  // [half of the rows][32 channels][pairs]
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (half && few) break;
            const uint2 code = row_codes[i * 64 + half * 32];
            const u32 four = row_scales[i * PANEL + half * 8];
            halves(x[half][0], code.x, half_scale_or_nan(four, byte));
            halves(x[half][1], code.y, half_scale_or_nan(four, byte + 2));
        }
#pragma unroll
        for (int s = 0; s < 2; s++) {
            const u32 word[2][2] = {{w.words[s].x, w.words[s].y}, {w.words[s].z, w.words[s].w}};  // [rows g, g+8][32 channels]
            const u32 upper = s ? w.scales[0].y : w.scales[0].x, lower = s ? w.scales[1].y : w.scales[1].x;
#pragma unroll
            for (int ks = 0; ks < 2; ks++) {
                u32 a[2][4];
                halves(a[0], word[0][ks], half_scale(upper, byte + 2 * ks));
                halves(a[1], word[1][ks], half_scale(lower, byte + 2 * ks));
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    if (half && few) break;
                    mma_half(f16(), sums[s][half], a[0][0], a[1][0], a[0][1], a[1][1], x[half][ks][0], x[half][ks][1]);
                    mma_half(f16(), sums[s][half], a[0][2], a[1][2], a[0][3], a[1][3], x[half][ks][2], x[half][ks][3]);
                }
            }
        }
    };
#pragma unroll 1
    for (int group = begin; group < end; group += DEPTH) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            if (group + i >= end) break;
            add_group(weights[i], i);
            if (group + i + DEPTH < end) load_weights(i + DEPTH);
        }
        words += DEPTH * 8 * STRIP_VECTORS;
        word_scales += DEPTH * 128;
        row_codes += DEPTH * 64;
        row_scales += DEPTH * PANEL;
    }

#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
            for (int i = 0; i < 4; i++) partial[warp][half * 8 + lane % 4 * 2 + i % 2][s * 16 + i / 2 * 8 + lane / 4] = sums[s][half][i];
    __syncthreads();  // all partial sums are written

    // One output a thread.
    const int row = threadIdx.x / 32, strip = tile * 8 + pair * 4 + parity + lane / 16 * 2, in_strip = lane % 16;
    const int channel = strip * channel_na + in_strip / 8 * channel_nb + in_strip % 8 / 2 * channel_nc + in_strip % 2;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += partial[w][row][lane];
    float value = fmaf(sum * HALVES_UNIT, wcscale[channel], bias ? bias[channel] : 0.f);
    const int rows = gridDim.y * PANEL;
    const float* row_t = t + (panel * PANEL + row) * rank;
    for (int first = 0; first < rank; first += RANKS) {
        const int count = min(RANKS, rank - first);
        __syncwarp();  // the columns before are used: a warp's row is its own
        for (int j = lane; j < count; j += 32) {
            float total = 0.f;
            for (int share = 0; share < shares; share++) total += row_t[share * rows * rank + first + j];
            t_sums[row][j] = total;
        }
        __syncwarp();  // these columns are summed
        for (int j = 0; j < count; j += 4) {  // columns 2·jc, 2·jc + 1 of a tile's first eight, then of its second
            const int jc = j / 4 % 4, at = first + j - j % 16;
            const uint2 words = up[((strip * (rank / 16) + at / 16) * 8 + in_strip % 8) * 8 + jc * 2 + in_strip / 8];
            const float2 a = widen(f16(), words.x), b = widen(f16(), words.y);
            const float* s = &t_sums[row][j - j % 16 + jc * 2];
            value = fmaf(s[0], a.x, value);
            value = fmaf(s[1], a.y, value);
            value = fmaf(s[8], b.x, value);
            value = fmaf(s[9], b.y, value);
        }
    }
    const int global_row = panel * PANEL + row, column = strip * 16 + in_strip;
    if (global_row < m && column < n) store_as(out, y, static_cast<long long>(global_row) * n + column, value);
}
