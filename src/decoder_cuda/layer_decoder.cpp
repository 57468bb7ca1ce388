#include "decoder_cuda/layer_decoder.h"

#include <algorithm>

#include "core/error.h"
#include "decoder_cuda/attention.h"
#include "model/parameters.h"

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
                                   const device::Stream& stream, int64_t all)
    : config_(config),
      length_(length),
      most_windows_(windows),
      stream_(stream),
      cache_(different_shapes(config), pages_for(length), stream),
      ropes_(config, length, stream) {
  ensure(length >= 2 && windows >= 1, "CudaLayerDecoder: windows of at least two tokens");
  cache_.grow(length);
  ropes_.set_call(0, length, stream);
  for (int64_t layer = 0; all > 0 && layer < config.layers; ++layer) {
    const auto from = config.attention_of(layer).keys_of;
    if (from && !kept_.contains(*from)) kept_.emplace(*from, keep_keys(*from, all));
  }
}

kernels::PagedLayer CudaLayerDecoder::scratch_keys(const model::AttentionConfig& attention) {
  for (size_t i = 0; i < cache_.shapes().size(); ++i) {
    const KeyShape& shape = cache_.shapes()[i];
    if (shape.kv_heads == attention.kv_heads && shape.head_dim == attention.head_dim) return cache_.layer(i);
  }
  ensure(false, "CudaLayerDecoder: keys of another shape");
  return {};
}

CudaLayerDecoder::Kept CudaLayerDecoder::keep_keys(int64_t layer, int64_t windows) {
  Kept result;
  result.layer = scratch_keys(config_.attention_of(layer));
  const int dim = kernels::kv_padded_dim(result.layer.head_dim);
  const int64_t heads = cache_.pages() * result.layer.kv_heads;
  result.key_bytes = heads * kernels::kv_head_page_bytes(result.layer.type, dim);
  result.value_bytes = heads * kernels::kv_value_page_bytes(result.layer.type, dim);
  result.keys = device::DeviceBuffer(stream_.context(), static_cast<size_t>(windows * result.key_bytes));
  result.values = device::DeviceBuffer(stream_.context(), static_cast<size_t>(windows * result.value_bytes));
  result.layer.keys = result.keys.data();
  result.layer.values = result.values.data();
  return result;
}

kernels::PagedLayer CudaLayerDecoder::Kept::of(int64_t window) const {
  kernels::PagedLayer result = layer;
  result.keys += window * key_bytes;
  result.values += window * value_bytes;
  return result;
}

void CudaLayerDecoder::load(const model::LayerWeights& weights) {
  release();
  weights_ = upload_layer(weights, stream_);
  const int64_t rows = most_windows_ * length_;
  const std::span<const CudaLayer> layers(&weights_, 1);
  runner_.emplace(config_, layers, linears_of(layers), LayerRunnerOptions{.rows = rows, .product_rows = rows}, stream_);
}

void CudaLayerDecoder::release() {
  stream_.synchronize();
  runner_.reset();
  weights_ = CudaLayer();
}

void CudaLayerDecoder::attend(const CudaBlock& block, const CudaWindows& windows) {
  if (block.plan.kind == model::BlockKind::delta_net) return recall(block, windows.count);
  const model::AttentionConfig& attention = block.plan.attention;
  const int64_t number = model::layer_numbers(block.plan.groups.front().name()).layer;
  const auto kept = kept_.find(attention.keys_of.value_or(number));
  ensure(!attention.keys_of || kept != kept_.end(), "CudaLayerDecoder: keys of another layer");
  SequenceRows rows{.count = length_, .products = split_gates(*runner_, block)};
  for (int64_t i = 0; i < windows.count; ++i, rows.row += length_) {
    const auto layer = kept != kept_.end() ? kept->second.of(windows.first + i) : scratch_keys(attention);
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

void CudaLayerDecoder::run(float* x, const CudaWindows& windows, const CudaObserver& observer) {
  run_blocks(x, windows, 0, blocks(), observer);
}

void CudaLayerDecoder::run_blocks(float* x, const CudaWindows& windows, size_t first, size_t end,
                                  const CudaObserver& observer) {
  ensure(runner_ && windows.count >= 1 && windows.count <= most_windows_,
         "CudaLayerDecoder: no weights, or too many windows");
  runner_->begin(x, windows.count * length_);
  runner_->layer_embeddings = windows.layer_embeddings;
  runner_->of_present_layer = true;
  const auto attend_block = [&](const CudaBlock& block) { attend(block, windows); };
  // An observer sees complete inputs: nothing is left to the block behind.
  for (size_t block = first; block < end; ++block)
    runner_->run_block(weights_.blocks[block], attend_block, &observer, {});
}

}  // namespace w4q::decoder_cuda
