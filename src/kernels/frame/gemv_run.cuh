// One warp's way through its run of tiles in a GEMV: spans of tiles of one N-tile, a ring of tiles in flight, and
// activations.
#pragma once

#include "kernels/frame/gemv_sums.cuh"

namespace w4q::kernels::frame {

/// Up to `most` consecutive tiles of one N-tile.
template <int most>
struct Span {
  int tile, group, column, count;

  __device__ Span(const Launch& args, int first, int end) : Span(args, first, first / args.k_tiles, end) {}
  /// Of a first tile whose N-tile is known.
  __device__ Span(const Launch& args, int first, int group_, int end)
      : tile(first), group(group_), column(first - group * args.k_tiles) {
    limit(args, end);
  }
  __device__ Span next(const Launch& args, int end) const {
    Span after = *this;
    after.tile += count;
    after.column += count;
    if (after.column == args.k_tiles) {
      after.column = 0;
      ++after.group;
    }
    after.limit(args, end);
    return after;
  }
  __device__ bool ends_group(const Launch& args) const { return column + count == args.k_tiles; }

 private:
  __device__ void limit(const Launch& args, int end) { count = min(most, min(end - tile, args.k_tiles - column)); }
};

/// use(j) for the tiles of the span at hand, each followed by load(j) for the span behind it. Whole spans have a way
/// without branches, in which the compiler can mix the work of neighbouring tiles.
template <bool unbranched = true, int tiles, class Use, class Load>
__device__ __forceinline__ void turn_ring(const Span<tiles>& span, const Span<tiles>& next, const Use& use,
                                          const Load& load) {
  if (unbranched && span.count == tiles && next.count == tiles) {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      use(j);
      load(j);
    }
  } else {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j < span.count) use(j);
      if (j < next.count) load(j);
    }
  }
}

/// A lane's activations; `whole`: 16 bytes can be read everywhere.
template <class Scalar, int rows, bool whole = false>
struct ActivationReader {
  const Scalar* row[Columns<rows>::groups];
  int k;
  bool aligned;

  __device__ explicit ActivationReader(const Launch& args) : k(static_cast<int>(args.k)), aligned(args.aligned) {
#pragma unroll
    for (int group = 0; group < Columns<rows>::groups; ++group) {
      const int index = min(8 * group + Columns<rows>::row(), args.m - 1);
      row[group] = static_cast<const Scalar*>(args.x) + static_cast<int64_t>(index) * args.ldx;
    }
  }

  /// The lane's eight of block `block` of the tile in column `k_tile`; zeros beyond k.
  __device__ uint4 load(int k_tile, int block, int group = 0, int64_t offset = 0) const {
    const int column = k_tile * static_cast<int>(Map::tile_cols) + 32 * block + 8 * (threadIdx.x % 4);
    const Scalar* const from = row[group] + offset + column;
    if (whole || (aligned && column + 8 <= k)) return __ldg(reinterpret_cast<const uint4*>(from));
    return load_ragged(from, k - column);
  }
};

/// Of launches with one weight.
struct NoRouter {
  struct At {};
  __device__ explicit NoRouter(const Launch&) {}
  __device__ At at(int) const { return {}; }
  __device__ At next(At at) const { return at; }
  __device__ int tiles_before(const Launch&, int, At) const { return 0; }
  __device__ int64_t inputs_before(At) const { return 0; }
};

__device__ __forceinline__ uint4 keep_if(bool condition, const uint4& x) {
  return make_uint4(condition ? x.x : 0, condition ? x.y : 0, condition ? x.z : 0, condition ? x.w : 0);
}

}  // namespace w4q::kernels::frame
