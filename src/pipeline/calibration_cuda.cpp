#include "pipeline/calibration_cuda.h"

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/interrupt.h"
#include "decoder_cuda/layer_decoder.h"
#include "pipeline/pairs_cuda.h"
#include "quantize/statistics_cuda.h"

namespace w4q::pipeline {
namespace {

/// Rows that go through a layer together, if a window is not longer.
constexpr int64_t batch_rows = 4096;

/// What one layer takes while it is calibrated or packed, generously: matrices of the widest input in fp64 and fp32,
/// those of every expert's inputs, the weights in fp32 twice, and a rest.
int64_t layer_memory(const model::ModelConfig& config, bool pairs) {
  int64_t weights = 0, widest = 0, experts = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    int64_t squares = 0;
    for (const auto& group : model::input_groups(config, layer)) {
      if (group.expert) squares += group.width * group.width;
    }
    experts = std::max(experts, squares);
    int64_t sum = 0;
    for (const auto& linear : model::layer_plan(config, layer).linears()) {
      widest = std::max(widest, linear.k);
      sum += linear.n * linear.k;
    }
    weights = std::max(weights, sum);
  }
  const int64_t lanes = experts > 0 ? int64_t{3} << 29 : 0;  // which work side by side (calibrated_layer.cpp)
  const int64_t both = pairs ? 16 * widest * widest + 4 * weights + (int64_t{1} << 30) : 0;
  return 32 * widest * widest + 8 * experts + 8 * weights + (int64_t{1} << 30) + lanes + both;
}

/// Windows of `bytes` that stay in GPU memory.
int64_t resident_windows(const device::Context& gpu, const model::ModelConfig& config, const CalibrationShape& shape,
                         int64_t bytes) {
  const int64_t each = shape.pairs ? 2 * bytes : bytes;
  return std::clamp<int64_t>((gpu.budget_bytes() - layer_memory(config, shape.pairs)) / each, 0, shape.samples);
}

}  // namespace

std::shared_ptr<quantize::CudaWork> make_cuda_work(device::Context& gpu) {
  return device::have_cublas() ? std::make_shared<quantize::CudaWork>(gpu) : nullptr;
}

device::Context* gpu_of(const std::shared_ptr<quantize::CudaWork>& work) {
  return work == nullptr ? nullptr : &work->context;
}

struct CalibrationCuda::Impl {
  using EmbedLayer = CalibrationCuda::EmbedLayer;

  Impl(std::shared_ptr<quantize::CudaWork> work_, const model::ModelConfig& config_, const CalibrationShape& shape_)
      : work(std::move(work_)),
        config(config_),
        shape(shape_),
        batch(std::clamp<int64_t>(batch_rows / shape.length, 1, shape.samples)),
        window_values(shape.length * config.hidden_size),
        decoder(config, shape.length, batch, work->stream, shape.samples),
        own_rows(shape.length, config.layer_embedding_size),
        own_embeddings(work->context, static_cast<size_t>(batch * own_rows.size()) * sizeof(float)),
        resident(resident_windows(work->context, config, shape, window_values * int64_t{sizeof(float)})),
        states(work->context, static_cast<size_t>(resident * window_values) * sizeof(float)),
        quantized_states(work->context, shape.pairs ? states.size() : 0),
        scratch(work->context, shape.pairs ? static_cast<size_t>(batch * window_values) * sizeof(float) : 0) {
    if (shape.pairs) {
      const ResidentWindows windows{states.as<float>(), quantized_states.as<float>(), resident, batch};
      pairs = std::make_unique<PairsCuda>(*work, config, shape, windows);
    }
  }

  float* window(int64_t index) { return states.as<float>() + index * window_values; }

  void observe(std::span<const std::string> linears, const decoder_cuda::CudaMatrix& input) {
    const auto found = numbers.find(linears.front());
    if (found != numbers.end()) sums[found->second]->add_rows(static_cast<const __half*>(input.data), input.rows);
  }

  /// Pairs go over the layer again: its inputs stay.
  float* passing(float* hidden, int64_t windows) {
    if (!shape.pairs) return hidden;
    device::copy(device::Way::on_gpu, scratch.data(), hidden,
                 static_cast<size_t>(windows * window_values) * sizeof(float), work->stream, "copying hidden states");
    return scratch.as<float>();
  }

  /// Windows first … as the decoder takes them, with what the layer adds of its own.
  decoder_cuda::CudaWindows windows(int64_t first, int64_t count, const EmbedLayer& embed_layer) {
    if (own_rows.size() == 0) return {.first = first, .count = count};
    for (int64_t i = 0; i < count; ++i) {
      embed_layer(first + i, own_rows.view());
      device::copy(device::Way::to_gpu, own_embeddings.as<float>() + i * own_rows.size(), own_rows.values.data(),
                   own_rows.values.size() * sizeof(float), work->stream, "copying embeddings of a layer");
      work->stream.synchronize();
    }
    return {first, count, own_embeddings.as<float>()};
  }

  void run_resident(const decoder_cuda::CudaObserver& observer, const EmbedLayer& embed_layer,
                    const std::function<void()>& on_window) {
    for (int64_t first = 0; first < resident; first += batch) {
      const int64_t count = std::min(batch, resident - first);
      decoder.run(passing(window(first), count), windows(first, count, embed_layer), observer);
      work->stream.synchronize();
      report(count, on_window);
    }
  }

  void run_others(HiddenStates& others, const decoder_cuda::CudaObserver& observer, const EmbedLayer& embed_layer,
                  const std::function<void()>& on_window) {
    if (resident == shape.samples) return;
    device::DeviceBuffer staged(work->context, static_cast<size_t>(window_values) * sizeof(float));
    for (int64_t i = 0; i < shape.samples - resident; ++i) {
      const MatrixView<float> hidden = others.get(i);
      const auto bytes = std::as_writable_bytes(std::span(hidden.data, static_cast<size_t>(window_values)));
      staged.upload(bytes, work->stream);
      decoder.run(staged.as<float>(), windows(resident + i, 1, embed_layer), observer);
      if (!shape.pairs) staged.download(bytes, work->stream);
      work->stream.synchronize();
      if (!shape.pairs) others.put(i);
      report(1, on_window);
    }
  }

  static void report(int64_t count, const std::function<void()>& on_window) {
    check_interrupt();
    for (int64_t i = 0; on_window && i < count; ++i) on_window();
  }

  LayerStatistics collect(bool keep_gram) {
    LayerStatistics result(groups.size());
    for (size_t i = 0; i < groups.size(); ++i) {
      const std::string& name = groups[i].name();
      if (keep_gram && shape.gram) {
        result[i] = sums[i]->channels(name);
        result[i].gpu_gram = std::make_shared<quantize::GramCuda>(sums[i]->gram());
      } else {
        result[i] = sums[i]->download(name);
      }
      sums[i].reset();
    }
    return result;
  }

  const std::shared_ptr<quantize::CudaWork> work;
  const model::ModelConfig& config;
  const CalibrationShape shape;
  const int64_t batch, window_values;
  decoder_cuda::CudaLayerDecoder decoder;
  struct Rows {
    Rows(int64_t rows_, int64_t cols_) : rows(rows_), cols(cols_), values(static_cast<size_t>(rows_ * cols_)) {}
    int64_t size() const { return rows * cols; }
    MatrixView<float> view() { return {values.data(), rows, cols}; }

    int64_t rows, cols;
    std::vector<float> values;
  };
  Rows own_rows;  // of a window
  device::DeviceBuffer own_embeddings;
  const int64_t resident;
  device::DeviceBuffer states, quantized_states;  // [resident, length, hidden]
  device::DeviceBuffer scratch;                   // with pairs, for what runs but does not go on
  std::unique_ptr<PairsCuda> pairs;
  std::vector<model::InputGroup> groups;
  std::unordered_map<std::string, size_t> numbers;            // of groups, by name
  std::vector<std::optional<quantize::StatisticsCuda>> sums;  // one for each of the groups
};

CalibrationCuda::CalibrationCuda(std::shared_ptr<quantize::CudaWork> work, const model::ModelConfig& config,
                                 const CalibrationShape& shape)
    : impl_(std::make_unique<Impl>(std::move(work), config, shape)) {}
CalibrationCuda::~CalibrationCuda() = default;

int64_t CalibrationCuda::resident() const noexcept { return impl_->resident; }

void CalibrationCuda::put(int64_t window, MatrixView<const float> hidden) {
  const auto bytes = static_cast<size_t>(impl_->window_values) * sizeof(float);
  const device::Stream& stream = impl_->work->stream;
  device::copy(device::Way::to_gpu, impl_->window(window), hidden.data, bytes, stream, "copying hidden states");
  if (impl_->pairs != nullptr) {
    device::copy(device::Way::on_gpu, impl_->quantized_states.as<float>() + window * impl_->window_values,
                 impl_->window(window), bytes, stream, "copying hidden states");
  }
  stream.synchronize();
}

void CalibrationCuda::begin_pairs(const model::LayerWeights& plain) { impl_->pairs->begin(plain); }

quantize::InputPair CalibrationCuda::pair(const model::InputGroup& group, size_t block, const PairedStates& states,
                                          bool keep) {
  return impl_->pairs->pair(group, block, states, keep);
}

void CalibrationCuda::finish_pairs(const PairedStates& states) { impl_->pairs->finish(states); }

LayerStatistics CalibrationCuda::run(const model::LayerWeights& weights, int64_t layer, HiddenStates& others,
                                     bool keep_gram, const EmbedLayer& embed_layer,
                                     const std::function<void()>& on_window) {
  Impl& impl = *impl_;
  impl.groups = model::input_groups(impl.config, layer);
  impl.numbers.clear();
  for (size_t i = 0; i < impl.groups.size(); ++i) impl.numbers.emplace(impl.groups[i].name(), i);
  impl.sums = std::vector<std::optional<quantize::StatisticsCuda>>(impl.groups.size());
  for (size_t i = 0; i < impl.groups.size(); ++i)
    impl.sums[i].emplace(*impl.work, impl.groups[i].width, impl.shape.gram);
  impl.decoder.load(weights);
  decoder_cuda::CudaObserver observer;
  observer.linear_input = [&](std::span<const std::string> linears, const decoder_cuda::CudaMatrix& input) {
    impl.observe(linears, input);
  };
  impl.run_resident(observer, embed_layer, on_window);
  impl.run_others(others, observer, embed_layer, on_window);
  impl.decoder.release();
  impl.work->release();
  return impl.collect(keep_gram);
}

}  // namespace w4q::pipeline
