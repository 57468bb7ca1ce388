#include "verify/statistics/block_sample.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "core/parallel.h"
#include "formats/e4m4.h"
#include "formats/integer.h"
#include "formats/scheme_registry.h"
#include "formats/table/table_format.h"
#include "verify/median.h"

namespace w4q::verify {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::SchemeFamily;

constexpr int64_t all_up_to = int64_t{1} << 18, sampled_codes = int64_t{1} << 17;
constexpr int64_t rows_together = 8;
constexpr double nothing = std::numeric_limits<double>::quiet_NaN();

std::vector<int64_t> rows_of(const PackedWeight& weight) {
  const int64_t blocks = (weight.n + rows_together - 1) / rows_together;
  const int64_t taken = weight.n * weight.k <= all_up_to
                            ? blocks
                            : std::clamp<int64_t>(sampled_codes / (rows_together * weight.k), 1, blocks);
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < taken; ++i) {
    const int64_t first = i * blocks / taken * rows_together;
    for (int64_t row = first; row < std::min(first + rows_together, weight.n); ++row) rows.push_back(row);
  }
  return rows;
}

/// Of scales, which have few values: those seen last are remembered.
class Logarithms {
 public:
  double of(float scale) {
    auto& [known, log] = seen_[std::bit_cast<uint32_t>(scale) * 0x9E3779B1u >> 22];
    if (known != scale) known = scale, log = std::log(double{scale});
    return log;
  }

 private:
  std::array<std::pair<float, double>, 1024> seen_{};
};

struct ScaleOrder {
  std::string_view name;
  int64_t (*from)(int64_t row, int64_t group, int64_t n, int64_t groups);
};
constexpr ScaleOrder orders[] = {
    {"outputs and groups exchanged",
     [](int64_t row, int64_t group, int64_t n, int64_t groups) {
       const int64_t at = row * groups + group;
       return at % n * groups + at / n;
     }},
    {"all in reverse order",
     [](int64_t row, int64_t group, int64_t n, int64_t groups) { return n * groups - 1 - (row * groups + group); }},
    {"the groups of each output in reverse order",
     [](int64_t row, int64_t group, int64_t, int64_t groups) { return row * groups + groups - 1 - group; }},
    {"the outputs in reverse order",
     [](int64_t row, int64_t group, int64_t n, int64_t groups) { return (n - 1 - row) * groups + group; }},
    {"the two halves of the outputs exchanged",
     [](int64_t row, int64_t group, int64_t n, int64_t groups) { return (row + n / 2) % n * groups + group; }},
    {"the two halves of the groups exchanged",
     [](int64_t row, int64_t group, int64_t, int64_t groups) { return row * groups + (group + groups / 2) % groups; }},
    {"each one place on",
     [](int64_t row, int64_t group, int64_t n, int64_t groups) { return (row * groups + group + 1) % (n * groups); }},
    {"each one place back", [](int64_t row, int64_t group, int64_t n,
                               int64_t groups) { return (row * groups + group + n * groups - 1) % (n * groups); }},
    {"each one output on",
     [](int64_t row, int64_t group, int64_t n, int64_t groups) { return (row + 1) % n * groups + group; }},
    {"each one output back",
     [](int64_t row, int64_t group, int64_t n, int64_t groups) { return (row + n - 1) % n * groups + group; }},
};

}  // namespace

BlockSample::BlockSample(const PackedWeight& canonical) : weight_(canonical), rows_(rows_of(canonical)) {
  const auto& row = formats::scheme_row(canonical.scheme.family);
  int64_t size = 0;
  if (formats::shares_bits(canonical.scheme)) return;  // a code alone stands for nothing
  if (canonical.scheme.family == SchemeFamily::integer) {
    size = formats::integer_group_size(canonical.scheme, canonical.k);
  } else {
    const auto format = row.table(canonical.scheme);
    size = formats::block_of(format, canonical.k);
    by_largest_ = format.rule != formats::ScaleRule::group_norm;
    if (format.order == formats::CodeOrder::dense && canonical.k % size != 0) size = 0;
    if (format.block_rows != 1) size = 0;  // rows have no scales of their own
  }
  if (size == 0) return;
  groups_ = (canonical.k + size - 1) / size;
  group_of_.resize(static_cast<size_t>(canonical.k));
  for (size_t col = 0; col < group_of_.size(); ++col) {
    group_of_[col] = canonical.scheme.act_order ? canonical.plane(PlaneRole::group_index).bytes.as<int32_t>()[col]
                                                : static_cast<int32_t>(static_cast<int64_t>(col) / size);
  }
  log_scales_.resize(static_cast<size_t>(canonical.n * groups_));
  std::atomic<int64_t> negative = 0, near_one = 0;
  parallel_for(std::ssize(log_scales_), 1 << 16, [&](int64_t begin, int64_t end) {
    Logarithms log;
    int64_t below = 0, near = 0;
    for (int64_t i = begin; i < end; ++i) {
      const float stored = formats::scale_at(canonical, i), scale = std::abs(stored);
      below += stored<0, near += scale> 0.5f && scale < 2;
      log_scales_[static_cast<size_t>(i)] = scale > 0 ? log.of(scale) : nothing;
    }
    negative += below, near_one += near;
  });
  negative_ = negative, near_one_ = near_one;
  read_codes();
  measure();
}

void BlockSample::read_codes() {
  const auto width = static_cast<size_t>(weight_.k);
  const bool integer = weight_.scheme.family == SchemeFamily::integer;
  const auto& row = formats::scheme_row(weight_.scheme.family);
  auto& table = table_;
  table.resize(size_t{1} << weight_.scheme.bits);
  std::vector<uint8_t> codes(width), zeros(static_cast<size_t>(groups_));
  if (integer) {
    std::iota(table.begin(), table.end(), 0.0f);
  } else {
    table = formats::table_levels(row.table(weight_.scheme), weight_);
  }
  for (const float level : table) largest_ = std::max(largest_, std::abs(double{level}));
  if (integer) largest_ = 1;  // a step
  levels_.resize(rows_.size() * width);
  codes_.resize(levels_.size());
  zeros_.resize(rows_.size() * static_cast<size_t>(groups_));
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (integer) {
      formats::integer_read_codes(weight_, rows_[i], codes);
      formats::integer_read_zeros(weight_, rows_[i], zeros);
      for (size_t g = 0; g < zeros.size(); ++g) zeros_[i * zeros.size() + g] = zeros[g];
    } else {
      formats::table_read_codes(row.table(weight_.scheme), weight_, rows_[i], codes);
    }
    for (size_t col = 0; col < width; ++col) {
      levels_[i * width + col] = table[codes[col]];
      codes_[i * width + col] = codes[col];
    }
  }
}

void BlockSample::measure() {
  const auto groups = static_cast<size_t>(groups_), width = static_cast<size_t>(weight_.k);
  deviations_.resize(rows_.size() * groups);
  means_.resize(deviations_.size());
  std::vector<double> count(groups), sum(groups), squares(groups);
  if (weight_.scheme.family == SchemeFamily::integer) find_ends();
  for (size_t i = 0; i < rows_.size(); ++i) {
    for (auto* series : {&count, &sum, &squares}) std::ranges::fill(*series, 0.0);
    for (size_t col = 0; col < width; ++col) {
      const auto group = static_cast<size_t>(group_of_[col]);
      const double value = level(i, col);
      count[group] += 1, sum[group] += value, squares[group] += value * value;
    }
    for (size_t group = 0; group < groups; ++group) {
      const double mean = count[group] > 0 ? sum[group] / count[group] : 0;
      const double variance = count[group] > 0 ? squares[group] / count[group] - mean * mean : 0;
      const size_t at = i * groups + group;
      means_[at] = mean;
      deviations_[at] = log_deviation(variance);
      const bool scaled = !std::isnan(log_scale(rows_[i] * groups_ + static_cast<int64_t>(group)));
      if (!scaled && !std::isnan(deviations_[at])) ++empty_;
    }
  }
}

double BlockSample::log_deviation(double variance) const noexcept {
  return variance > 1e-9 * largest_ * largest_ ? 0.5 * std::log(variance) : nothing;
}

void BlockSample::find_ends() {
  const auto groups = static_cast<size_t>(groups_), width = static_cast<size_t>(weight_.k);
  least_.assign(rows_.size() * groups, 255), most_.assign(rows_.size() * groups, 0);
  for (size_t i = 0; i < rows_.size(); ++i) {
    for (size_t col = 0; col < width; ++col) {
      const size_t at = i * groups + static_cast<size_t>(group_of_[col]);
      const uint8_t code = codes_[i * width + col];
      least_[at] = std::min(least_[at], code), most_[at] = std::max(most_[at], code);
    }
  }
}

Slope BlockSample::match_of(const std::vector<int64_t>& order) const {
  std::vector<double> scales;
  for (const int64_t index : order) scales.push_back(log_scale(index));
  return match_of_scales(scales);
}

double BlockSample::least_fine(std::span<const double> log_scales) const {
  if (weight_.scheme.scale == formats::ScaleType::e4m4) return std::log(double{formats::e4m4_min_normal});
  if (weight_.scheme.scale != formats::ScaleType::e4m3) return -INFINITY;
  // Below the least normal one E4M3 is coarse, however small all are: two matrices may share the factor before them.
  double least = std::log(0x1p-6);
  for (const double scale : log_scales) least = std::isnan(scale) ? least : std::max(least, scale - std::log(0x1p12));
  return least;
}

Slope BlockSample::match_of_scales(std::span<const double> log_scales) const {
  const double least = least_fine(log_scales);
  std::vector<size_t> place;
  std::vector<double> x, y;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const size_t first = x.size();
    double mean_x = 0, mean_y = 0;
    for (size_t group = 0; group < static_cast<size_t>(groups_); ++group) {
      const size_t at = i * static_cast<size_t>(groups_) + group;
      const double scale = log_scales[at];
      if (std::isnan(scale) || std::isnan(deviations_[at]) || scale < least) continue;
      x.push_back(deviations_[at]), y.push_back(-scale), place.push_back(group);
      mean_x += x.back(), mean_y += y.back();
    }
    const auto count = static_cast<double>(x.size() - first);
    // Sizes of rows say nothing of whether a row's scales belong to its codes.
    for (size_t at = first; groups_ > 3 && at < x.size(); ++at) x[at] -= mean_x / count, y[at] -= mean_y / count;
  }
  Slope found = slope(x, y);
  if (found.error > 0) {
    found.error = std::max(found.error, error_by_place(x, y, place, found, static_cast<size_t>(groups_)));
  }
  return found;
}

std::vector<double> BlockSample::histogram() const {
  std::vector<double> shares(size_t{1} << weight_.scheme.bits);
  const auto width = static_cast<size_t>(weight_.k), groups = static_cast<size_t>(groups_);
  double total = 0;
  std::vector<int64_t> counts(shares.size());
  for (size_t row = 0; row < rows_.size(); ++row) {
    const uint8_t* const codes = codes_.data() + row * width;
    const double* const deviations = deviations_.data() + row * groups;
    for (size_t col = 0; col < width; ++col) {
      counts[codes[col]] += !std::isnan(deviations[group_of_[col]]);
    }
  }
  for (size_t code = 0; code < shares.size(); ++code) {
    shares[code] = static_cast<double>(counts[code]);
    total += shares[code];
  }
  for (double& share : shares) share /= std::max(1.0, total);
  return shares;
}

double BlockSample::mean_step() const {
  const auto width = static_cast<size_t>(weight_.k), groups = static_cast<size_t>(groups_);
  double sum = 0, total = 0;
  for (size_t row = 0; row < rows_.size(); ++row) {
    const uint8_t* const codes = codes_.data() + row * width;
    for (size_t col = 0; col < width; ++col) {
      const size_t block = row * groups + static_cast<size_t>(group_of_[col]);
      if (std::isnan(deviations_[block])) continue;
      sum += codes[col] - zeros_[block], total += 1;
    }
  }
  return sum / std::max(1.0, total);
}

int64_t BlockSample::constant_rows() const {
  const auto width = static_cast<size_t>(weight_.k);
  int64_t count = 0;
  for (size_t i = 0; i < rows_.size() && groups_ > 3; ++i) {
    const auto row = std::span(codes_).subspan(i * width, width);
    if (!std::ranges::all_of(row, [&](uint8_t code) { return code == row.front(); })) continue;
    const double first = log_scale(rows_[i] * groups_);
    bool differs = false;
    for (int64_t g = 1; g < groups_; ++g) differs = differs || log_scale(rows_[i] * groups_ + g) != first;
    count += differs && !std::isnan(first);
  }
  return count;
}

int64_t BlockSample::long_groups() const {
  const auto is_short = [&](int64_t group) { return std::ranges::count(group_of_, group) < 16; };
  return is_short(0) ? 0 : is_short(groups_ - 1) ? groups_ - 1 : groups_;
}

int64_t BlockSample::constant_blocks() const {
  const int64_t whole = long_groups();
  std::map<double, int64_t> scales;
  int64_t count = 0;
  for (size_t at = 0; at < deviations_.size(); ++at) {
    if (!std::isnan(deviations_[at]) || static_cast<int64_t>(at) % groups_ >= whole) continue;
    const auto groups = static_cast<size_t>(groups_);
    const double scale = log_scale(rows_[at / groups] * groups_ + static_cast<int64_t>(at % groups));
    if (!std::isnan(scale)) ++count, ++scales[scale];
  }
  int64_t commonest = 0;
  for (const auto& [scale, blocks] : scales) commonest = std::max(commonest, blocks);
  return count - commonest;
}

int64_t BlockSample::lone_constant_blocks() const {
  const int64_t whole = long_groups();
  const auto groups = static_cast<size_t>(groups_);
  const auto scale_of = [&](size_t at) {
    return log_scale(rows_[at / groups] * groups_ + static_cast<int64_t>(at % groups));
  };
  std::vector<size_t> constant;
  std::vector<double> scales;
  double least = INFINITY;
  for (size_t at = 0; at < deviations_.size(); ++at) {
    const double scale = scale_of(at);
    if (std::isnan(scale) || static_cast<int64_t>(at) % groups_ >= whole) continue;
    least = std::min(least, scale);
    if (std::isnan(deviations_[at])) {
      constant.push_back(at);
    } else {
      scales.push_back(scale);
    }
  }
  if (constant.empty() || scales.empty()) return 0;
  const double usual = median(std::move(scales));
  // What is smaller than the smallest scale of a type is rounded to nothing with it.
  return std::ranges::count_if(
      constant, [&](size_t at) { return std::abs(scale_of(at) - usual) < std::log(4.0) && scale_of(at) > least; });
}

int64_t BlockSample::one_value_blocks() const {
  if (weight_.scheme.family != SchemeFamily::integer) return 0;
  constexpr double half_a_step = 0.5;
  const int64_t whole = long_groups();
  const auto groups = static_cast<size_t>(groups_);
  int64_t count = 0;
  for (size_t at = 0; at < deviations_.size(); ++at) {
    if (!std::isnan(deviations_[at]) || static_cast<int64_t>(at % groups) >= whole) continue;
    const bool scaled = !std::isnan(log_scale(rows_[at / groups] * groups_ + static_cast<int64_t>(at % groups)));
    count += scaled && std::abs(means_[at] - zeros_[at]) > half_a_step;
  }
  return count;
}

bool BlockSample::rows_are_alike() const {
  constexpr double most_in_common = 0.25;
  const auto width = static_cast<size_t>(weight_.k);
  double common = 0;
  for (size_t i = 0; i + 1 < rows_.size(); ++i) {
    double product = 0, one = 0, other = 0, of_one = 0, of_other = 0;
    for (size_t col = 0; col < width; ++col) {
      const double a = level(i, col), b = level(i + 1, col);
      product += a * b, one += a * a, other += b * b, of_one += a, of_other += b;
    }
    const auto count = static_cast<double>(width);
    one -= of_one * of_one / count, other -= of_other * of_other / count, product -= of_one * of_other / count;
    if (one > 0 && other > 0) common += product * product / (one * other);
  }
  return common > most_in_common * static_cast<double>(rows_.size());
}

double BlockSample::kurtosis() const {
  const auto groups = static_cast<size_t>(groups_), width = static_cast<size_t>(weight_.k);
  double squares = 0, fourths = 0;
  for (size_t i = 0; i < rows_.size(); ++i) {
    for (size_t col = 0; col < width; ++col) {
      const double away = level(i, col) - means_[i * groups + static_cast<size_t>(group_of_[col])];
      squares += away * away, fourths += away * away * away * away;
    }
  }
  return squares > 0 ? fourths * static_cast<double>(levels_.size()) / (squares * squares) : 0;
}

EvenZeros BlockSample::even_zeros() const {
  const bool asked = weight_.scheme.family == SchemeFamily::integer && weight_.scheme.bits >= 3;
  if (!asked || weight_.k < 32 * groups_ || deviations_.size() < 64) return {};
  EvenZeros found;
  const double zero = zeros_.front();
  found.zero = static_cast<int64_t>(zero);
  found.even = std::ranges::all_of(zeros_, [&](double other) { return other == zero; });
  if (!found.even) return found;
  double sum = 0, squares = 0, within = 0;
  std::vector<double> lean;
  for (size_t at = 0; at < deviations_.size(); ++at) {
    if (std::isnan(deviations_[at])) continue;
    sum += means_[at], squares += means_[at] * means_[at], within += std::exp(2 * deviations_[at]);
    lean.push_back(std::abs(means_[at] - zero));
  }
  const auto count = static_cast<double>(lean.size());
  if (lean.size() < 64 || !(within > 0)) return found;
  const double size = static_cast<double>(weight_.k) / static_cast<double>(groups_);
  found.ratio = (squares / count - sum / count * (sum / count)) / (within / count / size);
  const auto quarter = lean.begin() + static_cast<std::ptrdiff_t>(3 * lean.size() / 4);
  std::ranges::nth_element(lean, quarter);
  double leaning = 0, reach = 0;
  for (size_t at = 0; at < deviations_.size(); ++at) {
    if (std::isnan(deviations_[at]) || std::abs(means_[at] - zero) < *quarter) continue;
    leaning += 1, reach += reaches_both_ends(at);
  }
  found.ends = reach / std::max(1.0, leaning);
  return found;
}

FarZeros BlockSample::far_zeros() const {
  const bool asked = weight_.scheme.family == SchemeFamily::integer && weight_.scheme.asymmetric;
  if (!asked || weight_.scheme.bits < 4 || weight_.k < 64 * groups_ || deviations_.size() < 256) return {};
  const auto groups = static_cast<size_t>(groups_);
  const double least_steps_away = 0.3 * ((1 << weight_.scheme.bits) - 1);
  FarZeros found{.steps = INFINITY};
  for (size_t at = 0; at < deviations_.size(); ++at) {
    if (std::isnan(deviations_[at]) || !reaches_both_ends(at)) continue;
    const double steps = std::abs(means_[at] - zeros_[at]);
    if (steps < least_steps_away) {
      found.others = std::max(found.others, steps);
      continue;
    }
    if (found.groups++ == 0) found.row = rows_[at / groups], found.group = static_cast<int64_t>(at % groups);
    found.steps = std::min(found.steps, steps);
  }
  return found;
}

int64_t BlockSample::endless_blocks() const {
  // The largest weight of an integer block lies half a step from its end: which code it gets, a rounded scale decides.
  if (!by_largest_ || weight_.k % groups_ != 0 || weight_.scheme.family == SchemeFamily::integer) return 0;
  // Nested scales are themselves rounded, up too: then the largest weight misses its end.
  if (weight_.scheme.scale == formats::ScaleType::nested) return 0;
  const auto width = static_cast<size_t>(weight_.k), groups = static_cast<size_t>(groups_);
  // Errors that were fed back move the largest weight of a block by a step: the levels beside the ends count, too.
  if (table_.size() < 8) return 0;
  auto sorted = table_;
  std::ranges::sort(sorted);
  std::vector<char> is_end;
  for (const float level : table_) is_end.push_back(level <= sorted[1] || level >= sorted[sorted.size() - 2]);
  const double least = least_fine(log_scales_);
  int64_t count = 0;
  std::vector<char> has(groups);
  for (size_t i = 0; i < rows_.size(); ++i) {
    std::ranges::fill(has, 0);
    for (size_t col = 0; col < width; ++col) {
      has[static_cast<size_t>(group_of_[col])] |= is_end[codes_[i * width + col]];
    }
    for (size_t g = 0; g < groups; ++g) {
      const bool fine = log_scale(rows_[i] * groups_ + static_cast<int64_t>(g)) >= least;
      count += has[g] == 0 && fine && !std::isnan(deviations_[i * groups + g]);
    }
  }
  return count;
}

std::vector<float> BlockSample::table() const {
  if (weight_.scheme.family == SchemeFamily::integer) return {};
  auto levels = table_;
  // Of these a power of two may stand in the table instead of the scales.
  const bool any_size = weight_.scheme.family == SchemeFamily::kbit || weight_.scheme.family == SchemeFamily::rotated;
  if (!any_size) return levels;
  float largest = 0;
  for (const float level : levels) largest = std::max(largest, std::abs(level));
  for (float& level : levels) level = largest > 0 ? level / largest : level;
  return levels;
}

double BlockSample::ends_over_middle() const {
  if (weight_.scheme.family != SchemeFamily::integer) return 0;
  const auto groups = static_cast<size_t>(groups_), width = static_cast<size_t>(weight_.k);
  const int highest = 1 << (weight_.scheme.bits - 1);
  double squares[2] = {0, 0};
  for (size_t i = 0; i < rows_.size(); ++i) {
    for (const int which : {0, 1}) {
      for (size_t col = 0; col < width; ++col) {
        const int code = codes_[i * width + col] ^ (which == 0 ? 0 : highest);
        const double from_zero = code - zeros_[i * groups + static_cast<size_t>(group_of_[col])];
        squares[which] += from_zero * from_zero;
      }
    }
  }
  return squares[1] > 0 ? squares[0] / squares[1] : 0;
}

double BlockSample::scale_spread() const {
  double sum = 0, count = 0;
  for (const int64_t row : rows_) {
    double mean = 0, squares = 0, scales = 0;
    for (int64_t group = 0; group < groups_; ++group) {
      const double scale = log_scale(row * groups_ + group);
      if (std::isnan(scale)) continue;
      mean += scale, squares += scale * scale, scales += 1;
    }
    if (scales > 1) sum += squares - mean * mean / scales, count += scales - 1;
  }
  // Of whole rows: those of neighbours.
  for (size_t i = 1; groups_ == 1 && i < rows_.size(); ++i) {
    const double difference = log_scale(rows_[i]) - log_scale(rows_[i - 1]);
    if (!std::isnan(difference)) sum += difference * difference / 2, count += 1;
  }
  return count > 0 ? std::sqrt(std::max(0.0, sum) / count) : 0;
}

double BlockSample::size() const {
  std::vector<double> sizes;
  for (size_t at = 0; at < means_.size(); ++at) {
    const auto groups = static_cast<size_t>(groups_);
    const double scale = log_scale(rows_[at / groups] * groups_ + static_cast<int64_t>(at % groups));
    const double variance = std::isnan(deviations_[at]) ? 0 : std::exp(2 * deviations_[at]);
    const double mean = means_[at] - zeros_[at];
    sizes.push_back(std::isnan(scale) ? 0 : std::sqrt(mean * mean + variance) * std::exp(scale));
  }
  return sizes.empty() ? 0 : median(std::move(sizes));
}

bool BlockSample::unscaled() const {
  return std::ranges::all_of(log_scales_, [](double scale) { return scale == 0; });
}

Slope BlockSample::scale_match() const {
  std::vector<int64_t> order;
  for (const int64_t row : rows_) {
    for (int64_t group = 0; group < groups_; ++group) order.push_back(row * groups_ + group);
  }
  return match_of(order);
}

Slope BlockSample::scale_match(const PackedWeight& other) const {
  std::vector<double> scales;
  for (const int64_t row : rows_) {
    for (int64_t group = 0; group < groups_; ++group) {
      const float scale = std::abs(formats::scale_at(other, row * groups_ + group));
      scales.push_back(scale > 0 ? std::log(double{scale}) : nothing);
    }
  }
  return match_of_scales(scales);
}

Reordered BlockSample::best_order() const {
  Reordered best;
  for (const ScaleOrder& other : orders) {
    std::vector<int64_t> order;
    for (const int64_t row : rows_) {
      for (int64_t group = 0; group < groups_; ++group) order.push_back(other.from(row, group, weight_.n, groups_));
    }
    const Slope match = match_of(order);
    if (match.value > best.match.value) best = {other.name, match};
  }
  return best;
}

Spread BlockSample::spread() const {
  Spread result;
  const auto width = static_cast<size_t>(weight_.k), groups = static_cast<size_t>(groups_);
  double sums[2] = {0, 0}, squares[2] = {0, 0};
  if (rows_.size() < 2) return result;
  std::vector<double> energy[2] = {std::vector<double>(groups), std::vector<double>(groups)};
  for (size_t i = 0; i < rows_.size(); ++i) {
    for (auto& each : energy) std::ranges::fill(each, 0.0);
    for (size_t col = 0; col < width; ++col) {
      const auto group = static_cast<size_t>(group_of_[col]);
      const double here = level(i, col), other = level((i + 1 + col * 7) % rows_.size(), col);
      energy[0][group] += here * here, energy[1][group] += other * other;
    }
    for (size_t group = 0; group < groups; ++group) {
      if (!(energy[0][group] > 0) || !(energy[1][group] > 0)) continue;
      for (const int which : {0, 1}) {
        const double value = std::log(energy[which][group]);
        sums[which] += value, squares[which] += value * value;
      }
      result.blocks += 1;
    }
  }
  if (result.blocks < 2) return {};
  const auto variance = [&](int which) {
    const double mean = sums[which] / result.blocks;
    return std::max(0.0, squares[which] / result.blocks - mean * mean);
  };
  result.stored = variance(0), result.mixed = variance(1);
  return result;
}

Slope BlockSample::zero_match() const { return weight_.scheme.asymmetric ? slope(zeros_, means_) : Slope{}; }

}  // namespace w4q::verify
