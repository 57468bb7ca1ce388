#include "quantize/kbit_simd.h"

#include <cstring>
#include <utility>

#include "core/with_bits.h"

// The lane count must be a constant here: planes are assembled at fixed bit offsets.
#ifndef HWY_DISABLED_TARGETS  // W4Q_SIMD says more
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "quantize/kbit_simd.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::quantize::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr size_t block_size = 32;

/// Magnitudes of IEEE formats order like their bits, so the largest of a block needs no widening.
template <class T>
HWY_INLINE void block_maxima(const std::byte* row, size_t blocks, T* maxima) {
  const hn::CappedTag<T, 8> d;
  constexpr size_t lanes = hn::MaxLanes(d);
  const auto magnitude = hn::Set(d, static_cast<T>(static_cast<T>(~T{0}) >> 1));
  for (size_t block = 0; block < blocks; ++block) {
    const T* values = reinterpret_cast<const T*>(row + block * block_size * sizeof(T));
    auto largest = hn::And(magnitude, hn::LoadU(d, values));
    for (size_t i = lanes; i < block_size; i += lanes) {
      largest = hn::Max(largest, hn::And(magnitude, hn::LoadU(d, values + i)));
    }
    maxima[block] = hn::GetLane(hn::MaxOfLanes(d, largest));
  }
}

void block_maxima_16(const std::byte* row, size_t blocks, uint16_t* maxima) { block_maxima(row, blocks, maxima); }
void block_maxima_32(const std::byte* row, size_t blocks, uint32_t* maxima) { block_maxima(row, blocks, maxima); }

using FloatTag = hn::CappedTag<float, 16>;
using FloatVec = hn::Vec<FloatTag>;
using FloatMask = hn::Mask<FloatTag>;
using IndexTag = hn::RebindToSigned<FloatTag>;
using IndexVec = hn::Vec<IndexTag>;
constexpr size_t lanes = hn::MaxLanes(FloatTag());

HWY_INLINE uint32_t mask_bits(FloatMask mask) {
  uint8_t bytes[8];
  hn::StoreMaskBits(FloatTag(), mask, bytes);
  if constexpr (lanes <= 8) return bytes[0];
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return bits;
}

/// Entry `index` of a table of `entries`. Where one lookup cannot reach them all, or lookups are slow, `higher`, the
/// comparisons made so far with the first one first, picks the half.
template <size_t entries>
HWY_INLINE FloatVec pick(const float* table, IndexVec index, const FloatMask* higher) {
  const FloatTag d;
  if constexpr (entries == 1) {
    return hn::Set(d, *table);
  } else if constexpr (lanes >= 8 && entries > 2 && entries <= lanes) {
    const IndexTag di;
    const auto within = hn::And(index, hn::Set(di, static_cast<int32_t>(entries - 1)));
    return hn::TableLookupLanes(hn::LoadU(d, table), hn::IndicesFromVec(d, within));
  } else {
    return hn::IfThenElse(*higher, pick<entries / 2>(table + entries / 2, index, higher + 1),
                          pick<entries / 2>(table, index, higher + 1));
  }
}

/// Bisects from the highest bit of the codes of x to bit 0; each comparison is one bit of each lane's code, ready to go
/// into its plane.
template <int bits, int bit>
HWY_INLINE void search_bits(const KbitSearch& search, FloatVec x, IndexVec index, FloatMask* comparisons, size_t lane,
                            uint32_t* planes) {
  constexpr size_t entries = size_t{1} << (bits - 1 - bit);
  const FloatMask above = hn::Gt(x, pick<entries>(search.thresholds[bit].data(), index, comparisons));
  planes[bit] |= mask_bits(above) << lane;
  if constexpr (bit > 0) {
    comparisons[bits - 1 - bit] = above;
    const IndexTag di;
    const auto minus_one = hn::BitCast(di, hn::VecFromMask(FloatTag(), above));
    search_bits<bits, bit - 1>(search, x, hn::Sub(hn::Add(index, index), minus_one), comparisons, lane, planes);
  }
}

/// Word by word: one wide store would have to wait for the narrow ones before it.
template <size_t... bit>
HWY_INLINE void store_planes(const uint32_t* planes, uint32_t* words, std::index_sequence<bit...>) {
  ((words[bit] = planes[bit]), ...);
}

template <int bits>
HWY_INLINE void encode_width(const KbitSearch& search, const float* values, const float* scales, size_t blocks,
                             uint32_t* words) {
  const FloatTag d;
  for (size_t block = 0; block < blocks; ++block) {
    uint32_t* const block_words = words + block * bits;
    if (scales[block] == 0) {
      store_planes(search.zero_words.data(), block_words, std::make_index_sequence<bits>());
      continue;
    }
    const auto scale = hn::Set(d, scales[block]);
    uint32_t planes[bits] = {};
    for (size_t lane = 0; lane < block_size; lane += lanes) {
      const auto x = hn::Div(hn::LoadU(d, values + block * block_size + lane), scale);
      FloatMask comparisons[bits];
      search_bits<bits, bits - 1>(search, x, hn::Zero(IndexTag()), comparisons, lane, planes);
    }
    store_planes(planes, block_words, std::make_index_sequence<bits>());
  }
}

void encode(const KbitSearch& search, const float* values, const float* scales, size_t blocks, uint32_t* words) {
  with_table_bits(search.bits, [&]<int bits>() HWY_ATTR { encode_width<bits>(search, values, scales, blocks, words); });
}

}  // namespace w4q::quantize::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <bit>

#include "core/convert.h"
#include "core/error.h"
#include "formats/kbit.h"

namespace w4q::quantize {
namespace {

HWY_EXPORT(block_maxima_16);
HWY_EXPORT(block_maxima_32);
HWY_EXPORT(encode);

/// The largest magnitude of the ragged last block, as bits of T.
template <class T>
T tail_maximum(std::span<const std::byte> values) noexcept {
  T largest = 0;
  for (size_t i = 0; i < values.size(); i += sizeof(T)) {
    T bits = 0;
    std::memcpy(&bits, values.data() + i, sizeof bits);
    largest = std::max<T>(largest, bits & static_cast<T>(static_cast<T>(~T{0}) >> 1));
  }
  return largest;
}

template <class T, class Maxima>
void absmax_of(std::span<const std::byte> row, DType dtype, std::span<float> absmax, Maxima maxima) {
  constexpr size_t chunk = 256;
  constexpr size_t block_bytes = formats::kbit_block * sizeof(T);
  T bits[chunk];
  for (size_t first = 0; first < absmax.size(); first += chunk) {
    const size_t count = std::min(chunk, absmax.size() - first);
    const auto part = row.subspan(first * block_bytes, std::min(count * block_bytes, row.size() - first * block_bytes));
    const size_t whole = part.size() / block_bytes;
    maxima(part.data(), whole, bits);
    if (whole < count) bits[whole] = tail_maximum<T>(part.subspan(whole * block_bytes));
    widen(std::as_bytes(std::span(bits, count)), dtype, absmax.subspan(first, count));
  }
}

}  // namespace

KbitSearch::KbitSearch(std::span<const float> ascending_thresholds)
    : bits(std::countr_one(ascending_thresholds.size())) {
  const size_t codes = ascending_thresholds.size() + 1;
  ensure(bits >= 2 && bits <= max_bits && std::has_single_bit(codes), "KbitSearch: not a kbit table");
  const int zero_code = formats::kbit_code(0.0f, ascending_thresholds);
  for (int bit = 0; bit < bits; ++bit) {
    for (size_t higher = 0; higher < codes >> (bit + 1); ++higher) {
      thresholds[static_cast<size_t>(bit)][higher] =
          ascending_thresholds[(higher << (bit + 1)) + (size_t{1} << bit) - 1];
    }
    zero_words[static_cast<size_t>(bit)] = ((zero_code >> bit) & 1) != 0 ? ~0u : 0u;
  }
}

void block_absmax(std::span<const std::byte> row, DType dtype, std::span<float> absmax) {
  if (dtype == DType::f32) {
    absmax_of<uint32_t>(row, dtype, absmax, HWY_DYNAMIC_DISPATCH(block_maxima_32));
  } else {
    absmax_of<uint16_t>(row, dtype, absmax, HWY_DYNAMIC_DISPATCH(block_maxima_16));
  }
}

void encode_blocks(const KbitSearch& search, std::span<const float> values, std::span<const float> scales,
                   std::span<uint32_t> words) {
  ensure(values.size() >= scales.size() * formats::kbit_block &&
             words.size() >= scales.size() * static_cast<size_t>(search.bits),
         "encode_blocks: too short");
  HWY_DYNAMIC_DISPATCH(encode)(search, values.data(), scales.data(), scales.size(), words.data());
}

}  // namespace w4q::quantize
#endif  // HWY_ONCE
