#include "repack/turn_rows_cuda.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "core/with_bits.h"
#include "device/check.h"
#include "device/element_grid.h"
#include "formats/integer.h"
#include "formats/rotated.h"
#include "repack/layout_float_fragment.h"
#include "repack/layout_interleaved.h"
#include "repack/layout_marlin.h"
#include "repack/layout_rotated_fragment.h"

namespace w4q::repack {
namespace {

using formats::PlaneRole;
using formats::Scheme;

using device::element_threads;

/// Launches `kernel` with a thread for each of `count` things, or a few of them.
template <class Kernel, class... Args>
void launch(Kernel kernel, int64_t count, const device::Stream& stream, Args... args) {
  constexpr int64_t most_blocks = 1 << 20;
  const auto blocks = static_cast<unsigned>(std::min((count + element_threads - 1) / element_threads, most_blocks));
  kernel<<<blocks, element_threads, 0, stream.get()>>>(args...);
  device::check_launch("turn_rows", concat(count, " threads"));
}

__device__ int64_t first_thread() { return int64_t{blockIdx.x} * element_threads + threadIdx.x; }
__device__ int64_t all_threads() { return int64_t{gridDim.x} * element_threads; }

/// A warp takes a tile. Tile t of the weights becomes the tiles t + t div `across` · across and the one `across` behind.
template <class Lane>
__global__ void __launch_bounds__(element_threads)
    turn_tiles(const uint4* first, const uint4* second, uint4* both, int64_t tiles, int64_t across) {
  constexpr int tile_quads = 32 * Lane::quads;
  for (int64_t i = first_thread(); i < 32 * tiles; i += all_threads()) {
    const int64_t tile = i / 32, low_tile = tile + tile / across * across;
    const int lane = static_cast<int>(i % 32);
    uint32_t from[2][4 * Lane::quads], to[2][4 * Lane::quads];
#pragma unroll
    for (int j = 0; j < Lane::quads; ++j) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const uint4 quad = __ldcs((side == 0 ? first : second) + tile * tile_quads + Lane::quad(j, lane));
        from[side][4 * j] = quad.x, from[side][4 * j + 1] = quad.y;
        from[side][4 * j + 2] = quad.z, from[side][4 * j + 3] = quad.w;
      }
    }
    turn_lane<Lane>(from[0], from[1], to[0], to[1]);
#pragma unroll
    for (int j = 0; j < Lane::quads; ++j) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const uint32_t* const w = to[side] + 4 * j;
        both[(low_tile + side * across) * tile_quads + Lane::quad(j, lane)] = make_uint4(w[0], w[1], w[2], w[3]);
      }
    }
  }
}

/// interleaved: 16 bytes of each row and block of inputs.
__global__ void __launch_bounds__(element_threads)
    turn_blocks(const uint4* first, const uint4* second, uint4* both, int64_t rows, int64_t blocks) {
  for (int64_t i = first_thread(); i < rows * blocks; i += all_threads()) {
    const int64_t row = i % rows, block = i / rows;
    both[i] = (turned_to_second(row) ? second : first)[block * (rows / 2) + turned_from(row)];
  }
}

/// Scales, whose places the layouts say: at(row, group).
template <class T, class Place>
__global__ void __launch_bounds__(element_threads)
    turn_scales(const T* first, const T* second, T* both, Place from, Place to, int64_t rows, int64_t groups) {
  for (int64_t i = first_thread(); i < rows * groups; i += all_threads()) {
    const int64_t row = i % rows, group = i / rows;
    both[to.at(row, group)] = (turned_to_second(row) ? second : first)[from.at(turned_from(row), group)];
  }
}

/// Zero points of 64 rows and a group a thread: their words are theirs alone.
template <class Map>
__global__ void __launch_bounds__(element_threads)
    turn_zeros(const uint32_t* first, const uint32_t* second, uint32_t* both, Map from, Map to, int64_t rows,
               int64_t groups, int bits) {
  const int64_t row_groups = rows / 64;
  for (int64_t i = first_thread(); i < row_groups * groups; i += all_threads()) {
    const int64_t begin = i % row_groups * 64, group = i / row_groups;
    const int64_t first_word = (group * rows + begin) * bits / 32;
    for (int w = 0; w < 2 * bits; ++w) both[first_word + w] = 0;
    for (int64_t row = begin; row < begin + 64; ++row) {
      const uint32_t* const source = turned_to_second(row) ? second : first;
      for (int bit = 0; bit < bits; ++bit) {
        const BitAt in = from.zero_bit(turned_from(row), group, bit), out = to.zero_bit(row, group, bit);
        both[out.word] |= (source[in.word] >> in.bit & 1u) << out.bit;
      }
    }
  }
}

struct FragmentScale {
  KbitFragmentMap map;
  __device__ int64_t at(int64_t row, int64_t block) const { return map.scale(row, 32 * block); }
};
struct FloatScale {
  FloatFragmentMap map;
  int block;
  __device__ int64_t at(int64_t row, int64_t group) const { return map.block_scale(block, row, block * group); }
};
struct NormPlace {
  int64_t groups;
  __device__ int64_t at(int64_t row, int64_t group) const { return norm_place(row, group, groups); }
};
template <class Map>
struct IntegerScale {
  Map map;
  __device__ int64_t at(int64_t row, int64_t group) const { return map.scale(row, group); }
};

/// A launch: what is turned, and where.
struct Turn {
  const Scheme& scheme;
  PlaneRole role;
  int64_t n, k;
  const TurnedPlanes& planes;
  const device::Stream& stream;

  template <class Lane>
  void tiles(int64_t count, int64_t across) const {
    launch(turn_tiles<Lane>, 32 * count, stream, static_cast<const uint4*>(planes.first),
           static_cast<const uint4*>(planes.second), static_cast<uint4*>(planes.both), count, across);
  }
  template <class T, class Place>
  void scales_of(const Place& from, const Place& to, int64_t groups) const {
    launch(turn_scales<T, Place>, 2 * n * groups, stream, static_cast<const T*>(planes.first),
           static_cast<const T*>(planes.second), static_cast<T*>(planes.both), from, to, 2 * n, groups);
  }
  template <class Place>
  void scales(const Place& from, const Place& to, int64_t groups) const {
    switch (scheme.scale) {
      case formats::ScaleType::e4m4:
        return scales_of<uint8_t>(from, to, groups);
      case formats::ScaleType::f32:
        return scales_of<uint32_t>(from, to, groups);
      default:
        return scales_of<uint16_t>(from, to, groups);
    }
  }
  void fragment_codes() const {
    const KbitFragmentMap map(n, k);
    with_table_bits(scheme.bits, [&]<int bits>() { tiles<FragmentLane<bits>>(map.tiles(), map.col_groups); });
  }
  template <class Map>
  void integer_scales(const Map& from, const Map& to) const {
    const int64_t groups = formats::integer_groups(scheme, k);
    if (role == PlaneRole::scales) return scales(IntegerScale<Map>{from}, IntegerScale<Map>{to}, groups);
    launch(turn_zeros<Map>, n / 32 * groups, stream, static_cast<const uint32_t*>(planes.first),
           static_cast<const uint32_t*>(planes.second), static_cast<uint32_t*>(planes.both), from, to, 2 * n, groups,
           scheme.bits);
  }

  void kbit_fragment() const {
    if (role == PlaneRole::codes) return fragment_codes();
    scales(FragmentScale{{n, k}}, FragmentScale{{2 * n, k}}, k / 32);
  }
  /// Scales of blocks of 16 or 32: others have no places.
  void float_fragment() const {
    const KbitFragmentMap map(n, k);
    if (role == PlaneRole::codes) {
      return scheme.bits == 4 ? tiles<FragmentLane<4>>(map.tiles(), map.col_groups)
                              : tiles<FragmentLane<8>>(map.tiles(), map.col_groups);
    }
    ensure(scheme.block == 16 || scheme.block == 32, "turn_rows: scales that stand as in the canonical layout");
    scales_of<uint8_t>(FloatScale{{n, k}, scheme.block}, FloatScale{{2 * n, k}, scheme.block}, k / scheme.block);
  }
  void rotated_fragment() const {
    if (role == PlaneRole::codes) return fragment_codes();
    const int64_t groups = formats::rotated_groups(scheme, k);
    scales(NormPlace{groups}, NormPlace{groups}, groups);
  }
  void marlin() const {
    const int64_t count = n / MarlinMap::tile_rows * (k / MarlinMap::tile_cols);
    if (role != PlaneRole::codes) return integer_scales(map_of<MarlinMap>(n), map_of<MarlinMap>(2 * n));
    return scheme.bits == 4 ? tiles<MarlinLane<4>>(count, 1) : tiles<MarlinLane<8>>(count, 1);
  }
  void interleaved() const {
    if (role != PlaneRole::codes) return integer_scales(map_of<InterleavedMap>(n), map_of<InterleavedMap>(2 * n));
    launch(turn_blocks, 2 * n * (k / 32), stream, static_cast<const uint4*>(planes.first),
           static_cast<const uint4*>(planes.second), static_cast<uint4*>(planes.both), 2 * n, k / 32);
  }

 private:
  template <class Map>
  Map map_of(int64_t rows) const {
    return Map(scheme.bits, rows, k, formats::integer_groups(scheme, k));
  }
};

void check(const Turn& turn) {
  if (turn.n % 64 == 0 && turn.k % 64 == 0 && turn.n > 0 && turn.k > 0) return;
  throw Error(ErrorCode::bad_argument, concat("rows of ", turn.n, " × ", turn.k, " cannot take turns as they stand"))
      .detail("expected multiples of 64");
}

}  // namespace

void turn_rows_cuda(std::string_view layout, const Scheme& scheme, PlaneRole role, int64_t n, int64_t k,
                    const TurnedPlanes& planes, const device::Stream& stream) {
  const Turn turn{scheme, role, n, k, planes, stream};
  check(turn);
  if (layout == "kbit-fragment") return turn.kbit_fragment();
  if (layout == "float-fragment") return turn.float_fragment();
  if (layout == "rotated-fragment") return turn.rotated_fragment();
  if (layout == "marlin") return turn.marlin();
  if (layout == "interleaved") return turn.interleaved();
  throw Error(ErrorCode::unsupported, concat("rows in layout ", printable(layout), " cannot take turns as they stand"));
}

}  // namespace w4q::repack
