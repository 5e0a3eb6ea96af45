// Bulk copies from global into shared memory, and the barriers that tell of their arrival.
#pragma once
#include "device.cuh"

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}
__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals));
}
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}
// Ordinary stores to shared memory come before the bulk copies that later overwrite them.
__device__ __forceinline__ void order_before_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Keys and values are read once a step: they should not push weights and activations out of L2.
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u64* barrier,
                                     u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}
