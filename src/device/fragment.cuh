// Thin device functions over PTX: loads with cache hints and the tensor-core products that w4q uses (sm_80 and newer).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace w4q::device {

/// Streams 16 bytes that are read once: not kept in L1.
__device__ __forceinline__ uint4 load_once(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ __forceinline__ uint2 load_once(const uint2* address) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
  return v;
}

/// (a & mask) | b in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t b) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(a), "r"(mask), "r"(b));
  return result;
}

/// mask ? a : b, bit by bit, in one instruction.
__device__ __forceinline__ uint32_t select_bits(uint32_t a, uint32_t b, uint32_t mask) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(result) : "r"(a), "r"(b), "r"(mask));
  return result;
}

/// From here on the kernel may touch what the launch before it in the stream writes. Does nothing where launches do not
/// overlap.
__device__ __forceinline__ void wait_grid_dependency() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next launch in the stream begin on multiprocessors that this one leaves.
__device__ __forceinline__ void trigger_dependent_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// The two 16-bit types of activations: pairs in a register, products with a pair, and the tensor-core product
/// c[16 × 8] += a[16 × 16] · b[16 × 8] with fp32 accumulation.
struct HalfType {
  using Scalar = __half;
  __device__ static uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  __device__ static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
  __device__ static float widen(Scalar value) { return __half2float(value); }
  __device__ static float2 widen_pair(uint32_t pair) { return __half22float2(reinterpret_cast<const __half2&>(pair)); }
  __device__ static Scalar narrow(float value) { return __float2half_rn(value); }
  __device__ static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

struct Bf16Type {
  using Scalar = __nv_bfloat16;
  __device__ static uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
  __device__ static uint32_t multiply(uint32_t a, uint32_t b) {
    // A fused product with −0 is the correctly rounded product; a plain bf16 product needs sm_90.
    uint32_t result;
    constexpr uint32_t minus_zero = 0x80008000u;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(minus_zero));
    return result;
  }
  __device__ static float widen(Scalar value) { return __bfloat162float(value); }
  __device__ static float2 widen_pair(uint32_t pair) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  }
  __device__ static Scalar narrow(float value) { return __float2bfloat16_rn(value); }
  __device__ static void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

}  // namespace w4q::device
