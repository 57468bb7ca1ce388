// Checkpoints of TurboQuant: turboquant_config.json, model.safetensors with the packed linears under their module
// paths, dots turned into underscores, and non_quantized.safetensors with everything else (docs/rotated.md).
#pragma once

#include <filesystem>

#include "pipeline/convert_model.h"

namespace w4q::pipeline {

inline constexpr std::string_view turboquant_name = "turboquant";

/// True for a folder with a turboquant_config.json.
bool is_turboquant(const std::filesystem::path& folder);

/// TurboQuant → w4q's planes; request.to is "w4q". Hadamard rotations and plain norms only: throws unsupported for QR
/// rotations, whose matrices are not stored, factored norms, entropy coding and quantized embeddings; bad_file naming
/// the tensor for anything malformed.
ConvertReport import_turboquant(const ConvertRequest& request, bool dry_run);

/// w4q → TurboQuant; request.to is "turboquant". Throws unsupported naming the linear and what has no place there:
/// other schemes, groups, rotations or tables for different linears, more than two passes, input scales.
ConvertReport export_turboquant(const ConvertRequest& request, bool dry_run);

}  // namespace w4q::pipeline
