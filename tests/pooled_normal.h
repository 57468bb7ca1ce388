// Normal numbers by the million for tests that need no more than their spread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/parallel.h"
#include "core/rng.h"

namespace w4q::test {

/// N(0, 1), one of 65,536 draws: to draw every value anew takes longer than what most tests do with it. Of another stream
/// than the fourth some router may stand at a tie, or an expert be sent no token.
inline float pooled_normal(uint64_t seed, uint64_t index) {
  static const std::vector<float> pool = [] {
    std::vector<float> drawn(1 << 16);
    for (size_t i = 0; i < drawn.size(); ++i) drawn[i] = static_cast<float>(random_normal(4, i));
    return drawn;
  }();
  return pool[random_bits(seed, index) >> 48];
}

/// Values 0, 1, … of `seed`, times `magnitude`.
inline void fill_normal(std::span<float> values, uint64_t seed, double magnitude = 1) {
  parallel_for(static_cast<int64_t>(values.size()), 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto index = static_cast<size_t>(i);
      values[index] = static_cast<float>(magnitude * pooled_normal(seed, index));
    }
  });
}

}  // namespace w4q::test
