// The GGUF container, versions 2 and 3: typed metadata and tensors in blocks (docs/gguf.md). Reading makes every check
// of the reference reader and some more; the header writer is deterministic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/ggml_type.h"
#include "core/views.h"
#include "io/mapped_file.h"

namespace w4q::io {

/// An array in the metadata. The index of the alternative is the number of the element type in the file; arrays of
/// arrays (index 9) are not allowed.
using GgufArray = std::variant<std::vector<uint8_t>, std::vector<int8_t>, std::vector<uint16_t>, std::vector<int16_t>,
                               std::vector<uint32_t>, std::vector<int32_t>, std::vector<float>, std::vector<bool>,
                               std::vector<std::string>, std::monostate, std::vector<uint64_t>, std::vector<int64_t>,
                               std::vector<double>>;

/// A value of the metadata. The index of the alternative is the number of the type in the file.
using GgufValue = std::variant<uint8_t, int8_t, uint16_t, int16_t, uint32_t, int32_t, float, bool, std::string,
                               GgufArray, uint64_t, int64_t, double>;

/// "u32", "string", "array of f32": for messages and tables.
std::string type_text(const GgufValue& value);

struct GgufEntry {
  std::string key;
  GgufValue value;
};

/// The metadata in file order; keys are unique.
using GgufMetadata = std::vector<GgufEntry>;

/// Null when there is no such key.
const GgufValue* find(const GgufMetadata& metadata, std::string_view key) noexcept;

/// A tensor's place. `shape` is in row-major order, as everywhere in w4q: the file states it the other way round. Every
/// row is a whole number of blocks.
struct GgufTensor {
  std::string name;
  GgmlType type = GgmlType::f32;
  Shape shape;
  uint64_t offset = 0;  ///< from the start of the data
  uint64_t size = 0;    ///< bytes, without the padding behind it

  /// Bytes from one row to the next.
  uint64_t row_bytes() const noexcept;
};

struct GgufHeader {
  uint32_t version = 3;
  uint64_t alignment = 32;
  uint64_t data_begin = 0;  ///< offset of the data in the file
  GgufMetadata metadata;
  std::vector<GgufTensor> tensors;  ///< in file order, which is offset order
  std::vector<std::string> warnings;

  /// The end of the data, the padding of the last tensor included.
  uint64_t file_size() const noexcept;
};

/// Parses and validates everything in front of the data of a whole file; what is returned is bounded by a small
/// multiple of its size. `file_name` is for messages. Throws bad_file naming key or tensor, expected and found, and
/// unsupported for version 1, files of big-endian machines and unknown tensor types.
GgufHeader parse_gguf(std::span<const std::byte> file, std::string_view file_name);

/// What a file will hold.
struct PlannedGgufTensor {
  std::string name;
  GgmlType type = GgmlType::f32;
  Shape shape;  ///< row-major
};

/// Lays tensors out in the given order, version 3. Throws bad_argument for duplicate or long names, bad shapes, rows
/// that are no whole number of blocks, duplicate keys, and a general.alignment that is no power of two.
GgufHeader layout_gguf(std::vector<PlannedGgufTensor> tensors, GgufMetadata metadata);

/// The bytes that stand before the data, padding included; `header.data_begin` of them.
std::string serialize_gguf_header(const GgufHeader& header);

/// True when the file begins as a GGUF file does; false when it is no readable file.
bool is_gguf(const std::filesystem::path& path) noexcept;

/// A GGUF file, mapped into memory.
class GgufFile {
 public:
  /// Throws as parse_gguf does, and bad_file when the file cannot be read.
  static GgufFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const noexcept { return path_; }
  const GgufHeader& header() const noexcept { return header_; }
  /// Null when there is no such tensor.
  const GgufTensor* find(std::string_view name) const noexcept;
  /// The data of a tensor of header().
  std::span<const std::byte> bytes(const GgufTensor& tensor) const noexcept;
  /// Lets the pages of a tensor go until they are read again.
  void release(const GgufTensor& tensor) const noexcept;

 private:
  GgufFile(std::filesystem::path path, MappedFile file, GgufHeader header);

  std::filesystem::path path_;
  MappedFile file_;
  GgufHeader header_;
  std::map<std::string_view, size_t> index_;  ///< the views point into header_.tensors, which does not change
};

}  // namespace w4q::io
