// Scales of GGUF blocks by least weighted squared error, and rounding under them, sixteen rows at a time. Every
// instruction set gives the same bits (class E0): rows are lanes that never meet, and columns are summed in order.
#pragma once

#include <array>
#include <cstdint>

#include "formats/gguf_forms.h"
#include "quantize/kbit_panel.h"

namespace w4q::quantize {

/// The scales of one block of each row of a panel: lane r is row r.
struct GgufPanelScales {
  using Lanes = std::array<float, panel_rows>;

  alignas(64) Lanes d{}, d_minimum{};                                            ///< as a file holds them
  alignas(64) std::array<Lanes, formats::most_gguf_parts> scales{}, minimums{};  ///< integers
  alignas(64) std::array<Lanes, formats::most_gguf_parts> steps{}, offsets{};    ///< what they stand for

  formats::GgufScales row(const formats::GgufForm& form, int row) const;
  void set_row(const formats::GgufForm& form, int row, const formats::GgufScales& scales);
};

/// Chooses the scales of one block of sixteen rows: for every part the step and the offset with the least Σ_c
/// importance[c] · (x − x̂)², then what of it can be stored, parts and block in turn while the error falls. `values`
/// [form.block · panel_rows], the value of column c and row r at [c · panel_rows + r], finite and at most form.largest;
/// `importance` [form.block], positive, near 1.
void search_gguf_scales(const formats::GgufForm& form, const float* values, const float* importance,
                        GgufPanelScales& out);

/// Columns of a block that are rounded one after the other.
struct GgufColumns {
  int count = 0;
  const uint8_t* parts = nullptr;   ///< [count]: the part that the column belongs to
  const float* targets = nullptr;   ///< [count · panel_rows]
  const float* weights = nullptr;   ///< the same: what errors are counted from
  const float* coupling = nullptr;  ///< row c has c values, by which earlier errors move column c; null: none do
  int64_t coupling_stride = 0;
};

/// `levels` [count · panel_rows]: indices, ascending; `errors` the same: weights − rounded.
void round_gguf_columns(const formats::GgufForm& form, const GgufPanelScales& scales, const GgufColumns& columns,
                        uint8_t* levels, float* errors);

}  // namespace w4q::quantize
