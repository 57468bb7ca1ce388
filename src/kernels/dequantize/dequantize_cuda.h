// Decodes packed kbit weights to f32, f16 or bf16 rows in GPU memory. f32 equals formats::SchemeRow::decode_row bit for
// bit; f16 and bf16 are one rounding of it (class E1). Lane pictures and floors: docs/cuda-passes.md.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/dtype.h"
#include "device/stream.h"
#include "formats/scheme.h"

namespace w4q::kernels {

/// A packed weight in GPU memory: the planes of layout `canonical`, `kbit-tile` or `kbit-fragment`. Codes are aligned
/// to 4 bytes, f16 scales to 2; those of kbit-fragment to 16 both.
struct PackedDeviceWeight {
  formats::Scheme scheme;
  std::string_view layout;
  int64_t n = 0;
  int64_t k = 0;
  const uint32_t* codes = nullptr;
  const void* scales = nullptr;
  const float* codebook = nullptr;  ///< 2^bits values
};

/// Where rows go: `data` is aligned to its elements, `stride` >= k elements from row to row. Rows that start on 16
/// bytes are the fast case. Elements behind k in a row are left alone.
struct DeviceRows {
  void* data = nullptr;
  DType dtype = DType::f16;  ///< f32, f16 or bf16
  int64_t stride = 0;
};

/// Queues the decoding of all n rows. Reads bits/8 + 1/32 (E4M4) or 1/16 (f16 scales) bytes and writes one element per
/// weight. Throws bad_argument for null or misaligned pointers, unsupported for another layout, scheme or type, before
/// anything is launched.
void dequantize_cuda(const PackedDeviceWeight& weight, const DeviceRows& out, const device::Stream& stream);

}  // namespace w4q::kernels
