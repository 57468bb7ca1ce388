#include "verify/weights/computation.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <type_traits>

#include "core/text.h"
#include "io/system.h"

namespace w4q::verify {
namespace {

/// Programs write reals with as many digits as an fp32 takes, and some the inverse of a factor.
bool same(double a, double b) { return std::abs(a - b) <= 1e-6 * std::max(std::abs(a), std::abs(b)); }

class ConfigComparison {
 public:
  template <class Value>
  void compare(std::string_view key, const Value& ours, const Value& theirs) {
    if constexpr (std::is_same_v<Value, bool>) {
      if (ours != theirs) add(key, ours ? "true" : "false", theirs ? "true" : "false");
    } else if constexpr (std::is_floating_point_v<Value>) {
      if (!same(ours, theirs)) add(key, concat(ours), concat(theirs));
    } else {
      if (ours != theirs) add(key, concat(ours), concat(theirs));
    }
  }

  /// Of what has no short text.
  void require(std::string_view key, bool same) {
    if (!same) differences_.push_back(concat(key, " is not the base's"));
  }

  std::vector<std::string> take() { return std::move(differences_); }

 private:
  void add(std::string_view key, std::string_view ours, std::string_view theirs) {
    differences_.push_back(concat(key, " is ", ours, ", in the base ", theirs));
  }

  std::vector<std::string> differences_;
};

void compare_mixtures(const model::MixtureConfig& ours, const model::MixtureConfig& theirs,
                      ConfigComparison& comparison) {
  comparison.compare("the number of experts", ours.experts, theirs.experts);
  comparison.compare("num_experts_per_tok", ours.chosen, theirs.chosen);
  comparison.compare("moe_intermediate_size", ours.intermediate, theirs.intermediate);
  comparison.compare("the size of shared experts", ours.shared_intermediate, theirs.shared_intermediate);
  comparison.require("scoring_func", ours.scoring == theirs.scoring);
  comparison.compare("norm_topk_prob", ours.renormalizes, theirs.renormalizes);
  comparison.compare("routed_scaling_factor", ours.scale, theirs.scale);
  comparison.compare("n_group", ours.groups, theirs.groups);
  comparison.compare("topk_group", ours.chosen_groups, theirs.chosen_groups);
}

/// Attention of one layer but for its positions and window, which are compared for all layers at once.
bool attends_alike(const model::AttentionConfig& ours, const model::AttentionConfig& theirs) {
  return ours.heads == theirs.heads && ours.kv_heads == theirs.kv_heads && ours.head_dim == theirs.head_dim &&
         ours.window == theirs.window && ours.rope.type == theirs.rope.type &&
         same(ours.rope.theta, theirs.rope.theta) &&
         same(ours.rope.partial_rotary_factor, theirs.rope.partial_rotary_factor) && same(ours.scale, theirs.scale) &&
         same(ours.soft_cap, theirs.soft_cap) && same(ours.clip, theirs.clip) &&
         same(ours.temperature, theirs.temperature) && ours.output_gate == theirs.output_gate &&
         ours.sinks == theirs.sinks && ours.keys_are_values == theirs.keys_are_values &&
         ours.value_norm == theirs.value_norm && ours.keys_of == theirs.keys_of;
}

void compare_layers(const model::ModelConfig& ours, const model::ModelConfig& theirs, ConfigComparison& comparison) {
  for (int64_t layer = 0; layer < ours.layers; ++layer) {
    const std::string of = concat(" of layer ", layer);
    comparison.compare("the delta net" + of, ours.has_delta_net(layer), theirs.has_delta_net(layer));
    comparison.compare("the mixture" + of, ours.has_mixture(layer), theirs.has_mixture(layer));
    if (!ours.intermediate_sizes.empty() || !theirs.intermediate_sizes.empty())
      comparison.compare("intermediate_size" + of, ours.intermediate_of(layer), theirs.intermediate_of(layer));
    if (ours.attention.empty() && theirs.attention.empty()) continue;  // the same in all
    comparison.require("attention" + of, attends_alike(ours.attention_of(layer), theirs.attention_of(layer)));
  }
}

}  // namespace

std::vector<std::string> computed_otherwise(const model::ModelConfig& ours, const model::ModelConfig& theirs) {
  ConfigComparison comparison;
  comparison.require("hidden_act", ours.activation == theirs.activation);
  comparison.compare("the limit of the activation", ours.activation_limit, theirs.activation_limit);
  comparison.compare("the slope of the activation", ours.activation_slope, theirs.activation_slope);
  comparison.compare("the factor of embeddings", ours.embedding_scale, theirs.embedding_scale);
  comparison.compare("the factor of the residual stream", ours.residual_scale, theirs.residual_scale);
  comparison.compare("the factor of logits", ours.logit_scale, theirs.logit_scale);
  comparison.compare("final_logit_softcapping", ours.logit_cap, theirs.logit_cap);
  compare_mixtures(ours.mixture, theirs.mixture, comparison);
  comparison.require("the shape of delta nets", ours.delta == theirs.delta);
  if (ours.layers == theirs.layers) compare_layers(ours, theirs, comparison);
  return comparison.take();
}

namespace {

constexpr std::string_view of_programs[] = {
    "torch_dtype",          "dtype",    "transformers_version", "_name_or_path", "use_cache",
    "_attn_implementation", "auto_map", "quantization_config"};

/// What a config says by a key; null: nothing. transformers 5 has positions' settings in an object of their own.
io::Json stated_by(const io::Json& config, const std::string& key) {
  const auto own = config.find(key);
  if (own != config.end()) return *own;
  const auto positions = config.find("rope_parameters");
  const bool moved = key == "rope_theta" || key == "partial_rotary_factor";
  return moved && positions != config.end() && positions->is_object() ? positions->value(key, io::Json()) : io::Json();
}

void compare_stated(const io::Json& ours, const io::Json& theirs, const std::string& path,
                    std::vector<std::string>& differences) {
  for (const auto& [key, value] : theirs.items()) {
    if (std::ranges::find(of_programs, key) != std::end(of_programs)) continue;
    const io::Json found = stated_by(ours, key);
    if (value.is_object() && found.is_object()) {
      compare_stated(found, value, concat(path, key, "."), differences);
    } else if (key == "rope_parameters" && value.is_object() && found.is_null()) {
      compare_stated(ours, value, path, differences);
    } else if (!value.is_null() && !found.is_null() && found != value) {
      differences.push_back(
          concat(path, printable(key), " is ", printable(found.dump()), ", in the base ", printable(value.dump())));
    }
  }
}

}  // namespace

bool ends_alike(const checkpoint::Folder& ours, const model::ModelConfig& our_config, const checkpoint::Folder& theirs,
                const model::ModelConfig& their_config) {
  if (our_config.eos_tokens.empty() || their_config.eos_tokens.empty()) return true;
  if (our_config.eos_tokens == their_config.eos_tokens) return true;
  const auto has_more = [](const checkpoint::Folder& folder) {
    return io::path_exists(folder.path / "generation_config.json");
  };
  const auto stated = [](const io::Json& config) {
    const auto text = config.find("text_config");
    const io::Json& inner = text != config.end() && text->is_object() ? *text : config;
    return inner.value("eos_token_id", config.value("eos_token_id", io::Json()));
  };
  return has_more(ours) != has_more(theirs) && stated(ours.config) == stated(theirs.config);
}

std::vector<std::string> stated_otherwise(const io::Json& ours, const io::Json& theirs) {
  std::vector<std::string> differences;
  compare_stated(ours, theirs, {}, differences);
  return differences;
}

}  // namespace w4q::verify
