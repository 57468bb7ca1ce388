#include "checkpoint/dialect/byte_integers_config.h"

#include <algorithm>

#include "checkpoint/dialect/compressed_tensors_config.h"

namespace w4q::checkpoint {
namespace {

using io::Json;

constexpr std::string_view int_format = "int-quantized", naive_format = "naive-quantized";

std::string text_of(const Json& object, const char* key) {
  const auto found = object.is_object() ? object.find(key) : object.end();
  return object.is_object() && found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

const Json& member(const Json& object, const char* key) {
  static const Json nothing;
  if (!object.is_object()) return nothing;
  const auto found = object.find(key);
  return found == object.end() ? nothing : *found;
}

/// Of groups of compressed-tensors, whose weights are floats where they do not say otherwise.
bool holds_integers(const Json& quantization) {
  const Json& groups = member(quantization, "config_groups");
  if (!groups.is_object() || groups.empty()) return false;
  return std::ranges::none_of(groups, [](const Json& group) {
    const std::string type = text_of(member(group, "weights"), "type");
    return !type.empty() && type != "int";
  });
}

}  // namespace

std::string quark_weights(const Json& quantization) {
  if (text_of(quantization, "quant_method") != "quark") return {};
  const Json& weight = member(member(quantization, "global_quant_config"), "weight");
  // Of several steps the last one is what is stored.
  return text_of(weight.is_array() && !weight.empty() ? weight.back() : weight, "dtype");
}

bool states_byte_integers(const Json& quantization) {
  const std::string method = text_of(quantization, "quant_method"), format = text_of(quantization, "format");
  if (method == "compressed-tensors") {
    return (format == int_format || format == naive_format) && holds_integers(quantization);
  }
  if (method == "modelopt") {
    const std::string algorithm = text_of(quantization, "quant_algo");
    return algorithm.starts_with("W8A8_SQ") || algorithm.starts_with("INT8");
  }
  return method == "w8a8_int8" || method == "blockwise_int8" || quark_weights(quantization) == "int8";
}

Json describe_byte_integers(const std::vector<DialectLinear>& linears, const std::vector<std::string>& kept) {
  Json result = describe_compressed_tensors("0.18.0", linears, kept);
  const bool bytes = std::ranges::all_of(linears, [](const DialectLinear& linear) {
    return linear.scheme.bits == 8 && linear.scheme.block == formats::whole_row && !linear.scheme.asymmetric;
  });
  result["format"] = bytes ? int_format : naive_format;
  return result;
}

}  // namespace w4q::checkpoint
