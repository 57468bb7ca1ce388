#include "formats/rotation.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <random>

#include "core/error.h"
#include "core/text.h"

namespace w4q::formats {
namespace {

constexpr std::string_view prefix = "hadamard";
constexpr std::string_view seed_mark = "-s";
constexpr std::string_view plus_mark = "-plus";
constexpr std::string_view row_word = "-row";

bool is_block(int64_t block) noexcept {
  return block == whole_row ||
         (block >= 1 && block <= max_rotation_block && std::has_single_bit(static_cast<uint64_t>(block)));
}

/// Reads a whole decimal number without sign or leading zeros.
template <class Integer>
bool read_number(std::string_view text, Integer& value) noexcept {
  if (text.size() > 1 && text.front() == '0') return false;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc{} && stop == text.data() + text.size();
}

bool parse_parts(std::string_view text, Rotation& rotation) noexcept {
  const bool plus = text.ends_with(plus_mark);
  const size_t mark = plus ? text.size() - plus_mark.size() : text.rfind(seed_mark);
  if (!text.starts_with(prefix) || mark == std::string_view::npos || mark < prefix.size()) return false;
  uint64_t seed = 0;
  if (!plus && !read_number(text.substr(mark + seed_mark.size()), seed)) return false;
  if (plus) {
    rotation.seed.reset();
  } else {
    rotation.seed = seed;
  }
  const std::string_view block = text.substr(prefix.size(), mark - prefix.size());
  if (block == row_word) {
    rotation.block = whole_row;
    return true;
  }
  return read_number(block, rotation.block) && rotation.block >= 2 && is_block(rotation.block);
}

/// One stage of butterflies at distance `distance` over the whole of `values`.
void stage(float* values, size_t size, size_t distance) noexcept {
  for (size_t base = 0; base < size; base += 2 * distance) {
    float* low = values + base;
    float* high = low + distance;
    for (size_t i = 0; i < distance; ++i) {
      const float sum = low[i] + high[i];
      high[i] = low[i] - high[i];
      low[i] = sum;
    }
  }
}

/// This stage and the next: the same sums, with half of the loads and stores.
void two_stages(float* values, size_t size, size_t distance) noexcept {
  for (size_t base = 0; base < size; base += 4 * distance) {
    for (float *a = values + base, *end = a + distance; a != end; ++a) {
      float *b = a + distance, *c = b + distance, *d = c + distance;
      const float sum = *a + *b, difference = *a - *b, next_sum = *c + *d, next_difference = *c - *d;
      *a = sum + next_sum;
      *b = difference + next_difference;
      *c = sum - next_sum;
      *d = difference - next_difference;
    }
  }
}

}  // namespace

std::string to_string(const Rotation& rotation) {
  if (rotation.identity()) return "none";
  const std::string block = rotation.block == whole_row ? std::string(row_word) : concat(rotation.block);
  return rotation.seed ? concat(prefix, block, seed_mark, *rotation.seed) : concat(prefix, block, plus_mark);
}

Rotation parse_rotation(std::string_view text) {
  Rotation rotation;
  if (text == "none" || parse_parts(text, rotation)) return rotation;
  throw Error(ErrorCode::unsupported, concat("unknown rotation \"", printable(text.substr(0, 64)), "\""))
      .detail(concat("known: none, hadamard<d>-s<seed> with d a power of two up to ", max_rotation_block,
                     ", hadamard-row-s<seed>, and both with ", plus_mark, " for no signs"));
}

int64_t rotation_width(int64_t block, int64_t k, int64_t start) noexcept {
  const auto rest = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(k - start)));
  return block == whole_row ? rest : std::min(block, rest);
}

void hadamard(std::span<float> values) noexcept {
  size_t distance = 1;
  for (; 4 * distance <= values.size(); distance *= 4) two_stages(values.data(), values.size(), distance);
  if (distance < values.size()) stage(values.data(), values.size(), distance);
}

InputRotation::InputRotation(const Rotation& rotation, int64_t k) : rotation_(rotation) {
  if (!is_block(rotation.block)) {
    throw Error(ErrorCode::unsupported, concat("a rotation of blocks of ", rotation.block))
        .detail(concat("expected a power of two up to ", max_rotation_block));
  }
  ensure(k >= 0, "InputRotation: fewer than no inputs");
  factors_.assign(static_cast<size_t>(k), 1.0f);
  for (int64_t start = 0, width = 0; start < k; start += width) {
    width = rotation_width(rotation.block, k, start);
    if (width == 1) continue;
    std::mt19937 generator(static_cast<uint32_t>(rotation.seed.value_or(0) + static_cast<uint64_t>(start)));
    const float factor = 1.0f / std::sqrt(static_cast<float>(width));
    const auto plus = [&] { return !rotation.seed || (generator() & 1) != 0; };
    for (int64_t i = 0; i < width; ++i) factors_[static_cast<size_t>(start + i)] = plus() ? factor : -factor;
  }
}

void InputRotation::butterflies(std::span<float> row) const noexcept {
  const auto k = static_cast<int64_t>(row.size());
  for (int64_t start = 0, width = 0; start < k; start += width) {
    width = rotation_width(rotation_.block, k, start);
    hadamard(row.subspan(static_cast<size_t>(start), static_cast<size_t>(width)));
  }
}

void InputRotation::rotate(std::span<float> row) const noexcept {
  for (size_t i = 0; i < row.size(); ++i) row[i] *= factors_[i];
  butterflies(row);
}

void InputRotation::restore(std::span<float> row) const noexcept {
  butterflies(row);
  for (size_t i = 0; i < row.size(); ++i) row[i] *= factors_[i];
}

}  // namespace w4q::formats
