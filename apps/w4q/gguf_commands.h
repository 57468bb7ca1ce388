// What `w4q inspect` does with GGUF files.
#pragma once

#include <string>
#include <string_view>

#include "common_options.h"

namespace w4q::app {

/// True for a file that is a GGUF file, or is called one.
bool names_gguf(const std::string& path);

/// Shows metadata and tensors of a file, or one tensor with a sample of its values.
int inspect_gguf(const CommonOptions& common, const std::string& path, const std::string& tensor);

}  // namespace w4q::app
