#include "verify/conventions/values.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/convert.h"
#include "core/text.h"
#include "formats/integer.h"

namespace w4q::verify {
namespace {

using formats::PackedWeight;

constexpr Order awq_order{0, 2, 4, 6, 1, 3, 5, 7};
constexpr Order awq_inverse{0, 4, 1, 5, 2, 6, 3, 7};
constexpr Order reversed{7, 6, 5, 4, 3, 2, 1, 0};
constexpr Order swapped_pairs{1, 0, 3, 2, 5, 4, 7, 6};
constexpr Order swapped_bytes{2, 3, 0, 1, 6, 7, 4, 5};

constexpr Reading as_declared{"as declared"};

/// Orders that the fields of words are found in by mistake.
std::vector<Reading> order_readings(const WordHabits& habits) {
  const auto make = [&](std::string_view name, const Order& order) {
    return habits.along_outputs ? Reading{name, order, plain_order} : Reading{name, plain_order, order};
  };
  return {make(habits.even_first ? "the nibbles of its words stand in plain order, not in AWQ's"
                                 : "the nibbles of its words stand in the inverse of AWQ's order",
               awq_order),
          make(habits.even_first ? "the nibbles of its words stand in AWQ's order applied twice"
                                 : "the nibbles of its words stand in AWQ's order, not in plain order",
               awq_inverse),
          make("the nibbles of its words stand in reverse order", reversed),
          make("the two nibbles of every byte are exchanged", swapped_pairs),
          make("the bytes of its words are exchanged in pairs", swapped_bytes)};
}

constexpr Reading transposed{"its scales are transposed", plain_order, plain_order, 0, true};

/// Standard errors by which readings must differ: there are thousands of weights, and none may look wrong by chance.
constexpr double beyond_chance = 5;

/// The lean of a weight read rightly is a small part of a step; off by one it is a whole step.
bool leans_a_step(double lean) noexcept { return std::abs(lean) >= 0.65 && std::abs(lean) <= 1.35; }

/// Zero points that are all one beside the symmetric one: what a reader of the other GPTQ version sees, and what a
/// weight has whose codes lie around that one (three values are 0, 1 and 2, around 1). Then its weights do not lean.
std::string constant_zero_fault(const PackedWeight& canonical, const WeightSample& sample) {
  if (!canonical.scheme.asymmetric) return {};
  const auto zeros = canonical.plane(formats::PlaneRole::zeros).bytes.as<uint8_t>();
  const int symmetric = formats::integer_symmetric_zero(canonical.scheme.bits), first = zeros.front();
  if (std::abs(first - symmetric) != 1) return {};
  if (!std::ranges::all_of(zeros, [&](uint8_t zero) { return zero == first; })) return {};
  const auto [lean, error] = sample.lean();
  if (!leans_a_step(lean) || (lean > 0) != (first < symmetric) || std::abs(lean) < beyond_chance * error) return {};
  return concat("zero points are off by one: all are ", first, ", a symmetric weight has ", symmetric,
                first < symmetric ? "; stored as version 1 does (zero - 1), read as version 2"
                                  : "; stored as version 2 does, read as version 1 (zero - 1)");
}

std::string lean_fault(const PackedWeight& canonical, const WeightSample& sample) {
  constexpr int widest = 4;  // with more bits a step is too small a part of the weights' deviation
  if (canonical.scheme.bits > widest || sample.size() * canonical.k < 4096) return {};
  const double lean = sample.lean().value;
  if (!leans_a_step(lean)) return {};
  return concat("zero points are off by one: decoded weights lean by ", fixed(lean, 2), " steps, with zero points ",
                lean > 0 ? "one more" : "one less", " by ", fixed(lean - std::copysign(1.0, lean), 2));
}

/// No weight has one of the signs: such a matrix leans as a whole, with its zero points where they belong. Three values
/// on one side of their zero points are the usual three, moved.
bool has_one_sign(const PackedWeight& canonical) {
  std::vector<uint8_t> codes(static_cast<size_t>(canonical.k)),
      zeros(static_cast<size_t>(formats::integer_groups(canonical.scheme, canonical.k)));
  bool below = false, above = false;
  int least = 255, most = 0;
  for (int64_t row = 0; row < canonical.n && !(below && above); ++row) {
    formats::integer_read_codes(canonical, row, codes);
    formats::integer_read_zeros(canonical, row, zeros);
    const auto [low, high] = std::ranges::minmax(codes);
    const auto [lowest_zero, highest_zero] = std::ranges::minmax(zeros);
    below = below || low < lowest_zero, above = above || high > highest_zero;
    least = std::min<int>(least, low), most = std::max<int>(most, high);
  }
  return !(below && above) && most - least > 2;
}

/// Codes against their zero points, which both follow from a group's range.
std::string zero_order_fault(const PackedWeight& canonical, const WeightSample& sample, const WordHabits& habits) {
  if (!canonical.scheme.asymmetric) return {};
  const double declared = sample.zero_mismatch(as_declared);
  if (declared < 0.3) return {};
  for (const Reading& reading : order_readings(habits)) {
    if (reading.rows == plain_order || !sample.can_read(reading)) continue;
    const double other = sample.zero_mismatch(reading);
    if (other > 0.5 * declared) continue;
    return concat(reading.name, ": zero points miss the mean codes of their groups by ", fixed(std::sqrt(declared), 2),
                  " steps as declared, by ", fixed(std::sqrt(other), 2), " so");
  }
  return {};
}

/// Codes against their scales. Needs groups enough for a slope.
std::string scale_order_fault(const WeightSample& sample, const WordHabits& habits) {
  if (sample.size() * sample.groups() < 256) return {};
  const auto [declared, declared_error] = sample.scale_match(as_declared);
  // Scales of other groups know nothing of the codes. Where they say the opposite, groups differ by something else.
  if (declared > 0.4 || declared < -std::max(0.4, 2 * declared_error)) return {};
  auto readings = order_readings(habits);
  readings.push_back(transposed);
  for (const Reading& reading : readings) {
    if ((reading.rows == plain_order && !reading.transposed_scales) || !sample.can_read(reading)) continue;
    const auto [other, error] = sample.scale_match(reading);
    // Where the sizes of outputs differ by more than their codes tell, a slope is hardly known.
    const double chance = beyond_chance * std::hypot(error, declared_error);
    if (other < 0.6 || other < declared + std::max(0.4, chance)) continue;
    return concat(reading.name, ": scales follow from the codes of their groups by ", fixed(declared, 2),
                  " as declared, by ", fixed(other, 2), " so (1: wholly)");
  }
  return {};
}

/// Factors of the base's columns and rows that bring it nearest to decoded weights, because AWQ scales both: columns first,
/// then rows, in turns.
class ScaleFit {
 public:
  ScaleFit(const WeightSample& sample, const Reading& reading, std::span<const float> base, int64_t k)
      : sample_(sample),
        reading_(reading),
        base_(base),
        width_(static_cast<size_t>(k)),
        cross_(width_),
        norm_(width_),
        own_(width_),
        columns_(width_),
        rows_(static_cast<size_t>(sample.size()), 1.0) {}

  void fit(int rounds) {
    for (int round = 0; round < rounds; ++round) fit_columns(), fit_rows();
  }

  /// Sum of squared errors over the sum of squares. Zeros for zeros fit.
  double misfit() const {
    if (squares_ == 0) return std::ranges::all_of(base_, [](float value) { return value == 0; }) ? 0.0 : 1.0;
    return std::max(0.0, 1 - explained_ / squares_);
  }
  /// NaN of a column nearly all of whose codes are none, beside louder ones: what it was multiplied by is not known.
  std::vector<double> known_columns() const {
    constexpr double least_explained = 0.8;
    auto columns = columns_;
    for (size_t col = 0; col < width_; ++col) {
      if (cross_[col] * cross_[col] < least_explained * norm_[col] * own_[col]) columns[col] = NAN;
    }
    return columns;
  }

 private:
  double base_at(int64_t row, size_t col) const {
    return static_cast<double>(base_[static_cast<size_t>(row) * width_ + col]);
  }

  void fit_columns() {
    std::vector<float> values(width_);
    for (auto* sums : {&cross_, &norm_, &own_}) std::ranges::fill(*sums, 0.0);
    for (int64_t row = 0; row < sample_.size(); ++row) {
      sample_.decode(row, reading_, values);
      for (size_t col = 0; col < width_; ++col) {
        const double x = values[col], y = rows_[static_cast<size_t>(row)] * base_at(row, col);
        cross_[col] += x * y, norm_[col] += y * y, own_[col] += x * x;
      }
    }
    for (size_t col = 0; col < width_; ++col) columns_[col] = norm_[col] == 0 ? 0.0 : cross_[col] / norm_[col];
    squares_ = std::accumulate(own_.begin(), own_.end(), 0.0);
  }

  void fit_rows() {
    std::vector<float> values(width_);
    explained_ = 0;
    for (int64_t row = 0; row < sample_.size(); ++row) {
      sample_.decode(row, reading_, values);
      double cross = 0, norm = 0;
      for (size_t col = 0; col < width_; ++col) {
        const double fitted = columns_[col] * base_at(row, col);
        cross += static_cast<double>(values[col]) * fitted, norm += fitted * fitted;
      }
      rows_[static_cast<size_t>(row)] = norm > 0 ? cross / norm : 0.0;
      if (norm > 0) explained_ += cross * cross / norm;
    }
  }

  const WeightSample& sample_;
  const Reading& reading_;
  std::span<const float> base_;
  size_t width_;
  std::vector<double> cross_, norm_, own_, columns_, rows_;
  double squares_ = 0, explained_ = 0;
};

/// Where scales of a wide range were folded into rows and columns, loud rows hide what columns are at first.
double misfit(const WeightSample& sample, const Reading& reading, std::span<const float> base, int64_t k, int rounds) {
  ScaleFit fit(sample, reading, base, k);
  fit.fit(rounds);
  return fit.misfit();
}

void widen_row(const TensorView& weight, int64_t row, std::span<float> values) {
  const auto bytes = values.size() * static_cast<size_t>(dtype_bits(weight.dtype)) / 8;
  widen(weight.bytes.subspan(static_cast<size_t>(row) * bytes, bytes), weight.dtype, values);
}

/// What a row of the base, its columns fitted, is multiplied by to come closest to the decoded one.
double row_factor(std::span<const uint8_t> codes, std::span<const uint8_t> zeros, std::span<const float> scales,
                  std::span<const float> base, std::span<const double> fit, const WeightSample& sample) {
  double cross = 0, norm = 0, own = 0;
  for (size_t col = 0; col < codes.size(); ++col) {
    if (std::isnan(fit[col])) continue;
    const auto group = static_cast<size_t>(sample.group_of(static_cast<int64_t>(col)));
    const double fitted = fit[col] * static_cast<double>(base[col]);
    const double decoded = (codes[col] - zeros[group]) * static_cast<double>(scales[group]);
    cross += decoded * fitted, norm += fitted * fitted, own += decoded * decoded;
  }
  // A row that the factors do not explain is not known either.
  constexpr double least_explained = 0.8;
  if (cross * cross < least_explained * norm * own) return NAN;
  return norm > 0 ? cross / norm : 0.0;
}

/// Of all rows, the first weight that is half a range away from the base's although the rest is not. `fit`: what the
/// base's columns are multiplied by.
std::string far_code_fault(const PackedWeight& canonical, const WeightSample& sample, const TensorView& base,
                           std::span<const double> fit, const WordHabits& habits) {
  const auto width = static_cast<size_t>(canonical.k), groups = static_cast<size_t>(sample.groups());
  // With 2 bits that is two steps, and rows and columns are not fitted better to so few values.
  if (canonical.scheme.bits < 3) return {};
  const double limit = std::ldexp(0.5, canonical.scheme.bits);
  std::vector<uint8_t> codes(width), zeros(groups);
  std::vector<float> scales(groups), values(width);
  // Errors that were fed back leave codes at any distance, and far more of them nearer to the base's.
  constexpr double least_strayed = 0.5, most_strayed = 0.8;  // of the limit
  std::string first;
  for (int64_t row = 0; row < canonical.n; ++row) {
    formats::integer_read_codes(canonical, row, codes);
    formats::integer_read_scales(canonical, row, scales);
    formats::integer_read_zeros(canonical, row, zeros);
    widen_row(base, row, values);
    const double factor = row_factor(codes, zeros, scales, values, fit, sample);
    for (size_t col = 0; col < width && !std::isnan(factor); ++col) {
      const auto group = static_cast<size_t>(sample.group_of(static_cast<int64_t>(col)));
      if (!(scales[group] > 0) || std::isnan(fit[col])) continue;
      const double wanted =
          factor * fit[col] * static_cast<double>(values[col]) / static_cast<double>(scales[group]) + zeros[group];
      // Clipped weights lie beyond the ends of the codes.
      const auto apart = [&](double place) { return std::abs(std::clamp(place, 0.0, 2 * limit - 1) - codes[col]); };
      const double here = apart(wanted);
      if (here <= least_strayed * limit) continue;
      // The base's own weight, rounded: a fit over few values, as of a column that is nearly zero, says nothing then.
      if (apart(static_cast<double>(values[col]) / static_cast<double>(scales[group]) + zeros[group]) <= 1) continue;
      if (here < most_strayed * limit) return {};
      if (here < limit || !first.empty()) continue;
      const bool spilled = habits.may_spill && codes[col] == 0 && wanted > 14;
      first = concat(
          spilled ? "a code of 16 spilled into the next nibble: " : "a code is far from the base's weight: ", "output ",
          row, ", input ", col, " has code ", +codes[col], ", the base's weight is at ", fixed(wanted, 1));
      if (spilled) return first;
    }
  }
  return first;
}

}  // namespace

std::vector<std::string> value_faults(const PackedWeight& canonical, const WeightSample& sample,
                                      const WordHabits& habits) {
  std::vector<std::string> faults;
  const auto add = [&](std::string fault) {
    if (!fault.empty()) faults.push_back(std::move(fault));
    return !faults.empty();
  };
  // The first thing that is wrong upsets what is measured after it.
  const bool leans = has_one_sign(canonical);
  if (leans || (!add(constant_zero_fault(canonical, sample)) && !add(lean_fault(canonical, sample)))) {
    if (!add(zero_order_fault(canonical, sample, habits))) add(scale_order_fault(sample, habits));
  }
  return faults;
}

std::vector<std::string> base_faults(const PackedWeight& canonical, const WeightSample& sample,
                                     const WordHabits& habits, const TensorView& base) {
  if (base.shape != Shape{canonical.n, canonical.k}) {
    return {concat("has ", canonical.n, " outputs and ", canonical.k, " inputs, the base's weight is ",
                   shape_text(base.shape))};
  }
  const auto width = static_cast<size_t>(canonical.k);
  std::vector<float> values(static_cast<size_t>(sample.size()) * width);
  for (int64_t i = 0; i < sample.size(); ++i) {
    widen_row(base, sample.row(i), std::span(values).subspan(static_cast<size_t>(i) * width, width));
  }
  ScaleFit fit(sample, as_declared, values, canonical.k);
  fit.fit(1);
  double declared = fit.misfit();
  auto readings = order_readings(habits);
  readings.push_back(transposed);
  readings.push_back({"zero points are off by one, and should be one less", plain_order, plain_order, -1});
  readings.push_back({"zero points are off by one, and should be one more", plain_order, plain_order, 1});
  const Reading* best = nullptr;
  double least = declared;
  for (const Reading& reading : readings) {
    if (!sample.can_read(reading)) continue;
    const double other = misfit(sample, reading, values, canonical.k, 1);
    if (other < least) least = other, best = &reading;
  }
  // What is to be named is named by fits that have settled.
  constexpr int rounds = 8;
  if ((best != nullptr && least < 0.5 * declared) || declared > 0.5) {
    declared = misfit(sample, as_declared, values, canonical.k, rounds);
    if (best != nullptr) least = misfit(sample, *best, values, canonical.k, rounds);
  }
  const auto share = [](double misfit_share) { return concat(fixed(100 * misfit_share, 1), " %"); };
  // Three decibels: another reading never comes near the right one by chance. Where loud rows and columns leave hardly
  // any other codes, both are far from the base's, and neither is right.
  constexpr double well_read = 0.1;
  const bool is_near = canonical.scheme.bits < 4 || least < well_read;
  if (best != nullptr && least < 0.5 * declared && is_near) {
    return {concat(best->name, ": ", share(declared), " of its energy is not the base's as declared, ", share(least),
                   " so")};
  }
  if (declared > 0.5) {
    return {concat("is not the base's weight: ", share(declared),
                   " of its energy is not the base's; a stale shard, or another model")};
  }
  auto far = far_code_fault(canonical, sample, base, fit.known_columns(), habits);
  return far.empty() ? std::vector<std::string>{} : std::vector<std::string>{std::move(far)};
}

std::string profile_fault(std::span<const double> energy, std::span<const double> siblings, int bits) {
  if (bits != 4) return {};
  const double declared = std::abs(profile_match(energy, siblings, plain_order));
  // Of series that have nothing to do with each other: the correlation's standard error is 1/√(number of inputs).
  const double chance = beyond_chance / std::sqrt(static_cast<double>(energy.size()));
  for (const Reading& reading : order_readings({})) {
    const double other = std::abs(profile_match(energy, siblings, reading.cols));
    if (other < std::max(0.3, chance) || other < declared + 0.2) continue;
    return concat(reading.name, ": the energies of its inputs agree with those of the weights beside it by ",
                  fixed(declared, 2), " as declared, by ", fixed(other, 2), " so");
  }
  return {};
}

}  // namespace w4q::verify
