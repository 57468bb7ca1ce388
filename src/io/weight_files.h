// Which files of a folder hold the weights of a checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace w4q::io {

struct WeightFiles {
  std::filesystem::path folder;
  std::vector<std::filesystem::path> shards;  ///< existing files, sorted; compressed ones end in ".zst"
  /// From the index: tensor → position in `shards`. Nothing when there is no index: then the one file decides.
  std::optional<std::map<std::string, size_t, std::less<>>> weight_map;
  std::string index_name;
  std::optional<double> total_size;  ///< metadata.total_size of the index
  std::vector<std::string> warnings;
};

/// Finds them below `path`, a folder or a single weight or index file. Throws bad_file: nothing there, several
/// candidates, a damaged index, missing shards.
WeightFiles find_weight_files(const std::filesystem::path& path);

/// True for names of compressed files.
bool is_compressed(const std::filesystem::path& path) noexcept;

}  // namespace w4q::io
