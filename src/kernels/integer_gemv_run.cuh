// One warp's way through its run of tiles in the GEMV on Marlin's words: a ring of tiles in flight, multiplied in turn.
// Zero points cost one more mma a step: the same activations times a register of units give the sums of activations
// that the zero points are multiplied with.
#pragma once

#include "kernels/integer_tile.cuh"
#include "kernels/kbit_gemv_run.cuh"

namespace w4q::kernels::integer {

using kbit::Columns;
using kbit::Products;
using kbit::Span;
using kbit::Totals;

/// Products with codes, and with units instead of codes.
template <int groups>
struct CodeProducts {
  Products<groups> codes;
  float units[groups][4];

  __device__ void clear() {
    codes.clear();
#pragma unroll
    for (auto& group : units) {
#pragma unroll
      for (float& sum : group) sum = 0;
    }
  }
  /// 32 inputs of a tile with the lane's activations `x`.
  template <class Type, int bits>
  __device__ __forceinline__ void multiply(const WeightTile<bits>& tile, int block, const uint4 (&x)[groups]) {
    constexpr uint32_t unit = Codec<bits, Type>::unit_pair;
    const uint32_t ones[4] = {unit, unit, unit, unit};
#pragma unroll
    for (int step = 2 * block; step < 2 * block + 2; ++step) {
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        const uint2 b = kbit::block_step(x[group], step);
        Type::mma(units[group], ones, b.x, b.y);
      }
#pragma unroll
      for (int r = 0; r < kbit::Map::row_tiles; ++r) {
        uint32_t a[4];
        tile.template decode<Type>(r, step, a);
#pragma unroll
        for (int group = 0; group < groups; ++group) {
          const uint2 b = kbit::block_step(x[group], step);
          Type::mma(codes.sums[group][r], a, b.x, b.y);
        }
      }
    }
  }
};

/// Adds products to totals: scale · (products − zero · units), column by column of the lane.
template <int rows, class Type, int bits, bool with_zeros>
struct Scaling {
  using GroupOf = Group<bits, with_zeros>;
  static constexpr int groups = Columns<rows>::groups;
  bool bf16, single;

  __device__ explicit Scaling(const MarlinLaunch& args)
      : bf16(args.bf16_scales), single(args.group_shift == one_group) {}

  __device__ float2 scale(const GroupOf& group, int row_tile) const {
    return single ? make_float2(1, 1) : group.scale_pair(row_tile, bf16);
  }
  /// Both columns of the lane are rows of one block.
  __device__ void add_block(Totals<rows>& totals, const CodeProducts<groups>& products, const GroupOf& group) const {
#pragma unroll
    for (int r = 0; r < kbit::Map::row_tiles; ++r) {
      const float2 by = scale(group, r);
#pragma unroll
      for (int column = 0; column < Totals<rows>::per_lane; ++column) {
        add(totals.sums[r], column, products, r, column / 2, column % 2, group, by);
      }
    }
  }
  /// The lane's columns are the two blocks of a tile.
  __device__ void add_tile(Totals<rows>& totals, const CodeProducts<1>& products, const GroupOf (&of_blocks)[2]) const {
#pragma unroll
    for (int r = 0; r < kbit::Map::row_tiles; ++r) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        add(totals.sums[r], 0, products, r, 0, block, of_blocks[block], scale(of_blocks[block], r));
      }
    }
  }

 private:
  template <int most>
  __device__ static void add(float (&sums)[2][most], int at, const CodeProducts<groups>& products, int row_tile,
                             int group, int column, const GroupOf& of, float2 by) {
    const float(&p)[4] = products.codes.sums[group][row_tile];
    const float units = products.units[group][column];
    sums[0][at] = fmaf(fmaf(-of.template zero<Type>(row_tile, 0), units, p[column]), by.x, sums[0][at]);
    sums[1][at] = fmaf(fmaf(-of.template zero<Type>(row_tile, 1), units, p[2 + column]), by.y, sums[1][at]);
  }
};

/// One warp's way through its run of tiles.
template <int bits, class Type, bool with_zeros, int rows, int tiles>
struct Run {
  using Scalar = typename Type::Scalar;
  using At = Span<tiles>;
  using GroupOf = Group<bits, with_zeros>;
  static constexpr int column_groups = Columns<rows>::groups;
  static constexpr int x_blocks = rows >= 8 ? 2 : 1;  ///< fewer rows: only the block of the lane's column

  /// One place of the ring of tiles in flight. With more than one row it carries the tile's groups and activations too;
  /// one row loads these per span.
  struct Slot {
    WeightTile<bits> codes;
    GroupOf groups[2];
    uint4 x[x_blocks][column_groups];
  };

  const MarlinLaunch& args;
  const WeightReader<bits> weights;
  const GroupReader<bits, with_zeros> group_reader;
  const InputReader<Scalar> inputs;
  const Scaling<rows, Type, bits, with_zeros> scaling;
  const Scalar* row[column_groups];
  const int end;
  At span;
  Slot ring[tiles];
  GroupOf span_groups[2];  ///< one row: those of the tile whose sums the lane gets
  uint4 span_x;            ///< one row: of the tile and block that the lane's column holds

  __device__ Run(const MarlinLaunch& launch, int begin, int past)
      : args(launch),
        weights(launch),
        group_reader(launch),
        inputs(launch),
        scaling(launch),
        end(past),
        span(launch, begin, past) {
#pragma unroll
    for (int group = 0; group < column_groups; ++group) {
      const int index = min(8 * group + Columns<rows>::row(), args.m - 1);
      row[group] = static_cast<const Scalar*>(args.x) + static_cast<int64_t>(index) * args.ldx;
    }
  }

  /// Fills the ring; touches weights only.
  __device__ void load_first_weights() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j < span.count) load_weights(ring[j], span, j);
    }
    if (rows == 1 && span.count > 0) load_span_groups(span);
  }
  __device__ void load_first_activations() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (rows > 1 && j < span.count) load_activations(ring[j], span, j);
    }
    if (rows == 1 && span.count > 0) load_span_activations(span);
  }

  /// Multiplies the span at hand, adds it to `totals`, and loads the one behind it, which becomes the one at hand.
  template <class View>
  __device__ void step(const View&, Totals<rows>& totals) {
    const At next = span.next(args, end);
    if constexpr (rows == 1) {
      const uint4 x = span_x;
      const GroupOf groups[2] = {span_groups[0], span_groups[1]};
      if (next.count > 0) {
        load_span_activations(next);
        load_span_groups(next);
      }
      CodeProducts<1> products;
      products.clear();
      kbit::turn_ring(
          span, next, [&](int j) { multiply_tile(ring[j], j, x, products); },
          [&](int j) { load_weights(ring[j], next, j); });
      scaling.add_tile(totals, products, groups);
    } else {
      kbit::turn_ring(
          span, next, [&](int j) { multiply_rows(ring[j], totals); },
          [&](int j) {
            load_weights(ring[j], next, j);
            load_activations(ring[j], next, j);
          });
    }
    span = next;
  }

 private:
  __device__ void load_groups(GroupOf (&groups)[2], int row_group, int column) const {
    group_reader.load(groups[0], row_group, 2 * column);
    if (group_reader.coarse()) {
      groups[1] = groups[0];
    } else {
      group_reader.load(groups[1], row_group, min(2 * column + 1, (inputs.k - 1) / 32));
    }
  }
  __device__ void load_weights(Slot& slot, const At& at, int j) const {
    weights.load(slot.codes, at.group, at.column + j);
    if (rows > 1) load_groups(slot.groups, at.group, at.column + j);
  }
  __device__ void load_activations(Slot& slot, const At& at, int j) const {
    const int first = (at.column + j) * static_cast<int>(kbit::Map::tile_cols);
#pragma unroll
    for (int block = 0; block < x_blocks; ++block) {
#pragma unroll
      for (int group = 0; group < column_groups; ++group) {
        slot.x[block][group] = inputs.load(row[group], first + 32 * (rows < 8 ? Columns<rows>::block() : block));
      }
    }
  }
  /// The tiles beyond the span have no sums and their columns are never filled: any tile of the span will do.
  __device__ void load_span_groups(const At& at) {
    load_groups(span_groups, at.group, at.column + min(Columns<rows>::sum_tile(), at.count - 1));
  }
  __device__ void load_span_activations(const At& at) {
    const int column = at.column + min(Columns<rows>::tile(), at.count - 1);
    span_x = inputs.load(row[0], column * static_cast<int>(kbit::Map::tile_cols) + 32 * Columns<rows>::block());
  }

  /// One row: the tile's two blocks go to columns of their own.
  __device__ static void multiply_tile(const Slot& slot, int j, const uint4& x, CodeProducts<1>& products) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const bool mine = Columns<rows>::tile() == j && Columns<rows>::block() == block;
      const uint4 b[1] = {kbit::keep_if(mine, x)};
      products.template multiply<Type>(slot.codes, block, b);
    }
  }
  __device__ void multiply_rows(const Slot& slot, Totals<rows>& totals) const {
    CodeProducts<column_groups> products;
    products.clear();
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      if constexpr (rows < 8) {
        const uint4 b[1] = {kbit::keep_if(Columns<rows>::block() == block, slot.x[0][0])};
        products.template multiply<Type>(slot.codes, block, b);
      } else {
        products.template multiply<Type>(slot.codes, block, slot.x[block]);
        scaling.add_block(totals, products, slot.groups[block]);
        products.clear();
      }
    }
    if constexpr (rows < 8) scaling.add_tile(totals, products, slot.groups);
  }
};

}  // namespace w4q::kernels::integer
