#include "pipeline/distill.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>

#include "core/convert.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/progress.h"
#include "core/rng.h"
#include "core/text.h"
#include "kernels/elementwise/elementwise.h"
#include "model/decoder_layer.h"
#include "model/layer_gradient.h"
#include "model/loss_gradient.h"
#include "pipeline/distill_cuda.h"
#include "pipeline/gradients.h"
#include "pipeline/hidden_states.h"
#include "pipeline/plan.h"

namespace w4q::pipeline {
namespace {

/// Sequences that tell whether it helped: every so-many-th, and at most so many.
constexpr int64_t held_share = 8, most_held = 8;
/// What layers keep between their ways forth and back where memory has no limit; beyond it they are run again.
constexpr int64_t most_on_tapes = int64_t{4} << 30;
constexpr double first_decay = 0.9, second_decay = 0.99, least_moment = 1e-12;

/// Windows cut into sequences of at most `length` tokens.
CalibrationWindows cut(const CalibrationWindows& windows, int64_t length) {
  if (windows.length <= length) return windows;
  CalibrationWindows result{{}, 0, length, windows.hash};
  for (int64_t w = 0; w < windows.samples; ++w) {
    const auto window = windows.window(w);
    for (int64_t first = 0; first + length <= windows.length; first += length, ++result.samples) {
      const auto part = window.subspan(static_cast<size_t>(first), static_cast<size_t>(length));
      result.ids.insert(result.ids.end(), part.begin(), part.end());
    }
  }
  return result;
}

/// Which sequences a step takes, and which tell in the end.
struct Sequences {
  std::vector<int64_t> trained, held;

  Sequences(int64_t count, uint64_t seed) {
    const int64_t wanted = std::clamp<int64_t>(count / held_share, 1, most_held), stride = count / wanted;
    for (int64_t i = 0; i < count; ++i) {
      const bool tells = i % stride == stride - 1 && std::ssize(held) < wanted;
      (tells ? held : trained).push_back(i);
    }
    for (size_t i = trained.size(); i > 1; --i) {
      std::swap(trained[i - 1], trained[random_bits(seed, i) % i]);
    }
  }

  /// Keeps so many to train with, and returns all that are left.
  std::vector<int64_t> keep(int64_t most) {
    if (std::ssize(trained) > most) trained.resize(static_cast<size_t>(most));
    std::vector<int64_t> all = trained;
    all.insert(all.end(), held.begin(), held.end());
    std::ranges::sort(all);
    return all;
  }
};

/// One norm on its way: its weights are those it had times e^δ.
class MovedNorm {
 public:
  MovedNorm(const model::PlannedNorm& planned, std::vector<float> weights, DType dtype)
      : planned_(planned),
        dtype_(dtype),
        begun_(std::move(weights)),
        delta_(begun_.size()),
        slope_(begun_.size()),
        first_(begun_.size()),
        second_(begun_.size()) {}

  void see(MatrixView<const float> x, float eps, MatrixView<const float> gradient) {
    kernels::rms_norm_weight_gradient(x, eps, gradient, slope_);
  }

  void add(std::span<const double> slopes) {
    for (size_t c = 0; c < slope_.size(); ++c) slope_[c] += slopes[c];
  }

  /// Adam, by the sums that were seen since, divided by `tokens`.
  void move(int64_t step, double rate, int64_t tokens) {
    const double first_share = 1 - std::pow(first_decay, step), second_share = 1 - std::pow(second_decay, step);
    for (size_t c = 0; c < delta_.size(); ++c) {
      const double by = slope_[c] * double{now(c)} / static_cast<double>(tokens);
      first_[c] = first_decay * first_[c] + (1 - first_decay) * by;
      second_[c] = second_decay * second_[c] + (1 - second_decay) * by * by;
      delta_[c] -= rate * (first_[c] / first_share) / (std::sqrt(second_[c] / second_share) + least_moment);
    }
    std::ranges::fill(slope_, 0.0);
  }

  /// From now on its weights are as they will be stored: returns that, without the offset.
  std::vector<float> settle() {
    settled_ = true;
    std::vector<float> result = weights();
    for (float& weight : result) weight -= planned_.offset;
    for (float& weight : result) weight = round_to(weight);
    return result;
  }
  std::vector<float> weights() const {
    std::vector<float> result(delta_.size());
    for (size_t c = 0; c < result.size(); ++c) {
      result[c] = settled_ ? round_to(now(c) - planned_.offset) + planned_.offset : now(c);
    }
    return result;
  }

 private:
  float now(size_t c) const { return static_cast<float>(double{begun_[c]} * std::exp(delta_[c])); }
  float round_to(float value) const {
    std::vector<std::byte> bytes(sizeof(float));
    const auto stored = std::span(bytes).first(static_cast<size_t>(dtype_bits(dtype_)) / 8);
    narrow(std::span(&value, 1), dtype_, stored);
    widen(stored, dtype_, std::span(&value, 1));
    return value;
  }

  model::PlannedNorm planned_;
  DType dtype_;
  bool settled_ = false;
  std::vector<float> begun_;
  std::vector<double> delta_, slope_, first_, second_;
};

/// The packed model with its norms on their way: layers stay in memory where they may.
class Student {
 public:
  Student(const model::OpenedModel& model, const io::Checkpoint& stored, bool in_memory)
      : model_(model),
        stored_(stored),
        embeddings_(model::load_embeddings(model)),
        head_(model::load_head(model)),
        final_norm_(model::load_final_norm(model)) {
    for (int64_t layer = 0; in_memory && layer < config().layers; ++layer) {
      layers_.push_back(model::load_layer(model_, layer));
    }
  }

  const model::ModelConfig& config() const noexcept { return model_.config; }
  model::LossGradient loss() const { return {model_.config, final_norm_, head_}; }
  double eps() const noexcept { return config().rms_norm_eps; }
  const kernels::LinearWeight& embeddings() const noexcept { return embeddings_; }

  /// Valid until the next call.
  const model::LayerWeights& layer(int64_t index) {
    if (!layers_.empty()) return layers_[static_cast<size_t>(index)];
    loaded_ = model::load_layer(model_, index);
    place_norms(loaded_);
    return loaded_;
  }

  void see(const model::PlannedNorm& planned, std::span<const float> weights, MatrixView<const float> x,
           MatrixView<const float> gradient) {
    moved(planned, weights).see(x, static_cast<float>(eps()), gradient);
  }
  /// The same where the sums were made elsewhere.
  void add(const model::PlannedNorm& planned, std::span<const float> weights, std::span<const double> slopes) {
    moved(planned, weights).add(slopes);
  }
  std::span<const float> final_norm() const noexcept { return final_norm_; }
  void see_final(const model::PlannedNorm& planned, MatrixView<const float> x, MatrixView<const float> gradient) {
    see(planned, final_norm_, x, gradient);
  }

  void move(int64_t step, double rate, int64_t tokens) {
    for (auto& [name, norm] : moved_) norm.move(step, rate, tokens);
    place();
  }

  /// The norms as they will be stored; from now on the model computes with them.
  std::map<std::string, std::vector<float>> settle() {
    std::map<std::string, std::vector<float>> result;
    for (auto& [name, norm] : moved_) result.emplace(name, norm.settle());
    place();
    return result;
  }

 private:
  MovedNorm& moved(const model::PlannedNorm& planned, std::span<const float> weights) {
    auto found = moved_.find(planned.name);
    if (found == moved_.end()) {
      const DType dtype = stored_.stored_dtype(planned.name + ".weight");
      found =
          moved_.try_emplace(planned.name, planned, std::vector<float>(weights.begin(), weights.end()), dtype).first;
    }
    return found->second;
  }
  void place_norms(model::LayerWeights& layer) const {
    for (const auto& norm : layer.plan.norms()) {
      if (const auto found = moved_.find(norm.name); found != moved_.end()) {
        layer.norms[norm.position] = found->second.weights();
      }
    }
  }
  void place() {
    for (auto& layer : layers_) place_norms(layer);
    if (const auto found = moved_.find(model::final_norm_plan(config()).name); found != moved_.end()) {
      final_norm_ = found->second.weights();
    }
  }

  const model::OpenedModel& model_;
  const io::Checkpoint& stored_;
  const kernels::LinearWeight embeddings_, head_;
  std::vector<float> final_norm_;
  std::vector<model::LayerWeights> layers_;
  model::LayerWeights loaded_;
  std::map<std::string, MovedNorm, std::less<>> moved_;
};

class Distillation {
 public:
  Distillation(const model::OpenedModel& base, const model::OpenedModel& quantized, const CalibrationWindows& windows,
               const DistillOptions& options, int64_t expected_bytes, bool in_memory, int64_t tapes)
      : base_(base),
        config_(base.config),
        options_(options),
        windows_(windows),
        sequences_(windows.samples, options.seed),
        student_(quantized, base.folder.tensors, in_memory),
        head_(model::load_head(base)),
        final_norm_(model::load_final_norm(base)),
        expected_(windows.samples, windows.length, config_.hidden_size, expected_bytes, options.spill_at),
        decoder_(config_),
        memories_(model::LayerMemories::one_at_a_time(config_, windows.length)),
        back_(config_),
        tapes_(static_cast<size_t>(tapes)) {
    decoder_.set_positions(0, windows.length);
    taken_ = sequences_.keep(options.steps * options.samples);
    if (options.gpu == nullptr || !DistillCuda::takes(config_)) return;
    gpu_ = std::make_unique<DistillCuda>(
        options.gpu, config_, windows.length, options.samples,
        [this](int64_t layer) -> const model::LayerWeights& { return student_.layer(layer); });
    const model::LossGradient loss = student_.loss();
    gpu_->load_heads({final_norm_, head_}, {loss.final_norm, loss.head});
    gpu_->keep_layers();
  }

  DistilledNorms run() {
    const int64_t steps = sequences_.trained.empty() ? 0 : options_.steps;
    const auto held = std::ssize(sequences_.held);
    Progress progress("distill", config_.layers + steps, "steps");
    expect(progress);
    DistilledNorms result{{}, held, divergence(), 0, steps};
    for (int64_t step = 1; step <= steps; ++step) {
      const double share = static_cast<double>(step - 1) / static_cast<double>(steps);
      const int64_t count = std::min(options_.samples, std::ssize(sequences_.trained));
      std::vector<int64_t> taken;
      for (int64_t s = 0; s < count; ++s) {
        taken.push_back(
            sequences_.trained[static_cast<size_t>(((step - 1) * count + s) % std::ssize(sequences_.trained))]);
      }
      gpu_ ? look_on_gpu(taken) : look(taken);
      student_.move(step, options_.rate * (1 + std::cos(std::numbers::pi * share)) / 2, count * windows_.length);
      progress.advance(1);
    }
    result.weights = student_.settle();
    if (gpu_) put_norms();
    result.after = divergence();
    return result;
  }

 private:
  model::LossGradient teacher() const { return {config_, final_norm_, head_}; }

  void check_finite(double loss) const {
    if (std::isfinite(loss)) return;
    throw Error(ErrorCode::bad_file, "predictions are not finite where norms are distilled")
        .hint("w4q verify MODEL --ppl TEXT shows whether the model itself is sound");
  }

  /// What the 16-bit model hands to its head, of all sequences.
  void expect(Progress& progress) {
    const auto table = model::load_embeddings(base_);
    if (gpu_) gpu_->keep_expected(std::ssize(taken_));
    for (const int64_t i : taken_) {
      const auto x = expected_.get(i);
      model::embed(config_, table, windows_.window(i), x);
      stays(i) ? gpu_->put_expected(place_of(i), x) : expected_.put(i);
    }
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      const auto weights = model::load_layer(base_, layer);
      if (gpu_) gpu_->load_teacher(weights);
      for (const int64_t i : taken_) {
        const auto x = expected(i);
        gpu_ ? gpu_->teach(place_of(i), x) : decoder_.run(weights, memories_.layer(layer), x);
        if (!stays(i)) expected_.put(i);
        check_interrupt();
      }
      progress.advance(1);
    }
  }

  /// The number of a sequence among those that are taken.
  int64_t place_of(int64_t sequence) const { return std::ranges::find(taken_, sequence) - taken_.begin(); }
  /// Whether what is expected of it is on the GPU.
  bool stays(int64_t sequence) const { return gpu_ != nullptr && place_of(sequence) < gpu_->keeps(); }
  MatrixView<float> expected(int64_t sequence) {
    return stays(sequence) ? MatrixView<float>{} : expected_.get(sequence);
  }
  DistillCuda::Expected expected_on_gpu(int64_t sequence) { return {place_of(sequence), expected(sequence)}; }

  /// What layers keep of a sequence; one that all share keeps nothing until it is wanted.
  bool on_tapes() const { return tapes_.size() > 1; }
  model::GradientTape& tape(int64_t layer, size_t sequence) {
    return on_tapes() ? tapes_[static_cast<size_t>(layer * options_.samples) + sequence] : tapes_.front();
  }

  /// Inputs of all layers, and behind the last, of these sequences. With a way `back` its bits come from back_, on tapes
  /// or not.
  void forward(std::span<const int64_t> sequences, bool back) {
    states_.resize(static_cast<size_t>(config_.layers + 1) * sequences.size());
    for (size_t s = 0; s < sequences.size(); ++s)
      model::embed(config_, student_.embeddings(), windows_.window(sequences[s]), state(0, s));
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      const auto& weights = student_.layer(layer);
      for (size_t s = 0; s < sequences.size(); ++s) {
        const auto from = state(layer, s), to = state(layer + 1, s);
        std::copy_n(from.data, from.rows * from.cols, to.data);
        back ? back_.forward(weights, to, tape(layer, s)) : decoder_.run(weights, memories_.layer(layer), to);
      }
      check_interrupt();
    }
  }

  MatrixView<float> state(int64_t layer, size_t sequence) {
    const size_t of_layer = states_.size() / static_cast<size_t>(config_.layers + 1);
    return states_[static_cast<size_t>(layer) * of_layer + sequence].matrix(windows_.length, config_.hidden_size);
  }

  /// Nats per token over the sequences that are held out.
  double divergence() {
    double sum = 0;
    for (const int64_t sequence : sequences_.held) {
      if (gpu_) {
        forward_on_gpu(std::span(&sequence, 1));
        sum += gpu_->divergence(expected_on_gpu(sequence));
        continue;
      }
      forward(std::span(&sequence, 1), false);
      sum += student_.loss().divergence(teacher(), expected_.get(sequence), state(config_.layers, 0));
    }
    check_finite(sum);
    return sum / static_cast<double>(std::ssize(sequences_.held) * windows_.length);
  }

  void forward_on_gpu(std::span<const int64_t> sequences) {
    states_.resize(1);
    const auto embedded = states_.front().matrix(windows_.length, config_.hidden_size);
    for (size_t s = 0; s < sequences.size(); ++s) {
      model::embed(config_, student_.embeddings(), windows_.window(sequences[s]), embedded);
      gpu_->put(s, embedded);
    }
    gpu_->forward(sequences.size());
    check_interrupt();
  }

  void put_norms() {
    for (int64_t layer = 0; layer < config_.layers; ++layer) gpu_->put_norms(layer, student_.layer(layer));
    gpu_->put_final_norm(student_.final_norm());
  }

  void look_on_gpu(std::span<const int64_t> sequences) {
    put_norms();
    forward_on_gpu(sequences);
    for (size_t s = 0; s < sequences.size(); ++s) check_finite(gpu_->loss(s, expected_on_gpu(sequences[s])));
    gpu_->back(sequences.size());
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      const auto& weights = student_.layer(layer);
      for (const auto& norm : weights.plan.norms()) {
        student_.add(norm, weights.norms[norm.position], gpu_->take_sums(norm));
      }
    }
    const auto last = model::final_norm_plan(config_);
    student_.add(last, student_.final_norm(), gpu_->take_sums(last));
  }

  /// One way forth and back for these sequences: the norms have seen their gradients.
  void look(std::span<const int64_t> sequences) {
    forward(sequences, true);
    const auto see_final = [this](const model::PlannedNorm& norm, MatrixView<const float> x,
                                  MatrixView<const float> g) { student_.see_final(norm, x, g); };
    for (size_t s = 0; s < sequences.size(); ++s) {
      check_finite(student_.loss().run(teacher(), expected_.get(sequences[s]), state(config_.layers, s), see_final));
    }
    for (int64_t layer = config_.layers; layer-- > 0;) {
      const auto& weights = student_.layer(layer);
      const auto see = [&](const model::PlannedNorm& norm, MatrixView<const float> x, MatrixView<const float> g) {
        student_.see(norm, weights.norms[norm.position], x, g);
      };
      for (size_t s = 0; s < sequences.size(); ++s) {
        const auto gradient = state(config_.layers, s);
        on_tapes() ? back_.back(weights, gradient, tape(layer, s), {}, see)
                   : back_.run(weights, state(layer, s), gradient, {}, see);
      }
      check_interrupt();
    }
  }

  const model::OpenedModel& base_;
  const model::ModelConfig& config_;
  const DistillOptions& options_;
  const CalibrationWindows& windows_;
  Sequences sequences_;
  std::vector<int64_t> taken_;  ///< of all sequences
  Student student_;
  const kernels::LinearWeight head_;
  const std::vector<float> final_norm_;
  HiddenStates expected_;
  model::LayerDecoder decoder_;
  model::LayerMemories memories_;
  model::LayerGradient back_;
  std::vector<model::GradientTape> tapes_;  ///< of each layer and sequence of a step, or one
  std::vector<model::Floats> states_;
  std::unique_ptr<DistillCuda> gpu_;  ///< where it is done on a GPU
};

/// Of each layer and sequence of a step one, where they may be kept; else one.
int64_t tapes_of(const model::ModelConfig& config, int64_t length, const DistillOptions& options) {
  const int64_t all = config.layers * options.samples;
  const bool kept =
      options.max_memory == 0 && options.gpu == nullptr && all * model::tape_bytes(config, length) <= most_on_tapes;
  return kept ? all : 1;
}

/// Beside the packed model and what is expected.
int64_t working_memory(const model::OpenedModel& base, int64_t length, const DistillOptions& options) {
  const auto& config = base.config;
  const int64_t state = length * config.hidden_size * int64_t{sizeof(float)};
  const int64_t logits = int64_t{sizeof(float)} * 256 * config.vocab_size;
  return gradient_memory(base, length, false) + (config.layers + 1) * options.samples * state + logits;
}

}  // namespace

DistilledNorms distill_norms(const model::OpenedModel& base, const model::OpenedModel& quantized,
                             const CalibrationWindows& windows, const DistillOptions& options) {
  model::require_gradients(base.config, "distillation of norms");
  const CalibrationWindows sequences = cut(windows, options.length);
  require_distill_memory(base, sequences.length, options);
  const int64_t working = working_memory(base, sequences.length, options);
  const int64_t packed = quantized.folder.tensors.total_bytes();
  int64_t expected = std::numeric_limits<int64_t>::max();
  bool in_memory = true;
  if (options.max_memory > 0) {
    in_memory = options.max_memory - working >= packed;
    expected = options.max_memory - working - (in_memory ? packed : 0);
  }
  const int64_t tapes = tapes_of(base.config, sequences.length, options);
  return Distillation(base, quantized, sequences, options, expected, in_memory, tapes).run();
}

void require_distill_memory(const model::OpenedModel& base, int64_t length, const DistillOptions& options) {
  const int64_t working = working_memory(base, std::min(length, options.length), options);
  if (options.max_memory == 0 || options.max_memory >= working) return;
  throw Error(ErrorCode::bad_argument, concat("--max-memory ", human_bytes(options.max_memory), " is not enough"))
      .detail(concat("distillation of this model's norms needs ", human_bytes(working)))
      .hint("give more, or shorten --length");
}

int64_t distill_memory(const model::OpenedModel& base, int64_t packed_bytes, int64_t samples, int64_t length,
                       const DistillOptions& options) {
  const int64_t rows = std::min(length, options.length);
  const int64_t tapes = (tapes_of(base.config, rows, options) - 1) * model::tape_bytes(base.config, rows);
  return working_memory(base, rows, options) + packed_bytes + tapes +
         samples * length * base.config.hidden_size * int64_t{sizeof(float)};
}

}  // namespace w4q::pipeline
