#include "formats/integer.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/text.h"

namespace w4q::formats {
namespace {

/// No plane of so many weights, counted in bits, overflows 64 bits.
constexpr int64_t max_weights = int64_t{1} << 48;

std::span<const uint32_t> row_words(const PackedWeight& weight, int64_t row) {
  const auto words = static_cast<size_t>(dense_words(weight.k, weight.scheme.bits));
  return weight.plane(PlaneRole::codes).bytes.as<uint32_t>().subspan(static_cast<size_t>(row) * words, words);
}

}  // namespace

float integer_scale_max(const Scheme& scheme) noexcept {
  const float largest = scale_codec(scheme.scale).largest;
  // The other types reach to the end of fp32, and products must stay within it.
  return scheme.scale == ScaleType::f16 ? largest
                                        : std::ldexp(largest, -(scheme.asymmetric ? scheme.bits : scheme.bits - 1));
}

std::vector<PlaneSpec> integer_planes(const Scheme& scheme, int64_t n, int64_t k) {
  check_dimensions(n, k, to_string(scheme));
  if (n > max_weights / k) {
    throw Error(ErrorCode::unsupported, concat(to_string(scheme), ": cannot pack ", n, " outputs × ", k, " inputs"))
        .detail("a weight has at most 2^48 values");
  }
  const int64_t groups = integer_groups(scheme, k);
  std::vector<PlaneSpec> specs = {{PlaneRole::codes, DType::i32, {n, dense_words(k, scheme.bits)}},
                                  {PlaneRole::scales, scale_codec(scheme.scale).dtype, {n, groups}}};
  if (scheme.asymmetric) specs.push_back({PlaneRole::zeros, DType::u8, {n, groups}});
  if (scheme.act_order) specs.push_back({PlaneRole::group_index, DType::i32, {k}});
  return specs;
}

PackedWeight allocate_integer(const Scheme& scheme, int64_t n, int64_t k) {
  PackedWeight weight = allocate_canonical(scheme, n, k);
  if (!scheme.act_order) return weight;
  const int64_t size = integer_group_size(scheme, k);
  const auto index = weight.plane(PlaneRole::group_index).bytes.as<int32_t>();
  for (int64_t col = 0; col < k; ++col) index[static_cast<size_t>(col)] = static_cast<int32_t>(col / size);
  return weight;
}

void integer_read_codes(const PackedWeight& canonical, int64_t row, std::span<uint8_t> codes) {
  ensure(static_cast<int64_t>(codes.size()) == canonical.k, "integer_read_codes: not k codes");
  dense_unpack(row_words(canonical, row), canonical.scheme.bits, codes);
}

void integer_write_codes(PackedWeight& canonical, int64_t row, std::span<const uint8_t> codes) {
  ensure(static_cast<int64_t>(codes.size()) == canonical.k, "integer_write_codes: not k codes");
  const std::span<const uint32_t> words = row_words(canonical, row);
  dense_pack(codes, canonical.scheme.bits, {const_cast<uint32_t*>(words.data()), words.size()});
}

void integer_read_scales(const PackedWeight& canonical, int64_t row, std::span<float> scales) {
  load_scales(canonical.plane(PlaneRole::scales), static_cast<size_t>(row) * scales.size(), scales);
}

void integer_read_zeros(const PackedWeight& canonical, int64_t row, std::span<uint8_t> zeros) {
  if (!canonical.scheme.asymmetric) {
    std::ranges::fill(zeros, static_cast<uint8_t>(integer_symmetric_zero(canonical.scheme.bits)));
    return;
  }
  const auto plane = canonical.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  std::ranges::copy(plane.subspan(static_cast<size_t>(row) * zeros.size(), zeros.size()), zeros.begin());
}

IntegerScale integer_store_scale(const Scheme& scheme, double scale) noexcept {
  const StoredScale stored = store_scale(scale, scheme.scale, integer_scale_max(scheme));
  const uint32_t bits = std::max(stored.bits, 1u);  // the smallest subnormal
  return {decode_scale(bits, scheme.scale), bits, 0, stored.saturated};
}

IntegerScale integer_scale(const Scheme& scheme, float low, float high) noexcept {
  low = std::min(low, 0.0f);
  high = std::max(high, 0.0f);
  const int steps = (1 << scheme.bits) - 1;
  const int symmetric_zero = integer_symmetric_zero(scheme.bits);
  // In double, where differences and quotients of any two floats stay in range.
  const double range = scheme.asymmetric ? static_cast<double>(high) - static_cast<double>(low)
                                         : 2.0 * static_cast<double>(std::max(-low, high));
  IntegerScale result = integer_store_scale(scheme, range == 0 ? 1.0 : range / steps);
  result.zero = symmetric_zero;
  if (!scheme.asymmetric || range == 0) return result;
  const float zero = std::min(-low / result.value, static_cast<float>(steps));
  constexpr float rounder = 0x1.8p23f;
  result.zero = static_cast<int>((zero + rounder) - rounder);
  return result;
}

}  // namespace w4q::formats
