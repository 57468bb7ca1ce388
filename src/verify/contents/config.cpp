// Rules on what config.json says that no program can do, or that the files it describes contradict: activations and rotary
// embeddings that nobody has, types that are none, and how codes are said to be scaled.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/low_precision.h"
#include "core/convert.h"
#include "core/text.h"
#include "model/architecture.h"
#include "verify/contents/contents.h"

namespace w4q::verify {
namespace {

using Kind = StoredLinear::Kind;

template <size_t count>
bool is_one_of(const io::Json& value, const std::array<std::string_view, count>& known) {
  return value.is_string() && std::ranges::find(known, value.get<std::string>()) != known.end();
}

/// Whether programs read config.json with classes of their own that lie beside it.
bool has_own_code(const StoredContents& contents) { return !contents.stated({"auto_map"}).is_null(); }

/// Whether the architecture is one that w4q would decode, whatever it cannot read of its config.
bool is_of_known_name(const StoredContents& contents) {
  const io::Json& text = contents.config().value("text_config", io::Json());
  const io::Json type = (text.is_object() ? text : contents.config()).value("model_type", io::Json());
  return type.is_string() && std::ranges::any_of(model::architectures(), [&](const auto* row) {
           return row->model_type == type.template get<std::string>();
         });
}

/// Some programs go by the one, some by the other.
void class_and_type(const StoredContents& contents, ContentsFindings& findings) {
  const io::Json names = contents.config().value("architectures", io::Json());
  const io::Json type = contents.config().value("model_type", io::Json());
  if (!names.is_array() || names.empty() || !names[0].is_string() || !type.is_string()) return;
  const auto of_class = [&](const auto* row) { return row->class_name == names[0].get<std::string>(); };
  const auto of_type = [&](const auto* row) { return row->model_type == type.get<std::string>(); };
  const auto rows = model::architectures();
  const auto by_class = std::ranges::find_if(rows, of_class), by_type = std::ranges::find_if(rows, of_type);
  if (by_class == rows.end() || by_type == rows.end() || (*by_class)->model_type == (*by_type)->model_type) return;
  if ((*by_type)->class_name == (*by_class)->class_name) return;
  findings.fault("config.json", concat("says architectures ", printable(names[0].dump()), ", but model_type ",
                                       printable(type.dump()), ", which is that of ", (*by_type)->class_name));
}

// ---- names ----

constexpr std::array<std::string_view, 31> activations = {"silu",
                                                          "swish",
                                                          "gelu",
                                                          "gelu_new",
                                                          "gelu_fast",
                                                          "gelu_10",
                                                          "gelu_python",
                                                          "gelu_tanh",
                                                          "quick_gelu",
                                                          "relu",
                                                          "relu2",
                                                          "gelu_pytorch_tanh",
                                                          "gelu_python_tanh",
                                                          "gelu_accurate",
                                                          "relu6",
                                                          "leaky_relu",
                                                          "sigmoid",
                                                          "tanh",
                                                          "linear",
                                                          "mish",
                                                          "laplace",
                                                          "prelu",
                                                          "xielu",
                                                          "hardswish",
                                                          "hard_swish",
                                                          "swiglu",
                                                          "swigluoai",
                                                          "geglu",
                                                          "relu_squared",
                                                          "squared_relu",
                                                          "identity"};
constexpr std::array<std::string_view, 12> rotations = {"default",      "linear", "dynamic",       "yarn",
                                                        "longrope",     "su",     "llama3",        "mrope",
                                                        "proportional", "ntk",    "deepseek_yarn", "none"};
constexpr std::array<std::string_view, 12> types = {"float16", "bfloat16",      "float32",     "float64",
                                                    "half",    "float",         "double",      "auto",
                                                    "int8",    "float8_e4m3fn", "float8_e5m2", "uint8"};

/// The type of weights, without the "torch." that some have before it; null: none is stated.
io::Json stated_type(const StoredContents& contents) {
  constexpr std::string_view torch = "torch.";
  const io::Json& stated = contents.stated({"torch_dtype", "dtype"});
  if (!stated.is_string()) return nullptr;
  const auto type = stated.get<std::string>();
  return type.starts_with(torch) ? type.substr(torch.size()) : type;
}

void names_that_programs_have(const StoredContents& contents, ContentsFindings& findings) {
  if (has_own_code(contents)) return;
  if (const io::Json type = stated_type(contents); type.is_string() && !is_one_of(type, types))
    findings.fault("config.json", concat("says that values have the type ", printable(type.dump()),
                                         ", which no program has: float16, bfloat16 or float32 expected"));
  if (!is_of_known_name(contents)) return;
  const io::Json& activation = contents.stated({"hidden_act", "hidden_activation"});
  if (activation.is_string() && !is_one_of(activation, activations))
    findings.fault("config.json", concat("has a hidden_act ", printable(activation.dump()),
                                         ", which no program has: silu, gelu, gelu_pytorch_tanh or relu2 expected"));
  const io::Json& scaling = contents.stated({"rope_scaling", "rope_parameters"});
  const io::Json rope =
      scaling.is_object() ? scaling.value("rope_type", scaling.value("type", io::Json())) : io::Json();
  if (rope.is_string() && !is_one_of(rope, rotations))
    findings.fault("config.json",
                   concat("has rotary embeddings of the type ", printable(rope.dump()),
                          ", which no program has: default, linear, dynamic, yarn, longrope or llama3 ", "expected"));
}

/// What readers of rotary embeddings ask of the types that they have.
void settings_of_rotations(const StoredContents& contents, ContentsFindings& findings) {
  constexpr std::array<std::string_view, 4> scaled = {"linear", "dynamic", "yarn", "llama3"};
  const io::Json& rope = contents.stated({"rope_scaling", "rope_parameters"});
  if (!rope.is_object() || has_own_code(contents)) return;
  const io::Json type = rope.value("rope_type", rope.value("type", io::Json())),
                 factor = rope.value("factor", io::Json());
  if (is_one_of(type, scaled) && factor.is_number() && factor.get<double>() > 0 && factor.get<double>() < 1)
    findings.fault("config.json",
                   concat("scales positions by ", factor.dump(), ": programs stretch them, by 1 and more"));
  const bool original = !rope.value("original_max_position_embeddings", io::Json()).is_null() ||
                        !contents.stated({"original_max_position_embeddings"}).is_null();
  if (type == "yarn" && !rope.contains("short_factor") && !original)
    findings.notes.push_back(
        "config.json has yarn without original_max_position_embeddings: transformers takes max_position_embeddings, "
        "other programs stop");
}

/// Weights of 16 bits are no integers.
void type_of_plain_weights(const StoredContents& contents, ContentsFindings& findings) {
  const io::Json type = stated_type(contents);
  if (contents.quantization().is_object() || has_own_code(contents) || (type != "int8" && type != "uint8")) return;
  const auto plain = [](const StoredLinear& linear) { return linear.kind == Kind::plain; };
  if (!contents.linears().empty() && std::ranges::all_of(contents.linears(), plain))
    findings.fault("config.json", concat("says that values have the type ", printable(type.dump()),
                                         ", but all weights are floats: programs make no model of integers"));
}

/// No model was made for a handful of tokens.
void positions(const StoredContents& contents, ContentsFindings& findings) {
  constexpr int64_t least = 16;
  const int64_t most = contents.number({"max_position_embeddings"});
  if (most > 0 && most < least)
    findings.fault("config.json", concat("has max_position_embeddings ", most, ": programs take no longer text"));
}

/// A number of config.json that is stated, and in what range.
struct Range {
  const char* key;
  double above, most;
  std::string_view text;
};
constexpr double unlimited = 1e30;
constexpr Range ranges[] = {{"rope_theta", 0, unlimited, "a number above 0"},
                            {"rms_norm_eps", 0, unlimited, "a number above 0"},
                            {"routed_scaling_factor", 0, unlimited, "a number above 0"},
                            {"partial_rotary_factor", -1e-9, 1, "a number from 0 to 1"}};

/// Of architectures that are read the structure says more.
void numbers(const StoredContents& contents, ContentsFindings& findings) {
  if (contents.is_known()) return;
  for (const auto& [key, above, most, text] : ranges) {
    const io::Json& value = contents.stated({key});
    if (value.is_null() || value.is_array() || value.is_object()) continue;
    if (value.is_number() && value.get<double>() > above && value.get<double>() <= most) continue;
    findings.fault("config.json", concat("has ", key, " ", printable(value.dump()), ", expected ", text));
  }
  const int64_t heads = contents.number({"num_attention_heads"}), keys = contents.number({"num_key_value_heads"});
  if (heads > 0 && keys > 0 && heads % keys != 0)
    findings.fault("config.json",
                   concat("has ", heads, " heads and ", keys, " heads of keys: each is that of as many"));
  const io::Json& chosen = contents.stated({"num_experts_per_tok"});
  if (chosen.is_number_float() || chosen.is_string())
    findings.fault("config.json",
                   concat("has num_experts_per_tok ", printable(chosen.dump()), ", expected a whole number"));
  if (const io::Json& end = contents.stated({"eos_token_id"}); end.is_string())
    findings.fault("config.json", concat("has eos_token_id ", printable(end.dump()), ", expected a number"));
  const int64_t groups = contents.number({"n_group"}), of_them = contents.number({"topk_group"}),
                experts = contents.number({"n_routed_experts"});
  if (groups > 0 && experts > 0 && experts % groups != 0)
    findings.fault("config.json", concat("has ", experts, " experts in ", groups, " groups, which are not equal"));
  if (groups > 0 && of_them > groups)
    findings.fault("config.json", concat("chooses ", of_them, " of ", groups, " groups of experts"));
  const io::Json& scaling = contents.stated({"rope_scaling"});
  const io::Json factor = scaling.is_object() ? scaling.value("factor", io::Json()) : io::Json();
  if (factor.is_number() && factor.get<double>() <= 0)
    findings.fault("config.json", concat("scales positions by ", factor.dump(), ", expected a number above 0"));
}

/// Of the first file; programs that read weights of torch leave those of others alone, or turn them.
void format_of_files(const StoredContents& contents, ContentsFindings& findings) {
  const auto& metadata = contents.tensors().metadata();
  const auto format = metadata.find("format");
  if (format == metadata.end()) return;
  constexpr std::array<std::string_view, 5> known = {"pt", "mlx", "np", "numpy", "w4q"};
  if (std::ranges::find(known, format->second) == known.end())
    findings.fault("the weight files", concat("say that they hold the format \"", printable(format->second),
                                              "\": programs that read \"pt\" refuse them, or turn their matrices"));
}

// ---- FP8 ----

void settings_of_fp8(const StoredContents& contents, ContentsFindings& findings) {
  const io::Json& quantization = contents.quantization();
  if (!quantization.is_object() || quantization.value("quant_method", io::Json()) != "fp8") return;
  std::vector<const StoredLinear*> codes;
  for (const auto& linear : contents.linears()) {
    if (linear.kind == Kind::fp8) codes.push_back(&linear);
  }
  const bool fours = std::ranges::any_of(contents.linears(), [](const auto& linear) {
    return linear.kind == Kind::mxfp4 || linear.kind == Kind::nvfp4 || linear.kind == Kind::integer;
  });
  if (codes.empty() && fours)
    findings.fault("config.json",
                   "says quant_method \"fp8\", and nothing is stored in FP8, but codes of other kinds are");
  if (codes.empty()) return;
  const io::Json format = quantization.value("fmt", io::Json());
  if (format.is_string() && format != "e4m3" && format != "float8_e4m3fn")
    findings.fault("config.json", concat("says \"fmt\": ", printable(format.dump()), ", but ",
                                         printable(codes.front()->codes), " is F8_E4M3"));
  const io::Json block = quantization.value("weight_block_size", io::Json());
  const bool pair =
      block.is_array() && block.size() == 2 && block[0].is_number_integer() && block[1].is_number_integer();
  if (!block.is_null() && !pair)
    findings.fault("config.json", concat("has a weight_block_size ", printable(block.dump()),
                                         ", expected two numbers, as [128, 128]"));
  const bool inputs = std::ranges::any_of(contents.tensors().tensors(), [](const auto& tensor) {
    return tensor.first.ends_with("input_scale") || tensor.first.ends_with("activation_scale");
  });
  if (quantization.value("activation_scheme", io::Json()) == "static" && !inputs)
    findings.fault("config.json", "says activation_scheme \"static\", and no linear has a scale of its inputs");
  if (quantization.value("scale_fmt", io::Json()) != "ue8m0") return;
  for (const auto* linear : codes) {
    if (linear->scales.empty() || !is_weight_dtype(contents.tensors().at(linear->scales).dtype)) continue;
    const auto loaded = contents.tensors().load(linear->scales);
    std::vector<float> values(static_cast<size_t>(element_count(loaded->shape)));
    widen(loaded->bytes, loaded->dtype, values);
    const auto other = std::ranges::find_if(
        values, [](float value) { return std::isfinite(value) && (std::bit_cast<uint32_t>(value) & 0x7FFFFF) != 0; });
    if (other == values.end()) continue;
    findings.fault(linear->scales, concat("holds ", *other, ", which is no power of two, as \"scale_fmt\": \"ue8m0\" ",
                                          "of config.json says that all scales are"));
    return;
  }
}

/// Codes whose config says nothing are read as weights, or not at all.
void codes_without_settings(const StoredContents& contents, ContentsFindings& findings) {
  if (contents.quantization().is_object()) return;
  constexpr std::string_view planes[] = {".weight_packed", ".qweight", ".weight_scale", ".weight_scale_inv"};
  for (const auto& [name, info] : contents.tensors().tensors()) {
    const bool plane = std::ranges::any_of(planes, [&](std::string_view end) { return name.ends_with(end); });
    if (!plane) continue;
    return findings.fault("config.json", concat("has no quantization_config, but ", printable(name), " is there"));
  }
}

// ---- groups of compressed-tensors ----

/// How a scale of a matrix lies over it.
std::string_view strategy_of(const io::TensorInfo& scales, const StoredLinear& linear) {
  const Shape shape = checkpoint::shape_of_scales(scales.shape);
  if (element_count(shape) == 1) return "tensor";
  if (shape.size() == 1 || (shape.size() == 2 && shape[0] == linear.n && shape[1] == 1)) return "channel";
  return shape.size() == 2 && shape[0] == linear.n ? "group" : "block";
}

void settings_of_groups(const StoredContents& contents, ContentsFindings& findings) {
  const io::Json& quantization = contents.quantization();
  if (!quantization.is_object()) return;
  const io::Json groups = quantization.value("config_groups", io::Json());
  if (!groups.is_object() || groups.empty()) return;
  const io::Json method = quantization.value("quant_method", io::Json());
  if (method == "fp8" || method == "gptq" || method == "awq" || method == "mxfp4")
    findings.fault("config.json", concat("says quant_method ", printable(method.dump()),
                                         ", but has config_groups, as compressed-tensors and ModelOpt write them"));
  if (method != "compressed-tensors" || groups.size() != 1 || !groups.begin()->is_object()) return;
  const io::Json weights = groups.begin()->value("weights", io::Json());
  if (!weights.is_object()) return;
  const io::Json strategy = weights.value("strategy", io::Json()), type = weights.value("type", io::Json());
  const bool grouped = strategy == "group" || strategy == "tensor_group";
  size_t floats = 0, integers = 0, as_stated = 0, otherwise = 0;
  std::string example;
  for (const auto& linear : contents.linears()) {
    if (linear.kind == Kind::plain || linear.experts > 0) continue;
    (linear.kind == Kind::integer ? integers : floats) += 1;
    if (linear.scales.empty() || linear.n <= 0 || linear.k <= 0 || linear.kind == Kind::integer) continue;
    const io::TensorInfo& scales = contents.tensors().at(linear.scales);
    const std::string_view found = strategy_of(scales, linear);
    // One group may be a whole row, one row a whole matrix, and a block all of it.
    const bool same = strategy == found || (grouped && found == "group") || (strategy == "channel" && linear.n == 1) ||
                      (grouped && found == "channel") || strategy == "block";
    same ? ++as_stated : ++otherwise;
    if (!same && example.empty())
      example = concat(printable(linear.scales), " has shape ", shape_text(scales.shape), ", one of each ", found);
  }
  if (strategy.is_string() && as_stated == 0 && otherwise > 0)
    findings.fault("config.json", concat("says \"strategy\": ", printable(strategy.dump()), ", but ", example));
  if (type == "int" && floats > 0 && integers == 0)
    findings.fault("config.json", "says that weights are of the type \"int\", but all that is packed are floats");
}

}  // namespace

std::span<const ContentsRule> config_rules() {
  static constexpr ContentsRule rules[] = {
      {"activations, rotations and types have names that programs know", false, names_that_programs_have},
      {"class and type are of one architecture", false, class_and_type},
      {"rotations have what their readers ask for", false, settings_of_rotations},
      {"weights have the type that is stated", false, type_of_plain_weights},
      {"there are positions", false, positions},
      {"numbers are in their ranges", false, numbers},
      {"weight files are of a format that is read", false, format_of_files},
      {"codes have settings", false, codes_without_settings},
      {"settings of FP8 are those of the codes", false, settings_of_fp8},
      {"settings of groups are those of the codes", false, settings_of_groups},
  };
  return rules;
}

}  // namespace w4q::verify
