#include "quantize/gguf_exact.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/float_formats.h"

namespace w4q::quantize {
namespace {

using formats::GgufForm;
using Whole = int64_t;

/// Bits of a sum of two such numbers fit.
constexpr int most_bits = 60;

/// Values as whole multiples of 2^exponent.
struct WholeValues {
  std::array<Whole, formats::widest_gguf_block> values{};
  int exponent = 0;
};

std::optional<WholeValues> whole_values(std::span<const float> values) {
  int lowest = 1000, highest = -1000;
  for (const float value : values) {
    if (value == 0) continue;
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t field = bits >> 23 & 0xFFu, mantissa = (bits & 0x7FFFFFu) | (field > 0 ? 0x800000u : 0u);
    const int exponent = static_cast<int>(std::max(field, 1u)) - 150;
    lowest = std::min(lowest, exponent + std::countr_zero(mantissa));
    highest = std::max(highest, exponent + 24);
  }
  if (lowest == 1000 || highest - lowest > most_bits) return std::nullopt;
  WholeValues result;
  result.exponent = lowest;
  for (size_t i = 0; i < values.size(); ++i) {
    result.values[i] = static_cast<Whole>(std::ldexp(static_cast<double>(values[i]), -lowest));
  }
  return result;
}

/// Whether an f16 holds it.
bool is_half(double value) {
  const auto narrow = static_cast<float>(value);
  return static_cast<double>(narrow) == value && value != 0 && std::isfinite(narrow) &&
         f32_from_f16(f16_from_f32(narrow)) == narrow;
}

/// `whole` · 2^exponent / divisor, where an f16 holds that.
std::optional<float> half_of(Whole whole, int exponent, int divisor) {
  const double value = std::ldexp(static_cast<double>(whole), exponent), part = value / divisor;
  if (part * divisor != value || !is_half(part)) return std::nullopt;
  return static_cast<float>(part);
}

/// What is known of a part: all of its steps are multiples of `step`.
struct Part {
  std::span<const Whole> values;
  Whole low = 0, high = 0, step = 0;
  Whole widest = 0, parted = 1;  ///< with offsets: the step is this over that …
  Whole taken = 0;               ///< … or over less, where an offset wants it
  bool negative = false;         ///< a level of zero under a negative step is −0
};

bool has_negative_zero(std::span<const float> values) {
  return std::ranges::any_of(values, [](float value) { return value == 0 && std::signbit(value); });
}

Part part_of(std::span<const Whole> values) {
  const auto [low, high] = std::ranges::minmax(values);
  return {.values = values, .low = low, .high = high};
}

/// Finds the greatest step, unless it is so small that levels do not reach: most values are on no grid, and that is seen
/// early.
bool find_step(const GgufForm& form, Part& part) {
  const Whole reach = form.has_offset()    ? form.highest_level
                      : form.table.empty() ? std::max(-form.lowest_level, form.highest_level)
                                           : 127;
  const Whole origin = form.has_offset() ? part.low : 0;
  const Whole range = form.has_offset() ? part.high - part.low : std::max(part.high, -part.low);
  for (const Whole value : part.values) {
    part.step = std::gcd(part.step, value - origin);
    if (part.step != 0 && range / part.step > reach) return false;
  }
  return true;
}

/// The level of a whole number; −1: there is none.
int level_index(const GgufForm& form, Whole level) {
  if (form.table.empty()) {
    return level < form.lowest_level || level > form.highest_level ? -1 : static_cast<int>(level) - form.lowest_level;
  }
  const auto found = std::ranges::lower_bound(form.table, level, {}, [](int8_t entry) { return Whole{entry}; });
  return found == form.table.end() || *found != level ? -1 : static_cast<int>(found - form.table.begin());
}

struct ExactBlock {
  formats::GgufScales scales;
  std::array<uint8_t, formats::widest_gguf_block> levels{};
};

class Solver {
 public:
  Solver(const GgufForm& form, std::span<const float> values, const WholeValues& whole)
      : form_(form), exponent_(whole.exponent) {
    const auto size = static_cast<size_t>(form.part);
    for (size_t j = 0; j < static_cast<size_t>(form.parts()); ++j) {
      parts_.push_back(part_of(std::span(whole.values).subspan(j * size, size)));
      parts_.back().negative = has_negative_zero(values.subspan(j * size, size));
    }
  }

  bool solve() {
    for (Part& part : parts_) {
      if (!find_step(form_, part)) return false;
      if (form_.has_offset() && part.step == 0 && part.low > 0 && !spread(part)) return false;
      unit_ = std::gcd(unit_, part.step);
    }
    return form_.has_offset() ? solve_with_offsets() : solve_without();
  }

  ExactBlock result;

 private:
  std::span<uint8_t> levels_of(size_t j) {
    const auto size = static_cast<size_t>(form_.part);
    return std::span(result.levels).subspan(j * size, size);
  }

  /// A part of one positive value: it is the highest level of a part without an offset.
  bool spread(Part& part) const {
    if (part.low % form_.highest_level != 0) return false;
    part.step = part.low / form_.highest_level;
    return true;
  }

  /// The largest f16 divisor of the unit up to this one; 0: none.
  int find_divisor(int most) const {
    while (most >= 1 && !half_of(unit_, exponent_, most)) --most;
    return std::max(most, 0);
  }

  // -- types without offsets

  /// Levels of a part under a step of either sign; false: some are none.
  bool fits(const Part& part, Whole step, std::span<uint8_t> levels) const {
    for (size_t i = 0; i < levels.size(); ++i) {
      const int index = part.values[i] % step == 0 ? level_index(form_, part.values[i] / step) : -1;
      if (index < 0) return false;
      levels[i] = static_cast<uint8_t>(index);
    }
    return true;
  }

  /// The least step of the sign that zeros have, else a positive one, that fits: levels that fill their range.
  bool solve_part(size_t j) {
    const Part& part = parts_[j];
    const auto levels = levels_of(j);
    if (part.step == 0) {
      const auto nearest = form_.table.empty() ? -form_.lowest_level : level_index(form_, 1);
      std::ranges::fill(levels, static_cast<uint8_t>(nearest));
      return true;
    }
    // A larger scale is none, under whatever d.
    const Whole most = part.step / unit_, in_range = std::min<Whole>(most, -form_.lowest_scale);
    for (const int sign : part.negative ? std::array{-1, 1} : std::array{1, -1}) {
      for (Whole scale = std::max<Whole>(1, most / 128); scale <= in_range; ++scale) {
        if (most % scale != 0 || !fits(part, sign * scale * unit_, levels)) continue;
        result.scales.scales[j] = static_cast<int16_t>(std::min<Whole>(scale, 1 << 12) * sign);
        return true;
      }
    }
    return false;
  }

  bool solve_without() {
    for (size_t j = 0; j < parts_.size(); ++j) {
      if (!solve_part(j)) return false;
    }
    // The largest step has a negative scale, which reaches one further.
    auto& scales = result.scales.scales;
    const auto largest = std::ranges::max_element(scales, {}, [](int scale) { return std::abs(scale); });
    const bool turns = *largest > 0;
    if (!find_d_of_signs(std::abs(*largest), turns)) return false;
    return true;
  }

  bool find_d_of_signs(int largest, bool turns) {
    auto& scales = result.scales.scales;
    if (turns) {
      for (auto& scale : scales) scale = static_cast<int16_t>(-scale);
    }
    for (int divisor = largest > 0 ? -form_.lowest_scale / largest : 0; divisor >= 1; --divisor) {
      const auto d = half_of(unit_, exponent_, divisor);
      const bool in_range = std::ranges::all_of(scales, [&](int scale) {
        return scale * divisor >= form_.lowest_scale && scale * divisor <= form_.highest_scale;
      });
      if (!d || !in_range) continue;
      result.scales.d = turns ? -*d : *d;
      for (auto& scale : scales) scale = static_cast<int16_t>(scale * divisor);
      return true;
    }
    return false;
  }

  // -- types with offsets

  /// Steps of parts, as levels fill their range; the largest of their scales.
  bool find_steps(int& largest) {
    for (size_t j = 0; j < parts_.size(); ++j) {
      Part& part = parts_[j];
      if (part.step == 0) continue;
      const Whole most = part.step / unit_;
      // One value alone is the highest level already.
      const Whole range = part.high == part.low ? form_.highest_level : (part.high - part.low) / part.step;
      Whole parted = std::max<Whole>(1, form_.highest_level / range);
      while (most % parted != 0) --parted;
      part.widest = part.step, part.parted = parted;
      part.step /= parted;
      if (most / parted > form_.highest_scale) return false;
      largest = std::max(largest, static_cast<int>(most / parted));
    }
    return true;
  }

  /// Offsets that a part may have: with its lowest value at level 0, 1, …
  Whole offset_of(const Part& part, Whole lowest) const { return part.step * lowest - part.low; }
  Whole most_lowest(const Part& part) const {
    return part.step == 0 ? 0 : form_.highest_level - (part.high - part.low) / part.step;
  }

  /// The minimum of a part as a multiple of `offset` / `minimum`; −1: none.
  int minimum_of(const Part& part, Whole offset, int minimum, Whole& lowest) const {
    for (lowest = 0; lowest <= most_lowest(part); ++lowest) {
      const Whole own = offset_of(part, lowest);
      if (own < 0) continue;
      if (own == 0) return 0;
      if (own * minimum % offset != 0) continue;
      const Whole multiple = own * minimum / offset;
      if (multiple <= form_.highest_minimum) return static_cast<int>(multiple);
    }
    return -1;
  }

  /// Takes the step of a part whose levels fill so much less of their range; false: its scale would be none.
  bool part_step(Part& part, Whole parted, Whole& scale) const {
    scale = 0;
    if (part.step == 0) return parted == 1;
    if (part.widest / unit_ % parted != 0) return false;
    scale = part.widest / unit_ / parted * divisor_;
    part.step = part.widest / parted;
    return scale <= form_.highest_scale;
  }

  /// The same of a part whose levels may fill less of their range, which changes its scale.
  int minimum_of_any(size_t j, Whole offset, int minimum, Whole& lowest) {
    Part part = parts_[j];
    for (Whole parted = part.parted, scale = 0; parted >= 1; --parted) {
      if (!part_step(part, parted, scale)) continue;
      const int found = minimum_of(part, offset, minimum, lowest);
      if (found < 0) continue;
      result.scales.scales[j] = static_cast<int16_t>(scale);
      parts_[j].taken = part.step;
      return found;
    }
    return -1;
  }

  /// All parts under the offset that is so many minimums.
  bool take_minimums(Whole offset, int minimum) {
    for (size_t j = 0; j < parts_.size(); ++j) {
      Whole lowest = 0;
      const int found = minimum_of_any(j, offset, minimum, lowest);
      if (found < 0) return false;
      result.scales.minimums[j] = static_cast<uint8_t>(found);
      const auto levels = levels_of(j);
      for (size_t i = 0; i < levels.size(); ++i) {
        const Part& part = parts_[j];
        const Whole above = part.taken == 0 ? 0 : (part.values[i] - part.low) / part.taken;
        levels[i] = static_cast<uint8_t>(above + lowest);
      }
    }
    return true;
  }

  /// With the largest scales that let all parts be said: a part whose levels fill less of their range has a larger one.
  bool solve_with_offsets() {
    int largest = 0;
    if (!find_steps(largest)) return false;
    if (largest == 0) return take_offsets();
    for (int divisor = find_divisor(form_.highest_scale / largest); divisor >= 1; divisor = find_divisor(divisor - 1)) {
      divisor_ = divisor;
      if (!take_offsets()) continue;
      result.scales.d = *half_of(unit_, exponent_, divisor);
      return true;
    }
    return false;
  }

  bool take_offsets() {
    // A part that has an offset for certain, with the fewest possible.
    const Part* sure = nullptr;
    for (const Part& part : parts_) {
      if (part.low >= 0 && (part.step == 0 || part.low % part.step == 0)) continue;
      if (sure == nullptr || most_lowest(part) < most_lowest(*sure)) sure = &part;
    }
    if (sure == nullptr) return take_minimums(1, 0);
    Part part = *sure;
    for (Whole parted = part.parted, scale = 0; parted >= 1; --parted) {
      if (part_step(part, parted, scale) && take_offset_of(part)) return true;
    }
    return false;
  }

  /// Offsets of the block as this part may have them.
  bool take_offset_of(const Part& part) {
    for (Whole lowest = 0; lowest <= most_lowest(part); ++lowest) {
      const Whole offset = offset_of(part, lowest);
      if (offset > Whole{1} << 50) return false;
      if (offset <= 0) continue;
      for (int minimum = form_.highest_minimum; minimum >= 1; --minimum) {
        const auto d = half_of(offset, exponent_, minimum);
        if (!d || !take_minimums(offset, minimum)) continue;
        result.scales.d_minimum = *d;
        return true;
      }
    }
    return false;
  }

  const GgufForm& form_;
  const int exponent_;
  std::vector<Part> parts_;
  Whole unit_ = 0;
  int divisor_ = 1;  ///< of the unit: scales are that many times the steps in units
};

/// Whether a reader would see these values.
bool decodes_to(const GgufForm& form, const ExactBlock& block, std::span<const float> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t j = i / static_cast<size_t>(form.part);
    const float step = block.scales.d * static_cast<float>(block.scales.scales[j]);
    const float offset = block.scales.d_minimum * static_cast<float>(block.scales.minimums[j]);
    const float product = step * form.level(block.levels[i]);
    if (product - offset != values[i]) return false;
  }
  return true;
}

/// Whether a part may say its values under another step, a positive one that is usual, a multiple or a share of its own.
bool may_turn(const GgufForm& form, float step, int scale, std::span<const uint8_t> levels) {
  if (!form.table.empty()) {
    // No level is another's negative, and few have one's multiples.
    constexpr int most_alike = 3;
    return std::popcount(std::accumulate(levels.begin(), levels.end(), 0u, [](uint32_t seen, uint8_t level) {
             return seen | 1u << level;
           })) <= most_alike;
  }
  int divisor = 0, low = 0, high = 0;
  bool turns = true;
  for (const uint8_t index : levels) {
    const int level = form.lowest_level + index;
    turns = turns && index != 0 && level != 0;
    divisor = divisor == 1 ? 1 : std::gcd(divisor, level);
    low = std::min(low, level), high = std::max(high, level);
  }
  const bool shares = 2 * low >= form.lowest_level && 2 * high <= form.highest_level && std::abs(scale) > 1;
  return (turns && step < 0) || divisor != 1 || shares;
}

/// Whether a block with signed scales may say its values in several ways, or not in the usual one. Told from few levels
/// of most blocks.
bool may_settle(const GgufForm& form, const formats::GgufScales& scales, std::span<const uint8_t> levels) {
  const auto part = static_cast<size_t>(form.part), parts = static_cast<size_t>(form.parts());
  int divisor = 0, extreme = 0;
  for (size_t j = 0; j < parts; ++j) {
    divisor = std::gcd(divisor, int{scales.scales[j]});
    if (std::abs(scales.scales[j]) > std::abs(extreme)) extreme = scales.scales[j];
  }
  if (divisor != 1 || extreme > 0 || 2 * -extreme <= -form.lowest_scale) return true;
  for (size_t j = 0; j < parts; ++j) {
    const float step = scales.d * static_cast<float>(scales.scales[j]);
    if (may_turn(form, step, scales.scales[j], levels.subspan(j * part, part))) return true;
  }
  return false;
}

}  // namespace

bool may_be_exact(const GgufForm& form, std::span<const float> first_part) {
  if (!form.nests()) return false;
  const auto whole = whole_values(first_part);
  if (!whole) return std::ranges::all_of(first_part, [](float value) { return value == 0; });
  Part part = part_of(std::span(whole->values).first(first_part.size()));
  return find_step(form, part);
}

std::optional<formats::GgufScales> exact_gguf_scales(const GgufForm& form, std::span<const float> values) {
  const auto whole = whole_values(values);
  if (!whole) return std::nullopt;
  Solver solver(form, values, *whole);
  if (!solver.solve() || !decodes_to(form, solver.result, values)) return std::nullopt;
  return solver.result.scales;
}

void settle_gguf_block(const GgufForm& form, formats::GgufScales& scales, std::span<uint8_t> levels) {
  if (!form.nests() || form.lowest_scale >= 0 || !may_settle(form, scales, levels)) return;
  std::array<float, formats::widest_gguf_block> values{};
  for (size_t i = 0; i < levels.size(); ++i) {
    const float step = scales.d * static_cast<float>(scales.scales[i / static_cast<size_t>(form.part)]);
    values[i] = step * form.level(levels[i]);
  }
  const auto said = std::span<const float>(values).first(levels.size());
  const auto whole = whole_values(said);
  if (!whole) return;
  Solver solver(form, said, *whole);
  if (!solver.solve() || !decodes_to(form, solver.result, said)) return;
  scales = solver.result.scales;
  std::ranges::copy(std::span(solver.result.levels).first(levels.size()), levels.begin());
}

}  // namespace w4q::quantize
