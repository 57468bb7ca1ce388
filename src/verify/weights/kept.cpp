#include "verify/weights/kept.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/convert.h"
#include "core/interrupt.h"
#include "core/text.h"
#include "model/layer_plan.h"
#include "model/parameters.h"
#include "verify/weights/base_values.h"
#include "verify/weights/computation.h"
#include "verify/weights/norm_factors.h"
#include "verify/weights/rescaled.h"

namespace w4q::verify {
namespace {

std::string place_text(int64_t at, const Shape& shape) {
  return shape.size() == 2 ? concat("[", at / shape[1], ", ", at % shape[1], "]") : concat("[", at, "]");
}

/// Of a weight of 8 bits that carries a norm's factor: four roundings by 2^-8 at most, of norm and weight, before and behind
/// what else is folded into them; and what is next to nothing in F16.
constexpr double most_folding_error = 0x1p-6, least_f16 = 0x1p-23;

bool is_norm(const model::Parameter& parameter) {
  return parameter.shape.size() == 1 && parameter.name.ends_with("norm.weight");
}

class KeptCheck {
 public:
  KeptCheck(const model::OpenedModel& candidate, const model::OpenedModel& base)
      : candidate_(candidate), base_(base), weights_(candidate, base) {}

  Check run() {
    look_at_config();
    for (const auto& parameter : model::parameters(candidate_)) look_at(parameter);
    look_for_lost();
    Check check{"kept", faults_.empty(), {}, std::move(faults_)};
    check.detail = concat(same_, " kept tensors and config.json hold what the base's do");
    if (rescaled_ > 0) check.detail += concat(", ", rescaled_, " more up to a factor a channel");
    if (!check.passed) check.detail += concat("; ", check.faults.size(), " faults");
    return check;
  }

 private:
  void fault(std::string_view subject, const std::string& what) {
    faults_.push_back(concat(printable(subject), ": ", what));
  }

  // ---- config.json ----

  template <class Value>
  void compare(const char* key, const Value& ours, const Value& theirs) {
    if (ours != theirs) fault("config.json", concat(key, " is ", ours, ", in the base ", theirs));
  }

  void look_at_config() {
    if (candidate_.config.architecture == nullptr) {
      for (const auto& difference : stated_otherwise(candidate_.folder.config, base_.folder.config))
        fault("config.json", difference);
      return;
    }
    const model::ModelConfig &ours = candidate_.config, &theirs = base_.config;
    const auto real = [](double value) { return static_cast<float>(value); };
    compare("architecture", ours.architecture_name, theirs.architecture_name);
    compare("num_hidden_layers", ours.layers, theirs.layers);
    compare("hidden_size", ours.hidden_size, theirs.hidden_size);
    compare("intermediate_size", ours.intermediate_size, theirs.intermediate_size);
    compare("num_attention_heads", ours.heads, theirs.heads);
    compare("num_key_value_heads", ours.kv_heads, theirs.kv_heads);
    compare("head_dim", ours.head_dim, theirs.head_dim);
    compare("rms_norm_eps", real(ours.rms_norm_eps), real(theirs.rms_norm_eps));
    compare("max_position_embeddings", ours.max_positions, theirs.max_positions);
    compare("rope_theta", real(ours.rope.theta), real(theirs.rope.theta));
    if (ours.rope != theirs.rope && real(ours.rope.theta) == real(theirs.rope.theta)) {
      compare("partial_rotary_factor", real(ours.rope.partial_rotary_factor), real(theirs.rope.partial_rotary_factor));
      if (real(ours.rope.partial_rotary_factor) == real(theirs.rope.partial_rotary_factor)) {
        fault("config.json", "positions are scaled otherwise than in the base (rope_scaling)");
      }
    }
    for (const auto& difference : computed_otherwise(ours, theirs)) fault("config.json", difference);
    if (ours.sliding_window != theirs.sliding_window) fault("config.json", "sliding_window is not the base's");
    if (ours.bos_token && theirs.bos_token) compare("bos_token_id", *ours.bos_token, *theirs.bos_token);
    if (!ends_alike(candidate_.folder, ours, base_.folder, theirs)) {
      fault("config.json", "eos_token_id is not the base's");
    }
  }

  // ---- tensors ----

  void look_at(const model::Parameter& parameter) {
    const std::string& name = parameter.name;
    if (candidate_.folder.quantization.find(model::module_path(name)) != nullptr) return;
    // A head that is tied in one of the two is the table of embeddings.
    const std::string wanted = base_.folder.tensors.contains(name) ? name : "model.embed_tokens.weight";
    if (!candidate_.folder.tensors.contains(name) || !base_.folder.tensors.contains(wanted)) return;
    if (wanted != name && name != "lm_head.weight")
      return is_made_for_activations(name) ? void() : fault(name, "the base has no such tensor");
    const auto ours = candidate_.folder.tensors.load(name), theirs = base_.folder.tensors.load(wanted);
    if (!is_weight_dtype(ours->dtype) || !is_weight_dtype(theirs->dtype)) {
      if (ours->dtype != theirs->dtype)
        fault(name, concat("is ", dtype_name(ours->dtype), ", in the base ", dtype_name(theirs->dtype)));
      return;
    }
    if (ours->shape != theirs->shape) {
      return fault(name, concat("has shape ", shape_text(ours->shape), ", in the base ", shape_text(theirs->shape)));
    }
    const int64_t at = first_difference(ours.view(), theirs.view());
    if (at < 0 || hold_same_values(ours.view(), theirs.view(), offset_of(name)))
      return look_at_same(parameter, ours.view(), theirs.view());
    const std::string difference =
        concat("is not the base's: ", place_text(at, ours->shape), " is ", values_of(ours.view(), at, at + 1).front(),
               ", in the base ", values_of(theirs.view(), at, at + 1).front());
    const std::string problem = may_be_folded(parameter, ours.view(), theirs.view());
    if (!problem.empty()) return fault(name, problem == "no" ? difference : concat(difference, "; ", problem));
    ++rescaled_;
  }

  /// What is added to a norm's stored values.
  float offset_of(const std::string& name) const {
    if (candidate_.config.architecture == nullptr) return 0;
    for (const auto& norm : model::all_norms(candidate_.config)) {
      if (name == norm.name + ".weight") return norm.offset;
    }
    return 0;
  }

  /// Scales of activations, which no 16-bit base has.
  bool is_made_for_activations(std::string_view name) const {
    const auto* const dialect = candidate_.folder.quantization.dialect;
    const auto ends = [&](std::string_view suffix) { return name.ends_with(suffix); };
    return ends(".k_scale") || ends(".v_scale") ||
           (dialect != nullptr && std::ranges::any_of(dialect->activations, ends));
  }

  /// A weight that is the base's although the norm before it is not.
  void look_at_same(const model::Parameter& parameter, const TensorView& ours, const TensorView& theirs) {
    ++same_;
    if (!parameter.linear || candidate_.config.architecture == nullptr) return;
    const auto place = model::find_linear(candidate_.config, model::module_path(parameter.name));
    if (!place || !place->group.norm || candidate_.folder.tuned.contains(place->group.norm->name + ".weight")) return;
    if (holds_base_values(candidate_, base_, *place->group.norm)) return;
    const std::string problem = folded_weight(place->linear.name, ours, theirs);
    if (!problem.empty())
      fault(parameter.name,
            concat("is the base's, but ", printable(place->group.norm->name), " before it is not: ", problem));
  }

  /// What no architecture asks for, towers and layers for further tokens, and anything of one that is not known. A folder of
  /// the text model alone leaves all of it out, and one under other names has none of it.
  void look_for_lost() {
    if (!base_.folder.quantization.linears.empty() || base_.folder.small_floats) return;
    const bool known = candidate_.config.architecture != nullptr;
    const auto& tensors = candidate_.folder.tensors;
    std::vector<std::string> lost;
    std::set<std::string> lost_experts;
    size_t held = 0;
    for (const auto& [name, info] : base_.folder.tensors.tensors()) {
      const auto reason = known ? model::reason_to_carry(candidate_.config, name) : std::string_view("anything");
      if (reason.empty() || reason == model::never_read) continue;
      if (tensors.contains(name) || candidate_.folder.quantization.find(model::module_path(name)) != nullptr) {
        ++held;
      } else if (const auto experts = lost_of_stack(name, info)) {
        lost_experts.insert(experts->begin(), experts->end());
      } else if (!is_made_anew(name)) {
        lost.push_back(name);
      }
    }
    for (const auto& name : lost_experts) fault(name, "is missing: the base has a stack of experts with it");
    if (held < lost.size()) return;
    for (const auto& name : lost) fault(name, "of the base is missing");
  }

  /// Buffers that programs compute, and a head that is the embeddings.
  bool is_made_anew(std::string_view name) const {
    if (name.ends_with("inv_freq") || name.ends_with("position_ids") || name.ends_with("num_batches_tracked"))
      return true;
    const io::Json& config = candidate_.folder.config;
    const io::Json text = config.value("text_config", io::Json());
    const bool tied = config.value("tie_word_embeddings", io::Json()) == true ||
                      (text.is_object() && text.value("tie_word_embeddings", io::Json()) == true);
    return tied && model::is_head(model::module_path(name));
  }

  /// Of a stack of the base whose experts stand by themselves in the candidate, or are packed so, or of one of its experts,
  /// which of them are missing; nothing: it is not taken apart.
  std::optional<std::vector<std::string>> lost_of_stack(const std::string& name, const io::TensorInfo& info) const {
    constexpr std::string_view part = ".experts.";
    if (std::ranges::find(base_.apart, name, &model::StackedExperts::name) != base_.apart.end()) {
      return std::vector<std::string>{};
    }
    const size_t at = name.find(part);
    const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
    if (at == std::string::npos || is_digit(name[at + part.size()])) return std::nullopt;
    const std::string stem = name.substr(0, at + part.size());
    if (!holds_below(stem)) return std::nullopt;
    std::vector<std::string> lost;
    // By names of another kind none is.
    if (!holds_below(stem + "0.") && !holds_below(stem + "1.")) return lost;
    const int64_t one = model::layer_numbers(name).expert;
    const int64_t experts = info.shape.empty() ? 0 : info.shape[0];
    for (int64_t expert = std::max<int64_t>(one, 0); expert < (one < 0 ? experts : one + 1); ++expert) {
      if (!holds_below(concat(stem, expert, "."))) lost.push_back(concat(stem, expert));
    }
    return lost;
  }

  /// Whether anything of the candidate has a name that begins so.
  bool holds_below(const std::string& begin) const {
    const auto has = [&](const auto& names) {
      const auto at = names.lower_bound(begin);
      return at != names.end() && at->first.starts_with(begin);
    };
    return has(candidate_.folder.quantization.linears) || has(candidate_.folder.tensors.tensors());
  }

  /// Empty: it is what folding leaves; "no": nobody folds anything into it; else what is wrong with it.
  std::string may_be_folded(const model::Parameter& parameter, const TensorView& ours, const TensorView& theirs) {
    if (candidate_.folder.tuned.contains(parameter.name)) return tuned_norm(parameter, ours, theirs);
    if (candidate_.config.architecture == nullptr) {
      if (is_norm(parameter)) return factors_fault(ours, theirs, 0);
      return carries_a_norm(parameter.name, ours, theirs) ? "" : "no";
    }
    for (int64_t layer = 0; layer < candidate_.config.layers; ++layer) {
      for (const auto& group : model::input_groups(candidate_.config, layer)) {
        if (group.norm && parameter.name == group.norm->name + ".weight") {
          return folded_norm(group, ours, theirs, group.norm->offset);
        }
        if (!group.producer.empty() && parameter.name == group.producer + ".bias") {
          return folded_bias(group.producer, ours, theirs);
        }
        const auto module = std::string(model::module_path(parameter.name));
        const auto names = group.names();
        if (parameter.linear && std::ranges::find(names, module) != names.end()) {
          return folded_weight(module, ours, theirs);
        }
      }
    }
    return "no";
  }

  /// Of an architecture that is not known: whether columns are multiplied by what one of the layer's norms gave.
  bool carries_a_norm(const std::string& name, const TensorView& ours, const TensorView& theirs) const {
    if (ours.shape.size() != 2) return false;
    const int64_t layer = model::layer_numbers(name).layer, n = ours.shape[0], k = ours.shape[1];
    for (const auto& [other, info] : candidate_.folder.tensors.tensors()) {
      const bool of_layer = layer >= 0 && model::layer_numbers(other).layer == layer && info.shape == Shape{k};
      if (!of_layer || !other.ends_with("norm.weight") || !base_.folder.tensors.contains(other)) continue;
      const auto norm = candidate_.folder.tensors.load(other), was = base_.folder.tensors.load(other);
      if (norm->shape != was->shape) continue;
      const auto factors = norm_factors(norm.view(), was.view(), 0);
      const auto carried = [&](int64_t row) {
        const auto a = values_of(ours, row * k, row * k + k), b = values_of(theirs, row * k, row * k + k);
        for (size_t c = 0; c < a.size(); ++c) {
          const double wanted = double{b[c]} * double{factors[c].factor};
          if (factors[c].known && std::abs(a[c] - wanted) > most_folding_error * std::abs(wanted) + least_f16)
            return false;
        }
        return true;
      };
      int64_t row = 0;
      while (row < n && carried(row)) ++row;
      if (row == n) return true;
    }
    return false;
  }

  /// Readers that stayed in 16 bit are asked one by one whether they carry the factors; packed ones by their errors.
  std::string folded_norm(const model::InputGroup& group, const TensorView& ours, const TensorView& theirs,
                          float offset) const {
    const auto names = norm_readers(candidate_.config, group);
    const auto packed = [&](const auto& name) { return candidate_.folder.quantization.find(name) != nullptr; };
    const auto scaled = [&](const auto& name) { return !holds_base_values(candidate_, base_, name + ".weight"); };
    if (!std::ranges::any_of(names, packed) && !std::ranges::all_of(names, scaled))
      return "no weight behind it is packed, and not all of them carry its factors";
    return factors_fault(ours, theirs, offset);
  }

  /// Distillation goes by small steps: a factor a channel, none of them far from one where nothing was folded.
  std::string tuned_norm(const model::Parameter& parameter, const TensorView& ours, const TensorView& theirs) const {
    for (const auto& norm : model::all_norms(candidate_.config)) {
      if (parameter.name == norm.name + ".weight") return factors_fault(ours, theirs, norm.offset);
    }
    return "no";
  }

  /// Whether rows that rounding left hardly to be told from plain ones look more like the factors of their biases.
  static bool explains(const std::vector<float>& rows, const std::vector<float>& ours,
                       const std::vector<float>& theirs) {
    double with = 0, without = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (theirs[i] == 0) continue;
      with += std::pow(double{rows[i]} - double{ours[i]} / double{theirs[i]}, 2);
      without += std::pow(double{rows[i]} - 1, 2);
    }
    return with < without;
  }

  std::string folded_bias(const std::string& module, const TensorView& ours, const TensorView& theirs) {
    const int64_t size = element_count(ours.shape);
    const auto a = values_of(ours, 0, size), b = values_of(theirs, 0, size);
    Units units = weights_.units(module);
    if (units.rows.empty()) {
      units.rows = weights_.row_factors(module);
      if (!explains(units.rows, a, b)) return "the rows of its weight are as they were";
    }
    for (size_t i = 0; i < a.size(); ++i) {
      if (std::abs(a[i] - b[i] * units.rows[i]) > 0.25f * std::abs(b[i] * units.rows[i])) {
        return concat("row ", i, " of its weight is scaled by ", units.rows[i]);
      }
    }
    return {};
  }

  /// One that stayed in 16 bit beside packed ones.
  std::string folded_weight(const std::string& module, const TensorView& ours, const TensorView& theirs) {
    const Units units = weights_.units(module);
    if (units.cols.empty() && units.rows.empty()) return "nothing beside it was scaled";
    const int64_t n = ours.shape[0], k = ours.shape[1];
    double noise = 0, signal = 0;
    for (int64_t row = 0; row < n; ++row) {
      const auto a = values_of(ours, row * k, row * k + k), b = values_of(theirs, row * k, row * k + k);
      for (size_t c = 0; c < a.size(); ++c) {
        const double wanted = double{b[c]} * (units.cols.empty() ? 1.0 : double{units.cols[c]}) *
                              (units.rows.empty() ? 1.0 : double{units.rows[static_cast<size_t>(row)]});
        const double error = std::abs(a[c] - wanted);
        noise += error * error, signal += wanted * wanted;
        const bool known = !units.measured && (units.unsure.empty() || units.unsure[c] == 0);
        if (known && error > most_folding_error * std::abs(wanted) + least_f16) {
          return concat(place_text(row * k + static_cast<int64_t>(c), ours.shape),
                        " with the factor of its channel is ", wanted);
        }
      }
    }
    // Two roundings to 16 bit, of it and of the norm.
    return noise > signal * 1e-3 ? "it does not carry the scales of what is before it" : "";
  }

  const model::OpenedModel& candidate_;
  const model::OpenedModel& base_;
  RescaledWeights weights_;
  int64_t same_ = 0, rescaled_ = 0;
  std::vector<std::string> faults_;
};

}  // namespace

Check check_kept(const model::OpenedModel& candidate, const model::OpenedModel& base) {
  return KeptCheck(candidate, base).run();
}

std::set<int64_t> layers_of_other_norms(const model::OpenedModel& candidate, const model::OpenedModel& base) {
  std::set<int64_t> layers;
  for (const auto& parameter : model::parameters(base)) {
    if (!is_norm(parameter) || !candidate.folder.tensors.contains(parameter.name)) continue;
    if (!holds_base_values(candidate, base, parameter.name)) {
      layers.insert(model::layer_numbers(parameter.name).layer);
    }
  }
  return layers;
}

}  // namespace w4q::verify
