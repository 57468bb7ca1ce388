#include "pipeline/awq_layer.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/interrupt.h"
#include "core/parallel.h"
#include "core/stopwatch.h"
#include "formats/scheme_registry.h"
#include "kernels/linear.h"
#include "quantize/awq.h"
#include "quantize/rounding.h"

namespace w4q::pipeline {
namespace {

using Kind = ScaleTarget::Kind;

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
           const AwqOptions& awq)
      : checkpoint_(checkpoint),
        config_(config),
        layer_(layer),
        statistics_(statistics),
        scheme_of_(scheme_of),
        options_(options),
        awq_(awq),
        groups_(linear_groups(config, layer)),
        targets_(scale_targets(config, layer, scheme_of, awq.input_scales)) {}

  AwqLayer run() {
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
    AwqGroupReport& report = reports_[group];
    report.name = groups_[group].name();
    report.target = targets_[group].kind;
    const auto names = packed_linears(group);
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
      linears.push_back({weights.back().matrix(), quantize::rounding_of(*scheme_of_(name), k, options_)});
      report.output += output_power(linears.back().weight, gram_view);
    }
    const int points = targets_[group].kind == Kind::none ? 1 : quantize::awq_points;
    const auto found = quantize::search_scales(linears, {mean_abs, gram_view, shared}, points);
    if (found.alpha > 0) scales_[group] = found.scales;
    report.alpha = found.alpha;
    report.plain_error = found.plain_error;
    report.scaled_error = found.error;
  }

  void pack(size_t group) {
    AwqGroupReport& report = reports_[group];
    const auto names = packed_linears(group);
    if (names.empty()) return;
    auto gram = quantize::mean_gram(statistics_[group]);
    const MatrixView<float> gram_view(gram.data(), groups_[group].width, groups_[group].width);
    if (const auto& scales = scales_[group]; !scales.empty()) {
      divide_rows(gram_view, scales);
      divide_columns(gram_view, scales);
    }
    for (const auto& name : names) report.clipped_error += pack_linear(group, name, gram_view);
    if (!awq_.clip) report.clipped_error = report.scaled_error;
    result_.groups.push_back(report);
  }

  /// Returns the error of the outputs.
  double pack_linear(size_t group, const std::string& name, MatrixView<const float> gram) {
    check_interrupt();
    const Stopwatch watch;
    const auto scheme = *scheme_of_(name);
    auto weight = load_values(checkpoint_, name + ".weight");
    const auto& scales = scales_[group];
    if (!scales.empty()) multiply_columns(weight.matrix(), scales);
    // Clips are chosen before the rows are scaled: a row's scale changes nothing but the unit of its error.
    auto rounding = quantize::rounding_of(scheme, weight.shape[1], options_);
    double error = 0;
    if (awq_.clip) error = quantize::search_clip(weight.matrix(), gram, rounding).error;
    const auto rows = row_scales_.find(name);
    if (rows != row_scales_.end()) divide_rows(weight.matrix(), rows->second);

    PackedByAwq packed{};
    const TensorView view{weight.name, DType::f32, weight.shape, bytes_of(weight.values)};
    packed.result = quantize::rounding_quantizer(scheme).run(view, scheme, options_);
    packed.seconds = watch.seconds();
    if (targets_[group].kind == Kind::input_scale) {
      packed.input_scale = scales.empty() ? std::vector<float>(static_cast<size_t>(weight.shape[1]), 1.0f) : scales;
    }
    packed.error =
        effective_error(name, packed.result.weight, scales, rows == row_scales_.end() ? nullptr : &rows->second);
    result_.linears.emplace(name, std::move(packed));
    return error;
  }

  /// The error of the weight with every scale undone, against the one in the checkpoint.
  model::WeightError effective_error(const std::string& name, const formats::PackedWeight& packed,
                                     const std::vector<float>& columns, const std::vector<float>* rows) const {
    Values decoded{
        name, DType::f32, {packed.n, packed.k}, std::vector<float>(static_cast<size_t>(packed.n * packed.k))};
    const auto matrix = decoded.matrix();
    const auto decode_row = formats::scheme_row(packed.scheme.family).decode_row;
    parallel_for(packed.n, 16, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        float* row = matrix.row(r);
        decode_row(packed, r, {row, static_cast<size_t>(packed.k)});
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
  const AwqOptions& awq_;
  const std::array<LinearGroup, groups_per_layer> groups_;
  const ScaleTargets targets_;
  std::array<std::vector<float>, groups_per_layer> scales_;  // empty: ones
  std::array<AwqGroupReport, groups_per_layer> reports_;
  std::map<std::string, std::vector<float>, std::less<>> row_scales_;  // of linears that scales were folded into
  AwqLayer result_;
};

}  // namespace

int64_t awq_memory(const io::Checkpoint& checkpoint, const model::ModelConfig& config, const SchemeOf& scheme_of) {
  int64_t largest = 0, packed = 0;
  for (const auto& group : linear_groups(config, 0)) {
    int64_t weights = 0;
    for (const auto& name : group.linears) {
      if (scheme_of(name)) weights += element_count(checkpoint.at(name + ".weight").shape);
    }
    largest = std::max(largest, static_cast<int64_t>(sizeof(float)) * (2 * weights + group.width * group.width));
    packed += weights;
  }
  return largest + packed;  // a byte for every packed weight is more than any scheme but the widest needs
}

AwqLayer quantize_layer(const io::Checkpoint& checkpoint, const model::ModelConfig& config, int64_t layer,
                        const LayerStatistics& statistics, const SchemeOf& scheme_of,
                        const quantize::QuantizeOptions& options, const AwqOptions& awq) {
  return LayerJob(checkpoint, config, layer, statistics, scheme_of, options, awq).run();
}

}  // namespace w4q::pipeline
