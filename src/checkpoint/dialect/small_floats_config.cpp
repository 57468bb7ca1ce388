#include "checkpoint/dialect/small_floats_config.h"

#include <algorithm>
#include <map>

#include "checkpoint/dialect/config.h"
#include "checkpoint/fused.h"
#include "core/error.h"
#include "core/text.h"

namespace w4q::checkpoint {
namespace {

using formats::ScaleType;
using formats::Scheme;
using io::Json;

/// Of several formats in one checkpoint.
constexpr std::string_view mixed_format = "mixed-precision";
constexpr std::string_view nvfp4_format = "nvfp4-pack-quantized", mxfp4_format = "mxfp4-pack-quantized",
                           mxfp8_format = "mxfp8-quantized", fp8_format = "float-quantized";

bool is_mx(const Scheme& scheme) { return scheme.scale == ScaleType::e8m0 && scheme.block == 32; }

std::string_view format_of(const Scheme& scheme) {
  if (is_mx(scheme)) return scheme.bits == 4 ? mxfp4_format : mxfp8_format;
  return scheme.bits == 4 ? nvfp4_format : fp8_format;
}

/// Linears that are described alike.
using Groups = std::vector<std::vector<const DialectLinear*>>;

Groups groups_of(const std::vector<DialectLinear>& linears) {
  const auto key = [](const DialectLinear& linear) {
    return std::pair(linear.scheme.bits, linear.scheme.block);  // the types of scales are the tensors' own
  };
  Groups groups;
  for (const DialectLinear& linear : linears) {
    const auto same =
        std::ranges::find_if(groups, [&](const auto& group) { return key(*group.front()) == key(linear); });
    if (same == groups.end()) {
      groups.push_back({&linear});
    } else {
      same->push_back(&linear);
    }
  }
  return groups;
}

Json names_of(const std::vector<const DialectLinear*>& group) {
  Json names = Json::array();
  for (const DialectLinear* linear : group) names.push_back(linear->name);
  return names;
}

/// The head is a module even where its weight is the embedding table's, and then not among `kept`.
std::vector<std::string> ignored(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
  const auto is_head = [](std::string_view name) { return name == "lm_head" || name.ends_with(".lm_head"); };
  std::vector<std::string> result = kept;
  const bool packed_head = std::ranges::any_of(linears, is_head, &DialectLinear::name);
  if (!packed_head && std::ranges::none_of(result, is_head)) result.emplace_back("lm_head");
  return result;
}

Json describe_weights(const Scheme& scheme) {
  const bool nvfp4 = format_of(scheme) == nvfp4_format, mx = is_mx(scheme), blocks = scheme.block == 128;
  const char* strategy = nvfp4                                   ? "tensor_group"
                         : mx                                    ? "group"
                         : blocks                                ? "block"
                         : scheme.block == formats::whole_tensor ? "tensor"
                                                                 : "channel";
  Json weights = {{"num_bits", scheme.bits},
                  {"type", "float"},
                  {"symmetric", true},
                  {"strategy", strategy},
                  {"group_size", nvfp4 || mx ? Json(scheme.block) : Json(nullptr)},
                  {"dynamic", false},
                  {"actorder", nullptr},
                  {"block_structure", blocks ? Json::array({128, 128}) : Json(nullptr)},
                  {"observer", "minmax"},
                  {"observer_kwargs", Json::object()}};
  // A reader tells MXFP8 from other floats by this.
  if (mx) weights["scale_dtype"] = "torch.uint8";
  return weights;
}

constexpr std::string_view nvfp4_weights = "W4A16_NVFP4", nvfp4_both = "NVFP4", static_fp8 = "FP8";

/// ModelOpt's name of an algorithm that leaves activations alone, or quantizes them while the model runs.
std::string_view algorithm(const Scheme& scheme) {
  if (scheme.bits == 4) return nvfp4_weights;
  if (is_mx(scheme)) return "MXFP8";
  if (scheme.block == formats::whole_tensor) return static_fp8;
  return scheme.block == 128 ? "FP8_PB_WO" : "FP8_PER_CHANNEL_PER_TOKEN";
}

Json modelopt_weights(const Scheme& scheme) {
  Json weights = {{"dynamic", false}, {"num_bits", scheme.bits}, {"type", "float"}};
  if (scheme.bits == 4 || is_mx(scheme)) weights["group_size"] = scheme.block;
  if (scheme.block == formats::whole_row) weights["strategy"] = "channel";
  if (scheme.block == formats::whole_tensor) weights["strategy"] = "tensor";
  return weights;
}

/// FP8 with one scale that calibration found.
Json fixed_fp8() {
  return {{"num_bits", 8},         {"type", "float"},
          {"symmetric", true},     {"strategy", "tensor"},
          {"group_size", nullptr}, {"dynamic", false},
          {"actorder", nullptr},   {"block_structure", nullptr},
          {"observer", "minmax"},  {"observer_kwargs", Json::object()}};
}

/// What goes with the weights of a group of config_groups: a scale that was measured, or such as programs find while they
/// run; null: activations stay as they are.
Json inputs_of(const Json& group) {
  const Json& weights = group.at("weights");
  Json inputs = fixed_fp8();
  if (group.at("format") == nvfp4_format) {
    inputs.update({{"num_bits", 4}, {"strategy", "tensor_group"}, {"group_size", 16}, {"dynamic", "local"}});
    return inputs;
  }
  if (group.at("format") != fp8_format) return nullptr;
  if (weights.at("strategy") == "tensor") return inputs;
  inputs["dynamic"] = true;
  inputs["observer"] = nullptr;
  const bool blocks = weights.at("strategy") == "block";
  inputs["strategy"] = blocks ? "group" : "token";
  if (blocks) inputs["group_size"] = 128;
  return inputs;
}

/// Whether servers have a group's experts with quantized inputs alone: FP8 whose inputs have scales that are found as a
/// model runs.
bool needs_dynamic_inputs(const std::vector<const DialectLinear*>& group) {
  const Scheme& scheme = group.front()->scheme;
  if (format_of(scheme) != fp8_format || scheme.block == formats::whole_tensor) return false;
  return std::ranges::any_of(group, [](const auto* linear) { return !expert_place(linear->name).mixture.empty(); });
}

}  // namespace

bool is_float_format(std::string_view format) noexcept {
  return format == nvfp4_format || format == mxfp4_format || format == mxfp8_format || format == fp8_format;
}

bool holds_float_groups(const DialectSource& source) {
  const std::string format = config_text(source, {"format"}, "");
  if (format != mixed_format) return is_float_format(format);
  const auto groups = source.config.find("config_groups");
  if (groups == source.config.end() || !groups->is_object() || groups->empty()) return false;
  return std::ranges::all_of(*groups, [](const Json& group) {
    if (!group.is_object()) return false;
    const auto weights = group.find("weights");
    return weights != group.end() && weights->is_object() && weights->contains("type") && (*weights)["type"] == "float";
  });
}

bool is_naive_float(const Json& quantization) {
  if (quantization.value("format", Json()) != "naive-quantized") return false;
  const auto groups = quantization.find("config_groups");
  if (groups == quantization.end() || !groups->is_object() || groups->empty()) return false;
  return std::ranges::all_of(*groups, [](const Json& group) {
    const auto weights = group.find("weights");
    return weights != group.end() && weights->is_object() && weights->value("type", Json()) == "float" &&
           weights->value("num_bits", Json()) == 8;
  });
}

Json describe_float_groups(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
  const Groups groups = groups_of(linears);
  Json described = Json::object();
  for (size_t i = 0; i < groups.size(); ++i) {
    const Scheme& scheme = groups[i].front()->scheme;
    described[concat("group_", i)] = {{"targets", groups.size() == 1 ? Json::array({"Linear"}) : names_of(groups[i])},
                                      {"format", format_of(scheme)},
                                      {"weights", describe_weights(scheme)},
                                      {"input_activations", nullptr},
                                      {"output_activations", nullptr}};
    Json& group = described[concat("group_", i)];
    if (needs_dynamic_inputs(groups[i])) group["input_activations"] = inputs_of(group);
  }
  const auto other = [&](const auto& group) {
    return format_of(group.front()->scheme) != format_of(linears[0].scheme);
  };
  const std::string_view format = linears.empty()                      ? nvfp4_format
                                  : std::ranges::any_of(groups, other) ? mixed_format
                                                                       : format_of(linears[0].scheme);
  std::vector<std::string> packed;
  for (const DialectLinear& linear : linears) packed.push_back(linear.name);
  return {{"quant_method", "compressed-tensors"}, {"format", format},
          {"quantization_status", "compressed"},  {"version", "0.15.0"},
          {"config_groups", described},           {"ignore", names_wherever(ignored(linears, kept), packed)},
          {"kv_cache_scheme", nullptr},           {"global_compression_ratio", nullptr}};
}

void state_float_activations(Json& quantization, bool inputs, bool cache) {
  if (inputs) {
    for (Json& group : quantization.at("config_groups")) group["input_activations"] = inputs_of(group);
  }
  if (cache) quantization["kv_cache_scheme"] = fixed_fp8();
}

void state_modelopt_activations(Json& quantization, bool inputs, bool cache) {
  if (cache) quantization["kv_cache_scheme"] = {{"dynamic", false}, {"num_bits", 8}, {"type", "float"}};
  if (!inputs) return;
  const auto state = [](Json& algorithm) {
    if (algorithm == nvfp4_weights) algorithm = nvfp4_both;
  };
  state(quantization["quant_algo"]);
  if (quantization.contains("quantized_layers")) {
    for (Json& layer : quantization["quantized_layers"]) state(layer["quant_algo"]);
  }
  for (Json& group : quantization.at("config_groups")) {
    const Json& weights = group.at("weights");
    const bool fixed = weights.at("num_bits") == 4 || weights.value("strategy", "") == "tensor";
    if (!fixed) continue;
    group["input_activations"] = weights;
    group["input_activations"].erase("strategy");
  }
}

Json describe_modelopt(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
  const Groups groups = groups_of(linears);
  Json described = Json::object(), layers = Json::object();
  for (size_t i = 0; i < groups.size(); ++i) {
    const Scheme& scheme = groups[i].front()->scheme;
    described[concat("group_", i)] = {{"targets", groups.size() == 1 ? Json::array({"Linear"}) : names_of(groups[i])},
                                      {"weights", modelopt_weights(scheme)}};
    for (const DialectLinear* linear : groups[i]) {
      layers[linear->name] = {{"quant_algo", algorithm(scheme)}};
      if (scheme.block > 0) layers[linear->name]["group_size"] = scheme.block;
    }
  }
  Json result = {{"quant_method", "modelopt"},
                 {"quant_algo", groups.size() == 1 ? algorithm(linears[0].scheme) : "MIXED_PRECISION"},
                 {"producer", {{"name", "modelopt"}, {"version", "0.47.0"}}},
                 {"config_groups", described},
                 {"ignore", ignored(linears, kept)}};
  if (groups.size() == 1 && linears[0].scheme.block > 0) result["group_size"] = linears[0].scheme.block;
  if (groups.size() > 1) result["quantized_layers"] = layers;
  return result;
}

Json modelopt_side_config(Json quantization, const std::vector<io::PlannedTensor>&) {
  Json inner = {{"quant_algo", quantization.at("quant_algo")},
                {"kv_cache_quant_algo", quantization.contains("kv_cache_scheme") ? Json("FP8") : Json(nullptr)},
                {"exclude_modules", quantization.at("ignore")}};
  for (const char* key : {"group_size", "quantized_layers"}) {
    if (quantization.contains(key)) inner[key] = quantization.at(key);
  }
  return {{"producer", quantization.at("producer")}, {"quantization", inner}};
}

Json describe_fp8(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
  Json result = {{"quant_method", "fp8"},
                 {"fmt", "e4m3"},
                 {"activation_scheme", "dynamic"},
                 {"weight_block_size", Json::array({128, 128})},
                 {"modules_to_not_convert", ignored(linears, kept)}};
  const auto powers = [](const DialectLinear& linear) { return linear.scheme.scale == ScaleType::e8m0; };
  if (!linears.empty() && std::ranges::all_of(linears, powers)) result["scale_fmt"] = "ue8m0";
  return result;
}

}  // namespace w4q::checkpoint
