#include <algorithm>
#include <cstring>
#include <optional>
#include <set>

#include "core/text.h"
#include "io/gguf.h"
#include "io/gguf_types.h"
#include "io/system.h"

namespace w4q::io {
namespace {

// The least bytes that each of these takes in a file: counts that cannot fit are refused before memory is taken.
constexpr uint64_t least_entry = 8 + 1 + 4 + 1;
constexpr uint64_t least_tensor = 8 + 1 + 4 + 4 + 8;

/// Reads little-endian values from front to back.
class Cursor {
 public:
  Cursor(std::span<const std::byte> bytes, std::string_view file) : bytes_(bytes), file_(shown(file)) {}

  uint64_t place() const noexcept { return place_; }
  uint64_t rest() const noexcept { return bytes_.size() - place_; }
  void skip(size_t count) { take(count); }

  template <class T>
  T read() {
    if constexpr (std::is_same_v<T, std::string>) {
      const auto bytes = take(read<uint64_t>());
      return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
    } else if constexpr (std::is_same_v<T, bool>) {
      const auto byte = read<uint8_t>();
      if (byte > 1) throw damaged(concat("a boolean is ", int{byte})).detail(concat("at byte ", place_ - 1));
      return byte == 1;
    } else {
      T value;
      std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
      return value;
    }
  }

  template <class T>
  std::vector<T> read_array(uint64_t count) {
    constexpr uint64_t least = std::is_same_v<T, std::string> ? 8 : sizeof(T);
    if (count > rest() / least) throw damaged(concat("an array claims ", count, " elements")).detail(left());
    std::vector<T> values;
    values.reserve(count);
    for (uint64_t i = 0; i < count; ++i) values.push_back(read<T>());
    return values;
  }

  std::string left() const { return concat("at byte ", place_, ", ", rest(), " bytes are left"); }
  Error damaged(std::string_view what) const { return {ErrorCode::bad_file, concat(file_, ": ", what)}; }
  Error unsupported(std::string_view what) const { return {ErrorCode::unsupported, concat(file_, ": ", what)}; }

 private:
  std::span<const std::byte> take(uint64_t count) {
    if (count > rest()) throw damaged("the file ends too early").detail(concat(count, " bytes are expected ", left()));
    const auto result = bytes_.subspan(place_, count);
    place_ += count;
    return result;
  }

  std::span<const std::byte> bytes_;
  std::string file_;
  uint64_t place_ = 0;
};

GgufArray read_array(Cursor& cursor) {
  const auto type = cursor.read<uint32_t>();
  const auto count = cursor.read<uint64_t>();
  if (type == gguf_array_number) throw cursor.unsupported("an array of arrays in the metadata");
  if (type >= std::variant_size_v<GgufArray>) throw cursor.damaged(concat("unknown element type ", type));
  return with_gguf_type(type, [&]<class T>(std::type_identity<T>) {
    return GgufArray(std::in_place_type<std::vector<T>>, cursor.read_array<T>(count));
  });
}

GgufValue read_value(Cursor& cursor, std::string_view key) {
  const auto type = cursor.read<uint32_t>();
  if (type == gguf_array_number) return read_array(cursor);
  if (type >= std::variant_size_v<GgufValue>) {
    throw cursor.damaged(concat("key \"", shown(key), "\" has the unknown type ", type));
  }
  return with_gguf_type(
      type, [&]<class T>(std::type_identity<T>) { return GgufValue(std::in_place_type<T>, cursor.read<T>()); });
}

GgufMetadata read_metadata(Cursor& cursor, uint64_t count) {
  if (count > cursor.rest() / least_entry) throw cursor.damaged(concat(count, " keys")).detail(cursor.left());
  GgufMetadata metadata;
  std::set<std::string> seen;
  for (uint64_t i = 0; i < count; ++i) {
    auto key = cursor.read<std::string>();
    if (key.empty()) throw cursor.damaged(concat("key ", i, " is empty"));
    if (!seen.insert(key).second) throw cursor.damaged(concat("the key \"", shown(key), "\" appears twice"));
    auto value = read_value(cursor, key);
    metadata.push_back({std::move(key), std::move(value)});
  }
  return metadata;
}

uint64_t read_alignment(const Cursor& cursor, const GgufMetadata& metadata) {
  const GgufValue* value = find(metadata, gguf_alignment_key);
  if (value == nullptr) return gguf_default_alignment;
  const auto* alignment = std::get_if<uint32_t>(value);
  if (alignment != nullptr && is_power_of_two(*alignment)) return *alignment;
  throw cursor.damaged(concat(gguf_alignment_key, " is no power of two"))
      .detail(alignment == nullptr ? "expected u32, got " + type_text(*value) : concat("got ", *alignment));
}

Error tensor_error(const Cursor& cursor, const GgufTensor& tensor, std::string_view what) {
  return cursor.damaged(concat("tensor \"", shown(tensor.name), "\": ", what));
}

/// Reads the dimensions, fastest first, and turns them round.
Shape read_shape(Cursor& cursor, const GgufTensor& tensor) {
  const auto rank = cursor.read<uint32_t>();
  if (rank > gguf_most_dimensions)
    throw tensor_error(cursor, tensor, concat(rank, " dimensions")).detail("expected at most 4");
  Shape shape;
  for (uint32_t i = 0; i < rank; ++i) {
    shape.push_back(cursor.read<int64_t>());
    if (shape.back() < 0) throw tensor_error(cursor, tensor, concat("a dimension of ", shape.back()));
  }
  std::ranges::reverse(shape);
  return shape;
}

uint64_t bytes_of_tensor(const Cursor& cursor, const GgufTensor& tensor) {
  const auto& row = describe(tensor.type);
  int64_t elements = 1;
  for (const int64_t dim : tensor.shape) {
    if (!__builtin_mul_overflow(elements, dim, &elements)) continue;
    throw tensor_error(cursor, tensor, "too many elements").detail("shape " + shape_text(tensor.shape));
  }
  if ((tensor.shape.empty() ? 1 : tensor.shape.back()) % row.block != 0) {
    throw tensor_error(cursor, tensor, concat("a row is no whole number of blocks"))
        .detail(concat(row.name, " has blocks of ", row.block, ", the shape is ", shape_text(tensor.shape)));
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(elements / row.block, row.block_bytes, &bytes)) {
    throw tensor_error(cursor, tensor, "too many bytes").detail("shape " + shape_text(tensor.shape));
  }
  return static_cast<uint64_t>(bytes);
}

GgufTensor read_tensor(Cursor& cursor) {
  GgufTensor tensor;
  tensor.name = cursor.read<std::string>();
  if (tensor.name.empty() || tensor.name.size() > gguf_longest_name) {
    throw tensor_error(cursor, tensor, concat("a name of ", tensor.name.size(), " bytes")).detail("expected 1 to 63");
  }
  tensor.shape = read_shape(cursor, tensor);
  const auto number = cursor.read<uint32_t>();
  const auto* row = find_ggml_type(number);
  if (row == nullptr) {
    throw cursor.unsupported(concat("tensor \"", shown(tensor.name), "\" has the unknown type ", number));
  }
  tensor.type = row->type;
  tensor.offset = cursor.read<uint64_t>();
  tensor.size = bytes_of_tensor(cursor, tensor);
  return tensor;
}

std::vector<GgufTensor> read_tensors(Cursor& cursor, uint64_t count) {
  if (count > cursor.rest() / least_tensor) throw cursor.damaged(concat(count, " tensors")).detail(cursor.left());
  std::vector<GgufTensor> tensors;
  std::set<std::string> seen;
  for (uint64_t i = 0; i < count; ++i) {
    tensors.push_back(read_tensor(cursor));
    if (!seen.insert(tensors.back().name).second) throw tensor_error(cursor, tensors.back(), "appears twice");
  }
  return tensors;
}

/// Every tensor begins where the padded one before it ended, and all of them lie in the file.
void check_places(const Cursor& cursor, GgufHeader& header, uint64_t file_size) {
  uint64_t run = 0;
  for (const auto& tensor : header.tensors) {
    if (tensor.offset != run) {
      throw tensor_error(cursor, tensor, "stands at the wrong place")
          .detail(concat("expected offset ", run, ", got ", tensor.offset));
    }
    const uint64_t left = header.data_begin < file_size ? file_size - header.data_begin : 0;
    if (header.data_begin > file_size || run > left || tensor.size > left - run) {
      throw tensor_error(cursor, tensor, "reaches behind the end of the file")
          .detail(concat("offset ", run, ", ", tensor.size, " bytes, ", left, " bytes of data in the file"))
          .hint("the file was cut: download it again");
    }
    run = (run + tensor.size + header.alignment - 1) / header.alignment * header.alignment;
  }
  const uint64_t expected = header.file_size();
  if (header.tensors.empty() || file_size == expected) return;
  header.warnings.push_back(file_size < expected ? "the padding behind the last tensor is missing"
                                                 : concat(file_size - expected, " bytes behind the last tensor"));
}

uint32_t read_version(Cursor& cursor) {
  const auto version = cursor.read<uint32_t>();
  if (version == 2 || version == 3) return version;
  if (version != 0 && (version & 0xFFFF) == 0) {
    throw cursor.unsupported("a GGUF file for machines that store numbers with the high byte first");
  }
  if (version == 0) throw cursor.damaged("GGUF version 0");
  throw cursor.unsupported(concat("GGUF version ", version)).detail("supported: 2, 3");
}

}  // namespace

GgufHeader parse_gguf(std::span<const std::byte> file, std::string_view file_name) {
  Cursor cursor(file, file_name);
  if (file.size() < gguf_magic.size() ||
      !std::ranges::equal(file.first(gguf_magic.size()), std::as_bytes(std::span(gguf_magic)))) {
    throw cursor.damaged("is not a GGUF file").detail("its first four bytes are not \"GGUF\"");
  }
  cursor.skip(gguf_magic.size());
  GgufHeader header;
  header.version = read_version(cursor);
  const auto tensor_count = cursor.read<uint64_t>();
  const auto entry_count = cursor.read<uint64_t>();
  header.metadata = read_metadata(cursor, entry_count);
  header.alignment = read_alignment(cursor, header.metadata);
  header.tensors = read_tensors(cursor, tensor_count);
  header.data_begin = (cursor.place() + header.alignment - 1) / header.alignment * header.alignment;
  check_places(cursor, header, file.size());
  return header;
}

}  // namespace w4q::io
