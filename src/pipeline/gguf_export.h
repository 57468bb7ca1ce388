// A Hugging Face folder, 16-bit or packed by w4q, becomes a GGUF file.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "pipeline/gguf_rows.h"

namespace w4q::pipeline {

struct GgufExportRequest {
  std::filesystem::path input;
  std::filesystem::path output;  ///< the file
  /// "gguf": every tensor in the type that holds it without loss: 16-bit ones as they are, integer weights with groups
  /// of 32 and f16 scales as Q4_0 or Q8_0. "gguf-f32", "gguf-f16", "gguf-bf16": all matrices in this type.
  /// "gguf-q8_0", "gguf-q4_0", "gguf-q4_1": linear layers quantized by ggml's own rule, embeddings and head as Q8_0;
  /// packed integer weights keep their codes. Vectors (norms, biases) are always F32.
  std::string to = "gguf";
  bool tokenizer = true;  ///< put it in; refused with the reason when that cannot be done exactly
  bool overwrite = false;
};

/// The names that `to` may have.
std::vector<std::string> gguf_export_targets();

/// What export_gguf would do; writes nothing.
ConversionReport plan_gguf_export(const GgufExportRequest& request);

/// Throws bad_argument for an unknown `to`, bad_file for a damaged or incomplete checkpoint, unsupported, with the
/// reason, for what the format cannot say.
ConversionReport export_gguf(const GgufExportRequest& request);

}  // namespace w4q::pipeline
