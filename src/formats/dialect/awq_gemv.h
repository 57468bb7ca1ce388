// AutoAWQ's layouts "gemv" and "gemv_fast": rows of outputs, with scales and zero points padded to whole words.
//
//   gemv       codes are the canonical words; zeros I32 [n, W] and scales F16 [n, 8W] of each output, group after group
//   gemv_fast  codes I16 [n/4, k]: input c of output r is nibble c mod 32 div 8 of
//              [r div 4][64 · (c div 64) + 16 · (r mod 4) + 8 · (c mod 64 div 32) + c mod 8];
//              scales F16 [8W, n], and offsets F16 [8W, n] = −(scale · zero), the product rounded from fp32
//
// W words hold the zeros of ceil(k/g) groups, in multiples of 4 for groups of 32, of 2 for groups of 64 and of 1 for
// larger ones. What stands behind the last group is zero (docs/dialects.md).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "formats/packed.h"

namespace w4q::formats {

inline constexpr int64_t awq_gemv_fields = 8;        ///< k is a multiple: codes of a word
inline constexpr int64_t awq_gemv_fast_inputs = 64;  ///< k is a multiple
inline constexpr int64_t awq_gemv_fast_outputs = 4;  ///< n is a multiple

/// W, for groups of 32, 64, or 128 and more; 0: there is no such layout.
int64_t awq_gemv_words(int64_t group_size, int64_t k) noexcept;

/// Canonical codes of n × k, k a multiple of 64 and n of 4, and those of gemv_fast.
void awq_fast_pack_codes(std::span<const uint32_t> canonical, int64_t n, int64_t k, std::span<uint16_t> packed);
void awq_fast_unpack_codes(std::span<const uint16_t> packed, int64_t n, int64_t k, std::span<uint32_t> canonical);

/// The offset of gemv_fast, and the zero point that a reader finds in it; −1 when that is no number from 0 to 15.
uint16_t awq_fast_offset(uint16_t scale, int zero) noexcept;
int awq_fast_zero(uint16_t scale, uint16_t offset) noexcept;

/// gemv's zeros and scales of a canonical weight with zeros, and back. The spans have the sizes above. Throws bad_file
/// naming `name` when padding is not zero.
void awq_gemv_pack_groups(const PackedWeight& canonical, int64_t words, std::span<uint32_t> zeros,
                          std::span<uint16_t> scales);
void awq_gemv_unpack_groups(std::span<const uint32_t> zeros, std::span<const uint16_t> scales, int64_t words,
                            PackedWeight& canonical, std::string_view name);

/// gemv_fast's scales and offsets. Throws bad_file naming `name` when padding is not zero or an offset is no multiple
/// of its scale.
void awq_fast_pack_groups(const PackedWeight& canonical, int64_t words, std::span<uint16_t> scales,
                          std::span<uint16_t> offsets);
void awq_fast_unpack_groups(std::span<const uint16_t> scales, std::span<const uint16_t> offsets, int64_t words,
                            PackedWeight& canonical, std::string_view name);

/// The first zero point of a canonical weight that gemv_fast's offset would not give back; empty: all come back.
std::string awq_fast_refuse_zero(const PackedWeight& canonical);

}  // namespace w4q::formats
