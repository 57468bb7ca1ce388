#include "gguf/rope.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/text.h"
#include "model/rope_table.h"

namespace w4q::gguf {
namespace {

// The tensor of Llama 3 holds the result of the scaling, not its parameters. Files written by w4q state them beside it;
// for others those of every published Llama 3 model are tried.
constexpr std::string_view low_key = "w4q.rope.low_freq_factor";
constexpr std::string_view high_key = "w4q.rope.high_freq_factor";
constexpr std::string_view context_key = "w4q.rope.original_max_position_embeddings";

/// Those whose readers take rope_freqs.weight of Llama 3's scaling; to others it is a tensor too many.
constexpr std::array<std::string_view, 2> readers_of_factors = {"llama", "granite"};

/// Writers compute the tensor in fp32 in one of several orders: a few rounding errors of 2^-24 each.
constexpr double factor_tolerance = 0x1p-20;

constexpr std::string_view scaling_type = "%.rope.scaling.type";

io::Json llama3_from_factors(const GgufKeys& keys, const std::vector<float>& factors, double theta, int64_t head_dim) {
  model::RopeConfig rope;
  rope.type = model::RopeType::llama3;
  rope.theta = theta;
  rope.factor = *std::ranges::max_element(factors);
  rope.low_freq_factor = keys.number(low_key).value_or(1);
  rope.high_freq_factor = keys.number(high_key).value_or(4);
  rope.original_max_positions = keys.size(context_key, 8192);
  const bool sane = rope.factor >= 1 && rope.low_freq_factor > 0 && rope.high_freq_factor > rope.low_freq_factor;
  const auto expected = sane ? llama3_factors(rope, head_dim) : std::vector<float>();
  const bool same = std::ranges::equal(
      expected, factors, [](double a, double b) { return std::abs(a - b) <= factor_tolerance * std::abs(a); });
  if (!same) {
    throw keys.error(ErrorCode::unsupported, "rope_freqs.weight", "is no scaling of Llama 3's kind that w4q knows")
        .detail(concat("expected what factor ", rope.factor, ", low_freq_factor ", rope.low_freq_factor,
                       ", high_freq_factor ", rope.high_freq_factor, " and ", rope.original_max_positions,
                       " original positions give"));
  }
  return {{"rope_type", "llama3"},
          {"factor", rope.factor},
          {"low_freq_factor", rope.low_freq_factor},
          {"high_freq_factor", rope.high_freq_factor},
          {"original_max_position_embeddings", rope.original_max_positions}};
}

io::Json yarn_from_keys(const GgufKeys& keys, std::string_view multiplier) {
  for (const std::string_view key : {"%.rope.scaling.attn_factor", "%.rope.scaling.yarn_attn_factor"}) {
    if (keys.number(key).value_or(1) != 1) throw keys.error(ErrorCode::unsupported, key, "is not 1");
  }
  constexpr std::string_view log_multiplier = "%.rope.scaling.yarn_log_multiplier";
  const double stated = keys.number(log_multiplier).value_or(0);
  const bool taken_back = stated == 1 && multiplier == log_multiplier;
  if (stated != 0 && !taken_back) {
    throw keys.error(ErrorCode::unsupported, log_multiplier, concat("is ", stated));
  }
  io::Json scaling = {{"rope_type", "yarn"},
                      {"factor", keys.number("%.rope.scaling.factor").value_or(1)},
                      {"original_max_position_embeddings",
                       keys.size("%.rope.scaling.original_context_length", keys.size("%.context_length"))}};
  if (taken_back) scaling["mscale"] = scaling["mscale_all_dim"] = 1;
  if (const auto fast = keys.number("%.rope.scaling.yarn_beta_fast")) scaling["beta_fast"] = *fast;
  if (const auto slow = keys.number("%.rope.scaling.yarn_beta_slow")) scaling["beta_slow"] = *slow;
  return scaling;
}

[[noreturn]] void refuse(std::string_view what) {
  throw Error(ErrorCode::unsupported, concat("config.json: ", what))
      .detail("GGUF metadata cannot say it")
      .hint("llama.cpp could not run it: repack or quantize --to another format, which other programs load");
}

void yarn_to_gguf(const model::RopeConfig& rope, const std::string& prefix, io::GgufMetadata& metadata) {
  if (!rope.truncate) refuse("yarn without truncation");
  if (std::abs(rope.attention_factor / usual_magnitude(rope.factor) - 1) > 1e-9)
    refuse(concat("yarn's attention_factor ", rope.attention_factor));
  // There are keys for these, which llama.cpp does not heed.
  const model::RopeConfig usual;
  if (rope.beta_fast != usual.beta_fast || rope.beta_slow != usual.beta_slow)
    refuse(concat("yarn's beta_fast ", rope.beta_fast, " and beta_slow ", rope.beta_slow));
  metadata.push_back({prefix + "original_context_length", static_cast<uint32_t>(rope.original_max_positions)});
  metadata.push_back({prefix + "yarn_beta_fast", static_cast<float>(rope.beta_fast)});
  metadata.push_back({prefix + "yarn_beta_slow", static_cast<float>(rope.beta_slow)});
}

}  // namespace

double usual_magnitude(double factor) { return factor <= 1 ? 1.0 : 0.1 * std::log(factor) + 1.0; }

std::vector<float> llama3_factors(const model::RopeConfig& rope, int64_t head_dim) {
  model::RopeConfig plain = rope;
  plain.type = model::RopeType::standard;
  std::vector<float> factors = model::RopeTable(plain, head_dim).inverse_frequencies(1);
  const std::vector<float> scaled = model::RopeTable(rope, head_dim).inverse_frequencies(1);
  for (size_t i = 0; i < factors.size(); ++i) factors[i] /= scaled[i];
  return factors;
}

io::Json rope_scaling_from_gguf(const GgufKeys& keys, const std::vector<float>& factors, double theta, int64_t head_dim,
                                std::string_view multiplier) {
  const std::string type = keys.text(scaling_type).value_or("none");
  if (!factors.empty()) {
    if (type != "none") throw keys.error(ErrorCode::unsupported, scaling_type, "beside rope_freqs.weight");
    return llama3_from_factors(keys, factors, theta, head_dim);
  }
  // Older files state a linear factor without a type.
  const auto older = keys.number("%.rope.scale_linear");
  const double factor = keys.number("%.rope.scaling.factor").value_or(older.value_or(1));
  if (!(factor > 0)) throw keys.error(ErrorCode::bad_file, "%.rope.scaling.factor", "is not above 0");
  if (type == "yarn") return yarn_from_keys(keys, multiplier);
  if (type == "linear" || (type == "none" && older.value_or(1) != 1)) {
    return {{"rope_type", "linear"}, {"factor", factor}};
  }
  if (type != "none") {
    throw keys.error(ErrorCode::unsupported, scaling_type, concat("\"", printable(type), "\""))
        .detail("supported: none, linear, yarn, and Llama 3's rope_freqs.weight");
  }
  return nullptr;
}

void rope_scaling_to_gguf(const model::RopeConfig& rope, const std::string& architecture, io::GgufMetadata& metadata) {
  const std::string prefix = architecture + ".rope.scaling.";
  if (rope.partial_rotary_factor != 1) refuse(concat("partial_rotary_factor ", rope.partial_rotary_factor));
  switch (rope.type) {
    case model::RopeType::standard:
      break;
    case model::RopeType::dynamic:
      refuse("rope type dynamic");
    case model::RopeType::longrope:
      refuse("rope type longrope");
    case model::RopeType::proportional:
      refuse("rope type proportional");
    case model::RopeType::linear:
    case model::RopeType::yarn:
      metadata.push_back({prefix + "type", std::string(rope.type == model::RopeType::linear ? "linear" : "yarn")});
      metadata.push_back({prefix + "factor", static_cast<float>(rope.factor)});
      if (rope.type == model::RopeType::yarn) yarn_to_gguf(rope, prefix, metadata);
      break;
    case model::RopeType::llama3:
      if (std::ranges::find(readers_of_factors, architecture) == readers_of_factors.end())
        refuse(concat("rope type llama3 of ", architecture));
      metadata.push_back({std::string(low_key), static_cast<float>(rope.low_freq_factor)});
      metadata.push_back({std::string(high_key), static_cast<float>(rope.high_freq_factor)});
      metadata.push_back({std::string(context_key), static_cast<uint32_t>(rope.original_max_positions)});
      break;
  }
}

}  // namespace w4q::gguf
