#include "decoder_cuda/layer_decoder.h"

#include <algorithm>

#include "core/error.h"
#include "decoder_cuda/attention.h"

namespace w4q::decoder_cuda {
namespace {

/// As many as layers differ in.
std::vector<KeyShape> different_shapes(const model::ModelConfig& config) {
  std::vector<KeyShape> result;
  for (const auto& shape : key_shapes(config, kernels::KvType::f16)) {
    if (shape.kv_heads > 0 && std::ranges::find(result, shape) == result.end()) result.push_back(shape);
  }
  return result;
}

}  // namespace

CudaLayerDecoder::CudaLayerDecoder(const model::ModelConfig& config, int64_t length, int64_t windows,
                                   const device::Stream& stream)
    : config_(config),
      length_(length),
      most_windows_(windows),
      stream_(stream),
      ring_(stream),
      cache_(different_shapes(config), pages_for(length), stream),
      ropes_(config, length, stream) {
  ensure(length >= 2 && windows >= 1, "CudaLayerDecoder: windows of at least two tokens");
  cache_.grow(length);
  ropes_.set_call(0, length, stream);
}

void CudaLayerDecoder::load(const model::LayerWeights& weights) {
  release();
  weights_ = upload_layer(weights, ring_);
  ring_.finish();
  const int64_t rows = most_windows_ * length_;
  const std::span<const CudaLayer> layers(&weights_, 1);
  runner_.emplace(config_, layers, linears_of(layers), LayerRunnerOptions{.rows = rows, .product_rows = rows}, stream_);
}

void CudaLayerDecoder::reload(const model::LayerWeights& weights, std::span<const std::string> linears) {
  const bool placed = replace_dense(weights_, weights, linears, ring_);
  ring_.finish();
  if (!placed) load(weights);
}

void CudaLayerDecoder::release() {
  stream_.synchronize();
  runner_.reset();
  weights_ = CudaLayer();
}

void CudaLayerDecoder::attend(const CudaBlock& block, int64_t windows) {
  if (block.plan.kind == model::BlockKind::delta_net) return recall(block, windows);
  const model::AttentionConfig& attention = block.plan.attention;
  ensure(!attention.keys_of, "CudaLayerDecoder: keys of another layer");
  const KeyShape shape{static_cast<int>(attention.kv_heads), static_cast<int>(attention.head_dim)};
  const auto found = std::ranges::find(cache_.shapes(), shape);
  const kernels::PagedLayer layer = cache_.layer(static_cast<size_t>(found - cache_.shapes().begin()));
  SequenceRows rows{.count = length_, .products = split_gates(*runner_, block)};
  for (; rows.row < windows * length_; rows.row += length_) {
    attend_rows(*runner_, block, rows, ropes_.rotation(attention, 0), layer, {});
  }
  apply_gates(*runner_, block);
}

void CudaLayerDecoder::recall(const CudaBlock& block, int64_t windows) {
  const kernels::DeltaShape& shape = block.plan.delta;
  const auto floats = static_cast<size_t>(shape.history_size() + shape.state_size());
  if (delta_.size() < floats * sizeof(float)) {
    delta_ = device::DeviceBuffer(stream_.context(), floats * sizeof(float));
  }
  const kernels::DeltaMemory memory{delta_.as<float>(), delta_.as<float>() + shape.history_size()};
  for (int64_t window = 0; window < windows; ++window) {
    run_delta_net(*runner_, block, memory, true, window * length_, length_);
  }
}

void CudaLayerDecoder::run(float* x, int64_t windows, const CudaObserver& observer) {
  run_blocks(x, windows, 0, blocks(), observer);
}

void CudaLayerDecoder::run_blocks(float* x, int64_t windows, size_t first, size_t end, const CudaObserver& observer) {
  ensure(runner_ && windows >= 1 && windows <= most_windows_, "CudaLayerDecoder: no weights, or too many windows");
  runner_->begin(x, windows * length_);
  const auto attend_block = [&](const CudaBlock& block) { attend(block, windows); };
  // An observer sees complete inputs: nothing is left to the block behind.
  for (size_t block = first; block < end; ++block)
    runner_->run_block(weights_.blocks[block], attend_block, &observer, {});
}

}  // namespace w4q::decoder_cuda
