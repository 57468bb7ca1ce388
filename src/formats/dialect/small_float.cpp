#include "formats/dialect/small_float.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/parallel.h"
#include "core/text.h"
#include "formats/scale_codec.h"
#include "formats/small_float.h"
#include "formats/table/table_format.h"

namespace w4q::formats {
namespace {

/// FP8 whose scales lie over rows and columns.
constexpr int blocks_of_both = 128;

/// Of a task: some 10 µs.
constexpr int64_t codes_at_a_time = 1 << 16;

TableFormat format_of(const Scheme& scheme) { return scheme_row(scheme.family).table(scheme); }

/// The two codes of each byte, the low half first.
void split_pairs(std::span<const uint8_t> bytes, std::span<uint8_t> codes) {
  using Pair = std::array<uint8_t, 2>;
  static const auto pairs = [] {
    std::array<Pair, 256> made{};
    for (size_t byte = 0; byte < made.size(); ++byte)
      made[byte] = {static_cast<uint8_t>(byte & 15), static_cast<uint8_t>(byte >> 4)};
    return made;
  }();
  for (size_t i = 0; i < bytes.size(); ++i) std::memcpy(codes.data() + 2 * i, pairs[bytes[i]].data(), sizeof(Pair));
}

Shape scale_shape(const Scheme& scheme, int64_t n, int64_t k, const FloatNames& names) {
  const auto specs = scheme_row(scheme.family).planes(scheme, n, k);
  const Shape planes = specs[1].shape;
  if (scheme.block == whole_tensor) return names.flat_scales ? Shape{} : Shape{1};
  if (scheme.block == whole_row && names.flat_scales) return {n};
  if (scheme.block == blocks_of_both && names.flat_scales) return {planes[0], 1, planes[1], 1};
  return planes;
}

}  // namespace

std::vector<StoredSpec> small_float_specs(const Scheme& scheme, int64_t n, int64_t k, const FloatNames& names) {
  const bool pairs = scheme.bits == 4;
  const DType scale = scheme.scale == ScaleType::e8m0 ? DType::u8 : scale_codec(scheme.scale).dtype;
  std::vector<StoredSpec> specs = {
      {std::string(names.codes), pairs ? DType::u8 : DType::f8_e4m3, {n, pairs ? (k + 1) / 2 : k}},
      {std::string(names.scales), scale, scale_shape(scheme, n, k, names)}};
  if (scheme.scale == ScaleType::e4m3) {
    specs.push_back({std::string(names.factor), DType::f32, names.flat_scales ? Shape{} : Shape{1}});
  }
  return specs;
}

std::vector<StoredTensor> encode_small_float(const PackedWeight& canonical, const FloatNames& names) {
  const Scheme& scheme = canonical.scheme;
  const TableFormat format = format_of(scheme);
  std::vector<StoredTensor> result;
  for (auto& spec : small_float_specs(scheme, canonical.n, canonical.k, names)) {
    result.push_back(allocate_stored(std::move(spec)));
  }
  const auto k = static_cast<size_t>(canonical.k);
  std::vector<uint8_t> codes(k + k % 2);
  for (int64_t row = 0; row < canonical.n; ++row) {
    table_read_codes(format, canonical, row, std::span(codes).first(k));
    const size_t width = scheme.bits == 4 ? codes.size() / 2 : k;
    uint8_t* const out = result[0].bytes.as<uint8_t>().data() + static_cast<size_t>(row) * width;
    if (scheme.bits == 8) {
      std::copy_n(codes.begin(), k, out);
      continue;
    }
    for (size_t i = 0; i < width; ++i) out[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  }
  std::ranges::copy(canonical.plane(PlaneRole::scales).bytes.bytes(), result[1].bytes.data());
  if (scheme.scale != ScaleType::e4m3) return result;
  const float factor = tensor_factor(canonical);
  result[2].bytes.as<float>()[0] = scheme.divisor == names.divides ? factor : 1 / factor;
  return result;
}

PackedWeight decode_small_float(const Scheme& scheme, int64_t n, int64_t k, std::span<const StoredTensor> tensors,
                                const FloatNames& names) {
  const TableFormat format = format_of(scheme);
  PackedWeight weight = allocate_canonical(scheme, n, k);
  std::ranges::copy(small_float_table(scheme.bits), weight.plane(PlaneRole::codebook).bytes.as<float>().begin());
  const auto stored_codes = stored(tensors, names.codes).bytes.as<const uint8_t>();
  const size_t width = static_cast<size_t>(scheme.bits == 4 ? (k + 1) / 2 : k);
  parallel_for(n, std::max<int64_t>(codes_at_a_time / std::max<int64_t>(k, 1), 1), [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> codes(2 * width);
    for (int64_t row = begin; row < end; ++row) {
      const auto from = stored_codes.subspan(static_cast<size_t>(row) * width, width);
      if (scheme.bits == 4) split_pairs(from, codes);
      table_write_codes(format, weight, row,
                        scheme.bits == 8 ? from : std::span<const uint8_t>(codes).first(static_cast<size_t>(k)));
    }
  });
  std::ranges::copy(stored(tensors, names.scales).bytes.bytes(), weight.plane(PlaneRole::scales).bytes.data());
  if (scheme.scale != ScaleType::e4m3) return weight;
  const float factor = stored(tensors, names.factor).bytes.as<const float>()[0];
  weight.plane(PlaneRole::tensor_scale).bytes.as<float>()[0] = scheme.divisor == names.divides ? factor : 1 / factor;
  return weight;
}

bool has_exact_reciprocal(float factor) noexcept {
  int exponent = 0;
  return std::isnormal(factor) && std::isnormal(1 / factor) && std::abs(std::frexp(factor, &exponent)) == 0.5f;
}

}  // namespace w4q::formats
