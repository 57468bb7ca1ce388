#include "kernels/elementwise/narrow_cuda.h"

#include <cuda_bf16.h>

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "device/element_grid.h"

namespace w4q::kernels {
namespace {

using device::element_threads;

__device__ float value_of(float x) { return x; }
__device__ float value_of(__half x) { return __half2float(x); }
__device__ float value_of(__nv_bfloat16 x) { return __bfloat162float(x); }

/// Values that are loaded or stored as one.
template <class T, int count>
struct alignas(sizeof(T) * count) Piece {
  T values[count];
};

template <class T>
__device__ __half narrowed(T value, unsigned long long* stray, int64_t index) {
  const float wide = value_of(value);
  if (!(fabsf(wide) <= 65504.0f)) atomicMin(stray, static_cast<unsigned long long>(index));
  return __float2half_rn(wide);
}

template <int width, class T>
__global__ void __launch_bounds__(element_threads)
    narrow_kernel(const T* from, int64_t count, __half* to, unsigned long long* stray, int64_t first) {
  const int64_t step = int64_t{gridDim.x} * element_threads;
  const int64_t pieces = count / width;
  const int64_t thread = int64_t{blockIdx.x} * element_threads + threadIdx.x;
  for (int64_t i = thread; i < pieces; i += step) {
    const Piece<T, width> piece = reinterpret_cast<const Piece<T, width>*>(from)[i];
    Piece<__half, width> halves;
#pragma unroll
    for (int j = 0; j < width; ++j) halves.values[j] = narrowed(piece.values[j], stray, first + i * width + j);
    reinterpret_cast<Piece<__half, width>*>(to)[i] = halves;
  }
  for (int64_t i = pieces * width + thread; i < count; i += step) to[i] = narrowed(from[i], stray, first + i);
}

template <class T>
void launch(const void* from, int64_t count, __half* to, unsigned long long* stray, int64_t first,
            const device::Stream& stream) {
  constexpr int64_t most_blocks = 1 << 16;
  constexpr int width = 16 / sizeof(T);
  const auto blocks = static_cast<unsigned>(std::min(count / width / element_threads + 1, most_blocks));
  const auto* const values = static_cast<const T*>(from);
  // Rows below others of an odd number begin where they like.
  const bool aligned = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  if (aligned) {
    narrow_kernel<width><<<blocks, element_threads, 0, stream.get()>>>(values, count, to, stray, first);
  } else {
    narrow_kernel<1><<<blocks, element_threads, 0, stream.get()>>>(values, count, to, stray, first);
  }
  device::check_launch("narrow", concat(count, " values"));
}

}  // namespace

void narrow_cuda(const void* from, DType type, int64_t count, __half* to, unsigned long long* stray, int64_t first,
                 const device::Stream& stream) {
  switch (type) {
    case DType::f32:
      return launch<float>(from, count, to, stray, first, stream);
    case DType::f16:
      return launch<__half>(from, count, to, stray, first, stream);
    case DType::bf16:
      return launch<__nv_bfloat16>(from, count, to, stray, first, stream);
    default:
      throw Error(ErrorCode::internal, concat("narrow: values of ", dtype_name(type)));
  }
}

}  // namespace w4q::kernels
