#include "pipeline/gguf_targets.h"

#include <algorithm>
#include <array>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "model/layer_plan.h"

namespace w4q::pipeline {
namespace {

using enum GgmlType;

constexpr std::array<GgufTarget, 29> targets{{
    {"gguf", "every tensor in the type that holds it", 0, f32, f32, false, true},
    {"gguf-f32", "32 bits", 0, f32, f32, false},
    {"gguf-f16", "16 bits", 1, f16, f16, false},
    {"gguf-bf16", "16 bits", 32, bf16, bf16, false},
    {"gguf-q8_0", "8.5 bits a weight", 7, q8_0, q8_0},
    {"gguf-q4_0", "4.5 bits by ggml's own rule, tables Q8_0", 2, q4_0, q8_0},
    {"gguf-q4_1", "5 bits by ggml's own rule, tables Q8_0", 3, q4_1, q8_0},
    {"gguf-q6_k", "6.5625 bits; as llama.cpp's Q6_K", 18, q6_k, q6_k},
    {"gguf-q5_k", "5.5 bits in all layers", 17, q5_k, q6_k},
    {"gguf-q5_k_m", "llama.cpp's mix of Q5_K and Q6_K", 17, q5_k, q6_k},
    {"gguf-q5_k_s", "as llama.cpp's: Q5_K, head Q6_K", 16, q5_k, q6_k},
    {"gguf-q5_1", "6 bits", 9, q5_1, q6_k},
    {"gguf-q5_0", "5.5 bits", 8, q5_0, q6_k},
    {"gguf-q4_k", "4.5 bits in all layers", 15, q4_k, q6_k},
    {"gguf-q4_k_m", "llama.cpp's mix of Q4_K and Q6_K", 15, q4_k, q6_k},
    {"gguf-q4_k_s", "llama.cpp's mix of Q4_K and Q5_K", 14, q4_k, q6_k},
    {"gguf-iq4_nl", "4.5 bits, a table of levels; as llama.cpp's IQ4_NL", 25, iq4_nl, q6_k},
    {"gguf-iq4_xs", "4.25 bits, a table of levels; as llama.cpp's IQ4_XS", 30, iq4_xs, q6_k},
    {"gguf-mxfp4", "4.25 bits: E2M1, a power of two for 32 weights; tables Q8_0", 38, mxfp4, q8_0},
    {"gguf-q3_k", "3.4375 bits in all layers", 12, q3_k, q6_k},
    {"gguf-q3_k_l", "llama.cpp's mix of Q3_K and Q5_K", 13, q3_k, q6_k},
    {"gguf-q3_k_m", "llama.cpp's mix of Q3_K, Q4_K and Q5_K", 12, q3_k, q6_k},
    {"gguf-q3_k_s", "as llama.cpp's: Q3_K, head Q6_K", 11, q3_k, q6_k},
    {"gguf-iq3_s", "3.4375 bits in all layers, points of a lattice of four", 26, iq3_s, q6_k},
    {"gguf-iq3_xxs", "3.0625 bits in all layers, points of a lattice of four", 23, iq3_xxs, q6_k},
    {"gguf-iq2_s", "2.5625 bits in all layers, points of a lattice of eight", 28, iq2_s, q6_k},
    {"gguf-iq2_xs", "2.3125 bits in all layers, points of a lattice of eight", 20, iq2_xs, q6_k},
    {"gguf-iq2_xxs", "2.0625 bits in all layers, points of a lattice of eight", 19, iq2_xxs, q6_k},
    {"gguf-q2_k", "llama.cpp's mix of Q2_K, Q3_K and Q4_K: 2.625 bits and more", 10, q2_k, q6_k},
}};

/// Which layers a rule of a mix is for.
enum class Layers {
  all,
  first_two,
  first_four,
  first_sixteenth,
  first_eighth,
  ends,  ///< the first and last eighth, and every third between them
};

bool holds(Layers layers, int64_t layer, int64_t count) noexcept {
  switch (layers) {
    case Layers::all:
      return true;
    case Layers::first_two:
      return layer < 2;
    case Layers::first_four:
      return layer < 4;
    case Layers::first_sixteenth:
      return layer < count / 16;
    case Layers::first_eighth:
      return layer < count / 8;
    case Layers::ends:
      return layer < count / 8 || layer >= 7 * count / 8 || (layer - count / 8) % 3 == 2;
  }
  return false;
}

/// What else a rule asks for.
enum class Only { always, shared_values, uncalibrated };

bool holds(Only only, const GgufPlace& place) noexcept {
  return only == Only::always || (only == Only::shared_values ? place.heads_per_value >= 4 : !place.calibrated);
}

/// A rule of a mix; the first that holds decides.
struct MixRule {
  std::string_view target;
  GgufRole role;
  Layers layers;
  GgmlType type;
  Only only = Only::always;
};

using enum GgufRole;

constexpr std::array<MixRule, 26> rules{{
    {"gguf-q5_k_m", value, Layers::ends, q6_k},
    {"gguf-q5_k_m", down, Layers::ends, q6_k},
    {"gguf-q5_k_m", query_key_value, Layers::all, q6_k},
    {"gguf-q4_k_m", value, Layers::ends, q6_k},
    {"gguf-q4_k_m", down, Layers::ends, q6_k},
    {"gguf-q4_k_m", query_key_value, Layers::all, q5_k},
    {"gguf-q4_k_s", value, Layers::first_four, q5_k},
    {"gguf-q4_k_s", down, Layers::first_eighth, q5_k},
    {"gguf-iq4_nl", value, Layers::all, q5_k, Only::shared_values},
    {"gguf-iq4_nl", down, Layers::first_eighth, q5_k, Only::uncalibrated},
    {"gguf-iq4_xs", value, Layers::all, q5_k, Only::shared_values},
    {"gguf-iq4_xs", down, Layers::first_eighth, q5_k, Only::uncalibrated},
    {"gguf-q3_k_l", value, Layers::all, q5_k},
    {"gguf-q3_k_l", down, Layers::all, q5_k},
    {"gguf-q3_k_l", output, Layers::all, q5_k},
    {"gguf-q3_k_l", query_key_value, Layers::all, q4_k},
    {"gguf-q3_k_m", value, Layers::first_two, q5_k},
    {"gguf-q3_k_m", value, Layers::all, q4_k},
    {"gguf-q3_k_m", down, Layers::first_sixteenth, q5_k},
    {"gguf-q3_k_m", down, Layers::all, q4_k},
    {"gguf-q3_k_m", output, Layers::all, q4_k},
    {"gguf-q3_k_m", query_key_value, Layers::all, q4_k},
    {"gguf-q2_k", value, Layers::all, q4_k, Only::shared_values},
    {"gguf-q2_k", value, Layers::all, q3_k},
    {"gguf-q2_k", down, Layers::all, q3_k},
    {"gguf-q2_k", output, Layers::all, q3_k},
}};

bool is_mix(std::string_view target) noexcept {
  return target == "gguf-q3_k_s" || target == "gguf-q5_k_s" ||
         std::ranges::any_of(rules, [&](const MixRule& rule) { return rule.target == target; });
}

GgufRole role_of(model::Role role) {
  switch (role) {
    case model::Role::query:
      return query;
    case model::Role::key:
      return key;
    case model::Role::value:
      return value;
    case model::Role::output:
      return output;
    case model::Role::gate:
      return gate;
    case model::Role::down:
      return down;
    default:
      return up;
  }
}

}  // namespace

GgufPlace gguf_place(const model::ModelConfig& config, const model::Parameter& parameter, std::string_view name,
                     bool calibrated) {
  const std::string_view module = model::module_path(parameter.name);
  GgufPlace result{.layers = config.layers, .tied = config.tied_embeddings, .calibrated = calibrated};
  if (model::is_embedding(module) || model::is_head(module)) {
    result.role = model::is_head(module) ? head : embeddings;
    result.calibrated = false;
  } else if (name.starts_with("per_layer_token_embd")) {
    result.role = embeddings;
    result.tied = result.calibrated = false;
  } else if (const auto place = model::find_linear(config, module)) {
    // What a reader's mixes know of delta nets: one name.
    result.role = name.find(".attn_qkv.") != std::string_view::npos               ? query_key_value
                  : place->linear.name.find(".linear_attn.") != std::string::npos ? up
                                                                                  : role_of(place->linear.role);
    result.layer = place->layer;
    result.heads_per_value = config.heads / std::max<int64_t>(1, config.kv_heads);
  }
  return result;
}

std::span<const GgufTarget> gguf_targets() noexcept { return targets; }

const GgufTarget& gguf_target(const std::string& name) {
  const auto row = std::ranges::find(targets, name, &GgufTarget::name);
  if (row != targets.end()) return *row;
  std::vector<std::string> names;
  for (const auto& target : targets) names.emplace_back(target.name);
  throw Error(ErrorCode::bad_argument, concat("--to ", printable(name), ": no such target"))
      .detail("of GGUF files: " + join(names));
}

GgmlType gguf_type(const GgufTarget& target, const GgufPlace& place) {
  const bool table = place.role == head || (place.role == embeddings && (place.tied || !is_mix(target.name)));
  if (table) return target.head;
  GgmlType type = target.linear;
  for (const MixRule& rule : rules) {
    if (rule.target != target.name || rule.role != place.role) continue;
    if (!holds(rule.layers, place.layer, place.layers) || !holds(rule.only, place)) continue;
    type = rule.type;
    break;
  }
  // Of the models with 80 layers, where eight heads share one of values.
  const bool large = is_mix(target.name) && place.role == value && place.layers == 80 && place.heads_per_value > 1;
  return large && (type == q3_k || type == q4_k) ? q5_k : type;
}

GgmlType gguf_type_for_rows(GgmlType type, int64_t k) {
  if (k % describe(type).block == 0) return type;
  GgmlType other = type;
  switch (type) {
    case q2_k:
    case q3_k:
    case iq4_xs:
    case iq3_s:
    case iq3_xxs:
    case iq2_s:
    case iq2_xs:
    case iq2_xxs:
      other = iq4_nl;
      break;
    case q4_k:
      other = q5_0;
      break;
    case q5_k:
      other = q5_1;
      break;
    case q6_k:
      other = q8_0;
      break;
    default:
      break;
  }
  return k % describe(other).block == 0 ? other : f16;
}

}  // namespace w4q::pipeline
