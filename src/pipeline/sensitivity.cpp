#include "pipeline/sensitivity.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/text.h"
#include "formats/scheme.h"
#include "kernels/linear/linear.h"
#include "model/decoder_layer.h"
#include "model/model.h"
#include "pipeline/divergence.h"
#include "quantize/rounding.h"

namespace w4q::pipeline {
namespace {

using kernels::LinearWeight;

constexpr int64_t most_windows = 8;
constexpr int64_t most_tokens = 128;
/// Errors of the size that quantizing makes: KL grows with their square as long as they are small.
constexpr std::string_view probe_scheme = "kbit3-b32-e4m4";

/// A weight as rounding leaves it, and the difference.
struct Rounded {
  LinearWeight weight, error;
};

LinearWeight owned(const LinearWeight& like, std::shared_ptr<std::vector<float>> values, std::vector<float> bias) {
  const TensorView view{like.name, DType::f32, {like.n, like.k}, bytes_of(*values)};
  return {like.name, like.n, like.k, LinearWeight::Dense{view, std::move(values)}, std::move(bias)};
}

Rounded round_weight(const LinearWeight& weight) {
  const auto rounded = std::make_shared<std::vector<float>>(static_cast<size_t>(weight.n * weight.k));
  const MatrixView<float> matrix(rounded->data(), weight.n, weight.k);
  kernels::decode_rows(weight, 0, weight.n, matrix);
  const auto error = std::make_shared<std::vector<float>>(*rounded);
  const auto scheme = formats::parse_scheme(probe_scheme);
  quantize::rounding_of(scheme, weight.k, {}).round(matrix);
  for (size_t i = 0; i < error->size(); ++i) (*error)[i] -= (*rounded)[i];
  return {owned(weight, rounded, weight.bias), owned(weight, error, {})};
}

class Walk {
 public:
  Walk(const model::OpenedModel& model, const CalibrationWindows& windows, const std::function<void()>& on_run)
      : model_(model),
        config_(model.config),
        windows_(windows),
        on_run_(on_run),
        decoder_(config_),
        memories_(model::LayerMemories::one_at_a_time(config_, windows.length)) {
    model::require_layer_by_layer(config_, "measuring sensitivities");
    decoder_.set_positions(0, windows.length);
  }

  Sensitivities run() {
    const auto embeddings = model::load_embeddings(model_);
    base_ = Stream(static_cast<size_t>(tokens() * config_.hidden_size));
    for (int64_t w = 0; w < windows_.samples; ++w)
      model::embed(config_, embeddings, windows_.window(w), window(base_, w));
    for (int64_t layer = 0; layer < config_.layers; ++layer) run_layer(layer);
    return score();
  }

 private:
  using Stream = std::vector<float>;  // hidden states of all windows

  int64_t tokens() const noexcept { return windows_.samples * windows_.length; }
  MatrixView<float> window(Stream& stream, int64_t index) const {
    return {stream.data() + index * windows_.length * config_.hidden_size, windows_.length, config_.hidden_size};
  }

  void run_layer(int64_t layer) {
    auto weights = model::load_layer(model_, layer);
    layer_ = layer;
    for (auto& stream : streams_) advance(weights, stream, nullptr);
    const Stream before = base_;
    for (LinearWeight& linear : weights.linears) {
      Rounded rounded = round_weight(linear);
      std::swap(linear, rounded.weight);
      streams_.push_back(before);
      names_.push_back(linear.name);
      double& error = errors_.emplace_back(0.0);
      advance(weights, streams_.back(), [&](std::string_view name, MatrixView<const float> input) {
        if (name == rounded.error.name) error += squares(rounded.error, input);
      });
      std::swap(linear, rounded.weight);
    }
    advance(weights, base_, nullptr);
  }

  /// Σ (x · Eᵀ)², rows of the input up to the rounded linear are those of the whole model.
  double squares(const LinearWeight& error, MatrixView<const float> input) {
    std::vector<float> outputs(static_cast<size_t>(input.rows * error.n));
    kernels::linear(error, input, {outputs.data(), input.rows, error.n});
    double sum = 0;
    for (const float value : outputs) sum += static_cast<double>(value) * static_cast<double>(value);
    return sum;
  }

  using OnInput = std::function<void(std::string_view linear, MatrixView<const float> input)>;

  void advance(const model::LayerWeights& weights, Stream& stream, const OnInput& on_input) {
    const auto memory = memories_.layer(layer_);
    model::Observer observer;
    observer.linear_input = [&](std::span<const std::string_view> linears, MatrixView<const float> input) {
      for (const auto name : linears) on_input(name, input);
    };
    for (int64_t w = 0; w < windows_.samples; ++w) {
      decoder_.run(weights, memory, window(stream, w), on_input ? &observer : nullptr);
    }
    check_interrupt();
    if (on_run_) on_run_();
  }

  Sensitivities score() {
    std::vector<const Stream*> found;
    for (const Stream& stream : streams_) found.push_back(&stream);
    const auto divergence = DivergenceMeter(model_).measure(base_, found);
    Sensitivities result;
    for (size_t i = 0; i < errors_.size(); ++i) result.emplace(names_[i], sensitivity(i, divergence[i]));
    return result;
  }

  /// A divergence that is nothing but rounding errors may come out below zero.
  double sensitivity(size_t linear, double divergence) const {
    if (std::isfinite(divergence) && std::isfinite(errors_[linear])) {
      return errors_[linear] > 0 ? std::max(0.0, divergence) / errors_[linear] : 0.0;
    }
    throw Error(ErrorCode::bad_file,
                concat("predictions are not finite where ", printable(names_[linear]), " is rounded"))
        .detail(concat("its sensitivity cannot be measured on ", windows_.samples, " × ", windows_.length, " tokens"))
        .hint("w4q verify MODEL --ppl TEXT shows whether the model itself is sound");
  }

  const model::OpenedModel& model_;
  const model::ModelConfig& config_;
  const CalibrationWindows& windows_;
  const std::function<void()>& on_run_;
  model::LayerDecoder decoder_;
  model::LayerMemories memories_;
  int64_t layer_ = 0;
  Stream base_;
  std::vector<Stream> streams_;  // one for each linear so far, in order
  std::vector<std::string> names_;
  std::vector<double> errors_;  // of their outputs, summed over tokens
};

}  // namespace

CalibrationWindows sensitivity_windows(const CalibrationWindows& windows) {
  return thinned(windows, most_windows, most_tokens);
}

CalibrationWindows thinned(const CalibrationWindows& windows, int64_t samples, int64_t length) {
  CalibrationWindows result;
  result.samples = std::min(windows.samples, samples);
  result.length = std::min(windows.length, length);
  result.hash = windows.hash;
  for (int64_t i = 0; i < result.samples; ++i) {
    const auto window = windows.window(i * windows.samples / result.samples);
    result.ids.insert(result.ids.end(), window.begin(), window.begin() + result.length);
  }
  return result;
}

int64_t sensitivity_runs(const model::ModelConfig& config) {
  // Every layer runs the whole model, a stream for each linear of its own and those of the layers before.
  int64_t runs = 0, streams = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto linears = static_cast<int64_t>(model::layer_plan(config, layer).linears().size());
    runs += 1 + linears + streams;
    streams += linears;
  }
  return runs;
}

Sensitivities measure_sensitivities(const model::OpenedModel& model, const CalibrationWindows& windows,
                                    const std::function<void()>& on_run) {
  return Walk(model, windows, on_run).run();
}

}  // namespace w4q::pipeline
