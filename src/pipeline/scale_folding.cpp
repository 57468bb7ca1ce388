#include "pipeline/scale_folding.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/convert.h"
#include "core/parallel.h"
#include "core/text.h"
#include "quantize/source_matrix.h"

namespace w4q::pipeline {
namespace {

using Kind = ScaleTarget::Kind;

enum Group : size_t { qkv, output, gate_up, down };

constexpr int64_t row_grain = 64;

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

/// Folds group after group and collects what changed.
class Folding {
 public:
  Folding(const io::Checkpoint& checkpoint, const model::ModelConfig& config, const ScaleTargets& targets,
          std::array<std::vector<float>, groups_per_layer> scales)
      : checkpoint_(checkpoint), config_(config), targets_(targets) {
    result_.columns = std::move(scales);
  }

  FoldedScales run(const std::array<LinearGroup, groups_per_layer>& groups) {
    for (size_t group = 0; group < groups.size(); ++group) {
      const Kind kind = targets_[group].kind;
      if (result_.columns[group].empty() || kind == Kind::input_scale) continue;
      if (kind == Kind::norm) fold_into_norm(group);
      if (kind == Kind::linear) fold_into_linear(group);
      for (const auto& name : groups[group].linears) result_.rescaled.insert(name + ".weight");
    }
    return std::move(result_);
  }

 private:
  void fold_into_norm(size_t group) { divide_tensor(targets_[group].producer + ".weight", result_.columns[group]); }

  void fold_into_linear(size_t group) {
    const std::string& producer = targets_[group].producer;
    auto& columns = result_.columns[group];
    const auto channels = shared_channels(config_, group, targets_[group]);
    const auto channel = [&](size_t c) { return channels.empty() ? c : static_cast<size_t>(channels[c]); };
    std::vector<float> rows(static_cast<size_t>(checkpoint_.at(producer + ".weight").shape[0]));
    for (size_t c = 0; c < columns.size(); ++c) rows[channel(c)] = columns[c];
    if (checkpoint_.contains(producer + ".bias")) divide_tensor(producer + ".bias", rows);
    for (size_t c = 0; c < columns.size(); ++c) columns[c] = rows[channel(c)];
    result_.rescaled.insert(producer + ".weight");
    result_.rows.emplace(producer, std::move(rows));
  }

  void divide_tensor(const std::string& name, std::vector<float>& scales) {
    const auto source = load_values(checkpoint_, name);
    const auto divided = divide_exactly(source, scales);
    result_.tensors.emplace(name, to_bytes(divided, source.dtype));
    result_.rescaled.insert(name);
  }

  const io::Checkpoint& checkpoint_;
  const model::ModelConfig& config_;
  const ScaleTargets& targets_;
  FoldedScales result_;
};

}  // namespace

ScaleTargets scale_targets(const model::ModelConfig& config, int64_t layer, const SchemeOf& scheme_of,
                           bool store_input_scales) {
  const auto groups = linear_groups(config, layer);
  const std::string prefix = concat("model.layers.", layer, ".");
  const auto is_packed = [&](const std::string& name) { return scheme_of(name).has_value(); };
  ScaleTargets targets;
  targets[qkv] = {Kind::norm, prefix + "input_layernorm"};
  targets[output] = {Kind::linear, groups[qkv].linears[2]};
  targets[gate_up] = {Kind::norm, prefix + "post_attention_layernorm"};
  targets[down] = {Kind::linear, groups[gate_up].linears[1]};
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& linears = groups[i].linears;
    const bool folds = targets[i].kind == Kind::norm ? std::all_of(linears.begin(), linears.end(), is_packed)
                                                     : is_packed(targets[i].producer);
    if (folds) continue;
    const bool stores = store_input_scales && std::any_of(linears.begin(), linears.end(), is_packed);
    targets[i] = {stores ? Kind::input_scale : Kind::none, {}};
  }
  return targets;
}

std::vector<int32_t> shared_channels(const model::ModelConfig& config, size_t group, const ScaleTarget& target) {
  std::vector<int32_t> result;
  if (group != output || target.kind != Kind::linear) return result;
  for (int64_t head = 0; head < config.heads; ++head) {
    const int64_t first = head / config.groups() * config.head_dim;
    for (int64_t c = 0; c < config.head_dim; ++c) result.push_back(static_cast<int32_t>(first + c));
  }
  return result;
}

FoldedScales fold_scales(const io::Checkpoint& checkpoint, const model::ModelConfig& config, int64_t layer,
                         const ScaleTargets& targets, std::array<std::vector<float>, groups_per_layer> scales) {
  return Folding(checkpoint, config, targets, std::move(scales)).run(linear_groups(config, layer));
}

Values load_values(const io::Checkpoint& checkpoint, const std::string& name) {
  const auto loaded = checkpoint.load(name);
  Values result{name, checkpoint.stored_dtype(name), loaded->shape,
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

void multiply_columns(MatrixView<float> weight, const std::vector<float>& scales) {
  parallel_for(weight.rows, row_grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < weight.cols; ++c) weight.row(r)[c] *= scales[static_cast<size_t>(c)];
    }
  });
}

void divide_columns(MatrixView<float> weight, const std::vector<float>& scales) {
  parallel_for(weight.rows, row_grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < weight.cols; ++c) weight.row(r)[c] /= scales[static_cast<size_t>(c)];
    }
  });
}

void multiply_rows(MatrixView<float> weight, const std::vector<float>& scales) {
  parallel_for(weight.rows, row_grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < weight.cols; ++c) weight.row(r)[c] *= scales[static_cast<size_t>(r)];
    }
  });
}

void divide_rows(MatrixView<float> weight, const std::vector<float>& scales) {
  parallel_for(weight.rows, row_grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < weight.cols; ++c) weight.row(r)[c] /= scales[static_cast<size_t>(r)];
    }
  });
}

}  // namespace w4q::pipeline
