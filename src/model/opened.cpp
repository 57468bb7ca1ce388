#include "model/opened.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <utility>

#include "checkpoint/dialect/dialect.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "model/architecture.h"
#include "model/layer_plan.h"
#include "model/parameters.h"
#include "model/stored_sizes.h"

namespace w4q::model {
namespace {

/// Of a task: a multiple of what any family decodes together.
constexpr int64_t decoded_rows = 128;

}  // namespace

checkpoint::Folder decoded(checkpoint::Folder folder) {
  const auto source = std::make_shared<const io::Checkpoint>(std::move(folder.tensors));
  std::map<std::string, io::DerivedTensor, std::less<>> weights;
  std::set<std::string, std::less<>> hidden;
  for (const auto& [name, info] : folder.quantization.linears) {
    for (auto& plane : checkpoint::planned_planes(info)) hidden.insert(std::move(plane.name));
    const auto make = [source, info = info] {
      const auto linear = checkpoint::load_canonical(*source, info);
      Buffer values(static_cast<size_t>(info.n * info.k) * sizeof(float));
      auto* const rows = reinterpret_cast<float*>(values.bytes().data());
      parallel_for(info.n, decoded_rows, [&](int64_t begin, int64_t end) {
        formats::decode_linear_rows(linear, begin, {rows + begin * info.k, end - begin, info.k});
      });
      return values;
    };
    weights.emplace(name + ".weight", io::DerivedTensor{DType::f32, info.source_dtype, {info.n, info.k}, make});
  }
  if (const auto* const dialect = folder.quantization.dialect; dialect != nullptr) {
    // How its program scales activations says nothing of weights that are rounded anew.
    for (const auto& [name, info] : source->tensors()) {
      const auto ends = [&](std::string_view suffix) { return name.ends_with(suffix); };
      if (std::ranges::any_of(dialect->activations, ends)) hidden.insert(name);
    }
  }
  folder.tensors = io::Checkpoint::derive(source, std::move(weights), source->derivation(), hidden);
  folder.config.erase("quantization_config");
  folder.quantization = {};
  return folder;
}

namespace {

/// Whether the experts that stand by name bear the names of the architecture: converters also write those of others.
bool knows_experts(const io::Checkpoint& tensors, const ModelConfig& config) {
  bool any = false;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    for (const Block& block : config.architecture->blocks(config, layer)) {
      for (const InputGroup& group : block.groups) {
        if (group.expert != 0) continue;
        for (const PlannedLinear& linear : group.linears) {
          const auto at = tensors.tensors().lower_bound(linear.name + ".");
          if (at != tensors.tensors().end() && at->first.starts_with(linear.name + ".")) return true;
          any = true;
        }
      }
    }
  }
  return !any;
}

/// What is known of a model that cannot be decoded.
ModelConfig undecoded(const ModelConfig& config, std::string why) {
  ModelConfig plain;
  plain.architecture_name = config.architecture_name;
  plain.tie_word_embeddings = config.tie_word_embeddings;
  plain.tied_embeddings = config.tie_word_embeddings.value_or(false);
  plain.dtype = config.dtype;
  plain.undecoded = std::move(why);
  return plain;
}

}  // namespace

void follow_tensors(const io::Checkpoint& tensors, ModelConfig& config) {
  static const TensorNames known[] = {{"model.language_model.", "lm_head"},
                                      {"language_model.model.", "language_model.lm_head"},
                                      {"model.language_model.model.", "model.language_model.lm_head"},
                                      {"language_model.", "lm_head"},
                                      {"model.text_model.", "lm_head"}};
  const auto holds = [&](const auto& fits) {
    return std::ranges::any_of(tensors.tensors(),
                               [&](const auto& entry) { return fits(std::string_view(entry.first)); });
  };
  for (const TensorNames& names : known) {
    const std::string first = names.prefix + "layers.0.";
    if (holds([&](std::string_view name) { return name.starts_with(first); })) config.names = names;
  }
  // Some programs rename layers and leave the head, or the reverse.
  for (const char* head : {"lm_head", "language_model.lm_head"}) {
    const auto begins = [&](const std::string& at) {
      return holds([&](std::string_view name) { return name.starts_with(at + "."); });
    };
    if (!begins(config.names.head) && begins(head)) config.names.head = head;
  }
  if (config.mixture.experts == 0) return;
  const std::string layers = config.names.prefix + "layers.";
  const auto in_layers = [&](std::string_view part) {
    return holds([&](std::string_view name) { return name.starts_with(layers) && name.find(part) != name.npos; });
  };
  const bool by_name = in_layers(".experts.0."), stacked = in_layers(".experts.gate_up_proj");
  if (by_name && !stacked) config.mixture.storage = ExpertStorage::by_name;
  if (stacked && config.mixture.storage == ExpertStorage::by_name) {
    config.mixture.storage = ExpertStorage::stacked_halves;
  }
  if (by_name && !stacked && !knows_experts(tensors, config)) {
    config = undecoded(config, concat(tensors.folder().string(), ": the experts do not have the names that ",
                                      printable(config.architecture_name), " has"));
  }
}

namespace {

/// Whether the head is tied where the file does not say: of models that see or hear it depends on their class, and a head
/// that is stored is one by itself even where the architecture ties it.
void tie_as_stored(OpenedModel& model) {
  ModelConfig& config = model.config;
  if (config.architecture == nullptr || model.folder.config.contains("tie_word_embeddings")) return;
  if (config.architecture->ties_head) {
    config.tie_word_embeddings.reset();
    if (has_tied_head(model)) config.tie_word_embeddings = true;
  }
  const bool wrapped = config.architecture_name != config.architecture->class_name;
  if (wrapped || config.architecture->ties_head) config.tied_embeddings = has_tied_head(model);
}

}  // namespace

OpenedModel open_model(checkpoint::Folder folder) {
  ModelConfig config = read_any_config(folder.config, folder.path);
  if (config.architecture != nullptr) follow_tensors(folder.tensors, config);
  fit_to_config(folder, config);
  auto folded = read_folded_rotations(folder.config, folder.config_path().string());
  OpenedModel model{std::move(folder), std::move(config), std::move(folded)};
  tie_as_stored(model);
  if (model.config.mixture.experts == 0) return model;
  model.apart = stacked_experts(model.folder);
  model.folder.tensors = take_apart(std::move(model.folder.tensors), model.apart);
  return model;
}

OpenedModel open_model(const std::filesystem::path& folder, bool residual) {
  return open_model(checkpoint::open_folder(folder, residual));
}

OpenedModel open_plain_model(const std::filesystem::path& folder, std::optional<uint64_t> fold_seed) {
  OpenedModel model = open_model(folder);
  const auto& quantization = model.folder.quantization;
  model.notes = quantization.notes;
  if (quantization.dialect != nullptr && !quantization.linears.empty()) {
    model.notes.push_back(concat(quantization.method, " has ", quantization.linears.size(),
                                 " linears in few bits already: what they stand for is rounded once more"));
    model.folder = decoded(std::move(model.folder));
  } else if (!quantization.linears.empty() || quantization.dialect != nullptr) {
    throw Error(ErrorCode::bad_argument, folder.string() + ": is quantized already")
        .detail(concat("method: ", printable(quantization.method)))
        .hint("start from the 16-bit checkpoint");
  }
  if (!fold_seed) return take_apart(std::move(model));
  require_decoder(model.config, "folding rotations");
  const FoldedRotations rotations = widest_rotations(model.config, *fold_seed);
  return fold_rotations(std::move(model), rotations);
}

OpenedModel take_apart(OpenedModel model) {
  if (model.config.architecture != nullptr) return model;
  model.apart = stacked_experts(model.folder);
  model.folder.tensors = take_apart(std::move(model.folder.tensors), model.apart);
  return model;
}

OpenedModel take_apart_like(OpenedModel base, const io::Checkpoint& candidate) {
  if (base.config.architecture != nullptr || !base.folder.quantization.linears.empty()) return base;
  base.apart = stacked_experts(base.folder);
  std::erase_if(base.apart, [&](const StackedExperts& stack) { return candidate.contains(stack.name); });
  base.folder.tensors = take_apart(std::move(base.folder.tensors), base.apart);
  return base;
}

OpenedModel text_alone(OpenedModel model, const ModelConfig& like, std::vector<std::string>& left) {
  const ArchitectureRow* const row = model.config.architecture;
  if (row == nullptr) return model;
  const TensorNames from = model.config.names, &to = like.names;
  const auto renamed = [&](std::string_view name) {
    if (name.starts_with(from.head + ".")) return to.head + std::string(name.substr(from.head.size()));
    if (name.starts_with(from.prefix)) return to.prefix + std::string(name.substr(from.prefix.size()));
    return std::string(name);
  };
  const auto source = std::make_shared<const io::Checkpoint>(model.folder.tensors);
  std::map<std::string, io::DerivedTensor, std::less<>> tensors;
  std::set<std::string, std::less<>> hidden;
  for (const auto& [name, info] : source->tensors()) {
    if (!reason_to_carry(model.config, name).empty()) {
      left.push_back(name);
      hidden.insert(name);
      continue;
    }
    const std::string other = renamed(name);
    if (other == name) continue;
    hidden.insert(name);
    auto make = [source, name = name] { return source->load(name).buffer(); };
    tensors.emplace(other, io::DerivedTensor{info.dtype, source->stored_dtype(name), info.shape, make});
  }
  model.folder.tensors = io::Checkpoint::derive(source, std::move(tensors), source->derivation(), hidden);
  for (auto& stack : model.apart) stack.name = renamed(stack.name);
  model.config.names = to;
  const bool alike = like.architecture != nullptr && !row->gguf.empty() && row->gguf == like.architecture->gguf;
  if (alike) model.config.architecture = like.architecture;
  return model;
}

OpenedModel fold_like(OpenedModel base, const std::optional<FoldedRotations>& rotations) {
  if (!rotations || base.folded || !base.folder.quantization.linears.empty()) return base;
  return fold_rotations(std::move(base), *rotations);
}

bool has_tied_head(const OpenedModel& model) {
  if (model.config.tie_word_embeddings) return model.config.tied_embeddings;
  const std::string& head = model.config.names.head;
  return !model.folder.tensors.contains(head + ".weight") && model.folder.quantization.find(head) == nullptr;
}

}  // namespace w4q::model
