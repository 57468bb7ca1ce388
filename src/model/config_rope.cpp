#include "model/config_rope.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.h"
#include "core/text.h"
#include "model/architecture.h"

namespace w4q::model {
namespace {

struct RopeTypeRow {
  std::string_view name;
  RopeType type;
};

constexpr std::array rope_types = {
    RopeTypeRow{"default", RopeType::standard}, RopeTypeRow{"linear", RopeType::linear},
    RopeTypeRow{"dynamic", RopeType::dynamic},  RopeTypeRow{"llama3", RopeType::llama3},
    RopeTypeRow{"yarn", RopeType::yarn},        RopeTypeRow{"longrope", RopeType::longrope},
    RopeTypeRow{"su", RopeType::longrope},      RopeTypeRow{"proportional", RopeType::proportional},
};

/// Layer types under which the newer style may nest the parameters.
constexpr std::array<std::string_view, 2> layer_types = {"full_attention", "sliding_attention"};

/// The object with the parameters, and where they stand.
struct RopeSource {
  io::Json object;
  std::string path;
};

/// Parameters that are nested by the types of layers, which must be the same for all; or those that are not.
RopeSource unnest(const ConfigReader& reader, const RopeSource& outer) {
  RopeSource result = outer;
  const ConfigReader parameters(outer.object, reader.source(), outer.path);
  bool nested = false;
  for (const auto layer_type : layer_types) {
    const io::Json* own = parameters.find(layer_type);
    if (own == nullptr) continue;
    if (nested && result.object != *own) {
      throw Error(ErrorCode::unsupported,
                  concat(reader.source(), ": ", outer.path, " differs between full_attention and sliding_attention"))
          .detail("w4q computes one rotary embedding for all layers");
    }
    result = {*own, concat(outer.path, layer_type, ".")};
    nested = true;
  }
  return result;
}

/// Where rope parameters stand; empty where nothing is said.
std::string_view stated_key(const ConfigReader& reader) {
  for (const std::string_view key : {"rope_scaling", "rope_parameters"}) {
    const io::Json* object = reader.find(key);
    if (object != nullptr && !(object->is_object() && object->empty())) return key;
  }
  return {};
}

RopeType parse_type(const ConfigReader& parameters, bool text_mrope) {
  auto name = parameters.text("rope_type");
  if (!name) name = parameters.text("type");
  if (!name) name = "default";
  const bool sections = parameters.find("mrope_section") != nullptr || *name == "mrope";
  if (sections && (!text_mrope || *name == "mrope")) name = text_mrope ? "default" : "mrope";
  // Phi-3's older name of longrope.
  if (*name == "yarn" && parameters.find("short_factor") != nullptr) name = "longrope";
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

std::vector<double> parse_factors(const ConfigReader& parameters, std::string_view key, int64_t pairs) {
  const io::Json* list = parameters.find(key);
  if (list == nullptr) parameters.missing(key);
  std::vector<double> factors;
  for (const io::Json& entry : list->is_array() ? *list : io::Json::array()) {
    factors.push_back(entry.is_number() ? entry.get<double>() : 0.0);
  }
  const bool sound = std::ranges::all_of(factors, [](double f) { return std::isfinite(f) && f > 0; });
  if (!sound || std::ssize(factors) != pairs) {
    parameters.refuse(key, concat("expected a number above 0 for each of ", pairs, " pairs"));
  }
  return factors;
}

void parse_longrope(const ConfigReader& parameters, const ModelConfig& config, int64_t pairs, RopeConfig& rope) {
  rope.short_factors = parse_factors(parameters, "short_factor", pairs);
  rope.long_factors = parse_factors(parameters, "long_factor", pairs);
  const auto original = static_cast<double>(rope.original_max_positions);
  rope.factor = parameters.positive("factor", static_cast<double>(config.max_positions) / original);
  const double inferred =
      rope.factor <= 1 || original <= 1 ? 1.0 : std::sqrt(1 + std::log(rope.factor) / std::log(original));
  rope.attention_factor = parameters.positive("attention_factor", inferred);
}

/// Channels of a head that turn. Throws bad_file unless they are pairs.
int64_t rotary_channels(const ConfigReader& reader, const RopeConfig& rope, int64_t head_dim) {
  const auto rotary = static_cast<int64_t>(static_cast<double>(head_dim) * rope.partial_rotary_factor);
  const bool none = rope.type == RopeType::standard && rotary == 0;
  const bool pairs = rope.type == RopeType::proportional || (rotary >= 2 && rotary % 2 == 0);
  if (none || pairs) return rotary;
  throw Error(ErrorCode::bad_file, concat(reader.source(), ": partial_rotary_factor ", rope.partial_rotary_factor,
                                          " rotates ", rotary, " of ", head_dim, " channels of a head"))
      .detail("expected an even number of channels");
}

}  // namespace

io::Json rope_parameters(const ConfigReader& reader, const ArchitectureRow& row) {
  const std::string_view key = stated_key(reader);
  if (key.empty()) return row.rope_parameters.empty() ? io::Json::object() : io::Json::parse(row.rope_parameters);
  if (!reader.find(key)->is_object()) reader.refuse(key, "expected an object");
  return *reader.find(key);
}

namespace {

/// Parameters of layers of one type, as transformers reads them: rope_parameters are nested by the types, and say nothing where
/// they are not; rope_scaling is of layers without a window, and says more of them. `truncate` stands beside the types.
RopeSource rope_of_type(const ConfigReader& reader, std::string_view layer_type, const ArchitectureRow& row) {
  constexpr std::string_view newer = "rope_parameters", older = "rope_scaling", truncate = "truncate";
  const std::string type(layer_type), none = concat(newer, ".");
  const io::Json own = row.rope_parameters.empty() ? io::Json::object() : io::Json::parse(row.rope_parameters);
  const io::Json* scaling = reader.find(older);
  const bool nested_scaling = scaling != nullptr && scaling->is_object() && scaling->contains(type);
  const io::Json* stated = nested_scaling ? scaling : reader.find(newer);
  const ConfigReader outer(stated == nullptr ? own : *stated, reader.source(), none);
  const io::Json* nested = outer.find(type);
  RopeSource result{nested == nullptr ? io::Json::object() : *nested, concat(none, type, ".")};
  const ConfigReader checked(result.object, reader.source(), result.path);  // that it is an object
  if (scaling != nullptr && !nested_scaling && layer_type == "full_attention") {
    const ConfigReader parameters(*scaling, reader.source(), concat(older, "."));
    if (stated == nullptr) result.path = concat(older, ".");
    result.object.update(*scaling);
  }
  result.object.erase(std::string(truncate));
  if (const io::Json* beside = outer.find(truncate); beside != nullptr) result.object[std::string(truncate)] = *beside;
  return result;
}

/// Where the parameters that are asked for stand.
RopeSource find_rope(const ConfigReader& reader, const RopeQuery& query, const ArchitectureRow& row) {
  if (!query.layer_type.empty()) return rope_of_type(reader, query.layer_type, row);
  return unnest(reader, {rope_parameters(reader, row), concat(stated_key(reader), ".")});
}

/// The part of a head that turns, which not all architectures leave to config.json.
double read_rotary_part(const ConfigReader& reader, const ConfigReader& parameters, const RopeQuery& query,
                        RopeType type, ModelConfig& config) {
  constexpr std::string_view key = "partial_rotary_factor";
  const ArchitectureRow& row = *config.architecture;
  const auto part_or = [&](const ConfigReader& from, double otherwise) {
    const double part = from.number(key).value_or(otherwise);
    if (part < 0 || part > 1) from.refuse(key, "expected a number from 0 to 1");
    return part;
  };
  const double part = part_or(parameters, part_or(reader, query.part.value_or(row.partial_rotary_factor)));
  if (part == 1 || row.partial_rotary || type == RopeType::proportional) return part;
  if (type != RopeType::standard) {
    throw Error(ErrorCode::unsupported, concat(reader.source(), ": ", key, " ", part, " of scaled positions"))
        .detail(concat("heads of ", row.model_type, " turn as a whole"))
        .hint(concat("remove ", key));
  }
  config.warnings.push_back(
      concat(reader.source(), ": ", key, " ", part, " is not read: heads of ", row.model_type, " turn as a whole"));
  return 1;
}

}  // namespace

RopeConfig parse_rope(const ConfigReader& reader, const RopeQuery& query, ModelConfig& config) {
  const ArchitectureRow& row = *config.architecture;
  const RopeSource source = find_rope(reader, query, row);
  const ConfigReader parameters(source.object, reader.source(), source.path);
  RopeConfig rope;
  rope.type = parse_type(parameters, config.architecture->text_mrope);
  const bool theta_stated = !query.theta_key.empty() && reader.find(query.theta_key) != nullptr;
  if (parameters.find("rope_theta") == nullptr && !theta_stated && query.theta_key == RopeQuery{}.theta_key) {
    config.warnings.push_back(concat(reader.source(), ": rope_theta is missing; ", query.theta, " is assumed"));
  }
  rope.theta =
      parameters.positive("rope_theta", theta_stated ? reader.positive(query.theta_key) : std::optional(query.theta));
  rope.partial_rotary_factor = read_rotary_part(reader, parameters, query, rope.type, config);
  const int64_t rotary = rotary_channels(reader, rope, query.head_dim);
  if (rotary == 0) rope.partial_rotary_factor = 0;
  if (const io::Json* sections = parameters.find("mrope_section"); sections != nullptr && sections->is_array()) {
    for (const io::Json& each : *sections) {
      rope.picture_pairs.push_back(each.is_number_integer() ? each.get<int64_t>() : 0);
    }
  }
  rope.original_max_positions = config.max_positions;
  const bool stretched =
      rope.type == RopeType::llama3 || rope.type == RopeType::yarn || rope.type == RopeType::longrope;
  if (stretched) {
    constexpr std::string_view key = "original_max_position_embeddings";
    const int64_t inner =
        row.original_positions > 0 ? row.original_positions : parameters.size(key, config.max_positions);
    rope.original_max_positions = query.layer_type.empty() ? reader.size(key, inner) : inner;
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
    case RopeType::proportional:
      rope.factor = parameters.positive("factor", 1.0);
      break;
    case RopeType::longrope:
      parse_longrope(parameters, config, rotary / 2, rope);
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
