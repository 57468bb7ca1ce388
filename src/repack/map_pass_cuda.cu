#include "repack/map_pass_cuda.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "device/buffer.h"
#include "device/check.h"
#include "device/launch.h"
#include "formats/kbit.h"
#include "formats/scheme_registry.h"
#include "repack/layout_kbit_tile.h"
#include "repack/layout_registry.h"
#include "repack/map_pass.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;

constexpr int pass_threads = 256;
constexpr int pass_residency = 3;  ///< thread blocks on an SM: leaves 80 registers a thread, none are spilled
constexpr int strip_tiles = 8;     ///< neighbouring tiles along k that a thread works on together

enum class Direction { pack, unpack };

template <class Piece>
struct PassArguments {
  const Piece* from;
  Piece* to;
  int64_t n;
  int64_t blocks;           ///< of a row, without padding
  unsigned long long* bad;  ///< unpack only
};

/// Moves one plane. A thread block takes strips of 8 tiles; in each, a thread owns the same piece of a row's run in all
/// 8 tiles: on the packed side neighbouring threads have neighbouring pieces, on the canonical side a thread's 8 pieces
/// are neighbours in a row, so that their sectors are shared through the L1 cache. `pieces` make a run, the tile_blocks
/// blocks of a row that stand together; whole_runs: canonical rows are whole runs, so a piece may lie across blocks.
template <class Map, class Piece, int pieces, bool whole_runs, Direction direction>
__global__ void __launch_bounds__(pass_threads, pass_residency) move_plane(Map map, PassArguments<Piece> a) {
  constexpr int tile_blocks = static_cast<int>(Map::tile_blocks);
  constexpr int tile_rows = static_cast<int>(Map::tile_rows);
  static_assert(whole_runs || pieces % tile_blocks == 0, "a piece lies in one block");
  const int64_t tiles = map.blocks() / tile_blocks;
  const int64_t strips = (tiles + strip_tiles - 1) / strip_tiles;
  const int64_t tasks = map.rows() / tile_rows * strips;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t first_tile = task % strips * strip_tiles;
    const int64_t first_row = task / strips * tile_rows;
    for (int unit = static_cast<int>(threadIdx.x); unit < tile_rows * pieces; unit += pass_threads) {
      const int64_t row = first_row + unit / pieces;
      const int piece = unit % pieces;
      const int within = whole_runs ? 0 : piece / (pieces / tile_blocks);
      Piece values[strip_tiles];
      bool exists[strip_tiles];
      int64_t canonical[strip_tiles];
      int64_t packed[strip_tiles];
#pragma unroll
      for (int i = 0; i < strip_tiles; ++i) {
        const int64_t block = (first_tile + i) * tile_blocks;
        exists[i] = row < a.n && block + within < a.blocks;
        canonical[i] = (row * a.blocks + block) * pieces / tile_blocks + piece;
        packed[i] = map.slot(row, block) * pieces / tile_blocks + piece;
        values[i] = 0;
        if (direction == Direction::pack && exists[i]) values[i] = a.from[canonical[i]];
        if (direction == Direction::unpack && first_tile + i < tiles) values[i] = __ldcs(a.from + packed[i]);
      }
#pragma unroll
      for (int i = 0; i < strip_tiles; ++i) {
        if (first_tile + i >= tiles) break;
        if (direction == Direction::pack) {
          a.to[packed[i]] = values[i];
        } else if (exists[i]) {
          a.to[canonical[i]] = values[i];
        } else if (values[i] != 0) {
          const int64_t block = (first_tile + i) * tile_blocks + within;
          atomicMin(a.bad, static_cast<unsigned long long>(row * map.blocks() + block));
        }
      }
    }
  }
}

template <int bytes>
struct PieceOf;
template <>
struct PieceOf<1> {
  using Type = uint8_t;
};
template <>
struct PieceOf<2> {
  using Type = uint16_t;
};
template <>
struct PieceOf<4> {
  using Type = uint32_t;
};
template <>
struct PieceOf<8> {
  using Type = unsigned long long;
};

/// What a pass works on.
template <class Map>
struct Pass {
  static constexpr int tile_blocks = static_cast<int>(Map::tile_blocks);

  Map map;
  int64_t n;
  int64_t blocks;
  Direction direction;
  cudaStream_t stream;

  template <class Piece, int pieces, bool whole_runs>
  void launch(const void* from, void* to, unsigned long long* bad) const {
    const PassArguments<Piece> arguments{static_cast<const Piece*>(from), static_cast<Piece*>(to), n, blocks, bad};
    const auto kernel = direction == Direction::pack ? move_plane<Map, Piece, pieces, whole_runs, Direction::pack>
                                                     : move_plane<Map, Piece, pieces, whole_runs, Direction::unpack>;
    const int64_t strips = (map.blocks() / tile_blocks + strip_tiles - 1) / strip_tiles;
    const int grid = device::resident_blocks(kernel, pass_threads, map.rows() / Map::tile_rows * strips);
    kernel<<<grid, pass_threads, 0, stream>>>(map, arguments);
    device::check_launch("move_plane", concat(n, " rows of ", blocks, " blocks"));
  }

  /// A plane of `block_bytes` a block: in pieces of up to 8 bytes where canonical rows are whole runs, otherwise in
  /// pieces that divide a block.
  template <int block_bytes>
  void plane(const void* from, void* to, unsigned long long* bad) const {
    constexpr int run_bytes = tile_blocks * block_bytes;
    constexpr int run_piece = run_bytes % 8 == 0 ? 8 : run_bytes % 4 == 0 ? 4 : run_bytes % 2 == 0 ? 2 : 1;
    constexpr int block_piece = block_bytes % 4 == 0 ? 4 : block_bytes;
    if (blocks % tile_blocks == 0) {
      launch<typename PieceOf<run_piece>::Type, run_bytes / run_piece, true>(from, to, bad);
    } else {
      launch<typename PieceOf<block_piece>::Type, run_bytes / block_piece, false>(from, to, bad);
    }
  }

  void codes(int bits, const void* from, void* to, unsigned long long* bad) const {
    switch (bits) {
      case 2:
        return plane<8>(from, to, bad);
      case 3:
        return plane<12>(from, to, bad);
      case 4:
        return plane<16>(from, to, bad);
      default:
        return plane<20>(from, to, bad);
    }
  }

  void scales(formats::ScaleType type, const void* from, void* to, unsigned long long* bad) const {
    return type == formats::ScaleType::e4m4 ? plane<1>(from, to, bad) : plane<2>(from, to, bad);
  }

  void run(const Scheme& scheme, const DeviceBlocks& from, const DeviceBlocks& to, BadPadding* bad) const {
    codes(scheme.bits, from.codes, to.codes, bad == nullptr ? nullptr : &bad->codes);
    scales(scheme.scale, from.scales, to.scales, bad == nullptr ? nullptr : &bad->scales);
  }
};

/// Calls body(map) with the map of a layout: the one place that knows which layouts move whole blocks.
template <class Body>
void with_map(std::string_view layout, int64_t n, int64_t k, const Body& body) {
  if (layout == "kbit-tile") return body(KbitTileMap(n, k));
  throw Error(ErrorCode::unsupported, concat("layout ", printable(layout), " has no pass on the GPU"));
}

void check_blocks(const DeviceBlocks& blocks) {
  const auto misaligned = [](const void* pointer, int bytes) {
    return pointer == nullptr || reinterpret_cast<uintptr_t>(pointer) % bytes != 0;
  };
  if (misaligned(blocks.codes, 8) || misaligned(blocks.scales, 4)) {
    throw Error(ErrorCode::bad_argument, "repack on the GPU: a null or misaligned pointer")
        .detail("expected codes aligned to 8 bytes and scales to 4");
  }
}

/// Planes of one weight in GPU memory.
struct DevicePlanes {
  device::DeviceBuffer codes;
  device::DeviceBuffer scales;

  explicit DevicePlanes(const PackedWeight& like)
      : codes(like.plane(PlaneRole::codes).bytes.size()), scales(like.plane(PlaneRole::scales).bytes.size()) {}
  DeviceBlocks view() { return {codes.as<uint32_t>(), scales.data()}; }
  void upload(const PackedWeight& weight, const device::Stream& stream) {
    codes.upload(weight.plane(PlaneRole::codes).bytes.bytes(), stream);
    scales.upload(weight.plane(PlaneRole::scales).bytes.bytes(), stream);
  }
  void download(PackedWeight& weight, const device::Stream& stream) const {
    codes.download(weight.plane(PlaneRole::codes).bytes.bytes(), stream);
    scales.download(weight.plane(PlaneRole::scales).bytes.bytes(), stream);
  }
};

/// A weight of the same scheme and size in `layout`: the codebook is there, codes and scales are still zero.
PackedWeight allocate(const PackedWeight& like, std::string_view layout) {
  const LayoutRow& row = layout_row(layout);
  PackedWeight weight =
      formats::allocate_planes(like.scheme, layout, like.n, like.k, row.planes(like.scheme, like.n, like.k));
  weight.plane(PlaneRole::codebook).bytes = like.plane(PlaneRole::codebook).bytes.clone();
  return weight;
}

void check_source(const PackedWeight& weight, std::string_view layout, std::string_view name) {
  check_layout(weight, layout, layout_row(layout).planes(weight.scheme, weight.n, weight.k), name);
}

}  // namespace

void pack_cuda(std::string_view layout, const Scheme& scheme, int64_t n, int64_t k, const DeviceBlocks& canonical,
               const DeviceBlocks& packed, cudaStream_t stream) {
  formats::check_dimensions(n, k, "repack on the GPU");
  check_blocks(canonical);
  check_blocks(packed);
  with_map(layout, n, k, [&]<class Map>(const Map& map) {
    Pass<Map>{map, n, formats::kbit_blocks(k), Direction::pack, stream}.run(scheme, canonical, packed, nullptr);
  });
}

void unpack_cuda(std::string_view layout, const Scheme& scheme, int64_t n, int64_t k, const DeviceBlocks& packed,
                 const DeviceBlocks& canonical, BadPadding* bad, cudaStream_t stream) {
  formats::check_dimensions(n, k, "repack on the GPU");
  check_blocks(packed);
  check_blocks(canonical);
  device::check(cudaMemsetAsync(bad, 0xFF, sizeof *bad, stream), "clearing a counter");
  with_map(layout, n, k, [&]<class Map>(const Map& map) {
    Pass<Map>{map, n, formats::kbit_blocks(k), Direction::unpack, stream}.run(scheme, packed, canonical, bad);
  });
}

PackedWeight pack_on_gpu(std::string_view layout, const PackedWeight& canonical) {
  check_source(canonical, formats::canonical_layout, "pack");
  PackedWeight packed = allocate(canonical, layout);
  const device::Stream stream;
  DevicePlanes from(canonical);
  DevicePlanes to(packed);
  from.upload(canonical, stream);
  pack_cuda(layout, canonical.scheme, canonical.n, canonical.k, from.view(), to.view(), stream.get());
  to.download(packed, stream);
  stream.synchronize();
  return packed;
}

PackedWeight unpack_on_gpu(const PackedWeight& packed, std::string_view name) {
  check_source(packed, packed.layout, name);
  PackedWeight canonical = allocate(packed, formats::canonical_layout);
  const device::Stream stream;
  DevicePlanes from(packed);
  DevicePlanes to(canonical);
  device::DeviceBuffer counters(sizeof(BadPadding));
  from.upload(packed, stream);
  unpack_cuda(packed.layout, packed.scheme, packed.n, packed.k, from.view(), to.view(), counters.as<BadPadding>(),
              stream.get());
  to.download(canonical, stream);
  BadPadding bad{};
  counters.download(std::as_writable_bytes(std::span(&bad, 1)), stream);
  stream.synchronize();
  // The CPU pass finds the place and says it in its own words.
  if (bad.codes != ~0ull || bad.scales != ~0ull) return layout_row(packed.layout).unpack(packed, name);
  return canonical;
}

}  // namespace w4q::repack
