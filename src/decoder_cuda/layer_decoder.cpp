#include "decoder_cuda/layer_decoder.h"

#include <array>

#include "core/error.h"
#include "kernels/elementwise/elementwise_cuda.h"

namespace w4q::decoder_cuda {
namespace {

using device::DeviceBuffer;

model::ModelConfig with_one_layer(model::ModelConfig config) {
  config.layers = 1;
  return config;
}

int64_t pages_for(int64_t length) { return (length + kernels::kv_page_tokens - 1) / kernels::kv_page_tokens; }

template <class T>
void make_room(const device::Context& gpu, DeviceBuffer& buffer, int64_t rows, int64_t cols) {
  const auto bytes = static_cast<size_t>(rows * cols) * sizeof(T);
  if (buffer.size() < bytes) buffer = DeviceBuffer(gpu, bytes);
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

void CudaLayerDecoder::load(const model::LayerWeights& weights, int64_t layer) {
  release();
  layer_ = layer;
  weights_ = upload_layer(weights, stream_);
  const int64_t rows = most_windows_ * length_;
  const std::array<const CudaLinear*, 4> linears = {&weights_.qkv, &weights_.o, &weights_.gate_up, &weights_.down};
  multiplier_.emplace(linears, rows, stream_);
  multiplier_->set_overlap(false);
  make_room<__half>(stream_.context(), normed_, rows, config_.hidden_size);
  make_room<float>(stream_.context(), qkv_, rows, weights_.qkv.n);
  make_room<__half>(stream_.context(), attended_, rows, config_.heads * config_.head_dim);
  make_room<__half>(stream_.context(), gate_up_, rows, weights_.gate_up.n);
  make_room<__half>(stream_.context(), gated_, rows, config_.intermediate_size);
}

void CudaLayerDecoder::release() {
  stream_.synchronize();
  multiplier_.reset();
  weights_ = CudaLayer();
  for (DeviceBuffer* buffer : {&normed_, &qkv_, &attended_, &gate_up_, &gated_}) *buffer = DeviceBuffer();
}

void CudaLayerDecoder::observe(const CudaLinear& linear, const DeviceBuffer& input, int64_t rows,
                               const CudaObserver& observer) const {
  if (!observer.linear_input) return;
  observer.linear_input(linear.names, {input.data(), DType::f16, rows, linear.k, &stream_});
}

void CudaLayerDecoder::normalize(const DeviceBuffer& weight, float* x, int64_t rows) {
  kernels::NormArgs args;
  args.x = x;
  args.weight = weight.as<float>();
  args.eps = static_cast<float>(config_.rms_norm_eps);
  args.rows = rows;
  args.cols = config_.hidden_size;
  args.out = normed_.as<__half>();
  kernels::rms_norm_cuda(args, stream_.get());
}

void CudaLayerDecoder::attend(int64_t windows) {
  kernels::HeadRotation rotation = rope_.rotation(0);
  rotation.eps = static_cast<float>(config_.rms_norm_eps);
  if (config_.qk_norm) {
    rotation.q_norm = weights_.q_norm.as<float>();
    rotation.k_norm = weights_.k_norm.as<float>();
  }
  kernels::PrefillAttentionArgs args;
  args.layer = cache_.layer(0);
  args.window = config_.sliding_window[static_cast<size_t>(layer_)];
  args.qkv = {nullptr, length_, weights_.qkv.n, static_cast<int>(config_.heads)};
  for (int64_t first = 0; first < windows * length_; first += length_) {
    args.qkv.data = qkv_.as<float>() + first * args.qkv.stride;
    args.out = attended_.as<__half>() + first * config_.heads * config_.head_dim;
    kernels::rotate_and_store_cuda(args.qkv, args.layer, rotation, 0, stream_.get());
    kernels::prefill_attention_cuda(args, stream_.get());
  }
}

void CudaLayerDecoder::run(float* x, int64_t windows, const CudaObserver& observer) {
  ensure(multiplier_ && windows >= 1 && windows <= most_windows_, "CudaLayerDecoder: no weights, or too many windows");
  const int64_t rows = windows * length_;
  normalize(weights_.input_norm, x, rows);
  observe(weights_.qkv, normed_, rows, observer);
  multiplier_->multiply(weights_.qkv, normed_.as<__half>(), rows, qkv_.as<float>());
  attend(windows);
  observe(weights_.o, attended_, rows, observer);
  multiplier_->multiply_residual(weights_.o, attended_.as<__half>(), rows, x);
  normalize(weights_.post_attention_norm, x, rows);
  observe(weights_.gate_up, normed_, rows, observer);
  multiplier_->multiply_gated(weights_.gate_up, normed_.as<__half>(), rows, gate_up_.as<__half>(), gated_.as<__half>());
  observe(weights_.down, gated_, rows, observer);
  multiplier_->multiply_residual(weights_.down, gated_.as<__half>(), rows, x);
}

}  // namespace w4q::decoder_cuda
