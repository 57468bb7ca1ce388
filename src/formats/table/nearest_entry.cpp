#include "formats/table/nearest_entry.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

namespace w4q::formats {

NearestEntry::NearestEntry(std::span<const float> table, Ties ties) {
  const size_t half = table.size() / 2;
  const auto negated = [](float a, float b) { return a == -b && std::signbit(a) != std::signbit(b); };
  if (std::ranges::equal(table.first(half), table.subspan(half), negated)) {
    half_ = static_cast<uint32_t>(half);
    table = table.first(half);
  }
  std::vector<uint8_t> sorted(table.size());
  std::iota(sorted.begin(), sorted.end(), uint8_t{0});
  std::ranges::stable_sort(sorted, {}, [&](uint8_t code) { return table[code]; });
  for (const uint8_t code : sorted) {
    const bool again = !order_.empty() && table[order_.back().positive] == table[code];
    if (!again) order_.push_back({code, code});
    Entry& entry = order_.back();
    const auto wants = [&](bool sign, uint8_t taken) {
      return std::signbit(table[code]) == sign && std::signbit(table[taken]) != sign;
    };
    if (wants(false, entry.positive)) entry.positive = code;
    if (wants(true, entry.negative)) entry.negative = code;
  }
  for (size_t i = 1; i < order_.size(); ++i) {
    const float middle = (table[order_[i - 1].positive] + table[order_[i].positive]) * 0.5f;
    const bool up = ties == Ties::even && order_[i].positive % 2 == 0;
    midpoints_.push_back(up ? std::nextafter(middle, -std::numeric_limits<float>::infinity()) : middle);
  }
  // One less than a power of two of them: nothing is above what fills them up.
  midpoints_.resize(std::bit_ceil(midpoints_.size() + 1) - 1, std::numeric_limits<float>::infinity());
}

uint32_t NearestEntry::operator()(float x) const noexcept {
  const bool negative = std::signbit(x);
  if (half_ != 0 && negative) x = -x;
  size_t index = 0;  // of midpoints that x is above; halved without a branch, which no processor would foresee
  for (size_t step = (midpoints_.size() + 1) / 2; step > 0; step /= 2) {
    index += step * static_cast<size_t>(x > midpoints_[index + step - 1]);
  }
  const Entry& entry = order_[index];
  if (half_ != 0) return entry.positive + (negative ? half_ : 0);
  return negative ? entry.negative : entry.positive;
}

}  // namespace w4q::formats
