// One warp's way through its run of tiles in the GEMV of kbit weights.
#pragma once

#include "kernels/frame/gemv_run.cuh"
#include "kernels/kbit/tile.cuh"

namespace w4q::kernels::kbit {

using frame::Columns;
using frame::Launch;
using frame::Products;

constexpr int gemv_table_kilobytes = 64;

/// One place of the ring of tiles in flight. With more than one row it carries the tile's scales and activations too;
/// one row loads these per span, but for scales that weights meet.
template <int bits, class Scales, int rows>
struct Slot {
  WeightTile<bits> codes;
  typename Scales::Packed scales;
  uint4 x[2][Columns<rows>::groups];  ///< fewer than eight rows: only [0], of the block of the lane's column
};

/// Weights that meet their scales as sums.
struct Unscaled {
  __device__ void operator()(int, uint32_t (&)[4]) const {}
};

/// Multiplies one block (two mma steps) of a tile with the lane's activations `x`; scale(row_tile, registers) is done to
/// weights before.
template <int bits, class Type, int groups, class Table, class Scale = Unscaled>
__device__ __forceinline__ void multiply_block(const WeightTile<bits>& tile, int block, const uint4 (&x)[groups],
                                               const Table& table, Products<groups>& products,
                                               const Scale& scale = {}) {
#pragma unroll
  for (int r = 0; r < Map::row_tiles; ++r) {
#pragma unroll
    for (int step = 2 * block; step < 2 * block + 2; ++step) {
      uint32_t a[4];
      tile.decode(r, step, table, a);
      scale(r, a);
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        const uint2 b = frame::block_step(x[group], step);
        Type::mma(products.sums[group][r], a, b.x, b.y);
      }
    }
  }
}

/// One warp's way through its run of tiles. `compact`: with one copy of the code for a span, of x whose rows may be read 16
/// bytes at a time and end with a tile.
template <int bits, class Type, class Scales, int rows, int tiles, class Route = frame::NoRouter, bool compact = false>
struct Run {
  using Scalar = typename Type::Scalar;
  using Table = LanePairs<bits, gemv_table_kilobytes>;
  using At = frame::Span<tiles>;
  using SumScales = std::conditional_t<scales_weights<Scales>, UnitScales, Scales>;

  const Launch& args;
  const WeightReader<bits, Scales> weights;
  const frame::ActivationReader<Scalar, rows, compact> activations;
  Route route;
  const int end;
  At span;
  typename Route::At place;  ///< of the span
  Slot<bits, Scales, rows> ring[tiles];
  typename SumScales::Packed scales;  ///< one row: those of the tile whose sums the lane gets
  uint4 x;                            ///< one row: of the tile and block that the lane's column holds

  template <class Args>
  __device__ Run(const Args& launch, int begin, int past)
      : args(launch),
        weights(launch.codes, launch.scales),
        activations(launch),
        route(launch),
        end(past),
        span(first_span(launch, begin, past)),
        place(first_place(launch)) {}

  /// Fills the ring; touches weights only.
  __device__ void load_first_weights() {
    if (span.count == 0) return;
    const int before = route.tiles_before(args, span.group, place);
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j < span.count) load_weights(ring[j], span, j, before);
    }
    if (rows == 1) load_span_scales(span, before);
  }
  __device__ void load_first_activations() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (rows > 1 && j < span.count) load_activations(ring[j], span, j);
    }
    if (rows == 1 && span.count > 0) load_span_activations(span, place);
  }

  /// Multiplies the span at hand, adds it to `totals`, and loads the one behind it, which becomes the one at hand.
  __device__ void step(const Table& table, frame::Totals<rows>& totals) {
    const At next = span.next(args, end);
    const auto next_place = next.group == span.group ? place : route.next(place);
    const int before = next.count > 0 ? route.tiles_before(args, next.group, next_place) : 0;
    if constexpr (rows == 1) {
      const uint4 span_x = x;
      const typename SumScales::Packed span_scales = scales;
      if (next.count > 0) {
        load_span_activations(next, next_place);
        load_span_scales(next, before);
      }
      Products<1> products;
      products.clear();
      frame::turn_ring<!compact>(
          span, next, [&](int j) { multiply_tile(ring[j], j, span_x, table, products); },
          [&](int j) { load_weights(ring[j], next, j, before); });
      if constexpr (requires { route.share_of(place); }) products.scale(route.share_of(place));
      totals.template add_tile<SumScales>(products, span_scales);
    } else {
      frame::turn_ring(
          span, next, [&](int j) { multiply_rows(ring[j], table, totals); },
          [&](int j) {
            load_weights(ring[j], next, j, before);
            load_activations(ring[j], next, j);
          });
    }
    span = next;
    place = next_place;
  }

 private:
  using RingSlot = Slot<bits, Scales, rows>;

  template <class Args>
  __device__ static At first_span(const Args& launch, int begin, int past) {
    if constexpr (compact)
      return At(launch, begin, launch.cut.k_tiles.quotient(begin), past);
    else
      return At(launch, begin, past);
  }
  template <class Args>
  __device__ typename Route::At first_place(const Args& launch) const {
    if constexpr (compact)
      return route.at(span.group, [&](int group, int) { return launch.cut.inner.quotient(group); });
    else
      return route.at(span.group);
  }

  __device__ void load_weights(RingSlot& slot, const At& at, int j, int before) {
    const int tile = at.tile + j + before;
    weights.load(slot.codes, tile);
    if (rows > 1 || scales_weights<Scales>) weights.load(slot.scales, tile);
  }
  __device__ void load_activations(RingSlot& slot, const At& at, int j) {
    if constexpr (rows < 8) {
      slot.x[0][0] = activations.load(at.column + j, Columns<rows>::block());
    } else {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
#pragma unroll
        for (int group = 0; group < Columns<rows>::groups; ++group) {
          slot.x[block][group] = activations.load(at.column + j, block, group);
        }
      }
    }
  }
  /// The tiles beyond the span have no sums and their columns are never filled: any tile of the span will do.
  __device__ void load_span_scales(const At& at, int before) {
    if constexpr (!scales_weights<Scales>) {
      weights.load(scales, at.tile + before + min(Columns<rows>::sum_tile(), at.count - 1));
    }
  }
  /// What sums are still to meet.
  __device__ static typename SumScales::Packed scales_of(const RingSlot& slot) {
    if constexpr (scales_weights<Scales>) {
      return {};
    } else {
      return slot.scales;
    }
  }
  __device__ void load_span_activations(const At& at, typename Route::At from) {
    x = activations.load(at.column + min(Columns<rows>::tile(), at.count - 1), Columns<rows>::block(), 0,
                         route.inputs_before(from));
  }

  template <int groups>
  __device__ static void multiply(const RingSlot& slot, int block, const uint4 (&x)[groups], const Table& table,
                                  Products<groups>& products) {
    if constexpr (scales_weights<Scales>) {
      multiply_block<bits, Type>(slot.codes, block, x, table, products, [&](int row_tile, uint32_t(&a)[4]) {
        uint32_t scale[2];
        scale_registers<Type, Scales>(slot.scales, block, row_tile, 1, scale);
#pragma unroll
        for (int reg = 0; reg < 4; ++reg) a[reg] = Type::multiply(a[reg], scale[reg % 2]);
      });
    } else {
      multiply_block<bits, Type>(slot.codes, block, x, table, products);
    }
  }

  /// One row: the tile's two blocks go to columns of their own.
  __device__ static void multiply_tile(const RingSlot& slot, int j, const uint4& x, const Table& table,
                                       Products<1>& products) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const bool mine = Columns<rows>::tile() == j && Columns<rows>::block() == block;
      const uint4 b[1] = {frame::keep_if(mine, x)};
      multiply(slot, block, b, table, products);
    }
  }
  __device__ static void multiply_rows(const RingSlot& slot, const Table& table, frame::Totals<rows>& totals) {
    Products<Columns<rows>::groups> products;
    products.clear();
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      if constexpr (rows < 8) {
        const uint4 b[1] = {frame::keep_if(Columns<rows>::block() == block, slot.x[0][0])};
        multiply(slot, block, b, table, products);
      } else {
        multiply(slot, block, slot.x[block], table, products);
        totals.template add_block<SumScales>(products, scales_of(slot), block);
        products.clear();
      }
    }
    if constexpr (rows < 8) totals.template add_tile<SumScales>(products, scales_of(slot));
  }
};

}  // namespace w4q::kernels::kbit
