// Weights in the order of kbit-fragment for the warpgroup kernels: bulk copies of tiles to shared memory, and from there,
// by the table of pairs (or by shifts, of 8 bits) and scales, to registers of A.
#pragma once

#include "kernels/kbit/tile.cuh"
#include "kernels/wgmma/arrange.h"
#include "kernels/wgmma/fragment_codes.h"
#include "kernels/wgmma/pipeline.cuh"
#include "kernels/wgmma/plan.h"
#include "kernels/wgmma/turn_codes.cuh"

namespace w4q::kernels::wgmma {

/// Scales of kbit's blocks of 32, 16·g + 8·block + 2·row tile + half: bytes of E4M4, or halves.
template <class Type>
struct KbitScales {
  static constexpr int most_bytes = static_cast<int>(repack::KbitFragmentMap::tile_scales) * 2;  ///< of a tile
  static constexpr bool in_rows = false;     ///< of a whole N-tile in one row, less than a copy brings for a tile
  static constexpr bool of_sixteen = false;  ///< a block of 32 inputs has two
  bool e4m4;

  __host__ __device__ int bytes() const { return e4m4 ? most_bytes / 2 : most_bytes; }

  /// A lane's of a row tile. Both types are read by the same instructions, which take their places from registers.
  class Lane {
   public:
    __device__ Lane(const KbitScales& scales, int lane, int row_tile)
        : offset_(scales.e4m4 ? lane / 4 * 16 + row_tile / 2 * 4 : lane / 4 * 32 + row_tile * 4),
          second_block_(scales.e4m4 ? 8 : 16),
          first_(scales.e4m4 ? 0x4040 + row_tile % 2 * 0x0202 : 0x1010),
          second_(scales.e4m4 ? 0x4141 + row_tile % 2 * 0x0202 : 0x3232),
          shift_(!scales.e4m4                             ? 0
                 : std::is_same_v<Type, device::HalfType> ? 6
                                                          : 3) {
      // Kept in registers, not made anew for every tile.
      asm volatile("" : "+r"(second_block_), "+r"(first_), "+r"(second_), "+r"(shift_));
    }
    __device__ int offset() const { return offset_; }
    /// Of each block of 32, rows g and g + 8.
    __device__ void load(const char* from, uint32_t (&both)[2]) const {
      both[0] = *reinterpret_cast<const uint32_t*>(from);
      both[1] = *reinterpret_cast<const uint32_t*>(from + second_block_);
    }
    /// The scale of rows g (half 0) or g + 8 (half 1), twice.
    __device__ uint32_t pair(uint32_t both, int half) const {
      const uint32_t twice = __byte_perm(both, 0, half == 0 ? first_ : second_) << shift_;
      if constexpr (std::is_same_v<Type, device::HalfType>) return twice;
      if (shift_ != 0) return twice;
      const float value = __half2float(__ushort_as_half(static_cast<unsigned short>(twice)));
      return Type::pack(value, value);
    }

   private:
    int offset_, second_block_;
    uint32_t first_, second_, shift_;
  };
};

/// The weights as a launch knows them.
template <class Scales>
struct KbitSource {
  CUtensorMap codes;   ///< [N-tile][tile][2][half a tile's words]
  CUtensorMap scales;  ///< [N-tile][tile][those of a tile]
  const float* codebook;
  float table_factor;  ///< the table holds the codebook times this
  Scales scale_type;
};

/// Words bits · row_tile … of a lane's 4 · bits, which stand in groups of four, those of a tile's first lane at `from`
/// and of others 16 bytes further each. Where they cross groups, two 128-bit loads and a shift by words take fewer
/// passes of shared memory than a load for each word; half of the row tiles of 3 bits stand in one group.
template <int bits>
__device__ __forceinline__ void load_row_tile(const char* from, int row_tile, uint32_t (&words)[bits]) {
  const int first = bits * row_tile;
  const char* const group = from + first / 4 * 512;
  if constexpr (bits == 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(group);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (bits == 8) {
    const uint4 low = *reinterpret_cast<const uint4*>(group);
    const uint4 high = *reinterpret_cast<const uint4*>(group + 512);
    words[0] = low.x, words[1] = low.y, words[2] = low.z, words[3] = low.w;
    words[4] = high.x, words[5] = high.y, words[6] = high.z, words[7] = high.w;
  } else if constexpr (bits == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(group + first % 4 * 4);
    words[0] = v.x, words[1] = v.y;
  } else {
    const uint4 low = *reinterpret_cast<const uint4*>(group);
    uint4 high = low;
    if (first % 4 + bits > 4) high = *reinterpret_cast<const uint4*>(group + 512);
    const uint32_t all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    const bool by_one = first % 2 != 0;
    const bool by_two = first % 4 >= 2;
    uint32_t shifted[7];
#pragma unroll
    for (int i = 0; i < 7; ++i) shifted[i] = by_one ? all[i + 1] : all[i];
#pragma unroll
    for (int i = 0; i < bits; ++i) words[i] = by_two ? shifted[i + 2] : shifted[i];
  }
}

template <int bits, class Type_, int outputs = 256, class Scales = KbitScales<Type_>>
struct KbitWeights {
  using Type = Type_;
  using Source = KbitSource<Scales>;
  static constexpr bool makes_inputs = false;
  static constexpr int n_tiles = outputs / 64;  ///< of a job
  using Map = repack::KbitFragmentMap;
  static constexpr int table_kilobytes = 64;
  using Pairs = kbit::LanePairs<bits, table_kilobytes>;

  /// Whether codes are turned, with `tiles` tiles in a stage. Stages of one tile are those of 128 rows, where the tensor
  /// cores bind. Scales of sixteen inputs would have to change places too, which takes longer than arranging inputs.
  static constexpr bool turned(int tiles) { return can_turn(bits) && tiles > 1 && !Scales::of_sixteen; }
  static constexpr InputOrder input_order(int tiles) {
    return turned(tiles) ? InputOrder::plain : InputOrder::kbit_fragment;
  }

  static constexpr int table_bytes = bits == 8 ? 0 : table_kilobytes * 1024;
  static constexpr int code_bytes = static_cast<int>(Map::tile_words(bits)) * 4;  ///< of a tile of 64 × 64
  /// Of `tiles` tiles along k for all N-tiles of a job: codes [tile][N-tile], then scales [tile][N-tile].
  static constexpr int stage_bytes(int tiles) { return tiles * n_tiles * (code_bytes + Scales::most_bytes); }

  /// All warps of the block.
  __device__ static void fill_table(char* table, const Source& source) {
    kbit::PairTable<bits, table_kilobytes>::template fill<Type>(table, source.codebook, source.table_factor);
  }

  /// Bytes that fetch() brings.
  __device__ static uint32_t tile_bytes(const Source& source) {
    return n_tiles * (code_bytes + source.scale_type.bytes());
  }
  /// Starts copies of tile `tile` to place `index` of a stage of `tiles`. Row groups beyond the weight are zeros.
  template <int tiles>
  __device__ static void fetch(const Source& source, int strip, int tile, uint32_t stage, int index, uint32_t barrier) {
    copy_box(stage + index * n_tiles * code_bytes, &source.codes, make_int4(0, 0, tile, strip * n_tiles), barrier);
    const uint32_t to = stage + tiles * n_tiles * code_bytes + index * n_tiles * source.scale_type.bytes();
    if constexpr (Scales::in_rows) {
      copy_box(to, &source.scales, make_int2(Scales::first_word(tile), strip * n_tiles), barrier);
    } else {
      copy_box(to, &source.scales, make_int3(0, tile, strip * n_tiles), barrier);
    }
  }

  /// A lane's codes and scales of one row tile of one tile.
  struct Words {
    uint32_t codes[turned_words(bits)];
    uint32_t scales[2];  ///< as Scales::Lane has them
  };

  /// One warp's view of a stage of `tiles` tiles: N-tile `group`, row tile `row_tile`.
  template <int tiles>
  struct Decoder {
    Pairs pairs;
    const char* codes;  ///< offsets from the stage
    const char* scales;
    int row_tile;
    typename Scales::Lane lane_scales;
    int scale_stride;
    static constexpr bool turned = KbitWeights::turned(tiles);

    __device__ Decoder(const char* table, const char* first_stage, const Source& source, int group, int tile_of_16)
        : pairs(table),
          codes(first_stage + group * code_bytes + threadIdx.x % 32 * 16),
          row_tile(tile_of_16),
          lane_scales(source.scale_type, static_cast<int>(threadIdx.x) % 32, tile_of_16),
          scale_stride(n_tiles * source.scale_type.bytes()) {
      scales = first_stage + n_tiles * tiles * code_bytes + group * source.scale_type.bytes() + lane_scales.offset();
    }

    /// Tile `tile` of the stage at `offset`, which is `weight_tile` of the weight.
    __device__ __forceinline__ void load(int offset, int tile, int weight_tile, Words& words) const {
      uint32_t row[bits];
      load_row_tile(codes + offset + tile * n_tiles * code_bytes, row_tile, row);
      const char* const from = scales + offset + tile * scale_stride;
      if constexpr (Scales::in_rows) {
        lane_scales.load(from + Scales::place(weight_tile), words.scales);
      } else {
        lane_scales.load(from, words.scales);
      }
      take(row, words);
    }

    __device__ __forceinline__ void decode(const Words& words, int step, uint32_t (&a)[4]) const {
      if constexpr (turned && (bits == 3 || bits == 4)) {
        pairs.look_up(words.codes[step], a);
      } else {
        pairs.step([&](int w) { return words.codes[w]; }, step, a);
      }
      const uint32_t both = words.scales[step / 2];
      const uint32_t scale[2] = {lane_scales.pair(both, 0), lane_scales.pair(both, 1)};
#pragma unroll
      for (int reg = 0; reg < 4; ++reg) a[reg] = Type::multiply(a[reg], scale[reg % 2]);
    }

   private:
    /// Words of a row tile as decode() has them.
    __device__ __forceinline__ static void take(const uint32_t (&row)[bits], Words& words) {
#pragma unroll
      for (int w = 0; w < bits; ++w) words.codes[w] = row[w];
      if constexpr (turned) {
        if constexpr (bits == 3) words.codes[3] = Pairs::indices([&](int w) { return row[w]; }, 3);
        turn_codes<bits>(words.codes);
      }
    }
  };
};

template <class Weights>
typename Weights::Source kbit_source(const frame::Launch& launch, const decltype(Weights::Source::scale_type)& type) {
  typename Weights::Source source{};
  source.scale_type = type;
  source.codebook = launch.codebook;
  source.table_factor = launch.table_factor;
  source.codes = map_fragment_codes<Weights>(launch.codes, launch.k_tiles, launch.n_tiles);
  const int bytes = type.bytes();
  using Scales = decltype(Weights::Source::scale_type);
  if constexpr (Scales::in_rows) {
    constexpr int words = Scales::tile_words;
    source.scales = map_boxes(launch.scales, CU_TENSOR_MAP_DATA_TYPE_UINT32,
                              {{words * int64_t{launch.k_tiles}, 0, bytes / 4},
                               {launch.n_tiles, int64_t{launch.k_tiles} * words * 4, Weights::n_tiles}});
  } else {
    source.scales = map_boxes(launch.scales, CU_TENSOR_MAP_DATA_TYPE_UINT32,
                              {{bytes / 4, 0, bytes / 4},
                               {launch.k_tiles, bytes, 1},
                               {launch.n_tiles, int64_t{launch.k_tiles} * bytes, Weights::n_tiles}});
  }
  return source;
}

}  // namespace w4q::kernels::wgmma
