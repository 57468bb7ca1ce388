#include "repack/map_pass_cuda.h"

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "core/with_bits.h"
#include "device/buffer.h"
#include "device/check.h"
#include "device/copy.h"
#include "formats/kbit.h"
#include "formats/scheme_registry.h"
#include "repack/layout_registry.h"
#include "repack/map_pass.h"
#include "repack/strip_pass.cuh"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;

/// A queued pass: the layout is known by its strip type, the rest at run time.
template <class Layout>
class Pass {
 public:
  Pass(const Scheme& scheme, int64_t n, int64_t k, Direction direction, const device::Stream& stream)
      : map_(n, k), scheme_(scheme), n_(n), blocks_(formats::kbit_blocks(k)), direction_(direction), stream_(stream) {}

  void run(const DeviceBlocks& from, const DeviceBlocks& to, BadPadding* bad) const {
    const StripPass<Map> pass{.map = map_,
                              .n = n_,
                              .blocks = blocks_,
                              .padded_tiles = Layout::tiles(map_),
                              .row_groups = Layout::row_groups(map_),
                              .from_codes = from.codes,
                              .from_scales = from.scales,
                              .to_codes = to.codes,
                              .to_scales = to.scales,
                              .bad_codes = bad == nullptr ? nullptr : &bad->codes,
                              .bad_scales = bad == nullptr ? nullptr : &bad->scales};
    if (direction_ == Direction::pack) {
      launch<Direction::pack>(pass);
    } else {
      launch<Direction::unpack>(pass);
    }
  }

 private:
  using Map = typename Layout::Map;
  using Kernel = void (*)(StripPass<Map>);

  template <Direction direction, int bits>
  Kernel kernel_of_scale() const {
    return scheme_.scale == formats::ScaleType::e4m4 ? move_strips<Layout, bits, uint8_t, direction>
                                                     : move_strips<Layout, bits, uint16_t, direction>;
  }
  template <Direction direction>
  void launch(const StripPass<Map>& pass) const {
    constexpr int64_t most = (int64_t{1} << 31) - 1;
    const int64_t strips = (pass.padded_tiles + strip_tiles - 1) / strip_tiles;
    const auto grid = static_cast<unsigned>(std::min(strips * pass.row_groups, most));
    with_table_bits(scheme_.bits, [&]<int bits>() {
      kernel_of_scale<direction, bits>()<<<grid, strip_threads, 0, stream_.get()>>>(pass);
    });
    device::check_launch("move_strips", concat(to_string(scheme_), ", ", n_, " rows of ", blocks_, " blocks"));
  }

  Map map_;
  Scheme scheme_;
  int64_t n_;
  int64_t blocks_;
  Direction direction_;
  const device::Stream& stream_;
};

/// The one place that knows which layouts have a pass.
void move(std::string_view layout, const Scheme& scheme, int64_t n, int64_t k, Direction direction,
          const DeviceBlocks& from, const DeviceBlocks& to, BadPadding* bad, const device::Stream& stream) {
  if (layout == "kbit-tile") return Pass<KbitTileStrip>(scheme, n, k, direction, stream).run(from, to, bad);
  if (layout == "kbit-fragment") return Pass<KbitFragmentStrip>(scheme, n, k, direction, stream).run(from, to, bad);
  throw Error(ErrorCode::unsupported, concat("layout ", printable(layout), " has no pass on the GPU"));
}

void check_blocks(const DeviceBlocks& blocks, bool scales = true) {
  const auto misaligned = [](const void* pointer, int bytes) {
    return pointer == nullptr || reinterpret_cast<uintptr_t>(pointer) % bytes != 0;
  };
  if (misaligned(blocks.codes, 16) || (scales && misaligned(blocks.scales, 8))) {
    throw Error(ErrorCode::bad_argument, "repack on the GPU: a null or misaligned pointer")
        .detail("expected codes aligned to 16 bytes and scales to 8");
  }
}

/// Planes of one weight in GPU memory.
struct DevicePlanes {
  device::DeviceBuffer codes;
  device::DeviceBuffer scales;

  DevicePlanes(const device::Context& gpu, const PackedWeight& like)
      : codes(gpu, like.plane(PlaneRole::codes).bytes.size()),
        scales(gpu, like.plane(PlaneRole::scales).bytes.size()) {}
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
               const DeviceBlocks& packed, const device::Stream& stream) {
  formats::check_dimensions(n, k, "repack on the GPU");
  const bool scales = canonical.scales != nullptr || packed.scales != nullptr;
  check_blocks(canonical, scales);
  check_blocks(packed, scales);
  move(layout, scheme, n, k, Direction::pack, canonical, packed, nullptr, stream);
}

void unpack_cuda(std::string_view layout, const Scheme& scheme, int64_t n, int64_t k, const DeviceBlocks& packed,
                 const DeviceBlocks& canonical, BadPadding* bad, const device::Stream& stream) {
  formats::check_dimensions(n, k, "repack on the GPU");
  check_blocks(packed);
  check_blocks(canonical);
  device::fill(bad, 0xFF, sizeof *bad, stream, "clearing a counter");
  move(layout, scheme, n, k, Direction::unpack, packed, canonical, bad, stream);
}

PackedWeight pack_on_gpu(std::string_view layout, const PackedWeight& canonical, device::Context& gpu) {
  check_source(canonical, formats::canonical_layout, "pack");
  PackedWeight packed = allocate(canonical, layout);
  const device::Stream stream(gpu);
  DevicePlanes from(gpu, canonical);
  DevicePlanes to(gpu, packed);
  from.upload(canonical, stream);
  pack_cuda(layout, canonical.scheme, canonical.n, canonical.k, from.view(), to.view(), stream);
  to.download(packed, stream);
  stream.synchronize();
  return packed;
}

PackedWeight unpack_on_gpu(const PackedWeight& packed, std::string_view name, device::Context& gpu) {
  check_source(packed, packed.layout, name);
  PackedWeight canonical = allocate(packed, formats::canonical_layout);
  const device::Stream stream(gpu);
  DevicePlanes from(gpu, packed);
  DevicePlanes to(gpu, canonical);
  device::DeviceBuffer counters(gpu, sizeof(BadPadding));
  from.upload(packed, stream);
  unpack_cuda(packed.layout, packed.scheme, packed.n, packed.k, from.view(), to.view(), counters.as<BadPadding>(),
              stream);
  to.download(canonical, stream);
  BadPadding bad{};
  counters.download(std::as_writable_bytes(std::span(&bad, 1)), stream);
  stream.synchronize();
  // The CPU pass finds the place and says it in its own words.
  if (bad.codes != ~0ull || bad.scales != ~0ull) return layout_row(packed.layout).unpack(packed, name);
  return canonical;
}

}  // namespace w4q::repack
