#include "model/stored_sizes.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "core/convert.h"
#include "formats/exl3.h"
#include "model/layer_plan.h"
#include "model/model.h"
#include "model/parameters.h"

namespace w4q::model {
namespace {

constexpr const char* tied_key = "tie_word_embeddings";

bool is_padded(const checkpoint::PackedLinearInfo& info) {
  return info.dialect != nullptr && info.passes.front().scheme.family == formats::SchemeFamily::exl3;
}

bool has_padded(const checkpoint::Folder& folder) {
  return std::ranges::any_of(folder.quantization.linears, [](const auto& entry) { return is_padded(entry.second); });
}

/// The first `size` values of a bias.
io::DerivedTensor cut_bias(std::shared_ptr<const io::Checkpoint> source, const io::TensorInfo& info, int64_t size) {
  const auto make = [source = std::move(source), name = info.name, size] {
    const auto loaded = source->load(name);
    return Buffer::copy_of(loaded->bytes.first(static_cast<size_t>(size * dtype_bits(loaded->dtype) / 8)));
  };
  return {info.dtype, info.dtype, {size}, make, {}};
}

void untie(io::Json& json) {
  for (io::Json* object : {&json, json.contains("text_config") ? &json["text_config"] : nullptr}) {
    if (object != nullptr && object->is_object() && object->contains(tied_key)) (*object)[tied_key] = false;
  }
  if (!json.contains(tied_key)) json[tied_key] = false;
}

/// The embeddings as the weight of the head, where none is stored; true where that could be done.
bool add_head(OpenedModel& model) {
  const std::string& head = model.config.names.head;
  const std::string name = head + ".weight", table = model.config.names.prefix + "embed_tokens.weight";
  io::Checkpoint& tensors = model.folder.tensors;
  if (tensors.contains(name) || model.folder.quantization.find(head) != nullptr || !tensors.contains(table))
    return false;
  const auto source = std::make_shared<const io::Checkpoint>(std::move(tensors));
  const io::TensorInfo& info = source->at(table);
  const auto make = [source, table] { return Buffer::copy_of(source->load(table)->bytes); };
  std::map<std::string, io::DerivedTensor, std::less<>> weights;
  weights.emplace(name, io::DerivedTensor{info.dtype, source->stored_dtype(table), info.shape, make, {}});
  tensors = io::Checkpoint::derive(source, std::move(weights), source->derivation());
  return true;
}

}  // namespace

void fit_to_config(checkpoint::Folder& folder, ModelConfig& config) {
  if (!has_padded(folder)) return;
  const std::string head = config.names.head;
  if (config.tied_embeddings && folder.quantization.find(head) != nullptr) {
    config.tied_embeddings = false;
    config.tie_word_embeddings = false;
    untie(folder.config);
    folder.quantization.notes.push_back(head +
                                        " is packed beside embeddings that config.json ties to it: it is the head");
  }
  if (config.architecture == nullptr) return;
  std::map<std::string, io::DerivedTensor, std::less<>> biases;
  const auto source = std::make_shared<const io::Checkpoint>(folder.tensors);
  for (const Parameter& parameter : parameters(config)) {
    const std::string module(module_path(parameter.name));
    const auto found = folder.quantization.linears.find(module);
    if (found == folder.quantization.linears.end() || parameter.shape.size() != 2 || !is_padded(found->second))
      continue;
    checkpoint::PackedLinearInfo& info = found->second;
    const int64_t n = parameter.shape[0], k = parameter.shape[1];
    if (formats::exl3_padded(n) != info.n || formats::exl3_padded(k) != info.k) continue;
    const std::string bias = module + ".bias";
    if (n != info.n && source->contains(bias) && source->at(bias).shape == Shape{info.n}) {
      biases.emplace(bias, cut_bias(source, source->at(bias), n));
    }
    info.n = n, info.k = k;
  }
  if (!biases.empty()) folder.tensors = io::Checkpoint::derive(source, std::move(biases), source->derivation());
}

void fit_to_config(checkpoint::Folder& folder) {
  if (!has_padded(folder)) return;
  ModelConfig config = read_any_config(folder.config, folder.path);
  if (config.architecture != nullptr) follow_tensors(folder.tensors, config);
  fit_to_config(folder, config);
}

OpenedModel untied(OpenedModel model) {
  if (!has_tied_head(model) || !add_head(model)) return model;
  model.config.tied_embeddings = false;
  model.config.tie_word_embeddings = false;
  untie(model.folder.config);
  return model;
}

OpenedModel untied_like(OpenedModel base, const io::Checkpoint& candidate) {
  const std::string& head = base.config.names.head;
  const auto first = candidate.tensors().lower_bound(head + ".");
  const bool packed = first != candidate.tensors().end() && first->first.starts_with(head + ".") &&
                      !candidate.contains(head + ".weight");
  if (packed) add_head(base);
  return base;
}

}  // namespace w4q::model
