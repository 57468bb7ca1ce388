#include "pipeline/scale_folding.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/convert.h"
#include "core/text.h"
#include "quantize/source_matrix.h"

namespace w4q::pipeline {
namespace {

using Kind = ScaleTarget::Kind;

/// values ⊘ scales, rounded to `dtype`; each scale becomes the one that the rounded value really stands for, so that
/// folding costs nothing. A value of zero stays zero whatever its scale. Values are stored without `offset`.
std::vector<float> divide_exactly(Values source, std::vector<float>& scales, float offset) {
  const auto add = [](std::vector<float>& values, float number) {
    if (number != 0) std::ranges::for_each(values, [&](float& value) { value += number; });
  };
  std::vector<float> divided(source.values.size());
  add(source.values, offset);
  for (size_t i = 0; i < divided.size(); ++i) divided[i] = source.values[i] / scales[i];
  add(divided, -offset);
  Buffer bytes(divided.size() * static_cast<size_t>(dtype_bits(source.dtype)) / 8);
  narrow(divided, source.dtype, bytes.bytes());
  widen(bytes.bytes(), source.dtype, divided);
  add(divided, offset);
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
  add(divided, -offset);
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
  Folding(const io::Checkpoint& checkpoint, const std::vector<model::InputGroup>& groups, const ScaleTargets& targets,
          std::vector<std::vector<float>> scales)
      : checkpoint_(checkpoint), groups_(groups), targets_(targets) {
    result_.columns = std::move(scales);
  }

  FoldedScales run() {
    for (size_t group = 0; group < groups_.size(); ++group) {
      const Kind kind = targets_[group].kind;
      if (result_.columns[group].empty() || kind == Kind::input_scale) continue;
      if (kind == Kind::norm) fold_into_norm(group);
      if (kind == Kind::linear) fold_into_linear(group);
      for (const auto& linear : groups_[group].linears) result_.rescaled.insert(linear.name + ".weight");
    }
    return std::move(result_);
  }

 private:
  void fold_into_norm(size_t group) {
    divide_tensor(targets_[group].producer + ".weight", result_.columns[group], groups_[group].norm->offset);
  }

  void fold_into_linear(size_t group) {
    const std::string& producer = targets_[group].producer;
    auto& columns = result_.columns[group];
    const auto channels = shared_channels(groups_[group], targets_[group]);
    const auto channel = [&](size_t c) { return channels.empty() ? c : static_cast<size_t>(channels[c]); };
    std::vector<float> rows(static_cast<size_t>(checkpoint_.at(producer + ".weight").shape[0]));
    for (size_t c = 0; c < columns.size(); ++c) rows[channel(c)] = columns[c];
    if (checkpoint_.contains(producer + ".bias")) divide_tensor(producer + ".bias", rows, 0);
    for (size_t c = 0; c < columns.size(); ++c) columns[c] = rows[channel(c)];
    result_.rescaled.insert(producer + ".weight");
    result_.rows.emplace(producer, std::move(rows));
  }

  void divide_tensor(const std::string& name, std::vector<float>& scales, float offset) {
    const auto source = load_values(checkpoint_, name);
    const auto divided = divide_exactly(source, scales, offset);
    result_.tensors.emplace(name, to_bytes(divided, source.dtype));
    result_.rescaled.insert(name);
  }

  const io::Checkpoint& checkpoint_;
  const std::vector<model::InputGroup>& groups_;
  const ScaleTargets& targets_;
  FoldedScales result_;
};

}  // namespace

ScaleTargets scale_targets(const model::ModelConfig& config, int64_t layer, const SchemeOf& scheme_of,
                           bool store_input_scales) {
  const auto groups = model::input_groups(config, layer);
  const auto is_packed = [&](const model::PlannedLinear& linear) { return scheme_of(linear.name).has_value(); };
  ScaleTargets targets;
  for (const auto& group : groups) {
    const auto shares_norm = [&](const auto& other) {
      return group.norm && other.norm && group.norm->name == other.norm->name;
    };
    const bool norm_folds =
        std::ranges::count_if(groups, shares_norm) == 1 && std::ranges::all_of(group.linears, is_packed);
    const bool stores = store_input_scales && std::ranges::any_of(group.linears, is_packed);
    if (norm_folds) {
      targets.push_back({Kind::norm, group.norm->name});
    } else if (!group.producer.empty() && scheme_of(group.producer)) {
      targets.push_back({Kind::linear, group.producer});
    } else {
      targets.push_back({stores ? Kind::input_scale : Kind::none, {}});
    }
  }
  return targets;
}

std::vector<int32_t> shared_channels(const model::InputGroup& group, const ScaleTarget& target) {
  std::vector<int32_t> result;
  if (group.head_dim == 0 || target.kind != Kind::linear) return result;
  for (int64_t c = 0; c < group.width; ++c) result.push_back(static_cast<int32_t>(group.producer_channel(c)));
  return result;
}

FoldedScales fold_scales(const io::Checkpoint& checkpoint, const model::ModelConfig& config, int64_t layer,
                         const ScaleTargets& targets, std::vector<std::vector<float>> scales) {
  const auto groups = model::input_groups(config, layer);
  return Folding(checkpoint, groups, targets, std::move(scales)).run();
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

}  // namespace w4q::pipeline
