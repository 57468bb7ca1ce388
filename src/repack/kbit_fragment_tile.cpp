#include "repack/kbit_fragment_tile.h"

#include <utility>

#include "core/with_bits.h"
#include "repack/kbit_fragment_moves.h"

// The lane count must be a constant here, because words of lanes are kept in arrays of vectors.
#ifndef HWY_DISABLED_TARGETS  // W4Q_SIMD says more
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "repack/kbit_fragment_tile.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::repack::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// A vector holds one word of each of 4, 8 or 16 lanes, that is of 1, 2 or 4 values of g (one lane without SIMD).
using Tag = hn::CappedTag<uint32_t, 16>;
using Vec = hn::Vec<Tag>;
constexpr size_t vector_lanes = hn::MaxLanes(Tag());
constexpr size_t lanes = KbitFragmentMap::lanes;
constexpr size_t row_tiles = KbitFragmentMap::row_tiles;

/// Shifts to higher bits by `by`, to lower ones where it is negative.
template <int by>
HWY_INLINE Vec shifted(Vec v) {
  if constexpr (by == 0) return v;
  if constexpr (by > 0) return hn::ShiftLeft<by>(v);
  if constexpr (by < 0) return hn::ShiftRight<-by>(v);
}

template <int bits, size_t i>
HWY_INLINE void exchange(Vec* words) {
  constexpr BitExchange step = KbitFragmentMoves<bits>::exchanges[i];
  const auto mask = hn::Set(Tag(), step.mask);
  const Vec differ = hn::And(hn::Xor(hn::ShiftRight<step.shift>(words[step.a]), words[step.b]), mask);
  words[step.b] = hn::Xor(words[step.b], differ);
  words[step.a] = hn::Xor(words[step.a], hn::ShiftLeft<step.shift>(differ));
}

template <int bits, size_t i>
HWY_INLINE void move(const Vec* steps, Vec* words) {
  constexpr BitMove step = KbitFragmentMoves<bits>::moves.moves[i];
  words[step.to] = hn::OrAnd(words[step.to], shifted<step.shift>(steps[step.from]), hn::Set(Tag(), step.mask));
}

template <int bits, size_t i>
HWY_INLINE void move_back(const Vec* words, Vec* steps) {
  constexpr BitMove step = KbitFragmentMoves<bits>::moves.moves[i];
  constexpr uint32_t mask = step.shift > 0 ? step.mask >> step.shift : step.mask << -step.shift;
  steps[step.from] = hn::OrAnd(steps[step.from], shifted<-step.shift>(words[step.to]), hn::Set(Tag(), mask));
}

template <int bits, size_t... i>
HWY_INLINE void exchange_all(Vec* words, std::index_sequence<i...>) {
  (exchange<bits, i>(words), ...);
}
template <int bits, size_t... i>
HWY_INLINE void exchange_all_back(Vec* words, std::index_sequence<i...>) {
  (exchange<bits, sizeof...(i) - 1 - i>(words), ...);
}
template <int bits, size_t... i>
HWY_INLINE void move_all([[maybe_unused]] const Vec* steps, [[maybe_unused]] Vec* words, std::index_sequence<i...>) {
  (move<bits, i>(steps, words), ...);
}
template <int bits, size_t... i>
HWY_INLINE void move_all_back([[maybe_unused]] const Vec* words, [[maybe_unused]] Vec* steps,
                              std::index_sequence<i...>) {
  (move_back<bits, i>(words, steps), ...);
}

#if HWY_TARGET == HWY_SCALAR
/// One lane at a time: its bytes of the four plane words of its rows, as one word; and back.
HWY_INLINE Vec load_lanes(const uint32_t* words, size_t lane) {
  uint32_t lane_word = 0;
  for (size_t y = 0; y < 4; ++y) lane_word |= (words[lane / 4 * 4 + y] >> (8 * (lane % 4)) & 0xFFu) << (8 * y);
  return hn::Set(Tag(), lane_word);
}
HWY_INLINE void store_lanes(Vec v, uint32_t* words, size_t lane) {
  const uint32_t at = static_cast<uint32_t>(8 * (lane % 4));
  for (size_t y = 0; y < 4; ++y) {
    uint32_t& word = words[lane / 4 * 4 + y];
    word = (word & ~(0xFFu << at)) | (hn::GetLane(v) >> (8 * y) & 0xFFu) << at;
  }
}
#else
/// Within four words: byte t of word y becomes byte y of word t. Its own inverse.
HWY_INLINE Vec transpose_bytes(Vec v) {
  const hn::Repartition<uint8_t, Tag> bytes;
  alignas(16) static constexpr uint8_t order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  return hn::BitCast(Tag(), hn::TableLookupBytes(hn::BitCast(bytes, v), hn::LoadDup128(bytes, order)));
}

/// The bytes of the lanes from `lane` on, gathered from the plane words of their rows, a word a lane; and back.
HWY_INLINE Vec load_lanes(const uint32_t* words, size_t lane) { return transpose_bytes(hn::Load(Tag(), words + lane)); }
HWY_INLINE void store_lanes(Vec v, uint32_t* words, size_t lane) { hn::Store(transpose_bytes(v), Tag(), words + lane); }
#endif

/// The words of `vector_lanes` lanes and a row tile from their planes.
template <int bits>
HWY_INLINE void pack_lanes(const uint32_t* planes, size_t lane, Vec* words) {
  using Moves = KbitFragmentMoves<bits>;
  Vec steps[Moves::inputs];
  for (int plane = 0; plane < Moves::inputs; ++plane) {
    steps[plane] = plane < bits ? load_lanes(planes + plane * KbitTilePlanes::plane_words, lane) : hn::Zero(Tag());
  }
  exchange_all<bits>(steps, std::make_index_sequence<Moves::exchanges.size()>());
  for (int word = 0; word < bits; ++word) words[word] = Moves::direct ? steps[word] : hn::Zero(Tag());
  move_all<bits>(steps, words, std::make_index_sequence<Moves::moves.count>());
}

template <int bits>
HWY_INLINE void unpack_lanes(const Vec* words, uint32_t* planes, size_t lane) {
  using Moves = KbitFragmentMoves<bits>;
  Vec steps[Moves::inputs];
  for (int word = 0; word < Moves::inputs; ++word) steps[word] = Moves::direct ? words[word] : hn::Zero(Tag());
  move_all_back<bits>(words, steps, std::make_index_sequence<Moves::moves.count>());
  exchange_all_back<bits>(steps, std::make_index_sequence<Moves::exchanges.size()>());
  for (int plane = 0; plane < bits; ++plane) {
    store_lanes(steps[plane], planes + plane * KbitTilePlanes::plane_words, lane);
  }
}

template <int bits>
HWY_INLINE void pack_width(const uint32_t* planes, uint32_t* tile) {
  for (size_t lane = 0; lane < lanes; lane += vector_lanes) {
    Vec words[row_tiles * bits];
    for (size_t r = 0; r < row_tiles; ++r) pack_lanes<bits>(planes + r * lanes, lane, words + r * bits);
    for (size_t group = 0; group < bits; ++group) {
      const Vec* four = words + 4 * group;
      hn::StoreInterleaved4(four[0], four[1], four[2], four[3], Tag(), tile + 4 * (group * lanes + lane));
    }
  }
}

template <int bits>
HWY_INLINE void unpack_width(const uint32_t* tile, uint32_t* planes) {
  for (size_t lane = 0; lane < lanes; lane += vector_lanes) {
    Vec words[row_tiles * bits];
    for (size_t group = 0; group < bits; ++group) {
      Vec* four = words + 4 * group;
      hn::LoadInterleaved4(Tag(), tile + 4 * (group * lanes + lane), four[0], four[1], four[2], four[3]);
    }
    for (size_t r = 0; r < row_tiles; ++r) unpack_lanes<bits>(words + r * bits, planes + r * lanes, lane);
  }
}

void pack_tile(int bits, const uint32_t* planes, uint32_t* tile) {
  with_table_bits(bits, [&]<int width>() HWY_ATTR { pack_width<width>(planes, tile); });
}

void unpack_tile(int bits, const uint32_t* tile, uint32_t* planes) {
  with_table_bits(bits, [&]<int width>() HWY_ATTR { unpack_width<width>(tile, planes); });
}

}  // namespace w4q::repack::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace w4q::repack {
namespace {

HWY_EXPORT(pack_tile);
HWY_EXPORT(unpack_tile);

}  // namespace

void pack_kbit_fragment_tile(int bits, const KbitTilePlanes& planes, uint32_t* words) noexcept {
  HWY_DYNAMIC_DISPATCH(pack_tile)(bits, planes.words.data(), words);
}

void unpack_kbit_fragment_tile(int bits, const uint32_t* words, KbitTilePlanes& planes) noexcept {
  HWY_DYNAMIC_DISPATCH(unpack_tile)(bits, words, planes.words.data());
}

}  // namespace w4q::repack
#endif  // HWY_ONCE
