// The inner loops of the kbit quantizer, chosen at run time for the machine's instruction set. Every set gives the same
// bits as the plain definition in formats/kbit.h (class E0).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"

namespace w4q::quantize {

/// What choosing codes by bisection needs. A code is the number of thresholds strictly below x; `ascending_thresholds`
/// has 2^bits − 1 of them, the midpoints of a table as a rule.
struct KbitSearch {
  static constexpr int max_bits = 5;
  static constexpr int max_level_entries = 1 << (max_bits - 1);

  /// The thresholds that decide bit `bit` of a code, indexed by the code's higher bits.
  alignas(64) std::array<std::array<float, max_level_entries>, max_bits> thresholds{};
  /// The plane words of a block of zeros.
  std::array<uint32_t, max_bits> zero_words{};
  int bits = 0;

  explicit KbitSearch(std::span<const float> ascending_thresholds);
};

/// The largest magnitude of each block of 32 values of `row` (f32, f16 or bf16, unaligned), the last block ragged.
/// A block that holds a NaN or an infinity gives one of the two.
void block_absmax(std::span<const std::byte> row, DType dtype, std::span<float> absmax);

/// The plane words of `scales.size()` blocks: codes of values[i] / scale. `values` holds 32 finite floats a block,
/// `words` has `search.bits` a block. A scale of zero stands for a block of zeros.
void encode_blocks(const KbitSearch& search, std::span<const float> values, std::span<const float> scales,
                   std::span<uint32_t> words);

}  // namespace w4q::quantize
