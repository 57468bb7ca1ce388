#include "quantize/kbit_panel.h"

#include "core/with_bits.h"
#include "formats/small_float.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quantize/kbit_panel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::quantize::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::CappedTag<float, panel_rows>;
using FloatVec = hn::Vec<FloatTag>;

struct Nearest {
  FloatVec level;
  FloatVec code;
};

/// The level and, where asked, the code of x: thresholds are passed one after the other, a tie stays below.
template <int bits, bool want_code>
HWY_INLINE Nearest nearest(const KbitLevels& table, FloatVec x) {
  const FloatTag d;
  Nearest result{hn::Set(d, table.levels[0]), hn::Zero(d)};
  for (size_t i = 0; i + 1 < size_t{1} << bits; ++i) {
    const auto above = hn::Gt(x, hn::Set(d, table.midpoints[i]));
    result.level = hn::IfThenElse(above, hn::Set(d, table.levels[i + 1]), result.level);
    if constexpr (want_code) result.code = hn::IfThenElse(above, hn::Set(d, static_cast<float>(i + 1)), result.code);
  }
  return result;
}

/// A table's level.
template <int bits>
struct TableRounder {
  template <bool want_code>
  HWY_INLINE static Nearest round(const KbitLevels& table, FloatVec x) {
    return nearest<bits, want_code>(table, x);
  }
};

/// The float nearest to x, ties to even; beyond the largest, the largest. Its code is found from the value.
template <int bits>
struct FloatRounder {
  template <bool want_code>
  HWY_INLINE static Nearest round(const KbitLevels&, FloatVec x) {
    const FloatTag d;
    const auto magnitude = hn::Min(hn::Abs(x), hn::Set(d, bits == 4 ? 6.0f : 448.0f));
    auto step = hn::Set(d, 1.0f), per_step = step;  // of the floats around it, powers of two
    if constexpr (bits == 4) {
      const auto above_four = hn::Ge(magnitude, hn::Set(d, 4.0f)), above_two = hn::Ge(magnitude, hn::Set(d, 2.0f));
      step = hn::IfThenElse(above_four, hn::Set(d, 2.0f), hn::IfThenElse(above_two, step, hn::Set(d, 0.5f)));
      per_step = hn::IfThenElse(above_four, hn::Set(d, 0.5f), hn::IfThenElse(above_two, per_step, hn::Set(d, 2.0f)));
    } else {
      const hn::RebindToUnsigned<FloatTag> du;
      const auto exponent = hn::And(hn::BitCast(du, magnitude), hn::Set(du, 0x7F800000u));
      const auto reciprocal = hn::BitCast(d, hn::Sub(hn::Set(du, 0x7F000000u), exponent));
      step = hn::Max(hn::Mul(hn::BitCast(d, exponent), hn::Set(d, 0x1p-3f)), hn::Set(d, 0x1p-9f));
      per_step = hn::Mul(hn::Min(reciprocal, hn::Set(d, 0x1p6f)), hn::Set(d, 0x1p3f));
    }
    const auto level = hn::CopySign(hn::Mul(hn::Round(hn::Mul(magnitude, per_step)), step), x);
    return {level, level};
  }
};

/// The target of a column given the errors of those before it.
HWY_INLINE FloatVec moved(const PanelBlock& block, int column, const float* residuals, size_t lane) {
  const FloatTag d;
  auto target = hn::LoadU(d, block.target + column * panel_rows + lane);
  if (block.coupling == nullptr) return target;
  const float* coupling = block.coupling + column * block.coupling_stride;
  for (int j = 0; j < column; ++j) {
    target = hn::Add(target, hn::Mul(hn::Set(d, coupling[j]), hn::Load(d, residuals + j * panel_rows + lane)));
  }
  return target;
}

/// One trial: `errors` of every row, and codes and rounded values where `codes` is not null.
template <class Rounder, bool want_codes>
HWY_INLINE void trial_width(const PanelBlock& block, const KbitLevels& table, const float* scales, const float* units,
                            float* errors, uint8_t* codes, float* rounded) {
  const FloatTag d;
  alignas(64) float residuals[widest_coupled * panel_rows];
  alignas(64) float lane_codes[panel_rows];
  for (size_t lane = 0; lane < panel_rows; lane += hn::Lanes(d)) {
    const auto scale = hn::LoadU(d, scales + lane);
    const auto unit = hn::LoadU(d, units + lane);
    const auto no_scale = hn::Eq(scale, hn::Zero(d));
    auto error = hn::Zero(d);
    for (int c = 0; c < block.columns; ++c) {
      const auto target = moved(block, c, residuals, lane);
      const auto x = hn::IfThenZeroElse(no_scale, hn::Div(target, scale));
      const auto found = Rounder::template round<want_codes>(table, x);
      const auto value = hn::Mul(found.level, scale);
      const auto miss = hn::Mul(hn::Sub(target, value), unit);
      error = hn::Add(error, hn::Mul(hn::Mul(miss, miss), hn::Set(d, block.importance[c])));
      const size_t at = static_cast<size_t>(c) * panel_rows + lane;
      if (block.coupling != nullptr) hn::Store(hn::Sub(hn::LoadU(d, block.weights + at), value), d, residuals + at);
      if constexpr (want_codes) {
        hn::StoreU(value, d, rounded + at);
        hn::Store(found.code, d, lane_codes + lane);
        for (size_t i = 0; i < hn::Lanes(d); ++i) {
          const float code = lane_codes[lane + i];
          // A zero has no sign.
          codes[at + i] =
              table.floats ? formats::small_float_code(code + 0.0f, table.bits) : static_cast<uint8_t>(code);
        }
      }
    }
    hn::StoreU(error, d, errors + lane);
  }
}

template <bool want_codes>
HWY_INLINE void trial(const PanelBlock& block, const KbitLevels& table, const float* scales, const float* units,
                      float* errors, uint8_t* codes, float* rounded) {
  if (table.floats && table.bits == 4) {
    return trial_width<FloatRounder<4>, want_codes>(block, table, scales, units, errors, codes, rounded);
  }
  if (table.floats) {
    return trial_width<FloatRounder<8>, want_codes>(block, table, scales, units, errors, codes, rounded);
  }
  with_table_bits(table.bits, [&]<int bits>() HWY_ATTR {
    trial_width<TableRounder<bits>, want_codes>(block, table, scales, units, errors, codes, rounded);
  });
}

void trial_errors(const PanelBlock& block, const KbitLevels& table, const float* scales, const float* units,
                  float* errors) {
  trial<false>(block, table, scales, units, errors, nullptr, nullptr);
}

void trial_codes(const PanelBlock& block, const KbitLevels& table, const float* scales, const float* units,
                 float* errors, uint8_t* codes, float* rounded) {
  trial<true>(block, table, scales, units, errors, codes, rounded);
}

}  // namespace w4q::quantize::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace w4q::quantize {
namespace {

HWY_EXPORT(trial_errors);
HWY_EXPORT(trial_codes);

using Lanes = std::array<float, panel_rows>;
using Bits = std::array<uint32_t, panel_rows>;
using formats::ScaleType;

constexpr int steps_below = 32;
constexpr int steps_above = 8;
/// Of small floats: an octave either way, where sixteen steps are an octave.
constexpr int float_steps = 16;
constexpr int least_squares_rounds = 3;

/// 1 over a power of two near each magnitude, so that no square overflows or vanishes.
Lanes units_of(const Lanes& absmax) noexcept {
  Lanes units{};
  for (size_t r = 0; r < units.size(); ++r) {
    const int exponent = absmax[r] > 0 ? std::clamp(std::ilogb(absmax[r]), -126, 126) : 0;
    units[r] = std::ldexp(1.0f, -exponent);
  }
  return units;
}

/// A value above zero as f16 or f32, within their range and not rounded to zero.
uint32_t encoded(float value, ScaleType type, bool floats = false) noexcept {
  if (floats) return formats::positive_scale(value, type).bits;
  return std::max(formats::scale_codec(type).encode(value), 1u);
}

/// Steps from the rule's scale down and up that are tried.
struct StepRange {
  int below = steps_below, above = steps_above;
};
StepRange step_range(ScaleType type, bool floats) noexcept {
  if (!floats) return {};
  if (type == ScaleType::e4m3) return {8, 8};
  if (type == ScaleType::e8m0) return {1, 2};
  return {float_steps, float_steps};
}

/// The candidate `step` steps from `centre`, never zero.
uint32_t candidate(uint32_t centre, int step, ScaleType type, bool floats) noexcept {
  if (type == ScaleType::e4m3) return static_cast<uint32_t>(std::clamp(static_cast<int>(centre) + step, 1, 0x7E));
  if (type == ScaleType::e8m0) return static_cast<uint32_t>(std::clamp(static_cast<int>(centre) + step, 0, 0xFE));
  if (type == ScaleType::e4m4) return static_cast<uint32_t>(std::clamp(static_cast<int>(centre) + step, 1, 0xFF));
  const int octave = (step + 16 * steps_below) / 16 - steps_below;
  const float factor = std::ldexp(1.0f + static_cast<float>(step - 16 * octave) / 16.0f, octave);
  return encoded(formats::decode_scale(centre, type) * factor, type, floats);
}

/// Keeps what is better than the best so far.
class Search {
 public:
  Search(const PanelBlock& block, const KbitLevels& levels, ScaleType type)
      : block_(block),
        levels_(levels),
        type_(type),
        steps_(step_range(type, levels.floats)),
        absmax_(panel_absmax(block)),
        units_(units_of(absmax_)) {
    errors_.fill(std::numeric_limits<float>::infinity());
  }

  void run() {
    const PanelScales rule = absmax_scales(block_, levels_, type_);
    if (block_.row_alone) return run_row(rule.bits.front());
    for (int step = -steps_.below; step <= steps_.above; ++step) {
      Bits bits{};
      for (size_t r = 0; r < bits.size(); ++r) bits[r] = absmax_[r] == 0 ? of_zeros() : near(rule.bits[r], step);
      attempt(bits);
    }
    refine();
  }

  const PanelScales& best() const noexcept { return best_; }
  const Lanes& errors() const noexcept { return errors_; }

 private:
  uint32_t near(uint32_t centre, int step) const noexcept { return candidate(centre, step, type_, levels_.floats); }
  uint32_t of_zeros() const noexcept { return levels_.floats ? formats::positive_scale(1.0f, type_).bits : 0; }

  /// The same candidates in the same order, one in each lane.
  void run_row(uint32_t centre) {
    for (int first = -steps_.below; first <= steps_.above; first += panel_rows) {
      Bits bits{};
      for (int r = 0; r < panel_rows; ++r) {
        const int step = std::min(first + r, steps_.above);
        bits[static_cast<size_t>(r)] = absmax_.front() == 0 ? of_zeros() : near(centre, step);
      }
      attempt_in_turn(bits);
    }
    best_.bits.fill(best_.bits.front());
    best_.values.fill(best_.values.front());
    errors_.fill(errors_.front());
    refine();
  }

  void refine() {
    if (type_ == ScaleType::e4m4 || type_ == ScaleType::e4m3 || type_ == ScaleType::e8m0) return;
    for (int round = 0; round < least_squares_rounds; ++round) attempt(least_squares());
  }

  struct Tried {
    alignas(64) Lanes values, errors;
  };
  Tried tried(const Bits& bits) const {
    Tried result;
    for (size_t r = 0; r < bits.size(); ++r) {
      result.values[r] = formats::decode_scale(bits[r], type_) * levels_.factor;
    }
    HWY_DYNAMIC_DISPATCH(trial_errors)
    (block_, levels_, result.values.data(), units_.data(), result.errors.data());
    return result;
  }

  void attempt(const Bits& bits) {
    const Tried trial = tried(bits);
    for (size_t r = 0; r < bits.size(); ++r) take(r, bits[r], trial, r);
  }

  /// Of one row, kept in the first lane.
  void attempt_in_turn(const Bits& bits) {
    const Tried trial = tried(bits);
    for (size_t lane = 0; lane < bits.size(); ++lane) take(0, bits[lane], trial, lane);
  }

  void take(size_t row, uint32_t bits, const Tried& trial, size_t lane) {
    if (!(trial.errors[lane] < errors_[row])) return;
    errors_[row] = trial.errors[lane];
    best_.bits[row] = bits;
    best_.values[row] = trial.values[lane];
  }

  /// The scales that fit the codes of the best ones best, were it not for coupling.
  Bits least_squares() const {
    PanelCodes out;
    panel_codes(block_, levels_, best_, out);
    Bits bits = best_.bits;
    for (size_t r = 0; r < bits.size(); ++r) {
      double product = 0, square = 0;
      for (size_t c = 0; c < static_cast<size_t>(block_.columns); ++c) {
        const double level = levels_.level(out.codes[c * panel_rows + r]);
        const double weight = block_.importance[c];
        product += weight * level * static_cast<double>(block_.target[c * panel_rows + r]);
        square += weight * level * level;
      }
      if (!(square > 0) || !(product > 0) || absmax_[r] == 0) continue;
      bits[r] = encoded(static_cast<float>(product / square), type_, levels_.floats);
    }
    return bits;
  }

  const PanelBlock& block_;
  const KbitLevels& levels_;
  ScaleType type_;
  StepRange steps_;
  Lanes absmax_;
  alignas(64) Lanes units_;
  PanelScales best_;
  Lanes errors_;
};

}  // namespace

KbitLevels KbitLevels::small_floats(int bits, float factor) {
  KbitLevels result;
  result.bits = bits;
  result.largest = formats::small_float_largest(bits) * factor;
  result.floats = true;
  result.factor = factor;
  return result;
}

float KbitLevels::level(uint8_t code) const noexcept {
  return floats ? formats::small_float_table(bits)[code] : levels[code];
}

KbitLevels::KbitLevels(std::span<const float> codebook)
    : bits(std::countr_zero(codebook.size())), largest(formats::table_max(codebook)) {
  std::ranges::copy(codebook, levels.begin());
  formats::kbit_midpoints(codebook, std::span(midpoints).first(codebook.size() - 1));
}

std::array<float, panel_rows> panel_absmax(const PanelBlock& block) noexcept {
  Lanes absmax{};
  for (int c = 0; c < block.columns; ++c) {
    for (size_t r = 0; r < absmax.size(); ++r)
      absmax[r] = std::max(absmax[r], std::abs(block.target[static_cast<size_t>(c) * panel_rows + r]));
  }
  return absmax;
}

PanelScales absmax_scales(const PanelBlock& block, const KbitLevels& levels, ScaleType type) noexcept {
  const Lanes absmax = panel_absmax(block);
  PanelScales result;
  for (size_t r = 0; r < absmax.size(); ++r) {
    if (levels.floats) {
      const formats::Scheme scheme{.family = formats::SchemeFamily::small_float, .bits = levels.bits, .scale = type};
      const auto stored = formats::small_float_scale(scheme, absmax[r], levels.factor);
      result.bits[r] = stored.bits;
      result.values[r] = stored.value * levels.factor;
      continue;
    }
    const float scale = absmax[r] / levels.largest;
    // In f32 a scale is zero for zeros only.
    const bool positive = type == ScaleType::f32 && absmax[r] != 0;
    result.bits[r] = positive ? encoded(scale, type) : formats::store_scale(scale, type).bits;
    result.values[r] = formats::decode_scale(result.bits[r], type);
  }
  return result;
}

PanelScales searched_scales(const PanelBlock& block, const KbitLevels& levels, ScaleType type, Lanes* errors) {
  ensure(block.coupling == nullptr || block.columns <= widest_coupled, "searched_scales: too wide to couple");
  Search search(block, levels, type);
  search.run();
  if (errors != nullptr) *errors = search.errors();
  return search.best();
}

void panel_codes(const PanelBlock& block, const KbitLevels& levels, const PanelScales& scales, PanelCodes& out) {
  ensure(block.coupling == nullptr || block.columns <= widest_coupled, "panel_codes: too wide to couple");
  alignas(64) Lanes units, errors;
  units.fill(1.0f);
  out.codes.resize(static_cast<size_t>(block.columns * panel_rows));
  out.rounded.resize(out.codes.size());
  HWY_DYNAMIC_DISPATCH(trial_codes)
  (block, levels, scales.values.data(), units.data(), errors.data(), out.codes.data(), out.rounded.data());
}

}  // namespace w4q::quantize
#endif  // HWY_ONCE
