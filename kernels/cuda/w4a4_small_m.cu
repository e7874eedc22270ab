// The linear of w4a4_gemm_lora for at most 16 rows, at the speed of memory: the weights stream once through registers.
//
// A block owns two strips of 16 columns; its warps share the groups, each a run of neighbours, DEPTH of them in flight.
// Weights are operand a (16 columns of W) and activations operand b (8 rows of x), so that up to 8 rows cost one product.
// The first loads are on their way before the kernel that makes the activations has ended. Warps' sums are added in their
// order. Pointers as in w4a4_gemm_lora, with one panel.
#include "common.cuh"

constexpr int WARPS = 16;
constexpr int THREADS = WARPS * 32;
constexpr int STRIPS = 2;
constexpr int COLUMNS = STRIPS * 16;
constexpr int DEPTH = 4;   // groups of weights on their way
constexpr int NEAR = __CUDA_ARCH__ >= 1000 && HALVES == 2 ? 1 : 2;  // groups of activations; on Blackwell two would spill
constexpr int PAIR_STRIDE = COLUMNS + 4;  // so that neither the writing nor the reading of partial sums meets a bank twice

// A group's operands of one lane.
struct Weights {
    uint4 words[STRIPS];
    uint2 scales[STRIPS];  // float16, of the columns 2·(lane / 8) and one on (x), the same of the second eight (y)
};
struct Activations {
    uint2 code[HALVES];  // of rows g, g+8
    float4 row_scale;  // of the rows 2c, 2c+8, 2c+1, 2c+9
};

// sums[strip][half] += a group of the strip's columns g (0, 1) and g+8 (2, 3) times rows 8·half + 2c (0, 2), 2c+1 (1, 3).
__device__ __forceinline__ void add_group(float (&sums)[STRIPS][HALVES][4], const Weights& w, const Activations& x, int lane) {
    const u32 selector = lane & 4 ? 0x7632 : 0x5410;  // which of two columns in each word of scales
    const float by_row[2][2] = {{x.row_scale.x, x.row_scale.z}, {x.row_scale.y, x.row_scale.w}};
    Codes<4> a[STRIPS];
    float2 by_column[STRIPS], offset[STRIPS];
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
        a[strip].set(0, w.words[strip].x);
        a[strip].set(1, w.words[strip].z);
        a[strip].set(2, w.words[strip].y);
        a[strip].set(3, w.words[strip].w);
        by_column[strip] = widen(f16(), __byte_perm(w.scales[strip].x, w.scales[strip].y, selector));
        offset[strip] = make_float2(-INTEGER_ZERO * by_column[strip].x, -INTEGER_ZERO * by_column[strip].y);
    }
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        Codes<2> b;
        b.set(0, x.code[half].x);
        b.set(1, x.code[half].y);
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
            float product[4];
            shifted_product(product, a[strip], b);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float of_column = j < 2 ? fmaf(product[j], by_column[strip].x, offset[strip].x) : fmaf(product[j], by_column[strip].y, offset[strip].y);
                sums[strip][half][j] = fmaf(of_column, by_row[half][j % 2], sums[strip][half][j]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    w4a4_small_m(const uint2* codes, const float* scales, const float* t, int shares, const uint4* __restrict__ qweight,
                 const u16* __restrict__ wscales, const u32* __restrict__ up, const float* __restrict__ bias, OUT* y, int m,
                 int n, int groups, int rank, int t_rank, const int* __restrict__ first_rank) {
    __shared__ float2 partial[WARPS][HALVES][4][PAIR_STRIDE];  // [warp][half of the rows][pair of rows][column]
    let_next_kernel_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first_strip = blockIdx.x * STRIPS;
    const int run = (groups + WARPS - 1) / WARPS, begin = warp * run, end = min(begin + run, groups);
    const int tile = first_strip / 8 * groups + begin;
    const uint4* words = qweight + (tile * 8 + first_strip % 8) * STRIP_VECTORS + lane;
    const u16* column_scales = wscales + tile * wscales_g + first_strip % 8 * wscales_na + lane / 8 * wscales_nc;
    Weights weights[DEPTH];
    auto load_weights = [&](int i) {  // of the i-th group from `words` on
#pragma unroll
        for (int strip = 0; strip < STRIPS; strip++) {
            weights[i % DEPTH].words[strip] = load_once(words + (i * 8 + strip) * STRIP_VECTORS);
            weights[i % DEPTH].scales[strip] = *reinterpret_cast<const uint2*>(column_scales + i * wscales_g + strip * wscales_na);
        }
    };
#pragma unroll
    for (int i = 0; i < DEPTH; i++)
        if (begin + i < end) load_weights(i);
    const u32* block_up = up + first_strip * rank * 8;
    for (int i = threadIdx.x * 32; i < STRIPS * rank * 8; i += THREADS * 32) prefetch(block_up + i);
    const int column = threadIdx.x % COLUMNS, pair = threadIdx.x / COLUMNS;  // of two outputs of this thread
    const int channel = first_strip * 16 + column / 16 * channel_na + column / 8 % 2 * channel_nb + column % 8 / 2 * channel_nc + column % 2;
    const int first = first_rank ? first_rank[first_strip / 8] : 0;  // column of t
    if (bias && threadIdx.x == 0) prefetch(bias + first_strip * channel_na);
    wait_for_previous_kernel();

    const uint2* row_codes = codes + begin * 64 + lane;
    const float* row_scales = scales + begin * PANEL + lane % 4 * 2 * scales_ml;
    Activations activations[NEAR];
    auto load_activations = [&](int i) {
        Activations& x = activations[i % NEAR];
        if (lane / 4 < m) x.code[0] = row_codes[i * 64];
        if (HALVES == 2 && lane / 4 + 8 < m) x.code[HALVES - 1] = row_codes[i * 64 + 32];
        x.row_scale = *reinterpret_cast<const float4*>(row_scales + i * PANEL);
    };
#pragma unroll
    for (int i = 0; i < NEAR; i++) {
#pragma unroll
        for (int half = 0; half < HALVES; half++) activations[i].code[half] = make_uint2(0, 0);
        if (begin + i < end) load_activations(i);
    }

    // The low rank, while they are on their way: 8 columns of t and a strip to a warp, half of the shares if there are
    // warps enough.
    float sums[STRIPS][HALVES][4] = {};
    const int items = rank / 8 * STRIPS, slices = items * 2 <= WARPS ? 2 : 1;
    for (int work = warp; work < items * slices; work += WARPS) {
        const int item = work % items, strip = item % STRIPS, part = item / STRIPS % 2, rank_tile = item / STRIPS / 2;
        const u32* words = block_up + strip * rank * 8 + rank_tile * 128 + lane * 4 + part;
        const float* from = t + lane / 4 * t_rank + first + rank_tile * 16 + part * 8 + lane % 4 * 2;
        const u32 up_first = words[0], up_second = words[2];
        float2 sum[HALVES] = {};
#pragma unroll 4
        for (int share = work / items; share < shares; share += slices)
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                const float2 v = *reinterpret_cast<const float2*>(from + (share * PANEL + half * 8) * t_rank);
                sum[half].x += v.x;
                sum[half].y += v.y;
            }
#pragma unroll
        for (int s = 0; s < STRIPS; s++)
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                if (s == strip) add_low_rank(sums[s][half], sum[half], up_first, up_second);
    }

#pragma unroll 1
    for (int group = begin; group < end; group += DEPTH) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            if (group + i >= end) break;
            add_group(sums, weights[i], activations[i % NEAR], lane);
            if (group + i + NEAR < end) load_activations(i + NEAR);
            if (group + i + DEPTH < end) load_weights(i + DEPTH);
        }
        words += DEPTH * 8 * STRIP_VECTORS;
        column_scales += DEPTH * wscales_g;
        row_codes += DEPTH * 64;
        row_scales += DEPTH * PANEL;
    }

    const float offset = bias ? bias[channel] : 0.f;  // on its way while the sums are exchanged
#pragma unroll
    for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int s = 0; s < STRIPS; s++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                partial[warp][half][lane % 4][s * 16 + j * 8 + lane / 4] = make_float2(sums[s][half][2 * j], sums[s][half][2 * j + 1]);
    __syncthreads();  // all partial sums are written
    const int half = pair / 4, row = half * 8 + pair % 4 * 2, global_column = first_strip * 16 + column;
    if (row >= m || global_column >= n) return;
    float2 sum = partial[0][half][pair % 4][column];
#pragma unroll
    for (int w = 1; w < WARPS; w++) {
        const float2 more = partial[w][half][pair % 4][column];
        sum.x += more.x;
        sum.y += more.y;
    }
    store_one(y + static_cast<long long>(row) * n + global_column, sum.x + offset);
    if (row + 1 < m) store_one(y + static_cast<long long>(row + 1) * n + global_column, sum.y + offset);
}
