#include "formats/trellis.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/text.h"
#include "formats/kbit.h"
#include "formats/scale_codec.h"
#include "formats/scale_range.h"
#include "formats/table/group_norm.h"
#include "formats/trellis_search.h"

namespace w4q::formats {
namespace {

constexpr std::string_view form = "trellis<2 to 4>[-w<8 to 16>]; w14 otherwise";
/// No plane of so many weights, counted in bits, overflows 64 bits.
constexpr int64_t max_weights = int64_t{1} << 48;

Scheme make(int bits, int window) {
  return {.family = SchemeFamily::trellis, .bits = bits, .block = whole_row, .scale = ScaleType::f16, .window = window};
}

/// Every width, and windows that plain loops search soon.
std::vector<Scheme> representative_schemes() { return {make(2, 8), make(3, 10), make(4, 9)}; }

std::string print(const Scheme& scheme) { return concat("trellis", scheme.bits, "-w", scheme.window); }

std::optional<Scheme> parse(std::string_view text) {
  for (int bits = trellis_min_bits; bits <= trellis_max_bits; ++bits) {
    if (text == concat("trellis", bits)) return make(bits, trellis_usual_window);
    for (int window = trellis_min_window; window <= trellis_max_window; ++window) {
      if (const Scheme scheme = make(bits, window); print(scheme) == text) return scheme;
    }
  }
  return std::nullopt;
}

std::vector<PlaneSpec> planes(const Scheme& scheme, int64_t n, int64_t k) {
  check_dimensions(n, k, to_string(scheme));
  const int64_t strips = trellis_strips(n);
  if (strips * trellis_rows > max_weights / k) {
    throw Error(ErrorCode::unsupported, concat(to_string(scheme), ": cannot pack ", n, " outputs × ", k, " inputs"))
        .detail("a weight has at most 2^48 values");
  }
  return {{PlaneRole::codes, DType::i32, {strips, k, trellis_ring_words(scheme.bits)}},
          {PlaneRole::scales, DType::f16, {n}},
          {PlaneRole::codebook, DType::f32, {1}}};
}

/// Whether it is a power of two whose products with levels are exact.
bool is_unit(float value) noexcept {
  int exponent = 0;
  return std::isnormal(value) && std::isfinite(value * trellis_largest_level) && std::frexp(value, &exponent) == 0.5f;
}

/// The largest scale whose products with u stay within fp32.
double largest_scale_of(float unit) noexcept {
  const double most = static_cast<double>(std::numeric_limits<float>::max()) / trellis_largest_level / unit;
  return std::min(most, static_cast<double>(scale_codec(ScaleType::f16).largest));
}

float checked_unit(const PackedWeight& packed, std::string_view name) {
  const float unit = packed.plane(PlaneRole::codebook).bytes.as<float>()[0];
  if (is_unit(unit)) return unit;
  throw Error(ErrorCode::bad_file, concat(printable(name), ": plane codebook holds ", unit))
      .detail("expected a power of two, whose products with 510 stay within fp32");
}

bool is_sound(float scale, float unit) noexcept { return scale >= 0 && scale <= largest_scale_of(unit); }

/// Whether all scales are sound, and the largest.
std::optional<float> sound_range(const Plane& scales, float unit) {
  const ScaleRange range = scale_range(scales, ScaleType::f16);
  if (range.negative || !is_sound(range.largest, unit)) return std::nullopt;
  return range.largest;
}

void check_scales(const PackedWeight& weight, float unit, std::string_view name) {
  const Plane& scales = weight.plane(PlaneRole::scales);
  if (sound_range(scales, unit)) return;
  for (int64_t row = 0; row < weight.n; ++row) {
    const float scale = load_scale(scales, static_cast<size_t>(row));
    if (is_sound(scale, unit) && !std::signbit(scale)) continue;
    const std::string_view what = !std::isfinite(scale) ? "a non-finite value"
                                  : std::signbit(scale) ? "a negative value"
                                                        : "a value that is too large";
    throw Error(ErrorCode::bad_file, concat(printable(name), ": plane scales holds ", what))
        .detail(concat("row ", row, ": ", scale, "; levels go up to ", trellis_largest_level, " · ", unit,
                       ", and products stay within fp32"));
  }
}

/// The first ring whose bits of rows beyond n are not zero, or -1.
int64_t stray_ring(const PackedWeight& weight) {
  const int64_t last = trellis_strips(weight.n) - 1;
  const int used = static_cast<int>(weight.n - last * trellis_rows) * weight.scheme.bits;
  if (used == trellis_rows * weight.scheme.bits) return -1;
  for (int64_t col = 0; col < weight.k; ++col) {
    const auto ring = trellis_ring(weight, last, col);
    uint32_t stray = used % 32 == 0 ? 0 : ring[static_cast<size_t>(used / 32)] << used % 32;
    for (const uint32_t word : ring.subspan(static_cast<size_t>((used + 31) / 32))) stray |= word;
    if (stray != 0) return col;
  }
  return -1;
}

void check_padding(const PackedWeight& weight, std::string_view name) {
  const int64_t col = stray_ring(weight);
  if (col < 0) return;
  throw Error(ErrorCode::bad_file, concat(printable(name), ": plane codes has padding bits that are not zero"))
      .detail(concat("strip ", trellis_strips(weight.n) - 1, ", column ", col, ": only ", weight.n % trellis_rows,
                     " of its 128 rows exist"));
}

void validate(const PackedWeight& canonical, std::string_view name) {
  check_canonical(scheme_row(SchemeFamily::trellis), canonical, name);
  check_dimensions(canonical.n, canonical.k, name);
  check_planes(canonical, planes(canonical.scheme, canonical.n, canonical.k), name);
  check_padding(canonical, name);
  check_scales(canonical, checked_unit(canonical, name), name);
}

std::optional<float> largest_scale(const PackedWeight& packed, std::string_view name) {
  return sound_range(packed.plane(PlaneRole::scales), checked_unit(packed, name));
}

void decode_row(const PackedWeight& canonical, int64_t row, std::span<float> out) {
  ensure(canonical.layout == canonical_layout, "decode_row: not the canonical layout");
  ensure(row >= 0 && row < canonical.n && static_cast<int64_t>(out.size()) == canonical.k, "decode_row: wrong row");
  const Scheme& scheme = canonical.scheme;
  const float unit = canonical.plane(PlaneRole::codebook).bytes.as<float>()[0];
  const float scale = load_scale(canonical.plane(PlaneRole::scales), static_cast<size_t>(row));
  for (int64_t col = 0; col < canonical.k; ++col) {
    const auto ring = trellis_ring(canonical, row / trellis_rows, col);
    const uint32_t window = trellis_window(ring, scheme.bits, scheme.window, static_cast<int>(row % trellis_rows));
    out[static_cast<size_t>(col)] = static_cast<float>(trellis_level(window)) * unit * scale;
  }
}

void recode(PackedWeight& weight, std::span<const float> values) {
  check_values(values, weight.n, weight.k);
  const Scheme& scheme = weight.scheme;
  const auto levels = trellis_levels(scheme.window);
  TrellisSearch search(scheme.bits, scheme.window, trellis_plain_step, levels);
  for (int64_t strip = 0; strip < trellis_strips(weight.n); ++strip) {
    const int64_t first = strip * trellis_rows;
    TrellisColumn column{.rows = static_cast<int>(std::min<int64_t>(trellis_rows, weight.n - first))};
    std::array<float, trellis_rows> steps{};
    for (int row = 0; row < column.rows; ++row) {
      steps[static_cast<size_t>(row)] = trellis_load_scale(weight, first + row).step;
    }
    for (int64_t col = 0; col < weight.k; ++col) {
      for (size_t row = 0; row < static_cast<size_t>(column.rows); ++row) {
        column.counts[row] = steps[row] > 0;
        if (!column.counts[row]) continue;
        column.targets[row] =
            values[(static_cast<size_t>(first) + row) * static_cast<size_t>(weight.k) + static_cast<size_t>(col)] /
            steps[row];
      }
      trellis_put(search(column), scheme.bits, trellis_ring(weight, strip, col));
    }
  }
}

PackedWeight encode(const Scheme& scheme, std::span<const float> values, int64_t n, int64_t k,
                    std::span<const float> codebook) {
  check_values(values, n, k);
  if (codebook.size() > 1 || (!codebook.empty() && !is_unit(codebook[0]))) {
    throw Error(ErrorCode::bad_argument, concat("encode: ", print(scheme), " has no table but a power of two"));
  }
  PackedWeight weight = allocate_canonical(scheme, n, k);
  std::vector<double> sizes(static_cast<size_t>(n));
  double smallest = std::numeric_limits<double>::infinity(), largest = 0;
  for (size_t row = 0; row < sizes.size(); ++row) {
    sizes[row] = trellis_rms(values.subspan(row * static_cast<size_t>(k), static_cast<size_t>(k)));
    if (sizes[row] > 0) smallest = std::min(smallest, sizes[row]);
    largest = std::max(largest, sizes[row]);
  }
  float& unit = weight.plane(PlaneRole::codebook).bytes.as<float>()[0];
  unit = codebook.empty() ? std::ldexp(1.0f, trellis_exponent(scheme, smallest, largest)) : codebook[0];
  for (size_t row = 0; row < sizes.size(); ++row) {
    put_scale(weight.plane(PlaneRole::scales), row, trellis_scale(scheme, sizes[row], unit).bits);
  }
  recode(weight, values);
  return weight;
}

/// A weight may pay for those that share its bits: no more is sure than that its level is one of the code's, whose
/// largest is 510 steps of a row whose root mean square is at most its largest weight.
double error_bound(const Scheme& scheme, double absmax, std::span<const float> codebook) {
  const double unit = codebook.empty() ? std::ldexp(1.0, trellis_usual_exponent) : double{codebook[0]};
  const double step = absmax / (trellis_level_rms * trellis_factor(scheme.bits)) * (1 + 0x1p-10);
  return absmax + trellis_largest_level * (step + unit * 0x1p-24);
}

double bits_per_weight(const Scheme& scheme, int64_t n, int64_t k) {
  return bits_per_weight_of_planes(planes(scheme, n, k), n, k);
}

BitPlace place(const Scheme& scheme, int64_t, int64_t k, int64_t row, int64_t col, int bit) {
  return trellis_place(scheme, k, row, col, bit);
}

}  // namespace

std::vector<float> trellis_levels(int window) {
  std::vector<float> levels(size_t{1} << window);
  for (size_t i = 0; i < levels.size(); ++i) {
    levels[i] = static_cast<float>(trellis_level(static_cast<uint32_t>(i)));
  }
  return levels;
}

uint32_t trellis_window(std::span<const uint32_t> ring, int bits, int window, int row) noexcept {
  const int last = (row + 1) * bits - 1;
  const size_t word = static_cast<size_t>(last / 32);
  const uint64_t before = ring[word == 0 ? ring.size() - 1 : word - 1];
  const uint64_t pair = before << 32 | ring[word];
  return static_cast<uint32_t>(pair >> (31 - last % 32)) & ((1u << window) - 1);
}

std::span<const uint32_t> trellis_ring(const PackedWeight& canonical, int64_t strip, int64_t column) {
  const auto words = static_cast<size_t>(trellis_ring_words(canonical.scheme.bits));
  const auto first = static_cast<size_t>(strip * canonical.k + column) * words;
  return canonical.plane(PlaneRole::codes).bytes.as<uint32_t>().subspan(first, words);
}

std::span<uint32_t> trellis_ring(PackedWeight& canonical, int64_t strip, int64_t column) {
  const auto words = static_cast<size_t>(trellis_ring_words(canonical.scheme.bits));
  const auto first = static_cast<size_t>(strip * canonical.k + column) * words;
  return canonical.plane(PlaneRole::codes).bytes.as<uint32_t>().subspan(first, words);
}

void trellis_put(const TrellisSymbols& symbols, int bits, std::span<uint32_t> ring) noexcept {
  uint64_t pending = 0;
  int have = 0;
  size_t word = 0;
  for (const uint8_t symbol : symbols) {
    pending = pending << bits | symbol;
    have += bits;
    if (have < 32) continue;
    have -= 32;
    ring[word++] = static_cast<uint32_t>(pending >> have);
  }
}

double trellis_factor(int bits) noexcept {
  constexpr double factors[] = {0.98, 0.92, 0.90};
  return factors[bits - trellis_min_bits];
}

double trellis_rms(std::span<const float> row) noexcept { return rotated_norm(row, 1); }

TrellisScale trellis_scale(const Scheme& scheme, double rms, float unit) noexcept {
  return trellis_store_scale(rms / (trellis_level_rms * trellis_factor(scheme.bits)) / unit, unit);
}

TrellisScale trellis_store_scale(double scale, float unit) noexcept {
  const double most = largest_scale_of(unit);
  const StoredScale stored = store_scale(scale, ScaleType::f16, static_cast<float>(most));
  TrellisScale result{static_cast<uint16_t>(stored.bits), stored.value, 0, scale > most};
  // Rounding may have gone up.
  while (result.value > most) result.value = decode_scale(--result.bits, ScaleType::f16);
  result.step = result.value * unit;
  return result;
}

TrellisScale trellis_load_scale(const PackedWeight& canonical, int64_t row) noexcept {
  const auto at = static_cast<size_t>(row);
  const float value = load_scale(canonical.plane(PlaneRole::scales), at);
  return {canonical.plane(PlaneRole::scales).bytes.as<uint16_t>()[at], value,
          value * canonical.plane(PlaneRole::codebook).bytes.as<float>()[0], false};
}

int trellis_exponent(const Scheme& scheme, double smallest, double largest) noexcept {
  if (largest == 0) return trellis_usual_exponent;
  // What is beyond fp32 here is so far out that its exponent is clamped anyway.
  const double step = std::ldexp(1 / (trellis_level_rms * trellis_factor(scheme.bits)), -trellis_usual_exponent);
  constexpr double most = std::numeric_limits<float>::max(), least = std::numeric_limits<float>::denorm_min();
  const auto scale = [&](double rms) { return static_cast<float>(std::clamp(rms * step, least, most)); };
  return trellis_usual_exponent + kbit_range_exponent(scale(smallest), scale(largest), ScaleType::f16);
}

BitPlace trellis_place(const Scheme& scheme, int64_t k, int64_t row, int64_t col, int bit) noexcept {
  const int words = trellis_ring_words(scheme.bits);
  const int at = (static_cast<int>(row % trellis_rows) + 1) * scheme.bits - 1 - bit;
  return {(row / trellis_rows * k + col) * words + at / 32, 31 - at % 32, row};
}

SchemeRow trellis_row() {
  return {.family = SchemeFamily::trellis,
          .name = "trellis",
          .description = "2 to 4 bits of a ring down 128 rows of a column, decoded by a computed code; a scale per row",
          .form = form,
          .schemes = representative_schemes,
          .print = print,
          .parse = parse,
          .table = nullptr,
          .planes = planes,
          .validate = validate,
          .largest_scale = largest_scale,
          .decode_row = decode_row,
          .encode = encode,
          .recode = recode,
          .error_bound = error_bound,
          .bits_per_weight = bits_per_weight,
          .place = place};
}

}  // namespace w4q::formats
