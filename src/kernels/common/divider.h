// Division by a number that the host knows, for kernels that divide once and wait for it.
#pragma once

#include <bit>
#include <cstdint>

namespace w4q::kernels {

/// A multiplication, a sum and a shift, where an integer division is some twenty-five instructions behind one another.
struct Divider {
  uint32_t multiplier = 1;
  int shift = 0;

  constexpr Divider() = default;
  /// By `divisor`, at least 1.
  constexpr explicit Divider(uint32_t divisor) : shift(std::bit_width(divisor - 1)) {
    multiplier = static_cast<uint32_t>(((((uint64_t{1} << shift) - divisor) << 32) / divisor) + 1);
  }
  /// Of a number from 0 to 2^31 − 1.
  constexpr int quotient(int number) const {
    const auto n = static_cast<uint32_t>(number);
    return static_cast<int>((static_cast<uint32_t>(uint64_t{n} * multiplier >> 32) + n) >> shift);
  }
};

}  // namespace w4q::kernels
