// Codes in 4 or 8 bits (BITS) → 16-bit numbers for a matrix product of another library: (code − zero) · scale, rounded once.
//
//   qweight, scales, zeros   as in weight_only.cu, from the first of `rows` rows on; k a multiple of 32
//   weight                   (rows, k) SCALAR, rows row_stride apart, 16-byte aligned
//
// A thread takes eight neighbours: 4 or 8 bytes in, 16 out.
#include "common.cuh"

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS)
    expand_weight(const u32* __restrict__ qweight, const u16* __restrict__ scales, const unsigned char* __restrict__ zeros,
                  uint4* weight, int rows, int k, int group_shift, int row_stride) {
    let_next_kernel_start();
    wait_for_previous_kernel();  // what it reads may still be in `weight`
    const int row_words = k / 8, groups = ((k - 1) >> group_shift) + 1;
    const int at = blockIdx.x * THREADS + threadIdx.x;  // of eight codes in their row
    if (at >= row_words) return;
    const int group = at * 8 >> group_shift;
#pragma unroll 4
    for (int row = blockIdx.y; row < rows; row += gridDim.y) {
        const long long word = static_cast<long long>(row) * row_words + at, of_group = static_cast<long long>(row) * groups + group;
        const float scale = widen(f16(), scales[of_group]).x;
        const int zero = BITS == 8 ? 0 : zeros ? zeros[of_group] : 8;
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int first, second;
            if (BITS == 4) {
                first = (qweight[word] >> 8 * i & 15) - zero;
                second = (qweight[word] >> (8 * i + 4) & 15) - zero;
            } else {
                const u32 four = qweight[2 * word + i / 2];
                first = static_cast<int>(four << (i % 2 ? 8 : 24)) >> 24;
                second = static_cast<int>(four << (i % 2 ? 0 : 16)) >> 24;
            }
            v[i] = narrow(SCALAR(), static_cast<float>(first) * scale, static_cast<float>(second) * scale);
        }
        weight[static_cast<long long>(row) * row_stride / 8 + at] = make_uint4(v[0], v[1], v[2], v[3]);
    }
}
