// What checkpoints of EXL3 leave to config.json: sizes are stored in multiples of 128, and a head of few bits stands
// beside embeddings that are tied to it everywhere else.
#pragma once

#include "model/opened.h"

namespace w4q::model {

/// Gives packed linears whose stored n and k are padded those that `config` says, biases with them, and unties a head that
/// is packed by itself, in `config` and in folder.config. Of an architecture that is not known sizes stay as stored. A
/// linear that does not belong is left for the structure's check.
void fit_to_config(checkpoint::Folder& folder, ModelConfig& config);
/// The same of a folder that is not opened as a model.
void fit_to_config(checkpoint::Folder& folder);

/// A model with tied embeddings, with these as the weight of a head of its own too; others as they are.
OpenedModel untied(OpenedModel model);

/// `base` with its embeddings as the weight of the head too, where `candidate` has that packed by itself and `base` none: what
/// is packed is held against something.
OpenedModel untied_like(OpenedModel base, const io::Checkpoint& candidate);

}  // namespace w4q::model
