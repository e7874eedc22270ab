// y = (Σ_groups codes_x · scale_x · codes_w · scale_w) · wcscale + t · proj_upᵀ + bias, rounded once: NVFP4 on tensor cores
// that take 4-bit floating-point operands with their scales (sm_120a). Compiled and emulated on a CPU, never run on a GPU.
//
// A block of 8 warps computes 128 x 128 outputs, a warp 32 x 64 of them: two panels of 16 rows, four strips of 16
// columns. One stage of the pipeline is 64 channels, one product. Codes and scales lie as the instruction's operands do, so a
// stage is copied as it is. The sums stay in the products' accumulators from the first group to the last.
//
//   codes     (panels, groups, 2, 32) uint2        written by quantize_lora_down
//   scales    (panels, groups, 16) words of four e4m3
//   t         (shares, panels · 16, rank) float32, their sum over shares is x · proj_down
//   qweight   packed weight codes, (n tiles, groups, 8, 32) uint4
//   wscales   (n tiles, groups, 8, 4, 4) words of four e4m3
//   wcscale, bias  packed float32, (n tiles, 128); bias may be null
//   up        packed float16 proj_up, (n tiles · 8, rank / 16, 32) uint4
//   y         (m, n) of type `out`, row-major; n may end inside the last tile
#include "e2m1.cuh"
#include "epilogue.cuh"

constexpr int TILE = 128;
constexpr int WARPS = 8;
constexpr int STAGES = 4;
constexpr int ROW_TILES_TOGETHER = 8;  // blocks that run together share weight and activation tiles in the L2 cache

struct Stage {
    uint2 codes[TILE / PANEL][2][32];
    uint4 weights[TILE / PANEL][32];
    u32 scales[TILE / PANEL][PANEL];
    uint2 wscales[32][2];  // of a lane: rows lane / 4 + 8 · (lane % 4) of every 32, one word each
};
static_assert(sizeof(Stage::scales) == 32 * 16 && sizeof(Stage::wscales) == 32 * 16, "warp 0 copies the scales of activations, warp 1 of weights");

// d += (a · scales) · (b · scales), 16 x 8 x 64: 4-bit floating-point operands, an e4m3 scale for 16 channels of a row or column.
// Fragments are those of 4-bit integers. Of every four lanes the first two hold the scales of rows g and g+8, and lane THREAD
// those of column g; the lowest byte is of the first 16 channels.
template <int THREAD>
__device__ __forceinline__ void mma_scaled(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 a_scales, u32 b_scales) {
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {0, 0}, {%11}, {0, %12};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(a_scales), "r"(b_scales), "n"(THREAD));
}

// A strip's two products; its columns are the strip's eighths 2·S and 2·S + 1 of 64, a word of scales being of four.
template <int S>
__device__ __forceinline__ void multiply_strip(float (&sums)[2][4][2][4], const u32 (&a)[2][4], const u32 (&a_scales)[2], uint4 b, uint2 b_scales) {
    const u32 scales = S < 2 ? b_scales.x : b_scales.y;
#pragma unroll
    for (int p = 0; p < 2; p++) {
        mma_scaled<2 * S % 4>(sums[p][S][0], a[p], b.x, b.y, a_scales[p], scales);
        mma_scaled<2 * S % 4 + 1>(sums[p][S][1], a[p], b.z, b.w, a_scales[p], scales);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
    fp4_gemm_lora(const uint4* __restrict__ codes, const uint4* __restrict__ scales, const float* __restrict__ t, int shares,
                  const uint4* __restrict__ qweight, const uint4* __restrict__ wscales, const float* __restrict__ wcscale,
                  const uint4* __restrict__ up, const float* __restrict__ bias, void* __restrict__ y, int out, int m, int n, int groups,
                  int rank) {
    __shared__ __align__(16) Stage stages[STAGES];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int panels = (m + PANEL - 1) / PANEL;
    const int row_tiles = (m + TILE - 1) / TILE, column_tiles = (n + TILE - 1) / TILE;
    const int together = ROW_TILES_TOGETHER * column_tiles;
    const int first_row_tile = blockIdx.x / together * ROW_TILES_TOGETHER;
    const int height = min(row_tiles - first_row_tile, ROW_TILES_TOGETHER);
    const int row_tile = first_row_tile + blockIdx.x % together % height, column_tile = blockIdx.x % together / height;
    const int warp_panel = warp % 4 * 2, warp_strip = warp / 4 * 4;

    // What this thread copies of every stage: one vector of activation codes, one of weights, of warps 0 and 1 one of scales.
    // Past the last panel the last one is taken again; those outputs are not stored.
    const u32 codes_at = min(row_tile * (TILE / PANEL) + warp, panels - 1) * groups * CODES_VECTORS + lane;
    const u32 weights_at = column_tile * groups * (8 * STRIP_VECTORS) + threadIdx.x;
    const uint4* scales_from = warp == 0 ? scales + min(row_tile * (TILE / PANEL) + lane / 4, panels - 1) * groups * 4 + lane % 4
                                         : wscales + column_tile * groups * 32 + lane;
    auto copy_stage = [&](int group) {
        if (group < groups) {
            Stage& stage = stages[group % STAGES];
            copy_async(reinterpret_cast<uint4*>(stage.codes) + threadIdx.x, codes + (codes_at + group * CODES_VECTORS));
            copy_async(reinterpret_cast<uint4*>(stage.weights) + threadIdx.x, qweight + (weights_at + group * (8 * STRIP_VECTORS)));
            if (warp < 2) copy_async(reinterpret_cast<uint4*>(stage.scales) + threadIdx.x, scales_from + group * (warp ? 32 : 4));
        }
        copy_commit();
    };

    let_next_kernel_start();
    float sums[2][4][2][4] = {};  // [panel][strip][half of the strip][row g: columns 2c, 2c+1; row g+8: the same]
#pragma unroll
    for (int group = 0; group < STAGES - 1; group++) copy_stage(group);
    for (int group = 0; group < groups; group++) {
        copy_wait<STAGES - 2>();
        __syncthreads();  // this group's stage has arrived for all, and all are done with the stage filled next
        copy_stage(group + STAGES - 1);
        const Stage& stage = stages[group % STAGES];
        u32 a[2][4], a_scales[2];
#pragma unroll
        for (int p = 0; p < 2; p++) {
            const uint2 upper = stage.codes[warp_panel + p][0][lane], lower = stage.codes[warp_panel + p][1][lane];
            a[p][0] = upper.x;
            a[p][1] = lower.x;
            a[p][2] = upper.y;
            a[p][3] = lower.y;
            a_scales[p] = stage.scales[warp_panel + p][lane % 2 * 8 + lane / 4];
        }
        const uint2 b_scales = stage.wscales[lane][warp / 4];
        multiply_strip<0>(sums, a, a_scales, stage.weights[warp_strip][lane], b_scales);
        multiply_strip<1>(sums, a, a_scales, stage.weights[warp_strip + 1][lane], b_scales);
        multiply_strip<2>(sums, a, a_scales, stage.weights[warp_strip + 2][lane], b_scales);
        multiply_strip<3>(sums, a, a_scales, stage.weights[warp_strip + 3][lane], b_scales);
    }
    copy_wait<0>();

    const int first_strip = column_tile * (TILE / PANEL) + warp_strip, first = first_strip * channel_na;
#pragma unroll 1
    for (int p = 0; p < 2; p++) {
        const int panel = row_tile * (TILE / PANEL) + warp_panel + p;
        if (p)
#pragma unroll
            for (int i = 0; i < 32; i++) sums[0][i / 8][i / 4 % 2][i % 4] = sums[1][i / 8][i / 4 % 2][i % 4];
        if (panel >= panels) break;
        scale_columns(sums[0], wcscale + first, bias ? bias + first : nullptr, lane);
        add_low_rank(sums[0], t + (panel * PANEL + lane / 4) * rank, shares, panels * PANEL * rank, rank, up + first_strip * (rank / 16) * 32, lane);
        store_rows(out, y, sums[0], panel * PANEL, first_strip * 16, m, n, lane);
    }
}
