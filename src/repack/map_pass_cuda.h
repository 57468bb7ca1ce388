// The passes of kbit-tile and kbit-fragment on the GPU: canonical ↔ the layout, with the bytes of the CPU passes (class
// E0). A weight's codes and scales are read once and written once, padding included; one launch.
#pragma once

#include <cstdint>
#include <string_view>

#include "device/stream.h"
#include "formats/packed.h"

namespace w4q::repack {

/// The planes of one weight in GPU memory, in some layout. Codes are aligned to 16 bytes, scales to 8. Codes go alone
/// where both sides of pack_cuda have no scales, whatever weights of blocks in bit planes they are of.
struct DeviceBlocks {
  uint32_t* codes = nullptr;
  void* scales = nullptr;
};

/// Queues canonical → `layout`: all blocks, padding zeroed. Throws bad_argument for null or misaligned pointers and
/// unsupported for a layout that has no pass on the GPU, before anything is launched.
void pack_cuda(std::string_view layout, const formats::Scheme& scheme, int64_t n, int64_t k,
               const DeviceBlocks& canonical, const DeviceBlocks& packed, const device::Stream& stream);

/// Padding that is not zero: the first such block in the codes and in the scales, as row · padded blocks + block; all
/// ones when there is none. In GPU memory; unpack_cuda sets it before it looks.
struct BadPadding {
  unsigned long long codes;
  unsigned long long scales;
};

/// Queues `layout` → canonical, and the check of the padding.
void unpack_cuda(std::string_view layout, const formats::Scheme& scheme, int64_t n, int64_t k,
                 const DeviceBlocks& packed, const DeviceBlocks& canonical, BadPadding* bad,
                 const device::Stream& stream);

/// LayoutRow::pack and unpack by way of a GPU, from and to host memory, with their checks and messages; the weight's
/// planes must fit in GPU memory twice.
formats::PackedWeight pack_on_gpu(std::string_view layout, const formats::PackedWeight& canonical,
                                  device::Context& gpu);
formats::PackedWeight unpack_on_gpu(const formats::PackedWeight& packed, std::string_view name, device::Context& gpu);

}  // namespace w4q::repack
