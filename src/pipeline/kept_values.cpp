#include "pipeline/kept_values.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "core/text.h"

namespace w4q::pipeline {
namespace {

/// The place of the first of the values of type Bits whose magnitude lies above `infinity`.
template <class Bits>
std::optional<int64_t> first_above(std::span<const std::byte> bytes, Bits infinity) {
  const auto magnitude = [&](size_t i) {
    Bits value;
    std::memcpy(&value, bytes.data() + i * sizeof(Bits), sizeof(Bits));
    return static_cast<Bits>(value & std::numeric_limits<Bits>::max() / 2);
  };
  constexpr size_t at_once = 4096;  // which are looked at without a branch
  const size_t count = bytes.size() / sizeof(Bits);
  for (size_t begin = 0; begin < count; begin += at_once) {
    const size_t end = std::min(begin + at_once, count);
    bool found = false;
    for (size_t i = begin; i < end; ++i) found |= magnitude(i) > infinity;
    if (!found) continue;
    for (size_t i = begin; i < end; ++i) {
      if (magnitude(i) > infinity) return static_cast<int64_t>(i);
    }
  }
  return std::nullopt;
}

std::optional<int64_t> first_nan(DType dtype, std::span<const std::byte> bytes) {
  switch (dtype) {
    case DType::f16:
      return first_above<uint16_t>(bytes, 0x7C00);
    case DType::bf16:
      return first_above<uint16_t>(bytes, 0x7F80);
    case DType::f32:
      return first_above<uint32_t>(bytes, 0x7F800000);
    default:
      return std::nullopt;
  }
}

}  // namespace

void KeptValues::add(int64_t offset, std::span<const std::byte> bytes) {
  if (first_nan_) return;
  const auto found = first_nan(dtype_, bytes);
  if (found) first_nan_ = offset / (dtype_ == DType::f32 ? 4 : 2) + *found;
}

std::optional<std::string> KeptValues::note(std::string_view tensor) const {
  if (!first_nan_) return std::nullopt;
  return concat(printable(tensor), ": value ", *first_nan_,
                " is NaN, kept as it is; the model cannot work (w4q verify MODEL finds what is damaged)");
}

}  // namespace w4q::pipeline
