// What the kernels of rotated weights read, against the decoded weights.
#include "kernels/rotated/pack.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/float_formats.h"
#include "formats/codebook.h"
#include "formats/rotated.h"
#include "formats/scheme_registry.h"
#include "kernels/dequantize/dequantize.h"
#include "random_matrix.h"

namespace w4q::kernels {
namespace {

using formats::Scheme;
using formats::SchemeFamily;

/// A weight whose blocks differ in size, so that no norm passes for another.
formats::PackedWeight packed(const Scheme& scheme, int64_t n, int64_t k) {
  test::RandomMatrix weight(n, k, 3);
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < k; ++c) weight.view().row(r)[c] *= 1 + static_cast<float>((r * 7 + c / 32) % 23);
  }
  const char* const table = scheme.family == SchemeFamily::kbit ? "nf" : "normal";
  return formats::scheme_row(scheme.family).encode(scheme, weight.values, n, k, formats::codebook(table, scheme.bits));
}

TEST(RotatedPack, LevelsTimesNormsAreTheDecodedWeights) {
  for (const char* name : {"kbit2-b32-e4m4", "kbit3-b32-f16", "kbit4-b32-e4m4", "kbit5-b32-e4m4", "rotated4-d128",
                           "rotated3-d32", "rotated4-d64-e4m4", "rotated4-d128-f32"}) {
    const Scheme scheme = formats::parse_scheme(name);
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{64, 128}, {70, 300}}) {
      const auto canonical = packed(scheme, n, k);
      const RotatedPlanes planes = rotated_planes(canonical);
      const int64_t group = formats::rotated_group(scheme, k), groups = formats::rotated_groups(scheme, k);
      test::RandomMatrix decoded(n, k, 1);
      dequantize_rows(canonical, 0, decoded.view());
      for (int64_t r = 0; r < n; ++r) {
        for (int64_t c = 0; c < k; ++c) {
          const float norm = f32_from_f16(planes.norms[static_cast<size_t>(norm_place(r, c / group, groups))]);
          const float value = decoded.view().row(r)[c];
          float nearest = INFINITY;
          for (const float level : planes.levels) nearest = std::min(nearest, std::abs(level * norm - value));
          // f32 norms are rounded to f16; the others differ by the rounding of a product.
          const float bound = scheme.scale == formats::ScaleType::f32 ? 0x1p-11f : 0x1p-22f;
          ASSERT_LE(nearest, bound * std::abs(value)) << name << " " << r << " " << c;
        }
      }
    }
  }
}

}  // namespace
}  // namespace w4q::kernels
