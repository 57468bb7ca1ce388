// Moving one weight between the canonical layout and a packed one, on the GPU. A thread block takes strips of 64 rows ×
// 16 blocks, which it holds in shared memory in canonical order:
//
//   canonical side   all threads move whole rows of the strip: runs of 16 · bits words, 16 bytes a thread where rows
//                    are aligned to that
//   packed side      warp w moves tile w of the strip, 64 rows × 2 blocks, which stands in one piece
//
// so that both sides of global memory see long runs. A packed layout says what a warp does with a tile: `KbitTileStrip`
// copies it, `KbitFragmentStrip` turns planes into fragments. Codes and scales go together.
#pragma once

#include <cstdint>
#include <utility>

#include "repack/kbit_fragment_moves.h"
#include "repack/layout_kbit_tile.h"

namespace w4q::repack {

enum class Direction { pack, unpack };

constexpr int strip_rows = 64;
constexpr int strip_tiles = 8;
constexpr int tile_blocks = 2;
constexpr int tile_slots = strip_rows * tile_blocks;  ///< blocks of a tile
constexpr int strip_blocks = strip_tiles * tile_blocks;
constexpr int strip_threads = 32 * strip_tiles;
constexpr int strip_residency = 3;  ///< thread blocks on an SM: leaves 80 registers a thread

/// Words from row to row in shared memory: rows stay aligned to 16 bytes, and 8 rows that follow one another stand in
/// different banks.
template <int bits>
constexpr int row_stride = strip_blocks* bits + 4;

/// What a pass works on; the planes' types follow the direction.
template <class Map>
struct StripPass {
  Map map;
  int64_t n;
  int64_t blocks;        ///< of a row, without padding
  int64_t padded_tiles;  ///< tiles side by side
  int64_t row_groups;    ///< of 64 rows, padding included
  const void* from_codes;
  const void* from_scales;  ///< null when packing: none
  void* to_codes;
  void* to_scales;
  unsigned long long* bad_codes;  ///< unpack only
  unsigned long long* bad_scales;
};

/// Where a thread block works.
struct StripPlace {
  int64_t row;    ///< first one
  int64_t tile;   ///< first one along k
  int64_t index;  ///< of the first canonical block
  int rows;       ///< that the weight has: 0 … 64
  int blocks;     ///< of a row that the weight has: 1 … 16
  int tiles;      ///< that the layout has: 1 … 8
};

template <class Map>
__device__ inline StripPlace place_of(const StripPass<Map>& pass, int64_t task, int64_t strips) {
  StripPlace at;
  at.row = task / strips * strip_rows;
  at.tile = task % strips * strip_tiles;
  at.index = at.row * pass.blocks + at.tile * tile_blocks;
  at.rows = static_cast<int>(max(int64_t{0}, min(int64_t{strip_rows}, pass.n - at.row)));
  at.blocks = static_cast<int>(min(int64_t{strip_blocks}, pass.blocks - at.tile * tile_blocks));
  at.tiles = static_cast<int>(min(int64_t{strip_tiles}, pass.padded_tiles - at.tile));
  return at;
}

/// `count` elements that are loaded and stored as one.
template <class Element, int count>
struct alignas(sizeof(Element) * count) Piece {
  Element values[count];
};

/// The canonical side of one plane: `per_block` elements a block, `width` of them at a time. Rows of the strip stand
/// `stride` elements apart in shared memory.
template <class Element, int per_block, int width, int stride>
struct CanonicalRows {
  using Unit = Piece<Element, width>;
  static constexpr int row_units = strip_blocks * per_block / width;
  static constexpr int thread_units = strip_rows * row_units / strip_threads;
  /// What a thread has in flight: as many units however wide they are, so that narrow ones take no more registers.
  static constexpr int batch = thread_units * width / 4;
  static constexpr int batches = thread_units / batch;

  /// Calls visit(i, place in shared memory, canonical element, row of the strip, element of the row) for the units
  /// i = 0 … batch − 1 of a batch.
  template <class Visit>
  static __device__ __forceinline__ void for_each(const StripPlace& at, int64_t row_blocks, int number,
                                                  const Visit& visit) {
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      const int unit = (number * batch + i) * strip_threads + static_cast<int>(threadIdx.x);
      const int row = unit / row_units;
      const int element = unit % row_units * width;
      visit(i, row * stride + element, (at.index + row * row_blocks) * per_block + element, row, element);
    }
  }
  static __device__ __forceinline__ bool exists(const StripPlace& at, int row, int element) {
    return row < at.rows && element < at.blocks * per_block;
  }

  /// What the weight does not have comes in as zero.
  static __device__ __forceinline__ void load(const StripPlace& at, int64_t row_blocks, const Element* from,
                                              Element* shared) {
#pragma unroll 1
    for (int number = 0; number < batches; ++number) {
      Unit units[batch];
      for_each(at, row_blocks, number, [&](int i, int, int64_t global, int row, int element) {
        units[i] = exists(at, row, element) ? *reinterpret_cast<const Unit*>(from + global) : Unit{};
      });
      for_each(at, row_blocks, number,
               [&](int i, int local, int64_t, int, int) { *reinterpret_cast<Unit*>(shared + local) = units[i]; });
    }
  }

  /// Calls refuse(row, block), both in the strip, for what is not zero and not of the weight.
  template <class Refuse>
  static __device__ __forceinline__ void store(const StripPlace& at, int64_t row_blocks, const Element* shared,
                                               Element* to, const Refuse& refuse) {
#pragma unroll 1
    for (int number = 0; number < batches; ++number) {
      for_each(at, row_blocks, number, [&](int, int local, int64_t global, int row, int element) {
        const Unit unit = *reinterpret_cast<const Unit*>(shared + local);
        if (exists(at, row, element)) {
          *reinterpret_cast<Unit*>(to + global) = unit;
        } else if (element < at.tiles * tile_blocks * per_block) {
          check(unit, row, element, refuse);
        }
      });
    }
  }

 private:
  template <class Refuse>
  static __device__ void check(const Unit& unit, int row, int element, const Refuse& refuse) {
#pragma unroll
    for (int j = 0; j < width; ++j) {
      if (unit.values[j] != 0) refuse(row, (element + j) / per_block);
    }
  }
};

/// kbit-tile: the words of a tile's rows as they are.
struct KbitTileStrip {
  using Map = KbitTileMap;

  static int64_t tiles(const Map& map) { return map.block_tiles; }
  static int64_t row_groups(const Map& map) { return map.rows() / strip_rows; }
  static __device__ int64_t first_slot(const Map& map, int64_t row, int64_t tile) {
    return map.slot(row, tile * tile_blocks);
  }
  /// Row and block of scale i of a tile.
  static __device__ int2 scale_place(int i) { return make_int2(i / tile_blocks, i % tile_blocks); }

  template <int bits>
  static constexpr int pieces = tile_slots* bits / 2 / 32;  ///< of two words a lane
  /// Where piece i of a lane stands in shared memory.
  template <int bits>
  static __device__ int local(int i, int lane) {
    const int piece = i * 32 + lane;
    return piece / bits * row_stride<bits> + piece % bits * 2;
  }

  template <int bits>
  static __device__ void pack(const uint32_t* shared, uint32_t* packed, int lane) {
#pragma unroll
    for (int i = 0; i < pieces<bits>; ++i) {
      reinterpret_cast<uint2*>(packed)[i * 32 + lane] = *reinterpret_cast<const uint2*>(shared + local<bits>(i, lane));
    }
  }
  template <int bits>
  static __device__ void unpack(const uint32_t* packed, uint32_t* shared, int lane) {
    uint2 words[pieces<bits>];
#pragma unroll
    for (int i = 0; i < pieces<bits>; ++i) words[i] = __ldcs(reinterpret_cast<const uint2*>(packed) + i * 32 + lane);
#pragma unroll
    for (int i = 0; i < pieces<bits>; ++i) *reinterpret_cast<uint2*>(shared + local<bits>(i, lane)) = words[i];
  }
};

/// The bit moves of kbit-fragment on the words of one lane and row tile.
template <int bits>
struct FragmentWords {
  using Moves = KbitFragmentMoves<bits>;

  template <int by>
  static __device__ uint32_t shifted(uint32_t word) {
    if constexpr (by >= 0) {
      return word << by;
    } else {
      return word >> -by;
    }
  }
  template <size_t i>
  static __device__ void exchange(uint32_t* words) {
    constexpr BitExchange step = Moves::exchanges[i];
    const uint32_t up = words[step.b] << step.shift;
    const uint32_t down = words[step.a] >> step.shift;
    words[step.a] = (words[step.a] & ~(step.mask << step.shift)) | (up & (step.mask << step.shift));
    words[step.b] = (words[step.b] & ~step.mask) | (down & step.mask);
  }
  template <size_t i>
  static __device__ void move(const uint32_t* steps, uint32_t* words) {
    constexpr BitMove step = Moves::moves.moves[i];
    words[step.to] |= shifted<step.shift>(steps[step.from]) & step.mask;
  }
  template <size_t i>
  static __device__ void move_back(const uint32_t* words, uint32_t* steps) {
    constexpr BitMove step = Moves::moves.moves[i];
    constexpr uint32_t mask = step.shift > 0 ? step.mask >> step.shift : step.mask << -step.shift;
    steps[step.from] |= shifted<-step.shift>(words[step.to]) & mask;
  }
  template <size_t... i>
  static __device__ void exchange_all(uint32_t* words, std::index_sequence<i...>) {
    (exchange<i>(words), ...);
  }
  template <size_t... i>
  static __device__ void exchange_all_back(uint32_t* words, std::index_sequence<i...>) {
    (exchange<sizeof...(i) - 1 - i>(words), ...);
  }
  template <size_t... i>
  static __device__ void move_all(const uint32_t* steps, uint32_t* words, std::index_sequence<i...>) {
    (move<i>(steps, words), ...);
  }
  template <size_t... i>
  static __device__ void move_all_back(const uint32_t* words, uint32_t* steps, std::index_sequence<i...>) {
    (move_back<i>(words, steps), ...);
  }

  /// words[0 … bits) from planes[0 … inputs), which are used up; planes behind the last one are zero.
  static __device__ void of_planes(uint32_t* planes, uint32_t* words) {
    exchange_all(planes, std::make_index_sequence<Moves::exchanges.size()>());
#pragma unroll
    for (int j = 0; j < bits; ++j) words[j] = Moves::direct ? planes[j] : 0;
    move_all(planes, words, std::make_index_sequence<Moves::moves.count>());
  }
  static __device__ void to_planes(const uint32_t* words, uint32_t* planes) {
#pragma unroll
    for (int j = 0; j < Moves::inputs; ++j) planes[j] = Moves::direct ? words[j] : 0;
    move_all_back(words, planes, std::make_index_sequence<Moves::moves.count>());
    exchange_all_back(planes, std::make_index_sequence<Moves::exchanges.size()>());
  }
};

/// kbit-fragment: lane 4·g + t loads word t of the four plane words whose byte t it needs, and the four lanes of g
/// transpose their bytes.
struct KbitFragmentStrip {
  using Map = KbitFragmentMap;

  static int64_t tiles(const Map& map) { return map.col_groups; }
  static int64_t row_groups(const Map& map) { return map.row_groups; }
  static __device__ int64_t first_slot(const Map& map, int64_t row, int64_t tile) {
    return map.tile(row, tile * Map::tile_cols) * Map::tile_scales;
  }
  static __device__ int2 scale_place(int i) { return make_int2(i / 2 % 4 * 16 + i % 2 * 8 + i / 16, i / 8 % 2); }

  /// Lane t of four gives word t and gets byte t of the four words. Its own inverse.
  static __device__ uint32_t transpose(uint32_t word, int lane) {
    constexpr unsigned all_lanes = 0xFFFFFFFFu;
    const uint32_t beside = __shfl_xor_sync(all_lanes, word, 1);
    const uint32_t halves = __byte_perm(word, beside, (lane & 1) != 0 ? 0x3715 : 0x6240);
    const uint32_t across = __shfl_xor_sync(all_lanes, halves, 2);
    return __byte_perm(halves, across, (lane & 2) != 0 ? 0x3276 : 0x5410);
  }
  /// Where plane 0 of the word that a lane moves for row tile 0 stands in shared memory.
  template <int bits>
  static __device__ int local(int lane) {
    const int block = lane / 2 % 2, half = lane % 2, g = lane / 4;
    return (8 * half + g) * row_stride<bits> + block * bits;
  }

  template <int bits>
  static __device__ void pack(const uint32_t* shared, uint32_t* packed, int lane) {
    uint32_t words[4 * bits];
#pragma unroll
    for (int r = 0; r < Map::row_tiles; ++r) {
      const uint32_t* const from = shared + local<bits>(lane) + 16 * r * row_stride<bits>;
      uint32_t planes[KbitFragmentMoves<bits>::inputs] = {};
#pragma unroll
      for (int plane = 0; plane < bits; ++plane) planes[plane] = transpose(from[plane], lane);
      FragmentWords<bits>::of_planes(planes, words + r * bits);
    }
#pragma unroll
    for (int j = 0; j < bits; ++j) {
      const uint32_t* const w = words + 4 * j;
      reinterpret_cast<uint4*>(packed)[j * Map::lanes + lane] = make_uint4(w[0], w[1], w[2], w[3]);
    }
  }
  template <int bits>
  static __device__ void unpack(const uint32_t* packed, uint32_t* shared, int lane) {
    uint32_t words[4 * bits];
#pragma unroll
    for (int j = 0; j < bits; ++j) {
      const uint4 four = __ldcs(reinterpret_cast<const uint4*>(packed) + j * Map::lanes + lane);
      words[4 * j] = four.x;
      words[4 * j + 1] = four.y;
      words[4 * j + 2] = four.z;
      words[4 * j + 3] = four.w;
    }
#pragma unroll
    for (int r = 0; r < Map::row_tiles; ++r) {
      uint32_t* const to = shared + local<bits>(lane) + 16 * r * row_stride<bits>;
      uint32_t planes[KbitFragmentMoves<bits>::inputs];
      FragmentWords<bits>::to_planes(words + r * bits, planes);
#pragma unroll
      for (int plane = 0; plane < bits; ++plane) to[plane] = transpose(planes[plane], lane);
    }
  }
};

/// A warp's share of the scales: four neighbours of the packed tile a lane.
template <class Layout, class Scale>
struct TileScales {
  using Four = Piece<Scale, 4>;

  static __device__ void pack(const Scale* shared, Scale* packed, int lane) {
    Four four;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int2 at = Layout::scale_place(4 * lane + j);
      four.values[j] = shared[at.x * strip_blocks + at.y];
    }
    reinterpret_cast<Four*>(packed)[lane] = four;
  }
  static __device__ void unpack(const Scale* packed, Scale* shared, int lane) {
    const Four four = reinterpret_cast<const Four*>(packed)[lane];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int2 at = Layout::scale_place(4 * lane + j);
      shared[at.x * strip_blocks + at.y] = four.values[j];
    }
  }
};

/// The canonical side of a strip, codes and scales. `width`: words and scales that are moved as one.
template <int bits, class Scale, int width>
struct CanonicalStrip {
  using Codes = CanonicalRows<uint32_t, bits, width, row_stride<bits>>;
  using Scales = CanonicalRows<Scale, 1, width, strip_blocks>;

  template <class Map>
  static __device__ void load(const StripPass<Map>& pass, const StripPlace& at, uint32_t* codes, Scale* scales) {
    Codes::load(at, pass.blocks, static_cast<const uint32_t*>(pass.from_codes), codes);
    if (pass.from_scales == nullptr) return;
    Scales::load(at, pass.blocks, static_cast<const Scale*>(pass.from_scales), scales);
  }
  template <class Map>
  static __device__ void store(const StripPass<Map>& pass, const StripPlace& at, const uint32_t* codes,
                               const Scale* scales) {
    const auto refuse = [&](unsigned long long* bad) {
      return [&pass, &at, bad](int row, int block) {
        const int64_t index = (at.row + row) * pass.padded_tiles * tile_blocks + at.tile * tile_blocks + block;
        atomicMin(bad, static_cast<unsigned long long>(index));
      };
    };
    Codes::store(at, pass.blocks, codes, static_cast<uint32_t*>(pass.to_codes), refuse(pass.bad_codes));
    Scales::store(at, pass.blocks, scales, static_cast<Scale*>(pass.to_scales), refuse(pass.bad_scales));
  }
};

template <class Layout, int bits, class Scale, Direction direction>
__global__ void __launch_bounds__(strip_threads, strip_residency) move_strips(StripPass<typename Layout::Map> pass) {
  __shared__ __align__(16) uint32_t codes[strip_rows * row_stride<bits>];
  __shared__ __align__(16) Scale scales[strip_rows * strip_blocks];
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const bool wide = pass.blocks % 4 == 0;
  const int64_t strips = (pass.padded_tiles + strip_tiles - 1) / strip_tiles;
  for (int64_t task = blockIdx.x; task < strips * pass.row_groups; task += gridDim.x) {
    const StripPlace at = place_of(pass, task, strips);
    const int64_t slot = Layout::first_slot(pass.map, at.row, at.tile + min(warp, at.tiles - 1));
    uint32_t* const tile_codes = codes + warp * tile_blocks * bits;
    Scale* const tile_scales = scales + warp * tile_blocks;
    if constexpr (direction == Direction::pack) {
      if (wide) {
        CanonicalStrip<bits, Scale, 4>::load(pass, at, codes, scales);
      } else {
        CanonicalStrip<bits, Scale, 1>::load(pass, at, codes, scales);
      }
      __syncthreads();
      if (warp < at.tiles) {
        Layout::template pack<bits>(tile_codes, static_cast<uint32_t*>(pass.to_codes) + slot * bits, lane);
        if (pass.to_scales != nullptr) {
          TileScales<Layout, Scale>::pack(tile_scales, static_cast<Scale*>(pass.to_scales) + slot, lane);
        }
      }
    } else {
      if (warp < at.tiles) {
        Layout::template unpack<bits>(static_cast<const uint32_t*>(pass.from_codes) + slot * bits, tile_codes, lane);
        TileScales<Layout, Scale>::unpack(static_cast<const Scale*>(pass.from_scales) + slot, tile_scales, lane);
      }
      __syncthreads();
      if (wide) {
        CanonicalStrip<bits, Scale, 4>::store(pass, at, codes, scales);
      } else {
        CanonicalStrip<bits, Scale, 1>::store(pass, at, codes, scales);
      }
    }
    __syncthreads();
  }
}

}  // namespace w4q::repack
