// A strip of rows of a trellis as it is encoded: what levels are multiplied by there, and rings that are tried.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "formats/trellis.h"
#include "formats/trellis_search.h"

namespace w4q::quantize {

/// A number for each row of a strip.
using StripValues = std::array<float, formats::trellis_rows>;

/// A ring and what its weights decode to.
struct TrellisRing {
  std::array<uint32_t, formats::trellis_ring_words(formats::trellis_max_bits)> words{};
  StripValues values{};
};

class RingStrip {
 public:
  RingStrip(const formats::PackedWeight& packed, int64_t strip);

  int64_t index() const noexcept { return strip_; }
  int64_t first() const noexcept { return strip_ * formats::trellis_rows; }
  int64_t rows() const noexcept { return column_.rows; }
  /// What the level of a row is multiplied by; 0: the row does not count.
  float step(int64_t row) const { return steps_[static_cast<size_t>(row)]; }

  /// Rows count alike in levels until this is called: now the square of a weight's error counts for what is given.
  void weigh(const StripValues& importance);
  /// The ring that is nearest to weights.
  TrellisRing nearest(formats::TrellisSearch& search, const StripValues& weights) const;
  /// The same with the bits of `ring` before row `seam`, which lead there, kept: one search instead of two, and no worse
  /// than that ring.
  TrellisRing nearest(formats::TrellisSearch& search, const StripValues& weights, std::span<const uint32_t> ring,
                      int seam) const;
  /// What the ring of a column decodes to.
  StripValues values(std::span<const uint32_t> ring) const;
  void store(const TrellisRing& ring, int64_t column, formats::PackedWeight& packed) const;

 private:
  formats::TrellisColumn targets(const StripValues& weights) const;
  TrellisRing ring(const formats::TrellisSymbols& symbols) const;

  int64_t strip_;
  int bits_, window_;
  formats::TrellisColumn column_;
  StripValues steps_{};
};

}  // namespace w4q::quantize
