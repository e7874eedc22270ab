// From Hopper on: barriers that count bytes, bulk copies, clusters of blocks that see each other's shared memory.
//
// Source: PTX ISA, sections mbarrier, cp.async.bulk, barrier.cluster and mapa.
#include "common.cuh"

typedef unsigned long long u64;

__device__ __forceinline__ void barrier_init(u64* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// After the inits, before the barriers' first use by others.
__device__ __forceinline__ void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrive, and have the phase wait for so many bytes of bulk copies too.
__device__ __forceinline__ void barrier_expect(u64* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra end;\n bra again;\n end: }" ::"r"(shared_address(barrier)), "r"(parity)
        : "memory");
}

// bytes: a multiple of 16; both addresses 16-byte aligned. It arrives by its bytes.
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, int bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
__device__ __forceinline__ void bulk_copy(void* to, const void* from, int bytes, u64* barrier) { bulk_copy(shared_address(to), from, bytes, barrier); }

// All threads of the cluster: what was written to shared memory before the arrival is seen after the wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// The same variable of another block of the cluster.
__device__ __forceinline__ u32 address_in_block(const void* p, u32 block) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(block));
    return address;
}
__device__ __forceinline__ float load_of_block(const float* p, u32 block) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address_in_block(p, block)) : "memory");
    return value;
}
__device__ __forceinline__ void store_to_block(float2* p, u32 block, float2 value) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(address_in_block(p, block)), "f"(value.x), "f"(value.y) : "memory");
}
