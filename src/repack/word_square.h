// Words four at a time: what the compiler keeps in one register, and squares of them turned.
#pragma once

#include <cstdint>
#include <cstring>

namespace w4q::repack {

using FourWords = uint32_t __attribute__((vector_size(16)));

inline FourWords load_four(const uint32_t* from) noexcept {
  FourWords words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

inline void store_four(uint32_t* to, const FourWords& words) noexcept { std::memcpy(to, &words, sizeof words); }

/// Turns a square of 4 × 4 words: its lines are `from_step` words apart, those of the result `to_step`.
inline void turn_words(const uint32_t* from, int64_t from_step, uint32_t* to, int64_t to_step) noexcept {
  const FourWords a = load_four(from), b = load_four(from + from_step);
  const FourWords c = load_four(from + 2 * from_step), d = load_four(from + 3 * from_step);
  const FourWords ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const FourWords ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const FourWords cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const FourWords cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  store_four(to, __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5));
  store_four(to + to_step, __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7));
  store_four(to + 2 * to_step, __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5));
  store_four(to + 3 * to_step, __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7));
}

}  // namespace w4q::repack
