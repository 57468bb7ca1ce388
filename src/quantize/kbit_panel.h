// Trying scales on blocks of table codes, sixteen rows at a time: the inner loop of the scale search and of error
// feedback, for kbit's blocks, for the groups of the rotated family, whose norms are scales of its levels, and for small
// floats, whose levels are computed. Every instruction set gives the same bits (class E0): rows are lanes that never meet, and columns are summed in order.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "formats/kbit.h"

namespace w4q::quantize {

/// Rows of a panel.
inline constexpr int panel_rows = 16;
/// Columns of the widest block whose errors can be coupled: a trial costs their square.
inline constexpr int widest_coupled = 256;

/// A table as the panel loops want it.
struct KbitLevels {
  static constexpr int max_codes = 32;
  alignas(64) std::array<float, max_codes> levels{};
  alignas(64) std::array<float, max_codes> midpoints{};  ///< 2^bits − 1 of them
  int bits = 0;
  float largest = 0;    ///< magnitude
  bool floats = false;  ///< E2M1 or E4M3, by `bits`, and neither levels nor midpoints
  float factor = 1;     ///< of small floats: what scales are relative to, a power of two

  explicit KbitLevels(std::span<const float> codebook);
  static KbitLevels small_floats(int bits, float factor);

  /// What a code stands for.
  float level(uint8_t code) const noexcept;

 private:
  KbitLevels() = default;
};

/// One block of a panel; the value of column c and row r stands at [c · panel_rows + r]. The error of a trial is Σ_c
/// importance[c] · (target[c] − rounded[c])² for every row, relative to the square of a power of two near its largest
/// target. With `coupling` the errors of earlier columns move the targets of later ones: target[c] becomes target[c] +
/// Σ_{j<c} coupling[c][j] · (weights[j] − rounded[j]).
struct PanelBlock {
  const float* target = nullptr;      ///< [columns · panel_rows], finite
  const float* weights = nullptr;     ///< the same, with coupling: what the block is to become
  const float* importance = nullptr;  ///< [columns]
  const float* coupling = nullptr;    ///< row c has c values; null without
  int64_t coupling_stride = 0;
  int columns = formats::kbit_block;
  bool row_alone = false;  ///< all rows are the same one: sixteen scales are tried at a time
};

/// A scale for each row: as stored, and its value, the factor of small floats included.
struct PanelScales {
  std::array<uint32_t, panel_rows> bits{};
  alignas(64) std::array<float, panel_rows> values{};
};

/// The largest magnitude of each row's targets.
std::array<float, panel_rows> panel_absmax(const PanelBlock& block) noexcept;

/// The scales of the rule of absmax (formats::store_scale).
PanelScales absmax_scales(const PanelBlock& block, const KbitLevels& levels, formats::ScaleType type) noexcept;

/// For each row the scale with the least error among the candidates near the rule of absmax; ties go to the smaller
/// scale. E4M4: every value from 32 steps (a factor of 4 in the normal range) below to 8 steps above. f16: the
/// factors of the same steps, 1/4 … 1.5, and what least squares makes of the best; f32 as f16, not rounded. Rows of
/// zeros get scale 0. Of small floats: E4M3 and 16- and 32-bit scales from half to twice the rule's, so that the largest
/// weight may become any of the larger floats; E8M0 from half to four times. With `errors` the error of each row.
PanelScales searched_scales(const PanelBlock& block, const KbitLevels& levels, formats::ScaleType type,
                            std::array<float, panel_rows>* errors = nullptr);

/// What a trial with given scales decides.
struct PanelCodes {
  std::vector<uint8_t> codes;  ///< [columns · panel_rows]
  std::vector<float> rounded;  ///< level · scale
};
void panel_codes(const PanelBlock& block, const KbitLevels& levels, const PanelScales& scales, PanelCodes& out);

}  // namespace w4q::quantize
