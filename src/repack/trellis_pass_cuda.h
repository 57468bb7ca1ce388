// The passes of trellis-fragment on the GPU: canonical ↔ the layout, with the bytes of the CPU passes (class E0). Codes
// are read once and written once; scales stand alike in both.
#pragma once

#include <cstdint>
#include <string_view>

#include "device/stream.h"
#include "formats/packed.h"

namespace w4q::repack {

/// Queues canonical codes → trellis-fragment codes, padding zeroed; both aligned to 16 bytes, in GPU memory. Throws
/// bad_argument for null or misaligned pointers.
void pack_trellis_cuda(const formats::Scheme& scheme, int64_t n, int64_t k, const uint32_t* canonical, uint32_t* packed,
                       const device::Stream& stream);

/// LayoutRow::pack and unpack by way of a GPU, from and to host memory, with their checks and messages.
formats::PackedWeight pack_trellis_on_gpu(const formats::PackedWeight& canonical, device::Context& gpu);
formats::PackedWeight unpack_trellis_on_gpu(const formats::PackedWeight& packed, std::string_view name,
                                            device::Context& gpu);

}  // namespace w4q::repack
