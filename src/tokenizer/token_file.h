// Files of token ids: nothing but uint16 or uint32 little endian, one after the other.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace w4q::tokenizer {

/// Bytes per id: 2 for ".u16", 4 for ".u32", otherwise 2 where `vocab_size` fits.
int id_width(const std::filesystem::path& path, int64_t vocab_size);

/// Throws bad_argument when an id does not fit.
std::string encode_ids(std::span<const int32_t> ids, int width);

/// Reads a file of ids below `vocab_size`. Throws bad_file naming the first bad one, or a size that is no multiple.
std::vector<int32_t> read_ids(const std::filesystem::path& path, int64_t vocab_size);

}  // namespace w4q::tokenizer
