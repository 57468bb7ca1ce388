// Linear layer of rotated weights for 17 to 64 activation rows, in the frame of gemm_block.cuh: as kbit's, with norms
// of groups for scales, tiles of two passes side by side along k, and activations that the blocks rotate together.
#include "core/with_bits.h"
#include "kernels/frame/gemm_block.cuh"
#include "kernels/kbit/tile.cuh"
#include "kernels/rotated/launch.cuh"

namespace w4q::kernels::rotated {
namespace {

using frame::Map;
constexpr int table_kilobytes = 32;

/// A column beyond those of the first pass is the second's.
struct ChunkOrder : frame::FragmentChunks {
  __device__ static void fetch(const RotatedLaunch& args, const __half* row, int64_t first, char* to) {
    const int64_t of_pass = int64_t{args.pass_tiles} * Map::tile_cols;
    const bool second = args.passes > 1 && first >= of_pass;
    fetch_chunk(row + (second ? args.input_stride : 0), first - (second ? of_pass : 0), args.k, args.aligned, to);
  }
};

template <int bits>
struct RotatedWeights {
  using Args = RotatedLaunch;
  using Type = device::HalfType;
  using Order = ChunkOrder;
  using View = kbit::LanePairs<bits, table_kilobytes>;
  static constexpr int table_bytes = table_kilobytes * 1024;

  struct Tile {
    kbit::WeightTile<bits> codes;
    uint4 norms[2];   ///< of each block of 32 inputs, as kbit's f16 scales
    uint32_t factor;  ///< of the pass, twice
  };
  struct Reader {
    const RotatedLaunch& args;
    __device__ explicit Reader(const RotatedLaunch& launch) : args(launch) {}
    __device__ void load(Tile& tile, int n_tile, int column) const {
      const bool second = column >= args.pass_tiles;
      const Source& source = args.sources[second ? 1 : 0];
      if (second) column -= args.pass_tiles;
      const int64_t index = int64_t{n_tile} * args.pass_tiles + column;
      tile.codes.load(source.codes + threadIdx.x % 32, index);
      const uint4* const norms = source.norms + int64_t{n_tile} * source.groups * 8 + threadIdx.x % 32 / 4;
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        // Inputs beyond k are zeros: any norm will do.
        const int group = min((64 * column + 32 * block) >> source.group_shift, source.groups - 1);
        tile.norms[block] = __ldg(norms + group * 8);
      }
      tile.factor = device::HalfType::pack(source.factor, source.factor);
    }
  };

  __device__ static void fill(char* table, const RotatedLaunch& args) {
    kbit::PairTable<bits, table_kilobytes>::template fill<Type>(table, args.sources[0].levels, args.table_factor);
  }

  template <int groups>
  __device__ __forceinline__ static void multiply(const Tile& tile, int block, const uint4 (&x)[groups],
                                                  const View& table, const RotatedLaunch&,
                                                  frame::Accumulator<groups>& sums) {
#pragma unroll
    for (int r = 0; r < Map::row_tiles; ++r) {
      const uint4& v = tile.norms[block];
      const uint32_t both = Type::multiply(r == 0 ? v.x : r == 1 ? v.y : r == 2 ? v.z : v.w, tile.factor);
      const uint32_t norm[2] = {__byte_perm(both, 0, 0x1010), __byte_perm(both, 0, 0x3232)};
      frame::multiply_row_tile<Type>(tile.codes, r, block, norm, x, table, sums);
    }
  }
};

}  // namespace

void launch_gemm(const RotatedLaunch& args, int bits, int blocks, const device::Stream& stream,
                 std::string_view shape) {
  with_table_bits(bits, [&]<int width>() {
    frame::launch_gemm_kernel<RotatedWeights<width>>(args, blocks, stream, "rotated_gemm", shape);
  });
}

}  // namespace w4q::kernels::rotated
