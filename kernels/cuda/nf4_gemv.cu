// y = x · weight_hatᵀ + bias of few rows x, the weights looked up on the way, sums in float32. grid.y: rows of x.
//
//   x                 (m, k) SCALAR, rows row_stride apart, 16-byte aligned       bias  (n) SCALAR or null
//   packed            (n, k / 2) bytes, two codes each; k = 64 · blocks           y     (m, n) SCALAR
//   absmax            (n, blocks) codes of the scales       nested_quant_map  (256) float32
//   nested_absmax     (n · blocks / 256) float32            quant_map         (16) float32
//
// A byte is two weights: a table gives their levels as two float16, with a copy of its own for every lane, so that lanes
// never wait for each other's bank. All levels are first multiplied by LIFT, for which their roundings are smallest: 8e-5 of
// a row, root mean square, where rounding y to float16 takes twice that.
//
// A tile is four outputs, a team of warps shares its columns, 1024 at a time: lane l has 32 · l … 32 · l + 31 of them, half
// a scale's block. What it takes is all asked for at once: 64 KB a multiprocessor, or reading would wait for answers. Teams
// walk over tiles, each at its own pace; the warps' sums of up to KEPT tiles meet in shared memory, in a fixed order.
#include "nf4.cuh"

constexpr int WARPS = 32, THREADS = WARPS * 32, ROWS = 4, LANE_COLUMNS = 32, STEP = 32 * LANE_COLUMNS, KEPT = 16;
constexpr float LIFT = 1.3662109375f;
constexpr int ENTRY = 256;  // bytes between a table's entries: twice what the copies take, so that a byte permute makes the address

struct Piece {  // of a tile and step, what a lane has
    uint4 codes[ROWS];
    u32 scale_code[ROWS / 2];  // an even lane has those of the first two outputs, an odd one of the others
    float nested[ROWS / 2];
};

extern "C" __global__ void __launch_bounds__(THREADS)
    nf4_gemv(const SCALAR* x, long long row_stride, const uint4* __restrict__ packed, const unsigned char* __restrict__ absmax,
             const float* __restrict__ quant_map, const float* __restrict__ nested_absmax, const float* __restrict__ nested_quant_map,
             float offset, const SCALAR* __restrict__ bias, SCALAR* y, int n, int blocks, int team_bits) {
    extern __shared__ __align__(16) unsigned char shared[];
    float* map = reinterpret_cast<float*>(shared + 256 * ENTRY);
    float* sums = map + 256;  // [tile][warp][output]
    let_next_kernel_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int team = 1 << team_bits, teams = WARPS >> team_bits, of_block = warp >> team_bits, member = warp & (team - 1);
    const int stride = gridDim.x * teams;
    const int tiles = (n + ROWS - 1) / ROWS, steps = (blocks + STEP / BLOCK - 1) / (STEP / BLOCK);

    const auto load = [&](Piece& piece, int tile, int step) {
        const int half = min(step * 32 + lane, blocks * 2 - 1);  // of a scale's block
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const u32 block = min(tile * ROWS + r, n - 1) * blocks + half / 2;
            piece.codes[r] = load_once(packed + static_cast<long long>(block) * 2 + half % 2);
        }
#pragma unroll
        for (int r = 0; r < ROWS / 2; r++) {
            const u32 block = min(tile * ROWS + lane % 2 * 2 + r, n - 1) * blocks + half / 2;
            piece.scale_code[r] = absmax[block];
            piece.nested[r] = nested_absmax[block / 256];
        }
    };

    int tile = blockIdx.x * teams + of_block;
    Piece piece;
    if (tile < tiles && member < steps) load(piece, tile, member);
#pragma unroll 2
    for (int i = threadIdx.x; i < 256 * 8; i += THREADS) {  // 16 bytes: the copies of four lanes
        const u32 pair = narrow(f16(), quant_map[i / 128] * LIFT, quant_map[i / 8 % 16] * LIFT);
        *reinterpret_cast<uint4*>(shared + i / 8 * ENTRY + i % 8 * 16) = make_uint4(pair, pair, pair, pair);
    }
    if (threadIdx.x < 256) map[threadIdx.x] = nested_quant_map[threadIdx.x];
    wait_for_previous_kernel();
    __syncthreads();  // table and map are there

    const SCALAR* x_row = x + blockIdx.y * row_stride;
    const u32 copy = lane * 4;
    uint4 values[4];
    int columns = -1;  // the step whose values these are
    for (int first = blockIdx.x * teams; first < tiles; first += KEPT * stride) {
        for (int kept = 0; kept < KEPT && tile < tiles; kept++, tile += stride) {
            float sum[ROWS / 2] = {};
            for (int step = member; step < steps; step += team) {
                if (step != columns) {
                    const bool inside = step * 32 + lane < blocks * 2;
                    const uint4* from = reinterpret_cast<const uint4*>(x_row + step * STEP + lane * LANE_COLUMNS);
#pragma unroll
                    for (int i = 0; i < 4; i++) values[i] = inside ? from[i] : make_uint4(0, 0, 0, 0);
                    columns = step;
                }
                float dot[ROWS] = {};
#pragma unroll
                for (int w = 0; w < 4; w++) {
                    const u32 four[4] = {values[w].x, values[w].y, values[w].z, values[w].w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const float2 factor = widen(SCALAR(), four[i]);
#pragma unroll
                        for (int r = 0; r < ROWS; r++) {
                            const uint4 codes = piece.codes[r];
                            const u32 word = w == 0 ? codes.x : w == 1 ? codes.y : w == 2 ? codes.z : codes.w;
                            const u32 at = __byte_perm(word, copy, 0x5504 | i << 4);  // 256 · byte + 4 · lane
                            const float2 level = widen(f16(), *reinterpret_cast<const u32*>(shared + at));
                            dot[r] = fmaf(level.x, factor.x, dot[r]);
                            dot[r] = fmaf(level.y, factor.y, dot[r]);
                        }
                    }
                }
#pragma unroll
                for (int r = 0; r < ROWS / 2; r++) {  // two lanes share a block: each has two outputs of both from here on
                    const bool odd = lane % 2;
                    const float both = (odd ? dot[r + 2] : dot[r]) + __shfl_xor_sync(FULL_WARP, odd ? dot[r] : dot[r + 2], 1);
                    sum[r] = fmaf(both, scale_of(map[piece.scale_code[r]], piece.nested[r], offset), sum[r]);
                }
                const bool ends = step + team >= steps;
                const int next = ends ? tile + stride : tile;
                if (next < tiles) load(piece, next, ends ? member : step + team);
            }
            const bool second = lane & 2;
            float total = (second ? sum[1] : sum[0]) + __shfl_xor_sync(FULL_WARP, second ? sum[0] : sum[1], 2);
#pragma unroll
            for (int h = 16; h > 2; h /= 2) total += __shfl_xor_sync(FULL_WARP, total, h);
            if (lane < ROWS) sums[(kept * WARPS + warp) * ROWS + lane % 2 * 2 + lane / 2] = total;
        }
        __syncthreads();  // the sums are there
#pragma unroll 1
        for (int i = threadIdx.x; i < KEPT * teams * ROWS; i += THREADS) {
            const int slot = i / ROWS, kept = (slot << team_bits) / WARPS, finished = slot & (teams - 1);
            const int output = (first + kept * stride + finished) * ROWS + i % ROWS;
            if (output >= n) continue;
            const float* part = sums + (slot << team_bits) * ROWS + i % ROWS;
            float total = 0.f;
#pragma unroll 4
            for (int w = 0; w < team; w++) total += part[w * ROWS];
            total = total * (1.f / LIFT) + (bias ? widen(SCALAR(), bias[output].bits).x : 0.f);
            store_one(y + static_cast<long long>(blockIdx.y) * n + output, total);
        }
        __syncthreads();  // the sums are read
    }
}
