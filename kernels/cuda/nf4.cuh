// NF4: what both kernels know of its tensors (svdq/nf4.py says what they mean).
#include "common.cuh"

constexpr int BLOCK = 64;                 // weights that share a scale
constexpr int NESTED_WEIGHTS = 64 * 256;  // weights whose scales share one of their own

// A scale: two roundings, as in bitsandbytes.
__device__ __forceinline__ float scale_of(float mapped, float nested, float offset) { return mapped * nested + offset; }
