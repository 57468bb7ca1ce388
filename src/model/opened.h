// A folder that holds a model, as far as its headers: what quantizing, calibrating, exporting, verifying and decoding
// start from. Where the architecture is not known, its parameters are what the folder holds (parameters.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/folder.h"
#include "model/config.h"
#include "model/fold_rotations.h"
#include "model/stacked_experts.h"

namespace w4q::model {

struct OpenedModel {
  checkpoint::Folder folder;
  ModelConfig config;
  std::optional<FoldedRotations> folded;   ///< what is folded into the weights, now or when they were made
  std::vector<StackedExperts> apart = {};  ///< stacks whose experts are parameters by themselves
  std::vector<std::string> notes = {};     ///< of folding: what stays as it is and what is added, by name, and why
};

/// Sets where the text model's tensors stand and how experts do: programs disagree, and the tensors tell. Where experts
/// have the names of another architecture, this one is none that can be decoded.
void follow_tensors(const io::Checkpoint& tensors, ModelConfig& config);

/// Throws bad_file or unsupported where the folder, its config.json or its headers cannot be read.
OpenedModel open_model(checkpoint::Folder folder);
OpenedModel open_model(const std::filesystem::path& folder, bool residual = true);

/// Opens a 16- or 32-bit model, and folds the widest rotations of this seed where there is one. Throws bad_argument for
/// one that is quantized, and as its parts do.
OpenedModel open_plain_model(const std::filesystem::path& folder, std::optional<uint64_t> fold_seed);

/// The linears of a packed checkpoint as the F32 matrices "….weight" that they stand for, decoded as they are loaded,
/// without its quantization_config.
checkpoint::Folder decoded(checkpoint::Folder folder);

/// A model of an architecture that is not known, with the experts of its stacks by themselves; of a 16-bit `base` those
/// stacks alone that `candidate` does not hold.
OpenedModel take_apart(OpenedModel model);
OpenedModel take_apart_like(OpenedModel base, const io::Checkpoint& candidate);

/// The text model of `model` by itself, as GGUF holds it, which has no place for what stands beside it: towers, layers for
/// further tokens. `left` is given what that is. It has the names of `like`, and its architecture where GGUF calls both
/// the same: a Mistral without windows comes back as a Llama.
OpenedModel text_alone(OpenedModel model, const ModelConfig& like, std::vector<std::string>& left);

/// `base` as it is or, where it is not quantized and has no rotations, with those that another version of it has.
OpenedModel fold_like(OpenedModel base, const std::optional<FoldedRotations>& rotations);

/// Whether the embeddings serve as the head: as config.json says, or else where none is stored.
bool has_tied_head(const OpenedModel& model);

}  // namespace w4q::model
