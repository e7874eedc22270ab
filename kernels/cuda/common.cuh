// Shared by all kernels: 16-bit types, tensor-core instructions, asynchronous copies, the 4-bit operands.
//
// No header is included: the few conversions needed are one PTX instruction each, so that a kernel compiles wherever
// libnvrtc is. Compile-time constants (SCALAR, RANK, …) and the strides of every layout stand before this text,
// written by svdq.kernels.compile; the strides come from svdq.kernels.layout, and the static_asserts below and in the
// kernels are the assumptions made about them.

typedef unsigned int u32;
typedef unsigned short u16;

constexpr u32 FULL_WARP = 0xffffffffu;

// ---------------------------------------------------------------------------------------------- scalars

struct f16 {
    u16 bits;
};
struct bf16 {
    u16 bits;
};
struct f32 {
    float value;
};

// Two packed values → float32, exact.
__device__ __forceinline__ float2 widen(f16, u32 pair) {
    float2 v;
    asm("{.reg .f16 a, b;\n mov.b32 {a, b}, %2;\n cvt.f32.f16 %0, a;\n cvt.f32.f16 %1, b;}" : "=f"(v.x), "=f"(v.y) : "r"(pair));
    return v;
}
__device__ __forceinline__ float2 widen(bf16, u32 pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// Two float32 → packed, round to nearest even.
__device__ __forceinline__ u32 narrow(f16, float a, float b) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
}
__device__ __forceinline__ u32 narrow(bf16, float a, float b) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
}

// Two neighbours of an output row, in its type.
__device__ __forceinline__ void store_pair(f16* to, float a, float b) { *reinterpret_cast<u32*>(to) = narrow(f16(), a, b); }
__device__ __forceinline__ void store_pair(bf16* to, float a, float b) { *reinterpret_cast<u32*>(to) = narrow(bf16(), a, b); }
__device__ __forceinline__ void store_pair(f32* to, float a, float b) { *reinterpret_cast<float2*>(to) = make_float2(a, b); }

__device__ __forceinline__ void store_one(f16* to, float a) { to->bits = narrow(f16(), a, 0.f) & 0xffffu; }
__device__ __forceinline__ void store_one(bf16* to, float a) { to->bits = narrow(bf16(), a, 0.f) & 0xffffu; }
__device__ __forceinline__ void store_one(f32* to, float a) { to->value = a; }

// The maximum that keeps a NaN (fmaxf drops it).
__device__ __forceinline__ float max_nan(float a, float b) {
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
    return m;
}

// ---------------------------------------------------------------------------------------------- tensor cores

// d += a · b, 16 x 8 x 16. a: rows (g, g+8) of the first pair of columns, then of the second; b: both pairs of column g.
__device__ __forceinline__ void mma_half(f16, float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_half(bf16, float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// d += a · b, 16 x 8 x 8. A float16 or bfloat16 value is a tf32 value, so both types multiply exactly here and a
// float16 factor meets a bfloat16 activation without a rounding. The bits below tf32's 10 are ignored.
// a: rows (g, g+8) of column c, then of column c+4; b: rows c, c+4 of column g; with g = lane / 4, c = lane % 4.
__device__ __forceinline__ void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)),
          "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// The part of a float that tf32 holds. The rest, one subtraction away, has 13 bits: tf32 holds 11 of them.
__device__ __forceinline__ float tf32_part(float a) { return __uint_as_float(__float_as_uint(a) & 0xffffe000u); }

// A word of eight 4-bit codes, as the integer tensor cores take it. Up to Ada they multiply 4-bit codes directly.
// Hopper and newer have 8-bit ones only: each nibble moves to the top of a byte (its value times 16), and the even and
// odd nibbles of both operands make two products whose sum is 256 times the 4-bit one.
#if __CUDA_ARCH__ >= 900
constexpr float INTEGER_ZERO = 49152.f;  // 1.5 · 2^15: one unit in the last place is 2^-8
template <int WORDS>
struct Codes {
    u32 even[WORDS], odd[WORDS];
    __device__ __forceinline__ void set(int i, u32 word) {
        even[i] = (word << 4) & 0xf0f0f0f0u;
        odd[i] = word & 0xf0f0f0f0u;
    }
};
#define SVDQ_MMA "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
#else
constexpr float INTEGER_ZERO = 12582912.f;  // 1.5 · 2^23: one unit in the last place is 1
template <int WORDS>
struct Codes {
    u32 word[WORDS];
    __device__ __forceinline__ void set(int i, u32 w) { word[i] = w; }
};
#define SVDQ_MMA "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 "
#endif

__device__ __forceinline__ void mma_integer(u32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 c0, u32 c1, u32 c2, u32 c3) {
    asm(SVDQ_MMA "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}

// p = INTEGER_ZERO + a · b over one group of 64, exact: the integer accumulator starts at the bits of INTEGER_ZERO, and
// |a · b| ≤ 3584 stays inside the mantissa. A float16 scale times it, less the scale times INTEGER_ZERO, in one fused
// operation, is exact as well: 12 bits times 11.
__device__ __forceinline__ void shifted_product(float (&p)[4], const Codes<4>& a, const Codes<2>& b) {
    const u32 zero = __float_as_uint(INTEGER_ZERO);
    u32 sum[4];
#if __CUDA_ARCH__ >= 900
    mma_integer(sum, a.even, b.even, zero, zero, zero, zero);
    mma_integer(sum, a.odd, b.odd, sum[0], sum[1], sum[2], sum[3]);
#else
    mma_integer(sum, a.word, b.word, zero, zero, zero, zero);
#endif
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] = __uint_as_float(sum[i]);
}
__device__ __forceinline__ void group_product(float (&p)[4], const Codes<4>& a, const Codes<2>& b) {
    shifted_product(p, a, b);
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] -= INTEGER_ZERO;
}

// sums += t · proj_upᵀ of 8 columns of t and 8 rows. Slot c of the product is column 2c, slot c+4 is column 2c + 1; t goes
// in two tf32 parts, 22 bits of it, and proj_up is exact in tf32.
__device__ __forceinline__ void add_low_rank(float (&sums)[4], float2 t, u32 up_first, u32 up_second) {
    const float2 first = widen(f16(), up_first), second = widen(f16(), up_second);
    const float2 high = make_float2(tf32_part(t.x), tf32_part(t.y));
    mma_tf32(sums, first.x, second.x, first.y, second.y, t.x - high.x, t.y - high.y);
    mma_tf32(sums, first.x, second.x, first.y, second.y, high.x, high.y);
}

// ---------------------------------------------------------------------------------------------- memory

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// 16 bytes to shared memory in the background, past the first-level cache.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A weight is read once: past the first-level cache.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

// Into the second-level cache, without waiting.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Hopper and newer may start a kernel while the one before it still runs: the first says when the next may start, the
// second waits until all that the one before has written is visible. What that one may write must not be declared
// __restrict__, or the compiler reads it through the cache of constants, perhaps ahead of the wait. What is read ahead of
// the wait, the weights, must be older than the kernel before.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---------------------------------------------------------------------------------------------- layouts

// Weight codes: 16 columns of one k tile are 32 vectors of 16 bytes; lane nl·4 + kl of the vector's words (ns, ks) holds
// k = 32·ks + 8·kl .. +7 of column 8·ns + nl. As operand b of two 16 x 8 products the words are (ns 0: x, y), (ns 1: z, w);
// as operand a of one product they are rows g and g+8: x, z, y, w.
static_assert(qweight_kr == 1 && qweight_ks == 8 && qweight_ns == 16 && qweight_kl == 32 && qweight_nl == 128 &&
                  qweight_np == 1024 && qweight_kt == 8 * 1024,
              "order of the weight codes");
// Activation codes: like the weights', but with the two halves of 8 rows apart, so that few rows are few bytes.
static_assert(codes_kr == 1 && codes_ks == 8 && codes_kl == 16 && codes_ml == 64 && codes_ms == 512 && codes_kt == 1024,
              "order of the activation codes");
static_assert(scales_ms == 1 && scales_ml == 2 && scales_kt == 16, "order of the activation scales");
// Weight scales and bias: the four columns that a lane's accumulators hold in 16 columns lie together.
static_assert(wscales_nd == 1 && wscales_nb == 2 && wscales_nc == 4 && wscales_na == 16 && wscales_g == 128,
              "order of the weight scales");
static_assert(channel_nd == 1 && channel_nb == 2 && channel_nc == 4 && channel_na == 16 && channel_nt == 128,
              "order of the bias");
static_assert(down_kd == 1 && down_kp == 2 && down_ks == 8 && down_kl == 16 && down_jl == 64 && down_jb == 512,
              "order of the down projection");
static_assert(lora_up_jd == 1 && lora_up_jb == 2 && lora_up_nb == 4 && lora_up_jc == 8 && lora_up_nl == 32 && lora_up_jt == 256,
              "order of the up projection");

constexpr int GROUP = 64;
constexpr int PANEL = 16;  // rows of activations, or columns of weights, in one operand a
constexpr int STRIP_VECTORS = qweight_np / 32;  // 16-byte vectors of a strip of 16 weight columns, one k tile
constexpr int CODES_VECTORS = codes_kt / 32;    // the same of a panel of activations

// The lane's four weight scales of 16 columns: columns 2c, 2c+1 of the first eight, then of the second.
__device__ __forceinline__ void load_scales(float (&scale)[4], const u16* strip, int lane) {
    const uint2 words = *reinterpret_cast<const uint2*>(strip + lane % 4 * wscales_nc);
    const float2 a = widen(f16(), words.x), b = widen(f16(), words.y);
    scale[0] = a.x;
    scale[1] = a.y;
    scale[2] = b.x;
    scale[3] = b.y;
}
