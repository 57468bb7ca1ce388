// Rules about quantization_config alone.
#include <algorithm>
#include <array>
#include <set>

#include "core/text.h"
#include "serving/prediction.h"
#include "serving/rules.h"

namespace w4q::serving {
namespace {

using enum Program;
using io::Json;

bool is_marlin_group(int64_t group) { return group == -1 || group == 32 || group == 64 || group == 128; }

std::string at(const StoredModel& model, std::string_view key) { return concat(model.place(), ".", key); }

bool loads(const Question& question) {
  const auto rows = format_rows();
  return std::ranges::find(rows, question.model.method(), &FormatRow::method)->loads.has(question.program);
}

// ---- keys -------------------------------------------------------------------------------------------------------------

struct NeededKeys {
  Method method;
  Programs programs;
  std::vector<std::vector<const char*>> keys;  ///< one of each is there
};

const std::vector<NeededKeys>& needed_keys() {
  static const std::vector<NeededKeys> rows{
      {Method::gptq, {vllm, sglang}, {{"bits"}, {"group_size"}, {"desc_act"}, {"sym"}}},
      {Method::gptq, {transformers}, {{"bits"}}},
      {Method::awq, {vllm, sglang}, {{"w_bit", "bits"}, {"q_group_size", "group_size"}, {"zero_point"}}},
      {Method::fp8, {vllm, sglang}, {{"activation_scheme"}}},
      {Method::auto_round, {vllm, sglang}, {{"bits"}, {"group_size"}}},
      {Method::compressed_tensors, {vllm, sglang, transformers, trt_llm, mlx}, {{"config_groups"}}},
      {Method::modelopt, {vllm, sglang, trt_llm, mlx}, {{"quant_algo"}}},
  };
  return rows;
}

void keys(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  for (const NeededKeys& row : needed_keys()) {
    if (row.method != model.method() || !row.programs.has(question.program)) continue;
    for (const auto& names : row.keys) {
      const auto has = [&](const char* key) {
        const Json& value = member(model.quantization(), key);
        return key == std::string_view("config_groups") ? value.is_object() && !value.empty() : !value.is_null();
      };
      if (std::ranges::any_of(names, has)) continue;
      findings.add(Severity::refused, {}, at(model, names.front()), "a value", "none",
                   "write the key that the weights were made with");
    }
  }
}

// ---- GPTQ, AWQ, AutoRound ---------------------------------------------------------------------------------------------

/// All settings that config.json has for linears of GPTQ's words: the common ones and those of rules.
std::vector<std::pair<std::string, StatedScheme>> settings(const Question& question) {
  const StoredModel& model = question.model;
  std::vector<std::pair<std::string, StatedScheme>> list;
  if (const auto& common = question.asked.common()) list.emplace_back(model.place(), *common);
  const char* const key = model.method() == Method::auto_round ? "extra_config" : "dynamic";
  const Json& rules = member(model.quantization(), key);
  if (!rules.is_object() || list.empty()) return list;
  for (const auto& [name, value] : rules.items()) {
    if (name.starts_with("-:") || !value.is_object()) continue;
    StatedScheme scheme = list.front().second;
    if (const auto bits = integer(value, "bits")) scheme.bits = static_cast<int>(*bits);
    if (const auto group = integer(value, "group_size")) scheme.group = *group <= 0 ? -1 : *group;
    scheme.symmetric = boolean(value, "sym").value_or(scheme.symmetric);
    scheme.act_order = boolean(value, "desc_act").value_or(scheme.act_order);
    if (scheme.bits < 16) list.emplace_back(concat(model.place(), ".", key, "[\"", printable(name), "\"]"), scheme);
  }
  return list;
}

void gptq_types(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  const bool rounded = model.method() == Method::auto_round;
  if (model.method() != Method::gptq && !rounded) return;
  for (const auto& [place, scheme] : settings(question)) {
    if (scheme.form != Form::gptq) continue;
    const bool typed = (scheme.bits == 4 || scheme.bits == 8) && scheme.symmetric;
    // SGLang reads AutoRound's 2 and 3 bits by kernels of its own.
    const bool odd = rounded && question.program == sglang && (scheme.bits == 2 || scheme.bits == 3);
    if (typed || odd) continue;
    const bool asymmetric = !scheme.symmetric;
    findings.add(Severity::refused, {}, concat(place, asymmetric ? ".sym" : ".bits"), "4 or 8 bits, symmetric",
                 concat(scheme.bits, " bits, ", asymmetric ? "with zero points" : "symmetric"),
                 same_codes(question.program, scheme));
  }
}

void gptq_groups(const Question& question, Findings& findings) {
  if (question.model.method() != Method::gptq && question.model.method() != Method::auto_round) return;
  for (const auto& [place, scheme] : settings(question)) {
    if (scheme.form != Form::gptq || is_marlin_group(scheme.group)) continue;
    findings.add(Severity::refused, {}, concat(place, ".group_size"), "-1, 32, 64 or 128", concat(scheme.group),
                 same_codes(question.program, scheme));
  }
}

/// An order of inputs that a program does not read cannot be undone: linears that read the residual stream have one each.
constexpr std::string_view without_order =
    "w4q quantize reads these weights: --quality good --for vllm rounds them again, in order (the 16-bit model would "
    "lose less); repack --no-act-order --allow-lossy does so without calibration, --to hf16 keeps the values";

void act_order(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  const Method method = model.method();
  const bool refuses = (method == Method::gptq && question.program == vllm) ||
                       (method == Method::auto_round && question.program == sglang);
  if (!refuses) return;
  for (const auto& [place, scheme] : settings(question)) {
    if (!scheme.act_order || scheme.group == -1) continue;
    findings.add(Severity::refused, {}, concat(place, ".desc_act"), "false, or whole rows", "true with groups",
                 std::string(without_order));
  }
}

void awq_bits(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  const auto& common = question.asked.common();
  if (!common || common->form != Form::awq) return;
  const bool eight = common->bits == 8 && model.method() == Method::auto_round;
  if (common->bits == 4 || eight) return;
  findings.add(Severity::refused, {}, at(model, "bits"), "4", concat(common->bits),
               "w4q repack --to compressed-tensors");
}

void awq_version(const Question& question, Findings& findings) {
  if (question.model.method() != Method::awq) return;
  for (const auto& [path, linear] : question.model.linears()) {
    if (linear.form != Form::awq_other && linear.form != Form::gptq) continue;
    findings.add(
        Severity::refused, linear.name(), {}, "words of AWQ's version gemm, qweight I32 [inputs, outputs / 8]",
        concat(dtype_name(linear.tensors.begin()->second->dtype), " words of version ",
               text(question.model.quantization(), "version").empty() ? "gemv, gemv_fast or marlin"
                                                                      : text(question.model.quantization(), "version")),
        "w4q repack --to awq-gemm");
  }
}

void no_zeros(const Question& question, Findings& findings) {
  if (question.model.method() != Method::awq) return;
  for (const auto& [path, linear] : question.model.linears()) {
    if (linear.form != Form::awq || linear.find("qzeros") != nullptr) continue;
    findings.add(Severity::refused, linear.name(), {}, "qzeros", "none", "w4q repack --to awq-gemm writes them");
  }
}

void auto_round_format(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::auto_round) return;
  const std::string format = text(model.quantization(), "packing_format"),
                    type = text(model.quantization(), "data_type");
  const bool integers = format.empty() || format == "auto_round:auto_gptq" || format == "auto_round:auto_awq";
  const bool floats = question.program == vllm && (format == "auto_round:fp8" || format == "auto_round:llm_compressor");
  if (!integers && !floats) {
    findings.add(Severity::refused, {}, at(model, "packing_format"), "auto_round:auto_gptq or auto_round:auto_awq",
                 printable(format), "w4q repack --to compressed-tensors");
  }
  const bool is_float = type.find("fp") != std::string::npos;
  if (is_float && question.program == sglang) {
    findings.add(Severity::refused, {}, at(model, "data_type"), "int", printable(type), "w4q repack --to hf16");
  }
}

// ---- compressed-tensors -----------------------------------------------------------------------------------------------

std::string group_place(const StoredModel& model, const CtGroup& group, std::string_view key) {
  return concat(model.place(), ".config_groups.", printable(group.name), ".weights.", key);
}

void ct_actorder(const Question& question, Findings& findings) {
  for (const CtGroup& group : question.asked.groups()) {
    if (!group.scheme.act_order) continue;
    findings.add(Severity::refused, {}, group_place(question.model, group, "actorder"), "null, weight or static",
                 "group", std::string(without_order));
  }
}

void ct_bits(const Question& question, Findings& findings) {
  for (const CtGroup& group : question.asked.groups()) {
    if (group.scheme.form != Form::words) continue;
    const int bits = group.scheme.bits;
    const std::string place = group_place(question.model, group, "num_bits");
    if (question.program == sglang && bits != 4 && bits != 8) {
      findings.add(Severity::refused, {}, place, "4 or 8", concat(bits), "quantize to int4 or int8");
    } else if (question.program == vllm && (bits < 2 || bits > 8)) {
      findings.add(Severity::refused, {}, place, "2 to 8", concat(bits), "quantize to 2 to 8 bits");
    } else if (question.program == mlx && bits == 7) {
      findings.add(Severity::refused, {}, place, "2, 3, 4, 5, 6 or 8", concat(bits), "quantize to another width");
    } else if (question.program == trt_llm) {
      findings.add(Severity::refused, {}, place, "floats of 8 bits, or ModelOpt's folders",
                   concat("integers of ", bits, " bits"), "w4q quantize --scheme fp8-block128 or nvfp4, --to modelopt");
    }
    if (question.program == sglang && (bits == 4 || bits == 8) && !is_marlin_group(group.scheme.group)) {
      findings.add(Severity::refused, {}, group_place(question.model, group, "group_size"), "-1, 32, 64 or 128",
                   concat(group.scheme.group), "quantize with groups of 32, 64 or 128");
    }
    const bool humming = bits != 4 && (bits != 8 || !group.scheme.symmetric);
    if (question.program == vllm && bits >= 2 && bits <= 8 && (humming || !is_marlin_group(group.scheme.group))) {
      findings.add(Severity::note, {}, place,
                   "4 bits or symmetric 8 bits in groups of 32, 64, 128 or whole rows for Marlin",
                   to_text(group.scheme), "humming-kernels must be installed, as vllm's own requirements have it");
    }
  }
}

constexpr std::array<std::string_view, 9> ct_formats{
    "pack-quantized",       "int-quantized",        "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "mixed-precision"};

/// What the program makes of a group of floats, by its keys; empty: it has a way.
std::string refused_floats(const CtGroup& group) {
  const Json& weights = group.weights;
  if (text(weights, "type") != "float") return {};
  const std::string strategy = text(weights, "strategy");
  if (boolean(weights, "symmetric").value_or(true) == false) return "floats with zero points";
  if (group.scheme.bits == 4) {
    const bool nvfp4 = strategy == "tensor_group" && group.scheme.group == 16;
    const bool mxfp4 = strategy == "group" && group.scheme.group == 32;
    if (!nvfp4 && !mxfp4) return concat("4-bit floats, strategy ", strategy, ", groups of ", group.scheme.group);
    if (nvfp4 && group.input_activations.is_object() && integer(group.input_activations, "num_bits").value_or(4) != 4) {
      return "NVFP4 with activations of another width";
    }
    return {};
  }
  if (group.scheme.bits != 8) return concat(group.scheme.bits, "-bit floats");
  const bool known = strategy == "tensor" || strategy == "channel" || strategy == "block" || strategy.empty() ||
                     (strategy == "group" && group.scheme.group == 32);
  return known ? std::string() : concat("8-bit floats, strategy ", strategy);
}

void ct_groups(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::compressed_tensors) return;
  for (const CtGroup& group : question.asked.groups()) {
    const std::string place = concat(model.place(), ".config_groups.", printable(group.name));
    if (std::ranges::find(ct_formats, group.format) == ct_formats.end()) {
      findings.add(Severity::refused, {}, concat(place, ".format"), "a format that is known",
                   group.format.empty() ? "none" : printable(group.format), "w4q repack --to compressed-tensors");
    }
    if (std::string floats = refused_floats(group); !floats.empty()) {
      findings.add(Severity::refused, {}, concat(place, ".weights"),
                   "FP8 a tensor, row or block, NVFP4 in groups of 16, MXFP4 or MXFP8 in groups of 32",
                   std::move(floats), "quantize anew");
    }
    const bool grouped = text(group.weights, "strategy") == "group";
    if (grouped && integer(group.weights, "group_size").value_or(0) <= 0) {
      findings.add(Severity::refused, {}, concat(place, ".weights.group_size"), "a positive number", "none",
                   "write the size of the groups");
    }
    if (group.scheme.form == Form::words && text(group.weights, "strategy") == "tensor" &&
        describe(question.program).fuses) {
      findings.add(Severity::refused, {}, concat(place, ".weights.strategy"), "group or channel", "tensor",
                   "w4q repack --to compressed-tensors writes a scale a row");
    }
  }
  if (question.program == mlx) {
    const std::string format = text(model.quantization(), "format");
    const bool known =
        format == "pack-quantized" || format == "nvfp4-pack-quantized" || format == "mxfp4-pack-quantized";
    if (!known) {
      findings.add(Severity::refused, {}, at(model, "format"),
                   "pack-quantized, nvfp4-pack-quantized or mxfp4-pack-quantized", printable(format),
                   "w4q repack --to hf16 decodes it");
    }
  }
}

/// Floats that a program has a way for in some of its layers only.
void ct_floats(const Question& question, Findings& findings) {
  for (const CtGroup& group : question.asked.groups()) {
    const Form form = group.scheme.form;
    const std::string place = concat(question.model.place(), ".config_groups.", printable(group.name), ".weights");
    if (question.program == trt_llm && form != Form::fp8 && form != Form::words) {
      findings.add(Severity::refused, {}, place, "FP8", std::string(to_string(form)), "w4q repack --to modelopt");
    }
    if (question.program != sglang || form != Form::mxfp4) continue;
    for (const auto& [path, linear] : question.model.linears()) {
      if (linear.form != Form::mxfp4 || !expert_place(path).mixture.empty()) continue;
      findings.add(Severity::refused, linear.name(), place, "experts alone in MXFP4", "another linear in MXFP4",
                   "leave linears beside experts in 16 bit");
    }
  }
}

void cache_scheme(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::compressed_tensors) return;
  const Json& scheme = member(model.quantization(), "kv_cache_scheme");
  if (!scheme.is_object()) return;
  const std::string strategy = text(scheme, "strategy");
  const bool known = text(scheme, "type") == "float" && integer(scheme, "num_bits") == 8 &&
                     (strategy == "tensor" || strategy == "attn_head") && boolean(scheme, "symmetric").value_or(false);
  if (known) return;
  findings.add(Severity::refused, {}, at(model, "kv_cache_scheme"), "FP8, a scale a tensor or head, symmetric",
               concat(text(scheme, "type"), ", ", integer(scheme, "num_bits").value_or(0), " bits, strategy ", strategy,
                      boolean(scheme, "symmetric").value_or(false) ? "" : ", not symmetric"),
               "take kv_cache_scheme out, or calibrate FP8 scales");
}

// ---- FP8, ModelOpt, MXFP4, Humming ------------------------------------------------------------------------------------

/// Servers take one scale a matrix, under another name, where no block is stated.
void fp8_blocks_unsaid(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (question.program == trt_llm || !describe(question.program).fuses) return;
  for (const auto& [path, linear] : model.linears()) {
    const io::TensorInfo* const scales = linear.find("weight_scale_inv");
    if (linear.form != Form::fp8 || scales == nullptr || element_count(scales->shape) <= 1) continue;
    return findings.add(Severity::refused, path + ".weight_scale_inv", at(model, "weight_block_size"),
                        "the blocks of its scales, for without them weights have one scale",
                        concat("nothing, and scales ", shape_text(scales->shape)),
                        "write the blocks, as [128, 128], which transformers takes where the key is missing");
  }
}

void fp8_keys(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::fp8) return;
  const std::string scheme = text(model.quantization(), "activation_scheme");
  const Json& block = member(model.quantization(), "weight_block_size");
  if (block.is_null()) fp8_blocks_unsaid(question, findings);
  if (describe(question.program).fuses && question.program != trt_llm) {
    if (!scheme.empty() && scheme != "static" && scheme != "dynamic") {
      findings.add(Severity::refused, {}, at(model, "activation_scheme"), "static or dynamic", printable(scheme),
                   "write dynamic");
    }
    if (!block.is_null() && (!block.is_array() || block.size() != 2)) {
      findings.add(Severity::refused, {}, at(model, "weight_block_size"), "two numbers", printable(block.dump()),
                   "write the blocks of the scales");
    }
    if (!block.is_null() && !scheme.empty() && scheme != "dynamic") {
      findings.add(Severity::refused, {}, at(model, "activation_scheme"), "dynamic, as scales lie over blocks",
                   printable(scheme), "write dynamic");
    }
  }
  if (question.program == mlx) {
    const bool exponents = text(model.quantization(), "scale_fmt") == "ue8m0";
    const bool small = block.is_array() && block.size() == 2 && block[0] == 32 && block[1] == 32;
    if (!exponents || !small) {
      findings.add(Severity::refused, {}, at(model, "weight_block_size"), "blocks of 32 x 32 with ue8m0 scales",
                   printable(block.dump()), "w4q repack --to hf16 decodes it");
    }
  }
}

void modelopt_algorithms(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::modelopt) return;
  std::string algorithm = text(model.quantization(), "quant_algo");
  std::ranges::transform(algorithm, algorithm.begin(),
                         [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  if (algorithm.empty()) return;
  static const std::set<std::string, std::less<>> by_vllm{
      "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION"};
  static const std::set<std::string, std::less<>> by_sglang{"FP8", "NVFP4", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION"};
  static const std::set<std::string, std::less<>> by_mlx{"NVFP4"};
  const auto& known = question.program == mlx ? by_mlx : question.program == sglang ? by_sglang : by_vllm;
  if (question.program != trt_llm && !known.contains(algorithm)) {
    findings.add(Severity::refused, {}, at(model, "quant_algo"), join({known.begin(), known.end()}),
                 printable(algorithm),
                 algorithm == "INT4_AWQ" ? "w4q quantize --method awq --to awq-gemm" : "another algorithm of ModelOpt");
  }
  if (question.program != vllm || algorithm.find("NVFP4") == std::string::npos || !model.wrapped()) return;
  for (const char* key : {"group_size", "kv_cache_quant_algo", "exclude_modules"}) {
    if (model.quantization().contains(key)) continue;
    findings.add(Severity::refused, {}, at(model, key), "a value, or null", "none", "write the key");
  }
}

/// mlx-lm has no names for compressed-tensors' and ModelOpt's tensors: code of single models turns them into its own.
void own_names(const Question& question, Findings& findings) {
  static const std::set<std::string, std::less<>> of_words{"deepseek_v3", "joyai_llm_flash", "kimi_k2",
                                                           "kimi_k25",    "kimi_k3",         "mistral4"};
  static const std::set<std::string, std::less<>> of_modelopt{"muse_spark"};
  const StoredModel& model = question.model;
  const bool words = model.method() == Method::compressed_tensors;
  if (!words && model.method() != Method::modelopt) return;
  const auto& known = words ? of_words : of_modelopt;
  const std::string type = text(model.config(), "model_type");
  if (known.contains(type) || known.contains(text(member(model.config(), "text_config"), "model_type"))) return;
  findings.add(
      Severity::refused, {}, at(model, "quant_method"),
      concat("AWQ, or a model of ", join({known.begin(), known.end()})),
      concat(words ? "compressed-tensors" : "ModelOpt", " of ", type.empty() ? "no model_type" : printable(type)),
      "w4q quantize --scheme int4-g128-f16-asym --to awq-gemm, or repack --to hf16 and mlx_lm.convert");
}

/// SGLang's layers of FP8 in blocks and of MXFP8 have `weight_scale_inv`; a tensor of another name is left out with a
/// warning, and the scales stay what they were set to.
void sglang_scale_names(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  const bool modelopt = model.method() == Method::modelopt;
  if (modelopt ? text(model.config(), "model_type") == "kimi_k3" : !sglang_renames_scales(question)) return;
  if (!modelopt && model.method() != Method::fp8 && model.method() != Method::mxfp8) return;
  for (const auto& [path, linear] : model.linears()) {
    const std::string_view name = modelopt ? "weight_scale" : "weight_scale_inv";
    const io::TensorInfo* const scales = linear.find(name);
    if (scales == nullptr || scales->shape.size() < 2 || element_count(scales->shape) == scales->shape[0]) continue;
    if (linear.form != Form::fp8 && linear.form != Form::mxfp8) continue;
    return findings.add(Severity::refused, concat(path, ".", name), {},
                        modelopt ? "weight_scale_inv, the name that its layers have"
                                 : "another class: this one looks for weight_scale, which its layers do not have",
                        modelopt ? std::string(name) : text(model.config(), "model_type"),
                        "w4q repack --to humming holds the same codes");
  }
}

/// Without a layer in NVFP4 SGLang takes MIXED_PRECISION for another program's W4AFP8.
void mixed_without_float4(const Question& question, const Json& layers, Findings& findings) {
  if (question.program != sglang) return;
  for (const auto& layer : layers) {
    if (text(layer, "quant_algo").ends_with("NVFP4")) return;
  }
  findings.add(Severity::refused, {}, at(question.model, "quantized_layers"), "a layer in NVFP4", "none",
               "another dialect, such as compressed-tensors-float, or vllm");
}

void mixed_layers(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::modelopt || text(model.quantization(), "quant_algo") != "MIXED_PRECISION") return;
  const Json& layers = member(model.quantization(), "quantized_layers");
  if (layers.is_object() && !layers.empty()) return mixed_without_float4(question, layers, findings);
  findings.add(Severity::refused, {}, at(model, "quantized_layers"), "an algorithm for each layer", "none",
               "write the mapping that ModelOpt exports");
}

constexpr const char* rotation_key = "hadamard_block_size";

/// SGLang hands Humming's layers no size of blocks, so that weights of rotated inputs meet inputs as they are.
void humming_rotations(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::humming) return;
  const auto find = [&](const Json& keys, const std::string& place) {
    const int64_t block = integer(keys, rotation_key).value_or(0);
    if (block > 1) {
      findings.add(Severity::refused, {}, place, "none: inputs are taken as they are", concat("blocks of ", block),
                   "vllm, or quantize without --rotate");
    }
    return block > 1;
  };
  if (find(model.quantization(), at(model, rotation_key))) return;
  const Json& rules = member(model.quantization(), "dynamic");
  if (!rules.is_object()) return;
  for (const auto& [rule, keys] : rules.items()) {
    if (find(keys, concat(at(model, "dynamic"), "[\"", printable(rule), "\"].", rotation_key))) return;
  }
}

void humming_keys(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::humming) return;
  for (const char* key : {"b_dtype", "weight_dtype", "dtype"}) {
    if (!text(model.quantization(), key).empty()) return;
  }
  findings.add(Severity::refused, {}, at(model, "b_dtype"), "the type of the codes, such as uint4", "none",
               "write the type");
}

void mxfp4_model(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::mxfp4) return;
  for (const auto& [path, linear] : model.linears()) {
    if (linear.form != Form::mxfp4 || !expert_place(path).mixture.empty()) continue;
    findings.add(Severity::refused, linear.name(), {}, "16 bit: only experts are MXFP4 under quant_method mxfp4",
                 "MXFP4", "compressed-tensors' mxfp4-pack-quantized holds linears");
  }
}

void scale_types(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  const io::TensorInfo* const scales = loads(question) ? rounded_scales(model) : nullptr;
  if (scales == nullptr) return;
  const bool casts = question.program == transformers && model.method() == Method::awq;
  findings.add(Severity::note, scales->name, "config.json: torch_dtype", "float16, as the scales are",
               casts ? "bfloat16, which is taken for float16 then" : "bfloat16, to which the scales are rounded",
               "write torch_dtype float16, or quantize with bf16 scales (--scheme …-bf16)");
}

}  // namespace

bool sglang_renames_scales(const Question& question) {
  static const std::set<std::string, std::less<>> of_llama{"llama", "mistral", "ministral3", "phi3", "internlm3"};
  return question.program == sglang && of_llama.contains(text(question.model.config(), "model_type"));
}

const io::TensorInfo* rounded_scales(const StoredModel& model) {
  const Json& config = model.config();
  std::string type;
  for (const Json* object : {&config, &member(config, "text_config")}) {
    for (const char* key : {"dtype", "torch_dtype"}) type = type.empty() ? text(*object, key) : type;
  }
  if (type.find("bfloat16") == std::string::npos) return nullptr;
  for (const auto& [path, linear] : model.linears()) {
    const io::TensorInfo* scales = linear.find("scales");
    if (scales == nullptr) scales = linear.find("weight_scale");
    if (scales != nullptr && scales->dtype == DType::f16) return scales;
  }
  return nullptr;
}

std::string rounded_scales_note(const StoredModel& model) {
  const auto rows = format_rows();
  const auto row = std::ranges::find(rows, model.method(), &FormatRow::method);
  std::vector<std::string> names;
  for (const Program program : {vllm, sglang, transformers}) {
    const bool casts = program == transformers && model.method() == Method::awq;
    if (row->loads.has(program) && !casts) names.emplace_back(describe(program).name);
  }
  const io::TensorInfo* const scales = names.empty() ? nullptr : rounded_scales(model);
  if (scales == nullptr) return {};
  return concat(printable(scales->name), " and its like are ", rounded_mark, ", to which ", join(names),
                " round them: take bf16 scales (--scheme …-bf16), or write torch_dtype float16");
}

std::vector<Rule> config_rules() {
  return {
      {"keys",
       {vllm, sglang, transformers, trt_llm, mlx},
       "quantization_config has the keys that are read without a default",
       "vllm auto_gptq.py, auto_awq.py, fp8.py: from_config",
       keys},
      {"gptq-types",
       {vllm, sglang},
       "GPTQ's words have 4 or 8 bits, and no zero points",
       "vllm auto_gptq.py:99, 153; sglang gptq.py",
       gptq_types},
      {"gptq-groups",
       {vllm, sglang},
       "GPTQ's groups are 32, 64, 128 or whole rows",
       "vllm marlin_utils.py:37",
       gptq_groups},
      {"act-order",
       {vllm, sglang},
       "no desc_act beside groups, in rules of dynamic neither",
       "vllm gptq_utils.py:23-46",
       act_order},
      {"awq-bits",
       {vllm, sglang, transformers, mlx},
       "AWQ has 4 bits",
       "vllm auto_awq.py:182-206, sglang awq.py:85",
       awq_bits},
      {"awq-version",
       {vllm, sglang, transformers, mlx},
       "AWQ's words are those of version gemm, whatever \"version\" says",
       "vllm auto_awq.py: shapes of qweight",
       awq_version},
      {"awq-zeros", {vllm, sglang, transformers}, "AWQ's linears have zero points", "vllm auto_awq.py", no_zeros},
      {"auto-round",
       {vllm, sglang},
       "AutoRound's words are GPTQ's or AWQ's",
       "vllm inc/inc.py, sglang auto_round.py",
       auto_round_format},
      {"ct-actorder",
       {vllm, transformers},
       "no actorder of groups",
       "vllm compressed_tensors.py:336-342; compressed-tensors 0.20 quant_args.py",
       ct_actorder},
      {"ct-bits",
       {vllm, sglang, mlx, trt_llm},
       "a width that the program has kernels for",
       "vllm compressed_tensors_wNa16.py:41-59, sglang WNA16_SUPPORTED_BITS",
       ct_bits},
      {"ct-groups",
       {vllm, sglang, transformers, mlx},
       "formats and schemes of config_groups that are known",
       "vllm compressed_tensors.py _get_scheme_from_parts; mlx_lm/utils.py",
       ct_groups},
      {"ct-floats",
       {sglang, trt_llm},
       "floats of compressed-tensors where the program has them",
       "sglang compressed_tensors.py _get_scheme_from_parts",
       ct_floats},
      {"cache-scheme",
       {vllm},
       "a quantized cache is FP8, a scale a tensor or head, symmetric",
       "vllm compressed_tensors.py validate_kv_cache_scheme",
       cache_scheme},
      {"fp8-keys",
       {vllm, sglang, mlx},
       "FP8 in blocks says which blocks, and has dynamic activations",
       "vllm fp8.py:107-129, mlx_lm/utils.py",
       fp8_keys},
      {"modelopt-algorithm",
       {vllm, sglang, trt_llm, mlx},
       "an algorithm that the program has; with NVFP4 all keys",
       "vllm modelopt.py QUANT_ALGOS",
       modelopt_algorithms},
      {"mlx-names",
       {mlx},
       "tensors of compressed-tensors and ModelOpt have names that the model's own code turns",
       "mlx_lm/utils.py load_model, models/*.py sanitize; mlx-lm 0.32.2 run on a CPU",
       own_names},
      {"modelopt-mixed",
       {vllm, sglang},
       "MIXED_PRECISION names its layers, in SGLang one of them in NVFP4",
       "vllm modelopt.py:1621, sglang model_config.py _parse_modelopt_quant_config",
       mixed_layers},
      {"scale-names",
       {sglang},
       "scales of FP8 in blocks and of MXFP8 have the name that the model's code looks for",
       "sglang fp8.py create_fp8_weight_, llama.py _legacy_load_weights, kimi_k3.py _maybe_map_fp8_pb_scale_name",
       sglang_scale_names},
      {"humming-keys",
       {vllm, sglang},
       "Humming's config names the type of the codes",
       "humming/schema/humming.py",
       humming_keys},
      {"humming-rotations",
       {sglang},
       "inputs of Humming's linears are not rotated",
       "sglang humming.py, which names no hadamard_block_size",
       humming_rotations},
      {"mxfp4-experts", {vllm}, "under mxfp4 only experts are packed", "vllm mxfp4.py get_quant_method", mxfp4_model},
      {"scale-dtype",
       {vllm, sglang, transformers},
       "scales have the type that the model computes in",
       "vllm auto_gptq.py params_dtype",
       scale_types},
  };
}

}  // namespace w4q::serving
