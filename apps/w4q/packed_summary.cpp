#include "packed_summary.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/convert.h"
#include "core/text.h"
#include "formats/integer.h"
#include "formats/kbit.h"
#include "formats/table/table_format.h"

namespace w4q::app {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::SchemeFamily;

/// How often each code occurs.
std::vector<int64_t> count_codes(const PackedWeight& weight) {
  const auto place = formats::scheme_row(weight.scheme.family).place;
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  std::vector<int64_t> counts(size_t{1} << weight.scheme.bits);
  for (int64_t row = 0; row < weight.n; ++row) {
    for (int64_t col = 0; col < weight.k; ++col) {
      size_t code = 0;
      for (int bit = 0; bit < weight.scheme.bits; ++bit) {
        const auto at = place(weight.scheme, weight.n, weight.k, row, col, bit);
        code |= size_t{(words[static_cast<size_t>(at.word)] >> at.bit) & 1u} << bit;
      }
      ++counts[code];
    }
  }
  return counts;
}

double entropy(const std::vector<int64_t>& counts) {
  double total = 0;
  for (const int64_t count : counts) total += static_cast<double>(count);
  double sum = 0;
  for (const int64_t count : counts) {
    if (count > 0) sum -= static_cast<double>(count) / total * std::log2(static_cast<double>(count) / total);
  }
  return sum;
}

std::vector<float> sorted_scales(const PackedWeight& weight) {
  const auto& plane = weight.plane(PlaneRole::scales);
  std::vector<float> scales(static_cast<size_t>(element_count(plane.spec.shape)));
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = formats::scale_at(weight, static_cast<int64_t>(i));
  std::ranges::sort(scales);
  return scales;
}

/// What each code stands for in units of the scale; codes themselves where zero points differ; nothing for a trellis,
/// where that takes the codes before it.
std::vector<float> levels(const PackedWeight& weight) {
  if (formats::shares_bits(weight.scheme)) return {};
  if (formats::scheme_row(weight.scheme.family).table != nullptr) {
    const auto codebook = weight.plane(PlaneRole::codebook).bytes.as<float>();
    return {codebook.begin(), codebook.end()};
  }
  const int zero = weight.scheme.asymmetric ? 0 : formats::integer_symmetric_zero(weight.scheme.bits);
  std::vector<float> result;
  for (int code = 0; code < 1 << weight.scheme.bits; ++code) result.push_back(static_cast<float>(code - zero));
  return result;
}

void add_zeros(const PackedWeight& weight, PackedSummary& summary) {
  if (!weight.scheme.asymmetric) return;
  const auto zeros = weight.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  const auto [least, largest] = std::ranges::minmax(zeros);
  double sum = 0;
  for (const uint8_t zero : zeros) sum += zero;
  const double mean = sum / static_cast<double>(zeros.size());
  summary.text += concat("zero points: least ", +least, ", mean ", fixed(mean, 2), ", largest ", +largest, "\n");
  summary.json["zero_min"] = least;
  summary.json["zero_mean"] = mean;
  summary.json["zero_max"] = largest;
}

}  // namespace

PackedSummary summarize(const PackedWeight& weight) {
  const auto scales = sorted_scales(weight);
  const auto counts = count_codes(weight);
  const auto values = levels(weight);
  const float middle = scales[scales.size() / 2];
  PackedSummary summary;
  summary.json = {{"scheme", formats::to_string(weight.scheme)},
                  {"scale_min", scales.front()},
                  {"scale_median", middle},
                  {"scale_max", scales.back()},
                  {"codebook", values},
                  {"code_counts", counts},
                  {"code_entropy_bits", entropy(counts)}};
  summary.text = concat("scales: least ", scales.front(), ", median ", middle, ", largest ", scales.back(), "\n");
  add_zeros(weight, summary);
  TextTable codes({"code", "level", "share %"});
  const auto total = static_cast<double>(weight.n * weight.k);
  for (size_t code = 0; code < counts.size(); ++code) {
    const std::string level = values.empty() ? "–" : fixed(values[code], 6);
    codes.row({concat(code), level, fixed(100 * static_cast<double>(counts[code]) / total, 2)});
  }
  summary.text +=
      concat("codes: entropy ", fixed(entropy(counts), 3), " of ", weight.scheme.bits, " bits\n", codes.str());
  return summary;
}

}  // namespace w4q::app
