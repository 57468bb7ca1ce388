// Whole small files, and the files that travel with a checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace w4q::io {

/// Reads a whole file. Throws bad_file with the system's reason, or when it is larger than `max_bytes`.
std::string read_file(const std::filesystem::path& path, int64_t max_bytes = 1'000'000'000);

/// The relative names of everything in `from` that travels with its weights, sub-folders included. Left out: weight
/// files at the top level, the same weights in foreign formats (pytorch_model*.bin, consolidated*.pth, *.gguf …), the
/// relative names in `except`, .git and .cache folders, and partial outputs. A link to a file stands for that file,
/// wherever it lies (Hugging Face snapshots are made of such links); links to folders, and everything that is neither
/// file nor folder, are left out. Throws bad_file.
std::vector<std::string> list_companions(const std::filesystem::path& from, const std::vector<std::string>& except);

/// Copies these files from `from` to `to` and returns their names. Throws bad_file.
std::vector<std::string> copy_companions(const std::filesystem::path& from, const std::filesystem::path& to,
                                         const std::vector<std::string>& except);

}  // namespace w4q::io
