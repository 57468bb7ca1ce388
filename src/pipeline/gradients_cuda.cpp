#include "pipeline/gradients_cuda.h"

#include <optional>
#include <utility>

#include "decoder_cuda/layer_gradient.h"
#include "quantize/statistics_cuda.h"

namespace w4q::pipeline {

bool GradientsCuda::takes(const model::ModelConfig& config) { return decoder_cuda::CudaLayerGradient::takes(config); }

struct GradientsCuda::Impl {
  Impl(std::shared_ptr<quantize::CudaWork> work_, const model::ModelConfig& config_, int64_t length_)
      : work(std::move(work_)),
        config(config_),
        length(length_),
        bytes(static_cast<size_t>(length * config.hidden_size) * sizeof(float)),
        walk(config, length, work->stream),
        hidden(work->context, bytes),
        gradients(work->context, bytes) {}

  void put(MatrixView<const float> rows, device::DeviceBuffer& to) const {
    to.upload(std::as_bytes(std::span(rows.data, bytes / sizeof(float))), work->stream);
  }
  void fetch(const device::DeviceBuffer& from, MatrixView<float> rows) const {
    from.download(std::as_writable_bytes(std::span(rows.data, bytes / sizeof(float))), work->stream);
    work->stream.synchronize();
  }

  const std::shared_ptr<quantize::CudaWork> work;
  const model::ModelConfig& config;
  const int64_t length;
  const size_t bytes;
  decoder_cuda::CudaLayerGradient walk;
  device::DeviceBuffer hidden, gradients;
  decoder_cuda::DecodedLayer layer;
  std::vector<quantize::StatisticsCuda> sums;  ///< of the layer's linears; made when they are first added to
  std::optional<decoder_cuda::CudaLossGradient> head;
};

GradientsCuda::GradientsCuda(std::shared_ptr<quantize::CudaWork> work, const model::ModelConfig& config, int64_t length)
    : impl_(std::make_unique<Impl>(std::move(work), config, length)) {}
GradientsCuda::~GradientsCuda() { impl_->work->release(); }

void GradientsCuda::load(const model::LayerWeights& weights) {
  impl_->sums.clear();
  impl_->layer = {};  // before the next one comes
  impl_->layer = decoder_cuda::decode_layer(weights, decoder_cuda::Decoded::f32, impl_->length, impl_->work->stream);
}

void GradientsCuda::forward(MatrixView<float> x) {
  impl_->put(x, impl_->hidden);
  impl_->walk.forward(impl_->layer, impl_->hidden.as<float>());
  impl_->fetch(impl_->hidden, x);
}

void GradientsCuda::load_head(std::span<const float> final_norm, const kernels::LinearWeight& head) {
  impl_->layer = {};
  impl_->head.emplace(impl_->config, final_norm, head, impl_->length, impl_->work->stream);
}

double GradientsCuda::loss(std::span<const int32_t> ids, MatrixView<float> x) {
  impl_->put(x, impl_->gradients);
  const double sum = impl_->head->run(ids, impl_->gradients.as<float>());
  impl_->fetch(impl_->gradients, x);
  return sum;
}

void GradientsCuda::back(MatrixView<const float> x, MatrixView<float> gradient) {
  Impl& impl = *impl_;
  impl.head.reset();
  if (impl.sums.empty()) {
    for (const auto& linear : impl.layer.plan.linears()) impl.sums.emplace_back(*impl.work, linear.n, true);
  }
  impl.put(x, impl.hidden);
  impl.put(gradient, impl.gradients);
  const auto see = [&](const model::PlannedLinear& linear, const float*, const float* by, int64_t rows) {
    impl.sums[linear.position].add_rows(by, rows);
  };
  impl.walk.run(impl.layer, impl.hidden.as<float>(), impl.gradients.as<float>(), see, {});
  impl.fetch(impl.gradients, gradient);
}

void GradientsCuda::take_costs(std::span<float> to) {
  for (const auto& linear : impl_->layer.plan.linears()) {
    const auto count = static_cast<size_t>(quantize::triangle_size(linear.n));
    impl_->sums[linear.position].mean_triangle(to.first(count), linear.name);
    to = to.subspan(count);
  }
  impl_->sums.clear();
}

}  // namespace w4q::pipeline
