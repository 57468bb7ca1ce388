#include "model/parameters.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>

#include "core/text.h"
#include "model/layer_plan.h"
#include "model/model.h"

namespace w4q::model {
namespace {

std::string gguf_name(const std::string& module, std::string_view end) {
  return module.empty() ? std::string() : concat(module, end);
}

void add_norm(const PlannedNorm& norm, std::vector<Parameter>& list) {
  list.push_back({norm.name + ".weight", {norm.size}, false, gguf_name(norm.gguf, ".weight")});
  list.back().gguf_offset = norm.offset;
}

void add_linear(const PlannedLinear& linear, std::vector<Parameter>& list) {
  list.push_back(
      {linear.name + ".weight", {linear.n, linear.k}, true, gguf_name(linear.gguf, ".weight"), linear.rotary_rows});
  list.back().gguf_part = linear.gguf_part;
  if (linear.bias && linear.bias_tensor.empty())
    list.push_back({linear.name + ".bias", {linear.n}, false, gguf_name(linear.gguf, ".bias"), linear.rotary_rows});
}

void add_block(const Block& block, std::vector<Parameter>& list) {
  const auto norms = [&](bool of_input) {
    for (const auto& norm : block.norms) {
      if ((norm.role == NormRole::input) == of_input) add_norm(norm, list);
    }
  };
  norms(true);
  std::map<std::string, Parameter> biases;  // that several linears share
  for (const auto& group : block.groups) {
    for (const auto& linear : group.linears) {
      add_linear(linear, list);
      if (!linear.bias || linear.bias_tensor.empty()) continue;
      const std::string& name = linear.bias_tensor;
      biases[name] = {name, {linear.bias_row + 1, linear.n}, false, gguf_name(linear.gguf, ".bias")};
    }
  }
  for (auto& [name, bias] : biases) list.push_back(std::move(bias));
  norms(false);
  for (const auto& vector : block.vectors) list.push_back({vector.name, vector.shape, false, vector.gguf});
}

/// A part of a path and why what stands under it is left.
struct Place {
  std::string_view begins;  ///< the part begins so
  std::string_view why;
};

constexpr Place anywhere[] = {
    {"visual", of_tower},
    {"vision", of_tower},
    {"audio", of_tower},
    {"image", of_tower},
    {"embed_vision", of_tower},
    {"embed_audio", of_tower},
    {"multi_modal", of_tower},
    {"mm_projector", of_tower},
    {"vit", of_tower},
    {"perception", of_tower},
    {"merger", of_tower},
    {"mtp", further_tokens},
    {"nextn", further_tokens},
    {"lora_", "adapter"},
    {"adapter", "adapter"},
    {"indexer", "indexer"},
    {"compressor", "compressor of keys"},
};

/// The last part of a path, as a whole.
constexpr Place by_name[] = {
    {"gate", "router"},
    {"router", "router"},
    {"shared_expert_gate", "gate of the shared expert"},
    {"per_layer_input_gate", "gate of the embeddings of layers"},
    {"in_proj_a", "decay of a state"},
    {"in_proj_b", "decay of a state"},
    {"in_proj_ba", "decay of a state"},
    {"b_proj", "decay of a state"},
    {"f_proj", "decay of a state"},
    {"f_a_proj", "decay of a state"},
    {"f_b_proj", "decay of a state"},
    {"g_a_proj", "narrow gate of a state"},
    {"g_b_proj", "narrow gate of a state"},
    {"dt_proj", "step of a state"},
    {"x_proj", "step of a state"},
    {"relative_attention_bias", "embeddings"},
};

std::vector<std::string_view> parts_of(std::string_view path) {
  std::vector<std::string_view> parts;
  while (!path.empty()) {
    const size_t dot = std::min(path.find('.'), path.size());
    parts.push_back(path.substr(0, dot));
    path.remove_prefix(std::min(dot + 1, path.size()));
  }
  return parts;
}

/// Why what stands anywhere under one of these parts is left; empty: it does not.
std::string_view reason_anywhere(const std::vector<std::string_view>& parts) {
  for (const std::string_view part : parts) {
    const auto found =
        std::ranges::find_if(anywhere, [&](const Place& place) { return part.starts_with(place.begins); });
    if (found != std::end(anywhere)) return found->why;
  }
  return {};
}

/// The number that a part is, or -1.
int64_t number_of(std::string_view part) {
  int64_t number = -1;
  const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number);
  return error == std::errc() && end == part.data() + part.size() ? number : -1;
}

int64_t stated_layers(const io::Json& config) {
  for (const io::Json* object : {&config, config.contains("text_config") ? &config["text_config"] : nullptr}) {
    if (object == nullptr || !object->is_object()) continue;
    const auto found = object->find("num_hidden_layers");
    if (found != object->end() && found->is_number_integer()) return found->get<int64_t>();
  }
  return 0;
}

Parameter found_parameter(const io::TensorInfo& info, int64_t layers) {
  Parameter parameter{info.name, info.shape, false, {}, false, {}};
  if (info.shape.size() < 2) return parameter;  // norms, biases: never packed, and nobody asks why
  if (info.shape.size() > 2) {
    parameter.left = concat(info.shape.size(), " dimensions");
  } else if (!is_weight_dtype(info.dtype)) {
    parameter.left = concat("of type ", dtype_name(info.dtype));
  } else if (!info.name.ends_with(".weight")) {
    parameter.left = "not the weight of a module";
  } else {
    parameter.linear = true;
    parameter.left = reason_to_leave(module_path(info.name), layers);
  }
  return parameter;
}

/// Parameters as names and shapes tell.
std::vector<Parameter> found_parameters(const OpenedModel& model) {
  const checkpoint::Folder& folder = model.folder;
  std::vector<Parameter> list;
  std::set<std::string, std::less<>> planes;
  for (const auto& stack : model.apart) planes.insert(stack.name);
  for (const auto& [module, info] : folder.quantization.linears) {
    list.push_back({module + ".weight", {info.n, info.k}, true, {}, false, {}});
    for (auto& plane : checkpoint::planned_planes(info)) planes.insert(std::move(plane.name));
  }
  const int64_t layers = stated_layers(folder.config);
  for (const auto& [name, info] : folder.tensors.tensors()) {
    if (!planes.contains(name)) list.push_back(found_parameter(info, layers));
  }
  std::ranges::sort(list, {}, &Parameter::name);
  return list;
}

}  // namespace

std::string_view module_path(std::string_view tensor_name) noexcept {
  constexpr std::string_view suffix = ".weight";
  return tensor_name.ends_with(suffix) ? tensor_name.substr(0, tensor_name.size() - suffix.size()) : tensor_name;
}

LayerNumbers layer_numbers(std::string_view module) noexcept {
  LayerNumbers numbers;
  while (!module.empty() && numbers.expert < 0) {
    const size_t dot = std::min(module.find('.'), module.size());
    const int64_t number = number_of(module.substr(0, dot));
    if (number >= 0) (numbers.layer < 0 ? numbers.layer : numbers.expert) = number;
    module.remove_prefix(std::min(dot + 1, module.size()));
  }
  return numbers;
}

bool is_head(std::string_view module) noexcept { return module == "lm_head" || module.ends_with(".lm_head"); }

bool is_embedding(std::string_view module) noexcept {
  return module == "embed_tokens" || module.ends_with(".embed_tokens");
}

std::string_view reason_to_carry(const ModelConfig& config, std::string_view tensor) {
  const std::string_view module = module_path(tensor);
  const auto parts = parts_of(module);
  if (const auto why = reason_anywhere(parts); !why.empty()) return why;
  if (is_derived_tensor(tensor)) return "implied by config.json";
  if (module == config.names.head || module.starts_with(config.names.head + "."))
    return config.tied_embeddings ? std::string_view("the head, which the embeddings are") : std::string_view();
  const int64_t layer = layer_numbers(module).layer;
  if (layer >= config.layers) return further_tokens;
  const bool shares =
      layer >= 0 && !config.attention.empty() && config.attention[static_cast<size_t>(layer)].keys_of.has_value();
  if (shares && module.find(".self_attn.") != std::string_view::npos) return never_read;
  if (config.names.prefix != "model." && !tensor.starts_with(config.names.prefix)) return of_tower;
  return {};
}

std::string_view reason_to_leave(std::string_view module, int64_t layers) {
  const auto parts = parts_of(module);
  if (const auto why = reason_anywhere(parts); !why.empty()) return why;
  const auto number = std::ranges::find_if(parts, [](std::string_view part) { return number_of(part) >= 0; });
  if (number == parts.end()) {
    return is_head(module) ? left_head : is_embedding(module) ? left_embeddings : "outside of the layers";
  }
  if (layers > 0 && number_of(*number) >= layers) return further_tokens;
  const std::string_view last = parts.back();
  const std::string_view owner = parts.size() < 2 ? std::string_view() : parts[parts.size() - 2];
  if (last.find("norm") != std::string_view::npos || owner.ends_with("norm")) return "norm";
  if (last.find("conv") != std::string_view::npos) return "convolution";
  if (last.find("embed") != std::string_view::npos) return "embeddings";
  const auto found = std::ranges::find(by_name, last, &Place::begins);
  if (found != std::end(by_name)) return found->why;
  const bool routes = std::ranges::find(parts, "router") != parts.end();
  return routes ? "router" : std::string_view();
}

std::vector<Parameter> parameters(const ModelConfig& config) {
  require_decoder(config, "what it must hold");
  std::vector<Parameter> list;
  add_linear(embedding_plan(config), list);
  if (config.layer_embedding_size > 0) {
    add_linear(layer_embedding_plan(config), list);
    add_linear(layer_projection_plan(config), list);
    add_norm(layer_projection_norm_plan(config), list);
  }
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const auto& block : layer_plan(config, layer).blocks) add_block(block, list);
  }
  add_norm(final_norm_plan(config), list);
  for (Parameter& parameter : list) {
    const auto module = module_path(parameter.name);
    if (!parameter.linear || is_head(module) || is_embedding(module)) continue;
    parameter.left = reason_to_leave(module, config.layers);
  }
  if (!config.tied_embeddings) add_linear(head_plan(config), list);
  return list;
}

std::vector<Parameter> parameters(const OpenedModel& model) {
  return model.config.architecture == nullptr ? found_parameters(model) : parameters(model.config);
}

}  // namespace w4q::model
