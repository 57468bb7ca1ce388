// What the reader and the writer of GGUF share: numbers of value types, and the limits of the format.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

namespace w4q::io {

inline constexpr std::string_view gguf_magic = "GGUF";
inline constexpr std::string_view gguf_alignment_key = "general.alignment";
inline constexpr uint32_t gguf_array_number = 9;
inline constexpr uint64_t gguf_default_alignment = 32;
inline constexpr size_t gguf_longest_name = 63;  ///< bytes of a tensor's name: readers in C keep it in 64
inline constexpr size_t gguf_most_dimensions = 4;

/// Calls `visit` with the C++ type of the value type `number`, which is below 13 and not an array, as a tag.
template <class Visit>
auto with_gguf_type(uint32_t number, const Visit& visit) {
  switch (number) {
    case 0:
      return visit(std::type_identity<uint8_t>{});
    case 1:
      return visit(std::type_identity<int8_t>{});
    case 2:
      return visit(std::type_identity<uint16_t>{});
    case 3:
      return visit(std::type_identity<int16_t>{});
    case 4:
      return visit(std::type_identity<uint32_t>{});
    case 5:
      return visit(std::type_identity<int32_t>{});
    case 6:
      return visit(std::type_identity<float>{});
    case 7:
      return visit(std::type_identity<bool>{});
    case 10:
      return visit(std::type_identity<uint64_t>{});
    case 11:
      return visit(std::type_identity<int64_t>{});
    case 12:
      return visit(std::type_identity<double>{});
    default:
      return visit(std::type_identity<std::string>{});
  }
}

constexpr bool is_power_of_two(uint64_t value) noexcept { return value != 0 && (value & (value - 1)) == 0; }

}  // namespace w4q::io
