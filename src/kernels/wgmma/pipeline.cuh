// Thin device functions over PTX that feed warpgroup products: barriers in shared memory and bulk copies that arrive at
// them (sm_90).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace w4q::kernels::wgmma {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// A barrier of `count` arrivals and the bytes that were announced.
__device__ __forceinline__ void init_barrier(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
/// Barriers initialised before are seen by the copy engine.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Until the phase of this parity is over.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  }
}

/// Starts copying `bytes`, a multiple of 16 between addresses aligned to 16; the barrier counts them in.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
/// Starts copying the box of `map` that begins at `place`, innermost dimension first; the barrier counts all of its
/// bytes in.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int2 place, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               :
               : "r"(to), "l"(map), "r"(place.x), "r"(place.y), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int3 place, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      :
      : "r"(to), "l"(map), "r"(place.x), "r"(place.y), "r"(place.z), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int4 place, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
      :
      : "r"(to), "l"(map), "r"(place.x), "r"(place.y), "r"(place.z), "r"(place.w), "r"(barrier)
      : "memory");
}
/// What this thread wrote to global memory, or knows to be written, is there for bulk copies that begin later.
__device__ __forceinline__ void order_before_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
/// A barrier of the first `count` threads of the block.
template <int count>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(count) : "memory");
}
/// True in one lane of a warp whose lanes are all here.
__device__ __forceinline__ bool is_leader() {
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected != 0;
}

/// All warps of a warpgroup: the registers of a thread from here on.
template <int count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

/// Starts bringing a map to where the copy engine reads it.
__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/// Four 8 × 8 matrices of 16-bit values, a pair along a row in each lane, stored transposed: lane 8·i + r names the
/// 16 bytes that column r of matrix i fills.
__device__ __forceinline__ void store_transposed(uint32_t address, const uint32_t (&pairs)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(pairs[0]),
               "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

}  // namespace w4q::kernels::wgmma
