// Rules about values of small tensors: orders of groups, factors, scales of the cache.
#include <algorithm>
#include <cmath>
#include <map>

#include "core/text.h"
#include "serving/rules.h"

namespace w4q::serving {
namespace {

using enum Program;

/// Whether each input is in the group that its place gives: in order, whatever their size.
bool in_order(const std::vector<double>& groups) { return std::ranges::is_sorted(groups); }

void group_order(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  const bool loads_order = question.program == sglang && question.asked.common() && question.asked.common()->act_order;
  if (loads_order) return;
  for (const auto& [path, linear] : model.linears()) {
    if (linear.form != Form::gptq && linear.form != Form::words) continue;
    const io::TensorInfo* order = linear.find("g_idx");
    const bool ct = order == nullptr;
    if (ct) order = linear.find("weight_g_idx");
    if (order == nullptr) continue;
    const auto groups = model.values(order->name);
    if (!groups || in_order(*groups)) continue;
    const bool stated =
        std::ranges::any_of(question.asked.groups(), [](const auto& group) { return group.scheme.act_order; }) ||
        (question.asked.common() && question.asked.common()->act_order);
    if (stated && question.program == vllm) continue;  // refused already
    if (ct && question.program == sglang && stated) continue;
    findings.add(
        ct ? Severity::refused : Severity::wrong, order->name,
        concat(model.place(), ct ? ".config_groups" : ".desc_act"),
        "groups in the order of inputs, as the order is not read", "another order",
        "w4q repack --to gptq-v1 keeps every code and says desc_act, which sglang and transformers read; w4q quantize "
        "--quality good --for vllm rounds these weights again, in order");
  }
}

void no_order(const Question& question, Findings& findings) {
  for (const auto& [path, linear] : question.model.linears()) {
    if (linear.form != Form::gptq) continue;
    const io::TensorInfo* const order = linear.find("g_idx");
    const auto groups = order == nullptr ? std::nullopt : question.model.values(order->name);
    const bool shuffled = groups && !in_order(*groups);
    findings.add(Severity::refused, order == nullptr ? linear.name() : order->name, {},
                 "AWQ's words along outputs, and no g_idx", order == nullptr ? "GPTQ's words along inputs" : "a g_idx",
                 shuffled ? "w4q quantize reads these weights: --to awq-gemm rounds them again, in order"
                          : "w4q repack --to awq-gemm holds the same codes");
  }
}

/// Factors of parts that are loaded as one.
void factors(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  std::map<std::string, std::vector<std::string>> pairs;
  for (const auto& [path, linear] : model.linears()) {
    if (linear.form != Form::nvfp4 && linear.form != Form::nvfp4_modelopt) continue;
    const FusedRow* const row = fused_row(last_part(path));
    if (row != nullptr) pairs[concat(parent(path), ".", row->name)].push_back(path);
  }
  for (const auto& [fused, parts] : pairs) {
    std::vector<double> seen;
    std::vector<std::string> names;
    for (const auto& part : parts) {
      const StoredLinear& linear = model.linears().find(part)->second;
      const io::TensorInfo* factor = linear.find("weight_global_scale");
      if (factor == nullptr) factor = linear.find("weight_scale_2");
      if (factor == nullptr) continue;
      const auto values = model.values(factor->name);
      if (!values || values->empty()) continue;
      seen.push_back(values->front()), names.push_back(factor->name);
    }
    if (seen.size() < 2) continue;
    const auto [least, most] = std::ranges::minmax(seen);
    if (!(most - least > 1e-5 * std::abs(most))) continue;
    const bool experts = fused.find(".experts.") != std::string::npos;
    for (size_t i = 0; i < seen.size(); ++i) {
      findings.add(Severity::wrong, names[i], {}, concat("one factor for all of ", fused),
                   concat("factors from ", least, " to ", most),
                   experts ? "gate's is used for up too: quantize the pair with one factor"
                           : "the largest divisor is used for all: quantize the parts with one factor");
    }
  }
}

bool is_cache_scale(std::string_view name) {
  return name.ends_with(".k_scale") || name.ends_with(".v_scale") || name.ends_with(".kv_scale");
}

void cache_scales(const Question& question, Findings& findings) {
  const StoredModel& model = question.model;
  for (const auto& [name, info] : model.tensors()) {
    if (!is_cache_scale(name)) continue;
    const auto values = model.values(name);
    if (values) {
      const auto bad =
          std::ranges::find_if(*values, [](double value) { return !(value > 0) || !std::isfinite(value); });
      if (bad != values->end()) {
        findings.add(Severity::refused, name, {}, "a positive number", concat(*bad),
                     "calibrate the cache again, or take its scales out");
      }
    }
    if (!name.ends_with(".v_scale")) continue;
    std::string key = name;
    key.replace(key.rfind(".v_scale"), 8, ".k_scale");
    // Below v_proj stands v's, below k_proj k's.
    if (const size_t at = key.rfind(".v_proj."); at != std::string::npos) key.replace(at, 8, ".k_proj.");
    if (model.tensors().contains(key)) continue;
    findings.add(Severity::refused, name, {}, concat("a scale of keys beside it: ", key), "none", "calibrate both");
  }
}

}  // namespace

std::vector<Rule> value_rules() {
  return {
      {"group-order",
       {vllm, sglang},
       "where desc_act is false, g_idx is in order: servers drop it",
       "vllm base_config.py:255-259; sglang gptq.py",
       group_order},
      {"no-g-idx", {mlx}, "no g_idx, and words as AWQ has them", "mlx_lm/utils.py _transform_awq_weights", no_order},
      {"factors",
       {vllm, sglang, trt_llm},
       "q, k, v, and gate, up of NVFP4 share a factor",
       "vllm compressed_tensors_w4a4_nvfp4.py; modelopt.py:1057-1063",
       factors},
      {"cache-scales",
       {vllm, sglang, trt_llm},
       "scales of the cache are positive, and keys have one where values do",
       "vllm kv_cache.py:120-145",
       cache_scales},
  };
}

}  // namespace w4q::serving
