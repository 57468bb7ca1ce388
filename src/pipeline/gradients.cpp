#include "pipeline/gradients.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/progress.h"
#include "core/text.h"
#include "model/decoder_layer.h"
#include "model/layer_gradient.h"
#include "model/layer_memory.h"
#include "model/loss_gradient.h"
#include "model/model.h"
#include "model/scratch.h"
#include "pipeline/gradients_cuda.h"

namespace w4q::pipeline {
namespace {

constexpr std::string_view what = "feedback along both sides";

/// Bytes of the sums of a layer's linears.
int64_t sums_bytes(const model::ModelConfig& config, int64_t layer, bool weighted_inputs) {
  int64_t values = 0;
  for (const auto& linear : model::layer_plan(config, layer).linears()) {
    values += quantize::triangle_size(linear.n) + 2 * linear.n;
    if (weighted_inputs) values += quantize::triangle_size(linear.k) + 2 * linear.k;
  }
  return values * int64_t{sizeof(double)};
}

int64_t hidden_limit(const model::OpenedModel& model, const CalibrationWindows& windows,
                     const GradientOptions& options) {
  if (options.max_memory == 0) return std::numeric_limits<int64_t>::max();
  const int64_t fixed = options.reserved_memory + gradient_memory(model, windows.length, options.weighted_inputs);
  if (options.max_memory >= fixed) return options.max_memory - fixed;
  throw Error(ErrorCode::bad_argument, concat("--max-memory ", human_bytes(options.max_memory), " is not enough"))
      .detail(concat("the way back through one layer of this model needs ", human_bytes(fixed)))
      .hint("give more, or shorten --length");
}

}  // namespace

int64_t gradient_memory(const model::OpenedModel& model, int64_t length, bool weighted_inputs) {
  const model::ModelConfig& config = model.config;
  int64_t sums = 0, widest = config.hidden_size;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    sums = std::max(sums, sums_bytes(config, layer, weighted_inputs));
    for (const auto& linear : model::layer_plan(config, layer).linears()) {
      widest = std::max({widest, linear.n, linear.k});
    }
  }
  // What the two blocks of a layer keep, and the gradients of one: some ten matrices as wide as the MLP; the head's logits.
  const int64_t rows = length * int64_t{sizeof(float)} * (10 * widest + 16 * config.hidden_size);
  const int64_t head = int64_t{sizeof(float)} * 256 * (config.vocab_size + 2 * config.hidden_size);
  const int64_t weights = int64_t{sizeof(float)} * 1024 * widest;
  return calibration_memory(model, length, false) + sums + rows + head + weights;
}

struct GradientWalk::Impl {
  Impl(const model::OpenedModel& model_, CalibrationWindows windows_, const GradientOptions& options_)
      : model(model_),
        config(model_.config),
        windows(std::move(windows_)),
        options(options_),
        states(windows.samples * (config.layers + 1), windows.length, config.hidden_size,
               hidden_limit(model, windows, options), options.spill_at),
        layer(config.layers),
        back(config) {
    if (options.gpu != nullptr && !options.weighted_inputs && GradientsCuda::takes(config))
      gpu = std::make_unique<GradientsCuda>(options.gpu, config, windows.samples, windows.length);
  }

  /// Where the gradient of a window is kept, and what a layer takes in of it. Gradients are asked for most, and come
  /// first: what is first stays in memory.
  int64_t gradient_at(int64_t window) const { return window; }
  int64_t input_at(int64_t of_layer, int64_t window) const { return windows.samples * (1 + of_layer) + window; }

  void advance() const {
    check_interrupt();
    if (options.on_window) options.on_window();
  }

  void forward() {
    {
      const auto table = model::load_embeddings(model);
      for (int64_t window = 0; window < windows.samples; ++window) {
        const auto embedded = states.get(input_at(0, window));
        model::embed(config, table, windows.window(window), embedded);
        if (gpu && gpu->keeps(window)) gpu->put(window, embedded);
        states.put(input_at(0, window));
      }
    }
    model::LayerDecoder decoder(config);
    auto memories = model::LayerMemories::one_at_a_time(config, windows.length);
    decoder.set_positions(0, windows.length);
    for (int64_t index = 0; index < config.layers; ++index) {
      const auto weights = model::load_layer(model, index);
      if (gpu) gpu->load(weights);
      for (int64_t window = 0; window < windows.samples; ++window) {
        const int64_t to = index + 1 < config.layers ? input_at(index + 1, window) : gradient_at(window);
        if (gpu) {
          forward_on_gpu(index, window, to);
        } else {
          const auto x = copy(states.get(input_at(index, window)));
          decoder.run(weights, memories.layer(index), x);
          keep(x, to);
        }
        advance();
      }
    }
  }

  void forward_on_gpu(int64_t index, int64_t window, int64_t to) {
    gpu->forward(window, gpu->keeps(window) ? MatrixView<float>{} : states.get(input_at(index, window)));
    if (to == gradient_at(window) && gpu->keeps(window)) return;
    gpu->fetch(states.get(to));
    states.put(to);
  }

  /// Gradients of windows that stay on the GPU are not there.
  MatrixView<float> gradient_of(int64_t window) {
    return gpu && gpu->keeps(window) ? MatrixView<float>{} : states.get(gradient_at(window));
  }
  void put_gradient(int64_t window) {
    if (!gpu || !gpu->keeps(window)) states.put(gradient_at(window));
  }

  void start_back() {
    const auto head = model::load_head(model);
    const auto norm = model::load_final_norm(model);
    const model::LossGradient start{config, norm, head};
    if (gpu) gpu->load_head(norm, head);
    for (int64_t window = 0; window < windows.samples; ++window) {
      const auto x = gradient_of(window);
      loss += gpu ? gpu->loss(window, windows.window(window), x) : start.run(windows.window(window), x);
      put_gradient(window);
      check_interrupt();
    }
    if (std::isfinite(loss)) return;
    throw Error(ErrorCode::bad_file, "the loss of the calibration text is not finite")
        .hint("w4q verify MODEL finds weights that are NaN or infinite");
  }

  std::vector<LinearGradients> run(int64_t index) {
    const auto weights = model::load_layer(model, index);
    std::vector<LinearGradients> result;
    for (const auto& linear : weights.plan.linears()) {
      result.push_back({linear.name, quantize::make_statistics(linear.n, true),
                        quantize::make_statistics(options.weighted_inputs ? linear.k : 0, options.weighted_inputs)});
    }
    const auto see = [&](const model::PlannedLinear& linear, MatrixView<const float> input,
                         MatrixView<const float> gradient) {
      LinearGradients& sums = result[linear.position];
      quantize::add_rows(sums.outputs, gradient, linear.name);
      if (options.weighted_inputs) quantize::add_rows(sums.weighted_inputs, weigh(input, gradient), linear.name);
    };
    for (int64_t window = 0; window < windows.samples; ++window) {
      const auto x = copy(states.get(input_at(index, window)));
      back.run(weights, x, states.get(gradient_at(window)), see);
      states.put(gradient_at(window));
      states.drop(input_at(index, window));
      advance();
    }
    return result;
  }

  void costs_on_gpu(int64_t index, std::span<float> to) {
    gpu->load(model::load_layer(model, index));
    for (int64_t window = 0; window < windows.samples; ++window) {
      const auto x = states.get(input_at(index, window));
      const bool stays = gpu->keeps(window);
      gpu->back(window, stays ? x : copy(x), gradient_of(window));
      put_gradient(window);
      states.drop(input_at(index, window));
      advance();
    }
    gpu->take_costs(to);
    for (const auto& linear : model::layer_plan(config, index).linears()) {
      const auto count = static_cast<size_t>(quantize::triangle_size(linear.n));
      quantize::support_by_tokens(to.first(count), linear.n, windows.samples * windows.length);
      to = to.subspan(count);
    }
  }

  void costs(int64_t index, std::span<float> to) {
    if (gpu) return costs_on_gpu(index, to);
    float* next = to.data();
    for (const LinearGradients& linear : run(index)) {
      const double scale = 1.0 / static_cast<double>(std::max<int64_t>(1, linear.outputs.count));
      const std::span<float> means(next, linear.outputs.gram.size());
      std::ranges::transform(linear.outputs.gram, next,
                             [scale](double sum) { return static_cast<float>(sum * scale); });
      quantize::support_by_tokens(means, linear.outputs.width, linear.outputs.count);
      next += means.size();
    }
  }

  /// The next layer on the way back.
  int64_t step_back() {
    ensure(layer > 0, "gradients: there is no further layer");
    if (layer == config.layers) {
      forward();
      start_back();
    }
    return --layer;
  }

  MatrixView<float> copy(MatrixView<const float> from) {
    const auto to = hidden.matrix(from.rows, from.cols);
    std::copy_n(from.data, from.rows * from.cols, to.data);
    return to;
  }

  void keep(MatrixView<const float> x, int64_t at) {
    std::copy_n(x.data, x.rows * x.cols, states.get(at).data);
    states.put(at);
  }

  /// |g|·x, row by row.
  MatrixView<const float> weigh(MatrixView<const float> input, MatrixView<const float> gradient) {
    const auto result = weighted.matrix(input.rows, input.cols);
    for (int64_t r = 0; r < input.rows; ++r) {
      double squares = 0;
      for (int64_t c = 0; c < gradient.cols; ++c) squares += double{gradient.row(r)[c]} * double{gradient.row(r)[c]};
      const auto length = static_cast<float>(std::sqrt(squares));
      for (int64_t c = 0; c < input.cols; ++c) result.row(r)[c] = length * input.row(r)[c];
    }
    return result;
  }

  const model::OpenedModel& model;
  const model::ModelConfig& config;
  const CalibrationWindows windows;
  const GradientOptions options;
  HiddenStates states;
  int64_t layer;  ///< that was gone back through last
  model::LayerGradient back;
  model::Floats hidden, weighted;
  std::unique_ptr<GradientsCuda> gpu;  ///< where it is walked on a GPU
  double loss = 0;
};

GradientWalk::GradientWalk(const model::OpenedModel& model, CalibrationWindows windows,
                           const GradientOptions& options) {
  model::require_gradients(model.config, what);
  impl_ = std::make_unique<Impl>(model, std::move(windows), options);
}
GradientWalk::~GradientWalk() = default;

std::vector<LinearGradients> GradientWalk::next() {
  ensure(impl_->gpu == nullptr, "gradients: on a GPU there are their costs alone");
  return impl_->run(impl_->step_back());
}

void GradientWalk::next_costs(std::span<float> to) { impl_->costs(impl_->step_back(), to); }

namespace {

int64_t triangles_of(const model::ModelConfig& config, int64_t layer) {
  int64_t values = 0;
  for (const auto& linear : model::layer_plan(config, layer).linears()) values += quantize::triangle_size(linear.n);
  return values;
}

int64_t largest_triangles(const model::ModelConfig& config) {
  int64_t largest = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) largest = std::max(largest, triangles_of(config, layer));
  return largest;
}

}  // namespace

int64_t output_costs_bytes(const model::ModelConfig& config) {
  return config.layers * largest_triangles(config) * int64_t{sizeof(float)};
}

OutputCosts::OutputCosts(const model::OpenedModel& model, const CalibrationWindows& windows,
                         const GradientOptions& options, int64_t keep_bytes)
    : config_(model.config) {
  const int64_t layers = config_.layers;
  Progress progress("gradients", 2 * layers * windows.samples, "windows");
  GradientOptions counted = options;
  counted.on_window = [&progress] { progress.advance(1); };
  GradientWalk walk(model, windows, counted);
  triangles_ = std::make_unique<HiddenStates>(layers, 1, largest_triangles(config_), keep_bytes, options.spill_at);
  for (int64_t layer = layers; layer-- > 0;) {
    walk.next_costs({triangles_->get(layer).data, static_cast<size_t>(triangles_of(config_, layer))});
    triangles_->put(layer);
  }
}
OutputCosts::~OutputCosts() = default;

LayerCosts OutputCosts::layer(int64_t index) {
  LayerCosts result;
  const float* from = triangles_->get(index).data;
  for (const auto& linear : model::layer_plan(config_, index).linears()) {
    const auto count = static_cast<size_t>(quantize::triangle_size(linear.n));
    result[linear.name] = {from, count};
    from += count;
  }
  return result;
}

GradientShape gradient_shape(int64_t samples, int64_t length) {
  constexpr int64_t most_tokens = 65'536, longest = 512;
  const int64_t taken = std::min(length, longest);
  return {std::min(samples, most_tokens / taken), taken};
}

CalibrationWindows gradient_windows(const CalibrationWindows& windows) {
  const auto [samples, length] = gradient_shape(windows.samples, windows.length);
  if (length == windows.length && samples == windows.samples) return windows;
  CalibrationWindows result{{}, samples, length, windows.hash};
  for (int64_t i = 0; i < samples; ++i) {
    const auto window = windows.window(i * windows.samples / samples).first(static_cast<size_t>(length));
    result.ids.insert(result.ids.end(), window.begin(), window.end());
  }
  return result;
}

double GradientWalk::loss() const noexcept { return impl_->loss; }
int64_t GradientWalk::spilled() const noexcept { return impl_->states.spilled(); }

}  // namespace w4q::pipeline
