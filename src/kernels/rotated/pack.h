// Rotated weights as their kernels read them: codes and norms stand as in rotated-fragment, norms are f16 whatever they
// are in the file.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "formats/packed.h"
#include "repack/layout_rotated_fragment.h"

namespace w4q::kernels {

using repack::norm_count;
using repack::norm_place;

/// How a pass stands in GPU memory: norms are f16, of kbit weights those of blocks of 32.
formats::Scheme rotated_device_scheme(const formats::Scheme& scheme);

/// A canonical pass on the host: of the rotated family, or of kbit, whose scales are norms of blocks of 32 and whose
/// table has the levels.
struct RotatedPlanes {
  std::vector<uint16_t> norms;  ///< f16: exact for f16 and E4M4; f32 norms are rounded
  std::vector<float> levels;    ///< [2^bits]
  float level_max = 1;
  float norm_max = 1;
};
RotatedPlanes rotated_planes(const formats::PackedWeight& canonical);
/// Its parts: the power of two that f32 norms, the largest of which is `largest`, are multiplied by, 0 for other types;
/// and the levels of a pass in any layout, divided by it.
int norm_exponent(formats::ScaleType type, float largest) noexcept;
std::vector<float> norm_levels(const formats::PackedWeight& pass, int exponent);

/// `b` is this times `a`, but for fp32 rounding; 0 where that is not so.
float level_ratio(std::span<const float> a, std::span<const float> b) noexcept;

/// Word i holds the signs of inputs 32·i … 32·i + 31, whole chunks of 128 inputs: bit 15 − j/2 + 16·(j mod 2) is set
/// where input j of them is negated. So a shift brings the signs of a pair of inputs to where two halves have theirs.
std::vector<uint32_t> rotation_signs(const formats::InputRotation& rotation);

}  // namespace w4q::kernels
