// Whole small files, and the files that travel with a checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace w4q::io {

/// Reads a whole file that the user named; a pipe is one too. Throws bad_file with the system's reason, or when it is
/// larger than `max_bytes`.
std::string read_file(const std::filesystem::path& path, int64_t max_bytes = 1'000'000'000);
/// The same of a file in a model's folder, which is a regular file: a pipe or a device there is refused, not waited for.
std::string read_model_file(const std::filesystem::path& path, int64_t max_bytes);

/// What travels with the weights of a checkpoint.
struct Companions {
  std::vector<std::string> names;     ///< relative to the folder
  uint64_t bytes = 0;                 ///< of all these
  std::vector<std::string> left_out;  ///< one line for each file, folder or link that stays behind, with the reason
};

/// Those of the folder `from`: the files on its top level, and those in folders of more chat templates. Weight files are
/// none, nor are the relative names in `except`, .git and .cache folders, and partial outputs. A link to a file stands
/// for that file when it lies in the folder too, or in the blobs of the Hugging Face hub's cache, whose snapshots are
/// made of such links. Named as left out are sub-folders, the same or other weights in foreign formats
/// (pytorch_model*.bin, *.pth, *.gguf, optimizer states …) and whatever is as large, unless `all`; and in any case links
/// out of the folder, and what is neither file nor folder. Throws bad_file.
Companions list_companions(const std::filesystem::path& from, const std::vector<std::string>& except, bool all = false);

/// Copies them from `from` to `to`. Throws bad_file.
Companions copy_companions(const std::filesystem::path& from, const std::filesystem::path& to,
                           const std::vector<std::string>& except, bool all = false);

}  // namespace w4q::io
