#include "pipeline/distill_cuda.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "decoder_cuda/layer_gradient.h"
#include "device/copy.h"
#include "device/fetch.h"
#include "kernels/gradient/gradient_cuda.h"
#include "quantize/cuda_work.h"

namespace w4q::pipeline {

using decoder_cuda::Decoded;
using decoder_cuda::DecodedLayer;

namespace {

int64_t weights_of(const model::ModelConfig& config, int64_t layer) {
  int64_t sum = 0;
  for (const auto& linear : model::layer_plan(config, layer).linears()) sum += linear.n * linear.k;
  return sum;
}

/// What steps take beside layers and states that stay: a layer of the 16-bit model and one that is widened, in fp32,
/// one that passes, in f16, and activations.
int64_t steps_memory(const model::ModelConfig& config) {
  int64_t largest = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) largest = std::max(largest, weights_of(config, layer));
  return largest * (2 * int64_t{sizeof(float)} + int64_t{sizeof(uint16_t)}) + (int64_t{2} << 30);
}

}  // namespace

bool DistillCuda::takes(const model::ModelConfig& config) { return decoder_cuda::CudaLayerGradient::takes(config); }

struct DistillCuda::Impl {
  Impl(std::shared_ptr<quantize::CudaWork> work_, const model::ModelConfig& config_, int64_t length_, int64_t samples_,
       Layers source_)
      : work(std::move(work_)),
        config(config_),
        source(std::move(source_)),
        length(length_),
        samples(samples_),
        values(length * config.hidden_size),
        walk(config, length, work->stream),
        ring(work->stream),
        fetched(work->stream),
        states(work->context, static_cast<size_t>((config.layers + 1) * samples * values) * sizeof(float)),
        expected(work->context, static_cast<size_t>(values) * sizeof(float)) {}

  float* state(int64_t layer, size_t sequence) {
    return states.as<float>() + (layer * samples + static_cast<int64_t>(sequence)) * values;
  }
  void put(MatrixView<const float> rows, float* to) {
    ring.copy(reinterpret_cast<std::byte*>(to), std::as_bytes(std::span(rows.data, static_cast<size_t>(values))));
  }

  DecodedLayer decode(int64_t index) { return decoder_cuda::decode_layer(source(index), Decoded::f16, length, ring); }
  const DecodedLayer& layer(int64_t index) {
    if (index < std::ssize(layers)) return layers[static_cast<size_t>(index)];
    if (passing != index) {
      passing_layer = {};
      passing_layer = decode(index);
      passing = index;
    }
    return passing_layer;
  }

  /// Where a sequence as the 16-bit model sees it stays; null: nowhere.
  float* kept(int64_t sequence) { return sequence < keeps ? expected_states.as<float>() + sequence * values : nullptr; }
  const float* place(const Expected& wanted) {
    if (const float* const there = kept(wanted.sequence)) return there;
    put(wanted.rows, expected.as<float>());
    return expected.as<float>();
  }

  /// Adds what a norm has seen to its sums.
  void see(const model::PlannedNorm& norm, const float* x, const float* gradient, int64_t rows) {
    const auto bytes = static_cast<size_t>(norm.size) * sizeof(double);
    auto [found, first] = sums.try_emplace(norm.name, work->context, bytes);
    if (first) found->second.fill(0, work->stream);
    kernels::norm_weight_gradient_cuda({x, nullptr, static_cast<float>(config.rms_norm_eps), rows, norm.size}, gradient,
                                       work->rows.get<float>(rows), found->second.as<double>(), work->stream);
  }

  decoder_cuda::CudaNormObserver observer() {
    return [this](const model::PlannedNorm& norm, const float* x, const float* gradient, int64_t rows) {
      see(norm, x, gradient, rows);
    };
  }

  const std::shared_ptr<quantize::CudaWork> work;
  const model::ModelConfig& config;
  const Layers source;
  const int64_t length, samples, values;
  decoder_cuda::CudaLayerGradient walk;
  decoder_cuda::UploadRing ring;
  device::Fetch fetched;
  std::vector<DecodedLayer> layers;  // that stay: the first
  DecodedLayer passing_layer, teacher_layer;
  int64_t passing = -1;  // the number of that
  std::optional<decoder_cuda::CudaLossGradient> teacher, student;
  device::DeviceBuffer states, expected, expected_states;
  int64_t keeps = 0;
  std::map<std::string, device::DeviceBuffer> sums;
};

DistillCuda::DistillCuda(std::shared_ptr<quantize::CudaWork> work, const model::ModelConfig& config, int64_t length,
                         int64_t samples, Layers layers)
    : impl_(std::make_unique<Impl>(std::move(work), config, length, samples, std::move(layers))) {}
DistillCuda::~DistillCuda() { impl_->work->release(); }

void DistillCuda::keep_layers() {
  Impl& impl = *impl_;
  const int64_t beside = steps_memory(impl.config);
  for (int64_t layer = 0; layer < impl.config.layers; ++layer) {
    const int64_t bytes = weights_of(impl.config, layer) * int64_t{sizeof(uint16_t)};
    if (impl.work->context.budget_bytes() < beside + bytes) return;
    impl.layers.push_back(impl.decode(layer));
  }
}

void DistillCuda::load_heads(const DistilledHead& teacher, const DistilledHead& student) {
  impl_->teacher.emplace(impl_->config, teacher.final_norm, teacher.head, impl_->length, impl_->ring);
  impl_->student.emplace(impl_->config, student.final_norm, student.head, impl_->length, impl_->ring);
}

void DistillCuda::put_norms(int64_t layer, const model::LayerWeights& weights) {
  Impl& impl = *impl_;
  const bool stays = layer < std::ssize(impl.layers);
  if (!stays && layer != impl.passing) return;  // it comes with them
  DecodedLayer& there = stays ? impl.layers[static_cast<size_t>(layer)] : impl.passing_layer;
  for (const auto& norm : weights.plan.norms()) {
    decoder_cuda::put_norm(there, norm.position, weights.norms[norm.position], impl.work->stream);
  }
}

void DistillCuda::put_final_norm(std::span<const float> weights) { impl_->student->put_norm(weights); }

void DistillCuda::load_teacher(const model::LayerWeights& weights) {
  impl_->teacher_layer = {};
  impl_->teacher_layer = decoder_cuda::decode_layer(weights, Decoded::f32, impl_->length, impl_->ring);
}

void DistillCuda::keep_expected(int64_t count) {
  Impl& impl = *impl_;
  const int64_t each = impl.values * int64_t{sizeof(float)};
  impl.keeps = std::clamp<int64_t>((impl.work->context.budget_bytes() - steps_memory(impl.config)) / each, 0, count);
  impl.expected_states = device::DeviceBuffer(impl.work->context, static_cast<size_t>(impl.keeps * each));
}

int64_t DistillCuda::keeps() const noexcept { return impl_->keeps; }

void DistillCuda::put_expected(int64_t sequence, MatrixView<const float> embedded) {
  impl_->put(embedded, impl_->kept(sequence));
}

void DistillCuda::teach(int64_t sequence, MatrixView<float> x) {
  Impl& impl = *impl_;
  if (float* const there = impl.kept(sequence)) return impl.walk.forward(impl.teacher_layer, there);
  impl.put(x, impl.expected.as<float>());
  impl.walk.forward(impl.teacher_layer, impl.expected.as<float>());
  impl.fetched(impl.expected.data(), std::as_writable_bytes(std::span(x.data, static_cast<size_t>(impl.values))));
}

void DistillCuda::put(size_t index, MatrixView<const float> embedded) { impl_->put(embedded, impl_->state(0, index)); }

void DistillCuda::forward(size_t count) {
  Impl& impl = *impl_;
  impl.teacher_layer = {};
  for (int64_t layer = 0; layer < impl.config.layers; ++layer) {
    const DecodedLayer& own = impl.layer(layer);
    impl.walk.enter(own);
    for (size_t s = 0; s < count; ++s) {
      float* const to = impl.state(layer + 1, s);
      device::copy(device::Way::on_gpu, to, impl.state(layer, s), static_cast<size_t>(impl.values) * sizeof(float),
                   impl.work->stream, "copying hidden states");
      impl.walk.forward(own, to);
    }
  }
  impl.work->stream.synchronize();
}

double DistillCuda::divergence(const Expected& expected) {
  Impl& impl = *impl_;
  return impl.student->run(*impl.teacher, impl.place(expected), impl.state(impl.config.layers, 0), false, {});
}

double DistillCuda::loss(size_t index, const Expected& expected) {
  Impl& impl = *impl_;
  return impl.student->run(*impl.teacher, impl.place(expected), impl.state(impl.config.layers, index), true,
                           impl.observer());
}

void DistillCuda::back(size_t count) {
  Impl& impl = *impl_;
  for (int64_t layer = impl.config.layers; layer-- > 0;) {
    const DecodedLayer& own = impl.layer(layer);
    impl.walk.enter(own);
    for (size_t s = 0; s < count; ++s) {
      impl.walk.run(own, impl.state(layer, s), impl.state(impl.config.layers, s), {}, impl.observer());
    }
  }
  impl.work->stream.synchronize();
}

std::vector<double> DistillCuda::take_sums(const model::PlannedNorm& norm) {
  device::DeviceBuffer& sums = impl_->sums.at(norm.name);
  auto result = impl_->work->fetch(sums.as<double>(), norm.size);
  sums.fill(0, impl_->work->stream);
  return result;
}

}  // namespace w4q::pipeline
