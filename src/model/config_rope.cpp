#include "model/config_rope.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.h"
#include "core/text.h"

namespace w4q::model {
namespace {

struct RopeTypeRow {
  std::string_view name;
  RopeType type;
};

constexpr std::array rope_types = {
    RopeTypeRow{"default", RopeType::standard}, RopeTypeRow{"linear", RopeType::linear},
    RopeTypeRow{"dynamic", RopeType::dynamic},  RopeTypeRow{"llama3", RopeType::llama3},
    RopeTypeRow{"yarn", RopeType::yarn},
};

/// Layer types under which the newer style may nest the parameters.
constexpr std::array<std::string_view, 2> layer_types = {"full_attention", "sliding_attention"};

/// The object with the parameters; null where the config has none.
struct RopeSource {
  const io::Json* object = nullptr;
  std::string path;
};

/// Steps into parameters nested by layer type, when all of them are the same.
RopeSource unnest(const ConfigReader& reader, const RopeSource& outer) {
  RopeSource result = outer;
  const ConfigReader parameters(*outer.object, reader.source(), outer.path);
  for (const auto layer_type : layer_types) {
    const io::Json* nested = parameters.find(layer_type);
    if (nested == nullptr) continue;
    if (result.object != outer.object && *result.object != *nested) {
      throw Error(ErrorCode::unsupported,
                  concat(reader.source(), ": ", outer.path, " differs between full_attention and sliding_attention"))
          .detail("w4q computes one rotary embedding for all layers");
    }
    result = {nested, concat(outer.path, layer_type, ".")};
  }
  return result;
}

RopeSource find_source(const ConfigReader& reader) {
  for (const std::string_view key : {"rope_scaling", "rope_parameters"}) {
    const io::Json* object = reader.find(key);
    if (object == nullptr || (object->is_object() && object->empty())) continue;
    return unnest(reader, {object, concat(key, ".")});
  }
  return {};
}

RopeType parse_type(const ConfigReader& parameters) {
  auto name = parameters.text("rope_type");
  if (!name) name = parameters.text("type");
  if (!name) name = "default";
  if (parameters.find("mrope_section") != nullptr) name = "mrope";
  const auto row = std::ranges::find(rope_types, *name, &RopeTypeRow::name);
  if (row != rope_types.end()) return row->type;
  std::vector<std::string> known;
  for (const auto& type : rope_types) known.emplace_back(type.name);
  throw Error(ErrorCode::unsupported, concat(parameters.source(), ": rope type \"", printable(*name), "\""))
      .detail(concat("supported: ", join(known)));
}

double yarn_magnitude(double factor, double scale) { return factor <= 1 ? 1.0 : 0.1 * scale * std::log(factor) + 1.0; }

void parse_yarn(const ConfigReader& parameters, const ModelConfig& config, RopeConfig& rope) {
  const double stretch = static_cast<double>(config.max_positions) / static_cast<double>(rope.original_max_positions);
  rope.factor = parameters.positive("factor", stretch);
  // As in the reference, 0 means the default for these four.
  const auto or_default = [&](std::string_view key, double fallback) {
    const double value = parameters.number(key).value_or(0);
    return value != 0 ? value : fallback;
  };
  rope.beta_fast = or_default("beta_fast", 32);
  rope.beta_slow = or_default("beta_slow", 1);
  if (rope.beta_fast < 0) parameters.refuse("beta_fast", "expected a number above 0");
  if (rope.beta_slow < 0) parameters.refuse("beta_slow", "expected a number above 0");
  rope.truncate = parameters.boolean("truncate").value_or(true);
  const double mscale = or_default("mscale", 0), mscale_all = or_default("mscale_all_dim", 0);
  const double inferred = mscale != 0 && mscale_all != 0
                              ? yarn_magnitude(rope.factor, mscale) / yarn_magnitude(rope.factor, mscale_all)
                              : yarn_magnitude(rope.factor, 1);
  rope.attention_factor = parameters.number("attention_factor").value_or(inferred);
  if (!std::isfinite(rope.attention_factor)) parameters.refuse("mscale_all_dim", "gives no finite attention factor");
  if (rope.theta <= 1) parameters.refuse("rope_theta", "yarn needs a number above 1");
}

void parse_llama3(const ConfigReader& parameters, RopeConfig& rope) {
  rope.factor = parameters.positive("factor");
  rope.low_freq_factor = parameters.positive("low_freq_factor");
  rope.high_freq_factor = parameters.positive("high_freq_factor");
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    parameters.refuse("high_freq_factor", "must be above low_freq_factor");
  }
}

}  // namespace

RopeConfig parse_rope(const ConfigReader& reader, double default_theta, ModelConfig& config) {
  const RopeSource source = find_source(reader);
  static const io::Json none = io::Json::object();
  const ConfigReader parameters(source.object ? *source.object : none, reader.source(), source.path);
  RopeConfig rope;
  rope.type = parse_type(parameters);
  if (parameters.find("rope_theta") == nullptr && reader.find("rope_theta") == nullptr) {
    config.warnings.push_back(concat(reader.source(), ": rope_theta is missing; ", default_theta, " is assumed"));
  }
  rope.theta = parameters.positive("rope_theta", reader.positive("rope_theta", default_theta));
  rope.partial_rotary_factor =
      parameters.positive("partial_rotary_factor", reader.positive("partial_rotary_factor", 1.0));
  const auto rotary = static_cast<int64_t>(static_cast<double>(config.head_dim) * rope.partial_rotary_factor);
  if (rope.partial_rotary_factor > 1 || rotary < 2 || rotary % 2 != 0) {
    throw Error(ErrorCode::bad_file, concat(reader.source(), ": partial_rotary_factor ", rope.partial_rotary_factor,
                                            " rotates ", rotary, " of ", config.head_dim, " channels of a head"))
        .detail("expected an even number of channels, at least 2");
  }
  rope.original_max_positions = config.max_positions;
  if (rope.type == RopeType::llama3 || rope.type == RopeType::yarn) {
    constexpr std::string_view key = "original_max_position_embeddings";
    rope.original_max_positions = reader.size(key, parameters.size(key, config.max_positions));
  }
  switch (rope.type) {
    case RopeType::standard:
      break;
    case RopeType::linear:
      rope.factor = parameters.positive("factor");
      break;
    case RopeType::dynamic:
      rope.factor = parameters.positive("factor");
      if (rope.factor < 1) parameters.refuse("factor", "expected a number of at least 1");
      if (rotary < 4) parameters.refuse("rope_type", "dynamic scaling needs at least 4 rotated channels");
      break;
    case RopeType::llama3:
      parse_llama3(parameters, rope);
      break;
    case RopeType::yarn:
      parse_yarn(parameters, config, rope);
      break;
  }
  return rope;
}

}  // namespace w4q::model
