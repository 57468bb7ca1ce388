#include "repack/kbit_rows.h"
#include "repack/layout_kbit_tile.h"
#include "repack/map_pass.h"
#include "repack/rows.h"
#ifdef W4Q_HAVE_CUDA
#include "repack/map_pass_cuda.h"
#endif

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::PlaneSpec;
using formats::Scheme;

constexpr std::string_view layout_name = "kbit-tile";

std::vector<PlaneSpec> planes(const Scheme& scheme, int64_t n, int64_t k) {
  std::vector<PlaneSpec> specs = canonical_planes(scheme, n, k);
  const KbitTileMap map(n, k);
  for (PlaneSpec& spec : specs) {
    if (spec.role == PlaneRole::codebook) continue;
    spec.shape = {map.block_tiles, map.row_tiles, KbitTileMap::tile_rows, KbitTileMap::tile_blocks};
    if (spec.role == PlaneRole::codes) spec.shape.push_back(scheme.bits);
  }
  return specs;
}

constexpr KbitLayout kbit_tile{layout_name, planes};

PackedWeight pack(const PackedWeight& canonical) {
  return pack_kbit(kbit_tile, canonical, [](const PackedWeight& from, PackedWeight& to) {
    pack_blocks(KbitTileMap(from.n, from.k), from, to);
  });
}

PackedWeight unpack(const PackedWeight& packed, std::string_view name) {
  return unpack_kbit(kbit_tile, packed, name, [name](const PackedWeight& from, PackedWeight& to) {
    unpack_blocks(KbitTileMap(from.n, from.k), from, name, to);
  });
}

LayoutRow::BitPlace place(const Scheme& scheme, int64_t n, int64_t k, int64_t row, int64_t col, int bit) {
  const int64_t slot = KbitTileMap(n, k).slot(row, col / KbitTileMap::block);
  return {slot * scheme.bits + bit, static_cast<int>(col % KbitTileMap::block), slot};
}

#ifdef W4Q_HAVE_CUDA
PackedWeight pack_gpu(const PackedWeight& canonical, device::Context& gpu) {
  return pack_on_gpu(layout_name, canonical, gpu);
}
constexpr auto unpack_gpu = unpack_on_gpu;
#else
constexpr decltype(LayoutRow::pack_cuda) pack_gpu = nullptr;
constexpr decltype(LayoutRow::unpack_cuda) unpack_gpu = nullptr;
#endif

}  // namespace

LayoutRow kbit_tile_row() {
  return {
      .name = layout_name,
      .description = "tiles of 128 outputs × 64 inputs as bitsandbytes' kbit kernels read them, zero-padded",
      .reason =
          "exchanges weights with bitsandbytes byte for byte; whole blocks stay together, any kernel can decode them",
      .sms = {80, 89, 90},
      .accepts = accepts_kbit,
      .planes = planes,
      .pack = pack,
      .unpack = unpack,
      .place = place,
      .pack_cuda = pack_gpu,
      .unpack_cuda = unpack_gpu};
}

}  // namespace w4q::repack
