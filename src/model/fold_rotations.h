// Rotations folded into the neighbouring weights of a 16-bit model, which computes the same afterwards (docs/fold.md):
// its residual stream, and the values of its heads, stand in a basis in which no channel is louder than the others.
//
//   embedding rows            e ← R e
//   q, k, v · gate, up · head W ← W diag(norm) Rᵀ      and the norm before them becomes 1
//   v, by key/value head      W ← H W,  b ← H b
//   o, by query head          W ← W Hᵀ
//   o, down                   W ← R W,  b ← R b
//
// R is a randomized Hadamard matrix of the hidden width or a divisor of it, H one of the width of a head
// (formats/rotation.h). Everything is fp32, from tensors as they are stored; nothing is rounded.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "formats/rotation.h"
#include "io/json.h"
#include "model/config.h"

namespace w4q::model {

struct OpenedModel;  // model/opened.h

/// What is folded into a model; config.json keeps it as "folded_rotations", whatever becomes of the weights.
struct FoldedRotations {
  formats::Rotation residual;  ///< R, of the residual stream
  formats::Rotation heads;     ///< H, of each key/value head

  bool operator==(const FoldedRotations&) const = default;
};

/// "hadamard256-s0, heads hadamard-row-s0".
std::string to_string(const FoldedRotations& rotations);

/// The widest blocks that fit the model: the largest power of two that divides the hidden width, or where that is below
/// 32 descending powers of two; a head as a whole.
FoldedRotations widest_rotations(const ModelConfig& config, uint64_t seed);

/// What `config`, a config.json, says of it. Throws bad_file, unsupported; `source` names the file.
std::optional<FoldedRotations> read_folded_rotations(const io::Json& config, std::string_view source);

/// The same model with `rotations` folded in: tensors are computed as they are loaded, in fp32, and kept in the types
/// they had; a tied head becomes a tensor of its own. Throws bad_argument where rotations are folded in already,
/// bad_file and mismatch for parameters that are missing, misshapen or (as they are loaded) not finite, unsupported for
/// tensors of which it is not known what they do.
OpenedModel fold_rotations(OpenedModel model, const FoldedRotations& rotations);

}  // namespace w4q::model
