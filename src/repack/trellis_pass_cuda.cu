#include "repack/trellis_pass_cuda.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "core/with_bits.h"
#include "device/alignment.h"
#include "device/buffer.h"
#include "device/check.h"
#include "device/copy.h"
#include "formats/trellis.h"
#include "repack/layout_registry.h"
#include "repack/layout_trellis_fragment.h"
#include "repack/map_pass.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using Map = TrellisFragmentMap;

constexpr std::string_view layout_name = "trellis-fragment";
constexpr int threads = 128;  ///< a tile's squares: four times 32 rows × 32 pairs of columns

/// The square of a thread, and where it stands. Rings of columns from k on do not exist.
template <int bits>
struct Place {
  TrellisSquare<bits> square{};
  int64_t tile, ring, column;
  int lane, word;

  __device__ Place(const Map& map, int64_t k, int64_t tile_) : tile(tile_) {
    const int rows = static_cast<int>(threadIdx.x) / 32, pair = static_cast<int>(threadIdx.x) % 32;
    column = tile % map.col_groups * Map::tile_cols + 2 * pair;
    ring = (tile / map.col_groups * k + column) * (4 * bits) + bits * rows;
    lane = 8 * rows + pair / 8;
    word = bits * (pair % 8);
  }
  /// Calls use(word of the tile in the plane, the square's word) for the words of its lanes.
  template <class Words, class Use>
  __device__ void for_lanes(Words* words, const Use& use) {
    Words* const from = words + tile * Map::tile_words(bits);
#pragma unroll
    for (int w = 0; w < bits; ++w) {
      use(from[Map::word_at(lane, word + w)], square.even[w]);
      use(from[Map::word_at(lane + 4, word + w)], square.odd[w]);
    }
  }
  template <class Words, class Use, class Missing>
  __device__ void for_rings(Words* rings, int64_t k, const Use& use, const Missing& missing) {
#pragma unroll
    for (int w = 0; w < bits; ++w) {
      column < k ? use(rings[ring + w], square.first[w]) : missing(square.first[w]);
      column + 1 < k ? use(rings[ring + 4 * bits + w], square.second[w]) : missing(square.second[w]);
    }
  }
};

template <int bits>
__global__ void __launch_bounds__(threads) pack_tiles(Map map, int64_t k, const uint32_t* rings, uint32_t* words) {
  for (int64_t tile = blockIdx.x; tile < map.tiles(); tile += gridDim.x) {
    Place<bits> place(map, k, tile);
    place.for_rings(
        rings, k, [](const uint32_t& from, uint32_t& to) { to = __ldcs(&from); }, [](uint32_t&) {});
    place.square.to_lanes();
    place.for_lanes(words, [](uint32_t& to, uint32_t from) { to = from; });
  }
}

template <int bits>
__global__ void __launch_bounds__(threads)
    unpack_tiles(Map map, int64_t k, const uint32_t* words, uint32_t* rings, uint32_t* stray) {
  for (int64_t tile = blockIdx.x; tile < map.tiles(); tile += gridDim.x) {
    Place<bits> place(map, k, tile);
    place.for_lanes(words, [](const uint32_t& from, uint32_t& to) { to = __ldcs(&from); });
    place.square.to_rings();
    uint32_t found = 0;
    place.for_rings(
        rings, k, [](uint32_t& to, uint32_t from) { to = from; }, [&](uint32_t from) { found |= from; });
    if (found != 0) atomicOr(stray, 1u);
  }
}

unsigned grid_of(const Map& map) { return static_cast<unsigned>(std::min<int64_t>(map.tiles(), 1 << 20)); }

/// Planes in `layout`, of which scales and codebook are there.
PackedWeight allocate(const PackedWeight& like, std::string_view layout) {
  PackedWeight weight = formats::allocate_planes(like.scheme, layout, like.n, like.k,
                                                 layout_row(layout).planes(like.scheme, like.n, like.k));
  for (const PlaneRole role : {PlaneRole::scales, PlaneRole::codebook}) {
    weight.plane(role).bytes = like.plane(role).bytes.clone();
  }
  return weight;
}

}  // namespace

void pack_trellis_cuda(const formats::Scheme& scheme, int64_t n, int64_t k, const uint32_t* canonical, uint32_t* packed,
                       const device::Stream& stream) {
  if (canonical == nullptr || packed == nullptr || !device::aligned(canonical, 16) || !device::aligned(packed, 16)) {
    throw Error(ErrorCode::bad_argument, "repack on the GPU: a null or misaligned pointer")
        .detail("expected codes aligned to 16 bytes");
  }
  const Map map(n, k);
  with_bits<2, 3, 4>(scheme.bits, [&]<int bits>() {
    pack_tiles<bits><<<grid_of(map), threads, 0, stream.get()>>>(map, k, canonical, packed);
  });
  device::check_launch("pack_trellis", concat(to_string(scheme), ", ", n, " × ", k));
}

PackedWeight pack_trellis_on_gpu(const PackedWeight& canonical, device::Context& gpu) {
  check_layout(canonical, formats::canonical_layout,
               layout_row(formats::canonical_layout).planes(canonical.scheme, canonical.n, canonical.k), "pack");
  PackedWeight packed = allocate(canonical, layout_name);
  const device::Stream stream(gpu);
  const auto from = device::DeviceBuffer::copy_of(canonical.plane(PlaneRole::codes).bytes.bytes(), stream);
  auto& words = packed.plane(PlaneRole::codes).bytes;
  device::DeviceBuffer to(gpu, words.size());
  pack_trellis_cuda(canonical.scheme, canonical.n, canonical.k, from.as<uint32_t>(), to.as<uint32_t>(), stream);
  to.download(words.bytes(), stream);
  stream.synchronize();
  return packed;
}

PackedWeight unpack_trellis_on_gpu(const PackedWeight& packed, std::string_view name, device::Context& gpu) {
  check_layout(packed, layout_name, layout_row(layout_name).planes(packed.scheme, packed.n, packed.k), name);
  PackedWeight canonical = allocate(packed, formats::canonical_layout);
  const device::Stream stream(gpu);
  const auto from = device::DeviceBuffer::copy_of(packed.plane(PlaneRole::codes).bytes.bytes(), stream);
  auto& rings = canonical.plane(PlaneRole::codes).bytes;
  device::DeviceBuffer to(gpu, rings.size()), stray(gpu, sizeof(uint32_t));
  stray.fill(0, stream);
  const Map map(packed.n, packed.k);
  with_bits<2, 3, 4>(packed.scheme.bits, [&]<int bits>() {
    unpack_tiles<bits><<<grid_of(map), threads, 0, stream.get()>>>(map, packed.k, from.as<uint32_t>(),
                                                                   to.as<uint32_t>(), stray.as<uint32_t>());
  });
  device::check_launch("unpack_trellis", concat(to_string(packed.scheme), ", ", packed.n, " × ", packed.k));
  to.download(rings.bytes(), stream);
  uint32_t found = 0;
  stray.download(std::as_writable_bytes(std::span(&found, 1)), stream);
  stream.synchronize();
  // The CPU pass finds the place and says it in its own words.
  if (found != 0) return layout_row(layout_name).unpack(packed, name);
  return canonical;
}

}  // namespace w4q::repack
