// A warp's way through its run of tiles in the GEMV on Marlin's words. Tiles wait in a ring in shared memory that is
// the warp's own: copies bring them there without passing through registers, so that many are in flight while few
// registers are in use, and the next launch finds room beside this one.
//
// Zero points cost one more mma a step: the same activations times a register of units give the sums of activations
// that the zero points are multiplied with.
#pragma once

#include "kernels/frame/gemv_run.cuh"
#include "kernels/integer/inputs.cuh"

namespace w4q::kernels::integer {

using frame::Products;
using Span = frame::Span<1>;

/// Products with codes, and with units instead of codes.
template <int groups>
struct CodeProducts {
  Products<groups> codes;
  float units[groups][4];

  __device__ void clear() {
    codes.clear();
    frame::set_zero(units);
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
        const uint2 b = frame::block_step(x[group], step);
        Type::mma(units[group], ones, b.x, b.y);
      }
#pragma unroll
      for (int r = 0; r < frame::Map::row_tiles; ++r) {
        uint32_t a[4];
        tile.template decode<Type>(r, step, a);
#pragma unroll
        for (int group = 0; group < groups; ++group) {
          const uint2 b = frame::block_step(x[group], step);
          Type::mma(codes.sums[group][r], a, b.x, b.y);
        }
      }
    }
  }
};

/// Scaled sums of a lane: [row tile][half][activation rows that the lane has]. One row: lanes 4g have it.
template <int rows>
struct RowTotals {
  static constexpr int groups = rows == 16 ? 2 : 1;
  static constexpr int per_lane = rows == 1 ? 1 : 2 * groups;
  float sums[frame::Map::row_tiles][2][per_lane];

  __device__ void clear() { frame::set_zero(sums); }
  /// scale · (products − zero · units), column by column of the lane.
  template <class Type, int bits, bool with_zeros>
  __device__ void add(const CodeProducts<groups>& products, const Group<bits, with_zeros>& group, bool bf16_scales) {
#pragma unroll
    for (int r = 0; r < frame::Map::row_tiles; ++r) {
      const float2 by = group.scale_pair(r, bf16_scales);
      const float zeros[2] = {group.template zero<Type>(r, 0), group.template zero<Type>(r, 1)};
#pragma unroll
      for (int column = 0; column < per_lane; ++column) {
        const float(&p)[4] = products.codes.sums[column / 2][r];
        const float units = products.units[column / 2][column % 2];
        sums[r][0][column] = fmaf(fmaf(-zeros[0], units, p[column % 2]), by.x, sums[r][0][column]);
        sums[r][1][column] = fmaf(fmaf(-zeros[1], units, p[2 + column % 2]), by.y, sums[r][1][column]);
      }
    }
  }
  /// Calls use(output, activation row, sum) for what the lane has to give of a finished N-tile.
  template <class Use>
  __device__ void for_each(const Use& use) const {
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
    if (rows == 1 && t != 0) return;
#pragma unroll
    for (int r = 0; r < frame::Map::row_tiles; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int column = 0; column < per_lane; ++column) {
          use(16 * r + 8 * half + g, 8 * (column / 2) + 2 * t + column % 2, sums[r][half][column]);
        }
      }
    }
  }
  /// One row: outputs `lane` and `lane` + 32 of a finished N-tile. Lane 4g has outputs g, g + 8, g + 16, …
  __device__ float2 pair() const {
    const int lane = threadIdx.x % 32;
    float2 pair{};
#pragma unroll
    for (int eight = 0; eight < 4; ++eight) {
      const float low = __shfl_sync(0xFFFFFFFFu, sums[eight / 2][eight % 2][0], lane % 8 * 4);
      const float high = __shfl_sync(0xFFFFFFFFu, sums[2 + eight / 2][eight % 2][0], lane % 8 * 4);
      if (lane / 8 == eight) pair = {low, high};
    }
    return pair;
  }
};

/// A tile on its way: codes as the lanes read them, the groups of its two blocks, activations in ldmatrix's order.
template <int bits, bool with_zeros, int rows>
struct Stage {
  static constexpr int groups_at = WeightReader<bits>::tile_bytes;
  static constexpr int inputs_at = groups_at + StagedGroups<bits, with_zeros>::bytes;
  static constexpr int bytes = inputs_at + rows * 128;
};

/// One warp's way through its run of tiles, `depth` of them in flight.
template <int bits, class Type, bool with_zeros, int rows, int depth>
struct Run {
  using Scalar = typename Type::Scalar;
  using Totals = RowTotals<rows>;
  using Stage = integer::Stage<bits, with_zeros, rows>;
  static constexpr int operands = Totals::groups;

  const MarlinLaunch& args;
  const WeightReader<bits> weights;
  const StagedGroups<bits, with_zeros> groups;
  const StagedInputs<Scalar, rows> inputs;
  const int end;
  Span span;
  Span ahead;  ///< `depth` tiles further on
  char* stages;
  int at = 0;  ///< the stage of the tile at hand

  __device__ Run(const MarlinLaunch& launch, int begin, int past)
      : args(launch),
        weights(launch),
        groups(launch),
        inputs(launch),
        end(past),
        span(launch, begin, past),
        ahead(span) {
    extern __shared__ uint4 shared[];
    stages = reinterpret_cast<char*>(shared) + threadIdx.x / 32 * (depth * Stage::bytes);
  }

  /// Fills the ring; touches weights only.
  __device__ void load_first_weights() {
    for (int j = 0; j < depth; ++j) {
      if (ahead.count > 0) {
        fetch_weights(stages + j * Stage::bytes);
        ahead = ahead.next(args, end);
      }
      device::close_async_group();
    }
  }
  __device__ void load_first_activations() {
    Span first = span;
    for (int j = 0; j < depth; ++j) {
      if (first.count > 0) {
        inputs.fetch(args, stages + j * Stage::bytes + Stage::inputs_at, first.column);
        first = first.next(args, end);
      }
      device::close_async_group();
    }
  }

  /// Multiplies the tile at hand, adds it to `totals`, and fetches another one in its place.
  template <class View>
  __device__ void step(const View&, Totals& totals) {
    char* const stage = stages + at;
    device::wait_async<depth - 1>();
    __syncwarp();
    multiply(stage, totals);
    __syncwarp();
    if (ahead.count > 0) {
      fetch_weights(stage);
      inputs.fetch(args, stage + Stage::inputs_at, ahead.column);
      ahead = ahead.next(args, end);
    }
    device::close_async_group();
    span = span.next(args, end);
    at = at + Stage::bytes < depth * Stage::bytes ? at + Stage::bytes : 0;
  }

 private:
  __device__ void fetch_weights(char* stage) const {
    weights.fetch(stage, ahead.group, ahead.column);
    groups.fetch(stage + Stage::groups_at, ahead.group, ahead.column);
  }
  __device__ void multiply(const char* stage, Totals& totals) const {
    const char* const of_groups = stage + Stage::groups_at;
    WeightTile<bits> codes;
    WeightReader<bits>::read(stage, codes);
    CodeProducts<operands> products;
    products.clear();
    uint4 x[operands];
    MatrixOrder::read(stage + Stage::inputs_at, 0, x, args.m);
    products.template multiply<Type>(codes, 0, x);
    if (!groups.coarse()) {
      totals.template add<Type>(products, groups.read(of_groups, 0), args.bf16_scales);
      products.clear();
    }
    MatrixOrder::read(stage + Stage::inputs_at, 1, x, args.m);
    products.template multiply<Type>(codes, 1, x);
    totals.template add<Type>(products, groups.read(of_groups, 1), args.bf16_scales);
  }
};

}  // namespace w4q::kernels::integer
