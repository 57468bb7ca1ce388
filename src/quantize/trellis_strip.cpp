#include "quantize/trellis_strip.h"

#include <algorithm>

namespace w4q::quantize {

RingStrip::RingStrip(const formats::PackedWeight& packed, int64_t strip)
    : strip_(strip), bits_(packed.scheme.bits), window_(packed.scheme.window) {
  column_.rows = static_cast<int>(std::min<int64_t>(formats::trellis_rows, packed.n - first()));
  for (int64_t row = 0; row < rows(); ++row) {
    const auto at = static_cast<size_t>(row);
    steps_[at] = formats::trellis_load_scale(packed, first() + row).step;
    column_.counts[at] = steps_[at] > 0;
  }
}

void RingStrip::weigh(const StripValues& importance) {
  column_.weighed = true;
  for (size_t row = 0; row < steps_.size(); ++row)
    column_.importance[row] = importance[row] * steps_[row] * steps_[row];
}

formats::TrellisColumn RingStrip::targets(const StripValues& weights) const {
  formats::TrellisColumn wanted = column_;
  for (size_t row = 0; row < steps_.size(); ++row) {
    if (wanted.counts[row]) wanted.targets[row] = weights[row] / steps_[row];
  }
  return wanted;
}

TrellisRing RingStrip::ring(const formats::TrellisSymbols& symbols) const {
  TrellisRing result;
  const auto words = std::span(result.words).first(static_cast<size_t>(formats::trellis_ring_words(bits_)));
  formats::trellis_put(symbols, bits_, words);
  result.values = values(words);
  return result;
}

TrellisRing RingStrip::nearest(formats::TrellisSearch& search, const StripValues& weights) const {
  return ring(search(targets(weights)));
}

TrellisRing RingStrip::nearest(formats::TrellisSearch& search, const StripValues& weights,
                               std::span<const uint32_t> known, int seam) const {
  const int before = (seam + formats::trellis_rows - 1) % formats::trellis_rows;
  return ring(search(targets(weights), seam, formats::trellis_window(known, bits_, window_, before)));
}

StripValues RingStrip::values(std::span<const uint32_t> ring) const {
  StripValues result{};
  for (int row = 0; row < column_.rows; ++row) {
    const uint32_t window = formats::trellis_window(ring, bits_, window_, row);
    result[static_cast<size_t>(row)] =
        static_cast<float>(formats::trellis_level(window)) * steps_[static_cast<size_t>(row)];
  }
  return result;
}

void RingStrip::store(const TrellisRing& ring, int64_t column, formats::PackedWeight& packed) const {
  const auto words = formats::trellis_ring(packed, strip_, column);
  std::copy_n(ring.words.begin(), words.size(), words.begin());
}

}  // namespace w4q::quantize
