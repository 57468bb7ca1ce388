// What a GGUF file's metadata says, held against its tensors and against itself (docs/verify.md). What a reader of the file
// stumbles over is for that reader; this is what it reads, and computes something else.
#pragma once

#include <string>
#include <vector>

#include "io/gguf.h"

namespace w4q::verify {

struct GgufMetadataReport {
  std::vector<std::string> faults;  ///< each names its key
  std::vector<std::string> notes;
};

GgufMetadataReport check_gguf_metadata(const io::GgufHeader& header);

}  // namespace w4q::verify
