#include "pipeline/gradients_cuda.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "decoder_cuda/layer_gradient.h"
#include "decoder_cuda/ring.h"
#include "device/copy.h"
#include "device/fetch.h"
#include "quantize/statistics_cuda.h"

namespace w4q::pipeline {

bool GradientsCuda::takes(const model::ModelConfig& config) { return decoder_cuda::CudaLayerGradient::takes(config); }

namespace {

/// Rows of gradients that are multiplied together: a product of few of them is all writing.
constexpr int64_t summed_rows = 2048;
/// A head's logits, what two blocks keep, attention's scores.
constexpr int64_t rest = int64_t{3} << 30;

/// What a layer takes while it is gone back through, without the windows.
int64_t layer_memory(const model::ModelConfig& config) {
  int64_t most = 0, widest = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    int64_t bytes = 0;
    for (const auto& linear : model::layer_plan(config, layer).linears()) {
      widest = std::max(widest, linear.n);
      bytes += 4 * linear.n * linear.k + 8 * quantize::triangle_size(linear.n) + 4 * summed_rows * linear.n;
    }
    most = std::max(most, bytes);
  }
  return most + 4 * widest * widest + 4 * config.vocab_size * config.hidden_size + rest;
}

}  // namespace

struct GradientsCuda::Impl {
  /// Gradients by a linear's outputs, as many as are summed at once.
  class Sums {
   public:
    Sums(quantize::CudaWork& work, int64_t n, int64_t length)
        : work_(work),
          n_(n),
          most_(std::max(summed_rows, length)),
          sums_(work, n, true),
          rows_(work.context, static_cast<size_t>(most_ * n) * sizeof(float)) {}

    void add(const float* by, int64_t rows) {
      if (waiting_ + rows > most_) flush();
      device::copy(device::Way::on_gpu, rows_.as<float>() + waiting_ * n_, by,
                   static_cast<size_t>(rows * n_) * sizeof(float), work_.stream, "copying gradients");
      waiting_ += rows;
    }
    const float* means(std::string_view name) {
      flush();
      return sums_.mean_triangle(name);
    }

   private:
    void flush() {
      if (waiting_ > 0) sums_.add_rows(rows_.as<float>(), waiting_);
      waiting_ = 0;
    }

    quantize::CudaWork& work_;
    int64_t n_, most_, waiting_ = 0;
    quantize::StatisticsCuda sums_;
    device::DeviceBuffer rows_;
  };

  Impl(std::shared_ptr<quantize::CudaWork> work_, const model::ModelConfig& config_, int64_t samples, int64_t length_)
      : work(std::move(work_)),
        config(config_),
        length(length_),
        values(length * config.hidden_size),
        bytes(static_cast<size_t>(values) * sizeof(float)),
        walk(config, length, work->stream),
        ring(work->stream),
        passing(work->context, bytes),
        input(work->context, bytes),
        fetched(work->stream),
        kept(std::clamp<int64_t>((work->context.budget_bytes() - layer_memory(config)) / static_cast<int64_t>(bytes), 0,
                                 samples)),
        states(work->context, static_cast<size_t>(kept) * bytes) {}

  std::span<const std::byte> bytes_of(MatrixView<const float> rows) const {
    return std::as_bytes(std::span(rows.data, static_cast<size_t>(values)));
  }
  void put(MatrixView<const float> rows, device::DeviceBuffer& to) { ring.copy(to.data(), bytes_of(rows)); }
  void fetch(const float* from, MatrixView<float> rows) {
    fetched(from, std::as_writable_bytes(std::span(rows.data, static_cast<size_t>(values))));
  }
  /// What stays of a window, or x.
  float* state(int64_t window, MatrixView<const float> x) {
    if (window < kept) return states.as<float>() + window * values;
    put(x, passing);
    return passing.as<float>();
  }

  const std::shared_ptr<quantize::CudaWork> work;
  const model::ModelConfig& config;
  const int64_t length, values;
  const size_t bytes;
  decoder_cuda::CudaLayerGradient walk;
  decoder_cuda::UploadRing ring;
  device::DeviceBuffer passing, input;
  device::Fetch fetched;
  const int64_t kept;
  device::DeviceBuffer states;
  const float* last = nullptr;  ///< what forward() made
  decoder_cuda::DecodedLayer layer;
  std::vector<Sums> sums;  ///< of the layer's linears; made when they are first added to
  std::optional<decoder_cuda::CudaLossGradient> head;
};

GradientsCuda::GradientsCuda(std::shared_ptr<quantize::CudaWork> work, const model::ModelConfig& config,
                             int64_t samples, int64_t length)
    : impl_(std::make_unique<Impl>(std::move(work), config, samples, length)) {}
GradientsCuda::~GradientsCuda() { impl_->work->release(); }

bool GradientsCuda::keeps(int64_t window) const { return window < impl_->kept; }

void GradientsCuda::put(int64_t window, MatrixView<const float> x) {
  auto* const to = reinterpret_cast<std::byte*>(impl_->states.as<float>() + window * impl_->values);
  impl_->ring.copy(to, impl_->bytes_of(x));
}

void GradientsCuda::load(const model::LayerWeights& weights) {
  impl_->sums.clear();
  impl_->layer = {};  // before the next one comes
  impl_->layer = decoder_cuda::decode_layer(weights, decoder_cuda::Decoded::f32, impl_->length, impl_->ring);
}

void GradientsCuda::forward(int64_t window, MatrixView<const float> x) {
  float* const state = impl_->state(window, x);
  impl_->walk.forward(impl_->layer, state);
  impl_->last = state;
}

void GradientsCuda::fetch(MatrixView<float> to) { impl_->fetch(impl_->last, to); }

void GradientsCuda::load_head(std::span<const float> final_norm, const kernels::LinearWeight& head) {
  impl_->layer = {};
  impl_->head.emplace(impl_->config, final_norm, head, impl_->length, impl_->ring);
}

double GradientsCuda::loss(int64_t window, std::span<const int32_t> ids, MatrixView<float> x) {
  float* const state = impl_->state(window, x);
  const double sum = impl_->head->run(ids, state);
  if (!keeps(window)) impl_->fetch(state, x);
  return sum;
}

void GradientsCuda::back(int64_t window, MatrixView<const float> x, MatrixView<float> gradient) {
  Impl& impl = *impl_;
  impl.head.reset();
  if (impl.sums.empty()) {
    for (const auto& linear : impl.layer.plan.linears()) impl.sums.emplace_back(*impl.work, linear.n, impl.length);
  }
  impl.put(x, impl.input);
  float* const state = impl.state(window, gradient);
  const auto see = [&](const model::PlannedLinear& linear, const float*, const float* by, int64_t rows) {
    impl.sums[linear.position].add(by, rows);
  };
  impl.walk.run(impl.layer, impl.input.as<float>(), state, see, {});
  if (!keeps(window)) impl.fetch(state, gradient);
}

void GradientsCuda::take_costs(std::span<float> to) {
  for (const auto& linear : impl_->layer.plan.linears()) {
    const auto count = static_cast<size_t>(quantize::triangle_size(linear.n));
    impl_->fetched(impl_->sums[linear.position].means(linear.name), std::as_writable_bytes(to.first(count)));
    to = to.subspan(count);
  }
  impl_->sums.clear();
}

}  // namespace w4q::pipeline
