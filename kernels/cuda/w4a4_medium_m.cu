// The linear of w4a4_gemm_lora for 17 to 64 rows: the weights stream once, through shared memory.
//
// A cluster of CLUSTER blocks makes 32 · CLUSTER columns of y of all rows; its blocks share the groups, each a run of
// neighbours, so that a block reads its part of the activations alone. A stage of the ring holds SLICES groups, and a warp
// computes 32 columns of one of them. Weights are operand a (16 columns of W) and activations operand b (8 rows of x).
// Hopper and newer copy in bulk, and the weights of the first STAGES stages are on their way before the kernel that makes
// the activations has ended. In the end the sums of a block's warps, then those of the blocks, are added in their order.
// Pointers as in w4a4_gemm_lora, with PANELS panels.
#include "bulk.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int TILES = 2 * PANELS;        // of 8 rows
constexpr int STRIPS = 2;                // of 16 columns, that a warp has
constexpr int SLICES = WARPS / CLUSTER;  // warps with the same columns
constexpr int BLOCK_STRIPS = STRIPS * CLUSTER;
constexpr int COLUMNS = STRIPS * 16;
constexpr int PAIRS = TILES * 4;          // of rows
constexpr int PAIR_STRIDE = COLUMNS + 4;  // so that neither the writing nor the reading of partial sums meets a bank twice
static_assert(CLUSTER == 1 || CLUSTER == 2, "one block's sums meet one other's");
static_assert(STAGES <= WARPS && PAIRS % WARPS == 0, "a warp to a stage; all warps to the sums");

struct Stage {
    uint4 weights[SLICES][BLOCK_STRIPS][32];
    u16 column_scales[SLICES][BLOCK_STRIPS * 16];
    uint2 codes[PANELS][SLICES][2][32];
    float row_scales[PANELS][SLICES][PANEL];
};
struct Sums {  // in place of the ring: pairs of rows by columns
    float2 of_warp[WARPS][PAIRS][PAIR_STRIDE];
    float2 of_other_block[PAIRS][COLUMNS];
    float2 low_rank[PAIRS][PAIR_STRIDE];
};
static_assert(sizeof(Stage) % 16 == 0 && STAGES * sizeof(Stage) <= RING_BYTES && sizeof(Sums) <= RING_BYTES, "shared memory");

// Where the block's operands lie.
struct Operands {
    const uint4* weights;  // of its first group and column
    const u16* column_scales;
    const uint2* codes;  // of its first group, panel 0
    const float* row_scales;
    int groups;  // all; `end` of them, from the first on, are the block's
    int end;
};

#if __CUDA_ARCH__ >= 900
// One warp's lanes. Both kinds of copies arrive at the stage's barrier, which expects the sum.
__device__ __forceinline__ void copy_weights(Stage& stage, const Operands& from, int first, int lane, u64* barrier) {
    const int count = min(SLICES, from.end - first), group = first + lane;
    if (lane == 0) barrier_expect(barrier, count * (BLOCK_STRIPS * (512 + 32) + PANELS * (512 + 64)));
    __syncwarp();
    if (lane >= count) return;
    bulk_copy(stage.weights[lane], from.weights + group * 8 * STRIP_VECTORS, BLOCK_STRIPS * 512, barrier);
    bulk_copy(stage.column_scales[lane], from.column_scales + group * wscales_g, BLOCK_STRIPS * 32, barrier);
}
__device__ __forceinline__ void copy_activations(Stage& stage, const Operands& from, int first, int lane, u64* barrier) {
    const int count = min(SLICES, from.end - first), group = lane * from.groups + first;
    if (lane >= PANELS) return;
    bulk_copy(stage.codes[lane], from.codes + group * 64, count * 512, barrier);
    bulk_copy(stage.row_scales[lane], from.row_scales + group * PANEL, count * 64, barrier);
}
#else
// All threads.
__device__ __forceinline__ void copy_stage(Stage& stage, const Operands& from, int first) {
    const int count = min(SLICES, from.end - first);
    for (int i = threadIdx.x; i < count * BLOCK_STRIPS * 32; i += THREADS) {
        const int slice = i / (BLOCK_STRIPS * 32), at = i % (BLOCK_STRIPS * 32);
        copy_async(stage.weights[slice][0] + at, from.weights + (first + slice) * 8 * STRIP_VECTORS + at);
    }
    for (int i = threadIdx.x; i < count * BLOCK_STRIPS * 2; i += THREADS) {
        const int slice = i / (BLOCK_STRIPS * 2), at = i % (BLOCK_STRIPS * 2) * 8;
        copy_async(stage.column_scales[slice] + at, from.column_scales + (first + slice) * wscales_g + at);
    }
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        const int group = panel * from.groups + first;
        for (int i = threadIdx.x; i < count * 32; i += THREADS) copy_async(stage.codes[panel][0][0] + i * 2, from.codes + group * 64 + i * 2);
        for (int i = threadIdx.x; i < count * 4; i += THREADS) copy_async(stage.row_scales[panel][0] + i * 4, from.row_scales + group * PANEL + i * 4);
    }
}
#endif

// sums[strip][tile] += a group of the strip's columns g (0, 1) and g+8 (2, 3) times the tile's rows 2c (0, 2), 2c+1 (1, 3).
__device__ __forceinline__ void add_group(float (&sums)[STRIPS][TILES][4], const Stage& stage, int slice, int first_strip, int lane) {
    const u32 selector = lane & 4 ? 0x7632 : 0x5410;  // which of two columns in each word of scales
    Codes<4> a[STRIPS];
    float2 scale[STRIPS], offset[STRIPS];
#pragma unroll
    for (int strip = 0; strip < STRIPS; strip++) {
        const uint4 words = stage.weights[slice][first_strip + strip][lane];
        a[strip].set(0, words.x);
        a[strip].set(1, words.z);
        a[strip].set(2, words.y);
        a[strip].set(3, words.w);
        const uint2 pairs = *reinterpret_cast<const uint2*>(&stage.column_scales[slice][(first_strip + strip) * wscales_na + lane / 8 * wscales_nc]);
        scale[strip] = widen(f16(), __byte_perm(pairs.x, pairs.y, selector));
        offset[strip] = make_float2(-INTEGER_ZERO * scale[strip].x, -INTEGER_ZERO * scale[strip].y);
    }
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
        const float4 row_scale = *reinterpret_cast<const float4*>(&stage.row_scales[panel][slice][lane % 4 * 2 * scales_ml]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint2 code = stage.codes[panel][slice][half][lane];
            Codes<2> b;
            b.set(0, code.x);
            b.set(1, code.y);
            const float by_row[2] = {half ? row_scale.y : row_scale.x, half ? row_scale.w : row_scale.z};
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++) {
                float product[4], (&sum)[4] = sums[strip][panel * 2 + half];
                shifted_product(product, a[strip], b);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float of_column = j < 2 ? fmaf(product[j], scale[strip].x, offset[strip].x) : fmaf(product[j], scale[strip].y, offset[strip].y);
                    sum[j] = fmaf(of_column, by_row[j % 2], sum[j]);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    w4a4_medium_m(const uint2* codes, const float* scales, const float* t, int shares, const uint4* __restrict__ qweight,
                  const u16* __restrict__ wscales, const u32* __restrict__ up, const float* __restrict__ bias, OUT* y, int m,
                  int n, int groups, int rank, int t_rank, const int* __restrict__ first_rank) {
    extern __shared__ __align__(16) unsigned char shared[];
    Stage* ring = reinterpret_cast<Stage*>(shared);
    let_next_kernel_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = blockIdx.x % CLUSTER;
    const int place = warp % CLUSTER, slice = warp / CLUSTER;  // which of the block's columns, which of a stage's groups
    const int block_strip = blockIdx.x / CLUSTER * BLOCK_STRIPS, first_strip = block_strip + place * STRIPS;
    const int share = (groups + CLUSTER - 1) / CLUSTER, begin = block * share;
    const int tile = block_strip / 8 * groups + begin;
    const Operands from = {
        qweight + (tile * 8 + block_strip % 8) * STRIP_VECTORS, wscales + tile * wscales_g + block_strip % 8 * wscales_na,
        codes + begin * 64, scales + begin * PANEL, groups, min(share, groups - begin)};
    const int stages = (from.end + SLICES - 1) / SLICES;
    int at = 0;  // the stage at hand, in the ring

#if __CUDA_ARCH__ >= 900
    u64* full = reinterpret_cast<u64*>(shared + RING_BYTES);  // [STAGES]: the stage has arrived
    u64* empty = full + STAGES;                                // [STAGES]: all warps have read it
    u32 phase = 0;
    if (threadIdx.x < STAGES) {
        barrier_init(full + threadIdx.x, 1);
        barrier_init(empty + threadIdx.x, WARPS);
        barrier_init_done();
    }
    __syncthreads();  // the barriers are made
    const bool copies = warp < min(STAGES, stages);  // a stage of its own to each warp
    if (copies) copy_weights(ring[warp], from, warp * SLICES, lane, full + warp);
#endif
    const u32* warp_up = up + first_strip * rank * 8;
    const int first = first_rank ? first_rank[first_strip / 8] : 0;  // column of t
    wait_for_previous_kernel();
#if __CUDA_ARCH__ >= 900
    if (copies) copy_activations(ring[warp], from, warp * SLICES, lane, full + warp);
#else
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < stages) copy_stage(ring[i], from, i * SLICES);
        copy_commit();
    }
#endif

    // The low rank of one tile, while they are on their way. It is added last, so that a row's bits do not depend on its place.
    const int own_tile = block + slice * CLUSTER;
    float low_rank[STRIPS][4] = {};
    if (own_tile < TILES)
        for (int columns = 0; columns < rank / 16; columns++) {
            const float* values = t + (own_tile * 8 + lane / 4) * t_rank + first + columns * 16 + lane % 4 * 2;
            float2 sum[2] = {};
#pragma unroll 8
            for (int i = 0; i < shares; i++, values += PANELS * PANEL * t_rank)
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    const float2 v = *reinterpret_cast<const float2*>(values + part * 8);
                    sum[part].x += v.x;
                    sum[part].y += v.y;
                }
#pragma unroll
            for (int strip = 0; strip < STRIPS; strip++) {
                const uint4 words = *reinterpret_cast<const uint4*>(warp_up + strip * rank * 8 + columns * 128 + lane * 4);
                add_low_rank(low_rank[strip], sum[0], words.x, words.z);
                add_low_rank(low_rank[strip], sum[1], words.y, words.w);
            }
        }
    float sums[STRIPS][TILES][4] = {};

#pragma unroll 1
    for (int i = 0; i < stages; i++) {
#if __CUDA_ARCH__ >= 900
        barrier_wait(full + at, phase);
        if (i * SLICES + slice < from.end) add_group(sums, ring[at], slice, place * STRIPS, lane);
        __syncwarp();  // all lanes have read it
        if (lane == 0) barrier_arrive(empty + at);
        if (warp == i % WARPS && i > 0 && i - 1 + STAGES < stages) {  // the stage before is filled again
            const int before = at ? at - 1 : STAGES - 1;
            barrier_wait(empty + before, at ? phase : phase ^ 1);
            copy_weights(ring[before], from, (i - 1 + STAGES) * SLICES, lane, full + before);
            copy_activations(ring[before], from, (i - 1 + STAGES) * SLICES, lane, full + before);
        }
        phase ^= at == STAGES - 1;
#else
        copy_wait<STAGES - 2>();
        __syncthreads();  // this stage has arrived for all, and all have read the one that is filled next
        if (i + STAGES - 1 < stages) copy_stage(ring[at ? at - 1 : STAGES - 1], from, (i + STAGES - 1) * SLICES);
        copy_commit();
        if (i * SLICES + slice < from.end) add_group(sums, ring[at], slice, place * STRIPS, lane);
#endif
        at = at == STAGES - 1 ? 0 : at + 1;
    }

    const int column = lane;  // of the outputs of this thread, of every place
    const int strip = block_strip + block * STRIPS + column / 16;
    const int channel = strip * channel_na + column / 8 % 2 * channel_nb + column % 8 / 2 * channel_nc + column % 2;
    const float offset = bias ? bias[channel] : 0.f;  // on its way while the sums are exchanged
    __syncthreads();  // the ring is read: its memory now carries sums
#if CLUSTER > 1
    cluster_arrive();
#endif
    Sums& partial = *reinterpret_cast<Sums*>(shared);
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                partial.of_warp[warp][i * 4 + lane % 4][s * 16 + j * 8 + lane / 4] = make_float2(sums[s][i][2 * j], sums[s][i][2 * j + 1]);
#if CLUSTER > 1
    cluster_wait();  // the other block has read its ring
#endif
    if (own_tile < TILES)
#pragma unroll
        for (int s = 0; s < STRIPS; s++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float2* to = &partial.low_rank[own_tile * 4 + lane % 4][s * 16 + j * 8 + lane / 4];
                const float2 value = make_float2(low_rank[s][2 * j], low_rank[s][2 * j + 1]);
                if (CLUSTER > 1) store_to_block(to, place, value);
                else *to = value;
            }
    __syncthreads();  // all sums are written
    auto sum_of_warps = [&](int of_place, int pair) {
        float2 sum = partial.of_warp[of_place][pair][column];
#pragma unroll
        for (int s = 1; s < SLICES; s++) {
            const float2 more = partial.of_warp[s * CLUSTER + of_place][pair][column];
            sum.x += more.x;
            sum.y += more.y;
        }
        return sum;
    };
#if CLUSTER > 1
#pragma unroll
    for (int pair = warp; pair < PAIRS; pair += WARPS) store_to_block(&partial.of_other_block[pair][column], block ^ 1, sum_of_warps(block ^ 1, pair));
    cluster_arrive();
#endif
    float2 own[PAIRS / WARPS];
#pragma unroll
    for (int i = 0; i < PAIRS / WARPS; i++) own[i] = sum_of_warps(block, warp + i * WARPS);
#if CLUSTER > 1
    cluster_wait();  // each has the other's sums
#endif
    const int global_column = (block_strip + block * STRIPS) * 16 + column;
    if (global_column >= n) return;
#pragma unroll
    for (int i = 0; i < PAIRS / WARPS; i++) {
        const int pair = warp + i * WARPS, row = pair * 2;
        if (row >= m) return;
        float2 sum = own[i];
        if (CLUSTER > 1) {
            const float2 more = partial.of_other_block[pair][column];
            sum.x += more.x;
            sum.y += more.y;
        }
        const float2 low = partial.low_rank[pair][column];
        sum.x += low.x;
        sum.y += low.y;
        store_one(y + static_cast<long long>(row) * n + global_column, sum.x + offset);
        if (row + 1 < m) store_one(y + static_cast<long long>(row + 1) * n + global_column, sum.y + offset);
    }
}
