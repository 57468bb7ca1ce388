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

CudaRope::CudaRope(const model::RopeConfig& rope, int64_t head_dim, int64_t capacity, const device::Stream& stream)
    : rope_(rope),
      head_dim_(head_dim),
      table_(rope, head_dim),
      dynamic_(rope.type == model::RopeType::dynamic || rope.type == model::RopeType::longrope) {
  upload(table_, 0, capacity, dynamic_, cosine_, sine_, stream);
}

bool CudaRope::is_of(const model::AttentionConfig& attention) const noexcept {
  return attention.rope == rope_ && attention.head_dim == head_dim_;
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

CudaRopes::CudaRopes(const model::ModelConfig& config, int64_t capacity, const device::Stream& stream) {
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const model::AttentionConfig attention = config.attention_of(layer);
    if (config.has_delta_net(layer) || attention.rope.partial_rotary_factor == 0 || of(attention) != nullptr) continue;
    ropes_.emplace_back(attention.rope, attention.head_dim, capacity, stream);
  }
}

const CudaRope* CudaRopes::of(const model::AttentionConfig& attention) const noexcept {
  for (const auto& rope : ropes_) {
    if (rope.is_of(attention)) return &rope;
  }
  return nullptr;
}

void CudaRopes::set_call(int64_t first, int64_t rows, const device::Stream& stream) {
  for (auto& rope : ropes_) rope.set_call(first, rows, stream);
}

kernels::HeadRotation CudaRopes::rotation(const model::AttentionConfig& attention, int64_t position) const noexcept {
  const CudaRope* const rope = of(attention);
  return rope == nullptr ? kernels::HeadRotation{} : rope->rotation(position);
}

kernels::HeadRotation CudaRopes::steps(const model::AttentionConfig& attention) const noexcept {
  const CudaRope* const rope = of(attention);
  return rope == nullptr ? kernels::HeadRotation{} : rope->steps();
}

}  // namespace w4q::decoder_cuda
