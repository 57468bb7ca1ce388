#include "decoder_cuda/layer_decoder.h"

#include "core/error.h"

namespace w4q::decoder_cuda {
namespace {

model::ModelConfig with_one_layer(model::ModelConfig config) {
  config.layers = 1;
  return config;
}

}  // namespace

CudaLayerDecoder::CudaLayerDecoder(const model::ModelConfig& config, int64_t length, int64_t windows,
                                   const device::Stream& stream)
    : config_(config),
      one_layer_(with_one_layer(config)),
      length_(length),
      most_windows_(windows),
      stream_(stream),
      cache_(one_layer_, kernels::KvType::f16, pages_for(length), stream),
      rope_(config, length, stream) {
  ensure(length >= 2 && windows >= 1, "CudaLayerDecoder: windows of at least two tokens");
  cache_.grow(length);
  rope_.set_call(0, length, stream);
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

void CudaLayerDecoder::attend(const CudaBlock& block, int64_t windows) {
  if (block.plan.kind == model::BlockKind::delta_net) return recall(block, windows);
  const kernels::HeadRotation rotation = with_norms(rope_.rotation(0), block, config_);
  const int64_t width = (config_.heads + 2 * config_.kv_heads) * config_.head_dim;
  Activations& activations = runner_->activations;
  float* const qkv = split_gates(*runner_, block);
  kernels::PrefillAttentionArgs args;
  args.layer = cache_.layer(0);
  args.window = block.plan.attention.window;
  args.qkv = {nullptr, length_, width, static_cast<int>(config_.heads)};
  for (int64_t first = 0; first < windows * length_; first += length_) {
    args.qkv.data = qkv + first * args.qkv.stride;
    args.out = activations.attended.as<__half>() + first * config_.heads * config_.head_dim;
    kernels::rotate_and_store_cuda(args.qkv, args.layer, rotation, 0, stream_);
    kernels::prefill_attention_cuda(args, stream_);
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
  ensure(runner_ && windows >= 1 && windows <= most_windows_, "CudaLayerDecoder: no weights, or too many windows");
  runner_->begin(x, windows * length_);
  runner_->run(weights_, [&](const CudaBlock& block) { attend(block, windows); }, &observer, {});
}

}  // namespace w4q::decoder_cuda
