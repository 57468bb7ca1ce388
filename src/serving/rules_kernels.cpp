// Whether a program has a kernel for what compressed-tensors and ModelOpt say of weights and inputs together.
#include <algorithm>
#include <map>

#include "core/text.h"
#include "serving/rules.h"

namespace w4q::serving {
namespace {

using enum Program;
using io::Json;

/// Why there is no kernel for a group of config_groups.
struct Obstacle {
  std::string key, expected, got, remedy;
};

bool has_inputs(const CtGroup& group) { return group.input_activations.is_object(); }

std::string inputs_key(const CtGroup& group) { return concat(".config_groups.", printable(group.name)); }

/// A byte a code: integers that run on int8 tensor cores, with inputs that are integers too.
std::optional<Obstacle> refused_bytes(Program program, const CtGroup& group, bool experts) {
  const std::string key = inputs_key(group) + ".input_activations";
  const std::string remedy = same_codes(program, group.scheme);
  if (!has_inputs(group))
    return Obstacle{key, "integers of 8 bits, for a byte a code has no kernel else", "none", remedy};
  if (experts && program == sglang) {
    return Obstacle{inputs_key(group) + ".weights", "experts of floats, or of words", "experts of a byte a code",
                    remedy};
  }
  const std::string weights = text(group.weights, "strategy"), inputs = text(group.input_activations, "strategy");
  const bool dynamic = boolean(group.input_activations, "dynamic").value_or(false);
  const bool eight = group.scheme.bits == 8 && integer(group.input_activations, "num_bits").value_or(8) == 8;
  const bool whole = weights == "channel" || weights == "tensor";
  const bool fit = dynamic ? inputs == "token" : inputs == "tensor" && !experts;
  if (eight && whole && fit && group.scheme.symmetric) return std::nullopt;
  return Obstacle{inputs_key(group) + ".weights",
                  "8 bits, symmetric, a scale a row or matrix, with inputs a token or, measured, a tensor",
                  concat(to_text(group.scheme), ", strategy ", weights, ", ", group.scheme.bits, " bits, ",
                         group.scheme.symmetric ? "symmetric" : "with zero points", ", inputs ",
                         dynamic ? "dynamic, strategy " : "measured, strategy ", inputs),
                  remedy};
}

/// FP8 of experts runs with inputs of FP8 alone; in SGLang that of blocks, too.
std::optional<Obstacle> refused_fp8(const Question& question, const CtGroup& group, bool experts) {
  const std::string weights = text(group.weights, "strategy");
  const std::string key = inputs_key(group) + ".input_activations";
  const bool blocks = weights == "block";
  if (!has_inputs(group)) {
    if (!experts && !(blocks && question.program == sglang)) return std::nullopt;
    const std::string remedy =
        blocks
            ? concat("w4q repack --to ", sglang_renames_scales(question) ? "humming" : "fp8", " holds the same codes")
        : weights == "tensor"
            ? "w4q repack --to compressed-tensors-float --activation-scales --calib TEXT measures them"
            : "w4q repack --to compressed-tensors-float says them";
    return Obstacle{key,
                    concat("inputs of FP8, for ", experts ? "experts of FP8" : "FP8 of blocks", " run with them alone"),
                    concat("none, and FP8 of strategy ", weights), remedy};
  }
  const std::string inputs = text(group.input_activations, "strategy");
  const bool dynamic = !member(group.input_activations, "dynamic").is_boolean() ||
                       boolean(group.input_activations, "dynamic").value_or(false);
  const bool fit =
      blocks || (weights == "tensor" && inputs == "tensor") || (weights == "channel" && inputs == "token" && dynamic);
  if (!experts || fit) return std::nullopt;
  return Obstacle{key, "of experts a tensor with weights a tensor, or dynamic a token with weights a row",
                  concat("inputs a ", inputs, " with weights a ", weights),
                  "w4q repack --to compressed-tensors-float writes such inputs"};
}

std::optional<Obstacle> obstacle_of(const Question& question, const CtGroup& group, bool experts) {
  const Program program = question.program;
  switch (group.scheme.form) {
    case Form::int8:
      return refused_bytes(program, group, experts);
    case Form::fp8:
      return refused_fp8(question, group, experts);
    case Form::mxfp8:
      if (program != sglang) return std::nullopt;
      return Obstacle{inputs_key(group) + ".weights", "integers, FP8, NVFP4, or experts of MXFP4", "MXFP8",
                      "w4q repack --to humming holds the same codes"};
    default:
      return std::nullopt;
  }
}

void ct_kernels(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::compressed_tensors) return;
  std::map<std::string, const CtGroup*> groups;
  for (const CtGroup& group : question.asked.groups()) groups.emplace(concat("config_groups.", group.name), &group);
  for (const Layer& layer : model.layers(true)) {
    const Asked asked = question.asked.of(question.program, layer);
    const auto group = groups.find(asked.by);
    if (!asked.scheme || !asked.refused.empty() || group == groups.end()) continue;
    const auto why = obstacle_of(question, *group->second, layer.split == Split::experts);
    if (!why) continue;
    findings.add(Severity::refused, layer.name, concat(model.place(), why->key), why->expected, why->got, why->remedy);
  }
}

std::string upper_text(const Json& object, const char* key) {
  std::string algorithm = text(object, key);
  std::ranges::transform(algorithm, algorithm.begin(),
                         [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return algorithm;
}

/// The algorithm of a mixture's experts where each layer has its own.
std::string mixed_algorithm(const Json& layers, const Layer& layer) {
  if (!layers.is_object()) return {};
  for (const auto& part : layer.parts) {
    if (layers.contains(part)) return upper_text(layers.at(part), "quant_algo");
  }
  return {};
}

/// Of one algorithm for all linears, experts of FP8 have one scale a matrix; of several, those of blocks have a way.
void modelopt_experts(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::modelopt) return;
  const std::string common = upper_text(model.quantization(), "quant_algo");
  const bool mixed = common == "MIXED_PRECISION";
  for (const Layer& layer : model.layers(true)) {
    if (layer.split != Split::experts || model.linears().find(layer.parts.front())->second.form != Form::fp8) continue;
    const std::string algorithm =
        mixed ? mixed_algorithm(member(model.quantization(), "quantized_layers"), layer) : common;
    const bool rows = algorithm == "FP8_PER_CHANNEL_PER_TOKEN", blocks = algorithm == "FP8_PB_WO";
    const bool named = model.linears().find(layer.parts.front())->second.find("weight_scale_inv") != nullptr;
    if (!rows && !(blocks && !(mixed && named))) continue;
    findings.add(Severity::refused, layer.name, concat(model.place(), ".quant_algo"),
                 mixed && blocks ? "experts whose blocks have weight_scale_inv, as that of quant_method fp8"
                                 : "experts with one scale a matrix (FP8), MXFP8 or NVFP4",
                 algorithm,
                 rows || mixed ? "w4q repack --to compressed-tensors-float holds the same codes"
                               : "w4q repack --to fp8 holds the same codes");
  }
}

}  // namespace

std::string same_codes(Program program, const StatedScheme& scheme) {
  const bool marlin = scheme.group == -1 || scheme.group == 32 || scheme.group == 64 || scheme.group == 128;
  const bool other = program == sglang && ((scheme.bits != 4 && scheme.bits != 8) || !marlin);
  const std::string_view dialects = other              ? "humming"
                                    : scheme.bits == 4 ? "compressed-tensors or awq-gemm"
                                                       : "compressed-tensors";
  return concat("w4q repack --to ", dialects, " holds the same codes");
}

std::vector<Rule> kernel_rules() {
  return {
      {"ct-kernels",
       {vllm, sglang},
       "weights and inputs of config_groups that there is a kernel for: bytes of integers and experts of FP8 with "
       "input_activations",
       "vllm compressed_tensors.py _quantization_scheme_map_from_config, compressed_tensors_moe.py get_moe_method; "
       "sglang "
       "compressed_tensors.py _get_scheme_from_parts, get_moe_scheme",
       ct_kernels},
      {"modelopt-experts",
       {vllm},
       "experts of ModelOpt's FP8 have one scale a matrix, or blocks in MIXED_PRECISION",
       "vllm modelopt.py ModelOptFp8MoEMethod, ModelOptMixedPrecisionConfig.get_quant_method",
       modelopt_experts},
  };
}

}  // namespace w4q::serving
