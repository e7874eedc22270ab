// 4-bit floating point: codes to 16-bit numbers for tensor cores that have none, and activations to codes.
//
// A code is a sign and the index of 0, ½, 1, 1½, 2, 3, 4, 6: as bits a floating-point number of two exponent bits with bias 1
// and one of mantissa. A scale is an e4m3 number, positive. A code times a scale has six significant bits and lies between
// 2^-10 and 2688 or is 0: exact in bfloat16 and float16. The scale NaN, all of whose codes are 0, makes NaNs.
#include "common.cuh"

// Activation scales lie as the lanes of m16n8k64 hold operand a, weight scales in tiles of 512 bytes, in each 16 bytes one row of
// every 32; a word is the four scales of 64 channels.
static_assert(fp4_scales_kg == 1 && fp4_scales_ml == 4 && fp4_scales_ms == 32 && fp4_scales_kt == 64, "order of the activation scales");
static_assert(fp4_wscales_kg == 1 && fp4_wscales_nd == 4 && fp4_wscales_nc == 16 && fp4_wscales_nl == 64 && fp4_wscales_kt == 512,
              "order of the weight scales");

// An e4m3 byte without sign → float32: its seven bits below float32's exponent, at another bias, denormal numbers too.
__device__ __forceinline__ float widen_scale(u32 byte) {
    return byte == 0x7fu ? __uint_as_float(0x7fc00000u) : __uint_as_float(byte << 20) * 0x1p120f;
}

// ---------------------------------------------------------------------------------------------- quantizing

struct Scale4 {
    u32 byte;
    float value;
    // Of the largest magnitude of 16 numbers: the e4m3 number nearest to min(most / 6, 448), half to even, at least 2^-9.
    __device__ __forceinline__ void set(float most) {
        const float wanted = fminf(__fdiv_rn(most, 6.f), 448.f);
        const u32 bits = __float_as_uint(wanted), multiple = __float_as_uint(wanted + 24576.f) & 0xfu;  // of 2^-9, below 2^-6
        byte = wanted < 0x1p-6f ? max(multiple, 1u) : ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - 960u;
        if (!(most < __int_as_float(0x7f800000))) byte = 0x7fu;
        value = widen_scale(byte);
    }
};

// Codes of eight numbers, low nibble first. A quotient by a scale is made right to the last bit (a product with the reciprocal, its
// remainder added), so that ties are ties. Between two levels the index is a straight line over the quotient, the steeper the
// smaller they are: the least of three lines, and the last. Adding 1.5 · 2^23 makes each an integer in the low bits, half to
// even; it is part of the one operation that makes the line, or a rounding would come before this one.
constexpr float INTEGER = 12582912.f;
__device__ __forceinline__ u32 encode_e2m1(const float (&v)[8], Scale4 scale) {
    if (scale.byte == 0x7fu) return 0;
    const float reciprocal = __frcp_rn(scale.value);
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float a = fabsf(v[i]), estimate = a * reciprocal;
        const float q = fmaf(fmaf(-estimate, scale.value, a), reciprocal, estimate);
        const float index = fminf(fminf(fmaf(q, 2.f, INTEGER), q + (INTEGER + 2.f)), fminf(fmaf(q, 0.5f, INTEGER + 4.f), INTEGER + 7.f));
        word |= ((__float_as_uint(index) & 7u) | (__float_as_uint(v[i]) >> 28 & 8u)) << (4 * i);
    }
    return word;
}

// Codes of a row's 64 channels, and in the first of its four lanes its four scales. A lane has the channels 32·ks + 8·(lane % 4) .. +7
// in v[ks]: a scale is of two lanes.
__device__ __forceinline__ uint2 encode_group(const float (&v)[2][8], u32& scales) {
    u32 words[2], bytes = 0;
#pragma unroll
    for (int ks = 0; ks < 2; ks++) {
        float most = 0.f;
#pragma unroll
        for (int i = 0; i < 8; i++) most = max_nan(most, fabsf(v[ks][i]));
        Scale4 scale;
        scale.set(max_nan(most, __shfl_xor_sync(FULL_WARP, most, 1)));
        words[ks] = encode_e2m1(v[ks], scale);
        bytes |= scale.byte << (16 * ks);
    }
    scales = bytes | __float_as_uint(__shfl_xor_sync(FULL_WARP, __uint_as_float(bytes), 2)) << 8;  // moved as it is
    return make_uint2(words[0], words[1]);
}

// ---------------------------------------------------------------------------------------------- to 16 bits

// A code → float32: a denormal-keeping product, like a scale.
__device__ __forceinline__ float widen_code(u32 nibble) {
    return __uint_as_float((nibble & 7u) << 22 | (nibble & 8u) << 28) * 0x1p126f;
}

// Eight codes of a word and their scale → bfloat16, exact.
__device__ __forceinline__ uint4 expand_e2m1(u32 word, float scale) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; i++) pairs[i] = narrow(bf16(), widen_code(word >> (8 * i)) * scale, widen_code(word >> (8 * i + 4)) * scale);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Two float16 products, each rounded.
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Byte number `byte` of four scales as two float16 of 128 times its value, for `halves`: at most 57344, and exact. Not for NaN.
constexpr u32 TWO_TO_15 = 0x78007800u;
__device__ __forceinline__ u32 half_scale(u32 four, u32 byte) {
    return multiply_halves(__byte_perm(four, 0, 0x4040 + byte * 0x101) << 7, TWO_TO_15);  // the bits' own bias gives 2^-8
}
__device__ __forceinline__ u32 half_scale_or_nan(u32 four, u32 byte) {
    return __byte_perm(four, 0, 0x4440 + byte) == 0x7fu ? 0x7fff7fffu : half_scale(four, byte);
}

// Eight codes times their scale → four pairs of float16 of code · scale / 128: multiples of 2^-17, at most 21, exact. Pair i is
// (code i, code i + 4); where both operands of a product are in that order, it is as good as any.
__device__ __forceinline__ void halves(u32 (&pairs)[4], u32 word, u32 scale) {
    const u32 sign[4] = {word << 12, word << 8, word << 4, word}, index[4] = {word << 9, word << 5, word << 1, word >> 3};
#pragma unroll
    for (int i = 0; i < 4; i++)  // a code's bits alone give 2^-14
        pairs[i] = multiply_halves((sign[i] & 0x80008000u) | (index[i] & 0x0e000e00u), scale);
}
constexpr float HALVES_UNIT = 16384.f;  // of a product of two such numbers
