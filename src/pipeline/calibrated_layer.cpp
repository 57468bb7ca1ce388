#include "pipeline/calibrated_layer.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/interrupt.h"
#include "core/parallel.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "kernels/linear.h"
#include "pipeline/layer_cuda.h"
#include "pipeline/rotated_weight.h"
#include "quantize/awq.h"
#include "quantize/feedback.h"
#include "quantize/rounding.h"

namespace w4q::pipeline {
namespace {

using Kind = ScaleTarget::Kind;

std::vector<float> diagonal(MatrixView<const float> matrix) {
  std::vector<float> result(static_cast<size_t>(matrix.rows));
  for (int64_t i = 0; i < matrix.rows; ++i) result[static_cast<size_t>(i)] = matrix.row(i)[i];
  return result;
}

/// The options of rounding each weight by itself: what everything else is compared with.
quantize::QuantizeOptions plainly(quantize::QuantizeOptions options) {
  options.scales = quantize::Scales::absmax;
  options.learn_table = false;
  options.input = nullptr;
  return options;
}

/// The error of the outputs of what is packed, rows scaled back by `rows`.
double packed_error(const formats::PackedWeight& packed, MatrixView<const float> weight, MatrixView<const float> gram,
                    const std::vector<float>* rows) {
  const auto decode_row = formats::scheme_row(packed.scheme.family).decode_row;
  constexpr int64_t task = 64;
  std::vector<double> parts(static_cast<size_t>((packed.n + task - 1) / task));
  parallel_for(packed.n, task, [&](int64_t begin, int64_t end) {
    std::vector<float> values(static_cast<size_t>((end - begin) * packed.k));
    const MatrixView<float> error(values.data(), end - begin, packed.k);
    for (int64_t r = begin; r < end; ++r) {
      float* out = error.row(r - begin);
      decode_row(packed, r, {out, static_cast<size_t>(packed.k)});
      const float scale = rows == nullptr ? 1.0f : (*rows)[static_cast<size_t>(r)];
      for (int64_t c = 0; c < packed.k; ++c) out[c] = weight.row(r)[c] - out[c] * scale;
    }
    parts[static_cast<size_t>(begin / task)] = quantize::output_error(error, gram);
  });
  double sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

/// The mean square of x·Wᵀ, summed over outputs.
double output_power(MatrixView<const float> weight, MatrixView<const float> gram) {
  std::vector<double> parts(static_cast<size_t>(weight.rows));
  parallel_for(weight.rows, 64, [&](int64_t begin, int64_t end) {
    parts[static_cast<size_t>(begin)] =
        quantize::output_error({weight.row(begin), end - begin, weight.cols, weight.stride}, gram);
  });
  double sum = 0;
  for (const double part : parts) sum += part;
  return sum;
}

class LayerJob {
 public:
  LayerJob(const io::Checkpoint& checkpoint, const model::ModelConfig& config, int64_t layer,
           const LayerStatistics& statistics, const SchemeOf& scheme_of, const quantize::QuantizeOptions& options,
           const CalibratedOptions& calibrated, const std::shared_ptr<quantize::CudaWork>& gpu)
      : checkpoint_(checkpoint),
        config_(config),
        layer_(layer),
        statistics_(statistics),
        scheme_of_(scheme_of),
        options_(options),
        calibrated_(calibrated),
        groups_(linear_groups(config, layer)),
        targets_(wanted_targets(config, layer, scheme_of, calibrated)) {
    for (const auto& group : groups_) rotations_.emplace_back(options.rotation, group.width);
    if (gpu != nullptr) gpu_.emplace(gpu);
  }

  CalibratedLayer run() {
    // All scales before any packing: those of o_proj and down_proj change the rows of v_proj and up_proj.
    for (size_t group = 0; group < groups_per_layer; ++group) search(group);
    auto folded = fold_scales(checkpoint_, config_, layer_, targets_, std::move(scales_));
    scales_ = std::move(folded.columns);
    row_scales_ = std::move(folded.rows);
    result_.tensors = std::move(folded.tensors);
    result_.rescaled = std::move(folded.rescaled);
    for (size_t group = 0; group < groups_per_layer; ++group) pack(group);
    return std::move(result_);
  }

 private:
  std::vector<std::string> packed_linears(size_t group) const {
    std::vector<std::string> result;
    for (const auto& name : groups_[group].linears) {
      if (scheme_of_(name)) result.push_back(name);
    }
    return result;
  }

  void search(size_t group) {
    check_interrupt();
    GroupReport& report = reports_[group];
    report.name = groups_[group].name();
    report.target = targets_[group].kind;
    const auto names = packed_linears(group);
    if (gpu_) return search_on_gpu(group, names);
    if (names.empty()) return;
    const auto gram = quantize::mean_gram(statistics_[group]);
    const auto mean_abs = statistics_[group].mean_abs();
    const int64_t k = groups_[group].width;
    const MatrixView<const float> gram_view(gram.data(), k, k);
    const auto shared = shared_channels(config_, group, targets_[group]);
    std::vector<Values> weights;
    std::vector<quantize::AwqLinear> linears;
    weights.reserve(names.size());
    for (const auto& name : names) {
      weights.push_back(load_values(checkpoint_, name + ".weight"));
      linears.push_back({weights.back().matrix(), quantize::rounding_of(*scheme_of_(name), k, plainly(options_))});
      OutputError& output = outputs_[name];
      output.power = output_power(linears.back().weight, gram_view);
      report.output += output.power;
      // No scales but those of the first point.
      output.plain = quantize::search_scales({&linears.back(), 1}, {mean_abs, gram_view, shared}, 1).plain_error;
      report.plain_error += output.plain;
    }
    report.scaled_error = report.plain_error;
    if (targets_[group].kind == Kind::none) return;
    if (rotates()) {
      for (auto& linear : linears) linear.rounding = in_rotated_basis(std::move(linear.rounding), rotations_[group]);
    }
    const auto found = quantize::search_scales(linears, {mean_abs, gram_view, shared});
    if (found.alpha > 0) scales_[group] = found.scales;
    report.alpha = found.alpha;
    report.scaled_error = found.error;
  }

  void search_on_gpu(size_t group, const std::vector<std::string>& names) {
    GroupReport& report = reports_[group];
    const size_t own = gpu_->add_group(statistics_[group]);
    for (const auto& name : names) {
      const auto loaded = checkpoint_.load(name + ".weight");
      const auto measured = gpu_->add(own, loaded.view(), *scheme_of_(name), plainly(options_));
      outputs_[name] = {measured.power, measured.plain, 0};
      report.output += measured.power;
      report.plain_error += measured.plain;
    }
    report.scaled_error = report.plain_error;
    if (names.empty() || targets_[group].kind == Kind::none) return;
    const auto mean_abs = statistics_[group].mean_abs();
    const auto shared = shared_channels(config_, group, targets_[group]);
    const auto found = gpu_->search(own, mean_abs, shared, report.plain_error);
    if (found.alpha > 0) scales_[group] = found.scales;
    report.alpha = found.alpha;
    report.scaled_error = found.error;
  }

  void pack_on_gpu(size_t group, const std::vector<std::string>& names) {
    GroupReport& report = reports_[group];
    if (!scales_[group].empty()) gpu_->scale(group, scales_[group]);
    double damping = calibrated_.damping;
    for (size_t i = 0; i < names.size(); ++i) {
      check_interrupt();
      const Stopwatch watch;
      const auto rows = row_scales_.find(names[i]);
      LayerCuda::Packing packing{
          clips(options_) && !calibrated_.feedback, calibrated_.feedback, calibrated_.damping, {}};
      if (rows != row_scales_.end()) packing.rows = rows->second;
      auto packed = gpu_->pack(group, i, options_, packing);
      damping = std::max(damping, packed.damping);
      report.packed_error += packed.error;
      keep(group, names[i], std::move(packed.result), packed.error, watch.seconds());
    }
    if (damping > calibrated_.damping) note_damping(group, damping);
    gpu_->drop(group);
    result_.groups.push_back(report);
  }

  void pack(size_t group) {
    GroupReport& report = reports_[group];
    const auto names = packed_linears(group);
    if (names.empty()) return;
    if (calibrated_.feedback) check_gram(group);
    if (gpu_) return pack_on_gpu(group, names);
    auto gram = quantize::mean_gram(statistics_[group]);
    const MatrixView<float> gram_view(gram.data(), groups_[group].width, groups_[group].width);
    if (const auto& scales = scales_[group]; !scales.empty()) {
      divide_rows(gram_view, scales);
      divide_columns(gram_view, scales);
    }
    if (rotates()) rotate_gram(gram_view, rotations_[group]);
    factors_.clear();
    for (const auto& name : names) report.packed_error += pack_linear(group, name, gram_view);
    factors_.clear();
    result_.groups.push_back(report);
  }

  /// The factor of a group's Gram matrix for blocks of this size; linears of a group share it.
  const quantize::ErrorFactor& factor(size_t group, MatrixView<const float> gram, int64_t block) {
    const auto known = factors_.find(block);
    if (known != factors_.end()) return known->second;
    const std::string& name = groups_[group].name();
    const auto& made = factors_.try_emplace(block, gram, block, calibrated_.damping, name).first->second;
    if (made.damping() > calibrated_.damping) note_damping(group, made.damping());
    return made;
  }

  void note_damping(size_t group, double damping) {
    result_.notes.push_back(concat(printable(groups_[group].name()),
                                   ": its inputs are nearly dependent; the damping was raised to ", damping));
  }

  void check_gram(size_t group) {
    const auto& statistics = statistics_[group];
    if (!statistics.has_gram()) {
      throw Error(ErrorCode::bad_argument, "error feedback needs Gram matrices, and the statistics have none")
          .hint("calibrate without --diagonal");
    }
    if (statistics.count < statistics.width) {
      result_.notes.push_back(concat(printable(groups_[group].name()), ": ", statistics.count, " calibration rows for ",
                                     statistics.width, " channels: feedback learns little; give more text"));
    }
  }

  /// Returns the error of the outputs.
  double pack_linear(size_t group, const std::string& name, MatrixView<const float> gram) {
    check_interrupt();
    const Stopwatch watch;
    const auto scheme = *scheme_of_(name);
    auto weight = load_values(checkpoint_, name + ".weight");
    const auto& scales = scales_[group];
    if (!scales.empty()) multiply_columns(weight.matrix(), scales);
    if (rotates()) rotate_rows(weight.matrix(), rotations_[group]);
    // Clips are chosen before the rows are scaled: a row's scale changes nothing but the unit of its error.
    auto rounding = quantize::rounding_of(scheme, weight.shape[1], plainly(options_));
    auto options = options_;
    const auto mean_squares = diagonal(gram);
    quantize::CalibratedInput input{mean_squares};
    if (calibrated_.feedback) {
      input.feedback = &factor(group, gram, quantize::feedback_block(scheme, weight.shape[1]));
    }
    options.input = &input;
    auto original = weight.values;
    if (clips(options)) quantize::search_clip(weight.matrix(), gram, rounding);
    const auto rows = row_scales_.find(name);
    if (rows != row_scales_.end()) divide_rows(weight.matrix(), rows->second);

    const TensorView view{weight.name, DType::f32, weight.shape, bytes_of(weight.values)};
    auto result = quantize::rounding_quantizer(scheme).run(view, scheme, options);
    const double seconds = watch.seconds();
    const double error = packed_error(result.weight, {original.data(), view.shape[0], view.shape[1]}, gram,
                                      rows == row_scales_.end() ? nullptr : &rows->second);
    keep(group, name, std::move(result), error, seconds);
    return error;
  }

  /// A linear that is packed, and the error of its outputs.
  void keep(size_t group, const std::string& name, quantize::QuantizeResult result, double output_error,
            double seconds) {
    const auto rows = row_scales_.find(name);
    CalibratedLinear packed{};
    packed.result = std::move(result);
    packed.seconds = seconds;
    if (targets_[group].kind == Kind::input_scale) {
      packed.input_scale =
          scales_[group].empty() ? std::vector<float>(static_cast<size_t>(groups_[group].width), 1.0f) : scales_[group];
    }
    packed.error =
        effective_error(name, packed.result.weight, group, rows == row_scales_.end() ? nullptr : &rows->second);
    packed.output = outputs_[name];
    packed.output.packed = output_error;
    result_.linears.emplace(name, std::move(packed));
  }

  /// Searched scales and feedback choose the ranges of blocks themselves, from weights that are not clipped.
  bool clips(const quantize::QuantizeOptions& options) const noexcept {
    return calibrated_.scales && calibrated_.clip && !options.searches();
  }

  bool rotates() const noexcept { return !options_.rotation.identity(); }

  /// The error of the weight with rotation and every scale undone, against the one in the checkpoint.
  model::WeightError effective_error(const std::string& name, const formats::PackedWeight& packed, size_t group,
                                     const std::vector<float>* rows) const {
    const std::vector<float>& columns = scales_[group];
    Values decoded{
        name, DType::f32, {packed.n, packed.k}, std::vector<float>(static_cast<size_t>(packed.n * packed.k))};
    const auto matrix = decoded.matrix();
    const auto decode_row = formats::scheme_row(packed.scheme.family).decode_row;
    parallel_for(packed.n, 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        float* row = matrix.row(r);
        decode_row(packed, r, {row, static_cast<size_t>(packed.k)});
        if (rotates()) rotations_[group].restore({row, static_cast<size_t>(packed.k)});
        const float row_scale = rows == nullptr ? 1.0f : (*rows)[static_cast<size_t>(r)];
        for (int64_t c = 0; c < packed.k; ++c)
          row[c] *= columns.empty() ? row_scale : row_scale / columns[static_cast<size_t>(c)];
      }
    });
    const auto loaded = std::make_shared<const io::LoadedTensor>(checkpoint_.load(name + ".weight"));
    const TensorView view{name, DType::f32, decoded.shape, bytes_of(decoded.values)};
    using Dense = kernels::LinearWeight::Dense;
    const kernels::LinearWeight reference{name, packed.n, packed.k, Dense{loaded->view(), loaded}, {}};
    const kernels::LinearWeight candidate{name, packed.n, packed.k, Dense{view, nullptr}, {}};
    return model::compare_weights(reference, candidate);
  }

  const io::Checkpoint& checkpoint_;
  const model::ModelConfig& config_;
  const int64_t layer_;
  const LayerStatistics& statistics_;
  const SchemeOf& scheme_of_;
  const quantize::QuantizeOptions& options_;
  const CalibratedOptions& calibrated_;
  const std::array<LinearGroup, groups_per_layer> groups_;
  const ScaleTargets targets_;
  std::vector<formats::InputRotation> rotations_;            // of each group's input
  std::array<std::vector<float>, groups_per_layer> scales_;  // empty: ones
  std::array<GroupReport, groups_per_layer> reports_;
  std::map<std::string, OutputError, std::less<>> outputs_;
  std::map<int64_t, quantize::ErrorFactor> factors_;                   // of the group that is being packed, by block
  std::map<std::string, std::vector<float>, std::less<>> row_scales_;  // of linears that scales were folded into
  std::optional<LayerCuda> gpu_;  // the groups of the layer on the GPU, by their numbers
  CalibratedLayer result_;
};

}  // namespace

int64_t calibrated_memory(const io::Checkpoint& checkpoint, const model::ModelConfig& config, const SchemeOf& scheme_of,
                          const CalibratedOptions& options) {
  // The matrix in fp64 while it is factored, and the factor.
  const int64_t factor = options.feedback ? sizeof(double) + sizeof(float) : 0;
  int64_t largest = 0, packed = 0;
  for (const auto& group : linear_groups(config, 0)) {
    int64_t weights = 0;
    for (const auto& name : group.linears) {
      if (scheme_of(name)) weights += element_count(checkpoint.at(name + ".weight").shape);
    }
    largest = std::max(largest, static_cast<int64_t>(sizeof(float)) * (2 * weights + group.width * group.width) +
                                    factor * group.width * group.width);
    packed += weights;
  }
  return largest + packed;  // a byte for every packed weight is more than any scheme but the widest needs
}

ScaleTargets wanted_targets(const model::ModelConfig& config, int64_t layer, const SchemeOf& scheme_of,
                            const CalibratedOptions& options) {
  return options.scales ? scale_targets(config, layer, scheme_of, options.input_scales) : ScaleTargets{};
}

bool packs_on_gpu(const model::ModelConfig& config, int64_t layer, const SchemeOf& scheme_of,
                  const quantize::QuantizeOptions& options, const CalibratedOptions& calibrated) {
  const bool clips = calibrated.scales && calibrated.clip && !calibrated.feedback && !options.searches();
  for (const auto& group : linear_groups(config, layer)) {
    for (const auto& name : group.linears) {
      const auto scheme = scheme_of(name);
      if (scheme && !LayerCuda::takes(*scheme, options, clips)) return false;
    }
  }
  return true;
}

CalibratedLayer quantize_layer(const io::Checkpoint& checkpoint, const model::ModelConfig& config, int64_t layer,
                               const LayerStatistics& statistics, const SchemeOf& scheme_of,
                               const quantize::QuantizeOptions& options, const CalibratedOptions& calibrated,
                               const std::shared_ptr<quantize::CudaWork>& gpu) {
  return LayerJob(checkpoint, config, layer, statistics, scheme_of, options, calibrated, gpu).run();
}

}  // namespace w4q::pipeline
