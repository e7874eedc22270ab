// 4-bit codes as numbers of Hopper's 8-bit floating-point tensor cores: exact, at a unit of 2^-9.
#include "common.cuh"

constexpr float CODE_UNIT = 512.f;  // a code v is the e4m3 number v / 512: below 2^-5 e4m3 numbers are multiples of 2^-9

// Eight 4-bit codes, two's complement in −7..7 → e4m3: the even ones, then the odd ones. Byte b of 0..15 is itself below
// 8, and 0x80 | (16 − b) above.
__device__ __forceinline__ u32 signed_bytes(u32 nibbles, u32 signs) {
    u32 mask;
    asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(mask) : "r"(signs));  // every byte's top bit, eight times
    return (nibbles & ~mask) | ((0x90909090u - nibbles) & mask);
}
__device__ __forceinline__ void unpack_codes(u32& even, u32& odd, u32 word) {
    even = signed_bytes(word & 0x0f0f0f0fu, word << 4);
    odd = signed_bytes((word >> 4) & 0x0f0f0f0fu, word);
}
