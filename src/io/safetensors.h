// The safetensors container: header reading with every check of the reference reader, and the byte-exact header writer
// (docs/safetensors.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/views.h"

namespace w4q::io {

/// A tensor's place in one safetensors file. `begin` and `end` count bytes from the end of the header.
struct TensorInfo {
  std::string name;
  DType dtype = DType::u8;
  Shape shape;
  uint64_t begin = 0;
  uint64_t end = 0;

  uint64_t size() const noexcept { return end - begin; }
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;              ///< in offset order
  std::map<std::string, std::string> metadata;  ///< "__metadata__"
  uint64_t data_begin = 0;                      ///< offset of the data buffer in the file
  std::vector<std::string> warnings;            ///< accepted oddities: leading white space, unknown fields
};

inline constexpr uint64_t max_header_bytes = 100'000'000;

/// Parses and validates the header of a file of `file_size` bytes. `prefix` holds its first bytes, at least the whole
/// header or the whole file, whichever is shorter. `file_name` is for messages. Throws bad_file naming the tensor, what
/// was expected and what was found; duplicate keys are refused.
SafetensorsHeader parse_safetensors(std::span<const std::byte> prefix, uint64_t file_size, std::string_view file_name);

/// What a file will hold: name, type and shape.
struct PlannedTensor {
  std::string name;
  DType dtype = DType::u8;
  Shape shape;
  bool sidecar = false;  ///< of a checkpoint: lies in its sidecar folder (checkpoint.h)

  int64_t size() const noexcept { return byte_count(dtype, shape); }
};

/// Lays `tensors` out as the reference writer does: descending type rank, then name. Returns the header with offsets.
/// Throws bad_argument on duplicate names, sub-byte misalignment or the reserved name "__metadata__".
SafetensorsHeader layout_safetensors(std::vector<PlannedTensor> tensors, std::map<std::string, std::string> metadata);

/// The bytes that stand before the data buffer: u64 length and compact JSON padded with spaces to a multiple of 8.
/// Throws bad_argument when the JSON would exceed max_header_bytes.
std::string serialize_safetensors_header(const SafetensorsHeader& header);

}  // namespace w4q::io
