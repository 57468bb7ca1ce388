// A Hugging Face folder, 16-bit or packed by w4q, becomes a GGUF file.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/gguf_calibration.h"
#include "pipeline/gguf_rows.h"
#include "serving/stored_model.h"

namespace w4q::pipeline {

struct GgufExportRequest {
  std::filesystem::path input;
  std::filesystem::path output;  ///< the file
  /// A name of gguf_targets(): every tensor in the type that holds it without loss ("gguf"), all matrices in one type,
  /// or a mix of several. Packed integer weights that a block type holds keep their codes. Vectors are always F32.
  std::string to = "gguf";
  /// What is known of the inputs of linears: scales are searched for it, errors fed back. Nothing: weights count alike.
  std::optional<GgufCalibrationRequest> calibration = {};
  int64_t bytes =
      0;  ///< of the file, at most, with `to` "gguf" and calibration: types by the model's predictions; 0: as `to` says
  bool tokenizer = true;  ///< put it in; refused with the reason when that cannot be done exactly
  bool overwrite = false;
};

/// What export_gguf would do; writes nothing.
ConversionReport plan_gguf_export(const GgufExportRequest& request);

/// The header that export_gguf would leave, for whoever asks what loads it; without calibration, so not of a size.
serving::StoredModel planned_headers(const GgufExportRequest& request);

/// Throws bad_argument for an unknown `to`, bad_file for a damaged or incomplete checkpoint, unsupported, with the
/// reason, for what the format cannot say.
ConversionReport export_gguf(const GgufExportRequest& request);

}  // namespace w4q::pipeline
