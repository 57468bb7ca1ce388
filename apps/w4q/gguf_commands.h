// What `w4q inspect` and `w4q repack` do with GGUF files.
#pragma once

#include <string>
#include <string_view>

#include "common_options.h"

namespace w4q::app {

/// True for a file that is a GGUF file, or is called one.
bool names_gguf(const std::string& path);

/// Shows metadata and tensors of a file, or one tensor with a sample of its values.
int inspect_gguf(const CommonOptions& common, const std::string& path, const std::string& tensor);

struct GgufConversion {
  std::string input;
  std::string to;  ///< pipeline::gguf_import_targets() or gguf_export_targets()
  bool tokenizer = true;
};

/// True when `to` names something that this file handles: the target is a GGUF file, or the input is one.
bool converts_gguf(const GgufConversion& conversion);

/// Reads or writes a GGUF file.
int convert_gguf(const CommonOptions& common, const OutputOptions& output, const GgufConversion& conversion);

}  // namespace w4q::app
