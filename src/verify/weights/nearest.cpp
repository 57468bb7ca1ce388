#include "verify/weights/nearest.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "formats/integer.h"
#include "formats/scheme_registry.h"

namespace w4q::verify {
namespace {

/// By how much, in distances of two levels, a value must be nearer to another level than to its own. Folded scales move
/// what lies between two levels: those of a 16-bit norm by 0.12 at most, measured ones once in 65536 codes by 0.3.
constexpr float surely_nearer = 0.3f, surely_nearer_folded = 0.6f;
/// Roundings to 8 bits, of a norm before and behind, of a weight times its factor and of its scale, move a value by 2^-9 of
/// itself on average and 2^-8 at most, by two such together where they add up: twice that from one level and towards another.
/// Of codes of 8 bits that is a distance of two levels. Measured of bf16 folders of SmoothQuant: 1.63 · 2^-7.
constexpr float moved_folded = 0x1p-6f;

}  // namespace

NearestCodes::NearestCodes(const formats::PackedWeight& canonical, bool folded)
    : weight_(canonical), integer_(canonical.scheme.family == formats::SchemeFamily::integer), folded_(folded) {
  const auto width = static_cast<size_t>(canonical.k);
  codes_.resize(width), scales_.resize(width), zeros_.resize(width);
  readable_ = !formats::shares_bits(canonical.scheme);  // no weight has its code for itself
  if (integer_ || !readable_) return;
  format_ = formats::scheme_row(canonical.scheme.family).table(canonical.scheme);
  levels_ = formats::table_levels(format_, canonical);
  for (const float level : levels_) {
    float below = std::numeric_limits<float>::infinity(), above = below;
    for (const float other : levels_) {
      if (other < level) below = std::min(below, level - other);
      if (other > level) above = std::min(above, other - level);
    }
    below_.push_back(below / 2), above_.push_back(above / 2);
  }
}

void NearestCodes::read(int64_t row) {
  if (!readable_) return;
  if (!integer_) {
    formats::table_read_codes(format_, weight_, row, codes_);
    int64_t last = -1;
    for (size_t col = 0; col < scales_.size(); ++col) {
      const int64_t block = formats::table_place(format_, weight_.k, row, static_cast<int64_t>(col), 0).scale;
      scales_[col] = block == last ? scales_[col - 1] : formats::full_scale_at(format_, weight_, block);
      last = block;
    }
    return;
  }
  const auto groups = static_cast<size_t>(formats::integer_groups(weight_.scheme, weight_.k));
  const auto size = static_cast<size_t>(formats::integer_group_size(weight_.scheme, weight_.k));
  std::vector<float> scales(groups);
  std::vector<uint8_t> zeros(groups);
  formats::integer_read_codes(weight_, row, codes_);
  formats::integer_read_scales(weight_, row, scales);
  formats::integer_read_zeros(weight_, row, zeros);
  const int32_t* const index =
      weight_.scheme.act_order ? weight_.plane(formats::PlaneRole::group_index).bytes.as<int32_t>().data() : nullptr;
  for (size_t col = 0; col < codes_.size(); ++col) {
    const size_t group = index != nullptr ? static_cast<size_t>(index[col]) : col / size;
    scales_[col] = scales[group], zeros_[col] = zeros[group];
  }
}

bool NearestCodes::is_off(size_t col, float value) const {
  const float scale = scales_[col];
  if (!readable_ || scale == 0 || !std::isfinite(scale)) return false;
  const float steps = value / scale;
  float found = 0, best = 0;
  if (integer_) {
    const int highest = (1 << weight_.scheme.bits) - 1, zero = zeros_[col];
    const float nearest =
        std::clamp(std::nearbyint(steps), static_cast<float>(-zero), static_cast<float>(highest - zero));
    found = static_cast<float>(codes_[col] - zero), best = nearest;
    // A clipped range ends up to half a step before its last level, where the zero was rounded: what lies beyond is one
    // level off.
    const bool last = best == static_cast<float>(-zero) || best == static_cast<float>(highest - zero);
    if (weight_.scheme.asymmetric && last && std::abs(found - best) == 1) return false;
  } else {
    found = best = levels_[codes_[col]];
    if (steps - found <= above_[codes_[col]] && found - steps <= below_[codes_[col]]) return false;
    for (const float level : levels_) {
      if (std::abs(steps - level) < std::abs(steps - best)) best = level;
    }
  }
  const float nearer = std::abs(steps - found) - std::abs(steps - best), distance = std::abs(found - best);
  // Codes were chosen under the scale that was then rounded to a byte.
  const bool nested = weight_.scheme.scale == formats::ScaleType::nested;
  if (!folded_) return nearer > (nested ? surely_nearer_folded : surely_nearer) * distance;
  return nearer > std::max(surely_nearer_folded * distance, surely_nearer * distance + moved_folded * std::abs(steps));
}

}  // namespace w4q::verify
