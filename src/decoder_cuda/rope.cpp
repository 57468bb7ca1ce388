#include "decoder_cuda/rope.h"

#include <vector>

namespace w4q::decoder_cuda {
namespace {

/// Fills both tables and copies them.
void upload(const model::RopeTable& table, int64_t first, int64_t rows, bool each_by_itself,
            device::DeviceBuffer& cosine, device::DeviceBuffer& sine, const device::Stream& stream) {
  const int64_t pairs = table.pairs();
  std::vector<float> cosines(static_cast<size_t>(rows * pairs)), sines(cosines.size());
  const MatrixView<float> c(cosines.data(), rows, pairs), s(sines.data(), rows, pairs);
  if (each_by_itself) {
    for (int64_t r = 0; r < rows; ++r) table.fill(first + r, {c.row(r), 1, pairs}, {s.row(r), 1, pairs});
  } else {
    table.fill(first, c, s);
  }
  stream.synchronize();
  if (cosine.size() < cosines.size() * sizeof(float)) {
    cosine = device::DeviceBuffer(stream.context(), cosines.size() * sizeof(float));
    sine = device::DeviceBuffer(stream.context(), cosines.size() * sizeof(float));
  }
  cosine.upload(bytes_of(cosines), stream);
  sine.upload(bytes_of(sines), stream);
  stream.synchronize();
}

}  // namespace

CudaRope::CudaRope(const model::ModelConfig& config, int64_t capacity, const device::Stream& stream)
    : table_(config.rope, config.head_dim), dynamic_(config.rope.type == model::RopeType::dynamic) {
  upload(table_, 0, capacity, dynamic_, cosine_, sine_, stream);
}

void CudaRope::set_call(int64_t first, int64_t rows, const device::Stream& stream) {
  call_first_ = first;
  if (dynamic_) upload(table_, first, rows, false, call_cosine_, call_sine_, stream);
}

kernels::HeadRotation CudaRope::rotation(int64_t position) const noexcept {
  const int64_t row = dynamic_ ? position - call_first_ : position;
  const auto& cosine = dynamic_ ? call_cosine_ : cosine_;
  const auto& sine = dynamic_ ? call_sine_ : sine_;
  kernels::HeadRotation result;
  result.pairs = static_cast<int>(table_.pairs());
  result.cosine = cosine.as<float>() + row * result.pairs;
  result.sine = sine.as<float>() + row * result.pairs;
  return result;
}

kernels::HeadRotation CudaRope::steps() const noexcept {
  kernels::HeadRotation result;
  result.pairs = static_cast<int>(table_.pairs());
  result.cosine = cosine_.as<float>();
  result.sine = sine_.as<float>();
  return result;
}

}  // namespace w4q::decoder_cuda
