#include "kernels/rotated/pack.h"

#include <algorithm>
#include <cmath>

#include "core/float_formats.h"
#include "formats/rotated.h"
#include "formats/table/table_format.h"

namespace w4q::kernels {

using formats::PlaneRole;

formats::Scheme rotated_device_scheme(const formats::Scheme& scheme) {
  return {formats::SchemeFamily::rotated, scheme.bits, scheme.block, formats::ScaleType::f16};
}

RotatedPlanes rotated_planes(const formats::PackedWeight& canonical) {
  const int64_t groups = formats::rotated_groups(canonical.scheme, canonical.k);
  const formats::Plane& stored = canonical.plane(PlaneRole::scales);
  float largest = 0x1p-14f;
  for (int64_t i = 0; i < canonical.n * groups; ++i) {
    largest = std::max(largest, formats::load_scale(stored, static_cast<size_t>(i)));
  }
  const int exponent = norm_exponent(canonical.scheme.scale, largest);
  RotatedPlanes planes;
  planes.norms.resize(static_cast<size_t>(norm_count(canonical.n, groups)));
  for (int64_t row = 0; row < canonical.n; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const float norm = formats::load_scale(stored, static_cast<size_t>(row * groups + group));
      planes.norms[static_cast<size_t>(norm_place(row, group, groups))] = f16_from_f32(std::ldexp(norm, exponent));
    }
  }
  planes.norm_max = std::ldexp(largest, exponent);
  planes.levels = norm_levels(canonical, exponent);
  planes.level_max = formats::table_max(planes.levels);
  return planes;
}

/// f32 norms move into the range of f16.
int norm_exponent(formats::ScaleType type, float largest) noexcept {
  return type == formats::ScaleType::f32 ? 14 - std::ilogb(largest) : 0;
}

std::vector<float> norm_levels(const formats::PackedWeight& pass, int exponent) {
  auto levels = formats::table_levels(formats::scheme_row(pass.scheme.family).table(pass.scheme), pass);
  for (float& level : levels) level = std::ldexp(level, -exponent);
  return levels;
}

float level_ratio(std::span<const float> a, std::span<const float> b) noexcept {
  if (a.size() != b.size()) return 0;
  const float ratio = formats::table_max(b) / formats::table_max(a);
  const bool alike = std::ranges::equal(a, b, [ratio](float first, float second) {
    return std::abs(first * ratio - second) <= 0x1p-22f * std::abs(second);
  });
  return alike ? ratio : 0;
}

std::vector<uint32_t> rotation_signs(const formats::InputRotation& rotation) {
  const auto factors = rotation.factors();
  std::vector<uint32_t> words((factors.size() + 127) / 128 * 4);
  for (size_t i = 0; i < factors.size(); ++i) {
    words[i / 32] |= (factors[i] < 0 ? 1u : 0u) << (15 - i % 32 / 2 + 16 * (i % 2));
  }
  return words;
}

}  // namespace w4q::kernels
