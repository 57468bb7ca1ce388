// Rotated weights in the order in which their GEMV reads them: codes as in kbit-fragment, and for every 64 outputs and
// group of inputs the 64 norms, a lane's eight beside each other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/host_device.h"
#include "formats/packed.h"

namespace w4q::kernels {

/// Where the norm of a row and group stands; norms of rows from n on are zero.
W4Q_HOST_DEVICE constexpr int64_t norm_place(int64_t row, int64_t group, int64_t groups) {
  return (row / 64 * groups + group) * 64 + 8 * (row % 8) + 2 * (row % 64 / 16) + row % 16 / 8;
}
constexpr int64_t norm_count(int64_t n, int64_t groups) { return (n + 63) / 64 * 64 * groups; }

/// A canonical pass on the host.
struct RotatedPlanes {
  std::vector<uint16_t> norms;  ///< f16: exact for f16 and E4M4; f32 norms are rounded
  std::vector<float> levels;    ///< [2^bits]
  float level_max = 1;
  float norm_max = 1;
};
RotatedPlanes rotated_planes(const formats::PackedWeight& canonical);

/// `b` is this times `a`, but for fp32 rounding; 0 where that is not so.
float level_ratio(std::span<const float> a, std::span<const float> b) noexcept;

/// Word i holds the signs of inputs 32·i … 32·i + 31, whole chunks of 128 inputs: bit 15 − j/2 + 16·(j mod 2) is set
/// where input j of them is negated. So a shift brings the signs of a pair of inputs to where two halves have theirs.
std::vector<uint32_t> rotation_signs(const formats::InputRotation& rotation);

/// The codes alone, for what has no GPU at hand.
std::vector<uint32_t> rotated_fragment_codes(const formats::PackedWeight& canonical);

}  // namespace w4q::kernels
