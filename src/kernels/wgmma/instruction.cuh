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

// The operands of an instruction are spelled out: the language has no other way. Places of sums in the text, twice as
// many each time, then the sums themselves.
// clang-format off
#define W4Q_AT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define W4Q_AT_16 W4Q_AT_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define W4Q_AT_32 W4Q_AT_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define W4Q_AT_64 W4Q_AT_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define W4Q_AT_128 W4Q_AT_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define W4Q_SUMS_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define W4Q_SUMS_16(i) W4Q_SUMS_8(i), W4Q_SUMS_8(i + 8)
#define W4Q_SUMS_32(i) W4Q_SUMS_16(i), W4Q_SUMS_16(i + 16)
#define W4Q_SUMS_64(i) W4Q_SUMS_32(i), W4Q_SUMS_32(i + 32)
#define W4Q_SUMS_128(i) W4Q_SUMS_64(i), W4Q_SUMS_64(i + 64)
// `a0` … `add` are the places behind the sums.
#define W4Q_WGMMA(type, rows, sums, a0, a1, a2, a3, b_, add_) \
  asm volatile("{.reg .pred p; setp.ne.b32 p, %" #add_ ", 0; " \
    "wgmma.mma_async.sync.aligned.m64n" #rows "k16.f32." type "." type " {" W4Q_AT_##sums "}, " \
    "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_ ", p, 1, 1, 0;}" \
    : W4Q_SUMS_##sums(0) \
    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
// clang-format on

/// d = a · b, plus d where `add` is not zero, for 2 · `sums` activation rows. A lane's sums: value 4·j + 2·half + e is
/// output row lane div 4 + 8·half of its warp's sixteen and activation row 8·j + 2·(lane mod 4) + e.
template <class Type, int sums>
__device__ __forceinline__ void multiply(float (&d)[sums], const uint32_t (&a)[4], uint64_t b, int add) {
  constexpr bool half = std::is_same_v<Type, device::HalfType>;
  static_assert(sums == 8 || sums == 16 || sums == 32 || sums == 64 || sums == 128);
  if constexpr (sums == 8 && half) W4Q_WGMMA("f16", 16, 8, 8, 9, 10, 11, 12, 13);
  if constexpr (sums == 8 && !half) W4Q_WGMMA("bf16", 16, 8, 8, 9, 10, 11, 12, 13);
  if constexpr (sums == 16 && half) W4Q_WGMMA("f16", 32, 16, 16, 17, 18, 19, 20, 21);
  if constexpr (sums == 16 && !half) W4Q_WGMMA("bf16", 32, 16, 16, 17, 18, 19, 20, 21);
  if constexpr (sums == 32 && half) W4Q_WGMMA("f16", 64, 32, 32, 33, 34, 35, 36, 37);
  if constexpr (sums == 32 && !half) W4Q_WGMMA("bf16", 64, 32, 32, 33, 34, 35, 36, 37);
  if constexpr (sums == 64 && half) W4Q_WGMMA("f16", 128, 64, 64, 65, 66, 67, 68, 69);
  if constexpr (sums == 64 && !half) W4Q_WGMMA("bf16", 128, 64, 64, 65, 66, 67, 68, 69);
  if constexpr (sums == 128 && half) W4Q_WGMMA("f16", 256, 128, 128, 129, 130, 131, 132, 133);
  if constexpr (sums == 128 && !half) W4Q_WGMMA("bf16", 256, 128, 128, 129, 130, 131, 132, 133);
}

#undef W4Q_AT_8
#undef W4Q_AT_16
#undef W4Q_AT_32
#undef W4Q_AT_64
#undef W4Q_AT_128
#undef W4Q_SUMS_8
#undef W4Q_SUMS_16
#undef W4Q_SUMS_32
#undef W4Q_SUMS_64
#undef W4Q_SUMS_128
#undef W4Q_WGMMA

}  // namespace w4q::kernels::wgmma
