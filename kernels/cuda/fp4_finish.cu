// y = sums · wcscale + bias + t · proj_upᵀ, rounded once: what follows a GEMM of expanded 4-bit floating-point operands.
//
// A block of 8 warps takes 64 x 128 outputs, a warp a panel of 16 rows by four strips of 16 columns.
//
//   sums      (rows, n tiles · 128) float32, row-major
//   t         (shares, rows, rank) float32, their sum over shares is x · proj_down
//   wcscale, bias  packed float32, (n tiles, 128); bias may be null
//   up        packed float16 proj_up, (n tiles · 8, rank / 16, 32) uint4
//   y         (m, n) of type `out`, row-major; n may end inside the last tile
#include "epilogue.cuh"

extern "C" __global__ void __launch_bounds__(256) fp4_finish(const float* __restrict__ sums, const float* __restrict__ t, int shares,
                                                             const float* __restrict__ wcscale, const uint4* __restrict__ up,
                                                             const float* __restrict__ bias, void* __restrict__ y, int out, int m, int n,
                                                             int rows, int columns, int rank) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int strip = (blockIdx.x * 2 + warp % 2) * 4, row = (blockIdx.y * 4 + warp / 2) * PANEL + lane / 4;
    if (row - lane / 4 >= rows) return;
    float part[4][2][4];
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int lower = 0; lower < 2; lower++) {
                const long long at = static_cast<long long>(row + lower * 8) * columns + (strip + s) * 16 + half * 8 + lane % 4 * 2;
                const float2 pair = *reinterpret_cast<const float2*>(sums + at);
                part[s][half][lower * 2] = pair.x;
                part[s][half][lower * 2 + 1] = pair.y;
            }
    const int first = strip * channel_na;
    scale_columns(part, wcscale + first, bias ? bias + first : nullptr, lane);
    add_low_rank(part, t + row * rank, shares, rows * rank, rank, up + strip * (rank / 16) * 32, lane);
    store_rows(out, y, part, row - lane / 4, strip * 16, m, n, lane);
}
