// The registry row of bitsandbytes' 4-bit format: names, the plain definition of encoding and decoding.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "core/error.h"
#include "core/text.h"
#include "formats/lut.h"

namespace w4q::formats {
namespace {

constexpr std::string_view form = "lut4-b{32,64,128,256,512,1024,2048,4096}-{f32,nested}";

std::vector<Scheme> representative_schemes() {
  return {{SchemeFamily::lut, lut_bits, 64, ScaleType::f32},
          {SchemeFamily::lut, lut_bits, 64, ScaleType::nested},
          {SchemeFamily::lut, lut_bits, 128, ScaleType::f32}};
}

std::string print(const Scheme& scheme) {
  return concat("lut", scheme.bits, "-b", scheme.block, "-", to_string(scheme.scale));
}

std::optional<Scheme> parse(std::string_view text) {
  for (int block = 32; is_lut_block(block); block *= 2) {
    for (const ScaleType scale : {ScaleType::f32, ScaleType::nested}) {
      const Scheme scheme{SchemeFamily::lut, lut_bits, block, scale};
      if (print(scheme) == text) return scheme;
    }
  }
  return std::nullopt;
}

/// Finds the nearest entry of a table in any order by midpoints of neighbouring values: a value on one goes down, and
/// of equal entries the first is taken. Where the upper half of the table is the lower half negated, as in FP4, the
/// sign chooses the half and the magnitude the entry.
class NearestEntry {
 public:
  explicit NearestEntry(std::span<const float> table) {
    const size_t half = table.size() / 2;
    const auto negated = [](float a, float b) { return a == -b && std::signbit(a) != std::signbit(b); };
    if (std::ranges::equal(table.first(half), table.subspan(half), negated)) {
      sign_ = static_cast<uint8_t>(half);
      table = table.first(half);
    }
    order_.resize(table.size());
    std::iota(order_.begin(), order_.end(), uint8_t{0});
    std::ranges::stable_sort(order_, [&](uint8_t a, uint8_t b) { return table[a] < table[b]; });
    const auto same = [&](uint8_t a, uint8_t b) { return table[a] == table[b]; };
    order_.erase(std::unique(order_.begin(), order_.end(), same), order_.end());
    for (size_t i = 1; i < order_.size(); ++i) {
      midpoints_.push_back((table[order_[i - 1]] + table[order_[i]]) * 0.5f);
    }
  }

  uint8_t operator()(float x) const noexcept {
    const bool negative = sign_ != 0 && std::signbit(x);
    if (negative) x = -x;
    size_t index = 0;
    for (const float midpoint : midpoints_) index += x > midpoint ? 1 : 0;
    return static_cast<uint8_t>(order_[index] + (negative ? sign_ : 0));
  }

 private:
  uint8_t sign_ = 0;  ///< what a negative value's code is larger by; 0 for tables that are searched as a whole
  std::vector<uint8_t> order_;
  std::vector<float> midpoints_;
};

/// Codes of `values` under the scales of `weight`, by bitsandbytes' rule: times the reciprocal, rounded, of the scale.
void recode(PackedWeight& weight, std::span<const float> values) {
  check_values(values, weight.n, weight.k);
  const NearestEntry nearest(weight.plane(PlaneRole::codebook).bytes.as<float>());
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  std::ranges::fill(words, 0u);
  const auto block = static_cast<size_t>(weight.scheme.block);
  for (size_t begin = 0; begin < values.size(); begin += block) {
    const float scale = lut_scale(weight, static_cast<int64_t>(begin / block));
    const float reciprocal = 1.0f / scale;
    for (size_t i = begin; i < std::min(begin + block, values.size()); ++i) {
      // A scale without a finite reciprocal is divided by; one of zero decodes to zeros whatever the codes are.
      const float x = scale == 0 ? 0.0f : std::isfinite(reciprocal) ? values[i] * reciprocal : values[i] / scale;
      words[i / 8] |= uint32_t{nearest(x)} << (i % 8 * lut_bits);
    }
  }
}

std::vector<float> block_maxima(std::span<const float> values, size_t block) {
  std::vector<float> maxima((values.size() + block - 1) / block);
  for (size_t i = 0; i < values.size(); ++i) {
    maxima[i / block] = std::max(maxima[i / block], std::abs(values[i]));
  }
  return maxima;
}

/// Nested scales: the mean is the offset; what is left is divided by its largest magnitude over 256 blocks and rounded
/// to the nearest entry of the nested table.
void store_nested(std::span<const float> maxima, PackedWeight& weight) {
  const double sum = std::accumulate(maxima.begin(), maxima.end(), 0.0);
  const auto offset = static_cast<float>(sum / static_cast<double>(maxima.size()));
  const std::vector<float> table = lut_nested_table();
  weight.plane(PlaneRole::nested_offset).bytes.as<float>()[0] = offset;
  std::ranges::copy(table, weight.plane(PlaneRole::nested_codebook).bytes.as<float>().begin());
  std::vector<float> rest(maxima.begin(), maxima.end());
  for (float& value : rest) value -= offset;
  const std::vector<float> factors = block_maxima(rest, lut_nested_block);
  std::ranges::copy(factors, weight.plane(PlaneRole::nested_scales).bytes.as<float>().begin());
  const NearestEntry nearest(table);
  const auto scales = weight.plane(PlaneRole::scales).bytes.as<uint8_t>();
  for (size_t i = 0; i < rest.size(); ++i) {
    const float factor = factors[i / lut_nested_block];
    scales[i] = nearest(factor == 0 ? 0.0f : rest[i] / factor);
  }
}

PackedWeight encode(const Scheme& scheme, std::span<const float> values, int64_t n, int64_t k,
                    std::span<const float> codebook) {
  check_values(values, n, k);
  if (codebook.size() != lut_entries || !std::ranges::all_of(codebook, [](float x) { return std::isfinite(x); })) {
    throw Error(ErrorCode::bad_argument, concat("encode: ", print(scheme), " needs a table of 16 finite values"));
  }
  PackedWeight weight = allocate_planes(scheme, canonical_layout, n, k, lut_planes(scheme, n, k));
  std::ranges::copy(codebook, weight.plane(PlaneRole::codebook).bytes.as<float>().begin());
  const std::vector<float> maxima = block_maxima(values, static_cast<size_t>(scheme.block));
  if (scheme.scale == ScaleType::nested) {
    store_nested(maxima, weight);
  } else {
    std::ranges::copy(maxima, weight.plane(PlaneRole::scales).bytes.as<float>().begin());
  }
  recode(weight, values);
  return weight;
}

void decode_row(const PackedWeight& canonical, int64_t row, std::span<float> out) {
  ensure(canonical.layout == canonical_layout, "decode_row: not the canonical layout");
  ensure(row >= 0 && row < canonical.n && static_cast<int64_t>(out.size()) == canonical.k, "decode_row: wrong row");
  const auto table = canonical.plane(PlaneRole::codebook).bytes.as<float>();
  const auto words = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto first = static_cast<size_t>(row * canonical.k);
  const auto block = static_cast<size_t>(canonical.scheme.block);
  for (size_t i = 0; i < out.size();) {
    const float scale = lut_scale(canonical, static_cast<int64_t>((first + i) / block));
    const size_t end = std::min(out.size(), ((first + i) / block + 1) * block - first);
    for (; i < end; ++i) out[i] = table[(words[(first + i) / 8] >> ((first + i) % 8 * lut_bits)) & 15u] * scale;
  }
}

/// Half the widest gap between neighbouring values, and what lies beyond the ends of the table.
double error_bound(const Scheme& scheme, double absmax, std::span<const float> codebook) {
  if (scheme.scale == ScaleType::nested) return std::numeric_limits<double>::infinity();
  std::vector<float> sorted(codebook.begin(), codebook.end());
  std::ranges::sort(sorted);
  double widest = 2.0 * std::max({0.0f, 1.0f - sorted.back(), sorted.front() + 1.0f});
  for (size_t i = 1; i < sorted.size(); ++i) {
    widest = std::max(widest, static_cast<double>(sorted[i]) - static_cast<double>(sorted[i - 1]));
  }
  // The reciprocal, the products and, at the bottom of fp32, what is lost to subnormals.
  return absmax * (0.5 * widest + 0x1p-21) + 0x1p-148;
}

double bits_per_weight(const Scheme& scheme, int64_t n, int64_t k) {
  return bits_per_weight_of_planes(lut_planes(scheme, n, k), n, k);
}

BitPlace place(const Scheme& scheme, int64_t, int64_t k, int64_t row, int64_t col, int bit) {
  const int64_t index = row * k + col;
  return {index / 8, static_cast<int>(index % 8 * lut_bits + bit), index / scheme.block};
}

}  // namespace

SchemeRow lut_row() {
  return {.family = SchemeFamily::lut,
          .name = "lut",
          .description = "4-bit codes of a table, flat blocks: bitsandbytes' NF4 and FP4",
          .form = form,
          .schemes = representative_schemes,
          .print = print,
          .parse = parse,
          .planes = lut_planes,
          .validate = lut_validate,
          .decode_row = decode_row,
          .encode = encode,
          .recode = recode,
          .error_bound = error_bound,
          .bits_per_weight = bits_per_weight,
          .place = place};
}

}  // namespace w4q::formats
