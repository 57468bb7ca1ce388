// How many different values bytes have: with few of them two tensors may be alike by chance.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace w4q::verify {

/// Whether `bytes` have `fewest` different values or more. Reads no further than it takes to tell.
inline bool has_values(std::span<const std::byte> bytes, size_t fewest) {
  std::array<bool, 256> seen{};
  for (size_t i = 0, values = 0; i < bytes.size(); ++i) {
    bool& known = seen[std::to_integer<size_t>(bytes[i])];
    if (known) continue;
    known = true;
    if (++values >= fewest) return true;
  }
  return fewest == 0;
}

}  // namespace w4q::verify
