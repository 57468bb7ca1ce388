// Over how many GPUs a model can be spread: heads, groups and packing words must not be cut.
#include <algorithm>
#include <optional>

#include "core/text.h"
#include "serving/rules.h"

namespace w4q::serving {
namespace {

using enum Program;

struct Cut {
  std::string tensor, why, remedy;
};

int64_t words_of(int bits) { return bits == 3 || bits == 5 || bits == 6 || bits == 7 ? 32 : bits > 0 ? 32 / bits : 1; }

/// A layer whose inputs are shared out.
std::optional<Cut> cut_inputs(const StoredLinear& linear, const StatedScheme& scheme, int64_t k, int gpus) {
  const auto cut = [&](const std::string& why, std::string remedy) {
    return Cut{linear.name(), concat(k, " inputs over ", gpus, gpus == 1 ? " GPU: " : " GPUs: ", why),
               std::move(remedy)};
  };
  if (k % gpus != 0) return cut("not the same for each", "fewer GPUs");
  const int64_t share = k / gpus;
  const std::string smaller = "fewer GPUs, or quantize with smaller groups";
  // Of MXFP4 servers pad what is cut.
  const bool cuts = scheme.form != Form::mxfp4 && scheme.form != Form::mxfp4_stack;
  if (cuts && scheme.group > 0 && share % scheme.group != 0) {
    return cut(concat(share, " are no multiple of groups of ", scheme.group), smaller);
  }
  if (scheme.form == Form::fp8 && scheme.block_cols > 0 && gpus > 1 && share % scheme.block_cols != 0) {
    return cut(concat(share, " are no multiple of blocks of ", scheme.block_cols), "fewer GPUs");
  }
  if (scheme.form == Form::gptq && share % words_of(scheme.bits) != 0) {
    return cut(concat(share, " fill no whole words of ", scheme.bits, " bits"), "fewer GPUs");
  }
  if ((linear.form == Form::nvfp4 || linear.form == Form::nvfp4_modelopt) && share % 16 != 0) {
    return cut(concat(share, " are no multiple of groups of 16"), "fewer GPUs");
  }
  return std::nullopt;
}

struct Heads {
  int64_t queries = 0, keys = 0;
};

Heads heads_of(const StoredModel& model) {
  const int64_t queries = model.number({"num_attention_heads"});
  const int64_t keys = model.number({"num_key_value_heads"});
  return {queries, keys > 0 ? keys : queries};
}

/// Keys and values are there several times where GPUs outnumber their heads.
int64_t share_of_outputs(std::string_view part, int64_t n, const Heads& heads, int gpus) {
  const bool keyed = part == "k_proj" || part == "v_proj";
  if (keyed && heads.keys > 0 && heads.keys < gpus) return n / heads.keys;
  return n % gpus == 0 ? n / gpus : -1;
}

std::optional<Cut> cut_outputs(const StoredModel& model, const Layer& layer, const StatedScheme& scheme, int gpus) {
  const Heads heads = heads_of(model);
  int64_t sum = 0;
  for (const auto& part : layer.parts) {
    const StoredLinear& linear = model.linears().find(part)->second;
    if (linear.n <= 0) return std::nullopt;
    const std::string_view last = part.c_str() + part.rfind('.') + 1;
    const int64_t share = share_of_outputs(last, linear.n, heads, gpus);
    const auto cut = [&](const std::string& why) {
      return Cut{linear.name(), concat(linear.n, " outputs over ", gpus, gpus == 1 ? " GPU: " : " GPUs: ", why),
                 "fewer GPUs"};
    };
    if (share < 0) return cut("not the same for each");
    const bool merged = layer.parts.size() > 1;
    if (scheme.form == Form::fp8 && scheme.block_rows > 0 && (gpus > 1 || (merged && part != layer.parts.back())) &&
        share % scheme.block_rows != 0) {
      return cut(concat(share, " are no multiple of blocks of ", scheme.block_rows));
    }
    sum += share;
    if (scheme.form == Form::awq && part == layer.parts.back() && sum % 8 != 0) {
      return cut(concat(sum, " of ", layer.name, " fill no whole words of 8"));
    }
  }
  return std::nullopt;
}

std::optional<Cut> cut_experts(const StoredModel& model, const Layer& layer, const StatedScheme& scheme, int gpus) {
  for (const auto& part : layer.parts) {
    const StoredLinear& linear = model.linears().find(part)->second;
    const std::string_view last = part.c_str() + part.rfind('.') + 1;
    if (last == "down_proj" || last == "w2") {
      const int64_t k = linear.form == Form::words ? 0 : linear.k;
      if (k > 0) {
        if (auto cut = cut_inputs(linear, scheme, k, gpus)) return cut;
      }
    } else if (linear.n > 0 && linear.experts == 0) {
      // What gate and up give is what down takes: its groups are not cut either.
      if (auto cut = cut_inputs(linear, scheme, linear.n, gpus)) {
        cut->why = concat(linear.n, " outputs", cut->why.substr(cut->why.find(" over ")));
        return cut;
      }
      if (scheme.form == Form::fp8 && scheme.block_rows > 0 && (linear.n / gpus) % scheme.block_rows != 0) {
        return Cut{linear.name(),
                   concat(linear.n, " outputs over ", gpus, " GPUs: no multiple of blocks of ", scheme.block_rows),
                   "fewer GPUs"};
      }
    }
  }
  return std::nullopt;
}

/// Inputs of a linear, from its groups where words alone do not tell.
int64_t inputs_of(const StoredModel& model, const StoredLinear& linear, const StatedScheme& scheme) {
  if (linear.k > 0) return linear.k;
  const io::TensorInfo* const shape = linear.find("weight_shape");
  if (shape != nullptr) {
    const auto values = model.values(shape->name);
    if (values && values->size() == 2) return static_cast<int64_t>((*values)[1]);
  }
  const io::TensorInfo* const scales = linear.find("weight_scale");
  const bool whole_codes = scheme.bits > 0 && 32 % scheme.bits == 0;
  if (!whole_codes && scheme.group > 0 && scales != nullptr && scales->shape.size() == 2)
    return scales->shape[1] * scheme.group;
  for (const char* words : {"weight_packed", "weight"}) {
    const io::TensorInfo* const codes = linear.find(words);
    if (codes != nullptr && codes->shape.size() == 2 && scheme.bits > 0) return codes->shape[1] * 32 / scheme.bits;
  }
  const io::TensorInfo* const words = linear.find("qweight");
  return words != nullptr && words->shape.size() == 2 && scheme.bits > 0 ? words->shape[0] * 32 / scheme.bits : 0;
}

std::optional<Cut> cut_layer(const Question& question, const Layer& layer, int gpus) {
  const StoredModel& model = question.model;
  const Asked asked = question.asked.of(question.program, layer);
  if (!asked.refused.empty()) return std::nullopt;
  const StatedScheme scheme = asked.scheme.value_or(StatedScheme{});
  switch (layer.split) {
    case Split::inputs: {
      const StoredLinear& linear = model.linears().find(layer.parts.front())->second;
      const int64_t k = inputs_of(model, linear, scheme);
      return k > 0 ? cut_inputs(linear, scheme, k, gpus) : std::nullopt;
    }
    case Split::outputs: {
      // Whole groups fill the inputs, however many GPUs there are.
      for (const auto& part : layer.parts) {
        const StoredLinear& linear = model.linears().find(part)->second;
        const int64_t k = inputs_of(model, linear, scheme);
        if (gpus == 1 && k > 0) {
          if (auto cut = cut_inputs(linear, scheme, k, 1)) return cut;
        }
      }
      return is_served_linear(layer.parts.front()) ? cut_outputs(model, layer, scheme, gpus) : std::nullopt;
    }
    case Split::experts:
      return cut_experts(model, layer, scheme, gpus);
    case Split::none:
      return std::nullopt;
  }
  return std::nullopt;
}

std::optional<Cut> cut_heads(const StoredModel& model, int gpus) {
  const Heads heads = heads_of(model);
  if (heads.queries > 0 && heads.queries % gpus != 0) {
    return Cut{{}, concat(heads.queries, " heads over ", gpus, " GPUs: not the same for each"), "fewer GPUs"};
  }
  const bool shared = heads.keys >= gpus ? heads.keys % gpus == 0 : heads.keys == 0 || gpus % heads.keys == 0;
  if (shared) return std::nullopt;
  return Cut{{}, concat(heads.keys, " heads of keys over ", gpus, " GPUs: not the same for each"), "fewer GPUs"};
}

void marlin_experts(const Question& question, Findings& findings) {
  for (const Layer& layer : question.model.layers(true)) {
    if (layer.split != Split::experts) continue;
    const Asked asked = question.asked.of(question.program, layer);
    if (!asked.scheme) continue;
    const StatedScheme& scheme = *asked.scheme;
    const bool words = scheme.form == Form::words || scheme.form == Form::gptq || scheme.form == Form::awq;
    if (!words) continue;
    const int64_t hidden = question.model.number({"hidden_size"});
    const bool grouped = scheme.group == -1 || scheme.group == 32 || scheme.group == 64 || scheme.group == 128;
    if ((hidden <= 0 || hidden % 128 == 0) && grouped) continue;
    findings.add(Severity::note, layer.name, "config.json: hidden_size",
                 "for Marlin: a multiple of 128, groups of 32, 64, 128 or whole rows",
                 concat(hidden, ", groups of ", scheme.group),
                 "without Marlin a slower path is taken, which fails on sm_89");
  }
}

}  // namespace

std::vector<int> tensor_parallel(const Question& question, Findings& findings) {
  constexpr int most = 8;
  std::vector<int> possible;
  if (!describe(question.program).splits || question.model.method() == Method::gguf) return possible;
  for (int gpus = 1; gpus <= most; ++gpus) {
    if (cut_heads(question.model, gpus)) continue;
    std::optional<Cut> cut;
    for (const Layer& layer : question.model.layers(true)) {
      if ((cut = cut_layer(question, layer, gpus))) break;
    }
    if (!cut) {
      possible.push_back(gpus);
      continue;
    }
    findings.of_rule("tensor-parallel");
    findings.add(gpus == 1 ? Severity::refused : Severity::note, cut->tensor, {},
                 concat("whole groups, blocks and words for each of ", gpus, gpus == 1 ? " GPU" : " GPUs"), cut->why,
                 cut->remedy);
  }
  return possible;
}

std::vector<Rule> parallel_rules() {
  return {
      {"tensor-parallel",
       {vllm, sglang, trt_llm},
       "groups, blocks, words and heads are not cut by tensor parallel 1 to 8",
       "vllm auto_awq.py:820-828, fp8_utils.py validate_fp8_block_shape, marlin_utils.py:222, 358-387",
       [](const Question&, Findings&) {}},
      {"marlin-experts",
       {vllm},
       "experts have sizes that Marlin takes",
       "vllm marlin_utils.py check_moe_marlin_supports_config",
       marlin_experts},
  };
}

}  // namespace w4q::serving
