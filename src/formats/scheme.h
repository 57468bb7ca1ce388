// A scheme says what the bits of a packed weight mean; it prints and parses as one string, e.g. "kbit3-b32-e4m4".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace w4q::formats {

enum class SchemeFamily { kbit };

/// How a block's scale is stored.
enum class ScaleType { e4m4, f16 };

struct Scheme {
  SchemeFamily family = SchemeFamily::kbit;
  int bits = 4;    ///< width of a code
  int block = 32;  ///< weights along k that share a scale
  ScaleType scale = ScaleType::e4m4;

  bool operator==(const Scheme&) const = default;
};

/// "kbit3-b32-e4m4", "kbit4-b32-f16".
std::string to_string(const Scheme& scheme);
/// The inverse. Throws unsupported and lists what exists.
Scheme parse_scheme(std::string_view text);
std::string_view to_string(ScaleType type) noexcept;

}  // namespace w4q::formats
