// What the files of a tokenizer and config.json say of each other, without a base (docs/verify.md).
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "io/json.h"

namespace w4q::verify {

/// The file as an object; an empty one where it is not there. Throws bad_file.
io::Json read_object(const std::filesystem::path& file);

/// Where they contradict each other. Throws bad_file.
std::vector<std::string> contradictions_of_tokenizer(const std::filesystem::path& folder, const io::Json& config);

}  // namespace w4q::verify
