// Blocks of a packed weight that share a scale, as coordinate descent sees them (sweeps.h): read, rounded anew and
// written back, whatever the family.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/views.h"
#include "formats/packed.h"
#include "quantize/error_factor.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {

/// The scale of a block, and for integers its zero.
struct BlockScale {
  float value = 0;
  int zero = 0;
  uint32_t bits = 0;  ///< as stored; of scales that were chosen, not of those that were read
};

class BlockRounding {
 public:
  virtual ~BlockRounding() = default;

  /// Scales are shared with other rows, and stay as they are: neither write_scale() nor round() is called.
  virtual bool keeps_scales() const noexcept { return false; }
  /// Weights of a row that share a scale; the last block of a row may have fewer.
  virtual int64_t block() const noexcept = 0;
  /// Row `row`: k codes, and the scale of every block.
  virtual void read(int64_t row, std::span<uint8_t> codes, std::span<BlockScale> scales) const = 0;
  virtual void write_codes(int64_t row, std::span<const uint8_t> codes) = 0;
  virtual void write_scale(int64_t row, int64_t block, const BlockScale& scale) = 0;

  /// What a code decodes to, and the nearest code for x.
  virtual float value(uint8_t code, const BlockScale& scale) const noexcept = 0;
  virtual uint8_t nearest(float x, const BlockScale& scale) const noexcept = 0;
  /// Rounds the rows of `targets` [rows, cols], one block each, with the feedback of `factor`, of width cols and in
  /// whose order the columns stand, under the best of the scales that error feedback tries. `scales` gets a scale for
  /// each row, `codes` rows × cols of them. At most widest_whole_block columns; rows are independent of one another.
  virtual void round(const ErrorFactor& factor, MatrixView<const float> targets, std::span<BlockScale> scales,
                     std::span<uint8_t> codes) const = 0;
};

/// The widest block that round() takes.
inline constexpr int64_t widest_whole_block = 256;

/// For canonical planes of kbit, the rotated family, small floats and the integers without act order; `packed` must outlive it.
std::unique_ptr<BlockRounding> block_rounding(formats::PackedWeight& packed, const QuantizeOptions& options);

}  // namespace w4q::quantize
