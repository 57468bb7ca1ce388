#include "pipeline/awq_layer.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "kernels/linear.h"
#include "quantize/awq.h"
#include "quantize/kbit.h"
#include "quantize/rounding.h"

namespace w4q::pipeline {
namespace {

using Kind = ScaleTarget::Kind;

enum Group : size_t { qkv, output, gate_up, down };

/// A matrix or vector of the checkpoint in fp32.
struct Values {
  std::string name;
  DType dtype = DType::f32;
  Shape shape;
  std::vector<float> values;

  MatrixView<float> matrix() { return {values.data(), shape[0], shape[1]}; }
};

Values load_values(const io::Checkpoint& checkpoint, const std::string& name) {
  const auto loaded = checkpoint.load(name);
  Values result{name, loaded->dtype, loaded->shape,
                std::vector<float>(static_cast<size_t>(element_count(loaded->shape)))};
  widen(loaded->bytes, loaded->dtype, result.values);
  const int64_t cols = result.shape.back();
  for (size_t i = 0; i < result.values.size(); ++i) {
    if (std::isfinite(result.values[i])) continue;
    const auto row = static_cast<int64_t>(i) / cols;
    const auto row_bytes = static_cast<size_t>(cols * dtype_bits(loaded->dtype) / 8);
    quantize::refuse_non_finite(name, loaded->dtype,
                                loaded->bytes.subspan(static_cast<size_t>(row) * row_bytes, row_bytes), row);
  }
  return result;
}

void divide_rows(MatrixView<float> weight, const std::vector<float>& scales) {
  for (int64_t r = 0; r < weight.rows; ++r) {
    for (int64_t c = 0; c < weight.cols; ++c) weight.row(r)[c] /= scales[static_cast<size_t>(r)];
  }
}

void multiply_columns(MatrixView<float> weight, const std::vector<float>& scales) {
  for (int64_t r = 0; r < weight.rows; ++r) {
    for (int64_t c = 0; c < weight.cols; ++c) weight.row(r)[c] *= scales[static_cast<size_t>(c)];
  }
}

/// values ⊘ scales, rounded to `dtype`; each scale becomes the one that the rounded value really stands for, so that
/// folding costs nothing. A value of zero stays zero whatever its scale.
std::vector<float> divide_exactly(const Values& source, std::vector<float>& scales) {
  std::vector<float> divided(source.values.size());
  for (size_t i = 0; i < divided.size(); ++i) divided[i] = source.values[i] / scales[i];
  Buffer bytes(divided.size() * static_cast<size_t>(dtype_bits(source.dtype)) / 8);
  narrow(divided, source.dtype, bytes.bytes());
  widen(bytes.bytes(), source.dtype, divided);
  for (size_t i = 0; i < divided.size(); ++i) {
    if (source.values[i] == 0) continue;
    const float scale = source.values[i] / divided[i];
    if (std::isnormal(scale) && std::isfinite(divided[i])) {
      scales[i] = scale;
    } else {
      divided[i] = source.values[i];
      scales[i] = 1;
    }
  }
  return divided;
}

Buffer to_bytes(const std::vector<float>& values, DType dtype) {
  Buffer bytes(values.size() * static_cast<size_t>(dtype_bits(dtype)) / 8);
  narrow(values, dtype, bytes.bytes());
  return bytes;
}

/// The attention output's channels, by the channel of v_proj that they are a mixture of: query heads that read the same
/// value head share the scales of its channels.
std::vector<int32_t> value_channels(const model::ModelConfig& config) {
  std::vector<int32_t> result(static_cast<size_t>(config.heads * config.head_dim));
  for (size_t c = 0; c < result.size(); ++c) {
    const int64_t head = static_cast<int64_t>(c) / config.head_dim;
    result[c] =
        static_cast<int32_t>(head / config.groups() * config.head_dim + static_cast<int64_t>(c) % config.head_dim);
  }
  return result;
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
           const AwqOptions& awq)
      : checkpoint_(checkpoint),
        config_(config),
        statistics_(statistics),
        scheme_of_(scheme_of),
        options_(options),
        awq_(awq),
        groups_(linear_groups(config, layer)),
        targets_(scale_targets(config, layer, scheme_of, awq)) {}

  AwqLayer run() {
    // All scales before any packing: those of o_proj and down_proj change the rows of v_proj and up_proj.
    for (size_t group = 0; group < groups_per_layer; ++group) search(group);
    for (size_t group = 0; group < groups_per_layer; ++group) fold(group);
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
    AwqGroupReport& report = reports_[group];
    report.name = groups_[group].name();
    report.target = targets_[group].kind;
    const auto names = packed_linears(group);
    if (names.empty()) return;
    const auto gram = quantize::mean_gram(statistics_[group]);
    const auto mean_abs = statistics_[group].mean_abs();
    const int64_t k = groups_[group].width;
    const MatrixView<const float> gram_view(gram.data(), k, k);
    std::vector<int32_t> shared;
    if (group == output && targets_[group].kind == Kind::linear) shared = value_channels(config_);

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
    scales_[group] = found.scales;
    report.alpha = found.alpha;
    report.plain_error = found.plain_error;
    report.scaled_error = found.error;
  }

  void fold(size_t group) {
    auto& scales = scales_[group];
    const ScaleTarget& target = targets_[group];
    if (reports_[group].alpha == 0) scales.clear();
    if (scales.empty() || target.kind == Kind::input_scale) return;
    if (target.kind == Kind::norm) fold_into_norm(target.producer, scales);
    if (target.kind == Kind::linear) fold_into_linear(group, target.producer, scales);
    for (const auto& name : groups_[group].linears) result_.rescaled.insert(name + ".weight");
  }

  void fold_into_norm(const std::string& norm, std::vector<float>& scales) {
    const auto source = load_values(checkpoint_, norm + ".weight");
    const auto divided = divide_exactly(source, scales);
    result_.tensors.emplace(source.name, to_bytes(divided, source.dtype));
    result_.rescaled.insert(source.name);
  }

  void fold_into_linear(size_t group, const std::string& producer, std::vector<float>& scales) {
    const auto channels = group == output ? value_channels(config_) : std::vector<int32_t>();
    const auto channel = [&](size_t c) { return channels.empty() ? c : static_cast<size_t>(channels[c]); };
    const int64_t rows = checkpoint_.at(producer + ".weight").shape[0];
    std::vector<float> row_scales(static_cast<size_t>(rows));
    for (size_t c = 0; c < scales.size(); ++c) row_scales[channel(c)] = scales[c];
    if (const std::string bias = producer + ".bias"; checkpoint_.contains(bias)) {
      const auto source = load_values(checkpoint_, bias);
      const auto divided = divide_exactly(source, row_scales);
      result_.tensors.emplace(source.name, to_bytes(divided, source.dtype));
      result_.rescaled.insert(source.name);
    }
    for (size_t c = 0; c < scales.size(); ++c) scales[c] = row_scales[channel(c)];
    result_.rescaled.insert(producer + ".weight");
    row_scales_.emplace(producer, std::move(row_scales));
  }

  void pack(size_t group) {
    AwqGroupReport& report = reports_[group];
    const auto names = packed_linears(group);
    if (names.empty()) return;
    auto gram = quantize::mean_gram(statistics_[group]);
    const MatrixView<float> gram_view(gram.data(), groups_[group].width, groups_[group].width);
    if (const auto& scales = scales_[group]; !scales.empty()) {
      divide_rows(gram_view, scales);
      for (int64_t r = 0; r < gram_view.rows; ++r) {
        for (int64_t c = 0; c < gram_view.cols; ++c) gram_view.row(r)[c] /= scales[static_cast<size_t>(c)];
      }
    }
    for (const auto& name : names) report.clipped_error += pack_linear(group, name, gram_view);
    if (!awq_.clip) report.clipped_error = report.scaled_error;
    result_.groups.push_back(report);
  }

  /// Returns the error of the outputs.
  double pack_linear(size_t group, const std::string& name, MatrixView<const float> gram) {
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
  const LayerStatistics& statistics_;
  const SchemeOf& scheme_of_;
  const quantize::QuantizeOptions& options_;
  const AwqOptions& awq_;
  const std::array<LinearGroup, groups_per_layer> groups_;
  const std::array<ScaleTarget, groups_per_layer> targets_;
  std::array<std::vector<float>, groups_per_layer> scales_;  // empty: ones
  std::array<AwqGroupReport, groups_per_layer> reports_;
  std::map<std::string, std::vector<float>, std::less<>> row_scales_;  // of linears that scales were folded into
  AwqLayer result_;
};

}  // namespace

std::array<ScaleTarget, groups_per_layer> scale_targets(const model::ModelConfig& config, int64_t layer,
                                                        const SchemeOf& scheme_of, const AwqOptions& options) {
  const auto groups = linear_groups(config, layer);
  const std::string prefix = concat("model.layers.", layer, ".");
  const auto is_packed = [&](const std::string& name) { return scheme_of(name).has_value(); };
  std::array<ScaleTarget, groups_per_layer> targets;
  targets[qkv] = {Kind::norm, prefix + "input_layernorm"};
  targets[output] = {Kind::linear, groups[qkv].linears[2]};
  targets[gate_up] = {Kind::norm, prefix + "post_attention_layernorm"};
  targets[down] = {Kind::linear, groups[gate_up].linears[1]};
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& linears = groups[i].linears;
    const bool folds = targets[i].kind == Kind::norm ? std::all_of(linears.begin(), linears.end(), is_packed)
                                                     : is_packed(targets[i].producer);
    if (folds) continue;
    const bool stores = options.input_scales && std::any_of(linears.begin(), linears.end(), is_packed);
    targets[i] = {stores ? Kind::input_scale : Kind::none, {}};
  }
  return targets;
}

AwqLayer quantize_layer(const io::Checkpoint& checkpoint, const model::ModelConfig& config, int64_t layer,
                        const LayerStatistics& statistics, const SchemeOf& scheme_of,
                        const quantize::QuantizeOptions& options, const AwqOptions& awq) {
  return LayerJob(checkpoint, config, layer, statistics, scheme_of, options, awq).run();
}

}  // namespace w4q::pipeline
