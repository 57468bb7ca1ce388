// One warp's way through its run of tiles in the GEMV of rotated weights: that of kbit (kbit/gemv_run.cuh) with norms
// of groups for scales, with tiles of two passes, and with one row's inputs rotated where they are multiplied.
#pragma once

#include <type_traits>

#include "kernels/kbit/gemv_run.cuh"
#include "kernels/rotated/input.cuh"
#include "kernels/rotated/launch.cuh"

namespace w4q::kernels::rotated {

using frame::Columns;
using frame::Map;
using Type = device::HalfType;

/// Widths of the codes of a launch's passes; second 0: one pass.
template <int first_bits, int second_bits>
struct Widths {
  static constexpr int first = first_bits, second = second_bits;
  static constexpr bool single = second == 0;
  static constexpr bool same = single || first == second;
  static constexpr int widest = first > second ? first : second;
};

/// Norms of a lane's eight outputs for the two blocks of a tile, and the factor of their pass where there are two. They
/// stand where kbit has scales.
template <bool single>
struct Norms {
  struct Packed {
    uint4 blocks[2];
    float factor;
  };
  __device__ static float2 pair_of_sums(const Packed& packed, int block, int row_tile) {
    const uint4& v = packed.blocks[block];
    const uint32_t word = row_tile == 0 ? v.x : row_tile == 1 ? v.y : row_tile == 2 ? v.z : v.w;
    const float2 norms = __half22float2(reinterpret_cast<const __half2&>(word));
    if constexpr (single) return norms;
    return make_float2(norms.x * packed.factor, norms.y * packed.factor);
  }
};

/// Tables of the passes; one for both where their codes are equally wide.
template <class Bits>
struct Tables {
  static constexpr int kilobytes = Bits::same ? 64 : 32;
  static constexpr int total_bytes = 64 * 1024;
  static constexpr int second_at = Bits::same ? 0 : kilobytes * 1024;
  static constexpr int second_bits = Bits::single ? Bits::first : Bits::second;

  struct View {
    kbit::LanePairs<Bits::first, kilobytes> first;
    kbit::LanePairs<second_bits, kilobytes> second;
    __device__ explicit View(const char* table) : first(table), second(table + second_at) {}
  };
  __device__ static void fill(char* table, const RotatedLaunch& args) {
    fill_one<Bits::first>(table, args.sources[0]);
    if constexpr (!Bits::same) fill_one<second_bits>(table + second_at, args.sources[1]);
  }

 private:
  template <int bits>
  __device__ static void fill_one(char* table, const Source& source) {
    kbit::PairTable<bits, kilobytes>::template fill<Type>(table, source.levels, source.table_factor);
  }
};

/// Up to `most` consecutive tiles of one N-tile and pass. A launch's columns are those of its passes side by side.
template <int most, bool single>
struct Span : frame::Span<most> {
  __device__ Span(const RotatedLaunch& args, int first, int past) : frame::Span<most>(args, first, past) {
    limit(args);
  }
  __device__ Span next(const RotatedLaunch& args, int past) const {
    Span after = *this;
    static_cast<frame::Span<most>&>(after) = frame::Span<most>::next(args, past);
    after.limit(args);
    return after;
  }

 private:
  __device__ void limit(const RotatedLaunch& args) {
    if (!single && this->column < args.pass_tiles) this->count = min(this->count, args.pass_tiles - this->column);
  }
};

/// The pass of a span, and where its first tile is in it.
template <bool single>
struct Place {
  int pass, group, column, tile;
  template <class At>
  __device__ Place(const RotatedLaunch& args, const At& at)
      : pass(!single && at.column >= args.pass_tiles ? 1 : 0),
        group(at.group),
        column(at.column - (single ? 0 : pass * args.pass_tiles)),
        tile(at.tile - (single ? 0 : (at.group + pass) * args.pass_tiles)) {}
  /// One of two things, that of the span's pass.
  template <class T>
  __device__ T of(const T& first, const T& second) const {
    return single || pass == 0 ? first : second;
  }
};

/// Where a lane's codes and norms stand in any tile.
template <bool single>
struct SourceReader {
  const RotatedLaunch& args;
  const uint4* codes[2];

  __device__ explicit SourceReader(const RotatedLaunch& launch)
      : args(launch),
        codes{launch.sources[0].codes + threadIdx.x % 32,
              single ? nullptr : launch.sources[1].codes + threadIdx.x % 32} {}

  /// Tile `j` of a span.
  template <int bits, int most_bits>
  __device__ void load(kbit::WeightTile<most_bits>& tile, const Place<single>& at, int j) const {
    const uint4* const from = at.of(codes[0], codes[1]) + int64_t{at.tile + j} * (Map::tile_words(bits) / 4);
#pragma unroll
    for (int i = 0; i < bits; ++i) tile.codes[i] = device::load_once(from + i * Map::lanes);
  }
  __device__ void load(typename Norms<single>::Packed& packed, const Place<single>& at, int j) const {
    const int groups = at.of(args.sources[0].groups, args.sources[1].groups);
    const int shift = at.of(args.sources[0].group_shift, args.sources[1].group_shift);
    const uint4* const norms = at.of(args.sources[0].norms, args.sources[1].norms) + threadIdx.x % 32 / 4;
    if constexpr (!single) packed.factor = at.of(1.0f, args.sources[1].factor);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      // Inputs beyond k are zeros: any norm will do.
      const int index = min((64 * (at.column + j) + 32 * block) >> shift, groups - 1);
      packed.blocks[block] =
          __ldg(norms + uint64_t{static_cast<uint32_t>(at.group) * static_cast<uint32_t>(groups) + index} * 8);
    }
  }
};

/// A lane's activations of several rows, which have been rotated, by this launch too.
template <int rows>
struct InputReader {
  const RotatedLaunch& args;
  const __half* row[Columns<rows>::groups];

  __device__ explicit InputReader(const RotatedLaunch& launch) : args(launch) {
#pragma unroll
    for (int group = 0; group < Columns<rows>::groups; ++group) {
      const int index = min(8 * group + Columns<rows>::row(), args.m - 1);
      row[group] = static_cast<const __half*>(args.x) + static_cast<int64_t>(index) * args.ldx;
    }
  }
  /// The lane's eight from input `column` on; zeros beyond k.
  __device__ uint4 load(int pass, int column, int group = 0) const {
    const int k = static_cast<int>(args.k);
    const __half* const from = row[group] + (pass == 0 ? 0 : args.input_stride) + column;
    if (args.aligned && column + 8 <= k) return *reinterpret_cast<const uint4*>(from);
    return frame::load_ragged(from, k - column);
  }
};

/// One row's way from memory to B operands: the 256 inputs from an even tile on, which a span of three tiles lies in,
/// rotated on the way where the launch rotates. Tile j of the span is the j'th of these four or the one behind it.
template <bool single>
struct RowReader {
  const RotatedLaunch& args;
  const FragmentRotation rotation;

  __device__ explicit RowReader(const RotatedLaunch& launch) : args(launch), rotation(launch.block) {}

  __device__ static int offset(const Place<single>& at) { return at.column & 1; }
  __device__ static int first_input(const Place<single>& at) {
    return 64 * (at.column & ~1) + 8 * static_cast<int>(threadIdx.x % 32);
  }
  /// What does not depend on the launch before this one.
  __device__ void load_signs(RawInputs& raw, const Place<single>& at) const {
    const int first = first_input(at);
    if (!args.rotates || first >= static_cast<int>(args.k)) return;
    raw.signs = __ldg(at.of(args.sources[0].signs, args.sources[1].signs) + static_cast<unsigned>(first) / 32);
  }
  /// Zeros beyond k.
  __device__ void load(RawInputs& raw, const Place<single>& at) const {
    const int first = first_input(at), left = static_cast<int>(args.k) - first;
    const __half* const from = static_cast<const __half*>(args.x) + (at.pass == 0 ? 0 : args.input_stride) + first;
    raw.x = args.aligned && left >= 8 ? __ldg(reinterpret_cast<const uint4*>(from)) : frame::load_ragged(from, left);
  }
  __device__ uint4 rotated(const RawInputs& raw) const { return args.rotates ? rotation.rotate(raw) : raw.x; }
};

/// One warp's way through its run of tiles, `tiles` of them in flight.
template <class Bits, int rows, int tiles>
struct Run {
  static constexpr int groups = Columns<rows>::groups;
  static constexpr int first_bits = Bits::first, second_bits = Tables<Bits>::second_bits;
  static constexpr bool single = Bits::single;
  using View = typename Tables<Bits>::View;
  using Totals = frame::Totals<rows>;
  using At = rotated::Span<tiles, single>;
  using Norms = rotated::Norms<single>;
  using Slot = kbit::Slot<Bits::widest, Norms, rows>;
  using Place = rotated::Place<single>;
  using Inputs = std::conditional_t<rows == 1, RowReader<single>, InputReader<rows>>;
  static_assert(rows > 1 || tiles <= 3, "a span and the tile before it are 256 inputs");

  const RotatedLaunch& args;
  const SourceReader<single> weights;
  const Inputs inputs;
  const int end;
  At span;
  Slot ring[tiles];
  typename Norms::Packed norms;  ///< one row: of the tile whose sums the lane gets
  RawInputs raw;                 ///< one row: of the span

  __device__ Run(const RotatedLaunch& launch, int begin, int past)
      : args(launch), weights(launch), inputs(launch), end(past), span(launch, begin, past) {}

  /// Fills the ring; touches weights only.
  __device__ void load_first_weights() {
    const Place place(args, span);
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j < span.count) load_weights(ring[j], place, j);
    }
    if constexpr (rows == 1) {
      if (span.count > 0) load_span_weights(span);
    }
  }
  __device__ void load_first_activations() {
    const Place place(args, span);
    if constexpr (rows == 1) {
      if (span.count > 0) inputs.load(raw, place);
    } else {
#pragma unroll
      for (int j = 0; j < tiles; ++j) {
        if (j < span.count) load_inputs(ring[j], place, j);
      }
    }
  }

  /// Multiplies the span at hand, adds it to `totals`, and loads the one behind it, which becomes the one at hand.
  __device__ void step(const View& tables, Totals& totals) {
    const At next = span.next(args, end);
    const Place here(args, span), there(args, next);
    if constexpr (rows == 1) {
      const uint4 x = inputs.rotated(raw);
      const typename Norms::Packed span_norms = norms;
      if (next.count > 0) {
        inputs.load(raw, there);
        load_span_weights(next);
      }
      frame::Products<1> products;
      products.clear();
      const int first_column = 2 * Inputs::offset(here);
      frame::turn_ring(
          span, next, [&](int j) { multiply_tile(ring[j], here, first_column + 2 * j, x, tables, products); },
          [&](int j) { load_weights(ring[j], there, j); });
      totals.template add_tile<Norms>(products, span_norms);
    } else {
      frame::turn_ring(
          span, next, [&](int j) { multiply_rows(ring[j], here, tables, totals); },
          [&](int j) {
            load_weights(ring[j], there, j);
            load_inputs(ring[j], there, j);
          });
    }
    span = next;
  }

 private:
  __device__ void load_weights(Slot& slot, const Place& at, int j) {
    if (Bits::same || at.pass == 0) {
      weights.template load<first_bits>(slot.codes, at, j);
    } else {
      weights.template load<second_bits>(slot.codes, at, j);
    }
    if (rows > 1) weights.load(slot.scales, at, j);
  }
  __device__ void load_inputs(Slot& slot, const Place& at, int j) {
    const int first = 64 * (at.column + j) + 8 * static_cast<int>(threadIdx.x % 4);
    if constexpr (rows < 8) {
      slot.x[0][0] = inputs.load(at.pass, first + 32 * Columns<rows>::block());
    } else {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
#pragma unroll
        for (int group = 0; group < groups; ++group) {
          slot.x[block][group] = inputs.load(at.pass, first + 32 * block, group);
        }
      }
    }
  }
  /// Norms of the tile whose sums the lane gets, and signs. The tiles beyond the span have no sums and their columns
  /// are never filled: any tile of the span will do.
  __device__ void load_span_weights(const At& at) {
    const Place place(args, at);
    weights.load(norms, place, max(0, min(Columns<1>::sum_tile() - Inputs::offset(place), at.count - 1)));
    inputs.load_signs(raw, place);
  }

  /// 32 inputs of a tile of either pass.
  __device__ void multiply(const Slot& slot, const Place& at, int block, const uint4 (&b)[groups], const View& tables,
                           frame::Products<groups>& products) const {
    if (Bits::same || at.pass == 0) {
      kbit::multiply_block<first_bits, Type>(narrowed<first_bits>(slot.codes), block, b, tables.first, products);
    } else {
      kbit::multiply_block<second_bits, Type>(narrowed<second_bits>(slot.codes), block, b, tables.second, products);
    }
  }
  template <int bits>
  __device__ static kbit::WeightTile<bits> narrowed(const kbit::WeightTile<Bits::widest>& tile) {
    kbit::WeightTile<bits> result;
#pragma unroll
    for (int j = 0; j < bits; ++j) result.codes[j] = tile.codes[j];
    return result;
  }
  /// One row: the tile's two blocks go to columns of their own, `column` and the one behind it.
  __device__ void multiply_tile(const Slot& slot, const Place& at, int column, const uint4& x, const View& tables,
                                frame::Products<1>& products) const {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const bool mine = static_cast<int>(threadIdx.x % 32 / 4) == column + block;
      const uint4 b[1] = {frame::keep_if(mine, x)};
      multiply(slot, at, block, b, tables, products);
    }
  }
  __device__ void multiply_rows(const Slot& slot, const Place& at, const View& tables, Totals& totals) const {
    frame::Products<groups> products;
    products.clear();
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      if constexpr (rows < 8) {
        const uint4 b[1] = {frame::keep_if(Columns<rows>::block() == block, slot.x[0][0])};
        multiply(slot, at, block, b, tables, products);
      } else {
        multiply(slot, at, block, slot.x[block], tables, products);
        totals.template add_block<Norms>(products, slot.scales, block);
        products.clear();
      }
    }
    if constexpr (rows < 8) totals.template add_tile<Norms>(products, slot.scales);
  }
};

}  // namespace w4q::kernels::rotated
