#include <algorithm>

#include "core/text.h"
#include "device/buffer.h"
#include "device/check.h"
#include "device/element_grid.h"
#include "device/stream.h"
#include "quantize/integer_rows.cuh"
#include "quantize/rtn_cuda.h"
#include "quantize/source_matrix.h"

namespace w4q::quantize {
namespace {

using cuda::group_lanes;
using cuda::IntegerOut;
using cuda::Rule;

using device::element_threads;
constexpr int64_t strip_bytes = int64_t{32} << 20;  ///< of weights in GPU memory at a time

/// Rows of a strip; half a warp has a group.
struct Strip {
  int64_t rows, k, groups, group, first_row;
};

template <class T>
__global__ void __launch_bounds__(element_threads)
    encode_kernel(Rule rule, Strip strip, IntegerOut out, const T* weights) {
  const int64_t index = (static_cast<int64_t>(blockIdx.x) * element_threads + threadIdx.x) / group_lanes;
  if (index >= strip.rows * strip.groups) return;
  const int64_t row = index / strip.groups;
  const int64_t first = index % strip.groups * strip.group;
  const cuda::Group group(cuda::Stored<T>{weights + row * strip.k + first}, min(strip.group, strip.k - first));
  float low, high;
  if (!group.range(low, high)) {
    if (group.lane == 0) atomicMin(&out.counters->bad_row, static_cast<unsigned long long>(strip.first_row + row));
    return;
  }
  const cuda::Scale scale = group.choose(rule, low, high);
  for (int64_t i = group.lane; i < group.count; i += group_lanes) {
    const float steps = cuda::steps_of(group.values(i), scale, rule.bits);
    out.codes[row * strip.k + first + i] = static_cast<uint8_t>(static_cast<int>(steps) + scale.zero);
  }
  if (group.lane == 0) out.store(rule, index, scale, low, high);
}

void launch_encode(const Rule& rule, const Strip& strip, const IntegerOut& out, DType dtype, const void* values,
                   const device::Stream& stream) {
  const auto grid =
      static_cast<unsigned>((strip.rows * strip.groups * group_lanes + element_threads - 1) / element_threads);
  if (dtype == DType::f32) {
    encode_kernel<<<grid, element_threads, 0, stream.get()>>>(rule, strip, out, static_cast<const float*>(values));
  } else if (dtype == DType::f16) {
    encode_kernel<<<grid, element_threads, 0, stream.get()>>>(rule, strip, out, static_cast<const __half*>(values));
  } else {
    encode_kernel<<<grid, element_threads, 0, stream.get()>>>(rule, strip, out,
                                                              static_cast<const __nv_bfloat16*>(values));
  }
  device::check_launch("rtn", concat(strip.rows, " × ", strip.k));
}

}  // namespace

QuantizeStats rtn_encode_cuda(const TensorView& weight, Clip clip, formats::PackedWeight& packed,
                              device::Context& gpu) {
  const int64_t k = packed.k;
  const int64_t bytes = k * dtype_bits(weight.dtype) / 8;
  const int64_t groups = formats::integer_groups(packed.scheme, k);
  const int64_t most = std::clamp<int64_t>(strip_bytes / bytes, 1, packed.n);
  const Rule rule = cuda::rule_of(packed.scheme, clip);
  const device::Stream stream(gpu);
  device::DeviceBuffer values(gpu, static_cast<size_t>(most * bytes));
  cuda::IntegerRows encoded(packed, most, stream);
  for (int64_t first = 0; first < packed.n; first += most) {
    const int64_t rows = std::min(most, packed.n - first);
    values.upload(weight.bytes.subspan(static_cast<size_t>(first * bytes), static_cast<size_t>(rows * bytes)), stream);
    const Strip strip{rows, k, groups, formats::integer_group_size(packed.scheme, k), first};
    launch_encode(rule, strip, encoded.out(), weight.dtype, values.data(), stream);
    encoded.take(first, rows, packed);
  }
  const cuda::IntegerCounters seen = encoded.counted();
  if (seen.bad_row != ~0ull) {
    const auto row = static_cast<int64_t>(seen.bad_row);
    refuse_non_finite(weight.name, weight.dtype, row_bytes(weight, row), row);
  }
  return cuda::IntegerRows::stats(seen, packed.n * groups);
}

}  // namespace w4q::quantize
