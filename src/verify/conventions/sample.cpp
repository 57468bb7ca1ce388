#include "verify/conventions/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "formats/integer.h"

namespace w4q::verify {
namespace {

constexpr int64_t most_blocks = 64;

std::vector<int64_t> sample_rows(int64_t n) {
  const int64_t blocks = std::max<int64_t>(1, n / 8), taken = std::min(blocks, most_blocks);
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < taken; ++i) {
    const int64_t first = i * blocks / taken * 8;
    for (int64_t row = first; row < std::min(first + 8, n); ++row) rows.push_back(row);
  }
  return rows;
}

}  // namespace

Slope slope(std::span<const double> x, std::span<const double> y) {
  double mean_x = 0, mean_y = 0, covariance = 0, variance = 0, variance_y = 0;
  for (size_t i = 0; i < x.size(); ++i) mean_x += x[i], mean_y += y[i];
  mean_x /= static_cast<double>(x.size());
  mean_y /= static_cast<double>(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    covariance += (x[i] - mean_x) * (y[i] - mean_y);
    variance += (x[i] - mean_x) * (x[i] - mean_x);
    variance_y += (y[i] - mean_y) * (y[i] - mean_y);
  }
  if (!(variance > 0) || x.size() < 3) return {};
  const double value = covariance / variance, rest = std::max(0.0, variance_y - value * covariance);
  return {value, std::sqrt(rest / variance / static_cast<double>(x.size() - 2))};
}

double error_by_place(std::span<const double> x, std::span<const double> y, std::span<const size_t> place,
                      const Slope& found, size_t places) {
  const auto count = static_cast<double>(x.size());
  const double mean_x = std::accumulate(x.begin(), x.end(), 0.0) / count,
               mean_y = std::accumulate(y.begin(), y.end(), 0.0) / count;
  std::vector<double> score(places);
  double squares = 0, sum = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double dx = x[i] - mean_x;
    squares += dx * dx;
    score[place[i]] += dx * (y[i] - mean_y - found.value * dx);
  }
  for (const double each : score) sum += each * each;
  const auto groups = static_cast<double>(places);
  return squares > 0 && places > 1 ? std::sqrt(sum * groups / (groups - 1)) / squares : 0;
}

WeightSample::WeightSample(const formats::PackedWeight& canonical)
    : weight_(canonical),
      groups_(formats::integer_groups(canonical.scheme, canonical.k)),
      rows_(sample_rows(canonical.n)) {
  const auto groups = static_cast<size_t>(groups_), width = static_cast<size_t>(canonical.k);
  codes_.resize(rows_.size() * width);
  zeros_.resize(rows_.size() * groups);
  means_.resize(zeros_.size());
  deviations_.resize(zeros_.size());
  scales_.resize(static_cast<size_t>(canonical.n) * groups);
  for (int64_t r = 0; r < canonical.n; ++r) {
    formats::integer_read_scales(canonical, r, std::span(scales_).subspan(static_cast<size_t>(r) * groups, groups));
  }
  for (size_t col = 0; col < width; ++col) groups_of_.push_back(static_cast<int32_t>(stored_group(col)));
  std::vector<int64_t> count(groups), sum(groups), squares(groups);
  for (const int32_t group : groups_of_) ++count[static_cast<size_t>(group)];
  for (size_t i = 0; i < rows_.size(); ++i) {
    const auto codes = std::span(codes_).subspan(i * width, width);
    formats::integer_read_codes(canonical, rows_[i], codes);
    formats::integer_read_zeros(canonical, rows_[i], std::span(zeros_).subspan(i * groups, groups));
    for (auto* series : {&sum, &squares}) std::ranges::fill(*series, 0);
    for (size_t col = 0; col < width; ++col) {
      const auto group = static_cast<size_t>(groups_of_[col]);
      const int code = codes[col];
      sum[group] += code, squares[group] += code * code;
    }
    for (size_t group = 0; group < groups; ++group) {
      const auto inputs = static_cast<double>(std::max<int64_t>(1, count[group]));
      const double mean = static_cast<double>(sum[group]) / inputs;
      means_[i * groups + group] = mean;
      deviations_[i * groups + group] =
          std::sqrt(std::max(0.0, static_cast<double>(squares[group]) / inputs - mean * mean));
    }
  }
}

int64_t WeightSample::stored_group(size_t col) const {
  if (weight_.scheme.act_order) return weight_.plane(formats::PlaneRole::group_index).bytes.as<int32_t>()[col];
  return static_cast<int64_t>(col) / formats::integer_group_size(weight_.scheme, weight_.k);
}

bool WeightSample::can_read(const Reading& reading) const noexcept {
  if (reading.rows != plain_order && weight_.n % 8 != 0) return false;
  if (reading.cols != plain_order && weight_.k % 8 != 0) return false;
  return !reading.transposed_scales || (groups_ > 1 && weight_.n > 1);
}

float WeightSample::scale(int64_t i, int64_t group, const Reading& reading) const noexcept {
  const int64_t at = row(i) * groups_ + group;
  if (!reading.transposed_scales) return scales_[static_cast<size_t>(at)];
  // Outputs and groups exchanged: number `at` of the other order.
  return scales_[static_cast<size_t>(at % weight_.n * groups_ + at / weight_.n)];
}

Lean WeightSample::lean() const {
  double sum = 0, squares = 0;
  for (size_t at = 0; at < means_.size(); ++at) {
    const double lean = means_[at] - zeros_[at];
    sum += lean, squares += lean * lean;
  }
  const auto count = static_cast<double>(means_.size());
  const double mean = sum / count, variance = std::max(0.0, squares / count - mean * mean);
  return {mean, std::sqrt(variance / std::max(1.0, count - 1))};
}

double WeightSample::zero_mismatch(const Reading& reading) const {
  const double mean = lean().value;
  double sum = 0;
  for (int64_t i = 0; i < size(); ++i) {
    for (int64_t group = 0; group < groups_; ++group) {
      const double difference = mean_code(source_row(i, reading), group) - zero(i, group) - mean;
      sum += difference * difference;
    }
  }
  return sum / static_cast<double>(means_.size());
}

Slope WeightSample::scale_match(const Reading& reading) const {
  std::vector<double> deviations, scales;
  for (int64_t i = 0; i < size(); ++i) {
    for (int64_t group = 0; group < groups_; ++group) {
      const double deviation = deviations_[static_cast<size_t>(source_row(i, reading) * groups_ + group)];
      const double stored = std::abs(scale(i, group, reading));
      if (!(deviation > 0) || !(stored > 0)) continue;
      deviations.push_back(std::log(deviation));
      scales.push_back(-std::log(stored));
    }
  }
  return slope(deviations, scales);
}

void WeightSample::decode(int64_t i, const Reading& reading, std::span<float> out) const {
  const auto width = static_cast<size_t>(weight_.k);
  const uint8_t* const codes = codes_.data() + static_cast<size_t>(source_row(i, reading)) * width;
  std::vector<std::pair<int, float>> offsets;  // and scales, by group
  for (int64_t group = 0; group < groups_; ++group)
    offsets.emplace_back(zero(i, group) + reading.zero, scale(i, group, reading));
  const bool plain = reading.cols == plain_order;
  for (size_t col = 0; col < width; ++col) {
    const auto& [offset, scale] = offsets[static_cast<size_t>(groups_of_[col])];
    const size_t place = plain ? col : col - col % 8 + reading.cols[col % 8];
    out[col] = static_cast<float>(codes[place] - offset) * scale;
  }
}

std::vector<double> WeightSample::column_energy() const {
  std::vector<double> energy(static_cast<size_t>(weight_.k));
  std::vector<float> values(energy.size());
  for (int64_t i = 0; i < size(); ++i) {
    decode(i, {}, values);
    for (size_t col = 0; col < values.size(); ++col) {
      energy[col] += static_cast<double>(values[col]) * static_cast<double>(values[col]);
    }
  }
  return energy;
}

double profile_match(std::span<const double> a, std::span<const double> b, const Order& order) {
  std::vector<double> x, y;
  if (a.size() != b.size() || (order != plain_order && a.size() % 8 != 0)) return 0;
  for (size_t col = 0; col < a.size(); ++col) {
    const double left = order == plain_order ? a[col] : a[col - col % 8 + order[col % 8]], right = b[col];
    if (!(left > 0) || !(right > 0)) continue;
    x.push_back(std::log(left));
    y.push_back(std::log(right));
  }
  const double forward = slope(x, y).value, backward = slope(y, x).value;
  return std::copysign(std::sqrt(std::abs(forward * backward)), forward);
}

}  // namespace w4q::verify
