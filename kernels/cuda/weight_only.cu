// y = x · weight_hatᵀ + t · proj_upᵀ + bias of weights in 4 or 8 bits (BITS) and activations in 16, for few rows of x.
//
//   x        (m, k) SCALAR, rows x_stride apart, 16-byte aligned; k a multiple of 32
//   qweight  (n, k) codes, row-major: nibbles, eight in a word, the lowest k lowest; or bytes in −127..127
//   scales   (n, groups) float16; of bytes (n)
//   zeros    (n, groups) bytes, 0..15; null: 8 everywhere, and always for bytes
//   t        (m, rank) float32, up (n, rank) float16, rank a multiple of 8 or 0; bias (n) SCALAR or null
//   y        (m, n) SCALAR, or float32 if wide
//
// weight_hat = (code − zero) · scale, with 2^group_shift codes of a row to a scale and a zero point: 32, 64, 128, or more
// than k for the whole row.
//
// A block owns 16 · STRIPS rows of W (blockIdx.x) and 8 · TILES rows of x (blockIdx.y); its warps take turns in the tiles
// of k. Weights are operand a of the tensor cores, as integers: code − zero is exact in 16 bits, so that only the float32
// sums round; a group's sum is scaled once. A lane copies 16 bytes of a row g and of g + 8, g = lane / 4, into shared
// memory, STAGES tiles on their way, so that the four lanes of a row have 128 codes of 4 bits, or 64 of 8, of it. Any
// order of k will do that is the same in both operands: the lane multiplies the codes that it has copied by the x that
// belongs to them, and needs no barrier. A group of less than 128 codes must not meet another one in a product: there
// (TURNED) the four lanes take a word each of what one of them has copied. With many rows of x too: neighbouring lanes
// then read neighbouring x.
// The weights are on their way before the kernel that makes x has ended. Warps' sums are added in their order.
#include "common.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int ROWS = STRIPS * 16;
constexpr int STEPS = BITS == 4 ? 4 : 2;  // of a tile, each of eight k to a lane
constexpr int TILE_K = STEPS * 32;
constexpr int NEAR = TILES == 1 ? STEPS : 1;  // steps that x is ahead
constexpr bool SCALED = BITS == 4;            // by the group; a row of bytes has one scale, for its finished sum
constexpr int TOKENS = 8 * TILES;
constexpr int SCALED_GROUPS = 128;  // scales of a row in shared memory at once
constexpr int SCALE_STRIDE = SCALED_GROUPS + 1;  // odd: eight rows of a group are in eight banks
constexpr int ROW_STRIDE = ROWS + 4;             // so that sums on their way to each other meet no bank twice
constexpr int STAGE_VECTORS = STRIPS * 2 * THREADS;
constexpr int RING_BYTES = STAGES * STAGE_VECTORS * 16;
static_assert(TILES == 1 || TURNED || BITS == 8, "many rows read x by neighbours");
static_assert(SCALED_GROUPS % (WARPS * TILE_K / 32) == 0, "what the warps' tiles need next is staged whole");
static_assert(!TURNED || BITS == 4, "groups of 8-bit codes are rows");
static_assert(WARPS * TOKENS * ROW_STRIDE * 4 <= SHARED_BYTES && RING_BYTES + (SCALED ? ROWS * SCALE_STRIDE * 4 : 0) <= SHARED_BYTES,
              "shared memory");

// a · b + c of two packed values, rounded once.
__device__ __forceinline__ u32 fma_pair(f16, u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ u32 fma_pair(bf16, u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// Low bits with zeros above them are a tiny number of the 16-bit type, an integer times its smallest: 2^-24 and 2^-133. One
// fused operation makes it code − zero, in units of 1 / UNIT, without a rounding. (The bits 4 to 7 need a factor less.)
template <typename Half>
struct Unpack;
template <>
struct Unpack<f16> {
    static constexpr u32 FACTOR = 0x78007800u, FACTOR_16 = 0x68006800u;  // 2^15, 2^11, twice
    static constexpr float UNIT = 512.f;
};
template <>
struct Unpack<bf16> {
    static constexpr u32 FACTOR = 0x7f007f00u, FACTOR_16 = 0x7d007d00u;  // 2^127, 2^123
    static constexpr float UNIT = 64.f;
};
constexpr float UNIT = Unpack<SCALAR>::UNIT;

// Eight nibbles less the zero point as pairs (0, 4), (1, 5), (2, 6), (3, 7); `zero` is −zero / UNIT, twice.
__device__ __forceinline__ void unpack_nibbles(u32 (&pairs)[4], u32 word, u32 zero) {
#pragma unroll
    for (int i = 0; i < 2; i++, word >>= 8) {
        pairs[2 * i] = fma_pair(SCALAR(), word & 0x000f000fu, Unpack<SCALAR>::FACTOR, zero);
        pairs[2 * i + 1] = fma_pair(SCALAR(), word & 0x00f000f0u, Unpack<SCALAR>::FACTOR_16, zero);
    }
}
// Eight bytes as pairs (0, 1), (2, 3), (4, 5), (6, 7); `zero` is −128 / UNIT, twice.
__device__ __forceinline__ void unpack_bytes(u32 (&pairs)[4], u32 low, u32 high, u32 zero) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 word = (i < 2 ? low : high) ^ 0x80808080u;
        pairs[i] = fma_pair(SCALAR(), __byte_perm(word, 0, i % 2 ? 0x4342 : 0x4140), Unpack<SCALAR>::FACTOR, zero);
    }
}

// Eight neighbours of x as the pairs that the codes are unpacked to.
__device__ __forceinline__ void pair_up(u32 (&pairs)[4], const uint4& v) {
    pairs[0] = BITS == 8 ? v.x : __byte_perm(v.x, v.z, 0x5410);
    pairs[1] = BITS == 8 ? v.y : __byte_perm(v.x, v.z, 0x7632);
    pairs[2] = BITS == 8 ? v.z : __byte_perm(v.y, v.w, 0x5410);
    pairs[3] = BITS == 8 ? v.w : __byte_perm(v.y, v.w, 0x7632);
}

__device__ __forceinline__ u32 word_of(const uint4& words, int i) { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

extern "C" __global__ void __launch_bounds__(THREADS, TILES == 1 ? 2 : 1)
    weight_only(const SCALAR* x, long long x_stride, const uint4* __restrict__ qweight, const u16* __restrict__ scales,
                const unsigned char* __restrict__ zeros, const float* t, const uint4* up, const SCALAR* bias,
                SCALAR* y, int m, int n, int k, int group_shift, int rank, int wide) {
    extern __shared__ __align__(16) unsigned char shared[];
    uint4* ring = reinterpret_cast<uint4*>(shared);  // [stage][strip][half of its rows][thread]
    u32* staged = reinterpret_cast<u32*>(shared + RING_BYTES);  // [row][group]: its scale, and −zero / UNIT above
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int first_row = blockIdx.x * ROWS, first_token = blockIdx.y * TOKENS;
    const int row_vectors = k / (128 / BITS), groups = ((k - 1) >> group_shift) + 1;

    // Scales and zeros of the groups from `from` on, on their way to shared memory: a warp has rows of its own.
    u16 scales_near[ROWS / WARPS];
    unsigned char zeros_near[ROWS / WARPS];
    auto load_scales = [&](int at) {
#pragma unroll
        for (int i = 0; i < ROWS / WARPS; i++) {
            const long long from = static_cast<long long>(min(first_row + i * WARPS + warp, n - 1)) * groups + at;
            scales_near[i] = scales[from];
            zeros_near[i] = zeros ? zeros[from] : 8;
        }
    };
    auto store_scales = [&](int at) {
#pragma unroll
        for (int i = 0; i < ROWS / WARPS; i++)
            staged[(i * WARPS + warp) * SCALE_STRIDE + at] = scales_near[i] | narrow(SCALAR(), 0.f, zeros_near[i] * (-1.f / UNIT));
    };
    const int near = min(groups, SCALED_GROUPS);
    if (SCALED && lane < near) load_scales(lane);

    // Where a lane's 16 bytes lie among its warp's: neither order of reading them meets a bank twice.
    const int own = TURNED ? warp * 32 + c * 8 + g : threadIdx.x;
    u32 rows[2 * STRIPS];  // in vectors; a row past the last is the last
#pragma unroll
    for (int i = 0; i < 2 * STRIPS; i++) rows[i] = static_cast<u32>(min(first_row + i * 8 + g, n - 1)) * row_vectors + c;
    auto load_weights = [&](int tile, uint4* to) {
        if (tile * 4 + c < row_vectors)
#pragma unroll
            for (int i = 0; i < 2 * STRIPS; i++) copy_async(to + i * THREADS + own, qweight + (rows[i] + tile * 4));
        copy_commit();
    };
    const int tiles = (k + TILE_K - 1) / TILE_K;
#pragma unroll
    for (int i = 0; i < STAGES; i++) load_weights(i * WARPS + warp, ring + i * STAGE_VECTORS);
    if (SCALED) {
        if (lane < near) store_scales(lane);
        for (int i = lane + 32; i < near; i += 32) {
            load_scales(i);
            store_scales(i);
        }
    }
    wait_for_previous_kernel();

    // Of at most eight rows of x, 8 / width columns of operand b are free for each: column g has row g % width in the tile
    // of turn g / width, so that as many tiles of x arrive at once; in the other turns it is zero.
    const int width = TILES > 1 || m - first_token > 4 ? 8 : m - first_token > 2 ? 4 : m - first_token;
    const int turns = 8 / width, own_turn = g / width;
    const int lane_k = TURNED ? c * 8 : c * STEPS * 8, k_left = k - lane_k, tokens_left = m - first_token - g % width;
    const SCALAR* tokens = x + (first_token + g % width) * x_stride + lane_k;
    uint4 ahead[NEAR][TILES];
    auto load_x = [&](int tile, int step, int i) {
        const int at = tile * TILE_K + (TURNED ? step * 32 : step * 8);
        const bool there = at < k_left && i * 8 < tokens_left;
        ahead[step % NEAR][i] = there ? *reinterpret_cast<const uint4*>(tokens + i * 8 * x_stride + at) : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int i = 0; i < NEAR; i++)
#pragma unroll
        for (int j = 0; j < TILES; j++) load_x(own_turn * WARPS + warp, i, j);
    let_next_kernel_start();  // no earlier: its weights would be in the way of this one's x
    if (SCALED) __syncthreads();  // the scales are staged

    u32 pairs[STEPS][4];  // of TILES 1: what the tensor cores take of x
    int turn_now = 0;
    float sums[STRIPS][TILES][4] = {};  // of rows g (0, 1) and g + 8 (2, 3), tokens 2c (0, 2) and 2c + 1 (1, 3)
    int staged_from = 0;
    uint4* stage = ring;  // the one at hand
    for (int first = 0; first < tiles; first += WARPS) {
        const int tile = first + warp;
        if (SCALED && (first * TILE_K >> group_shift) >= staged_from + SCALED_GROUPS) {  // for all warps at once
            staged_from += SCALED_GROUPS;
            __syncthreads();  // nobody needs the last ones any more
            for (int i = lane; i < min(groups - staged_from, SCALED_GROUPS); i += 32) {
                load_scales(staged_from + i);
                store_scales(i);
            }
            __syncthreads();  // the next ones are staged
        }
        copy_wait<STAGES - 1>();
        if (TURNED) __syncwarp();  // the other lanes' words are there
        uint4 words[STRIPS][2];
        if (!TURNED) {
#pragma unroll
            for (int i = 0; i < 2 * STRIPS; i++) words[i / 2][i % 2] = stage[i * THREADS + own];
            load_weights(tile + STAGES * WARPS, stage);
        }

        if (TILES == 1 && turn_now == 0)
#pragma unroll
            for (int i = 0; i < STEPS; i++) {
                pair_up(pairs[i], ahead[i % NEAR][0]);
                load_x(tile + (turns + own_turn) * WARPS, i, 0);
            }

        float part[STRIPS][TILES][4] = {};  // of one group
        u32 staged_word[STRIPS][2];  // of rows g, g + 8
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const u32 byte_zero = narrow(SCALAR(), -128.f / UNIT, -128.f / UNIT);
            if (SCALED && (TURNED || step == 0)) {
                const int here = min((tile * TILE_K + step * 32) >> group_shift, groups - 1) - staged_from;
#pragma unroll
                for (int i = 0; i < 2 * STRIPS; i++) staged_word[i / 2][i % 2] = staged[(i * 8 + g) * SCALE_STRIDE + here];
            }
            u32 upper[STRIPS][4], lower[STRIPS][4];  // of rows g, g + 8
#pragma unroll
            for (int s = 0; s < STRIPS; s++) {
                if (BITS == 4) {
                    const u32* turned = reinterpret_cast<const u32*>(stage + 2 * s * THREADS + warp * 32 + step * 8 + g) + c;
                    const u32 zero[2] = {__byte_perm(staged_word[s][0], 0, 0x3232), __byte_perm(staged_word[s][1], 0, 0x3232)};
                    unpack_nibbles(upper[s], TURNED ? turned[0] : word_of(words[s][0], step), zero[0]);
                    unpack_nibbles(lower[s], TURNED ? turned[THREADS * 4] : word_of(words[s][1], step), zero[1]);
                } else {
                    unpack_bytes(upper[s], word_of(words[s][0], 2 * step), word_of(words[s][0], 2 * step + 1), byte_zero);
                    unpack_bytes(lower[s], word_of(words[s][1], 2 * step), word_of(words[s][1], 2 * step + 1), byte_zero);
                }
            }
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                u32 b[4];
                if (TILES > 1) pair_up(b, ahead[0][i]);
                else
#pragma unroll
                    for (int j = 0; j < 4; j++) b[j] = own_turn == turn_now ? pairs[step][j] : 0;
                if (TILES > 1) load_x(step + 1 < STEPS ? tile : tile + WARPS, (step + 1) % STEPS, i);
#pragma unroll
                for (int s = 0; s < STRIPS; s++) {
                    float(&into)[4] = SCALED ? part[s][i] : sums[s][i];
                    mma_half(SCALAR(), into, upper[s][0], lower[s][0], upper[s][1], lower[s][1], b[0], b[1]);
                    mma_half(SCALAR(), into, upper[s][2], lower[s][2], upper[s][3], lower[s][3], b[2], b[3]);
                }
            }
            if (SCALED && (step == STEPS - 1 || (TURNED && ((step + 1) * 32 & ((1 << group_shift) - 1)) == 0)))
#pragma unroll
                for (int s = 0; s < STRIPS; s++)
#pragma unroll
                    for (int i = 0; i < TILES; i++)
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            sums[s][i][j] = fmaf(part[s][i][j], widen(f16(), staged_word[s][j / 2]).x, sums[s][i][j]);
                            part[s][i][j] = 0.f;
                        }
        }
        if (TURNED) {
            __syncwarp();  // nobody needs this stage any more
            load_weights(tile + STAGES * WARPS, stage);
        }
        stage = stage == ring + (STAGES - 1) * STAGE_VECTORS ? ring : stage + STAGE_VECTORS;
        turn_now = turn_now + 1 == turns ? 0 : turn_now + 1;
    }

    copy_wait<0>();
    __syncthreads();  // the ring is read
    if (TILES == 1)
#pragma unroll
        for (int s = 0; s < STRIPS; s++)
#pragma unroll
            for (int j = 0; j < 2; j++) {  // the turns of a row of x
                float(&row)[2] = *reinterpret_cast<float(*)[2]>(&sums[s][0][2 * j]);
                if (width == 1) row[0] += row[1];
                if (width <= 2)
#pragma unroll
                    for (int i = 0; i < 2; i++) row[i] += __shfl_xor_sync(FULL_WARP, row[i], 1);
                if (width <= 4)
#pragma unroll
                    for (int i = 0; i < 2; i++) row[i] += __shfl_xor_sync(FULL_WARP, row[i], 2);
            }
    float* partial = reinterpret_cast<float*>(shared);  // [warp][token][row]
#pragma unroll
    for (int s = 0; s < STRIPS; s++)
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                partial[(warp * TOKENS + i * 8 + c * 2 + j % 2) * ROW_STRIDE + s * 16 + j / 2 * 8 + g] = sums[s][i][j];
    __syncthreads();  // all sums are there
    for (int i = threadIdx.x; i < TOKENS * ROWS; i += THREADS) {
        const int token = first_token + i / ROWS, row = first_row + i % ROWS;
        if (token >= m || row >= n) continue;
        float sum = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += partial[(w * TOKENS + i / ROWS) * ROW_STRIDE + i % ROWS];
        sum *= SCALED ? UNIT : UNIT * widen(f16(), scales[row]).x;
        for (int r = 0; r < rank; r += 8) {
            const uint4 factors = up[(static_cast<long long>(row) * rank + r) / 8];
            const float* with = t + static_cast<long long>(token) * rank + r;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 pair = widen(f16(), word_of(factors, j));
                sum = fmaf(with[2 * j], pair.x, sum);
                sum = fmaf(with[2 * j + 1], pair.y, sum);
            }
        }
        if (bias) sum += widen(SCALAR(), bias[row].bits).x;
        const long long at = static_cast<long long>(token) * n + row;
        if (wide) store_one(reinterpret_cast<f32*>(y) + at, sum);
        else store_one(y + at, sum);
    }
}
