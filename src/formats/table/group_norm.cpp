#include "formats/table/group_norm.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "formats/codebook.h"

namespace w4q::formats {

double rotated_gain(std::span<const float> codebook, int bits) noexcept {
  return static_cast<double>(table_max(codebook)) / static_cast<double>(normal_codebook(bits).back());
}

void rotated_levels(std::span<const float> codebook, int64_t group, std::span<float> levels) noexcept {
  const double root = std::sqrt(static_cast<double>(group));
  std::ranges::transform(codebook, levels.begin(),
                         [root](float value) { return static_cast<float>(static_cast<double>(value) / root); });
}

double rotated_norm(std::span<const float> values, int64_t group) noexcept {
  constexpr size_t sums = 32;
  std::array<double, sums> partial{};
  for (size_t i = 0; i < values.size(); ++i) {
    const double value = values[i];
    partial[i % sums] += value * value;
  }
  for (size_t half = sums / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) partial[i] += partial[i + half];
  }
  const auto size = static_cast<int64_t>(values.size());
  const double sum = size == group ? partial[0] : partial[0] * static_cast<double>(group) / static_cast<double>(size);
  return std::sqrt(sum);
}

}  // namespace w4q::formats
