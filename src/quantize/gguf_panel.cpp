#include "quantize/gguf_panel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quantize/gguf_panel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "quantize/gguf_trial.h"

HWY_BEFORE_NAMESPACE();
namespace w4q::quantize::HWY_NAMESPACE {
namespace gguf_panel {
namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::CappedTag<float, panel_rows>;
using Vec = hn::Vec<Tag>;
using formats::GgufForm;
using formats::most_gguf_parts;

HWY_INLINE Vec set(float value) { return hn::Set(Tag(), value); }
HWY_INLINE Vec add(Vec a, Vec b) { return hn::Add(a, b); }
HWY_INLINE Vec sub(Vec a, Vec b) { return hn::Sub(a, b); }
HWY_INLINE Vec mul(Vec a, Vec b) { return hn::Mul(a, b); }
HWY_INLINE Vec rounded(Vec x) { return sub(add(x, set(0x1.8p23f)), set(0x1.8p23f)); }
HWY_INLINE Vec clamped(Vec x, float low, float high) { return hn::Min(hn::Max(x, set(low)), set(high)); }
/// a / b, and 0 where b is too small to divide by.
HWY_INLINE Vec over(Vec a, Vec b) {
  const auto small = hn::Lt(hn::Abs(b), set(0x1p-126f));
  return hn::IfThenZeroElse(small, hn::Div(a, hn::IfThenElse(small, set(1.0f), b)));
}

/// Levels that are integers.
class Uniform {
 public:
  explicit Uniform(const GgufTrial& trial) : low_(set(trial.lowest)), high_(set(trial.highest)) {}
  HWY_INLINE Vec level(Vec x) const { return rounded(hn::Min(hn::Max(x, low_), high_)); }
  HWY_INLINE Vec index(Vec level, Vec) const { return sub(level, low_); }

 private:
  Vec low_, high_;
};

/// Levels of a table: thresholds are passed one after the other, a tie stays below.
class Table {
 public:
  explicit Table(const GgufTrial& trial) : trial_(trial) {}
  HWY_INLINE Vec level(Vec x) const {
    Vec result = set(trial_.levels[0]);
    for (size_t i = 0; i + 1 < trial_.count; ++i) {
      result = hn::IfThenElse(hn::Gt(x, set(trial_.midpoints[i])), set(trial_.levels[i + 1]), result);
    }
    return result;
  }
  HWY_INLINE Vec index(Vec, Vec x) const {
    Vec result = set(0.0f);
    for (size_t i = 0; i + 1 < trial_.count; ++i) {
      result = hn::IfThenElse(hn::Gt(x, set(trial_.midpoints[i])), set(static_cast<float>(i + 1)), result);
    }
    return result;
  }

 private:
  const GgufTrial& trial_;
};

/// What rounding a part leaves: the error, and weighted sums over the levels q it chose.
struct Found {
  Vec error, q, qq, xq;
};

/// One part of a block in some lanes.
struct Part {
  const float* x;  // column c at c · panel_rows
  const float* importance;
  int columns;
  Vec sum_v, sum_x, sum_xx, low, high;
};

HWY_INLINE Part part_of(const GgufForm& form, const float* values, const float* importance, int j, size_t lane) {
  Part part{values + static_cast<size_t>(j * form.part) * panel_rows + lane,
            importance + j * form.part,
            form.part,
            set(0),
            set(0),
            set(0),
            set(0),
            set(0)};
  part.low = part.high = hn::LoadU(Tag(), part.x);
  for (int c = 0; c < part.columns; ++c) {
    const Vec x = hn::LoadU(Tag(), part.x + c * panel_rows), v = set(part.importance[c]), vx = mul(v, x);
    part.sum_v = add(part.sum_v, v);
    part.sum_x = add(part.sum_x, vx);
    part.sum_xx = add(part.sum_xx, mul(vx, x));
    part.low = hn::Min(part.low, x);
    part.high = hn::Max(part.high, x);
  }
  return part;
}

/// Levels are those nearest to x · inverse + shift.
template <class Levels>
HWY_INLINE Found sums(const Part& part, const Levels& levels, Vec inverse, Vec shift) {
  Found found{set(0), set(0), set(0), set(0)};
  for (int c = 0; c < part.columns; ++c) {
    const Vec x = hn::LoadU(Tag(), part.x + c * panel_rows);
    const Vec q = levels.level(add(mul(x, inverse), shift)), vq = mul(q, set(part.importance[c]));
    found.q = add(found.q, vq);
    found.qq = add(found.qq, mul(vq, q));
    found.xq = add(found.xq, mul(vq, x));
  }
  return found;
}

/// The same with a step and an offset, and the error that they leave.
template <class Levels>
HWY_INLINE Found measured(const Part& part, const Levels& levels, Vec step, Vec offset) {
  Found found{set(0), set(0), set(0), set(0)};
  const Vec inverse = over(set(1.0f), step);
  for (int c = 0; c < part.columns; ++c) {
    const Vec x = hn::LoadU(Tag(), part.x + c * panel_rows), v = set(part.importance[c]);
    const Vec q = levels.level(mul(add(x, offset), inverse)), vq = mul(q, v);
    const Vec miss = sub(x, sub(mul(step, q), offset));
    found.error = add(found.error, mul(mul(miss, miss), v));
    found.q = add(found.q, vq);
    found.qq = add(found.qq, mul(vq, q));
    found.xq = add(found.xq, mul(vq, x));
  }
  return found;
}

/// A step and an offset with the squared error that they leave.
struct Fit {
  Vec step, offset, error;
};

HWY_INLINE Vec error_of(const Part& part, const Found& found, Vec step, Vec offset) {
  // Σ v (x − s·q + o)², taken apart.
  const Vec square = add(mul(mul(step, step), found.qq), mul(mul(offset, offset), part.sum_v));
  const Vec cross = sub(sub(mul(offset, part.sum_x), mul(step, found.xq)), mul(mul(step, offset), found.q));
  return add(part.sum_xx, add(square, mul(set(2.0f), cross)));
}

/// Least squares for given levels.
HWY_INLINE Fit fitted(const GgufForm& form, const Part& part, const Found& found) {
  Fit alone{over(found.xq, found.qq), set(0), set(0)};
  if (form.has_offset()) {
    const Vec determinant = sub(mul(part.sum_v, found.qq), mul(found.q, found.q));
    const auto solvable = hn::Gt(determinant, mul(set(1e-6f), mul(part.sum_v, found.qq)));
    const Vec step = over(sub(mul(part.sum_v, found.xq), mul(part.sum_x, found.q)), determinant);
    const Vec offset = over(sub(mul(found.q, found.xq), mul(found.qq, part.sum_x)), determinant);
    const auto taken = form.signed_minimum ? solvable : hn::And(solvable, hn::Ge(offset, set(0)));
    alone.step = hn::IfThenElse(taken, step, alone.step);
    alone.offset = hn::IfThenElse(taken, offset, alone.offset);
  }
  alone.error = error_of(part, found, alone.step, alone.offset);
  return alone;
}

HWY_INLINE void keep_better(const Fit& fit, bool positive, Fit& best) {
  auto better = hn::Lt(fit.error, best.error);
  if (positive) better = hn::And(better, hn::Gt(fit.step, set(0)));
  best.step = hn::IfThenElse(better, fit.step, best.step);
  best.offset = hn::IfThenElse(better, fit.offset, best.offset);
  best.error = hn::IfThenElse(better, fit.error, best.error);
}

/// The best step and offset of a part, as real numbers.
template <class Levels>
HWY_INLINE Fit searched(const GgufForm& form, const GgufTrial& trial, const Part& part, const Levels& levels) {
  Fit best{set(0), set(0), part.sum_xx};
  if (form.has_offset()) {
    const Vec low = form.signed_minimum ? part.low : hn::Min(part.low, set(0));
    const Vec range = sub(hn::Max(part.high, low), low);
    const Vec mean = over(part.sum_x, part.sum_v);
    const Vec flat = form.signed_minimum ? mean : hn::Min(mean, set(0));
    best.offset = hn::Neg(flat);
    best.error = add(part.sum_xx, sub(mul(mul(flat, flat), part.sum_v), mul(set(2.0f), mul(flat, part.sum_x))));
    for (const GgufEnds& ends : trial.ends) {
      const Vec inverse = over(set(trial.highest + ends.below + ends.above), range);
      const Vec shift = hn::Neg(add(mul(low, inverse), set(ends.below)));
      keep_better(fitted(form, part, sums(part, levels, inverse, shift)), true, best);
    }
  } else {
    const Vec largest = hn::Max(part.high, hn::Neg(part.low));
    for (const float reach : trial.reaches) {
      keep_better(fitted(form, part, sums(part, levels, over(set(reach), largest), set(0))), false, best);
    }
  }
  for (int round = 0; round < 2; ++round) {
    const Vec inverse = over(set(1.0f), best.step);
    keep_better(fitted(form, part, sums(part, levels, inverse, mul(best.offset, inverse))), form.has_offset(), best);
  }
  return best;
}

/// What stands in a block, and what it leaves.
struct Stored {
  Vec d, d_minimum, error;
  Vec scales[most_gguf_parts], minimums[most_gguf_parts];
};

HWY_INLINE Vec as_unit(formats::GgufUnit unit, Vec value) {
  alignas(64) float lanes[panel_rows];
  hn::Store(value, Tag(), lanes);
  for (size_t i = 0; i < hn::Lanes(Tag()); ++i) lanes[i] = formats::gguf_unit(unit, lanes[i]);
  return hn::Load(Tag(), lanes);
}

/// Sums for the least squares of both units of a block.
struct UnitSums {
  Vec ss, sm, mm, sx, mx;

  static HWY_INLINE UnitSums zero() { return {set(0), set(0), set(0), set(0), set(0)}; }

  HWY_INLINE void add_part(const Part& part, const Found& found, Vec scale, Vec minimum) {
    ss = add(ss, mul(mul(scale, scale), found.qq));
    sm = add(sm, mul(mul(scale, minimum), found.q));
    mm = add(mm, mul(mul(minimum, minimum), part.sum_v));
    sx = add(sx, mul(scale, found.xq));
    mx = add(mx, mul(minimum, part.sum_x));
  }
};

/// One block in some lanes.
template <class Levels>
class Search {
 public:
  HWY_INLINE Search(const GgufForm& form, const GgufTrial& trial, const float* values, const float* importance,
                    size_t lane)
      : form_(form), trial_(trial), levels_(trial) {
    for (int j = 0; j < form.parts(); ++j) {
      parts_[j] = part_of(form, values, importance, j, lane);
      fits_[j] = searched(form, trial, parts_[j], levels_);
    }
  }

  HWY_INLINE Stored run() {
    Stored best{};
    bool first = true;
    const Vec extreme = extreme_step(), lowest = largest_offset();
    Fit fits[most_gguf_parts];
    for (int j = 0; j < form_.parts(); ++j) fits[j] = fits_[j];
    for (const float start : trial_.starts) {
      for (int j = 0; j < form_.parts(); ++j) fits_[j] = fits[j];
      const Vec d = form_.nests() ? mul(extreme, set(start / trial_.extreme_scale)) : mul(extreme, set(start));
      const Vec d_minimum = form_.signed_minimum ? lowest : mul(lowest, set(start / trial_.highest_minimum));
      const Stored found = alternated(as_unit(form_.unit, d), as_unit(formats::GgufUnit::f16, d_minimum));
      if (first) {
        best = found;
      } else {
        take(hn::Lt(found.error, best.error), found, best);
      }
      first = false;
    }
    return best;
  }

 private:
  /// The step of the largest magnitude, with its sign where scales have one.
  HWY_INLINE Vec extreme_step() const {
    Vec extreme = fits_[0].step;
    for (int j = 1; j < form_.parts(); ++j) {
      extreme = hn::IfThenElse(hn::Gt(hn::Abs(fits_[j].step), hn::Abs(extreme)), fits_[j].step, extreme);
    }
    return extreme;
  }

  HWY_INLINE Vec largest_offset() const {
    Vec largest = fits_[0].offset;
    for (int j = 1; j < form_.parts(); ++j) largest = hn::Max(largest, fits_[j].offset);
    return largest;
  }

  HWY_INLINE void take(hn::Mask<Tag> better, const Stored& found, Stored& best) const {
    best.d = hn::IfThenElse(better, found.d, best.d);
    best.d_minimum = hn::IfThenElse(better, found.d_minimum, best.d_minimum);
    best.error = hn::IfThenElse(better, found.error, best.error);
    for (int j = 0; j < form_.parts(); ++j) {
      best.scales[j] = hn::IfThenElse(better, found.scales[j], best.scales[j]);
      best.minimums[j] = hn::IfThenElse(better, found.minimums[j], best.minimums[j]);
    }
  }

  /// Parts under given units, then units under given parts, while the error falls. A lane that did not gain is done:
  /// what it gets does not depend on its neighbours.
  HWY_INLINE Stored alternated(Vec d, Vec d_minimum) {
    UnitSums sums = UnitSums::zero();
    Stored best = assigned(d, d_minimum, sums);
    auto active = hn::Ge(best.error, set(0));
    for (int round = 1; round < trial_.rounds; ++round) {
      refit(sums, d, d_minimum);
      UnitSums next = UnitSums::zero();
      const Stored found = assigned(d, d_minimum, next);
      active = hn::And(active, hn::Lt(found.error, best.error));
      if (hn::AllFalse(Tag(), active)) break;
      take(active, found, best);
      sums = next;
    }
    return best;
  }

  HWY_INLINE void refit(const UnitSums& sums, Vec& d, Vec& d_minimum) const {
    Vec next = over(sums.sx, sums.ss), next_minimum = d_minimum;
    if (form_.has_offset()) {
      // Σ v (x − d·s·q + m·n)²: both from two equations where they can be told apart.
      const Vec determinant = sub(mul(sums.ss, sums.mm), mul(sums.sm, sums.sm));
      const auto solvable = hn::Gt(determinant, mul(set(1e-6f), mul(sums.ss, sums.mm)));
      const Vec both = over(sub(mul(sums.mm, sums.sx), mul(sums.sm, sums.mx)), determinant);
      const Vec both_minimum = over(sub(mul(sums.sm, sums.sx), mul(sums.ss, sums.mx)), determinant);
      const auto taken = form_.signed_minimum
                             ? solvable
                             : hn::And(solvable, hn::And(hn::Gt(both, set(0)), hn::Ge(both_minimum, set(0))));
      next = hn::IfThenElse(taken, both, d);
      next_minimum = hn::IfThenElse(taken, both_minimum, d_minimum);
    }
    d = as_unit(form_.unit, next);
    d_minimum = as_unit(formats::GgufUnit::f16, next_minimum);
  }

  /// The best scale and minimum of every part under these units.
  HWY_INLINE Stored assigned(Vec d, Vec d_minimum, UnitSums& sums) {
    Stored result{};
    result.d = d;
    result.d_minimum = d_minimum;
    result.error = set(0);
    for (int j = 0; j < form_.parts(); ++j) {
      const Part& part = parts_[j];
      Vec scale = set(1.0f), minimum = set(form_.signed_minimum ? 1.0f : 0.0f);
      const auto found = form_.nests() ? best_scale(j, d, d_minimum, scale, minimum)
                                       : measured(part, levels_, d, form_.signed_minimum ? d_minimum : set(0));
      result.scales[j] = scale;
      result.minimums[j] = minimum;
      result.error = add(result.error, found.error);
      sums.add_part(part, found, scale, minimum);
      fits_[j] = fitted(form_, part, found);
    }
    return result;
  }

  HWY_INLINE Found best_scale(int j, Vec d, Vec d_minimum, Vec& scale, Vec& minimum) const {
    const auto low = static_cast<float>(form_.lowest_scale), high = static_cast<float>(form_.highest_scale);
    const Vec nearest = rounded(clamped(over(fits_[j].step, d), low, high));
    Found best = tried(j, d, d_minimum, nearest, minimum);
    scale = nearest;
    for (const float move : {-1.0f, 1.0f}) {
      const Vec other = clamped(add(nearest, set(move)), low, high);
      Vec other_minimum = minimum;
      const Found found = tried(j, d, d_minimum, other, other_minimum);
      const auto better = hn::Lt(found.error, best.error);
      scale = hn::IfThenElse(better, other, scale);
      minimum = hn::IfThenElse(better, other_minimum, minimum);
      best.error = hn::IfThenElse(better, found.error, best.error);
      best.q = hn::IfThenElse(better, found.q, best.q);
      best.qq = hn::IfThenElse(better, found.qq, best.qq);
      best.xq = hn::IfThenElse(better, found.xq, best.xq);
    }
    return best;
  }

  /// A scale with the minimum that suits it.
  HWY_INLINE Found tried(int j, Vec d, Vec d_minimum, Vec scale, Vec& minimum) const {
    const Part& part = parts_[j];
    const Vec step = mul(d, scale);
    if (form_.highest_minimum == 0) return measured(part, levels_, step, set(0));
    const Vec inverse = over(set(1.0f), step);
    const auto found =
        w4q::quantize::HWY_NAMESPACE::gguf_panel::sums(part, levels_, inverse, mul(fits_[j].offset, inverse));
    const Vec offset = over(sub(mul(step, found.q), part.sum_x), part.sum_v);
    minimum = rounded(clamped(over(offset, d_minimum), 0.0f, static_cast<float>(form_.highest_minimum)));
    return measured(part, levels_, step, mul(d_minimum, minimum));
  }

  const GgufForm& form_;
  const GgufTrial& trial_;
  const Levels levels_;
  Part parts_[most_gguf_parts];
  Fit fits_[most_gguf_parts]{};
};

template <class Levels>
HWY_INLINE void search_with(const GgufForm& form, const GgufTrial& trial, const float* values, const float* importance,
                            GgufPanelScales& out) {
  const Tag d;
  for (size_t lane = 0; lane < panel_rows; lane += hn::Lanes(d)) {
    const Stored found = Search<Levels>(form, trial, values, importance, lane).run();
    hn::StoreU(found.d, d, out.d.data() + lane);
    hn::StoreU(found.d_minimum, d, out.d_minimum.data() + lane);
    for (int j = 0; j < form.parts(); ++j) {
      const auto at = static_cast<size_t>(j);
      hn::StoreU(found.scales[j], d, out.scales[at].data() + lane);
      hn::StoreU(found.minimums[j], d, out.minimums[at].data() + lane);
      hn::StoreU(mul(found.d, found.scales[j]), d, out.steps[at].data() + lane);
      hn::StoreU(mul(found.d_minimum, found.minimums[j]), d, out.offsets[at].data() + lane);
    }
  }
}

template <class Levels>
HWY_INLINE void round_with(const GgufTrial& trial, const GgufPanelScales& scales, const GgufColumns& columns,
                           uint8_t* out, float* errors) {
  const Tag d;
  const Levels levels(trial);
  alignas(64) float lanes[panel_rows];
  for (size_t lane = 0; lane < panel_rows; lane += hn::Lanes(d)) {
    for (int c = 0; c < columns.count; ++c) {
      const size_t at = static_cast<size_t>(c) * panel_rows + lane;
      auto target = hn::LoadU(d, columns.targets + at);
      const float* coupling = columns.coupling == nullptr ? nullptr : columns.coupling + c * columns.coupling_stride;
      for (int j = 0; coupling != nullptr && j < c; ++j) {
        target = add(target, mul(set(coupling[j]), hn::LoadU(d, errors + static_cast<size_t>(j) * panel_rows + lane)));
      }
      const Vec step = hn::LoadU(d, scales.steps[columns.parts[c]].data() + lane);
      const Vec offset = hn::LoadU(d, scales.offsets[columns.parts[c]].data() + lane);
      const Vec x = mul(add(target, offset), over(set(1.0f), step)), level = levels.level(x);
      const Vec value = sub(mul(step, level), offset);
      hn::StoreU(sub(hn::LoadU(d, columns.weights + at), value), d, errors + at);
      hn::Store(levels.index(level, x), d, lanes + lane);
      for (size_t i = 0; i < hn::Lanes(d); ++i) out[at + i] = static_cast<uint8_t>(lanes[lane + i]);
    }
  }
}

}  // namespace gguf_panel

void search_gguf(const formats::GgufForm& form, const GgufTrial& trial, const float* values, const float* importance,
                 GgufPanelScales& out) {
  if (form.table.empty()) return gguf_panel::search_with<gguf_panel::Uniform>(form, trial, values, importance, out);
  gguf_panel::search_with<gguf_panel::Table>(form, trial, values, importance, out);
}

void round_gguf(const formats::GgufForm& form, const GgufTrial& trial, const GgufPanelScales& scales,
                const GgufColumns& columns, uint8_t* levels, float* errors) {
  if (form.table.empty()) {
    return gguf_panel::round_with<gguf_panel::Uniform>(trial, scales, columns, levels, errors);
  }
  gguf_panel::round_with<gguf_panel::Table>(trial, scales, columns, levels, errors);
}

}  // namespace w4q::quantize::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <vector>

#include "core/error.h"

namespace w4q::quantize {
namespace {

HWY_EXPORT(search_gguf);
HWY_EXPORT(round_gguf);

/// By how much the ends of a range may be cut off or left out, in steps, both in turn.
void add_ends(std::initializer_list<float> moves, GgufTrial& trial) {
  for (const float below : moves) {
    for (const float above : moves) trial.ends.push_back({below, above});
  }
}

GgufTrial make_trial(const formats::GgufForm& form) {
  GgufTrial trial;
  trial.count = static_cast<size_t>(form.levels());
  trial.lowest = form.level(0);
  trial.highest = form.level(form.levels() - 1);
  for (size_t i = 0; !form.table.empty() && i < trial.count; ++i) {
    trial.levels[i] = form.level(static_cast<int>(i));
    if (i > 0) trial.midpoints[i - 1] = (trial.levels[i - 1] + trial.levels[i]) / 2;
  }
  const bool steps_are_signed = form.lowest_scale < 0;
  trial.extreme_scale = static_cast<float>(steps_are_signed ? form.lowest_scale : form.highest_scale);
  trial.highest_minimum = static_cast<float>(std::max(1, form.highest_minimum));
  if (form.has_offset()) {
    if (form.levels() <= 4) {
      add_ends({-0.3f, 0.0f, 0.25f, 0.5f, 0.75f}, trial);
    } else {
      add_ends({-0.2f, 0.2f, 0.7f}, trial);
    }
  } else {
    // Of the level that the largest magnitude would get, above the highest one to cut it off.
    const float top = std::max(-trial.lowest, trial.highest);
    const auto shares = form.levels() > 64   ? std::vector{0.997f, 1.0f}
                        : form.levels() > 16 ? std::vector{0.96f, 0.98f, 1.0f, 1.03f, 1.06f}
                        : form.levels() > 8  ? std::vector{0.86f, 0.91f, 0.96f, 1.0f, 1.05f, 1.1f, 1.16f}
                                             : std::vector{0.72f, 0.8f, 0.88f, 0.96f, 1.04f, 1.12f, 1.2f};
    for (const float share : shares) {
      trial.reaches.push_back(share * top);
      if (-trial.lowest != trial.highest) trial.reaches.push_back(-share * top);
    }
  }
  trial.starts = form.unit == formats::GgufUnit::e8m0_half ? std::vector{1.0f, 0.5f, 2.0f} : std::vector{1.0f};
  return trial;
}

const GgufTrial& trial_of(const formats::GgufForm& form) {
  static const std::vector<GgufTrial> trials = [] {
    std::vector<GgufTrial> all;
    for (const auto& each : formats::gguf_forms()) all.push_back(make_trial(each));
    return all;
  }();
  return trials[static_cast<size_t>(&form - formats::gguf_forms().data())];
}

}  // namespace

formats::GgufScales GgufPanelScales::row(const formats::GgufForm& form, int row) const {
  const auto r = static_cast<size_t>(row);
  formats::GgufScales result{.d = d[r], .d_minimum = d_minimum[r]};
  for (size_t j = 0; j < static_cast<size_t>(form.parts()); ++j) {
    result.scales[j] = static_cast<int16_t>(scales[j][r]);
    result.minimums[j] = static_cast<uint8_t>(minimums[j][r]);
  }
  return result;
}

void GgufPanelScales::set_row(const formats::GgufForm& form, int row, const formats::GgufScales& from) {
  const auto r = static_cast<size_t>(row);
  d[r] = from.d, d_minimum[r] = from.d_minimum;
  for (size_t j = 0; j < static_cast<size_t>(form.parts()); ++j) {
    scales[j][r] = static_cast<float>(from.scales[j]), minimums[j][r] = static_cast<float>(from.minimums[j]);
    steps[j][r] = from.d * scales[j][r], offsets[j][r] = from.d_minimum * minimums[j][r];
  }
}

void search_gguf_scales(const formats::GgufForm& form, const float* values, const float* importance,
                        GgufPanelScales& out) {
  HWY_DYNAMIC_DISPATCH(search_gguf)(form, trial_of(form), values, importance, out);
}

void round_gguf_columns(const formats::GgufForm& form, const GgufPanelScales& scales, const GgufColumns& columns,
                        uint8_t* levels, float* errors) {
  HWY_DYNAMIC_DISPATCH(round_gguf)(form, trial_of(form), scales, columns, levels, errors);
}

}  // namespace w4q::quantize
#endif  // HWY_ONCE
