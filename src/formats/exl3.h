// The EXL3 family, exllamav3's format: tiles of 16 inputs × 16 outputs, each a closed stream of bits of which a weight
// brings `bits` and reads the last 16 that end with its own, by a computed code; the matrix of these values stands
// between two Hadamard rotations and a signed scale for every input and output (docs/exl3.md):
//
//     W = diag(svh) · H · inner · H · diag(suh)      H: blocks of 128, Walsh–Hadamard matrices over √128
//
// Canonical planes, with n and k up to multiples of 128 (N, K); what stands there belongs to no weight:
//   codes         I16 [K/16, N/16, 16·bits]  as the program stores its tensor .trellis: words of 32 bits, little end first;
//                                            bit b of a tile, the oldest first, is bit 31 − b mod 32 of word b div 32
//   scales        F16 [N]                    svh, of either sign
//   input_scales  F16 [K]                    suh
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "core/host_device.h"
#include "core/views.h"
#include "formats/scheme_registry.h"
#include "formats/trellis_search.h"

namespace w4q::formats {

inline constexpr int exl3_min_bits = 1, exl3_max_bits = 8;
inline constexpr int exl3_window = 16;
inline constexpr int64_t exl3_tile = 16;          ///< inputs, and outputs, of a tile
inline constexpr int exl3_tile_weights = 256;     ///< of a tile
inline constexpr int64_t exl3_block = 128;        ///< inputs, and outputs, that are rotated together
inline constexpr float exl3_turned = 1.0f / 128;  ///< both rotations' factors
inline constexpr uint32_t exl3_mcg = 0xCBAC1FED;  ///< multiplier of the code mcg; mul1's is trellis_multiplier

/// n or k with its padding.
W4Q_HOST_DEVICE constexpr int64_t exl3_padded(int64_t size) noexcept {
  return (size + exl3_block - 1) / exl3_block * exl3_block;
}

/// Where weight t of a tile stands: a lane of a tensor core has eight weights in a row.
W4Q_HOST_DEVICE constexpr int exl3_input(int t) noexcept { return t / 8 % 4 * 2 + (t & 1) + 8 * (t >> 1 & 1); }
W4Q_HOST_DEVICE constexpr int exl3_output(int t) noexcept { return t / 32 + 8 * (t >> 2 & 1); }
/// The inverse.
W4Q_HOST_DEVICE constexpr int exl3_weight(int input, int output) noexcept {
  return (output % 8 * 4 + input % 8 / 2) * 8 + (input & 1) + (input >> 3) * 2 + (output >> 3) * 4;
}
static_assert([] {
  for (int t = 0; t < exl3_tile_weights; ++t) {
    if (exl3_weight(exl3_input(t), exl3_output(t)) != t) return false;
  }
  return true;
}());

/// What a state stands for: a value of f16.
float exl3_level(TrellisCode code, uint32_t state) noexcept;
/// Of all 2^16 states; the table lives as long as the program.
std::span<const float> exl3_levels(TrellisCode code);

/// The 8·bits words of a tile of canonical planes.
std::span<const uint32_t> exl3_words(const PackedWeight& canonical, int64_t input_tile, int64_t output_tile);
std::span<uint32_t> exl3_words(PackedWeight& canonical, int64_t input_tile, int64_t output_tile);
/// The states of a tile's weights, from its words and back.
using Exl3States = std::array<uint32_t, exl3_tile_weights>;
void exl3_get(std::span<const uint32_t> words, int bits, Exl3States& states) noexcept;
void exl3_put(const Exl3States& states, int bits, std::span<uint32_t> words) noexcept;

/// The inner values of a block of 128 × 128, [inputs, outputs].
void exl3_inner_block(const PackedWeight& canonical, int64_t input_block, int64_t output_block,
                      std::span<float> values);

/// The scales of a weight whose codes are to be chosen: `inputs` [k] and `outputs` [n] positive or zero, rounded to f16
/// and given signs that a fixed seed draws; those of the padding are 1.
void exl3_put_scales(PackedWeight& canonical, std::span<const float> inputs, std::span<const float> outputs);
/// ±1 of input `index`, or of output −1 − `index`.
float exl3_sign(int64_t index) noexcept;
/// The root mean square of inner values that have the least error, by width and code.
double exl3_factor(const Scheme& scheme) noexcept;
/// What inner values have to come near to, [N, K]: the weight over its scales, rotated; zero where an input or output
/// has a scale of zero, and in the padding before it is rotated. The same bits for any number of threads.
std::vector<float> exl3_inner_targets(const PackedWeight& canonical, MatrixView<const float> weight);
/// The search for a scheme's tiles. `step_levels`: what `step` wants.
TrellisSearch exl3_search(const Scheme& scheme, TrellisStep step, std::span<const float> step_levels);
/// Chooses the codes of all tiles of 16 outputs from `output_tile` · 16 on for the targets [N, K].
void exl3_search_tiles(TrellisSearch& search, std::span<const float> targets, int64_t output_tile,
                       PackedWeight& canonical);
/// Canonical planes with the scales that plain encoding gives a weight, codes still zero: those of outputs are their root
/// mean squares, those of inputs all alike.
PackedWeight exl3_allocate(const Scheme& scheme, MatrixView<const float> weight);

/// SchemeRow::decode_rows.
void exl3_decode_rows(const PackedWeight& canonical, int64_t begin, MatrixView<float> out);

/// The registry row.
SchemeRow exl3_row();

}  // namespace w4q::formats
