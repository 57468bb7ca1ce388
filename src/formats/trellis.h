// The trellis family: down the rows of a column, 128 at a time, stands a ring of bits; a weight brings `bits` of them
// and is decoded from the last `window` that end with its own, by a computed code, so that no table is stored
// (docs/trellis.md):
//
//     weight = level(window of the weight) · u · scale(row)        level · u is exact, the product rounded once to fp32
//
// Canonical planes, strips of 128 rows:
//   codes     I32 [ceil(n/128), k, 4·bits]  one ring for each strip and column; bit b, the oldest first, is bit 31 − b mod
//                                           32 of word b div 32. The bits of rows beyond n are zero
//   scales    F16 [n]                       of rows, not negative
//   codebook  F32 [1]                       u, a power of two
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/host_device.h"
#include "formats/scheme_registry.h"

namespace w4q::formats {

/// Rows of a strip: weights of a ring.
inline constexpr int trellis_rows = 128;
inline constexpr int trellis_min_bits = 2, trellis_max_bits = 4;
inline constexpr int trellis_min_window = 8, trellis_max_window = 16;
/// The window of "trellis3" and its like: the widest at which a CPU core encodes 400,000 weights a second.
inline constexpr int trellis_usual_window = 14;
/// The largest magnitude of a level, and the root mean square of all 2^16.
inline constexpr int trellis_largest_level = 510;
inline constexpr double trellis_level_rms = 147.8;
/// u where scales fit f16 with it.
inline constexpr int trellis_usual_exponent = -7;

inline constexpr uint32_t trellis_multiplier = 0x83DCD12D;
/// The code, what a window stands for: the sum of the four bytes of a product, less its middle.
W4Q_HOST_DEVICE constexpr int trellis_level(uint32_t window) noexcept {
  const uint32_t product = window * trellis_multiplier;
  return static_cast<int>((product & 255) + (product >> 8 & 255) + (product >> 16 & 255) + (product >> 24)) -
         trellis_largest_level;
}
static_assert(trellis_level(0) == -510 && trellis_level(255) == 124 && trellis_level(65535) == -96);

/// The levels of all windows of `window` bits.
std::vector<float> trellis_levels(int window);

W4Q_HOST_DEVICE constexpr int64_t trellis_strips(int64_t n) noexcept { return (n + trellis_rows - 1) / trellis_rows; }
/// Words of a ring.
W4Q_HOST_DEVICE constexpr int trellis_ring_words(int bits) noexcept { return trellis_rows / 32 * bits; }

/// The `window` bits of a ring that end with those of weight `row` (0 … 127), the newest lowest.
uint32_t trellis_window(std::span<const uint32_t> ring, int bits, int window, int row) noexcept;

/// The ring of a strip and a column in canonical planes.
std::span<const uint32_t> trellis_ring(const PackedWeight& canonical, int64_t strip, int64_t column);
std::span<uint32_t> trellis_ring(PackedWeight& canonical, int64_t strip, int64_t column);

/// What the weights of a ring are to become, in units of levels.
struct TrellisColumn {
  std::array<float, trellis_rows> targets{};  ///< finite
  std::array<bool, trellis_rows> counts{};    ///< false: the row's scale is zero, and any level does
  int rows = trellis_rows;                    ///< those from here on are beyond n
  /// What the square of a row's error counts for, finite and not negative; all alike unless `weighed`.
  std::array<float, trellis_rows> importance{};
  bool weighed = false;
};
/// `targets` within what squares and their sums keep finite.
inline constexpr float trellis_largest_target = 0x1p20f;

/// Symbols of a ring, a weight each; those beyond the rows of its column are zero.
using TrellisSymbols = std::array<uint8_t, trellis_rows>;
void trellis_put(const TrellisSymbols& symbols, int bits, std::span<uint32_t> ring) noexcept;

/// The factor between the root mean square of a row and that of the levels it is divided into: what is farthest out
/// costs more than the rest gains.
double trellis_factor(int bits) noexcept;
/// A row's scale as stored, for weights with this root mean square.
struct TrellisScale {
  uint16_t bits = 0;
  float value = 0;  ///< decoded
  float step = 0;   ///< times u: what a level is multiplied by
  bool saturated = false;
};
TrellisScale trellis_scale(const Scheme& scheme, double rms, float unit) noexcept;
/// `scale` rounded to f16, and small enough that no product leaves fp32.
TrellisScale trellis_store_scale(double scale, float unit) noexcept;
/// A stored one.
TrellisScale trellis_load_scale(const PackedWeight& canonical, int64_t row) noexcept;
/// The exponent of u, for rows with these root mean squares: the least that is not zero, and the largest.
int trellis_exponent(const Scheme& scheme, double smallest, double largest) noexcept;
/// √(Σ v² / k), in the order of sums of rotated_norm(): the same bits wherever it is done so.
double trellis_rms(std::span<const float> row) noexcept;

/// SchemeRow::place.
BitPlace trellis_place(const Scheme& scheme, int64_t k, int64_t row, int64_t col, int bit) noexcept;

/// The registry row.
SchemeRow trellis_row();

}  // namespace w4q::formats
