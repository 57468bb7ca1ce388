// The writing half of the container: which tensor goes where, and the bytes of the header.
#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "core/text.h"
#include "io/safetensors.h"
#include "io/strict_sax.h"
#include "io/system.h"

namespace w4q::io {
namespace {

Error bad_plan(std::string_view name, std::string_view problem) {
  return {ErrorCode::bad_argument, concat("tensor \"", shown(name), "\": ", problem)};
}

/// Bytes of a planned tensor, with every product checked.
uint64_t checked_size(const PlannedTensor& tensor) {
  int64_t bits = dtype_bits(tensor.dtype);
  for (const int64_t dim : tensor.shape) {
    if (dim < 0) throw bad_plan(tensor.name, concat("negative dimension in ", shape_text(tensor.shape)));
    if (__builtin_mul_overflow(bits, dim, &bits)) {
      throw bad_plan(tensor.name, concat("too many elements in ", shape_text(tensor.shape)));
    }
  }
  if (bits % 8 != 0) {
    throw bad_plan(tensor.name, concat(dtype_name(tensor.dtype), " ", shape_text(tensor.shape),
                                       " does not fill whole bytes: ", bits, " bits"));
  }
  return static_cast<uint64_t>(bits) / 8;
}

void check_name(std::string_view name) {
  if (name == "__metadata__") throw bad_plan(name, "the name is reserved");
  if (invalid_utf8_offset(name) != std::string_view::npos) throw bad_plan(name, "the name is not valid UTF-8");
}

std::string json_string(const std::string& text) { return nlohmann::json(text).dump(); }

std::string header_json(const SafetensorsHeader& header) {
  std::string json = "{";
  const auto separate = [&] {
    if (json.size() > 1) json += ',';
  };
  if (!header.metadata.empty()) json += "\"__metadata__\":" + nlohmann::json(header.metadata).dump();
  for (const auto& tensor : header.tensors) {
    separate();
    json += json_string(tensor.name);
    json += ":{\"dtype\":\"";
    json += dtype_name(tensor.dtype);
    json += "\",\"shape\":[";
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      if (i != 0) json += ',';
      json += std::to_string(static_cast<uint64_t>(tensor.shape[i]));
    }
    json += concat("],\"data_offsets\":[", tensor.begin, ",", tensor.end, "]}");
  }
  json += '}';
  json.resize((json.size() + 7) / 8 * 8, ' ');
  return json;
}

}  // namespace

SafetensorsHeader layout_safetensors(std::vector<PlannedTensor> tensors, std::map<std::string, std::string> metadata) {
  for (const auto& [key, value] : metadata) {
    if (invalid_utf8_offset(key) != std::string_view::npos || invalid_utf8_offset(value) != std::string_view::npos) {
      throw Error(ErrorCode::bad_argument, concat("metadata \"", shown(key), "\": is not valid UTF-8"));
    }
  }
  std::sort(tensors.begin(), tensors.end(), [](const PlannedTensor& a, const PlannedTensor& b) {
    return a.dtype != b.dtype ? a.dtype > b.dtype : a.name < b.name;
  });
  SafetensorsHeader header;
  header.metadata = std::move(metadata);
  std::vector<std::string_view> names;
  uint64_t end = 0;
  for (auto& tensor : tensors) {
    check_name(tensor.name);
    const uint64_t size = checked_size(tensor);
    if (size > std::numeric_limits<int64_t>::max() - end) throw bad_plan(tensor.name, "the file would be too large");
    header.tensors.push_back({std::move(tensor.name), tensor.dtype, std::move(tensor.shape), end, end + size});
    end += size;
  }
  for (const auto& tensor : header.tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  const auto twin = std::adjacent_find(names.begin(), names.end());
  if (twin != names.end()) throw bad_plan(*twin, "is planned twice");
  header.data_begin = 8 + header_json(header).size();
  return header;
}

std::string serialize_safetensors_header(const SafetensorsHeader& header) {
  const std::string json = header_json(header);
  if (json.size() > max_header_bytes) {
    throw Error(ErrorCode::bad_argument, concat("the header of a file with ", header.tensors.size(),
                                                " tensors would exceed ", max_header_bytes, " bytes"))
        .hint("write smaller shards");
  }
  std::string bytes;
  for (uint64_t size = json.size(), i = 0; i < 8; ++i) bytes += static_cast<char>(size >> (8 * i) & 0xFF);
  return bytes + json;
}

}  // namespace w4q::io
