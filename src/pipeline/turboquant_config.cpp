#include "pipeline/turboquant_config.h"

#include <array>
#include <string>

#include "core/error.h"
#include "core/text.h"
#include "formats/scheme.h"

namespace w4q::pipeline {
namespace {

constexpr std::array<std::string_view, 4> seed_names{"different", "shared", "alternating", "per_layer"};

class Fields {
 public:
  Fields(const io::Json& json, std::string_view source) : json_(json), source_(source) {
    if (!json.is_object()) throw Error(ErrorCode::bad_file, concat(source, ": is not an object"));
  }

  int64_t integer(const char* key, int64_t fallback, int64_t least, int64_t most) const {
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return fallback;
    if (!found->is_number_integer() || *found < least || *found > most) {
      throw Error(ErrorCode::bad_file, concat(source_, ": \"", key, "\" is ", found->dump()))
          .detail(concat("expected an integer from ", least, " to ", most));
    }
    return found->get<int64_t>();
  }

  std::string text(const char* key, std::string fallback) const {
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return fallback;
    if (!found->is_string()) throw Error(ErrorCode::bad_file, concat(source_, ": \"", key, "\" is not a text"));
    return found->get<std::string>();
  }

  bool flag(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return false;
    if (!found->is_boolean()) throw Error(ErrorCode::bad_file, concat(source_, ": \"", key, "\" is no true or false"));
    return found->get<bool>();
  }

 private:
  const io::Json& json_;
  std::string_view source_;
};

void refuse_unknown(const Fields& fields, std::string_view source) {
  const auto refuse = [&](std::string_view what, std::string_view why) {
    throw Error(ErrorCode::unsupported, concat(source, ": ", what)).detail(why);
  };
  if (const auto rotation = fields.text("rotation", "qr"); rotation != "hadamard") {
    refuse(concat("rotation \"", printable(rotation), "\""),
           "its matrices come out of a random number generator and LAPACK and are not stored; expected hadamard");
  }
  if (fields.flag("entropy_coding")) refuse("entropy-coded indices", "they have a codec of their own");
  const auto norms = fields.text("norm_codec", "fp32");
  if (norms != "fp32" && norms != "fp16")
    refuse(concat("norm_codec \"", printable(norms), "\""), "expected fp32 or fp16");
  const auto embeddings = fields.text("embedding_quant", "none");
  if (embeddings != "none") refuse("quantized embeddings", "they have a format of their own");
}

}  // namespace

uint64_t TurboQuantConfig::pass_seed(size_t pass, uint64_t index) const noexcept {
  const uint64_t base = pass == 0 || seeds == Seeds::shared ? seed : residual_seed;
  return seeds == Seeds::per_layer ? base + index * turboquant_seed_step : base;
}

TurboQuantConfig parse_turboquant_config(const io::Json& json, std::string_view source) {
  const Fields fields(json, source);
  refuse_unknown(fields, source);
  constexpr int64_t most_seed = int64_t{1} << 62;
  TurboQuantConfig config;
  config.bits = static_cast<int>(fields.integer("bit_width", 4, 2, 4));
  const auto group = json.find("group_size");
  const bool rows = group != json.end() && group->is_null();
  config.group = rows ? formats::whole_row : static_cast<int>(fields.integer("group_size", 128, 1, 1 << 30));
  config.seed = static_cast<uint64_t>(fields.integer("seed", 42, 0, most_seed));
  config.residual_bits = static_cast<int>(fields.integer("residual_bit_width", 0, 2, 4));
  config.residual_seed = static_cast<uint64_t>(fields.integer("residual_seed", 1042, 0, most_seed));
  config.half_norms = fields.text("norm_codec", "fp32") == "fp16";
  config.skip_lm_head = fields.flag("skip_lm_head");
  const auto seeds = fields.text("rotation_strategy", "different");
  for (size_t i = 0; i < seed_names.size(); ++i) {
    if (seeds != seed_names[i]) continue;
    config.seeds = static_cast<TurboQuantConfig::Seeds>(i);
    return config;
  }
  throw Error(ErrorCode::unsupported, concat(source, ": rotation_strategy \"", printable(seeds), "\""))
      .detail("known: different, shared, alternating, per_layer");
}

io::Json to_json(const TurboQuantConfig& config) {
  const auto or_null = [](int value) { return value == 0 ? io::Json() : io::Json(value); };
  return {{"bit_width", config.bits},
          {"group_size", or_null(config.group)},
          {"seed", config.seed},
          {"skip_embeddings", false},
          {"skip_lm_head", config.skip_lm_head},
          {"residual_bit_width", or_null(config.residual_bits)},
          {"residual_seed", config.residual_seed},
          {"rotation", "hadamard"},
          {"rotation_strategy", seed_names[static_cast<size_t>(config.seeds)]},
          {"norm_codec", config.half_norms ? "fp16" : "fp32"},
          {"entropy_coding", false}};
}

}  // namespace w4q::pipeline
