// The registry row of rotated: the plain definition of encoding and decoding.
#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>

#include "core/error.h"
#include "core/text.h"
#include "formats/codebook.h"
#include "formats/kbit.h"
#include "formats/rotated.h"

namespace w4q::formats {
namespace {

constexpr int min_bits = 2;
constexpr int max_bits = 5;
constexpr int max_codes = 1 << max_bits;
constexpr int min_block = 32;
constexpr int max_block = 1 << 16;
constexpr std::string_view form = "rotated<2 to 5>-<d32 | d64 | d128 | … | row>[-e4m4 | -f32]; norms are f16 otherwise";

bool is_block(int block) noexcept {
  return block == whole_row ||
         (block >= min_block && block <= max_block && std::has_single_bit(static_cast<unsigned>(block)));
}

std::vector<Scheme> representative_schemes() {
  const auto scheme = [](int bits, int block, ScaleType scale) {
    return Scheme{SchemeFamily::rotated, bits, block, scale};
  };
  return {scheme(2, 128, ScaleType::f16),       scheme(3, 128, ScaleType::f16), scheme(4, 128, ScaleType::f16),
          scheme(5, 128, ScaleType::f16),       scheme(4, 32, ScaleType::e4m4), scheme(3, 64, ScaleType::e4m4),
          scheme(4, whole_row, ScaleType::f16), scheme(4, 128, ScaleType::f32)};
}

std::string print(const Scheme& scheme) {
  const std::string group = scheme.block == whole_row ? "row" : concat("d", scheme.block);
  const std::string norm = scheme.scale == ScaleType::f16 ? "" : concat("-", to_string(scheme.scale));
  return concat("rotated", scheme.bits, "-", group, norm);
}

/// The block of "d128" or "row"; -1 for anything else.
int parse_block(std::string_view text) noexcept {
  if (text == "row") return whole_row;
  if (text.size() < 3 || text.front() != 'd' || text[1] == '0') return -1;
  int block = 0;
  const auto [stop, error] = std::from_chars(text.data() + 1, text.data() + text.size(), block);
  const bool whole = error == std::errc{} && stop == text.data() + text.size();
  return whole && block != whole_row && is_block(block) ? block : -1;
}

std::optional<Scheme> parse(std::string_view text) {
  constexpr std::string_view prefix = "rotated";
  if (!text.starts_with(prefix) || text.size() < prefix.size() + 3) return std::nullopt;
  Scheme scheme{SchemeFamily::rotated, text[prefix.size()] - '0', 0, ScaleType::f16};
  if (scheme.bits < min_bits || scheme.bits > max_bits || text[prefix.size() + 1] != '-') return std::nullopt;
  std::string_view rest = text.substr(prefix.size() + 2);
  for (const ScaleType type : {ScaleType::e4m4, ScaleType::f32}) {
    const std::string suffix = concat("-", to_string(type));
    if (!rest.ends_with(suffix)) continue;
    scheme.scale = type;
    rest.remove_suffix(suffix.size());
    break;
  }
  scheme.block = parse_block(rest);
  if (scheme.block < 0) return std::nullopt;
  return scheme;
}

std::vector<PlaneSpec> planes(const Scheme& scheme, int64_t n, int64_t k) {
  check_dimensions(n, k, to_string(scheme));
  const DType norm = scheme.scale == ScaleType::e4m4  ? DType::u8
                     : scheme.scale == ScaleType::f16 ? DType::f16
                                                      : DType::f32;
  return {{PlaneRole::codes, DType::i32, {n, kbit_blocks(k), scheme.bits}},
          {PlaneRole::scales, norm, {n, rotated_groups(scheme, k)}},
          {PlaneRole::codebook, DType::f32, {int64_t{1} << scheme.bits}}};
}

/// The levels of a weight, and their midpoints.
struct Table {
  std::array<float, max_codes> levels{};
  std::array<float, max_codes> midpoints{};
  size_t size = 0;

  explicit Table(const PackedWeight& weight) {
    const std::span<const float> codebook = weight.plane(PlaneRole::codebook).bytes.as<float>();
    size = codebook.size();
    rotated_levels(codebook, rotated_group(weight.scheme, weight.k), {levels.data(), size});
    kbit_midpoints({levels.data(), size}, {midpoints.data(), size - 1});
  }

  uint32_t code(float x) const noexcept { return static_cast<uint32_t>(kbit_code(x, {midpoints.data(), size - 1})); }
};

/// Codes of `values` under the norms and the codebook that `weight` has.
void recode(PackedWeight& weight, std::span<const float> values) {
  check_values(values, weight.n, weight.k);
  const Table table(weight);
  const auto bits = static_cast<size_t>(weight.scheme.bits);
  const std::span<uint32_t> words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  std::ranges::fill(words, 0u);
  const Plane& scales = weight.plane(PlaneRole::scales);
  const int64_t group = rotated_group(weight.scheme, weight.k);
  const int64_t groups = rotated_groups(weight.scheme, weight.k);
  for (int64_t row = 0; row < weight.n; ++row) {
    for (int64_t col = 0; col < weight.k; ++col) {
      const float norm = rotated_norm_at(scales, static_cast<size_t>(row * groups + col / group));
      // A group whose norm rounds to zero decodes to zeros whatever its codes are.
      const float x = norm == 0 ? 0.0f : values[static_cast<size_t>(row * weight.k + col)] / norm;
      const uint32_t code = table.code(x);
      const auto block = static_cast<size_t>(row * kbit_blocks(weight.k) + col / kbit_block);
      for (size_t bit = 0; bit < bits; ++bit) words[block * bits + bit] |= (code >> bit & 1u) << col % kbit_block;
    }
  }
}

PackedWeight encode(const Scheme& scheme, std::span<const float> values, int64_t n, int64_t k,
                    std::span<const float> codebook) {
  check_values(values, n, k);
  check_codebook(codebook, scheme.bits, "encode");
  PackedWeight weight = allocate_planes(scheme, canonical_layout, n, k, planes(scheme, n, k));
  std::ranges::copy(codebook, weight.plane(PlaneRole::codebook).bytes.as<float>().begin());
  Plane& scales = weight.plane(PlaneRole::scales);
  const int64_t group = rotated_group(scheme, k);
  const double gain = rotated_gain(codebook, scheme.bits);
  size_t index = 0;
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t col = 0; col < k; col += group, ++index) {
      const auto count = static_cast<size_t>(std::min(group, k - col));
      const auto part = values.subspan(static_cast<size_t>(row * k + col), count);
      rotated_put_norm(scales, index, rotated_store_norm(rotated_norm(part, group) / gain, scheme.scale));
    }
  }
  recode(weight, values);
  return weight;
}

void decode_row(const PackedWeight& canonical, int64_t row, std::span<float> out) {
  ensure(canonical.layout == canonical_layout, "decode_row: not the canonical layout");
  ensure(row >= 0 && row < canonical.n && static_cast<int64_t>(out.size()) == canonical.k, "decode_row: wrong row");
  const Table table(canonical);
  const auto bits = static_cast<size_t>(canonical.scheme.bits);
  const std::span<const uint32_t> words = canonical.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const Plane& scales = canonical.plane(PlaneRole::scales);
  const int64_t group = rotated_group(canonical.scheme, canonical.k);
  const int64_t first_norm = row * rotated_groups(canonical.scheme, canonical.k);
  const auto first_block = static_cast<size_t>(row * kbit_blocks(canonical.k));
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t block = first_block + i / kbit_block;
    size_t code = 0;
    for (size_t bit = 0; bit < bits; ++bit) code |= (words[block * bits + bit] >> i % kbit_block & 1u) << bit;
    out[i] =
        table.levels[code] * rotated_norm_at(scales, static_cast<size_t>(first_norm + static_cast<int64_t>(i) / group));
  }
}

void check_table(const PackedWeight& weight, std::string_view name) {
  const std::string source = concat(name, ": plane codebook");
  check_codebook(weight.plane(PlaneRole::codebook).bytes.as<float>(), weight.scheme.bits, source);
}

/// Norms are finite and not negative, and no level times one of them leaves fp32.
void check_norms(const PackedWeight& weight, std::string_view name) {
  const Table table(weight);
  const float top = kbit_table_max({table.levels.data(), table.size});
  const Plane& scales = weight.plane(PlaneRole::scales);
  const int64_t groups = rotated_groups(weight.scheme, weight.k);
  for (int64_t index = 0; index < weight.n * groups; ++index) {
    const float norm = rotated_norm_at(scales, static_cast<size_t>(index));
    if (!std::signbit(norm) && std::isfinite(norm) && std::isfinite(top * norm)) continue;
    throw Error(ErrorCode::bad_file, concat(printable(name), ": plane scales holds a norm that cannot be"))
        .detail(concat("row ", index / groups, ", group ", index % groups, ": ", norm,
                       "; expected 0 or more, and level · norm within fp32"));
  }
}

void validate(const PackedWeight& canonical, std::string_view name) {
  check_canonical(rotated_row(), canonical, name);
  check_dimensions(canonical.n, canonical.k, name);
  check_planes(canonical, planes(canonical.scheme, canonical.n, canonical.k), name);
  kbit_check_padding(canonical, name);
  check_table(canonical, name);
  check_norms(canonical, name);
}

/// With a the group's absmax the norm is at most √d · a. Within the table a value is off by half a gap; beyond it, by
/// no more than itself and the distance of the table's end from zero where it has only one sign.
double error_bound(const Scheme& scheme, double absmax, std::span<const float> codebook) {
  double widest = 0;
  for (size_t i = 1; i < codebook.size(); ++i) {
    widest = std::max(widest, static_cast<double>(codebook[i]) - static_cast<double>(codebook[i - 1]));
  }
  const double smallest = scheme.scale == ScaleType::e4m4  ? 0x1p-14
                          : scheme.scale == ScaleType::f16 ? 0x1p-24
                                                           : 0x1p-149;
  // In units of the levels, √d taken out: norm / √d, its rounding included.
  const double unit = absmax / rotated_gain(codebook, scheme.bits) * (1 + 1.0 / 32) + smallest;
  const double one_sided =
      std::max({0.0, static_cast<double>(codebook.front()), -static_cast<double>(codebook.back())});
  return std::max(0.5 * widest * unit, absmax + one_sided * unit) * (1 + 0x1p-20) + 0x1p-149;
}

double bits_per_weight(const Scheme& scheme, int64_t n, int64_t k) {
  return bits_per_weight_of_planes(planes(scheme, n, k), n, k);
}

BitPlace place(const Scheme& scheme, int64_t, int64_t k, int64_t row, int64_t col, int bit) {
  const int64_t block = row * kbit_blocks(k) + col / kbit_block;
  const int64_t norm = row * rotated_groups(scheme, k) + col / rotated_group(scheme, k);
  return {block * scheme.bits + bit, static_cast<int>(col % kbit_block), norm};
}

}  // namespace

SchemeRow rotated_row() {
  return {.family = SchemeFamily::rotated,
          .name = "rotated",
          .description = "2 to 5 bit codes of a table for N(0, 1), a norm per group; for weights of a rotated input",
          .form = form,
          .schemes = representative_schemes,
          .print = print,
          .parse = parse,
          .planes = planes,
          .validate = validate,
          .decode_row = decode_row,
          .encode = encode,
          .recode = recode,
          .error_bound = error_bound,
          .bits_per_weight = bits_per_weight,
          .place = place};
}

}  // namespace w4q::formats
