// factor[row] = 1 / sqrt(mean(x²) + epsilon), one block a row; sums in a fixed order.
//
//   x       (rows, k) SCALAR, rows row_stride apart, 16-byte aligned; k a multiple of 8
//   factor  (rows) float32
#include "common.cuh"

constexpr int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
    inv_rms(const SCALAR* x, long long row_stride, int k, float epsilon, float* __restrict__ factor) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const SCALAR* row = x + static_cast<long long>(blockIdx.x) * row_stride;
    float sum = 0.f;
    for (int column = threadIdx.x * 8; column < k; column += THREADS * 8) {
        const uint4 words = *reinterpret_cast<const uint4*>(row + column);
        const u32 w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 pair = widen(SCALAR(), w[i]);
            sum = fmaf(pair.x, pair.x, sum);
            sum = fmaf(pair.y, pair.y, sum);
        }
    }
#pragma unroll
    for (int h = 16; h > 0; h /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, h);
    __shared__ float partial[THREADS / 32];
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();  // the warps' sums are there
    if (threadIdx.x == 0) {
        sum = partial[0];
#pragma unroll
        for (int w = 1; w < THREADS / 32; w++) sum += partial[w];
        factor[blockIdx.x] = __frcp_rn(__fsqrt_rn(__fdiv_rn(sum, static_cast<float>(k)) + epsilon));
    }
}
