// A checkpoint of few bits becomes one of 16 or 32 bits: the weights that its codes and scales stand for.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "io/checkpoint_writer.h"
#include "pipeline/gguf_rows.h"
#include "pipeline/sharing.h"

namespace w4q::pipeline {

struct DecodeRequest {
  std::filesystem::path input;  ///< a packed checkpoint, w4q's or of a dialect, or one of small floats
  std::filesystem::path output;
  /// "hf16": in the 16-bit type that config.json states, BF16 where it states none; "hf-f32": in F32, every value exactly.
  std::string to = "hf16";
  io::WriteOptions write;
  bool overwrite = false;
  Sharing sharing = {};  ///< with other ranks, and with a run that was ended
};

/// The names that `to` may have.
std::vector<std::string> decode_targets();

/// What decode_model would do; reads no codes and writes nothing.
ConversionReport plan_decode(const DecodeRequest& request);

/// Writes the decoded weights as "….weight", experts of stacked MXFP4 as the stacks [experts, k, n] that they were made
/// of; everything else byte for byte. Of every tensor the report says whether all values came through. Throws
/// bad_argument where nothing is packed, bad_file for a damaged input or a value that is not finite, unsupported for one
/// that the type does not hold.
ConversionReport decode_model(const DecodeRequest& request);

}  // namespace w4q::pipeline
