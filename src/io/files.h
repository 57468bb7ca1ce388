// Whole small files, and the files that travel with a checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace w4q::io {

/// Reads a whole file. Throws bad_file with the system's reason, or when it is larger than `max_bytes`.
std::string read_file(const std::filesystem::path& path, int64_t max_bytes = 1'000'000'000);

/// Copies everything in `from` (files, sub-folders; not links that leave it) to `to`, except weight files at its top
/// level and the names in `except`. Returns the relative names copied. Throws bad_file.
std::vector<std::string> copy_companions(const std::filesystem::path& from, const std::filesystem::path& to,
                                         const std::vector<std::string>& except);

}  // namespace w4q::io
