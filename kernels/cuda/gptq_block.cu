// GPTQ's walk along one group of 64 columns, one row of the weight a thread: the group's scale, then column by column
// the code, its error, and what that error owes the group's later columns. What it owes later groups is a GEMM.
//
//   working     (64, n) float32: the group's columns, as the error so far has moved them; row-major, a column is a row
//   steps       (64, 64) float32, rows row_stride apart: column j moves by -steps[i][j] times the error of column i
//   importance  (64) float32: weights of the columns' squared errors in the search for the scale
//   fractions   (count) float32, falling: the scales tried are these times absmax, as float16, at least `smallest`
//   weights     (64) float32: of the columns' squared errors in the objective
//   codes       (64, n) int8 in [lo, hi]    scales (n) float32    errors (64, n) float32
//   losses      (n) float32: the row's part of the objective is added to it
//
// The row stays in registers, so every loop is unrolled. Rows are independent: a row's result is that of the row alone.
#include "common.cuh"

constexpr int THREADS = GROUP;

extern "C" __global__ void __launch_bounds__(THREADS)
    gptq_block(const float* __restrict__ working, const float* __restrict__ steps, int row_stride, const float* __restrict__ importance,
               const float* __restrict__ weights, const float* __restrict__ fractions, int count, float smallest, float lo, float hi, int n,
               signed char* __restrict__ codes, float* __restrict__ scales, float* __restrict__ errors, float* __restrict__ losses) {
    __shared__ __align__(16) float moves[GROUP][GROUP];
    __shared__ float important[GROUP], weight[GROUP];
    for (int at = threadIdx.x; at < GROUP * GROUP; at += THREADS) moves[at / GROUP][at % GROUP] = steps[at / GROUP * row_stride + at % GROUP];
    important[threadIdx.x] = importance[threadIdx.x];
    weight[threadIdx.x] = weights[threadIdx.x];
    __syncthreads();
    const int row = blockIdx.x * THREADS + threadIdx.x;
    if (row >= n) return;

    float w[GROUP];
    float absmax = 0.f;
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        w[i] = working[static_cast<long long>(i) * n + row];
        absmax = max_nan(absmax, fabsf(w[i]));
    }
    float scale = 0.f, least = __uint_as_float(0x7f800000u);
    for (int candidate = 0; candidate < count; candidate++) {
        const float rounded = widen(f16(), narrow(f16(), absmax * fractions[candidate], 0.f)).x;
        const float tried = fmaxf(rounded, smallest), inverse = __frcp_rn(tried);
        float missed = 0.f;
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            const float ratio = w[i] * inverse;
            const float off = fminf(fmaxf(rintf(ratio), lo), hi) - ratio;
            missed = fmaf(important[i] * off, off, missed);
        }
        missed *= tried * tried;
        if (candidate == 0 || missed < least) scale = tried, least = missed;
    }
    scales[row] = scale;
    float loss = 0.f;
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        const float code = fminf(fmaxf(rintf(__fdiv_rn(w[i], scale)), lo), hi);
        const float error = fmaf(-code, scale, w[i]);
        codes[static_cast<long long>(i) * n + row] = static_cast<signed char>(code);
        errors[static_cast<long long>(i) * n + row] = error;
        loss = fmaf(weight[i] * error, error, loss);
#pragma unroll
        for (int j = i + 1; j < GROUP; j++) w[j] = fmaf(-moves[i][j], error, w[j]);
    }
    losses[row] += loss;
}
