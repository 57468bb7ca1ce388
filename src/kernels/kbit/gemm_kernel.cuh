// kbit weights as gemm_block.cuh multiplies them: codes become values by a table in shared memory, and values are scaled in
// registers.
#pragma once

#include "kernels/frame/gemm_block.cuh"
#include "kernels/kbit/launch.cuh"

namespace w4q::kernels::kbit {

inline constexpr int gemm_table_kilobytes = 32;

struct ChunkOrder : frame::FragmentChunks {
  template <class Scalar>
  __device__ static void fetch(const Launch& args, const Scalar* row, int64_t first, char* to) {
    fetch_chunk(row, first, args.k, args.aligned, to);
  }
};

template <int bits, class Activation, class Scales>
struct KbitWeights {
  using Args = Launch;
  using Type = Activation;
  using Order = ChunkOrder;
  using View = LanePairs<bits, gemm_table_kilobytes>;
  static constexpr int table_bytes = PairTable<bits, gemm_table_kilobytes>::total_bytes;

  struct Tile {
    WeightTile<bits> codes;
    typename Scales::Packed scales;
  };
  struct Reader {
    WeightReader<bits, Scales> tiles;
    int k_tiles;
    __device__ explicit Reader(const Launch& args) : tiles(args.codes, args.scales), k_tiles(args.k_tiles) {}
    __device__ void load(Tile& tile, int n_tile, int column) const {
      const int64_t index = static_cast<int64_t>(n_tile) * k_tiles + column;
      tiles.load(tile.codes, index);
      tiles.load(tile.scales, index);
    }
  };

  /// Makes a launch's weight the one that stands so many tiles behind it.
  __device__ static void skip(Launch& launch, int64_t count) {
    launch.codes += count * Map::tile_words(bits);
    launch.scales = static_cast<const char*>(launch.scales) + count * (32 / sharers<Scales> * Scales::bytes_per_lane);
  }

  __device__ static void fill(char* table, const Launch& args) {
    PairTable<bits, gemm_table_kilobytes>::template fill<Type>(table, args.codebook, args.table_factor);
  }

  template <int groups>
  __device__ __forceinline__ static void multiply(const Tile& tile, int block, const uint4 (&x)[groups],
                                                  const View& table, const Launch& args,
                                                  frame::Accumulator<groups>& sums) {
#pragma unroll
    for (int r = 0; r < Map::row_tiles; ++r) {
      uint32_t scale[2];
      scale_registers<Type, Scales>(tile.scales, block, r, args.scale_factor, scale);
      frame::multiply_row_tile<Type>(tile.codes, r, block, scale, x, table, sums);
    }
  }
};

}  // namespace w4q::kernels::kbit
