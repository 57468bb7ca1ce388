// Rotated weights for the warpgroup kernels: codes as in kbit-fragment, norms of groups for scales, two passes as one
// weight whose rows are twice as long, and activations that the blocks of the launch rotate together.
#pragma once

#include "kernels/rotated/share.cuh"
#include "kernels/wgmma/decode_kbit.cuh"

namespace w4q::kernels::rotated {

/// One pass as a launch knows it.
struct RotatedPassSource {
  CUtensorMap codes;  ///< as KbitSource has them
  CUtensorMap norms;  ///< [N-tile][group][those of 64 outputs]
  const float* levels;
  int group_shift;  ///< a group is 2^group_shift inputs; 31: all are one group
};

struct RotatedSource {
  RotatedPassSource passes[2];
  int count;           ///< of passes
  int pass_tiles;      ///< tiles along k of one pass
  float table_factor;  ///< the tables hold the levels times this
  SharedInputs inputs;
  char* arranged;  ///< where they go: [tile of rows][rotation][tile along k] as wgmma/arrange.h has a tile
};

template <int bits>
struct RotatedWeights {
  using Type = device::HalfType;
  using Source = RotatedSource;
  static constexpr bool makes_inputs = true;
  static constexpr int n_tiles = wgmma::job_outputs(128) / 64;
  using Map = repack::KbitFragmentMap;
  static constexpr int table_kilobytes = 64;
  using Table = kbit::PairTable<bits, table_kilobytes>;
  /// The table of a second pass stands where entries of the first leave room.
  static constexpr bool has_second = 2 * Table::entry_bytes <= Table::stride;

  static constexpr int table_bytes = table_kilobytes * 1024;
  static constexpr int code_bytes = static_cast<int>(Map::tile_words(bits)) * 4;  ///< of a tile of 64 × 64
  static constexpr int norm_bytes = 128;                                          ///< of 64 outputs and one group
  /// Of `tiles` tiles along k: codes [tile][N-tile], then norms [tile][N-tile][group].
  static constexpr int stage_bytes(int tiles) { return tiles * n_tiles * (code_bytes + 2 * norm_bytes); }

  /// All warps of the block.
  __device__ static void fill_table(char* table, const Source& source) {
    Table::template fill<Type>(table, source.passes[0].levels, source.table_factor);
    if constexpr (has_second) {
      if (source.count == 1) return;
      Table::template fill<Type>(table + Table::entry_bytes, source.passes[1].levels, source.table_factor);
    }
  }

  /// Groups that a tile has norms of: 1, or 2 where they are 32 inputs. The same for both passes.
  __device__ static int groups(const Source& source) { return source.passes[0].group_shift == 5 ? 2 : 1; }
  /// Bytes that fetch() brings.
  __device__ static uint32_t tile_bytes(const Source& source) {
    return n_tiles * (code_bytes + groups(source) * norm_bytes);
  }
  /// Starts copies of tile `tile` to place `index` of a stage of `tiles`. Row groups and groups beyond the weight are
  /// zeros.
  template <int tiles>
  __device__ static void fetch(const Source& source, int strip, int tile, uint32_t stage, int index, uint32_t barrier) {
    const bool second = has_second && tile >= source.pass_tiles;
    const RotatedPassSource& pass = source.passes[second ? 1 : 0];
    const int at = tile - (second ? source.pass_tiles : 0);
    wgmma::copy_box(stage + index * n_tiles * code_bytes, &pass.codes, make_int4(0, 0, at, strip * n_tiles), barrier);
    wgmma::copy_box(stage + tiles * n_tiles * code_bytes + index * n_tiles * 2 * norm_bytes, &pass.norms,
                    make_int3(0, 64 * at >> pass.group_shift, strip * n_tiles), barrier);
  }

  /// A lane's codes and norms of one row tile of one tile.
  struct Words {
    uint32_t codes[bits];
    uint32_t norms[2];  ///< of each block of 32 inputs: rows g and g + 8
    uint32_t table;     ///< where the pass has its table
  };

  /// One warp's view of a stage of `tiles` tiles: N-tile `group`, row tile `row_tile`.
  template <int tiles>
  struct Decoder {
    kbit::LanePairs<bits, table_kilobytes> pairs;
    const char* codes;  ///< offsets from the stage
    const char* norms;
    int row_tile;
    int second_block;  ///< how far the norms of a tile's second block are from those of its first
    int pass_tiles;

    __device__ Decoder(const char* table, const char* first_stage, const Source& source, int group, int tile_of_16)
        : pairs(table),
          codes(first_stage + group * code_bytes + threadIdx.x % 32 * 16),
          norms(first_stage + n_tiles * tiles * code_bytes + group * groups(source) * norm_bytes +
                threadIdx.x % 32 / 4 * 16 + tile_of_16 * 4),
          row_tile(tile_of_16),
          second_block(groups(source) == 2 ? norm_bytes : 0),
          pass_tiles(source.pass_tiles) {}

    /// Tile `tile` of the stage at `offset`, which is tile `of_weight` of the weight.
    __device__ __forceinline__ void load(int offset, int tile, int of_weight, Words& words) const {
      wgmma::load_row_tile(codes + offset + tile * n_tiles * code_bytes, row_tile, words.codes);
      const char* const from = norms + offset + tile * n_tiles * 2 * norm_bytes;
      words.norms[0] = *reinterpret_cast<const uint32_t*>(from);
      words.norms[1] = *reinterpret_cast<const uint32_t*>(from + second_block);
      words.table = has_second && of_weight >= pass_tiles ? Table::entry_bytes : 0;
    }

    __device__ __forceinline__ void decode(const Words& words, int step, uint32_t (&a)[4]) const {
      pairs.moved(words.table).step([&](int w) { return words.codes[w]; }, step, a);
      const uint32_t both = words.norms[step / 2];
      const uint32_t norm[2] = {__byte_perm(both, 0, 0x1010), __byte_perm(both, 0, 0x3232)};
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) a[reg] = Type::multiply(a[reg], norm[reg % 2]);
    }
  };

  /// Tiles of activations along k, for each tile of rows.
  __device__ static int input_tiles(const Source& source) { return source.pass_tiles * source.inputs.rotations; }

  /// Every `stride`-th piece of the activations from piece `first` on, for tiles of `rows` rows.
  template <int rows>
  __device__ static void make_inputs(const Source& source, int first, int stride) {
    rotated::make_inputs(source.inputs, first, stride, [&](int rotation, int row, int column, const uint4& words) {
      const int tile = column / 64;
      if (tile >= source.pass_tiles) return;
      const int64_t of_rows = static_cast<int64_t>(row / rows) * input_tiles(source);
      char* const to = source.arranged + (of_rows + rotation * source.pass_tiles + tile) * (rows * 128) +
                       row % rows * 128 + column % 32 / 2;
      // Words of a block of 32 inputs change places as kbit-fragment wants it, pieces as swizzling does.
      const int piece = column % 64 / 32 * 4;
      const uint32_t all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(to + ((piece + i) ^ row % 8) * 16) = all[i];
    });
  }
};

}  // namespace w4q::kernels::rotated
