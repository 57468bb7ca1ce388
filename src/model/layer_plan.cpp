#include "model/layer_plan.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"
#include "model/architecture.h"

namespace w4q::model {
namespace {

/// Numbers norms and linears through the layer.
void set_positions(LayerPlan& plan) {
  size_t norms = 0, linears = 0, vectors = 0;
  for (auto& block : plan.blocks) {
    for (auto& norm : block.norms) norm.position = norms++;
    for (auto& vector : block.vectors) vector.position = vectors++;
    for (auto& group : block.groups) {
      if (group.norm) group.norm->position = block.norm(group.norm->role)->position;
      for (auto& linear : group.linears) linear.position = linears++;
    }
  }
}

}  // namespace

std::vector<std::string> InputGroup::names() const {
  std::vector<std::string> result;
  for (const auto& linear : linears) result.push_back(linear.name);
  return result;
}

int64_t InputGroup::producer_channel(int64_t channel) const noexcept {
  if (head_dim == 0) return channel;
  return channel / head_dim / heads_per_producer * head_dim + channel % head_dim;
}

const PlannedNorm* Block::norm(NormRole role) const noexcept {
  const auto found = std::ranges::find(norms, role, &PlannedNorm::role);
  return found == norms.end() ? nullptr : &*found;
}

const PlannedVector* Block::vector(VectorRole role) const noexcept {
  const auto found = std::ranges::find(vectors, role, &PlannedVector::role);
  return found == vectors.end() ? nullptr : &*found;
}

std::vector<InputGroup> LayerPlan::groups() const {
  std::vector<InputGroup> result;
  for (const auto& block : blocks) result.insert(result.end(), block.groups.begin(), block.groups.end());
  return result;
}

std::vector<PlannedNorm> LayerPlan::norms() const {
  std::vector<PlannedNorm> result;
  for (const auto& block : blocks) result.insert(result.end(), block.norms.begin(), block.norms.end());
  return result;
}

std::vector<PlannedLinear> LayerPlan::linears() const {
  std::vector<PlannedLinear> result;
  for (const auto& group : groups()) result.insert(result.end(), group.linears.begin(), group.linears.end());
  return result;
}

std::vector<PlannedVector> LayerPlan::vectors() const {
  std::vector<PlannedVector> result;
  for (const auto& block : blocks) result.insert(result.end(), block.vectors.begin(), block.vectors.end());
  return result;
}

LayerPlan layer_plan(const ModelConfig& config, int64_t layer) {
  require_decoder(config, "the order of its layers");
  ensure(layer >= 0 && layer < config.layers, "layer_plan: no such layer");
  LayerPlan plan{config.architecture->blocks(config, layer)};
  set_positions(plan);
  return plan;
}

std::vector<InputGroup> input_groups(const ModelConfig& config, int64_t layer) {
  return layer_plan(config, layer).groups();
}

bool has_dense_layers(const ModelConfig& config) {
  if (config.architecture == nullptr) return false;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const Block& block : layer_plan(config, layer).blocks) {
      const size_t linears = block.groups.front().linears.size();
      const bool attends = block.kind == BlockKind::attention && linears == 3;
      if (!attends && !(block.kind == BlockKind::gated_mlp && linears == 2)) return false;
    }
  }
  return true;
}

PlannedLinear embedding_plan(const ModelConfig& config) {
  return {.name = config.names.prefix + "embed_tokens",
          .gguf = "token_embd",
          .n = config.vocab_size,
          .k = config.hidden_size};
}

PlannedLinear head_plan(const ModelConfig& config) {
  return {.name = config.names.head, .gguf = "output", .n = config.vocab_size, .k = config.hidden_size};
}

PlannedLinear layer_embedding_plan(const ModelConfig& config) {
  return {.name = config.names.prefix + "embed_tokens_per_layer",
          .gguf = "per_layer_token_embd",
          .n = config.layer_vocab_size,
          .k = config.layers * config.layer_embedding_size};
}

PlannedLinear layer_projection_plan(const ModelConfig& config) {
  return {.name = config.names.prefix + "per_layer_model_projection",
          .gguf = "per_layer_model_proj",
          .n = config.layers * config.layer_embedding_size,
          .k = config.hidden_size};
}

PlannedNorm layer_projection_norm_plan(const ModelConfig& config) {
  return {.name = config.names.prefix + "per_layer_projection_norm",
          .gguf = "per_layer_proj_norm",
          .size = config.layer_embedding_size};
}

PlannedNorm final_norm_plan(const ModelConfig& config) {
  return {.name = config.names.prefix + "norm",
          .gguf = "output_norm",
          .size = config.hidden_size,
          .offset = config.architecture->norm_offset};
}

std::vector<PlannedNorm> all_norms(const ModelConfig& config) {
  std::vector<PlannedNorm> result{final_norm_plan(config)};
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto own = layer_plan(config, layer).norms();
    result.insert(result.end(), own.begin(), own.end());
  }
  return result;
}

std::optional<LinearPlace> find_linear(const ModelConfig& config, std::string_view module) {
  constexpr std::string_view before = ".layers.";
  const size_t at = module.find(before);
  if (at == std::string_view::npos) return std::nullopt;
  int64_t layer = -1;
  std::from_chars(module.data() + at + before.size(), module.data() + module.size(), layer);
  if (layer < 0 || layer >= config.layers) return std::nullopt;
  for (auto& group : input_groups(config, layer)) {
    const auto found = std::ranges::find(group.linears, module, &PlannedLinear::name);
    if (found != group.linears.end()) return LinearPlace{layer, group, *found};
  }
  return std::nullopt;
}

}  // namespace w4q::model
