#include "decoder_cuda/dense.h"

#include <algorithm>

#include "core/convert.h"
#include "core/error.h"
#include "core/text.h"
#include "kernels/elementwise/narrow_cuda.h"

namespace w4q::decoder_cuda {
namespace {

/// Of fp32, which stands in scratch before it is narrowed.
constexpr size_t piece_bytes = size_t{32} << 20;

void refuse_stray(const kernels::LinearWeight& weight, size_t index) {
  const TensorView& view = std::get<kernels::LinearWeight::Dense>(weight.matrix).view;
  const auto width = static_cast<size_t>(dtype_bits(view.dtype) / 8);
  float value = 0;
  widen(view.bytes.subspan(index * width, width), view.dtype, {&value, 1});
  refuse_weight(weight, value);
}

}  // namespace

void refuse_weight(const kernels::LinearWeight& weight, float value) {
  throw Error(ErrorCode::unsupported, concat(weight.name, ": a weight of ", value, " does not fit f16"))
      .hint("--device cpu computes in fp32");
}

void upload_dense(const kernels::LinearWeight& weight, std::byte* to, UploadRing& ring) {
  const TensorView& view = std::get<kernels::LinearWeight::Dense>(weight.matrix).view;
  auto* const stray = ring.watch([&weight](unsigned long long index) { refuse_stray(weight, index); });
  const auto narrow = [&](const std::byte* from, size_t bytes, int64_t first) {
    const auto count = static_cast<int64_t>(bytes) * 8 / dtype_bits(view.dtype);
    kernels::narrow_cuda(from, view.dtype, count, reinterpret_cast<__half*>(to) + first, stray, first, ring.stream());
  };
  if (dtype_bits(view.dtype) == 16) {
    ring.copy(to, view.bytes);
    return narrow(to, view.bytes.size(), 0);
  }
  for (size_t begin = 0; begin < view.bytes.size(); begin += piece_bytes) {
    const auto piece = view.bytes.subspan(begin, std::min(piece_bytes, view.bytes.size() - begin));
    std::byte* const scratch = ring.scratch(std::min(piece_bytes, view.bytes.size()));
    ring.copy(scratch, piece);
    narrow(scratch, piece.size(), static_cast<int64_t>(begin / sizeof(float)));
  }
}

}  // namespace w4q::decoder_cuda
