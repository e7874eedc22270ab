// The linear of w4a4_gemm_lora for at most 16 rows, at the speed of memory: the weights stream once through registers.
//
// A block owns a strip of 16 columns; its warps share the groups, each a run of neighbours, 8 of them in flight. Weights
// are operand a (16 columns of W) and activations operand b (8 rows of x), so that up to 8 rows cost one product. The
// first loads are on their way before the kernel that makes the activations has ended. Warps' sums are added in their
// order. Pointers as in w4a4_gemm_lora, with one panel; groups is at least CHUNK.
//
// Dynamic shared memory: proj_up of the strip, rank · 32 bytes, and t, 16 · rank floats.
#include "common.cuh"

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int CHUNK = 4;  // groups loaded together, while the CHUNK before is used

struct Chunk {
    uint4 words[CHUNK];
    uint2 scales[CHUNK];  // float16, of the columns 2·(lane / 8) and one on (x), the same of the second eight (y)
};

// The weights of CHUNK neighbouring groups of a strip, from `start` on, which all exist.
__device__ __forceinline__ void load_chunk(Chunk& chunk, const uint4* qweight, const u16* wscales, int strip, int groups, int start, int lane) {
    const int tile = strip / 8 * groups + start;
    const uint4* words = qweight + (tile * 8 + strip % 8) * STRIP_VECTORS + lane;
    const u16* scales = wscales + tile * wscales_g + strip % 8 * wscales_na + lane / 8 * wscales_nc;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
        chunk.words[i] = load_once(words + i * (8 * STRIP_VECTORS));
        chunk.scales[i] = *reinterpret_cast<const uint2*>(scales + i * wscales_g);
    }
}

// sums += one group of the strip times the rows' codes, code[half] of rows 8·half + g. scales: of columns g and g+8, packed;
// row_scale: of the rows 2c (first and second half), 2c + 1 (the same).
__device__ __forceinline__ void add_group(float (&sums)[2][4], uint4 words, u32 scales, const uint2 (&code)[2], float4 row_scale, int m) {
    Codes<4> a;
    a.set(0, words.x);
    a.set(1, words.z);
    a.set(2, words.y);
    a.set(3, words.w);
    const float2 pair = widen(f16(), scales);
    const float by_column[2] = {pair.x, pair.y};
    const float by_row[2][2] = {{row_scale.x, row_scale.z}, {row_scale.y, row_scale.w}};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (half * 8 >= m) break;
        Codes<2> b;
        b.set(0, code[half].x);
        b.set(1, code[half].y);
        float product[4];
        group_product(product, a, b);
#pragma unroll
        for (int j = 0; j < 4; j++) sums[half][j] = fmaf(product[j], by_row[half][j % 2] * by_column[j / 2], sums[half][j]);
    }
}

// sums += t · proj_upᵀ of 8 columns of t and 8 rows. Slot c of the product is column 2c, slot c+4 is column 2c + 1; t goes
// in two tf32 parts, 22 bits of it, and proj_up is exact in tf32.
__device__ __forceinline__ void add_low_rank(float (&sums)[4], float2 t, u32 up_first, u32 up_second) {
    const float2 first = widen(f16(), up_first), second = widen(f16(), up_second);
    const float2 high = make_float2(tf32_part(t.x), tf32_part(t.y));
    mma_tf32(sums, first.x, second.x, first.y, second.y, t.x - high.x, t.y - high.y);
    mma_tf32(sums, first.x, second.x, first.y, second.y, high.x, high.y);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    w4a4_small_m(const uint2* codes, const float* scales, const float* t, int shares, const uint4* __restrict__ qweight,
                 const u16* __restrict__ wscales, const uint4* __restrict__ up, const float* __restrict__ bias, OUT* y, int m,
                 int n, int groups, int rank) {
    extern __shared__ __align__(16) unsigned char dynamic[];
    __shared__ float partial[WARPS][16][PANEL + 1];                    // [warp][column][row]
    uint4* shared_up = reinterpret_cast<uint4*>(dynamic);              // [rank / 16][32]
    float* shared_t = reinterpret_cast<float*>(shared_up + rank * 2);  // [16][rank]
    let_next_kernel_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, strip = blockIdx.x;
    const int run = (groups + WARPS - 1) / WARPS, begin = warp * run, end = min(begin + run, groups);
    // A chunk starts CHUNK after the one before, or so far back that all its groups exist: those that are not the warp's, or
    // were counted already, then get scale 0.
    auto start_of = [&](int first) { return min(first, groups - CHUNK); };
    Chunk chunks[2];
    load_chunk(chunks[0], qweight, wscales, strip, groups, start_of(begin), lane);
    load_chunk(chunks[1], qweight, wscales, strip, groups, start_of(begin + CHUNK), lane);
    for (int i = threadIdx.x; i < rank * 2; i += THREADS) copy_async(shared_up + i, up + strip * rank * 2 + i);
    copy_commit();
    const int row = threadIdx.x / 16, column = threadIdx.x % 16, global_column = strip * 16 + column;  // this thread's output
    const int channel = strip * channel_na + column / 8 * channel_nb + column % 8 / 2 * channel_nc + column % 2;
    const float offset = bias ? bias[channel] : 0.f;
    wait_for_previous_kernel();

    float sums[2][4] = {};  // [rows 0-7, 8-15][column g: rows 2c, 2c+1; column g+8: the same]
    uint2 code[CHUNK][2];
    float4 row_scale[CHUNK];
    auto load_activations = [&](int first) {
        const int start = start_of(first);
        const uint2* from = codes + start * 64 + lane;
        const float* row_scales = scales + start * PANEL + lane % 4 * 2 * scales_ml;
#pragma unroll
        for (int i = 0; i < CHUNK; i++) code[i][0] = code[i][1] = make_uint2(0, 0);
        if (lane / 4 < m)
#pragma unroll
            for (int i = 0; i < CHUNK; i++) code[i][0] = from[i * 64];
        if (8 + lane / 4 < m)
#pragma unroll
            for (int i = 0; i < CHUNK; i++) code[i][1] = from[i * 64 + 32];
#pragma unroll
        for (int i = 0; i < CHUNK; i++) row_scale[i] = *reinterpret_cast<const float4*>(row_scales + i * PANEL);
    };
    auto use_chunk = [&](Chunk& chunk, int first) {
        const int start = start_of(first);
        const u32 selector = lane & 4 ? 0x7632 : 0x5410;  // which of two columns in each word
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            const bool counts = start + i >= first && start + i < end;
            const u32 pair = counts ? __byte_perm(chunk.scales[i].x, chunk.scales[i].y, selector) : 0;
            add_group(sums, chunk.words[i], pair, code[i], row_scale[i], m);
        }
        if (first + 2 * CHUNK < end) load_chunk(chunk, qweight, wscales, strip, groups, start_of(first + 2 * CHUNK), lane);
    };
    load_activations(begin);
    for (int i = threadIdx.x; i < m * rank; i += THREADS) {  // t, while the codes are on their way
        float sum = 0.f;
#pragma unroll 8
        for (int share = 0; share < shares; share++) sum += t[share * PANEL * rank + i];
        shared_t[i] = sum;
    }
#pragma unroll 1
    for (int first = begin; first < end; first += 2 * CHUNK) {
        if (first > begin) load_activations(first);
        use_chunk(chunks[0], first);
        load_activations(first + CHUNK);
        use_chunk(chunks[1], first + CHUNK);
    }

    copy_wait<0>();
    __syncthreads();  // t and proj_up are there
    const int part = warp % 2;  // of 16 columns of t; by column, so that a row's sums do not depend on its place
    for (int tile = warp / 2; tile < rank / 16; tile += WARPS / 2) {
        const uint4 words = shared_up[tile * 32 + lane];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float* columns = shared_t + (half * 8 + lane / 4) * rank + tile * 16 + part * 8 + lane % 4 * 2;
            if (half * 8 < m)
                add_low_rank(sums[half], *reinterpret_cast<const float2*>(columns), part ? words.y : words.x, part ? words.w : words.z);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            partial[warp][lane / 4 + j / 2 * 8][half * 8 + lane % 4 * 2 + j % 2] = sums[half][j];
    __syncthreads();  // all partial sums are written
    if (row >= m || global_column >= n) return;
    float sum = partial[0][column][row];
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum += partial[w][column][row];
    store_one(y + static_cast<long long>(row) * n + global_column, sum + offset);
}
