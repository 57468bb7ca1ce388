// Blocks whose scales, or sizes, stand out of their rows and places: BlockSample.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>

#include "core/parallel.h"
#include "formats/integer.h"
#include "formats/scheme_registry.h"
#include "formats/table/table_format.h"
#include "verify/median.h"
#include "verify/statistics/block_sample.h"

namespace w4q::verify {
namespace {

using formats::SchemeFamily;

constexpr double nothing = std::numeric_limits<double>::quiet_NaN();

/// Log deviation of the codes of a block with an outlier, below that of most.
constexpr double outlier_below = 0.3;

}  // namespace

bool BlockSample::outliers_show(double usual) const {
  const auto [least, most] = std::ranges::minmax(table_);
  const double end = weight_.scheme.asymmetric ? most - least
                                               : std::max(std::abs(least), std::abs(most)) *
                                                     (weight_.scheme.family == SchemeFamily::integer ? 0.5 : 1);
  const double size = static_cast<double>(weight_.k) / static_cast<double>(groups_);
  // Two values at the end, all others nothing; of ranges from the least to the largest one value.
  const double few = weight_.scheme.asymmetric ? 1 : 2;
  return usual - outlier_below > std::log(end * std::sqrt(few * (size - few)) / size);
}

void BlockSample::Loudest::add(const Loudest& later) {
  if (later.above > above) {
    row = later.row, group = later.group;
    next = std::max(std::exchange(above, later.above), later.next);
  } else {
    next = std::max(next, later.above);
  }
}

BlockSample::Loudest BlockSample::loudest() const {
  const auto groups = static_cast<size_t>(groups_);
  if (rows_.size() < 8 || groups < 4) return {};
  std::vector<double> scales(deviations_.size(), nothing), column, of_group(groups);
  for (size_t i = 0; i < rows_.size(); ++i) {
    std::vector<double> row;
    for (size_t g = 0; g < groups; ++g) {
      const double scale = log_scale(rows_[i] * groups_ + static_cast<int64_t>(g));
      scales[i * groups + g] = scale;
      if (!std::isnan(scale)) row.push_back(scale);
    }
    const double middle = median(std::move(row));
    for (size_t g = 0; g < groups; ++g) scales[i * groups + g] -= middle;
  }
  for (size_t g = 0; g < groups; ++g) {
    column.clear();
    for (size_t at = g; at < scales.size(); at += groups) {
      if (!std::isnan(scales[at])) column.push_back(scales[at]);
    }
    of_group[g] = median(column);
  }
  std::vector<double> magnitudes, spreads;
  for (const double deviation : deviations_) {
    if (!std::isnan(deviation)) spreads.push_back(deviation);
  }
  const double usual = median(spreads);
  if (!outliers_show(usual)) return {};
  Loudest result{0, 0, -INFINITY, -INFINITY, 0};
  for (size_t at = 0; at < scales.size(); ++at) {
    const double above = scales[at] - of_group[at % groups];
    if (std::isnan(above) || std::isnan(deviations_[at])) continue;
    magnitudes.push_back(std::abs(above));
    // An outlier makes a scale large and all other codes small.
    if (deviations_[at] < usual - outlier_below) continue;
    if (above > result.above) {
      result = {rows_[at / groups], static_cast<int64_t>(at % groups), above, result.above, 0};
    } else {
      result.next = std::max(result.next, above);
    }
  }
  result.spread = 1.4826 * median(std::move(magnitudes));
  return result;
}

namespace {

/// Log scales beyond the medians of their rows and places, in log; NaN: no scale. `of_place` from the same rows.
double beyond_row(std::span<const double> row, std::span<const double> of_place, std::vector<double>& kept) {
  kept.clear();
  for (size_t g = 0; g < row.size(); ++g) {
    if (!std::isnan(row[g]) && !std::isnan(of_place[g])) kept.push_back(row[g] - of_place[g]);
  }
  return median(kept);
}

}  // namespace

BlockSample::Loudest BlockSample::loudest_values(double sign) const {
  const auto groups = static_cast<size_t>(groups_);
  if (rows_.size() < 8 || groups < 4) return {};
  const auto log_row = [&](int64_t row) {
    return std::span(log_scales_).subspan(static_cast<size_t>(row) * groups, groups);
  };
  std::vector<double> of_place(groups), column, kept, spreads, sizes;
  for (size_t g = 0; g < groups; ++g) {
    column.clear();
    for (const int64_t row : rows_) {
      if (const double scale = log_row(row)[g]; !std::isnan(scale)) column.push_back(scale);
    }
    of_place[g] = column.empty() ? nothing : median(column);
  }
  for (const double deviation : deviations_) {
    if (!std::isnan(deviation)) spreads.push_back(deviation);
  }
  const double usual = median(spreads);
  if (sign > 0 && !outliers_show(usual)) return {};
  std::vector<double> of_row;
  for (size_t i = 0; i < rows_.size(); ++i) {
    of_row.push_back(beyond_row(log_row(rows_[i]), of_place, kept));
    for (size_t g = 0; g < groups; ++g) {
      const double size = log_row(rows_[i])[g] - of_place[g] - of_row.back() + deviations_[i * groups + g] - usual;
      if (!std::isnan(size)) sizes.push_back(std::abs(size));
    }
  }
  Loudest result{0, 0, -INFINITY, -INFINITY, 1.4826 * median(std::move(sizes))};
  const double least = std::max(least_loud, most_spreads * result.spread);
  // Of each range of rows its own, put together in their order: the first of equals, as one after the other.
  constexpr int64_t grain = 512;
  std::vector<Loudest> parts(static_cast<size_t>((weight_.n + grain - 1) / grain), result);
  parallel_for(weight_.n, grain, [&](int64_t begin, int64_t end) {
    Loudest& part = parts[static_cast<size_t>(begin / grain)];
    std::vector<double> values;
    for (int64_t row = begin; row < end; ++row) {
      const auto scales = log_row(row);
      double most = -INFINITY, sum = 0, count = 0;
      for (size_t g = 0; g < groups; ++g) {
        const double above = sign * (scales[g] - of_place[g]);
        if (std::isnan(above)) continue;
        most = std::max(most, above), sum += above, count += 1;
      }
      // A mean is no more than the largest one away from the median.
      if (count == 0 || most - sum / count < least / 2) continue;
      const double middle = beyond_row(scales, of_place, values);
      if (most - sign * middle < least / 2) continue;
      const auto deviations = deviations_of(row);
      for (size_t g = 0; g < groups; ++g) {
        const double size = sign * (scales[g] - of_place[g] - middle + deviations[g] - usual);
        if (std::isnan(size) || deviations[g] < usual - outlier_below) continue;
        part.add({row, static_cast<int64_t>(g), size, -INFINITY, result.spread});
      }
    }
  });
  for (const Loudest& part : parts) result.add(part);
  return result;
}

std::vector<double> BlockSample::deviations_of(int64_t row) const {
  const auto groups = static_cast<size_t>(groups_), width = static_cast<size_t>(weight_.k);
  std::vector<uint8_t> codes(width);
  if (weight_.scheme.family == SchemeFamily::integer) {
    formats::integer_read_codes(weight_, row, codes);
  } else {
    formats::table_read_codes(formats::scheme_row(weight_.scheme.family).table(weight_.scheme), weight_, row, codes);
  }
  std::vector<double> count(groups), sum(groups), squares(groups), result(groups, nothing);
  for (size_t col = 0; col < width; ++col) {
    const auto group = static_cast<size_t>(group_of_[col]);
    const double value = table_[codes[col]];
    count[group] += 1, sum[group] += value, squares[group] += value * value;
  }
  for (size_t g = 0; g < groups; ++g) {
    const double mean = sum[g] / std::max(1.0, count[g]), variance = squares[g] / std::max(1.0, count[g]) - mean * mean;
    result[g] = log_deviation(variance);
  }
  return result;
}

}  // namespace w4q::verify
