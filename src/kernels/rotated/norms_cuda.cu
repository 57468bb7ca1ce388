#include "kernels/rotated/norms_cuda.h"

#include <cuda_fp16.h>

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "device/element_grid.h"
#include "formats/e4m4.h"
#include "repack/layout_rotated_fragment.h"

namespace w4q::kernels {
namespace {

using formats::ScaleType;

using device::element_threads;

__device__ float value_of(uint8_t code) { return formats::e4m4_decode(code); }
__device__ float value_of(__half value) { return __half2float(value); }
__device__ float value_of(float value) { return value; }

__device__ int64_t place_of(NormOrder order, int64_t row, int64_t group, int64_t groups) {
  if (order == NormOrder::canonical) return row * groups + group;
  if (order == NormOrder::rotated_fragment) return repack::norm_place(row, group, groups);
  return repack::KbitFragmentMap(row + 1, 32 * groups).scale(row, 32 * group);
}

template <class T>
__global__ void __launch_bounds__(element_threads)
    norms_kernel(const T* scales, NormOrder order, int64_t n, int64_t groups, int exponent, __half* norms) {
  const int64_t rows = (n + 63) / 64 * 64;
  const int64_t step = int64_t{gridDim.x} * element_threads;
  for (int64_t i = int64_t{blockIdx.x} * element_threads + threadIdx.x; i < rows * groups; i += step) {
    // 64 neighbours write 64 norms that stand together.
    const int64_t row = i / (64 * groups) * 64 + i % 64, group = i / 64 % groups;
    const float scale = row < n ? value_of(scales[place_of(order, row, group, groups)]) : 0.0f;
    norms[repack::norm_place(row, group, groups)] = __float2half_rn(ldexpf(scale, exponent));
  }
}

template <class T>
void launch(const NormSource& s, uint16_t* norms, const device::Stream& stream) {
  constexpr int64_t most_blocks = 1 << 16;
  const int64_t count = repack::norm_count(s.n, s.groups);
  const auto blocks = static_cast<unsigned>(std::min((count + element_threads - 1) / element_threads, most_blocks));
  norms_kernel<<<blocks, element_threads, 0, stream.get()>>>(static_cast<const T*>(s.scales), s.order, s.n, s.groups,
                                                             s.exponent, reinterpret_cast<__half*>(norms));
  device::check_launch("norms", concat(s.n, " × ", s.groups));
}

}  // namespace

void norms_cuda(const NormSource& source, uint16_t* norms, const device::Stream& stream) {
  switch (source.type) {
    case ScaleType::e4m4:
      return launch<uint8_t>(source, norms, stream);
    case ScaleType::f16:
      return launch<__half>(source, norms, stream);
    case ScaleType::f32:
      return launch<float>(source, norms, stream);
    default:
      throw Error(ErrorCode::internal, "norms: scales of a type that rotated weights do not have");
  }
}

}  // namespace w4q::kernels
