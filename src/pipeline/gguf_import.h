// A GGUF file becomes a Hugging Face folder.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "io/checkpoint_writer.h"
#include "pipeline/gguf_rows.h"
#include "pipeline/sharing.h"

namespace w4q::pipeline {

struct GgufImportRequest {
  std::filesystem::path input;
  std::filesystem::path output;
  /// "hf16": 16-bit tensors as they are, others in 16 bit (BF16 where the file has BF16 matrices, or F32 ones that BF16
  /// holds, else F16; norms and biases stay F32 where 16 bits cannot hold them). "hf-f32": every value exactly, in F32.
  /// "w4q": Q4_0 and Q8_0 matrices as int4-g32-f16 and int8-g32-f16 with their codes and scales, the rest as in "hf16".
  std::string to = "hf16";
  bool tokenizer = true;  ///< convert it; refused with the reason when that cannot be done exactly
  io::WriteOptions write;
  bool overwrite = false;
  Sharing sharing = {};  ///< with other ranks, and with a run that was ended
};

/// The names that `to` may have.
std::vector<std::string> gguf_import_targets();

/// What import_gguf would do; writes nothing.
ConversionReport plan_gguf_import(const GgufImportRequest& request);

/// Throws bad_file for a damaged or incomplete file, unsupported, with the reason, for models, tensors and tokenizers
/// that cannot be converted.
ConversionReport import_gguf(const GgufImportRequest& request);

}  // namespace w4q::pipeline
