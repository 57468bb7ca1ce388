#include "formats/rotated.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/error.h"
#include "core/float_formats.h"
#include "core/text.h"
#include "formats/e4m4.h"
#include "formats/kbit.h"

namespace w4q::formats {
namespace {

// Lloyd–Max for N(0, 1): 200 rounds of centroids and midpoints from equal bins on [−3.5, 3.5] on, in double, rounded
// once. TurboQuant's files hold the same numbers; the bits matter, so they are stored and not computed.
constexpr float normal2[] = {-0x1.82aabap+0f, -0x1.cfa592p-2f, 0x1.cfa592p-2f, 0x1.82aabap+0f};
constexpr float normal3[] = {-0x1.1372f4p+1f, -0x1.580a7p+0f, -0x1.83132p-1f, -0x1.f5f3fp-3f,
                             0x1.f5f3fp-3f,   0x1.83132p-1f,  0x1.580a7p+0f,  0x1.1372f4p+1f};
constexpr float normal4[] = {-0x1.5dd58p+1f,  -0x1.08e7a4p+1f, -0x1.9e5d3p+0f, -0x1.41bb24p+0f,
                             -0x1.e2b69cp-1f, -0x1.507122p-1f, -0x1.8d971p-2f, -0x1.071bf8p-3f,
                             0x1.071bf8p-3f,  0x1.8d971p-2f,   0x1.507122p-1f, 0x1.e2b69cp-1f,
                             0x1.41bb24p+0f,  0x1.9e5d3p+0f,   0x1.08e7a4p+1f, 0x1.5dd58p+1f};
constexpr float normal5[] = {-0x1.ab5b3ap+1f, -0x1.63bebap+1f, -0x1.34ba24p+1f, -0x1.1029e6p+1f, -0x1.e2c9p+0f,
                             -0x1.ac855p+0f,  -0x1.7b2b62p+0f, -0x1.4d496ep+0f, -0x1.21ec92p+0f, -0x1.f0d932p-1f,
                             -0x1.a0a06p-1f,  -0x1.52798ap-1f, -0x1.05d914p-1f, -0x1.749fa8p-2f, -0x1.be0754p-3f,
                             -0x1.28fc76p-4f, 0x1.28fc76p-4f,  0x1.be0754p-3f,  0x1.749fa8p-2f,  0x1.05d914p-1f,
                             0x1.52798ap-1f,  0x1.a0a06p-1f,   0x1.f0d932p-1f,  0x1.21ec92p+0f,  0x1.4d496ep+0f,
                             0x1.7b2b62p+0f,  0x1.ac855p+0f,   0x1.e2c9p+0f,    0x1.1029e6p+1f,  0x1.34ba24p+1f,
                             0x1.63bebap+1f,  0x1.ab5b3ap+1f};

constexpr size_t sums = 32;

}  // namespace

std::span<const float> normal_codebook(int bits) noexcept {
  constexpr std::span<const float> tables[] = {normal2, normal3, normal4, normal5};
  return tables[bits - 2];
}

double rotated_gain(std::span<const float> codebook, int bits) noexcept {
  return static_cast<double>(kbit_table_max(codebook)) / static_cast<double>(normal_codebook(bits).back());
}

void rotated_levels(std::span<const float> codebook, int64_t group, std::span<float> levels) noexcept {
  const double root = std::sqrt(static_cast<double>(group));
  std::ranges::transform(codebook, levels.begin(),
                         [root](float value) { return static_cast<float>(static_cast<double>(value) / root); });
}

double rotated_norm(std::span<const float> values, int64_t group) noexcept {
  std::array<double, sums> partial{};
  for (size_t i = 0; i < values.size(); ++i) {
    const double value = values[i];
    partial[i % sums] += value * value;
  }
  for (size_t half = sums / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) partial[i] += partial[i + half];
  }
  const auto size = static_cast<int64_t>(values.size());
  const double sum = size == group ? partial[0] : partial[0] * static_cast<double>(group) / static_cast<double>(size);
  return std::sqrt(sum);
}

float rotated_scale_max(ScaleType type) noexcept {
  switch (type) {
    case ScaleType::e4m4:
      return e4m4_max;
    case ScaleType::f16:
      return 65504.0f;
    default:
      return std::numeric_limits<float>::max();
  }
}

float rotated_scale_min_normal(ScaleType type) noexcept {
  switch (type) {
    case ScaleType::e4m4:
      return e4m4_min_normal;
    case ScaleType::f16:
      return 0x1p-14f;
    default:
      return std::numeric_limits<float>::min();
  }
}

StoredNorm rotated_store_norm(double norm, ScaleType type) noexcept {
  const float largest = rotated_scale_max(type);
  const bool saturated = norm > static_cast<double>(largest);
  const float value = saturated ? largest : static_cast<float>(norm);
  if (type == ScaleType::e4m4) {
    const uint8_t code = e4m4_encode(value);
    return {code, e4m4_decode(code), saturated};
  }
  if (type == ScaleType::f16) {
    const uint16_t half = f16_from_f32(value);
    return {half, f32_from_f16(half), saturated};
  }
  return {std::bit_cast<uint32_t>(value), value, saturated};
}

float rotated_norm_at(const Plane& scales, size_t index) noexcept {
  switch (scales.spec.dtype) {
    case DType::u8:
      return e4m4_decode(scales.bytes.as<uint8_t>()[index]);
    case DType::f16:
      return f32_from_f16(scales.bytes.as<uint16_t>()[index]);
    default:
      return scales.bytes.as<float>()[index];
  }
}

void rotated_put_norm(Plane& scales, size_t index, const StoredNorm& norm) noexcept {
  switch (scales.spec.dtype) {
    case DType::u8:
      scales.bytes.as<uint8_t>()[index] = static_cast<uint8_t>(norm.bits);
      return;
    case DType::f16:
      scales.bytes.as<uint16_t>()[index] = static_cast<uint16_t>(norm.bits);
      return;
    default:
      scales.bytes.as<uint32_t>()[index] = norm.bits;
  }
}

PackedWeight rotated_as_kbit(const PackedWeight& canonical) {
  const Scheme scheme{SchemeFamily::kbit, canonical.scheme.bits, kbit_block, canonical.scheme.scale};
  if (scheme.scale != ScaleType::e4m4 && scheme.scale != ScaleType::f16) {
    throw Error(ErrorCode::unsupported, concat(to_string(canonical.scheme), " as kbit: norms of f32"))
        .hint("norms in f16 or e4m4 fit");
  }
  PackedWeight weight = allocate_planes(scheme, canonical_layout, canonical.n, canonical.k,
                                        kbit_planes(scheme, canonical.n, canonical.k));
  weight.plane(PlaneRole::codes).bytes = canonical.plane(PlaneRole::codes).bytes.clone();
  rotated_levels(canonical.plane(PlaneRole::codebook).bytes.as<float>(), rotated_group(canonical.scheme, canonical.k),
                 weight.plane(PlaneRole::codebook).bytes.as<float>());
  const Plane& norms = canonical.plane(PlaneRole::scales);
  Plane& scales = weight.plane(PlaneRole::scales);
  const int64_t blocks = kbit_blocks(canonical.k), group = rotated_group(canonical.scheme, canonical.k);
  const auto width = norms.bytes.size() / static_cast<size_t>(element_count(norms.spec.shape));
  for (int64_t index = 0; index < canonical.n * blocks; ++index) {
    const int64_t norm =
        index / blocks * rotated_groups(canonical.scheme, canonical.k) + index % blocks * kbit_block / group;
    std::memcpy(scales.bytes.data() + static_cast<size_t>(index) * width,
                norms.bytes.data() + static_cast<size_t>(norm) * width, width);
  }
  return weight;
}

}  // namespace w4q::formats
