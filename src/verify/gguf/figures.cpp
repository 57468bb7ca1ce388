#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "formats/gguf_parts.h"
#include "verify/gguf/blocks.h"
#include "verify/median.h"

namespace w4q::verify {
namespace of_blocks {
namespace {

using formats::GgufForm;
using formats::GgufScales;

constexpr int64_t all_up_to = int64_t{1} << 18, sampled_weights = int64_t{1} << 17;
constexpr double nothing = std::numeric_limits<double>::quiet_NaN();

/// Units of types with minimums are sizes; of others the sign of one says where the largest weight is.
bool is_unsigned(const GgufForm& form) noexcept { return form.highest_minimum > 0; }

/// Places of two series of which one is taken over the other.
struct Series {
  std::vector<double> x, y;
  std::vector<size_t> place;

  void add(double one, double two, size_t at) {
    if (!std::isfinite(one) || !std::isfinite(two)) return;
    x.push_back(one), y.push_back(two), place.push_back(at);
  }
  /// From `first` on: sizes of rows say nothing of whether a row's scales belong to its codes.
  void center_from(size_t first) {
    const auto count = static_cast<double>(x.size() - first);
    double mean_x = 0, mean_y = 0;
    for (size_t at = first; at < x.size(); ++at) mean_x += x[at], mean_y += y[at];
    for (size_t at = first; at < x.size(); ++at) x[at] -= mean_x / count, y[at] -= mean_y / count;
  }
  /// Sizes of columns likewise.
  void center_places(size_t places) {
    std::vector<double> count(places), mean_x(places), mean_y(places);
    for (size_t at = 0; at < x.size(); ++at) {
      count[place[at]] += 1, mean_x[place[at]] += x[at], mean_y[place[at]] += y[at];
    }
    for (size_t at = 0; at < x.size(); ++at) {
      x[at] -= mean_x[place[at]] / count[place[at]], y[at] -= mean_y[place[at]] / count[place[at]];
    }
  }
  Slope of(size_t places) const {
    Slope found = slope(x, y);
    if (found.error > 0) found.error = std::max(found.error, error_by_place(x, y, place, found, places));
    return found;
  }
};

class Sampler {
 public:
  Sampler(const GgufForm& form, int64_t k) : form_(form), k_(k), levels_(static_cast<size_t>(form.block)) {
    for (size_t level = 0; level < levels_by_index_.size(); ++level) {
      levels_by_index_[level] =
          static_cast<int>(level) < form.levels() ? double{form.level(static_cast<int>(level))} : 0;
    }
  }

  void add_row(std::span<const std::byte> row) {
    const auto width = static_cast<size_t>(describe(form_.type).block_bytes);
    const size_t first = match_.x.size(), first_unit = units_.x.size();
    for (size_t block = 0; block * width < row.size(); ++block) add_block(row.subspan(block * width, width), block);
    constexpr int64_t few = 3;
    if (k_ / form_.part > few) match_.center_from(first);
    if (k_ / form_.block > few) units_.center_from(first_unit);
  }

  GgufFigures figures() {
    const auto parts = static_cast<size_t>(k_ / form_.part), blocks = static_cast<size_t>(k_ / form_.block);
    found_.match = match_.of(parts);
    if (form_.has_offset()) found_.minimums = slope(offsets_.x, offsets_.y);
    if (form_.nests()) units_.center_places(blocks), found_.units = units_.of(blocks);
    found_.spread = deviation(match_.y);
    found_.ends = static_cast<double>(reaching_) / static_cast<double>(std::max<int64_t>(1, found_.fine));
    found_.lean = deviations_ > 0 ? means_ / deviations_ : 0;
    found_.size = median(std::move(sizes_));
    const auto weights = static_cast<double>(std::max<int64_t>(1, found_.parts * form_.part));
    int64_t most = 0, in_use = 0;
    for (const int64_t count : counts_) {
      most = std::max(most, count);
      in_use += static_cast<double>(count) * 500 > weights;
    }
    found_.commonest = static_cast<double>(most) / weights;
    found_.levels_in_use = static_cast<double>(in_use) / form_.levels();
    found_.no_minimums = form_.highest_minimum > 0 && !has_minimum_;
    found_.near_one = static_cast<double>(near_one_) / static_cast<double>(std::max<int64_t>(1, found_.blocks));
    found_.one_unit = found_.blocks > 1 && one_unit_;
    return found_;
  }

 private:
  struct Part {
    double mean = 0, deviation = 0;  // of the levels
    bool reaches = false;
  };

  static double deviation(const std::vector<double>& values) {
    double squares = 0;
    for (const double value : values) squares += value * value;
    return values.empty() ? 0 : std::sqrt(squares / static_cast<double>(values.size()));
  }

  Part part_of(std::span<const uint8_t> levels) {
    double sum = 0, squares = 0;
    int least = 255, most = 0;
    for (const uint8_t level : levels) {
      const double value = levels_by_index_[level];
      sum += value, squares += value * value;
      least = std::min<int>(least, level), most = std::max<int>(most, level);
      ++counts_[level];
    }
    const auto count = static_cast<double>(levels.size());
    const double mean = sum / count, variance = squares / count - mean * mean;
    const int last = form_.levels() - 1, slack = form_.levels() > 64 ? 8 : form_.levels() > 8 ? 1 : 0;
    const bool low = least <= slack, high = most >= last - slack;
    return {mean, least == most ? 0 : std::sqrt(std::max(variance, 0.0)),
            form_.has_offset() ? low && high : low || high};
  }

  void count_unit(const GgufScales& scales) {
    const bool offset = form_.highest_minimum > 0;
    found_.invalid += !std::isfinite(scales.d) || (form_.has_offset() && !std::isfinite(scales.d_minimum));
    found_.negative += is_unsigned(form_) && (scales.d < 0 || (offset && scales.d_minimum < 0));
    if (found_.blocks == 0) first_unit_ = scales.d;
    one_unit_ = one_unit_ && scales.d == first_unit_;
    near_one_ += std::abs(scales.d) >= 0.5f && std::abs(scales.d) < 2;
    ++found_.blocks;
  }

  void add_block(std::span<const std::byte> bytes, size_t block) {
    const GgufScales scales = formats::read_gguf_block(form_, bytes, levels_);
    count_unit(scales);
    double said = 0;
    int64_t counted = 0;
    bool varies = false, scaled = false;
    for (size_t j = 0; j < static_cast<size_t>(form_.parts()); ++j) {
      const auto width = static_cast<size_t>(form_.part);
      const Part part = part_of(std::span(levels_).subspan(j * width, width));
      const double scale = scales.scales[j], step = std::abs(scales.d * scale);
      const double offset = form_.has_offset() ? double{scales.d_minimum} * scales.minimums[j] : 0;
      has_minimum_ = has_minimum_ || offset != 0;
      const bool coarse = is_coarse(scale) || is_rounded(scales.d);
      add_part(part, scales.d * scale, offset, block * static_cast<size_t>(form_.parts()) + j, coarse);
      varies = varies || part.deviation > 0, scaled = scaled || scale != 0;
      if (part.deviation > 0 && step > 0) said += std::log(part.deviation * std::abs(scale)), ++counted;
    }
    found_.unscaled += varies && !scaled && scales.d != 0;
    if (counted > 0 && scales.d != 0 && !is_rounded(scales.d)) {
      units_.add(said / static_cast<double>(counted), -std::log(std::abs(double{scales.d})), block);
    }
  }

  /// A small multiple of its block's unit is far from the scale that its codes wanted: loud columns make many so.
  bool is_coarse(double scale) const { return form_.nests() && std::abs(scale) * 8 < form_.highest_scale; }

  /// Units of weights that another norm makes up for are so small that f16 rounds them by a thirtieth and more.
  bool is_rounded(float unit) const {
    constexpr float least = 0x1p-20F;
    return form_.unit == formats::GgufUnit::f16 && std::abs(unit) < least;
  }

  void add_part(const Part& part, double step, double offset, size_t place, bool coarse) {
    ++found_.parts;
    if (!std::isfinite(step) || !std::isfinite(offset)) return;
    const double size = std::abs(step);
    found_.empty += step == 0 && part.deviation > 0;
    found_.constant += step != 0 && part.deviation == 0;
    const double mean = part.mean * step - offset;
    sizes_.push_back(std::hypot(mean, part.deviation * size));
    means_ += mean, deviations_ += part.deviation * size;
    if (step == 0 || part.deviation == 0 || coarse) return;
    ++found_.fine, reaching_ += part.reaches;
    match_.add(std::log(part.deviation), -std::log(size), place);
    if (form_.has_offset()) offsets_.add(offset / step, part.mean, place);
  }

  const GgufForm& form_;
  int64_t k_;
  std::vector<uint8_t> levels_;
  std::array<double, 256> levels_by_index_{};
  std::array<int64_t, 256> counts_{};
  GgufFigures found_;
  Series match_, units_, offsets_;
  std::vector<double> sizes_;
  double means_ = 0, deviations_ = 0;
  int64_t reaching_ = 0, near_one_ = 0;
  float first_unit_ = 0;
  bool one_unit_ = true, has_minimum_ = false;
};

}  // namespace
}  // namespace of_blocks

GgufFigures gguf_figures(const formats::GgufForm& form, std::span<const std::byte> bytes, int64_t rows, int64_t k) {
  of_blocks::Sampler sampler(form, k);
  const size_t width = bytes.size() / static_cast<size_t>(rows);
  const int64_t taken =
      rows * k <= of_blocks::all_up_to ? rows : std::clamp<int64_t>(of_blocks::sampled_weights / k, 1, rows);
  for (int64_t i = 0; i < taken; ++i) {
    sampler.add_row(bytes.subspan(static_cast<size_t>(i * rows / taken) * width, width));
  }
  return sampler.figures();
}

}  // namespace w4q::verify
