#include <algorithm>
#include <set>

#include "core/error.h"
#include "core/text.h"
#include "io/gguf.h"
#include "io/gguf_types.h"
#include "io/system.h"

namespace w4q::io {
namespace {

/// Appends little-endian values to a string.
class Appender {
 public:
  template <class T>
  void number(T value) {
    static_assert(std::is_arithmetic_v<T>);
    text_.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  void string(std::string_view value) {
    number(static_cast<uint64_t>(value.size()));
    text_ += value;
  }
  template <class T>
  void scalar(const T& value) {
    if constexpr (std::is_same_v<T, std::string>) {
      string(value);
    } else if constexpr (std::is_same_v<T, bool>) {
      number(static_cast<uint8_t>(value));
    } else {
      number(value);
    }
  }

  void value(const GgufValue& value) {
    number(static_cast<uint32_t>(value.index()));
    const auto* values = std::get_if<GgufArray>(&value);
    if (values != nullptr) return array(*values);
    with_gguf_type(static_cast<uint32_t>(value.index()),
                   [&]<class T>(std::type_identity<T>) { scalar(std::get<T>(value)); });
  }

  void pad(uint64_t alignment) { text_.resize((text_.size() + alignment - 1) / alignment * alignment); }
  std::string take() { return std::move(text_); }

 private:
  void array(const GgufArray& values) {
    number(static_cast<uint32_t>(values.index()));
    with_gguf_type(static_cast<uint32_t>(values.index()), [&]<class T>(std::type_identity<T>) {
      const auto& elements = std::get<std::vector<T>>(values);
      number(static_cast<uint64_t>(elements.size()));
      for (const T& element : elements) scalar(element);
    });
  }

  std::string text_;
};

Error bad_plan(std::string_view name, std::string_view what) {
  return {ErrorCode::bad_argument, concat("tensor \"", shown(name), "\": ", what)};
}

GgufTensor place(PlannedGgufTensor plan, uint64_t offset) {
  const auto& row = describe(plan.type);
  if (plan.name.empty() || plan.name.size() > gguf_longest_name)
    throw bad_plan(plan.name, "GGUF names have 1 to 63 bytes");
  if (plan.shape.size() > gguf_most_dimensions) throw bad_plan(plan.name, "GGUF tensors have at most 4 dimensions");
  if ((plan.shape.empty() ? 1 : plan.shape.back()) % row.block != 0) {
    throw bad_plan(plan.name, concat("rows of ", plan.shape.back(), " elements are no whole blocks of ", row.name))
        .detail(concat("a block has ", row.block));
  }
  const auto size = static_cast<uint64_t>(element_count(plan.shape) / row.block * row.block_bytes);
  return {std::move(plan.name), plan.type, std::move(plan.shape), offset, size};
}

void check_metadata(GgufHeader& header) {
  std::set<std::string_view> seen;
  for (const auto& entry : header.metadata) {
    if (entry.key.empty() || !seen.insert(entry.key).second) {
      throw Error(ErrorCode::bad_argument, concat("GGUF key \"", shown(entry.key), "\" is empty or appears twice"));
    }
  }
  const GgufValue* value = find(header.metadata, gguf_alignment_key);
  if (value == nullptr) return;
  const auto* alignment = std::get_if<uint32_t>(value);
  if (alignment == nullptr || !is_power_of_two(*alignment)) {
    throw Error(ErrorCode::bad_argument, concat(gguf_alignment_key, ": expected a power of two as u32"));
  }
  header.alignment = *alignment;
}

}  // namespace

GgufHeader layout_gguf(std::vector<PlannedGgufTensor> tensors, GgufMetadata metadata) {
  GgufHeader header;
  header.metadata = std::move(metadata);
  check_metadata(header);
  std::set<std::string> seen;
  uint64_t run = 0;
  for (auto& plan : tensors) {
    if (!seen.insert(plan.name).second) throw bad_plan(plan.name, "is planned twice");
    header.tensors.push_back(place(std::move(plan), run));
    run += (header.tensors.back().size + header.alignment - 1) / header.alignment * header.alignment;
  }
  header.data_begin = serialize_gguf_header(header).size();
  return header;
}

std::string serialize_gguf_header(const GgufHeader& header) {
  Appender out;
  for (const char c : gguf_magic) out.number(c);
  out.number(header.version);
  out.number(static_cast<uint64_t>(header.tensors.size()));
  out.number(static_cast<uint64_t>(header.metadata.size()));
  for (const auto& entry : header.metadata) {
    out.string(entry.key);
    out.value(entry.value);
  }
  for (const auto& tensor : header.tensors) {
    out.string(tensor.name);
    out.number(static_cast<uint32_t>(tensor.shape.size()));
    for (auto dim = tensor.shape.rbegin(); dim != tensor.shape.rend(); ++dim) out.number(*dim);
    out.number(static_cast<uint32_t>(tensor.type));
    out.number(tensor.offset);
  }
  out.pad(header.alignment);
  return out.take();
}

}  // namespace w4q::io
