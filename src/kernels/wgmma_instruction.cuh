// The warpgroup matrix product of sm_90a: d[64 × rows] += a[64 × 16] · b[16 × rows], fp32 sums, the 16-bit A in
// registers (in the order of mma.m16n8k16, 16 outputs to each of four warps), B in shared memory: `rows` rows of 128
// bytes, 16-byte pieces exchanged as 128-byte swizzling does. It runs beside the threads: a register that it reads or
// adds to is left alone until wait_products() says that it is done.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/fragment.cuh"

namespace w4q::kernels::wgmma {

/// Registers written before are seen by the products after.
__device__ __forceinline__ void order_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void close_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until at most `left` closed groups of products are under way.
template <int left>
__device__ __forceinline__ void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

/// Names B at a shared address: rows of 128 bytes, eight of them 1024 bytes apart from the next eight, aligned to 1024.
/// Sixteen columns further on are two units more.
__device__ __forceinline__ uint64_t describe_rows(uint32_t address) {
  constexpr uint64_t swizzle_128 = uint64_t{1} << 62;
  constexpr uint64_t eight_rows = uint64_t{1024 / 16} << 32;
  return swizzle_128 | eight_rows | uint64_t{1} << 16 | (address & 0x3FFFF) >> 4;
}
constexpr uint64_t columns_16 = 32 / 16;

// The operands of an instruction are spelled out: the language has no other way.
// clang-format off
#define W4Q_WGMMA_32(type) \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0; " \
    "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " " \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
    "{%16, %17, %18, %19}, %20, p, 1, 1, 0;}" \
    : \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]) \
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define W4Q_WGMMA_64(type) \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; " \
    "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " " \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
    "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}" \
    : \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]) \
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define W4Q_WGMMA_128(type) \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; " \
    "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
    "{%64, %65, %66, %67}, %68, p, 1, 1, 0;}" \
    : \
    "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
    "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
    "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
    "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
    "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
    "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
    "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
    "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]) \
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
// clang-format on

/// d = a · b, plus d where `add` is not zero. A lane's sums: value 4·j + 2·half + e is output row lane div 4 + 8·half
/// of its warp's sixteen and activation row 8·j + 2·(lane mod 4) + e.
template <class Type>
__device__ __forceinline__ void multiply(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int add) {
  if constexpr (std::is_same_v<Type, device::HalfType>) {
    W4Q_WGMMA_32("f16");
  } else {
    W4Q_WGMMA_32("bf16");
  }
}
template <class Type>
__device__ __forceinline__ void multiply(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  if constexpr (std::is_same_v<Type, device::HalfType>) {
    W4Q_WGMMA_64("f16");
  } else {
    W4Q_WGMMA_64("bf16");
  }
}
template <class Type>
__device__ __forceinline__ void multiply(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add) {
  if constexpr (std::is_same_v<Type, device::HalfType>) {
    W4Q_WGMMA_128("f16");
  } else {
    W4Q_WGMMA_128("bf16");
  }
}

#undef W4Q_WGMMA_32
#undef W4Q_WGMMA_64
#undef W4Q_WGMMA_128

}  // namespace w4q::kernels::wgmma
