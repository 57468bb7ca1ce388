// Zstandard's seekable format: independent frames and a seek table in a skippable frame at the end, so that any range
// can be read without decompressing the rest. Any zstd program can decompress such a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace w4q::io {

/// The seek table of one compressed file. Frame i covers [content[i], content[i+1]) and lies at [file[i], file[i+1]).
struct SeekTable {
  std::vector<uint64_t> content;
  std::vector<uint64_t> file;
  uint64_t content_size() const noexcept { return content.empty() ? 0 : content.back(); }
};

inline constexpr size_t default_frame_bytes = size_t{4} << 20;

/// Reads and checks the seek table at the end of `compressed`. A file without one is accepted when it is one plain zstd
/// frame (or several) whose frame headers state their content sizes. Throws bad_file otherwise.
SeekTable read_seek_table(std::span<const std::byte> compressed, std::string_view file_name);

/// Decompresses content bytes [begin, begin + out.size()) into `out`; frames in parallel. Throws bad_file on
/// corruption.
void read_range(std::span<const std::byte> compressed, const SeekTable& table, uint64_t begin, std::span<std::byte> out,
                std::string_view file_name);

/// Compresses the file `from` into `to` in frames of `frame_bytes`, frames in parallel, and syncs it. Throws bad_file.
void compress_file(const std::filesystem::path& from, const std::filesystem::path& to, int level,
                   size_t frame_bytes = default_frame_bytes);
/// The way back, over what stands at `to`. Throws bad_file, also where `from` is cut or damaged.
void decompress_file(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace w4q::io
