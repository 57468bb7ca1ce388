#include "formats/scale_range.h"

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "formats/scale_codec.h"

namespace w4q::formats {
namespace {

/// The bits of every type order magnitudes as they stand, infinity and NaN last.
struct Bits {
  uint32_t largest = 0;  ///< without the sign
  uint32_t all = 0;      ///< those that occur
};

template <class Word>
Bits bits_of(std::span<const Word> words, Word magnitude) {
  constexpr int64_t grain = int64_t{1} << 18;
  const auto count = std::ssize(words);
  std::vector<Bits> pieces(static_cast<size_t>((count + grain - 1) / grain));
  parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    Word largest = 0, all = 0;
    for (const Word word : words.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin))) {
      largest = std::max<Word>(largest, word & magnitude);
      all |= word;
    }
    pieces[static_cast<size_t>(begin / grain)] = {largest, all};
  });
  Bits sum;
  for (const Bits& piece : pieces) sum = {std::max(sum.largest, piece.largest), sum.all | piece.all};
  return sum;
}

ScaleRange range_of(const Bits& bits, uint32_t magnitude, ScaleType type) {
  return {scale_codec(type).decode(bits.largest), (bits.all & ~magnitude) != 0};
}

}  // namespace

ScaleRange scale_range(const Plane& scales, ScaleType type) {
  switch (dtype_bits(scales.spec.dtype)) {
    case 32:
      return range_of(bits_of<uint32_t>(scales.bytes.as<uint32_t>(), 0x7FFFFFFF), 0x7FFFFFFF, type);
    case 16:
      return range_of(bits_of<uint16_t>(scales.bytes.as<uint16_t>(), 0x7FFF), 0x7FFF, type);
    default: {
      const uint8_t magnitude = type == ScaleType::e4m3 ? 0x7F : 0xFF;
      return range_of(bits_of<uint8_t>(scales.bytes.as<uint8_t>(), magnitude), magnitude, type);
    }
  }
}

}  // namespace w4q::formats
