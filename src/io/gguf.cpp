#include "io/gguf.h"

#include <algorithm>
#include <array>

#include "core/text.h"

namespace w4q::io {
namespace {

constexpr std::array<std::string_view, 13> type_names = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                         "bool", "string", "array", "u64", "i64", "f64"};

constexpr uint64_t padded(uint64_t size, uint64_t alignment) { return (size + alignment - 1) / alignment * alignment; }

}  // namespace

std::string type_text(const GgufValue& value) {
  const auto* array = std::get_if<GgufArray>(&value);
  return array == nullptr ? std::string(type_names[value.index()]) : concat("array of ", type_names[array->index()]);
}

const GgufValue* find(const GgufMetadata& metadata, std::string_view key) noexcept {
  const auto entry = std::ranges::find(metadata, key, &GgufEntry::key);
  return entry == metadata.end() ? nullptr : &entry->value;
}

uint64_t GgufTensor::row_bytes() const noexcept {
  const auto& row = describe(type);
  return shape.empty() ? size : static_cast<uint64_t>(shape.back() / row.block * row.block_bytes);
}

uint64_t GgufHeader::file_size() const noexcept {
  return tensors.empty() ? data_begin : data_begin + padded(tensors.back().offset + tensors.back().size, alignment);
}

bool is_gguf(const std::filesystem::path& path) noexcept try {
  const MappedFile file(path);
  constexpr std::string_view magic = "GGUF";
  const auto bytes = file.bytes();
  return bytes.size() >= magic.size() && std::ranges::equal(bytes.first(magic.size()), std::as_bytes(std::span(magic)));
} catch (const std::exception&) {
  return false;  // whoever opens it as something else reports why that cannot be done
}

GgufFile GgufFile::open(const std::filesystem::path& path) {
  MappedFile file(path, true);
  GgufHeader header = parse_gguf(file.bytes(), path.native());
  return {path, std::move(file), std::move(header)};
}

GgufFile::GgufFile(std::filesystem::path path, MappedFile file, GgufHeader header)
    : path_(std::move(path)), file_(std::move(file)), header_(std::move(header)) {
  for (size_t i = 0; i < header_.tensors.size(); ++i) index_[header_.tensors[i].name] = i;
}

const GgufTensor* GgufFile::find(std::string_view name) const noexcept {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &header_.tensors[found->second];
}

std::span<const std::byte> GgufFile::bytes(const GgufTensor& tensor) const noexcept {
  return file_.bytes().subspan(header_.data_begin + tensor.offset, tensor.size);
}

void GgufFile::release(const GgufTensor& tensor) const noexcept {
  file_.release(header_.data_begin + tensor.offset, tensor.size);
}

}  // namespace w4q::io
