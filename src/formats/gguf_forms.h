// Blocks of GGUF taken apart: how a type stores scales and codes, and what a code stands for under them. For whoever
// searches scales, or rounds under scales that are there already.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/ggml_type.h"

namespace w4q::formats {

/// What the one number is that all scales of a block are multiples of.
enum class GgufUnit { f16, e8m0_half };

/// How a type stores a block. A weight is step · level − offset, each product and sum one fp32 operation; of each part of
/// the block, step = d · scale and offset = d_minimum · minimum.
struct GgufForm {
  GgmlType type;
  int block = 32;
  int part = 32;                            ///< weights that share a scale
  int lowest_level = 0, highest_level = 0;  ///< levels are the integers between them …
  std::span<const int8_t> table = {};       ///< … or these, ascending
  int lowest_scale = 1, highest_scale = 1;  ///< both 1: none is stored
  int highest_minimum = 0;                  ///< minimums are 0 … highest_minimum; 0: the type has no offsets
  bool signed_minimum = false;              ///< the offset of a block is a number of its own, of either sign
  GgufUnit unit = GgufUnit::f16;
  float largest = 0;     ///< magnitude that every block can hold
  bool lattice = false;  ///< it is made of points (gguf_lattice.h): levels and scales are not what is said here

  int parts() const noexcept { return block / part; }
  int levels() const noexcept {
    return table.empty() ? highest_level - lowest_level + 1 : static_cast<int>(table.size());
  }
  bool has_offset() const noexcept { return highest_minimum > 0 || signed_minimum; }
  bool nests() const noexcept { return lowest_scale != highest_scale; }
  float level(int index) const noexcept {
    return table.empty() ? static_cast<float>(lowest_level + index)
                         : static_cast<float>(table[static_cast<size_t>(index)]);
  }
};

inline constexpr int widest_gguf_block = 256;
inline constexpr int most_gguf_parts = 16;

/// Null for a type that is not made of such parts.
const GgufForm* find_gguf_form(GgmlType type) noexcept;
std::span<const GgufForm> gguf_forms() noexcept;

/// What a block says beside its codes. `d` and `d_minimum` are values that the type can store.
struct GgufScales {
  float d = 0, d_minimum = 0;
  std::array<int16_t, most_gguf_parts> scales{};
  std::array<uint8_t, most_gguf_parts> minimums{};
};

/// The nearest number that can stand as the unit of a block of this type; finite, never zero for another number.
float gguf_unit(GgufUnit unit, float value) noexcept;

/// One block. `levels` are indices of levels, ascending, form.block of them; `bytes` is one block of the type.
void store_gguf_block(const GgufForm& form, const GgufScales& scales, std::span<const uint8_t> levels,
                      std::span<std::byte> bytes);

}  // namespace w4q::formats
