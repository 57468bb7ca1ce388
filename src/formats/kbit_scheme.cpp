// The registry row of kbit: the plain definition of encoding and decoding.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>

#include "core/error.h"
#include "core/text.h"
#include "formats/codebook.h"
#include "formats/kbit.h"

namespace w4q::formats {
namespace {

constexpr int min_bits = 2;
constexpr int max_bits = 5;
constexpr int max_codes = 1 << max_bits;

std::vector<Scheme> all_schemes() {
  std::vector<Scheme> schemes;
  for (ScaleType scale : {ScaleType::e4m4, ScaleType::f16}) {
    for (int bits = min_bits; bits <= max_bits; ++bits) {
      schemes.push_back({SchemeFamily::kbit, bits, kbit_block, scale});
    }
  }
  return schemes;
}

uint16_t load_scale(const Plane& scales, size_t block) noexcept {
  return scales.spec.dtype == DType::u8 ? scales.bytes.as<uint8_t>()[block] : scales.bytes.as<uint16_t>()[block];
}

void store_scale(Plane& scales, size_t block, uint16_t bits) noexcept {
  if (scales.spec.dtype == DType::u8) {
    scales.bytes.as<uint8_t>()[block] = static_cast<uint8_t>(bits);
  } else {
    scales.bytes.as<uint16_t>()[block] = bits;
  }
}

/// Writes the `bits` plane words of one block of up to 32 values; lanes without a value keep zero bits.
void encode_block(std::span<const float> values, float scale, std::span<const float> midpoints,
                  std::span<uint32_t> words) noexcept {
  for (size_t lane = 0; lane < values.size(); ++lane) {
    // A block whose scale rounds to zero decodes to zeros whatever its codes are.
    const float x = scale == 0 ? 0.0f : values[lane] / scale;
    const auto code = static_cast<uint32_t>(kbit_code(x, midpoints));
    for (size_t bit = 0; bit < words.size(); ++bit) words[bit] |= ((code >> bit) & 1) << lane;
  }
}

std::string print(const Scheme& scheme) {
  return concat("kbit", scheme.bits, "-b", scheme.block, "-", to_string(scheme.scale));
}

std::optional<Scheme> parse(std::string_view text) {
  for (const Scheme& scheme : all_schemes()) {
    if (print(scheme) == text) return scheme;
  }
  return std::nullopt;
}

/// Codes of `values` under the scales and the codebook that `weight` has.
void recode(PackedWeight& weight, std::span<const float> values) {
  check_values(values, weight.n, weight.k);
  const auto bits = static_cast<size_t>(weight.scheme.bits);
  const std::span<const float> codebook = weight.plane(PlaneRole::codebook).bytes.as<float>();
  std::array<float, max_codes - 1> storage{};
  const std::span<float> midpoints(storage.data(), codebook.size() - 1);
  kbit_midpoints(codebook, midpoints);
  const std::span<uint32_t> words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  std::ranges::fill(words, 0u);
  const Plane& scales = weight.plane(PlaneRole::scales);
  size_t block = 0;
  for (int64_t row = 0; row < weight.n; ++row) {
    for (int64_t column = 0; column < weight.k; column += kbit_block, ++block) {
      const auto count = static_cast<size_t>(std::min<int64_t>(kbit_block, weight.k - column));
      const std::span<const float> part = values.subspan(static_cast<size_t>(row * weight.k + column), count);
      const float scale = kbit_decode_scale(load_scale(scales, block), weight.scheme.scale);
      encode_block(part, scale, midpoints, words.subspan(block * bits, bits));
    }
  }
}

PackedWeight encode(const Scheme& scheme, std::span<const float> values, int64_t n, int64_t k,
                    std::span<const float> codebook) {
  check_values(values, n, k);
  check_codebook(codebook, scheme.bits, "encode");
  PackedWeight weight = allocate_planes(scheme, canonical_layout, n, k, kbit_planes(scheme, n, k));
  std::ranges::copy(codebook, weight.plane(PlaneRole::codebook).bytes.as<float>().begin());
  const float table_max = kbit_table_max(codebook);
  Plane& scales = weight.plane(PlaneRole::scales);
  size_t block = 0;
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t column = 0; column < k; column += kbit_block, ++block) {
      const auto count = static_cast<size_t>(std::min<int64_t>(kbit_block, k - column));
      const std::span<const float> part = values.subspan(static_cast<size_t>(row * k + column), count);
      store_scale(scales, block, kbit_encode_scale(kbit_table_max(part), table_max, scheme.scale).bits);
    }
  }
  recode(weight, values);
  return weight;
}

void decode_row(const PackedWeight& canonical, int64_t row, std::span<float> out) {
  ensure(canonical.layout == canonical_layout, "decode_row: not the canonical layout");
  ensure(row >= 0 && row < canonical.n && static_cast<int64_t>(out.size()) == canonical.k, "decode_row: wrong row");
  const auto bits = static_cast<size_t>(canonical.scheme.bits);
  const std::span<const float> codebook = canonical.plane(PlaneRole::codebook).bytes.as<float>();
  const std::span<const uint32_t> words = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const Plane& scales = canonical.plane(PlaneRole::scales);
  const auto first_block = static_cast<size_t>(row * kbit_blocks(canonical.k));
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t block = first_block + i / kbit_block;
    const size_t lane = i % kbit_block;
    size_t code = 0;
    for (size_t bit = 0; bit < bits; ++bit) code |= ((words[block * bits + bit] >> lane) & 1u) << bit;
    out[i] = codebook[code] * kbit_decode_scale(load_scale(scales, block), canonical.scheme.scale);
  }
}

/// Within the table a value is off by half a gap of the scaled table; at its ends by what the rounding of the scale cut
/// off, at most 1/32 of absmax, or half a step of the smallest scales, or what a saturated scale cannot reach.
double error_bound(const Scheme& scheme, double absmax, std::span<const float> codebook) {
  const double table_max = kbit_table_max(codebook);
  // A table that ends short of ±table_max has a one-sided gap there: a value may be off by the whole of it.
  double widest = 2 * std::max(table_max - codebook.back(), table_max + codebook.front());
  for (size_t i = 1; i < codebook.size(); ++i) {
    widest = std::max(widest, static_cast<double>(codebook[i]) - static_cast<double>(codebook[i - 1]));
  }
  const double smallest_scale = scheme.scale == ScaleType::e4m4 ? 0x1p-14 : 0x1p-24;
  const double beyond = std::max(0.0, absmax - static_cast<double>(kbit_scale_max(scheme.scale)) * table_max);
  // The last term is for products that are subnormal in fp32.
  return absmax * (0.5 * widest / table_max + 1.0 / 32) + 0.5 * smallest_scale * table_max + beyond + 0x1p-149;
}

double bits_per_weight(const Scheme& scheme, int64_t n, int64_t k) {
  return bits_per_weight_of_planes(kbit_planes(scheme, n, k), n, k);
}

BitPlace place(const Scheme& scheme, int64_t, int64_t k, int64_t row, int64_t col, int bit) {
  const int64_t block = row * kbit_blocks(k) + col / kbit_block;
  return {block * scheme.bits + bit, static_cast<int>(col % kbit_block), block};
}

}  // namespace

std::vector<PlaneSpec> kbit_planes(const Scheme& scheme, int64_t n, int64_t k) {
  check_dimensions(n, k, to_string(scheme));
  const int64_t blocks = kbit_blocks(k);
  const DType scale = scheme.scale == ScaleType::e4m4 ? DType::u8 : DType::f16;
  return {{PlaneRole::codes, DType::i32, {n, blocks, scheme.bits}},
          {PlaneRole::scales, scale, {n, blocks}},
          {PlaneRole::codebook, DType::f32, {int64_t{1} << scheme.bits}}};
}

SchemeRow kbit_row() {
  return {.family = SchemeFamily::kbit,
          .name = "kbit",
          .description = "2 to 5 bit codes of a table, 32 weights to a scale",
          .form = {},
          .schemes = all_schemes,
          .print = print,
          .parse = parse,
          .planes = kbit_planes,
          .validate = kbit_validate,
          .decode_row = decode_row,
          .encode = encode,
          .recode = recode,
          .error_bound = error_bound,
          .bits_per_weight = bits_per_weight,
          .place = place};
}

}  // namespace w4q::formats
