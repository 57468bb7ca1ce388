// MXFP4 weights as kbit planes of the same values: the table of E2M1, and powers of two as scales. Nothing is rounded.
#pragma once

#include <filesystem>
#include <string>

#include "io/checkpoint_writer.h"
#include "pipeline/gguf_rows.h"
#include "pipeline/sharing.h"

namespace w4q::pipeline {

struct Mxfp4Request {
  std::filesystem::path input;  ///< a folder for which is_mxfp4 holds
  std::filesystem::path output;
  std::string target;  ///< "sm89": the best layout of each matrix for it …
  std::string layout;  ///< … or this one for all; both empty: canonical
  io::WriteOptions write;
  bool overwrite = false;
  Sharing sharing = {};  ///< with other ranks, and with a run that was ended
};

/// Whether a folder says of itself that its weights are MXFP4, in gpt-oss's stacks or compressed-tensors'.
bool is_mxfp4(const std::filesystem::path& folder);

/// What import_mxfp4 would do; reads scales and writes nothing.
ConversionReport plan_mxfp4(const Mxfp4Request& request);

/// Every matrix, experts one by one, as kbit4-b32-e4m4 or, where its scales span more than 18 octaves, kbit4-b32-f16;
/// planes are decoded again and compared with what the codes stand for (zeros lose their sign). Other tensors keep their
/// bytes. Throws bad_file for damage and scales that are no numbers, unsupported naming a matrix whose scales span more
/// than 39 octaves, or for which no layout fits.
ConversionReport import_mxfp4(const Mxfp4Request& request);

}  // namespace w4q::pipeline
