// The second pass of the kbit quantizers: scales and codes of every block, from the block maxima of the first.
#pragma once

#include <algorithm>
#include <mutex>
#include <span>

#include "core/convert.h"
#include "core/parallel.h"
#include "core/views.h"
#include "formats/kbit.h"
#include "quantize/kbit.h"
#include "quantize/kbit_simd.h"
#include "quantize/source_matrix.h"

namespace w4q::quantize {

/// `ScaleRule` maps a block's absmax to formats::StoredScale: the bits to store, and what the values are divided by.
template <class ScaleRule>
class KbitEncoder {
 public:
  /// Writes into the planes of `packed`; all arguments outlive this object.
  KbitEncoder(const TensorView& weight, const BlockMaxima& maxima, const KbitSearch& search, ScaleRule rule,
              formats::PackedWeight& packed)
      : weight_(weight),
        maxima_(maxima),
        search_(search),
        rule_(rule),
        smallest_normal_(
            formats::store_scale(formats::scale_codec(packed.scheme.scale).smallest_normal, packed.scheme.scale).bits),
        blocks_(formats::kbit_blocks(packed.k)),
        words_(packed.plane(formats::PlaneRole::codes).bytes.as<uint32_t>()),
        scales_(packed.plane(formats::PlaneRole::scales)) {}

  /// All rows, in parallel.
  QuantizeStats encode() const {
    QuantizeStats sum;
    std::mutex mutex;
    parallel_for(weight_.shape[0], row_grain(weight_.shape[1]), [&](int64_t begin, int64_t end) {
      QuantizeStats stats;
      for (int64_t row = begin; row < end; ++row) encode_row(row, stats);
      const std::lock_guard lock(mutex);
      sum.blocks += stats.blocks;
      sum.zero_blocks += stats.zero_blocks;
      sum.saturated_scales += stats.saturated_scales;
      sum.subnormal_scales += stats.subnormal_scales;
    });
    return sum;
  }

 private:
  /// Blocks that are widened and encoded together: 16 KiB of fp32, which stay in the first-level cache.
  static constexpr int64_t chunk_blocks = 128;

  void encode_row(int64_t row, QuantizeStats& stats) const {
    for (int64_t block = 0; block < blocks_; block += chunk_blocks) {
      encode_chunk(row, block, std::min(chunk_blocks, blocks_ - block), stats);
    }
    const uint32_t mask = formats::kbit_lane_mask(weight_.shape[1], blocks_ - 1);
    for (uint32_t& word : block_words((row + 1) * blocks_ - 1, 1)) word &= mask;
  }

  void encode_chunk(int64_t row, int64_t block, int64_t count, QuantizeStats& stats) const {
    using formats::kbit_block;
    alignas(64) float values[chunk_blocks * kbit_block];
    float divisors[chunk_blocks];
    const int64_t first = row * blocks_ + block;
    for (int64_t i = 0; i < count; ++i) divisors[i] = encode_scale(first + i, stats);
    const int64_t size = std::min(count * kbit_block, weight_.shape[1] - block * kbit_block);
    const auto skipped = static_cast<size_t>(block * kbit_block * dtype_bits(weight_.dtype) / 8);
    widen(row_bytes(weight_, row).subspan(skipped), weight_.dtype, {values, static_cast<size_t>(size)});
    std::fill(values + size, values + count * kbit_block, 0.0f);
    encode_blocks(search_, {values, static_cast<size_t>(count * kbit_block)}, {divisors, static_cast<size_t>(count)},
                  block_words(first, count));
  }

  /// Stores the scale of a block, returns what its values are divided by.
  float encode_scale(int64_t index, QuantizeStats& stats) const {
    const float absmax = maxima_.absmax[static_cast<size_t>(index)];
    const formats::StoredScale scale = rule_(absmax);
    formats::put_scale(scales_, static_cast<size_t>(index), scale.bits);
    ++stats.blocks;
    stats.zero_blocks += absmax == 0 ? 1 : 0;
    stats.saturated_scales += scale.saturated ? 1 : 0;
    stats.subnormal_scales += absmax != 0 && scale.bits < smallest_normal_ ? 1 : 0;
    return scale.value;
  }

  std::span<uint32_t> block_words(int64_t first, int64_t count) const {
    const auto bits = static_cast<size_t>(search_.bits);
    return words_.subspan(static_cast<size_t>(first) * bits, static_cast<size_t>(count) * bits);
  }

  const TensorView& weight_;
  const BlockMaxima& maxima_;
  const KbitSearch& search_;
  ScaleRule rule_;
  uint32_t smallest_normal_;  ///< bits of the smallest normal scale
  int64_t blocks_;
  std::span<uint32_t> words_;
  formats::Plane& scales_;
};

}  // namespace w4q::quantize
