// Layers as a program makes them by config.json, held against what their tensors are.
#include <algorithm>
#include <map>
#include <set>

#include "core/text.h"
#include "serving/rules.h"

namespace w4q::serving {
namespace {

using enum Program;

constexpr Programs servers{vllm, sglang};
constexpr Programs readers{vllm, sglang, transformers};
constexpr Programs folder_readers{vllm, sglang, transformers, trt_llm, mlx};
constexpr std::string_view made_with = "write the config that the weights were made with";

bool is_packed(const StoredLinear& linear) { return linear.form != Form::plain; }

/// Methods whose lists and targets are read here.
bool has_lists(Method method) {
  switch (method) {
    case Method::awq:
    case Method::gptq:
    case Method::compressed_tensors:
    case Method::fp8:
    case Method::mxfp8:
    case Method::mxfp4:
    case Method::modelopt:
    case Method::auto_round:
    case Method::humming:
      return true;
    default:
      return false;
  }
}

/// The form that config.json may state under another name than headers tell.
bool same_form(Form stated, Form stored) {
  if (stated == stored) return true;
  const auto either = [&](Form a, Form b) { return (stated == a && stored == b) || (stated == b && stored == a); };
  return either(Form::mxfp4, Form::mxfp4_stack) || either(Form::fp8, Form::mxfp8);
}

/// Words in which every reader leaves a layer out.
std::string words_for(const StoredModel& model, const Layer& layer) {
  const char* const list = model.method() == Method::awq || model.method() == Method::fp8 ? "modules_to_not_convert"
                           : model.method() == Method::modelopt                           ? "exclude_modules"
                           : model.method() == Method::gptq                               ? "dynamic, behind \"-:\""
                           : model.method() == Method::auto_round                         ? "extra_config, with 16 bits"
                                                                                          : "ignore";
  const std::string also =
      layer.fused == nullptr ? std::string() : concat(", and ", last_part(layer.name), " likewise");
  return concat("name each part by its whole path in ", list, also);
}

void layer_of(const Question& question, const Layer& layer, Findings& findings) {
  const StoredModel& model = question.model;
  const auto linear_of = [&](const std::string& path) -> const StoredLinear& {
    return model.linears().find(path)->second;
  };
  const bool packed = std::ranges::any_of(layer.parts, [&](const auto& part) { return is_packed(linear_of(part)); });
  if (!packed && !is_served_linear(layer.parts.front())) return;
  if (packed && is_router(layer.name)) return;  // of another rule
  Asked asked = question.asked.of(question.program, layer);
  if (!asked.refused.empty()) {
    for (const auto& part : layer.parts) {
      findings.add(Severity::refused, part, model.place(),
                   concat("one scheme, or none, for all of ", last_part(layer.name)), asked.refused,
                   words_for(model, layer));
    }
    return;
  }
  if (!asked.scheme || asked.scheme->form == Form::other) {
    for (const auto& part : layer.parts) {
      if (!is_packed(linear_of(part)) || asked.scheme) continue;
      const bool head = is_head(layer.name);
      findings.add(Severity::refused, linear_of(part).name(), concat(model.place(), ".", asked.by), "16 bit",
                   std::string(to_string(linear_of(part).form)),
                   head ? "name lm_head in config_groups' targets (GPTQ: lm_head true), or quantize without --lm-head"
                        : "take the entry out");
    }
    return;
  }
  for (const auto& part : layer.parts) {
    const StoredLinear& linear = linear_of(part);
    // Matrices that the program makes of its own, in 16 bit, whatever the config says.
    if (linear.form == Form::plain && is_head(part) && describe(question.program).fuses) continue;
    if (same_form(asked.scheme->form, linear.form)) continue;
    const bool by_version = linear.form == Form::awq_other || linear.form == Form::gptq;  // of another rule
    if (model.method() == Method::awq && by_version) continue;
    findings.add(Severity::refused, linear.name(), concat(model.place(), ".", asked.by),
                 concat(to_string(asked.scheme->form), " in ",
                        layer.split == Split::experts ? "all experts" : last_part(layer.name)),
                 std::string(to_string(linear.form)),
                 linear.form == Form::plain ? words_for(model, layer) : std::string(made_with));
  }
}

/// What packed matrices are under a method; empty: of other rules.
std::vector<Form> forms_of(Method method) {
  switch (method) {
    case Method::awq:
      return {Form::awq, Form::awq_other};
    case Method::gptq:
      return {Form::gptq};
    case Method::compressed_tensors:
      return {Form::words, Form::int8, Form::fp8, Form::mxfp8, Form::nvfp4, Form::mxfp4};
    case Method::fp8:
    case Method::mxfp8:
      return {Form::fp8, Form::mxfp8};
    case Method::mxfp4:
      return {Form::mxfp4, Form::mxfp4_stack};
    case Method::modelopt:
      return {Form::nvfp4_modelopt, Form::fp8, Form::mxfp8, Form::mxfp4};
    default:
      return {};
  }
}

/// Of a program that takes for packed what has scales, whatever lists say: each is of the kind that the method states.
void layers_by_tensors(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  const auto forms = forms_of(model.method());
  if (forms.empty()) return;
  for (const auto& [path, linear] : model.linears()) {
    if (!is_packed(linear) || std::ranges::find(forms, linear.form) != forms.end()) continue;
    findings.add(Severity::refused, linear.name(), concat(model.place(), ".quant_method"),
                 std::string(to_string(forms.front())), std::string(to_string(linear.form)), std::string(made_with));
  }
}

void layers(const Question& question, Findings& findings) {
  if (question.program == mlx) return layers_by_tensors(question, findings);
  if (!has_lists(question.model.method())) return;
  for (const Layer& layer : question.model.layers(describe(question.program).fuses))
    layer_of(question, layer, findings);
}

/// Whatever a config says of it, a layer that is loaded as one has one form and one type of words.
void fused_forms(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() == Method::none) return;
  for (const Layer& layer : model.layers(true)) {
    if (layer.parts.size() < 2 || (layer.fused == nullptr && layer.split != Split::experts)) continue;
    std::map<Form, std::vector<std::string>> forms;
    for (const auto& part : layer.parts) forms[model.linears().find(part)->second.form].push_back(part);
    if (forms.size() < 2) continue;
    const auto most = std::ranges::max_element(forms, {}, [](const auto& entry) { return entry.second.size(); });
    for (const auto& [form, parts] : forms) {
      if (form == most->first) continue;
      for (const auto& part : parts) {
        findings.add(Severity::refused, model.linears().find(part)->second.name(), {},
                     concat(to_string(most->first), ", as the others of ", layer.name), std::string(to_string(form)),
                     "quantize all parts of what servers fuse alike, or none");
      }
    }
  }
}

/// Words and scales of a row of outputs; "": headers do not tell.
std::string row_text(const StoredLinear& linear) {
  const io::TensorInfo* const codes = linear.find("weight");
  const io::TensorInfo* const scales = linear.find("weight_scale");
  if (linear.form != Form::humming || codes == nullptr || codes->shape.size() != 2) return {};
  const int64_t groups = scales == nullptr || scales->shape.size() != 2 ? 1 : scales->shape[1];
  return concat(codes->shape[1], " words and ", groups, " scales a row",
                linear.find("zero_point") == nullptr ? "" : ", with zero points");
}

/// Where only headers tell widths, as Humming's: parts that read the same inputs have the same words and groups.
void fused_widths(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::humming) return;
  std::map<std::string, std::vector<std::string>> groups;
  for (const auto& [path, linear] : model.linears()) {
    const FusedRow* const row = fused_row(last_part(path));
    const ExpertPlace place = expert_place(path);
    if (row == nullptr && place.mixture.empty()) continue;
    const std::string_view last = row == nullptr ? place.projection : row->name;
    groups[concat(place.mixture.empty() ? parent(path) : place.mixture, ".", last)].push_back(path);
  }
  for (const auto& [name, parts] : groups) {
    std::map<std::string, size_t> counts;
    for (const auto& part : parts) ++counts[row_text(model.linears().find(part)->second)];
    counts.erase("");
    if (counts.size() < 2) continue;
    const std::string& most =
        std::ranges::max_element(counts, {}, &std::pair<const std::string, size_t>::second)->first;
    for (const auto& part : parts) {
      const StoredLinear& linear = model.linears().find(part)->second;
      std::string row = row_text(linear);
      if (row.empty() || row == most) continue;
      findings.add(Severity::refused, linear.name(), {}, concat(most, ", as the others of ", last_part(name)),
                   std::move(row), "one scheme for all parts of what servers fuse");
    }
  }
}

void fused(const Question& question, Findings& findings) {
  fused_forms(question, findings);
  fused_widths(question, findings);
}

void routers(const Question& question, Findings& findings) {
  for (const auto& [path, linear] : question.model.linears()) {
    if (!is_packed(linear) || !is_router(path) || linear.form == Form::other) continue;
    findings.add(Severity::refused, linear.name(), {}, "16 bit: servers never load packed routers",
                 std::string(to_string(linear.form)), "quantize without routers (--keep '*.gate')");
  }
}

/// Experts of a mixture, whatever stacks are called.
bool is_of_experts(const std::string& path) {
  constexpr std::string_view parts[] = {".experts.", ".input_linear.", ".output_linear."};
  return std::ranges::any_of(parts, [&](std::string_view part) { return path.find(part) != std::string::npos; });
}

/// Each stack is one parameter there, which no names of single experts become: it is drawn at random.
void stacks(const Question& question, Findings& findings, bool small_floats) {
  for (const auto& [path, linear] : question.model.linears()) {
    if (!is_of_experts(path) || !is_packed(linear) || (small_floats && linear.form == Form::mxfp4_stack)) continue;
    findings.add(
        Severity::wrong, linear.name(), {}, concat("stacks of experts, in 16 bit", small_floats ? " or MXFP4" : ""),
        std::string(to_string(linear.form)),
        concat(small_floats ? "w4q quantize --to gpt-oss; or " : "", "keep the experts (--keep '*.experts.*')"));
  }
}

void oss_experts(const Question& question, Findings& findings) {
  if (text(question.model.config(), "model_type") == "gpt_oss") stacks(question, findings, true);
}

void stacked_experts(const Question& question, Findings& findings) {
  const std::string type = text(question.model.config(), "model_type");
  if (type == "gemma4" || type == "gemma4_text" || type == "granitemoe") stacks(question, findings, false);
}

/// Experts are one parameter a layer, which words of GPTQ and AWQ never become: only GPTQModel's own loader takes it apart.
void experts_by_gptqmodel(const Question& question, Findings& findings) {
  const Method method = question.model.method();
  if (method != Method::gptq && method != Method::awq) return;
  for (const auto& [path, linear] : question.model.linears()) {
    if (path.find(".experts.") == std::string::npos || !is_packed(linear)) continue;
    findings.add(Severity::note, linear.name(), {}, "that experts are loaded by GPTQModel.load",
                 std::string(to_string(linear.form)),
                 "from_pretrained draws them at random; w4q repack --to compressed-tensors holds the same codes");
    return;
  }
}

/// Experts are decompressed by their scales alone, without the factor of the tensor, which all are off by then.
void expert_factors(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::compressed_tensors) return;
  for (const auto& [path, linear] : model.linears()) {
    if (!is_of_experts(path) || linear.form != Form::nvfp4) continue;
    findings.add(Severity::wrong, linear.name(), {},
                 "experts whose scales stand alone: its weight_global_scale is not read",
                 std::string(to_string(linear.form)),
                 "another format for the experts (FP8, integers), or keep them (--keep '*.experts.*')");
  }
}

void embeddings(const Question& question, Findings& findings) {
  const bool by_vllm = question.program == vllm && question.model.method() == Method::compressed_tensors;
  for (const auto& [path, linear] : question.model.linears()) {
    const bool table = path.ends_with("embed_tokens") || path.ends_with("wte");
    if (!table || !is_packed(linear) || linear.form == Form::other) continue;
    if (by_vllm && linear.form == Form::words && linear.find("weight_zero_point") == nullptr) continue;
    findings.add(Severity::refused, linear.name(), {},
                 by_vllm ? "16 bit, or symmetric integers" : "16 bit: no packed embeddings",
                 std::string(to_string(linear.form)), "quantize without --embeddings");
  }
}

/// Rules that name parts, which no server asks for.
void dynamic_names(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  if (model.method() != Method::gptq && model.method() != Method::auto_round) return;
  const io::Json& rules = member(model.quantization(), "dynamic");
  if (!rules.is_object()) return;
  std::set<std::string> names;
  for (const Layer& layer : model.layers(true)) {
    if (layer.fused != nullptr) names.insert(layer.name);
  }
  for (const auto& [key, value] : rules.items()) {
    if (key.starts_with("-:") || !value.is_object()) continue;
    const bool marked = key.starts_with("+:");
    const Pattern pattern(std::string_view(key).substr(marked ? 2 : 0), model.place());
    bool fused = false, part = false;
    for (const Layer& layer : model.layers(true)) {
      fused = fused || pattern.matches(layer.name);
      if (layer.fused == nullptr) continue;
      for (const auto& name : layer.parts) part = part || pattern.matches(name);
    }
    if (!part || fused) continue;
    findings.add(Severity::refused, {}, concat(model.place(), ".dynamic[\"", printable(key), "\"]"),
                 "a rule that matches the fused names too, such as …qkv_proj", "single names alone",
                 "write the rule for the fused name too: w4q repack --to gptq-v1 does");
  }
}

}  // namespace

std::vector<Rule> layer_rules() {
  return {
      {"layers", folder_readers, "each layer is stored as config.json says, in the words in which the program asks",
       "vllm compressed_tensors/utils.py, gptq_utils.py, quant_utils.py is_layer_skipped; sglang "
       "quantization/utils.py; "
       "mlx-lm utils.py infer_quant_config",
       layers},
      {"fused",
       {vllm, sglang, trt_llm},
       "q, k, v, and gate, up, and all experts have one form; of Humming one width and groups",
       "vllm compressed_tensors.py get_scheme, humming.py get_layer_weight_schema",
       fused},
      {"routers",
       {vllm, sglang, trt_llm},
       "routers stay in 16 bit",
       "vllm models/*.py: gates have no quant_config",
       routers},
      {"gpt-oss",
       {transformers},
       "experts of gpt-oss are stacks",
       "transformers gpt_oss/modeling_gpt_oss.py, conversion_mapping.py",
       oss_experts},
      {"stacked-experts",
       {transformers},
       "experts of Gemma 4 and Granite are stacks",
       "transformers conversion_mapping.py: no entry of single experts",
       stacked_experts},
      {"gptqmodel-experts",
       {transformers},
       "a note: words of GPTQ and AWQ become experts by GPTQModel.load alone",
       "transformers conversion_mapping.py; gptqmodel with defuser",
       experts_by_gptqmodel},
      {"expert-factors",
       {transformers},
       "experts of compressed-tensors have no factor of the tensor",
       "transformers integrations/compressed_tensors.py CompressedTensorsDequantize",
       expert_factors},
      {"embeddings", readers, "embedding tables stay in 16 bit; vllm reads symmetric integers of compressed-tensors",
       "vllm compressed_tensors_embedding.py", embeddings},
      {"dynamic", servers, "rules of dynamic match the names of fused layers",
       "vllm gptq_utils.py get_dynamic_override", dynamic_names},
  };
}

}  // namespace w4q::serving
