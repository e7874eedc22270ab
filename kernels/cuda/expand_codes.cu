// Packed 4-bit weight codes → e4m3 bytes in the order that wgmma reads from shared memory, once a product of many tokens.
//
//   qweight   (n tiles, groups, 8, 32) uint4
//   expanded  (n tiles · 128, groups · 64) e4m3 in the order `fp8`: code / 512, see codes.cuh
#include "codes.cuh"

extern "C" __global__ void __launch_bounds__(256) expand_codes(const uint4* __restrict__ qweight, unsigned char* __restrict__ expanded, int groups, int rows) {
    let_next_kernel_start();
    const int group = blockIdx.x, tile = blockIdx.y, lane = threadIdx.x % 32, strip = threadIdx.x / 32;
    const uint4 words = load_once(qweight + (static_cast<long long>(tile) * groups + group) * (8 * STRIP_VECTORS) + threadIdx.x);
    unsigned char* to = expanded + (static_cast<long long>(group / 2) * rows + tile * 128 + strip * 16) * 128 + group % 2 * 2 * fp8_ks + lane / 4 * fp8_ml + lane % 4 * fp8_kl;
    const u32 word[4] = {words.x, words.y, words.z, words.w};  // [8 rows][32 channels]
    wait_for_previous_kernel();  // its readers may be of this kernel's last result
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 even, odd;
        unpack_codes(even, odd, word[i]);
        u32* at = reinterpret_cast<u32*>(to + i / 2 * fp8_mg + i % 2 * fp8_ks);
        at[0] = even;
        at[fp8_kp / 4] = odd;
    }
}
