#include "verify/opened.h"

#include <utility>

#include "model/fold_rotations.h"

namespace w4q::verify {

OpenCheckpoint open_checkpoint(const std::filesystem::path& folder, bool residual) {
  model::require_folder(folder);
  io::Json config = io::read_json(folder / "config.json");
  return open_checkpoint(folder, std::move(config), io::Checkpoint::open(folder, residual));
}

OpenCheckpoint open_checkpoint(const std::filesystem::path& folder, io::Json config, io::Checkpoint checkpoint) {
  auto quantization = checkpoint::read_quantization(config, checkpoint, (folder / "config.json").string());
  return {folder, std::move(config), model::read_config(folder), std::move(quantization), std::move(checkpoint)};
}

OpenCheckpoint open_base(const std::filesystem::path& folder, const OpenCheckpoint& candidate) {
  return fold_like(open_checkpoint(folder), candidate.config, candidate.folder.string());
}

OpenCheckpoint fold_like(OpenCheckpoint base, const io::Json& like, std::string_view source_of_like) {
  if (!base.quantization.linears.empty()) return base;
  const auto wanted = model::read_folded_rotations(like, source_of_like);
  if (!wanted || model::read_folded_rotations(base.config, base.folder.string())) return base;
  auto folded = model::fold_rotations({base.config, base.model, base.checkpoint}, *wanted);
  base.config = std::move(folded.json);
  base.model = std::move(folded.config);
  base.checkpoint = std::move(folded.checkpoint);
  return base;
}

model::Model load_model(const OpenCheckpoint& opened, model::Planes planes) {
  return model::Model::of(opened.checkpoint, opened.model, opened.quantization, planes);
}

}  // namespace w4q::verify
