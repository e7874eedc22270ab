// y = Σ_groups (codes_x · codes_w) · scale_x · scale_w + t · proj_upᵀ + bias on Hopper's 8-bit floating-point tensor cores.
//
// Weight codes are e4m3 numbers, made by expand_codes. An activation is an e4m3 byte: either a 4-bit code, then a group's
// sum is an integer below 2^12, exact in the accumulator, and scaled by group (TOKEN_SCALE = 0) or token (1); or a value
// of 8 bits, scaled by token.
//
// yᵀ = W · xᵀ: weights are operand a, activations operand b. A block computes 128 columns of y for TOKENS tokens, tile after
// tile until all are done. One warpgroup copies; the others compute 64 · BLOCKS columns of BLOCK tokens each. With BLOCKS = 2 the scales of a token are read from shared memory once for two
// products: a broadcast costs what distinct values cost. The loop over the stages is unrolled, so that their addresses are
// constants. After the last stage of a tile come those of its low rank: 16 columns of proj_up and of SHARES shares of t
// each, so that nothing waits for global memory at a tile's end.
//
//   x        e4m3, in the order `fp8`, rows padded to x_rows
//   scales   float32 in the order `token_scales`: (x_rows, groups); TOKEN_SCALE: (x_rows)
//   t        float32, in the order `token_t`: (x_rows, t_rank) a share; see w4a4_gemm_lora for first_rank
//   weights  e4m3 in the order `fp8`, w_rows rows
//   wscales  packed float16, (n tiles, groups, 128)
//   up       packed float16 proj_up, (n tiles · 8, rank / 16, 32) uint4
//   bias     packed float32, (n tiles, 128), or null
//   y        (m, n) OUT, row-major; n may end inside the last tile
#include "hopper.cuh"
#include "codes.cuh"

constexpr int STEP = 2 * GROUP, COLUMNS = 128;  // channels of a stage, columns of a tile
constexpr int HALVES = 2 / BLOCKS;  // of the columns, with warpgroups of their own
constexpr int COMPUTING = TOKENS / BLOCK * HALVES, THREADS = (COMPUTING + 1) * 128;
constexpr int SUMS = BLOCK / 2;  // of a thread, for 64 columns
constexpr int X_BYTES = TOKENS * STEP, W_BYTES = COLUMNS * STEP, WS_BYTES = COLUMNS * 4, XS_BYTES = TOKEN_SCALE ? 0 : TOKENS * 8;
constexpr int WS_AT = X_BYTES + W_BYTES, XS_AT = WS_AT + WS_BYTES, STAGE_BYTES = XS_AT + XS_BYTES;
constexpr int OPERANDS = TOKEN_SCALE ? 3 : 4;
constexpr int PITCH = 64 + 16 / sizeof(OUT);  // of a row of y on its way out, in elements
constexpr int ROWS_BYTES = BLOCK * PITCH * sizeof(OUT);
constexpr int BAND = 12;  // tiles of tokens that are worked on together, for the second-level cache

constexpr int T_BYTES = TOKENS * 16 * 4, UP_BYTES = COLUMNS * 16 * 2;  // of 16 columns of the low rank
constexpr int SHARES = TOKENS == 64 ? 4 : 2;  // of t in a stage
constexpr int STRIP_UP_BYTES = 16 * 16 * 2;

static_assert(SHARES * T_BYTES + UP_BYTES <= STAGE_BYTES, "a stage of the low rank");
static_assert(token_t_je == 1 && token_t_jc == 2 && token_t_ml == 8 && token_t_jh == 64 && token_t_mp == 128, "order of t");
static_assert(STAGE_BYTES % 128 == 0 && ROWS_BYTES % 16 == 0, "alignment of the stages");
static_assert(fp8_kb == 1 && fp8_kl == 4 && fp8_ml == 16 && fp8_kp == 128 && fp8_ks == 256 && fp8_mg == 1024, "order of the 8-bit activations");
static_assert(token_scales_md == 1 && token_scales_mb == 2 && token_scales_mc == 4 && token_scales_kg == 16 && token_scales_ma == 32, "order of the scales");

extern __shared__ __align__(1024) unsigned char memory[];

struct Tiles {
    int rows, columns;  // tiles of tokens, of columns
    __device__ __forceinline__ void at(int tile, int& row, int& column) const {
        const int band = tile / (BAND * columns), first = band * BAND, high = min(BAND, rows - first);
        const int inside = tile - first * columns;
        row = first + inside % high;
        column = inside / high;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    w4_wgmma_lora(const unsigned char* x, const float* scales, const float* t, int shares, int x_rows, const unsigned char* weights, int w_rows,
                  const u16* __restrict__ wscales, const uint4* up, const float* __restrict__ bias, OUT* __restrict__ y,
                  int m, int n, int groups, int rank, int t_rank, const int* __restrict__ first_rank) {
    __shared__ u64 full[STAGES], empty[STAGES];
    // The same in all lanes, which the shuffle tells the compiler.
    const int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, steps = groups / 2;
    const Tiles tiles = {(m + TOKENS - 1) / TOKENS, (n + COLUMNS - 1) / COLUMNS};
    const int last = tiles.rows * tiles.columns;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&full[i], OPERANDS);
            barrier_init(&empty[i], 4 * COMPUTING);  // warps
        }
        barrier_init_done();
    }
    let_next_kernel_start();
    __syncthreads();
    wait_for_previous_kernel();
    const int rounds = (shares + SHARES - 1) / SHARES * (rank / 16);  // of the low rank
    u32 phases = 0;  // a bit a stage; a tile begins with stage 0
    if (warpgroup == COMPUTING) {
        fewer_registers<COMPUTING == 3 ? 56 : 32>();
        if (lane == 0 && warp < OPERANDS) {  // each warp copies one operand
            const u32 to = shared_address(memory) + (warp == 0 ? 0 : warp == 1 ? X_BYTES : warp == 2 ? WS_AT : XS_AT);
            const int bytes = warp == 0 ? X_BYTES : warp == 1 ? W_BYTES : warp == 2 ? WS_BYTES : XS_BYTES;
            // The rows of a stage lie together, those of the next stage `step_bytes` on; the weights' scales lie by tiles.
            const long long step_bytes = warp == 0 ? x_rows * STEP : warp == 1 ? w_rows * STEP : warp == 2 ? WS_BYTES : x_rows * 8;
            const void* source = warp == 0 ? x : warp == 1 ? weights : warp == 2 ? static_cast<const void*>(wscales) : scales;
            int stage = 0;
            auto next = [&]() {
                phases ^= 1 << stage;
                if (++stage == STAGES) stage = 0;
            };
            for (int tile = blockIdx.x; tile < last; tile += gridDim.x) {
                int row, column;
                tiles.at(tile, row, column);
                const long long first = warp == 0 || warp == 3 ? row : warp == 1 ? column : static_cast<long long>(column) * steps;
                const unsigned char* from = static_cast<const unsigned char*>(source) + first * bytes;
                stage = 0;
#pragma unroll 1
                for (int step = 0; step < steps; step++, from += step_bytes) {
                    barrier_wait(&empty[stage], ~phases >> stage & 1);  // passes while no one has used the stage
                    barrier_expect(&full[stage], bytes);
                    bulk_copy(to + stage * STAGE_BYTES, from, bytes, &full[stage]);
                    next();
                }
                const int first_tile = first_rank ? first_rank[column] / 16 : 0;  // of t
#pragma unroll 1
                for (int round = 0; round < rounds; round++) {
                    barrier_wait(&empty[stage], ~phases >> stage & 1);
                    const u32 at = shared_address(memory) + stage * STAGE_BYTES;
                    const int r = round % (rank / 16), first_share = round / (rank / 16) * SHARES;
                    if (warp == 0) {
                        const int here = min(SHARES, shares - first_share);
                        barrier_expect(&full[stage], here * T_BYTES);
#pragma unroll 1
                        for (int share = 0; share < here; share++)
                            bulk_copy(at + share * T_BYTES, t + (static_cast<long long>((first_share + share) * (t_rank / 16) + first_tile + r) * x_rows + row * TOKENS) * 16, T_BYTES, &full[stage]);
                    } else if (warp == 1) {
                        barrier_expect(&full[stage], UP_BYTES);
#pragma unroll 1
                        for (int strip = 0; strip < COLUMNS / 16; strip++)
                            bulk_copy(at + SHARES * T_BYTES + strip * STRIP_UP_BYTES, up + ((column * (COLUMNS / 16ll) + strip) * (rank / 16) + r) * 32, STRIP_UP_BYTES, &full[stage]);
                    } else {
                        barrier_arrive(&full[stage]);
                    }
                    next();
                }
            }
        }
    } else {
        more_registers<COMPUTING == 3 ? 152 : 112>();
        const int half = warpgroup % HALVES, part = warpgroup / HALVES;  // of the columns, of the tokens
        OUT* rows = reinterpret_cast<OUT*>(memory + STAGES * STAGE_BYTES + warpgroup * ROWS_BYTES);
        const u64 a = operand(memory + X_BYTES + half * (8 * fp8_mg), fp8_mg), b = operand(memory + part * (BLOCK / 8 * fp8_mg), fp8_mg);
        const u16* row_scales = reinterpret_cast<const u16*>(memory + WS_AT) + half * 64 + warp * wscales_na + lane / 8 * wscales_nc + lane / 4 % 2;
        const float4* token_scales = reinterpret_cast<const float4*>(memory + XS_AT) + part * (BLOCK / 2) + lane % 4;
        for (int tile = blockIdx.x; tile < last; tile += gridDim.x) {
            int row, column;
            tiles.at(tile, row, column);
            const int first_token = row * TOKENS + part * BLOCK, first_column = column * COLUMNS + half * 64;
            float sums[BLOCKS][SUMS] = {}, product[SUMS];
            int step = 0;
            while (step < steps) {
#pragma unroll
                for (int stage = 0; stage < STAGES; stage++, step++) {
                    if (step >= steps) break;
                    barrier_wait(&full[stage], phases >> stage & 1);
                    constexpr int PRODUCTS = 2 * BLOCKS;  // group by group
                    auto start = [&](int i) {
                        constexpr int NEXT = fp8_ks >> 4;  // 32 channels on, in a descriptor
                        const u64 offset = (stage * STAGE_BYTES >> 4) + i / BLOCKS * 2 * NEXT, rows_of_w = a + (i % BLOCKS * 8 * fp8_mg >> 4);
                        wgmma_fence();
                        wgmma<0>(product, rows_of_w + offset, b + offset);
                        wgmma<1>(product, rows_of_w + offset + NEXT, b + offset + NEXT);
                        wgmma_commit();
                    };
                    start(0);
                    float w[PRODUCTS][2], q[BLOCK / 16][4];  // scales: of rows g and g + 8, of the lane's tokens
#pragma unroll
                    for (int i = 0; i < 2 * PRODUCTS; i++)
                        w[i / 2][i % 2] = widen(f16(), row_scales[stage * (STAGE_BYTES / 2) + i / 2 / BLOCKS * COLUMNS + i / 2 % BLOCKS * 64 + i % 2 * wscales_nb]).x;
#pragma unroll
                    for (int i = 0; i < PRODUCTS; i++) {
                        if (!TOKEN_SCALE && i % BLOCKS == 0)  // on their way while the product is
#pragma unroll
                            for (int j = 0; j < BLOCK / 16; j++)
                                *reinterpret_cast<float4*>(q[j]) = token_scales[stage * (STAGE_BYTES / 16) + i / BLOCKS * 4 + j * 8];
                        wgmma_wait<0>();
                        pin(product);
#pragma unroll
                        for (int j = 0; j < SUMS; j++) {  // [8 tokens][row][token]
                            const float scale = TOKEN_SCALE ? w[i][j / 2 % 2] : w[i][j / 2 % 2] * q[j / 8][j / 4 % 2 * 2 + j % 2];
                            sums[i % BLOCKS][j] = fmaf(product[j], scale, sums[i % BLOCKS][j]);
                        }
                        if (i + 1 < PRODUCTS) start(i + 1);
                    }
                    __syncwarp();
                    if (lane == 0) barrier_arrive(&empty[stage]);
                    phases ^= 1 << stage;
                }
            }
            // The scale of a token, the bias, the low rank.
#pragma unroll
            for (int k = 0; k < BLOCKS; k++) {
                float offset[2] = {0.f, 0.f};
                if (bias)
#pragma unroll
                    for (int h = 0; h < 2; h++) offset[h] = bias[first_column + k * 64 + warp * channel_na + lane / 8 * channel_nc + h * channel_nb + lane / 4 % 2];
#pragma unroll
                for (int j = 0; j < BLOCK / 8; j++) {
                    float q[2] = {CODE_UNIT, CODE_UNIT};
                    if (TOKEN_SCALE) {
                        const float2 pair = *reinterpret_cast<const float2*>(scales + first_token + j * 8 + lane % 4 * 2);
                        q[0] *= pair.x, q[1] *= pair.y;
                    }
#pragma unroll
                    for (int i = 0; i < 4; i++) sums[k][4 * j + i] = fmaf(sums[k][4 * j + i], q[i % 2], offset[i / 2]);
                }
            }
            // t in two tf32 parts, 22 bits of it; proj_up is exact in tf32. Slots c and c + 4 of a product are columns 2c and
            // 2c + 1 of t.
            int stage = steps % STAGES;
#pragma unroll 1
            for (int round = 0; round < rounds; round++) {
                barrier_wait(&full[stage], phases >> stage & 1);
                const unsigned char* at = memory + stage * STAGE_BYTES;
                const int here = min(SHARES, shares - round / (rank / 16) * SHARES);
                const uint4* words = reinterpret_cast<const uint4*>(at + SHARES * T_BYTES) + (half * 4 + warp) * 32 + lane;
                const float2* tokens = reinterpret_cast<const float2*>(at) + part * (BLOCK / 8) * (token_t_mp / 2) + lane;
#pragma unroll
                for (int k8 = 0; k8 < 2; k8++) {
                    float2 upper[BLOCKS], lower[BLOCKS];
#pragma unroll
                    for (int k = 0; k < BLOCKS; k++) {
                        const uint4 w = words[k * 128];  // [row g, g + 8][8 columns of t]
                        upper[k] = widen(f16(), k8 ? w.y : w.x), lower[k] = widen(f16(), k8 ? w.w : w.z);
                    }
#pragma unroll
                    for (int j = 0; j < BLOCK / 8; j++) {
                        float2 v = tokens[j * (token_t_mp / 2) + k8 * (token_t_jh / 2)];
#pragma unroll
                        for (int share = 1; share < SHARES; share++)  // their loads at once
                            if (share < here) {
                                const float2 more = tokens[share * (T_BYTES / 8) + j * (token_t_mp / 2) + k8 * (token_t_jh / 2)];
                                v.x += more.x;
                                v.y += more.y;
                            }
                        const float2 high = make_float2(tf32_part(v.x), tf32_part(v.y));
#pragma unroll
                        for (int k = 0; k < BLOCKS; k++) {
                            float (&sum)[4] = *reinterpret_cast<float (*)[4]>(&sums[k][4 * j]);
                            mma_tf32(sum, upper[k].x, lower[k].x, upper[k].y, lower[k].y, v.x - high.x, v.y - high.y);
                            mma_tf32(sum, upper[k].x, lower[k].x, upper[k].y, lower[k].y, high.x, high.y);
                        }
                    }
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(&empty[stage]);
                phases ^= 1 << stage;
                if (++stage == STAGES) stage = 0;
            }
            constexpr int PER_VECTOR = 16 / sizeof(OUT), VECTORS = 64 / PER_VECTOR;
            const bool whole = n % PER_VECTOR == 0;
#pragma unroll
            for (int k = 0; k < BLOCKS; k++) {
                warpgroup_sync(1 + warpgroup);  // the rows before are stored
#pragma unroll
                for (int j = 0; j < BLOCK / 8; j += 2) store_transposed(rows + j * 8 * PITCH + warp * 16, PITCH, sums[k] + 4 * j, lane);
                warpgroup_sync(1 + warpgroup);  // the rows are whole
                for (int i = threadIdx.x % 128; i < BLOCK * VECTORS; i += 128) {
                    const int token = first_token + i / VECTORS, first = first_column + k * 64 + i % VECTORS * PER_VECTOR;
                    const OUT* from = rows + i / VECTORS * PITCH + i % VECTORS * PER_VECTOR;
                    OUT* to = y + static_cast<long long>(token) * n + first;
                    if (token < m && first < n) {
                        if (whole)
                            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
                        else
                            for (int j = 0; j < PER_VECTOR && first + j < n; j++) to[j] = from[j];
                    }
                }
            }
        }
    }
}
