#include "checkpoint/mlx_names.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/text.h"

namespace w4q::checkpoint {
namespace {

/// Families whose text model transformers stores below "model.language_model.".
bool stands_inside(const io::Json& config) {
  constexpr std::string_view families[] = {"qwen3_5", "qwen3_vl", "gemma4"};
  const auto type = config.find("model_type");
  if (type == config.end() || !type->is_string()) return false;
  const auto name = type->get<std::string>();
  return std::ranges::any_of(families, [&](std::string_view family) { return name.starts_with(family); });
}

bool is_text_alone(const io::Json& config) {
  const auto classes = config.find("architectures");
  return classes != config.end() && classes->is_array() && !classes->empty() && classes->front().is_string() &&
         classes->front().get<std::string>().ends_with("ForCausalLM");
}

}  // namespace

std::string mlx_expert(const std::string& module, int64_t expert) {
  constexpr std::string_view stack = ".switch_mlp.";
  const size_t at = module.find(stack);
  if (at == std::string::npos) {
    const size_t dot = module.rfind('.');
    const bool of_mixture = dot != std::string::npos && std::string_view(module).substr(0, dot).ends_with(".experts");
    return of_mixture ? concat(module.substr(0, dot), ".", expert, module.substr(dot)) : concat(module, ".", expert);
  }
  const std::string path = module.substr(0, at), part = module.substr(at + stack.size());
  std::string name = part;
  if (path.ends_with("block_sparse_moe")) {
    for (const auto& [ours, theirs] : {std::pair("gate_proj", "w1"), {"down_proj", "w2"}, {"up_proj", "w3"}}) {
      if (part == ours) name = theirs;
    }
  }
  return concat(path, ".experts.", expert, ".", name);
}

std::string name_behind_mlx(const io::Json& config, const std::string& name) {
  constexpr std::string_view text = "language_model.model.", head = "language_model.lm_head.";
  if (!stands_inside(config)) return name;
  if (name.starts_with(head)) return concat("lm_head.", name.substr(head.size()));
  if (!name.starts_with(text)) return name;
  return concat(is_text_alone(config) ? "model." : "model.language_model.", name.substr(text.size()));
}

}  // namespace w4q::checkpoint
