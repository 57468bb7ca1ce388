// A warp's way through its run of tiles in the GEMV on Marlin's words: a ring of tiles in flight, multiplied in turn.
// Zero points cost one more mma a step: the same activations times a register of units give the sums of activations
// that the zero points are multiplied with.
#pragma once

#include "kernels/integer_inputs.cuh"
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

/// A warp's way through its run of tiles with one activation row: the blocks of a span's tiles have columns of mma of
/// their own, and their sums meet the scales once per span.
template <int bits, class Type, bool with_zeros, int tiles>
struct RowRun {
  using Scalar = typename Type::Scalar;
  using Columns = kbit::Columns<1>;
  using At = Span<tiles>;
  using GroupOf = Group<bits, with_zeros>;

  const MarlinLaunch& args;
  const WeightReader<bits> weights;
  const TileGroups<bits, with_zeros> groups;
  const InputReader<Scalar> inputs;
  const Scaling<1, Type, bits, with_zeros> scaling;
  const int end;
  At span;
  WeightTile<bits> ring[tiles];
  GroupOf span_groups[2];  ///< of the tile whose sums the lane gets
  uint4 span_x;            ///< of the tile and block that the lane's column holds

  __device__ RowRun(const MarlinLaunch& launch, int begin, int past)
      : args(launch),
        weights(launch),
        groups(launch),
        inputs(launch),
        scaling(launch),
        end(past),
        span(launch, begin, past) {}

  /// Fills the ring; touches weights only.
  __device__ void load_first_weights() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j < span.count) weights.load(ring[j], span.group, span.column + j);
    }
    if (span.count > 0) load_groups(span);
  }
  __device__ void load_first_activations() {
    if (span.count > 0) load_activations(span);
  }

  /// Multiplies the span at hand, adds it to `totals`, and loads the one behind it, which becomes the one at hand.
  template <class View>
  __device__ void step(const View&, Totals<1>& totals) {
    const At next = span.next(args, end);
    const uint4 x = span_x;
    const GroupOf at_hand[2] = {span_groups[0], span_groups[1]};
    if (next.count > 0) {
      load_activations(next);
      load_groups(next);
    }
    CodeProducts<1> products;
    products.clear();
    kbit::turn_ring(
        span, next, [&](int j) { multiply_tile(ring[j], j, x, products); },
        [&](int j) { weights.load(ring[j], next.group, next.column + j); });
    scaling.add_tile(totals, products, at_hand);
    span = next;
  }

 private:
  /// The tiles beyond the span have no sums and their columns are never filled: any tile of the span will do.
  __device__ void load_groups(const At& at) {
    groups.load(span_groups, at.group, at.column + min(Columns::sum_tile(), at.count - 1));
  }
  __device__ void load_activations(const At& at) {
    const int column = at.column + min(Columns::tile(), at.count - 1);
    span_x = inputs.load(static_cast<const Scalar*>(args.x),
                         column * static_cast<int>(kbit::Map::tile_cols) + 32 * Columns::block());
  }
  __device__ static void multiply_tile(const WeightTile<bits>& tile, int j, const uint4& x, CodeProducts<1>& products) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const bool mine = Columns::tile() == j && Columns::block() == block;
      const uint4 b[1] = {kbit::keep_if(mine, x)};
      products.template multiply<Type>(tile, block, b);
    }
  }
};

/// A warp's way through its run of tiles with more activation rows: they pass through shared memory, a ring of tiles of
/// the warp's own, in the order in which ldmatrix gives a lane what Marlin's words need.
template <int bits, class Type, bool with_zeros, int rows, int tiles>
struct RowsRun {
  using Scalar = typename Type::Scalar;
  using Columns = kbit::Columns<rows>;
  using At = Span<tiles>;
  static constexpr int operands = Columns::groups;
  static constexpr int stage_bytes = rows * 128;

  struct Slot {
    WeightTile<bits> codes;
    Group<bits, with_zeros> groups[2];
  };

  const MarlinLaunch& args;
  const WeightReader<bits> weights;
  const TileGroups<bits, with_zeros> groups;
  const Scaling<rows, Type, bits, with_zeros> scaling;
  const int end;
  At span;
  Slot ring[tiles];
  char* stages;  ///< `tiles` of this warp

  __device__ RowsRun(const MarlinLaunch& launch, int begin, int past)
      : args(launch), weights(launch), groups(launch), scaling(launch), end(past), span(launch, begin, past) {
    extern __shared__ uint4 shared[];
    stages = reinterpret_cast<char*>(shared) + threadIdx.x / 32 * (tiles * stage_bytes);
  }

  /// Fills the ring; touches weights only.
  __device__ void load_first_weights() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j < span.count) load_weights(ring[j], span, j);
    }
  }
  __device__ void load_first_activations() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j < span.count) fetch(span, j);
      device::close_async_group();
    }
  }

  /// Multiplies the span at hand, adds it to `totals`, and loads the one behind it, which becomes the one at hand.
  template <class View>
  __device__ void step(const View&, Totals<rows>& totals) {
    const At next = span.next(args, end);
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      device::wait_async<tiles - 1>();
      __syncwarp();
      if (j < span.count) multiply(ring[j], stages + j * stage_bytes, totals);
      __syncwarp();
      if (j < next.count) {
        load_weights(ring[j], next, j);
        fetch(next, j);
      }
      device::close_async_group();
    }
    span = next;
  }

 private:
  __device__ void load_weights(Slot& slot, const At& at, int j) const {
    weights.load(slot.codes, at.group, at.column + j);
    groups.load(slot.groups, at.group, at.column + j);
  }
  /// Starts fetching the activations of a tile; rows beyond m repeat the last one, columns beyond k are zero.
  __device__ void fetch(const At& at, int j) const {
    char* const stage = stages + j * stage_bytes;
#pragma unroll
    for (int c = threadIdx.x % 32; c < rows * 8; c += 32) {
      const int row = c / 8;
      const Scalar* const from =
          static_cast<const Scalar*>(args.x) + static_cast<int64_t>(min(row, args.m - 1)) * args.ldx;
      MatrixOrder::fetch(args, from, int64_t{64} * (at.column + j) + 8 * (c % 8),
                         stage + MatrixOrder::place(row, c % 8));
    }
  }
  __device__ void multiply(const Slot& slot, const char* stage, Totals<rows>& totals) const {
    CodeProducts<operands> products;
    products.clear();
    uint4 x[operands];
    if constexpr (rows < 8) {
      // Column g is row g / 2 and block g mod 2.
      const int column = threadIdx.x % 8;
      x[0] = MatrixOrder::read(stage + MatrixOrder::place(column / 2, 4 * (column % 2) + threadIdx.x % 32 / 8));
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const uint4 b[1] = {kbit::keep_if(Columns::block() == block, x[0])};
        products.template multiply<Type>(slot.codes, block, b);
      }
      scaling.add_tile(totals, products, slot.groups);
    } else {
      MatrixOrder::read(stage, 0, x);
      products.template multiply<Type>(slot.codes, 0, x);
      if (!groups.coarse()) {
        scaling.add_block(totals, products, slot.groups[0]);
        products.clear();
      }
      MatrixOrder::read(stage, 1, x);
      products.template multiply<Type>(slot.codes, 1, x);
      scaling.add_block(totals, products, slot.groups[1]);
    }
  }
};

}  // namespace w4q::kernels::integer
