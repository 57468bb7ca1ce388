// A GGUF file of a given size: which block type each linear gets is chosen by what the model then predicts, measured on
// calibration text (docs/quality.md, docs/gguf.md).
#pragma once

#include <cstdint>

#include "pipeline/gguf_export_plan.h"

namespace w4q::pipeline {

/// Chooses the types of `plan`, whose metadata is there and whose calibration keeps windows, so that the file takes at
/// most `bytes`, as near to it as whole tensors come; adds what was measured to the notes. Linears are quantized at the
/// types next to the size, in a hidden folder beside `output`. Throws bad_argument for a size that the smallest types
/// do not reach, or without text to measure on.
void choose_gguf_types(ExportPlan& plan, int64_t bytes, const std::filesystem::path& output);

}  // namespace w4q::pipeline
