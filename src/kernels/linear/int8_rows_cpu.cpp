#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "core/parallel.h"
#include "kernels/linear/int8_rows.h"

namespace w4q::kernels {
namespace {

constexpr float most_code = 127;

/// Of the largest magnitude of a row.
float scale_of(float largest) noexcept {
  return std::isfinite(largest) ? largest / most_code : std::numeric_limits<float>::quiet_NaN();
}

/// A NaN among magnitudes stays: fmax would lose it.
float larger(float a, float b) noexcept { return b <= a ? a : b; }

float code_of(float x, float scale) noexcept { return std::clamp(std::nearbyint(x / scale), -most_code, most_code); }

template <class Code>
float quantize_row(const float* x, int64_t count, Code* codes) noexcept {
  float largest = 0;
  for (int64_t i = 0; i < count && !std::isnan(largest); ++i) largest = larger(largest, std::abs(x[i]));
  const float scale = scale_of(largest);
  if (scale > 0) {
    for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<Code>(code_of(x[i], scale));
  } else {
    std::fill_n(codes, count, Code{0});
  }
  return scale;
}

}  // namespace

float quantize_int8(std::span<const float> x, std::span<int8_t> codes) noexcept {
  return quantize_row(x.data(), static_cast<int64_t>(x.size()), codes.data());
}

void quantize_int8(MatrixView<const float> x, std::span<float> scales, MatrixView<float> codes) {
  parallel_for(x.rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      scales[static_cast<size_t>(r)] = quantize_row(x.row(r), x.cols, codes.row(r));
    }
  });
}

bool takes_int8_activations(const formats::Scheme& s) noexcept {
  return s.family == formats::SchemeFamily::integer && (s.bits == 4 || s.bits == 8) &&
         (s.scale == formats::ScaleType::f16 || s.scale == formats::ScaleType::bf16) &&
         (s.block == formats::whole_row || (s.block >= 32 && std::has_single_bit(static_cast<unsigned>(s.block))));
}

}  // namespace w4q::kernels
