// A checkpoint opened as far as its headers, and the model it was made from, opened to be compared with it.
#pragma once

#include <filesystem>

#include "io/checkpoint.h"
#include "io/json.h"
#include "model/model.h"

namespace w4q::verify {

struct OpenCheckpoint {
  std::filesystem::path folder;
  io::Json config;
  model::ModelConfig model;
  checkpoint::QuantizationConfig quantization;
  io::Checkpoint checkpoint;
};

/// Throws bad_file or unsupported when config or headers cannot be read at all.
/// Its residual passes are left out unless `residual`.
OpenCheckpoint open_checkpoint(const std::filesystem::path& folder, bool residual = true);
/// The same of a folder whose parts are open already.
OpenCheckpoint open_checkpoint(const std::filesystem::path& folder, io::Json config, io::Checkpoint checkpoint);

/// The model that a candidate was made from, with the rotations that the candidate has folded in folded into it too.
OpenCheckpoint open_base(const std::filesystem::path& folder, const OpenCheckpoint& candidate);
/// `base` as it is or, where the config.json `like` names rotations and it has none, with those folded in.
OpenCheckpoint fold_like(OpenCheckpoint base, const io::Json& like, std::string_view source_of_like);

/// Loads what is open.
model::Model load_model(const OpenCheckpoint& opened, model::Planes planes = model::Planes::canonical);

}  // namespace w4q::verify
