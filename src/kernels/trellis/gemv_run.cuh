// One warp's way through its run of tiles in the GEMV of trellises, one row.
//
// A product of a window and the code's multiplier *is* an A register of mma.m16n8k32 over bytes: where an activation
// stands four times in B, the tensor core adds the product's four bytes up. Row tile r of the eight of a strip takes rows
// 16·g + 2·r and 16·g + 2·r + 1; columns 2·j and 2·j + 1 of B hold the two terms of the inputs of tile j of a piece of
// four, zeros elsewhere. So what mma leaves in lane 4·g + t are the sums of tile t, which meet the scale of that tile's
// inputs once a piece. Sums of bytes and terms are exact.
#pragma once

#include "kernels/trellis/inputs.cuh"

namespace w4q::kernels::trellis {

constexpr int lane_sums = Map::lane_rows;  ///< of a strip, before lanes t are added up

/// Where a run is: at half a tile, eight of the 16 columns of every lane, of a group, which is a strip, or a strip of gates
/// and the one of their ups. Of those a piece of gates comes before the same piece of ups.
template <bool gated>
struct Cursor {
  static constexpr int strips = gated ? 2 : 1;
  static constexpr int piece_halves = 2 * piece_tiles;
  int index, group, piece, slot, width;  ///< slot: the half of the piece, of `width`
  int strip = 0;                         ///< of the group

  __device__ static int group_halves(const TrellisLaunch& args) { return 2 * strips * args.k_tiles; }

  __device__ Cursor(const TrellisLaunch& args, int at) : index(at), group(at / group_halves(args)) {
    const int column = at - group * group_halves(args);
    piece = column / (strips * piece_halves);
    slot = column - piece * strips * piece_halves;
    set_width(args);
    if (gated && slot >= width) slot -= width, strip = 1;
  }
  /// Counted in halves.
  __device__ int place(const TrellisLaunch& args) const {
    if constexpr (!gated) return index;
    return 2 * (group + strip * (args.n_tiles / 2)) * args.k_tiles + piece * piece_halves + slot;
  }
  __device__ bool begins_group() const { return piece == 0 && slot == 0 && strip == 0; }
  /// So many halves on, at most to the end of the piece.
  __device__ void advance(const TrellisLaunch& args, int halves) {
    index += halves;
    slot += halves;
    if (slot < width) return;
    slot = 0;
    if (gated && strip == 0) {
      strip = 1;
      return;
    }
    strip = 0;
    if (++piece * piece_tiles >= args.k_tiles) piece = 0, ++group;
    set_width(args);
  }

 private:
  __device__ void set_width(const TrellisLaunch& args) {
    width = 2 * min(piece_tiles, args.k_tiles - piece * piece_tiles);
  }
};

/// Sums of a lane: [strip][row of the lane's 16], of the tiles that the lane gets.
template <bool gated>
struct LaneTotals {
  float sums[Cursor<gated>::strips][lane_sums];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& strip : sums) {
#pragma unroll
      for (float& sum : strip) sum = 0;
    }
  }
  /// The lane's four whole sums of a strip: outputs 4·lane … 4·lane + 3.
  __device__ __forceinline__ float4 whole(int strip) const {
    const bool upper = (threadIdx.x & 2) != 0, odd = (threadIdx.x & 1) != 0;
    float half[8], quarter[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float low = sums[strip][i], high = sums[strip][8 + i];
      half[i] = (upper ? high : low) + __shfl_xor_sync(0xFFFFFFFFu, upper ? low : high, 2);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      quarter[i] = (odd ? half[4 + i] : half[i]) + __shfl_xor_sync(0xFFFFFFFFu, odd ? half[i] : half[4 + i], 1);
    }
    return make_float4(quarter[0], quarter[1], quarter[2], quarter[3]);
  }
};

/// The words of a lane, of what is at hand and, as it is used up, of what is behind it.
template <int quad_count>
struct WordRing {
  uint4 quads[quad_count];

  __device__ __forceinline__ uint32_t word(int w) const {
    const uint4& quad = quads[w / 4];
    return w % 4 == 0 ? quad.x : w % 4 == 1 ? quad.y : w % 4 == 2 ? quad.z : quad.w;
  }
  __device__ __forceinline__ void load(const uint4* from, int j) {
    quads[j] = device::load_once(from + j * Map::lanes);
  }
};

template <class Codes, bool gated>
struct Run {
  static constexpr int bits = Codes::bits, half_quads = Map::tile_words(bits) / 8;  ///< of all lanes
  using Totals = LaneTotals<gated>;

  const TrellisLaunch& args;
  const StagedInputs staged;
  const uint4* const codes;
  const int end;
  Cursor<gated> at;
  WordRing<bits> ring;
  int products[8][4];

  __device__ Run(const TrellisLaunch& launch, const StagedInputs& inputs, int begin, int past)
      : args(launch),
        staged(inputs),
        codes(reinterpret_cast<const uint4*>(launch.codes) + threadIdx.x % 32),
        end(past),
        at(launch, begin) {}

  __device__ bool done() const { return at.index >= end; }

  /// Touches weights only.
  __device__ __forceinline__ void load_first_weights() {
    if (done()) return;
    const uint4* const words = words_of(at);
#pragma unroll
    for (int j = 0; j < bits; ++j) ring.load(words, j);
  }

  /// Multiplies what the run has of a piece, loads the first half behind it, and adds to `totals`. Whether that ends the
  /// group.
  __device__ __forceinline__ bool step(Totals& totals) {
    const int halves = min(at.width - at.slot, end - at.index);
    Cursor<gated> next = at;
    next.advance(args, halves);
    const bool goes_on = next.index < end;
    const uint4* here = words_of(at);
    const uint4* const behind = words_of(next);
    const uint4 terms = staged.terms(at.piece);
#pragma unroll
    for (auto& sums : products) {
#pragma unroll
      for (int& sum : sums) sum = 0;
    }
#pragma unroll 1
    for (int i = 0; i < halves; ++i) {
      const bool last = i + 1 == halves;
      here += half_quads;
      multiply(at.slot + i, terms, last ? behind : here, !last || goes_on);
    }
    add_piece(at.slot + halves - 1, totals);
    at = next;
    return at.begins_group();
  }

 private:
  __device__ __forceinline__ const uint4* words_of(const Cursor<gated>& cursor) const {
    return codes + int64_t{cursor.place(args)} * half_quads;
  }

  __device__ __forceinline__ void multiply(int slot, const uint4& terms, const uint4* next, bool goes_on) {
    const bool mine = static_cast<int>(threadIdx.x) % 32 / 8 == slot / 2, upper = slot % 2 != 0;
    const uint32_t x[2] = {mine ? (upper ? terms.z : terms.x) : 0, mine ? (upper ? terms.w : terms.y) : 0};
    unroll<4>([&]<int i>() {
      uint32_t from[bits];
#pragma unroll
      for (int w = 0; w < bits; ++w) from[w] = ring.word(bits * i + w);
      const ColumnPair<Codes> columns(from);
      // What is used up is loaded anew.
      constexpr int used = bits * i / 4, now_used = bits * (i + 1) / 4;
#pragma unroll
      for (int j = used; j < now_used; ++j) {
        if (goes_on) ring.load(next, j);
      }
      constexpr uint32_t byte = 2 * i % 4;
      const uint32_t b0 = permute(x[i / 2], 0, 0x1111u * byte), b1 = permute(x[i / 2], 0, 0x1111u * (byte + 1));
      unroll<8>([&]<int r>() {
        const uint32_t a[4] = {
            columns.template product<2 * r>(0, args.mask), columns.template product<2 * r + 1>(0, args.mask),
            columns.template product<2 * r>(1, args.mask), columns.template product<2 * r + 1>(1, args.mask)};
        multiply_bytes(products[r], a, b0, b1);
      });
    });
  }

  __device__ __forceinline__ void add_piece(int last_slot, Totals& totals) {
    if (!gated || at.strip == 0) {
      add_piece(last_slot, totals.sums[0]);
    } else {
      add_piece(last_slot, totals.sums[gated ? 1 : 0]);
    }
  }
  __device__ __forceinline__ void add_piece(int last_slot, float (&sums)[lane_sums]) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    const TileInputs inputs = staged.tile(at.piece, t);
    // What this run had no part of has no sums.
    const int middle = (2 * t >= at.slot && 2 * t <= last_slot ? inputs.middle[0] : 0) +
                       (2 * t + 1 >= at.slot && 2 * t + 1 <= last_slot ? inputs.middle[1] : 0);
#pragma unroll
    for (int i = 0; i < lane_sums; ++i) {
      const int* const terms_of = products[i / 2] + 2 * (i % 2);
      // Wraps on the way, but not in the end.
      const uint32_t sum = static_cast<uint32_t>(terms_of[0]) * term_factor + static_cast<uint32_t>(terms_of[1]) +
                           static_cast<uint32_t>(middle);
      sums[i] = fmaf(static_cast<float>(static_cast<int>(sum)), inputs.scale, sums[i]);
    }
  }
};

}  // namespace w4q::kernels::trellis
