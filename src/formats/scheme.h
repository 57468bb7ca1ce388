// A scheme says what the bits of a packed weight mean; it prints and parses as one string, e.g. "kbit3-b32-e4m4",
// "int4-g128-f16-asym", "lut4-b64-f32", "trellis3-w14", "exl3-3" or "nvfp4".
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace w4q::formats {

enum class SchemeFamily {
  kbit,         ///< codes of a table, bit planes of 32, a scale per block (docs/kbit.md)
  integer,      ///< (code − zero) · scale, a scale and a zero per group (docs/int.md)
  rotated,      ///< codes of a table for N(0, 1), bit planes of 32, a norm per group (docs/rotated.md)
  lut,          ///< codes of a table, flat blocks across rows, bitsandbytes' 4-bit format (docs/int.md)
  trellis,      ///< rings of bits down the rows of a column, of which a weight reads a window (docs/trellis.md)
  exl3,         ///< the same in tiles of 16 × 16, between two rotations, exllamav3's format (docs/exl3.md)
  small_float,  ///< E2M1 and E4M3 floats, a scale per block or tensor: NVFP4, MXFP4, MXFP8, FP8 (docs/floats.md)
};

/// What computes the level of a window of bits.
enum class TrellisCode { mul1, mcg, three_inst };

/// How a block's scale is stored (scale_codec.h).
enum class ScaleType {
  e4m4,
  f16,
  bf16,
  f32,
  e4m3,
  e8m0,
  nested,  ///< a byte that indexes a table, times a second scale, plus an offset
};

/// Scheme::block of a scheme with one scale for a whole row.
inline constexpr int whole_row = 0;
/// Scheme::block of a scheme with one scale for a whole matrix.
inline constexpr int whole_tensor = -1;

struct Scheme {
  SchemeFamily family = SchemeFamily::kbit;
  int bits = 4;    ///< width of a code
  int block = 32;  ///< weights that share a scale, along k (lut: along the flat matrix), or whole_row
  ScaleType scale = ScaleType::e4m4;
  bool asymmetric = false;  ///< integer: every group has a zero point of its own; otherwise it is 2^(bits−1)
  bool act_order = false;   ///< integer: group_index says which group an input belongs to; otherwise it is k div block
  int window = 0;           ///< trellis, exl3: bits of a ring that a weight depends on, its own last
  TrellisCode code = TrellisCode::mul1;  ///< exl3
  bool divisor = false;  ///< small_float: the tensor's factor is stored as what block scales are divided by

  bool operator==(const Scheme&) const = default;
};

/// Weights share bits: none has a code for itself, and rows are not rounded by themselves.
inline bool shares_bits(const Scheme& scheme) noexcept {
  return scheme.family == SchemeFamily::trellis || scheme.family == SchemeFamily::exl3;
}

/// "kbit3-b32-e4m4", "int4-row-bf16-asym", "int4-g128-f16-actorder".
std::string to_string(const Scheme& scheme);
/// The inverse. Throws unsupported and lists what exists.
Scheme parse_scheme(std::string_view text);
std::string_view to_string(ScaleType type) noexcept;

/// Whether a scheme has a name, without which no file can hold it.
bool exists(const Scheme& scheme);

/// Schemes of several passes: "rotated4-d128+rotated2-d128".
std::string to_string(std::span<const Scheme> passes);
/// The inverse, for 1 to max_passes of them. Throws unsupported.
std::vector<Scheme> parse_schemes(std::string_view text);
inline constexpr size_t max_passes = 8;

}  // namespace w4q::formats
