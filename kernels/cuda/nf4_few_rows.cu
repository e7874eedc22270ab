// y = x · weight_hatᵀ + bias of few rows x on the tensor cores, the weights looked up on the way, sums in float32.
//
//   x                 (m, k) SCALAR, rows row_stride apart, 16-byte aligned       bias  (n) SCALAR or null
//   packed            (n, k / 2) bytes, two codes each; k = 64 · blocks           y     (m, n) SCALAR
//   absmax            (n, blocks) codes of the scales       nested_quant_map  (256) float32
//   nested_absmax     (n · blocks / 256) float32            quant_map         (16) float32
//
// A byte is two weights: a table gives their levels as two float16, with a copy of its own for every lane, so that lanes
// never wait for each other's bank. All levels are first multiplied by LIFT, for which their roundings are smallest: 8e-5 of
// a row, root mean square, where rounding y to float16 takes twice that. x of bfloat16 becomes float16 too, its 64 values of a
// block by one power of two that puts the largest between 2^15 and 2^16: exact down to 2^-32 of it.
//
// A block of threads owns 16 · STRIPS rows of W (blockIdx.x) and 4 · TILES rows of x (blockIdx.y); its warps take turns in
// the tiles of k, 128 columns, two scales' blocks. Weights are operand a: lane 4 g + c has the columns 32 c … 32 c + 31 of
// rows g and g + 8, sixteen bytes each; any order of k will do that x has too. Two lanes make a block, and a product must
// not mix blocks: of operand b the columns 0 to 3 are four rows of x for the first, and zero for the second; 4 to 7 are the
// other way round. So a sum of eight products is of one block and is scaled once. Warps' sums are added in their order.
#include "nf4.cuh"

constexpr int WARPS = 8, STAGES = 2;  // STAGES: tiles on their way to a warp
constexpr int BLOCKS_AT_ONCE = TILES == 1 ? 2 : 1;
constexpr int THREADS = WARPS * 32, ROWS = STRIPS * 16, TOKENS = TILES * 4, TILE_K = 2 * BLOCK;
constexpr float LIFT = 1.3662109375f;
constexpr int ENTRY = 256;  // bytes between a table's entries: twice what the copies take, so that a byte permute makes the address
constexpr int X_STEP = ENTRY, X_PAIR = 4 * ENTRY;  // x lies in the other halves: between a lane's vectors, and pairs of rows
constexpr int X_WARP = TOKENS / 2 * X_PAIR;
constexpr int ZEROS = 256 * ENTRY, MAP = ZEROS + X_PAIR, UNITS = MAP + 256 * 4;
constexpr int ROW_STRIDE = ROWS + 4;  // so that sums on their way to each other meet no bank twice
static_assert(WARPS * X_WARP <= ZEROS && WARPS * TOKENS * ROW_STRIDE * 4 <= ZEROS, "x, and later the sums, lie in the table");

// A word of the table, which begins at this address: an addition less than where shared memory happens to begin, which is not
// after it.
constexpr u32 TABLE = 1024;
__device__ __forceinline__ u32 look_up(const unsigned char* table, u32 at) {
    u32 pair;
    asm volatile("ld.shared.u32 %0, [%1 + 1024];" : "=r"(pair) : "r"(at));
    return pair;
}

struct Piece {  // of a tile, what a lane has of a strip
    uint4 codes[2];   // rows g and g + 8
    u32 scale_code;   // an even lane has that of row g, an odd one of g + 8
    float nested;
};

// Sixteen values of x as float16, in units of `unit`. The four lanes that have a block of a row call it.
template <typename T>
constexpr bool SCALED = false;
template <>
constexpr bool SCALED<bf16> = true;
__device__ __forceinline__ void to_halves(f16, u32 (&pairs)[8], float& unit) {}
__device__ __forceinline__ void to_halves(bf16, u32 (&pairs)[8], float& unit) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float2 pair = widen(bf16(), pairs[i]);
        most = fmaxf(most, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
#pragma unroll
    for (int h = 1; h < 4; h *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, h));
    const u32 exponent = max(__float_as_uint(most) & 0x7f800000u, 16u << 23);
    const float factor = __uint_as_float((269u << 23) - exponent);  // largest · factor is in 2^15 … 2^16
    unit = __uint_as_float(exponent - (15u << 23));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float2 pair = widen(bf16(), pairs[i]);
        pairs[i] = narrow(f16(), pair.x * factor, pair.y * factor);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AT_ONCE)
    nf4_few_rows(const SCALAR* x, long long row_stride, const uint4* __restrict__ packed, const unsigned char* __restrict__ absmax,
                 const float* __restrict__ quant_map, const float* __restrict__ nested_absmax, const float* __restrict__ nested_quant_map,
                 float offset, const SCALAR* __restrict__ bias, SCALAR* y, int m, int n, int blocks) {
    extern __shared__ __align__(16) unsigned char shared[];
    unsigned char* table = shared + (TABLE - shared_address(shared));
    float* map = reinterpret_cast<float*>(table + MAP);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int first_row = blockIdx.x * ROWS, first_token = blockIdx.y * TOKENS;
    const int tiles = (blocks + 1) / 2;

    u32 row_blocks[STRIPS][2], own_blocks[STRIPS];  // where rows start; past the last one it is the last
#pragma unroll
    for (int s = 0; s < STRIPS; s++) {
#pragma unroll
        for (int h = 0; h < 2; h++) row_blocks[s][h] = min(first_row + s * 16 + h * 8 + g, n - 1) * blocks;
        own_blocks[s] = row_blocks[s][c % 2];
    }
    const auto load = [&](Piece& piece, int tile, int s) {
        const u32 block = min(tile * 2 + c / 2, blocks - 1);  // past the last one x is zero
#pragma unroll
        for (int h = 0; h < 2; h++) piece.codes[h] = load_once(packed + static_cast<long long>(row_blocks[s][h] + block) * 2 + c % 2);
        piece.scale_code = absmax[own_blocks[s] + block];
        piece.nested = nested_absmax[(own_blocks[s] + block) / 256];
    };
    if (STRIPS == 1) let_next_kernel_start();
    Piece pieces[STAGES][STRIPS];
#pragma unroll
    for (int i = 0; i < STAGES; i++)
        if (warp + i * WARPS < tiles)
#pragma unroll
            for (int s = 0; s < STRIPS; s++) load(pieces[i][s], warp + i * WARPS, s);

    for (int i = threadIdx.x; i < 256; i += THREADS) {
        const u32 pair = narrow(f16(), quant_map[i / 16] * LIFT, quant_map[i % 16] * LIFT);
#pragma unroll
        for (int v = 0; v < 8; v++)  // neighbours begin at other banks
            *reinterpret_cast<uint4*>(table + i * ENTRY + (i % 8 ^ v) * 16) = make_uint4(pair, pair, pair, pair);
        map[i] = nested_quant_map[i];
    }
    if (threadIdx.x < 32) *reinterpret_cast<uint4*>(table + ZEROS + ENTRY / 2 + c * X_STEP + g * 16) = make_uint4(0, 0, 0, 0);
    wait_for_previous_kernel();

    // x is staged by fours of rows, eight lanes a row; of one row four tiles at once, of two rows two.
    const int rows = min(m - first_token, TOKENS);
    const int width_bits = TILES > 1 || rows > 2 ? 2 : rows - 1, turns = 4 >> width_bits;
    const int place = lane / 8, q = lane % 8, token = place & ((1 << width_bits) - 1), ahead_by = (place >> width_bits) * WARPS;
    const SCALAR* own_row = x + (first_token + token) * row_stride + ahead_by * TILE_K + q * 16;
    uint4 ahead[TILES][2];
    const auto load_x = [&](int tile) {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const bool there = token + i * 4 < rows && (tile + ahead_by) * TILE_K + q * 16 < blocks * BLOCK;
            const uint4* from = reinterpret_cast<const uint4*>(own_row + i * 4 * row_stride + tile * TILE_K);
#pragma unroll
            for (int h = 0; h < 2; h++) ahead[i][h] = there ? from[h] : make_uint4(0, 0, 0, 0);
        }
    };
    load_x(warp);
    if (STRIPS > 1) let_next_kernel_start();  // no earlier: its weights would be in the way of this one's x
    __syncthreads();          // table, map and zeros are there

    unsigned char* own_x = table + ENTRY / 2 + warp * X_WARP;
    float* own_units = reinterpret_cast<float*>(table + UNITS) + warp * TOKENS * 2;  // [block][place]
    const auto offset_of = [](int place) { return place / 2 * X_PAIR + place % 2 * 64; };
    const auto stage_x = [&] {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            u32 pairs[8] = {ahead[i][0].x, ahead[i][0].y, ahead[i][0].z, ahead[i][0].w,
                            ahead[i][1].x, ahead[i][1].y, ahead[i][1].z, ahead[i][1].w};
            float unit;
            to_halves(SCALAR(), pairs, unit);
            unsigned char* to = own_x + offset_of(place + i * 4) + q / 2 * 16 + q % 2 * 2 * X_STEP;
#pragma unroll
            for (int h = 0; h < 2; h++)
                *reinterpret_cast<uint4*>(to + h * X_STEP) = make_uint4(pairs[4 * h], pairs[4 * h + 1], pairs[4 * h + 2], pairs[4 * h + 3]);
            if (SCALED<SCALAR> && q % 4 == 0) own_units[q / 4 * TOKENS + place + i * 4] = unit;
        }
    };
    const bool has_x = g / 4 == c / 2;  // else its columns of operand b are zero
    const unsigned char* zeros = table + ZEROS + ENTRY / 2 + (lane < 16 ? 32 : 0);  // at banks that the others do not read
    const u32 copy = lane * 4;

    float sums[STRIPS][TILES][4] = {};  // rows g (0, 1) and g + 8 (2, 3), tokens 2 (c % 2) and + 1, of one of two blocks
    int turn = 0;
    const auto work = [&](Piece(&piece)[STRIPS], int tile) {
        if (turn == 0) {
            __syncwarp();  // nobody needs the last x any more
            stage_x();
            load_x(tile + WARPS * turns);
            __syncwarp();  // x is staged
        }
        const int turned = turn << width_bits;
        turn = turn + 1 == turns ? 0 : turn + 1;
#pragma unroll
        for (int s = 0; s < STRIPS; s++) {
            const float scale = scale_of(map[piece[s].scale_code], piece[s].nested, offset), other = __shfl_xor_sync(FULL_WARP, scale, 1);
            const float scales[2] = {c % 2 ? other : scale, c % 2 ? scale : other};
            u32 levels[2][16];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint4 codes = piece[s].codes[h];
#pragma unroll
                for (int i = 0; i < 16; i++) {
                    const u32 word = i < 4 ? codes.x : i < 8 ? codes.y : i < 12 ? codes.z : codes.w;
                    const u32 at = __byte_perm(word, copy, 0x5504 | i % 4 << 4);  // 256 · byte + 4 · lane
                    levels[h][i] = look_up(table, at);
                }
            }
            if (tile + STAGES * WARPS < tiles) load(piece[s], tile + STAGES * WARPS, s);
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const auto place_of = [&](int token) { return turned + min(i * 4 + token, rows - 1); };
                const unsigned char* from = has_x ? own_x + offset_of(place_of(g % 4)) + c * 16 : zeros;
                float part[4] = {};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const uint4 b = *reinterpret_cast<const uint4*>(from + j * X_STEP);
                    mma_half(f16(), part, levels[0][4 * j], levels[1][4 * j], levels[0][4 * j + 1], levels[1][4 * j + 1], b.x, b.y);
                    mma_half(f16(), part, levels[0][4 * j + 2], levels[1][4 * j + 2], levels[0][4 * j + 3], levels[1][4 * j + 3], b.z, b.w);
                }
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const float whole = SCALED<SCALAR> ? part[j] * own_units[c / 2 * TOKENS + place_of(c % 2 * 2 + j % 2)] : part[j];
                    sums[s][i][j] = fmaf(whole, scales[j / 2], sums[s][i][j]);
                }
            }
        }
    };
    for (int first = warp; first < tiles; first += STAGES * WARPS)
#pragma unroll
        for (int i = 0; i < STAGES; i++)
            if (first + i * WARPS < tiles) work(pieces[i], first + i * WARPS);

    __syncthreads();  // table and x are read
    float* partial = reinterpret_cast<float*>(table);  // [warp][token][row]
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float both = sums[s][i][j] + __shfl_xor_sync(FULL_WARP, sums[s][i][j], 2);  // of both blocks of the tiles
                if (c < 2) partial[(warp * TOKENS + i * 4 + c * 2 + j % 2) * ROW_STRIDE + s * 16 + j / 2 * 8 + g] = both;
            }
    __syncthreads();  // all sums are there
    for (int i = threadIdx.x; i < rows * ROWS; i += THREADS) {
        const int token = i / ROWS, row = first_row + i % ROWS;
        if (row >= n) continue;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += partial[(w * TOKENS + token) * ROW_STRIDE + i % ROWS];
        sum = sum * (1.f / LIFT) + (bias ? widen(SCALAR(), bias[row].bits).x : 0.f);
        store_one(y + static_cast<long long>(first_token + token) * n + row, sum);
    }
}
