// Hopper's alone: registers that warps pass on, matrix products of a whole warpgroup.
//
// Source: PTX ISA, section wgmma. sm_90a only.
#include "bulk.cuh"

// Registers of a warpgroup that only copies, and of one that computes: the sum over a block must fit.
template <int COUNT>
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// A barrier of one warpgroup; ids from 1, 0 is __syncthreads'.
__device__ __forceinline__ void warpgroup_sync(int id) { asm volatile("bar.sync %0, 128;" ::"r"(id) : "memory"); }


// A 16 x 16 piece of an accumulator, d[8 columns][row g, g + 8][columns 2c, 2c + 1], transposed: its columns become rows of
// shared memory, `pitch` elements apart.
template <typename T>
__device__ __forceinline__ void store_transposed(T* to, int pitch, const float* d, int lane) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = narrow(T(), d[2 * i], d[2 * i + 1]);
    const T* row = to + (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 8;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(row)), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}
__device__ __forceinline__ void store_transposed(f32* to, int pitch, const float* d, int lane) {
#pragma unroll
    for (int i = 0; i < 8; i++) to[(i / 4 * 8 + lane % 4 * 2 + i % 2) * pitch + i / 2 % 2 * 8 + lane / 4].value = d[i];
}

// ---------------------------------------------------------------------------------------------- wgmma

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// An operand in shared memory, no swizzle: core matrices of 8 rows by 16 bytes, one after the other along k, the next 8
// rows after `row_step` bytes.
__device__ __forceinline__ u64 operand(const void* at, int row_step) {
    return static_cast<u64>((shared_address(at) & 0x3ffff) >> 4) | static_cast<u64>(128 >> 4) << 16 | static_cast<u64>(row_step >> 4) << 32;
}

// Keeps the compiler from moving reads of the sums ahead of the wait for them.
template <int COUNT>
__device__ __forceinline__ void pin(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// d (+)= a · b, 64 x N x 32 e4m3. d[4j + 2h + e] of warp w: row 16w + 8h + g, column 8j + 2c + e; g = lane / 4, c = lane % 4.
#define SVDQ_F4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SVDQ_F16(d, i) SVDQ_F4(d, i), SVDQ_F4(d, i + 4), SVDQ_F4(d, i + 8), SVDQ_F4(d, i + 12)
#define SVDQ_D16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define SVDQ_D32 SVDQ_D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SVDQ_D48 SVDQ_D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define SVDQ_WGMMA(N, D, A, B, ADD)                                    \
    "{.reg .pred add;\n setp.ne.b32 add, " ADD ", 0;\n"                 \
    "wgmma.mma_async.sync.aligned.m64n" N "k32.f32.e4m3.e4m3 {" D "}, " A ", " B ", add, 1, 1;}"

template <int ADD>
__device__ __forceinline__ void wgmma(float (&d)[16], u64 a, u64 b) {
    asm volatile(SVDQ_WGMMA("32", SVDQ_D16, "%16", "%17", "%18") : SVDQ_F16(d, 0) : "l"(a), "l"(b), "n"(ADD));
}
template <int ADD>
__device__ __forceinline__ void wgmma(float (&d)[32], u64 a, u64 b) {
    asm volatile(SVDQ_WGMMA("64", SVDQ_D32, "%32", "%33", "%34") : SVDQ_F16(d, 0), SVDQ_F16(d, 16) : "l"(a), "l"(b), "n"(ADD));
}
template <int ADD>
__device__ __forceinline__ void wgmma(float (&d)[48], u64 a, u64 b) {
    asm volatile(SVDQ_WGMMA("96", SVDQ_D48, "%48", "%49", "%50") : SVDQ_F16(d, 0), SVDQ_F16(d, 16), SVDQ_F16(d, 32) : "l"(a), "l"(b), "n"(ADD));
}
