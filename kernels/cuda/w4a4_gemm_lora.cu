// y = Σ_groups (codes_x · codes_w) · scale_x · scale_w + t · proj_upᵀ + bias, rounded once to OUT.
//
// A block of 8 warps computes 128 x 128 outputs, a warp 32 x 64 of them: two panels of 16 rows, four strips of 16
// columns. One stage of the pipeline is one group of 64 channels. Codes lie in fragment order, so a stage is copied as
// it is and every shared-memory read is a whole vector without bank conflicts. The sums of the groups stay in registers.
//
//   codes     (panels, groups, 2, 32) uint2        written by quantize_lora_down
//   scales    (panels, groups, 16) float32
//   t         (shares, panels · 16, t_rank) float32, their sum over shares is x · proj_down; columns from first_rank[n tile]
//             on are those of the tile's proj_up, from 0 if that is null
//   qweight   packed weight codes, (n tiles, groups, 8, 32) uint4
//   wscales   packed float16, (n tiles, groups, 128)
//   up        packed float16 proj_up, (n tiles · 8, rank / 16, 32) uint4
//   bias      packed float32, (n tiles, 128), or null
//   y         (m, n) OUT, row-major; n may end inside the last tile
#include "common.cuh"

constexpr int TILE = 128;
constexpr int WARPS = 8;
constexpr int STAGES = 4;
constexpr int ROW_TILES_TOGETHER = 8;  // blocks that run together share weight and activation tiles in the L2 cache

struct Stage {
    uint2 codes[TILE / PANEL][2][32];
    uint4 weights[TILE / PANEL][32];
    float scales[TILE / PANEL][PANEL];
    u16 wscales[TILE];  // right after the scales: one run of vectors to copy
};
constexpr int SCALE_VECTORS = (sizeof(Stage::scales) + sizeof(Stage::wscales)) / 16;
static_assert(sizeof(Stage::scales) == 32 * 16, "warp 0 copies the activation scales, warp 1 the weight scales");
constexpr int ROW_BYTES = 64 * sizeof(OUT) + 16;  // of a warp's output rows in shared memory; 16 more against bank conflicts
union Shared {
    Stage stage[STAGES];
    unsigned char rows[WARPS][PANEL * ROW_BYTES];
};
static_assert(sizeof(Stage) % 16 == 0 && sizeof(Shared) <= 48 * 1024, "static shared memory");

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
    w4a4_gemm_lora(const uint4* __restrict__ codes, const float* __restrict__ scales, const float* __restrict__ t, int shares,
                   const uint4* __restrict__ qweight, const u16* __restrict__ wscales, const uint4* __restrict__ up,
                   const float* __restrict__ bias, OUT* __restrict__ y, int m, int n, int groups, int rank,
                   int t_rank, const int* __restrict__ first_rank) {
    __shared__ __align__(16) Shared shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int panels = (m + PANEL - 1) / PANEL;
    const int row_tiles = (m + TILE - 1) / TILE, column_tiles = (n + TILE - 1) / TILE;
    const int together = ROW_TILES_TOGETHER * column_tiles;
    const int first_row_tile = blockIdx.x / together * ROW_TILES_TOGETHER;
    const int height = min(row_tiles - first_row_tile, ROW_TILES_TOGETHER);
    const int row_tile = first_row_tile + blockIdx.x % together % height, column_tile = blockIdx.x % together / height;
    const int warp_panel = warp % 4 * 2, warp_strip = warp / 4 * 4;

    // What this thread copies of every stage: one vector of activation codes, one of weights, perhaps one of scales.
    // Past the last panel the last one is taken again; those outputs are not stored.
    const u32 codes_at = min(row_tile * (TILE / PANEL) + warp, panels - 1) * groups * CODES_VECTORS + lane;
    const u32 weights_at = column_tile * groups * (8 * STRIP_VECTORS) + threadIdx.x;
    const float* scales_from = scales + min(row_tile * (TILE / PANEL) + lane / 4, panels - 1) * groups * PANEL + lane % 4 * 4;
    const u16* wscales_from = wscales + column_tile * groups * TILE + lane % 16 * 8;
    const char* scale_from = warp == 0 ? reinterpret_cast<const char*>(scales_from) : reinterpret_cast<const char*>(wscales_from);
    const int scale_step = warp == 0 ? sizeof(Stage::scales) / (TILE / PANEL) : sizeof(Stage::wscales);
    auto copy_stage = [&](int group) {
        if (group < groups) {
            Stage& stage = shared.stage[group % STAGES];
            copy_async(reinterpret_cast<uint4*>(stage.codes) + threadIdx.x, codes + (codes_at + group * CODES_VECTORS));
            copy_async(reinterpret_cast<uint4*>(stage.weights) + threadIdx.x, qweight + (weights_at + group * (8 * STRIP_VECTORS)));
            if (threadIdx.x < SCALE_VECTORS) copy_async(reinterpret_cast<uint4*>(stage.scales) + threadIdx.x, scale_from + group * scale_step);
        }
        copy_commit();
    };

    let_next_kernel_start();
    const Stage* next = shared.stage;
    float sums[2][4][2][4] = {};  // [panel][strip][half of the strip][row g: columns 2c, 2c+1; row g+8: the same]
#pragma unroll
    for (int group = 0; group < STAGES - 1; group++) copy_stage(group);
    for (int group = 0; group < groups; group++) {
        copy_wait<STAGES - 2>();
        __syncthreads();  // this group's stage has arrived for all, and all are done with the stage filled next
        copy_stage(group + STAGES - 1);
        const Stage& stage = *next;
        next = next == shared.stage + STAGES - 1 ? shared.stage : next + 1;
        Codes<4> a[2];
        float row_scale[2][2];
#pragma unroll
        for (int p = 0; p < 2; p++) {
            const uint2 upper = stage.codes[warp_panel + p][0][lane], lower = stage.codes[warp_panel + p][1][lane];
            a[p].set(0, upper.x);
            a[p].set(1, lower.x);
            a[p].set(2, upper.y);
            a[p].set(3, lower.y);
            const float2 pair = *reinterpret_cast<const float2*>(&stage.scales[warp_panel + p][lane / 4 * scales_ml]);
            row_scale[p][0] = pair.x;
            row_scale[p][1] = pair.y;
        }
#pragma unroll
        for (int strip = 0; strip < 4; strip++) {
            const uint4 words = stage.weights[warp_strip + strip][lane];
            float column_scale[4];
            load_scales(column_scale, &stage.wscales[(warp_strip + strip) * wscales_na], lane);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                Codes<2> b;
                b.set(0, half ? words.z : words.x);
                b.set(1, half ? words.w : words.y);
#pragma unroll
                for (int p = 0; p < 2; p++) {
                    float product[4];
                    group_product(product, a[p], b);
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        sums[p][strip][half][i] =
                            fmaf(product[i], row_scale[p][i / 2] * column_scale[half * 2 + i % 2], sums[p][strip][half][i]);
                }
            }
        }
    }

    // Low rank: t in two tf32 parts, 22 bits of it; proj_up is exact in tf32. Slot c of the product is column 2c, slot
    // c+4 is column 2c + 1, which are one float2 of t and one packed pair of proj_up.
    const int first_strip = column_tile * (TILE / PANEL) + warp_strip, first = first_rank ? first_rank[column_tile] : 0;
#pragma unroll
    for (int p = 0; p < 2; p++) {
        const int panel = min(row_tile * (TILE / PANEL) + warp_panel + p, panels - 1);
        const u32 row = panel * PANEL + lane / 4;
#pragma unroll 1
        for (int tile = 0; tile < rank / 16; tile++) {
            float high[2][4], low[2][4];  // [8 columns of t][operand a]
#pragma unroll
            for (int i = 0; i < 4; i++) {  // [8 columns][row g, g+8]
                const u32 at = (row + i % 2 * 8) * t_rank + first + tile * 16 + i / 2 * 8 + lane % 4 * 2;
                float pair[2] = {0.f, 0.f};
#pragma unroll 1
                for (int share = 0; share < shares; share++) {
                    const float2 part = *reinterpret_cast<const float2*>(t + (share * panels * PANEL * t_rank + at));
                    pair[0] += part.x;
                    pair[1] += part.y;
                }
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float rounded = tf32_part(pair[j]);
                    high[i / 2][j * 2 + i % 2] = rounded;
                    low[i / 2][j * 2 + i % 2] = pair[j] - rounded;
                }
            }
#pragma unroll
            for (int strip = 0; strip < 4; strip++) {
                const uint4 words = up[((first_strip + strip) * (rank / 16) + tile) * 32 + lane];
                const u32 pairs[4] = {words.x, words.y, words.z, words.w};  // [half of the strip][8 columns of t]
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const float2 b = widen(f16(), pairs[half * 2 + j]);
                        mma_tf32(sums[p][strip][half], low[j][0], low[j][1], low[j][2], low[j][3], b.x, b.y);
                        mma_tf32(sums[p][strip][half], high[j][0], high[j][1], high[j][2], high[j][3], b.x, b.y);
                    }
            }
        }
    }

    copy_wait<0>();
    __syncthreads();  // all stages are read: their memory now carries rows of the output
    unsigned char* rows = shared.rows[warp];
    constexpr int PER_VECTOR = 16 / sizeof(OUT), VECTORS = 64 / PER_VECTOR;
    const bool whole = n % PER_VECTOR == 0;
#pragma unroll
    for (int p = 0; p < 2; p++) {
#pragma unroll
        for (int strip = 0; strip < 4; strip++) {
            float4 b = make_float4(0.f, 0.f, 0.f, 0.f);
            if (bias) b = *reinterpret_cast<const float4*>(bias + (first_strip + strip) * channel_na + lane % 4 * channel_nc);
            const float offset[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float* s = sums[p][strip][half];
                const int column = strip * 16 + half * 8 + lane % 4 * 2;
                OUT* to = reinterpret_cast<OUT*>(rows + lane / 4 * ROW_BYTES) + column;
                store_pair(to, s[0] + offset[half * 2], s[1] + offset[half * 2 + 1]);
                to = reinterpret_cast<OUT*>(rows + (lane / 4 + 8) * ROW_BYTES) + column;
                store_pair(to, s[2] + offset[half * 2], s[3] + offset[half * 2 + 1]);
            }
        }
        __syncwarp();  // the panel's rows are whole
#pragma unroll
        for (int i = lane; i < PANEL * VECTORS; i += 32) {
            const int row = (row_tile * (TILE / PANEL) + warp_panel + p) * PANEL + i / VECTORS;
            const int column = first_strip * 16 + i % VECTORS * PER_VECTOR;
            const OUT* from = reinterpret_cast<const OUT*>(rows + i / VECTORS * ROW_BYTES) + i % VECTORS * PER_VECTOR;
            OUT* to = y + static_cast<long long>(row) * n + column;
            if (row < m && column < n) {
                if (whole)
                    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
                else
                    for (int j = 0; j < PER_VECTOR && column + j < n; j++) to[j] = from[j];
            }
        }
        __syncwarp();  // the panel's rows are stored
    }
}
