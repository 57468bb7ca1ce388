// Rules on what settings say of codes that are there: what readers of compressed-tensors and ModelOpt refuse, or take for
// other codes than those that are stored.
#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/low_precision.h"
#include "core/text.h"
#include "verify/contents/contents.h"

namespace w4q::verify {
namespace {

using Kind = StoredLinear::Kind;

/// A group of config_groups that says how weights are stored.
struct WeightsGroup {
  std::string name;
  io::Json group, weights;
};

std::vector<WeightsGroup> groups_of_weights(const io::Json& quantization) {
  std::vector<WeightsGroup> found;
  if (!quantization.is_object()) return found;
  const io::Json groups = quantization.value("config_groups", io::Json());
  if (!groups.is_object()) return found;
  for (const auto& [name, group] : groups.items()) {
    if (!group.is_object()) continue;
    const io::Json weights = group.value("weights", io::Json());
    if (weights.is_object()) found.push_back({name, group, weights});
  }
  return found;
}

std::vector<const StoredLinear*> packed_linears(const StoredContents& contents) {
  std::vector<const StoredLinear*> found;
  for (const auto& linear : contents.linears()) {
    if (linear.kind != Kind::plain) found.push_back(&linear);
  }
  return found;
}

bool any_ends_with(const StoredContents& contents, std::initializer_list<std::string_view> ends) {
  return std::ranges::any_of(contents.tensors().tensors(), [&](const auto& tensor) {
    return std::ranges::any_of(ends, [&](std::string_view end) { return tensor.first.ends_with(end); });
  });
}

// ---- compressed-tensors ----

/// What QuantizationArgs of compressed-tensors refuses, so that nothing is loaded; empty: nothing.
std::string refused_by_args(const io::Json& weights) {
  const io::Json size = weights.value("group_size", io::Json()), strategy = weights.value("strategy", io::Json()),
                 block = weights.value("block_structure", io::Json()), dynamic = weights.value("dynamic", io::Json());
  const bool has_size = size.is_number_integer() && size > 0;
  const bool grouped = strategy == "group" || strategy == "tensor_group";
  const std::string how = printable(strategy.dump());
  if (size.is_number_integer() && (size < -1 || (size == 0 && strategy.is_null())))
    return concat("has group_size ", size.dump(), ", expected a number above 0, or -1 for whole rows");
  if (grouped && !has_size)
    return concat("has group_size ", printable(size.dump()), " beside strategy ", how, ", which needs one");
  if (!grouped && !strategy.is_null() && has_size)
    return concat("has group_size ", size.dump(), " beside strategy ", how, ", which has no groups");
  if (strategy == "block" && block.is_null()) return "has strategy \"block\" without a block_structure";
  if (strategy.is_string() && strategy != "block" && !block.is_null())
    return concat("has a block_structure beside strategy ", how, ", which has no blocks");
  if (strategy == "token" && dynamic != true) return "has strategy \"token\" of weights, which are not dynamic";
  return {};
}

/// How scales lie over weights: as is said or, where that is left out, as its readers take it.
std::string strategy_of(const io::Json& weights) {
  const io::Json stated = weights.value("strategy", io::Json()), size = weights.value("group_size", io::Json());
  if (stated.is_string()) return stated.get<std::string>();
  if (!size.is_number_integer()) return "tensor";
  return size > 0 ? "group" : "channel";
}

/// Scales of NVFP4 have a factor before them, those of other floats in groups have none; and one scale is not one a row.
void strategies_of_floats(const StoredContents& contents, const WeightsGroup& group, ContentsFindings& findings) {
  const auto packed = packed_linears(contents);
  const std::string strategy = strategy_of(group.weights);
  const auto are = [&](Kind kind) {
    return std::ranges::all_of(packed, [&](const auto* linear) { return linear->kind == kind; });
  };
  const auto rows = [&](const StoredLinear* linear) {
    return linear->kind == Kind::fp8 && !linear->scales.empty() && linear->n > 1 && linear->experts == 0 &&
           element_count(contents.tensors().at(linear->scales).shape) == linear->n;
  };
  const bool inferred = !group.weights.value("strategy", io::Json()).is_string();
  const std::string how = concat(inferred ? "leaves the strategy to be taken for " : "says \"strategy\": ", '"',
                                 strategy, "\" in ", printable(group.name));
  if (are(Kind::nvfp4) && strategy == "group") {
    findings.fault("config.json", concat(how, ", but NVFP4 has \"tensor_group\": scales and a factor before them"));
  } else if (are(Kind::mxfp4) && strategy == "tensor_group") {
    findings.fault("config.json", concat(how, ", but MXFP4 has \"group\": there is no factor before its scales"));
  } else if (inferred && strategy == "tensor" && std::ranges::all_of(packed, rows)) {
    findings.fault("config.json",
                   concat(how, ", but ", printable(packed.front()->scales), " has shape ",
                          shape_text(contents.tensors().at(packed.front()->scales).shape), ", one of each channel"));
  }
}

/// Types of one byte, by what settings call them.
std::string_view type_of_scales(const io::Json& stated) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 3> types = {
      {{"torch.uint8", "E8M0"}, {"torch.float8_e8m0fnu", "E8M0"}, {"torch.float8_e4m3fn", "E4M3"}}};
  for (const auto& [name, type] : types) {
    if (stated == name) return type;
  }
  return {};
}
std::string_view type_of_scales(DType stored) {
  if (stored == DType::u8 || stored == DType::f8_e8m0) return "E8M0";
  return stored == DType::f8_e4m3 ? "E4M3" : std::string_view();
}

void arguments_of_groups(const StoredContents& contents, ContentsFindings& findings) {
  if (!contents.has_method("compressed-tensors")) return;
  const auto packed = packed_linears(contents);
  if (packed.empty()) return;
  const auto groups = groups_of_weights(contents.quantization());
  for (const auto& [name, group, weights] : groups) {
    if (const std::string refused = refused_by_args(weights); !refused.empty())
      findings.fault("config.json", concat(refused, " in ", printable(name), ": its readers refuse that"));
    if (groups.size() == 1) strategies_of_floats(contents, {name, group, weights}, findings);
    const io::Json dynamic = weights.value("dynamic", io::Json());
    if (dynamic == true || dynamic == "local")
      findings.fault("config.json", concat("says that weights of ", printable(name),
                                           " are scaled as they are used (\"dynamic\": ", printable(dynamic.dump()),
                                           "), but their scales are stored"));
    // An order by activations moves inputs from group to group, and says where to.
    const io::Json order = weights.value("actorder", io::Json());
    if ((order == "group" || order == "dynamic" || order == true) &&
        !any_ends_with(contents, {".weight_g_idx", ".g_idx"}))
      findings.fault("config.json", concat("says \"actorder\": ", printable(order.dump()), " in ", printable(name),
                                           ", but no linear has a weight_g_idx: inputs go with other groups"));
    const std::string_view type = type_of_scales(weights.value("scale_dtype", io::Json()));
    const auto otherwise = [&](const StoredLinear* linear) {
      const auto stored =
          linear->scales.empty() ? std::string_view() : type_of_scales(contents.tensors().at(linear->scales).dtype);
      return !stored.empty() && stored != type;
    };
    if (groups.size() == 1 && !type.empty() && std::ranges::all_of(packed, otherwise))
      findings.fault("config.json", concat("says that scales are ", type, " (scale_dtype) in ", printable(name),
                                           ", but ", printable(packed.front()->scales), " is ",
                                           dtype_name(contents.tensors().at(packed.front()->scales).dtype)));
  }
}

/// Of formats with one way to store codes: the tensor that has them, its type, and what the codes are.
struct StoredFormat {
  std::string_view format, suffix;
  DType dtype;
  Kind kind;
};
constexpr StoredFormat formats[] = {{"pack-quantized", ".weight_packed", DType::i32, Kind::integer},
                                    {"nvfp4-pack-quantized", ".weight_packed", DType::u8, Kind::nvfp4},
                                    {"mxfp4-pack-quantized", ".weight_packed", DType::u8, Kind::mxfp4},
                                    {"float-quantized", ".weight", DType::f8_e4m3, Kind::fp8},
                                    {"mxfp8-quantized", ".weight", DType::f8_e4m3, Kind::fp8},
                                    {"int-quantized", ".weight", DType::i8, Kind::integer}};

/// Whether a linear is stored as the format says; that of whole models in several ways, and others, are not asked.
bool is_stored_as(const StoredContents& contents, const StoredLinear& linear, std::string_view format) {
  const auto row = std::ranges::find(formats, format, &StoredFormat::format);
  if (row == std::end(formats)) return format != "dense";
  return linear.kind == row->kind && linear.codes.ends_with(row->suffix) &&
         contents.tensors().at(linear.codes).dtype == row->dtype;
}

/// The format of a group goes before that of all; where there is one group, the two are one. Programs choose the reader of
/// all linears by it.
void formats_of_groups(const StoredContents& contents, ContentsFindings& findings) {
  const io::Json& quantization = contents.quantization();
  if (!contents.has_method("compressed-tensors")) return;
  const auto packed = packed_linears(contents);
  const auto groups = groups_of_weights(quantization);
  if (packed.empty()) return;
  const bool several = std::ranges::any_of(groups, [](const auto& one) { return one.group.contains("format"); });
  if (groups.size() != 1 && several) return;
  const io::Json of_all = quantization.value("format", io::Json()),
                 own = groups.size() == 1 ? groups[0].group.value("format", io::Json()) : io::Json();
  if (of_all.is_null() && own.is_null() && !groups.empty())
    return findings.fault("config.json", concat("has no format beside its config_groups, although ",
                                                printable(packed.front()->codes), " is packed: readers need it"));
  if (own.is_string() && of_all.is_string() && own != of_all && of_all != "mixed-precision")
    return findings.fault("config.json", concat("says \"format\": ", printable(of_all.dump()), ", but its only group ",
                                                printable(own.dump())));
  const io::Json& stated = own.is_string() ? own : of_all;
  if (!stated.is_string()) return;
  const auto format = stated.get<std::string>();
  const auto is_otherwise = [&](const StoredLinear* linear) { return !is_stored_as(contents, *linear, format); };
  if (!std::ranges::all_of(packed, is_otherwise)) return;
  const std::string& other = packed.front()->codes;
  findings.fault("config.json", concat("says \"format\": ", printable(stated.dump()), ", but nothing is stored so: ",
                                       printable(other), " is ", dtype_name(contents.tensors().at(other).dtype)));
}

// ---- what codes are ----

/// What small floats are by their definition.
struct FloatKind {
  Kind kind;
  std::string_view name;
  int64_t bits, group;  ///< group 0: any
};
constexpr FloatKind float_kinds[] = {
    {Kind::nvfp4, "NVFP4", 4, 16}, {Kind::mxfp4, "MXFP4", 4, 32}, {Kind::fp8, "FP8", 8, 0}};

/// What all packed linears are; null: of several kinds, or no small floats.
const FloatKind* kind_of_all(const StoredContents& contents) {
  const auto packed = packed_linears(contents);
  if (packed.empty()) return nullptr;
  const Kind first = packed.front()->kind;
  if (!std::ranges::all_of(packed, [&](const auto* linear) { return linear->kind == first; })) return nullptr;
  const auto row = std::ranges::find(float_kinds, first, &FloatKind::kind);
  return row == std::end(float_kinds) ? nullptr : &*row;
}

/// ModelOpt's names of what all weights are; of those with several kinds, or of integers, nothing.
constexpr std::array<std::pair<std::string_view, Kind>, 9> algorithms = {{{"NVFP4", Kind::nvfp4},
                                                                          {"W4A16_NVFP4", Kind::nvfp4},
                                                                          {"NVFP4_AWQ", Kind::nvfp4},
                                                                          {"FP8", Kind::fp8},
                                                                          {"FP8_PER_CHANNEL_PER_TOKEN", Kind::fp8},
                                                                          {"FP8_PB_WO", Kind::fp8},
                                                                          {"MXFP4", Kind::mxfp4},
                                                                          {"W4A16_AWQ", Kind::integer},
                                                                          {"W4A8_AWQ", Kind::integer}}};

void settings_of_modelopt(const StoredContents& contents, ContentsFindings& findings) {
  const io::Json& quantization = contents.quantization();
  const FloatKind* const kind = kind_of_all(contents);
  const auto has_small_scales = [&](const StoredLinear& linear) {
    return !linear.scales.empty() && contents.tensors().at(linear.scales).dtype == DType::f8_e4m3;
  };
  if (contents.has_method("modelopt") && quantization.value("quant_algo", io::Json()) == "W4A16_AWQ" &&
      std::ranges::any_of(contents.linears(), has_small_scales))
    return findings.fault("config.json", "says quant_algo \"W4A16_AWQ\", but scales are F8_E4M3, as those of NVFP4");
  if (!contents.has_method("modelopt") || kind == nullptr || quantization.contains("quantized_layers")) return;
  const io::Json algorithm = quantization.value("quant_algo", io::Json());
  const auto row = std::ranges::find_if(algorithms, [&](const auto& known) { return algorithm == known.first; });
  if (algorithm.is_null()) {
    findings.fault("config.json", concat("has no quant_algo, although all that is packed is ", kind->name,
                                         ": programs do not know how to read it"));
  } else if (row != algorithms.end() && row->second != kind->kind) {
    findings.fault("config.json",
                   concat("says quant_algo ", printable(algorithm.dump()), ", but all that is packed is ", kind->name));
  } else if (algorithm == "NVFP4" && !any_ends_with(contents, {"input_scale"})) {
    findings.notes.push_back(
        "config.json says quant_algo \"NVFP4\", whose inputs are scaled, too, but no linear has an input_scale: "
        "W4A16_NVFP4 was meant");
  }
  const io::Json size = quantization.value("group_size", io::Json());
  if (kind->group > 0 && size.is_number_integer() && size != kind->group)
    findings.fault("config.json", concat("says group_size ", size.dump(), ", ", kind->name, " has ", kind->group));
  for (const auto& [name, group, weights] : groups_of_weights(quantization)) {
    const auto hold = [&](const char* key, const io::Json& wanted, bool asked) {
      const io::Json stated = weights.value(key, io::Json());
      if (!asked || stated.is_null() || stated == wanted) return;
      findings.fault("config.json", concat("says ", key, " ", printable(stated.dump()), " in ", printable(name), ", ",
                                           kind->name, " has ", wanted.dump()));
    };
    hold("num_bits", kind->bits, weights.value("num_bits", io::Json()).is_number());
    hold("type", "float", true);
    hold("group_size", kind->group, kind->group > 0);
    if (weights.value("dynamic", io::Json()) == true)
      findings.fault("config.json", concat("says that weights of ", printable(name),
                                           " are scaled as they are used, but their scales are stored"));
  }
}

/// Where no block is stated transformers takes 128 × 128, servers one scale for a matrix; null is that to all.
void blocks_of_fp8(const StoredContents& contents, ContentsFindings& findings) {
  constexpr int64_t usual = 128;
  const io::Json& quantization = contents.quantization();
  if (!contents.has_method("fp8") || !quantization.value("weight_block_size", io::Json()).is_null()) return;
  const bool unsaid = !quantization.contains("weight_block_size");
  const auto blocks = [](int64_t size) { return (size + usual - 1) / usual; };
  bool noted = false;
  for (const auto& linear : contents.linears()) {
    if (linear.kind != Kind::fp8 || !linear.scales.ends_with("_scale_inv") || linear.experts > 0) continue;
    const Shape& shape = contents.tensors().at(linear.scales).shape;
    const bool in_blocks = shape.size() == 2 && shape[0] < linear.n && shape[1] < linear.k && shape[0] * shape[1] > 1;
    if (!in_blocks) continue;
    const std::string found =
        concat(unsaid ? "has no weight_block_size" : "says weight_block_size null", ", but ", printable(linear.scales),
               " has a scale for each block: shape ", shape_text(shape));
    if (!unsaid || shape != Shape{blocks(linear.n), blocks(linear.k)})
      return findings.fault("config.json",
                            unsaid ? found + ", which are not of 128 × 128, as transformers takes them" : found);
    if (!std::exchange(noted, true)) {
      findings.notes.push_back(
          concat("config.json: ", found,
                 ": transformers takes blocks of 128 × 128, as they are; vLLM "
                 "and SGLang take one scale a matrix and do not load it. [128, 128] says it to all"));
    }
  }
}

/// GPTQ's readers expect a head in codes where config.json says that it was packed.
void promised_head(const StoredContents& contents, ContentsFindings& findings) {
  const io::Json& quantization = contents.quantization();
  if (!contents.has_method("gptq") || quantization.value("lm_head", io::Json()) != true) return;
  if (packed_linears(contents).empty() || any_ends_with(contents, {"lm_head.qweight"})) return;
  findings.fault("config.json", "says that the head is quantized (\"lm_head\": true), but there is no lm_head.qweight");
}

}  // namespace

std::span<const ContentsRule> setting_rules() {
  static constexpr ContentsRule rules[] = {
      {"groups say what their readers take", false, arguments_of_groups},
      {"formats of groups are those of the codes", false, formats_of_groups},
      {"ModelOpt's settings are those of the codes", false, settings_of_modelopt},
      {"blocks of FP8 are stated", false, blocks_of_fp8},
      {"a head that is promised is there", false, promised_head},
  };
  return rules;
}

}  // namespace w4q::verify
