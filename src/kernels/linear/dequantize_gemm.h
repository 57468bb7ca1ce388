// Products of many activation rows by cuBLAS: of 16-bit weights, and of others that are decoded to 16 bits a panel of
// outputs at a time. Needs device::have_cublas().
#pragma once

#include <functional>

#include "device/stream.h"
#include "kernels/dequantize/dequantize_cuda.h"
#include "kernels/linear/kernel_row.h"

namespace w4q::kernels {

/// Brings outputs `first` … `first` + `count` − 1 of a weight to the rows of `out`; `first` is a multiple of 64.
using DecodePanel = std::function<void(int64_t first, int64_t count, const DeviceRows& out)>;

/// Decoded weights of 32 MB are still in the L2 cache when they are multiplied; of more, a product takes less time for
/// each and finds more of a GPU busy.
inline constexpr int64_t cached_panel_bytes = int64_t{32} << 20;
/// Bytes for a panel of at most `panel_bytes`, and for cuBLAS.
size_t panel_memory_bytes(int64_t n, int64_t k, int64_t panel_bytes = cached_panel_bytes);
WorkspaceSizes dequantize_gemm_workspace(const LinearDesc& desc);
/// Computes the layer `args`, whose weight `decode` knows, in `memory` of panel_memory_bytes() for the same
/// `panel_bytes`, aligned to 256. Weights
/// enter as 16-bit roundings of their decoded values; a bias is added to the result, to a 16-bit one with a rounding of
/// its own.
void dequantize_gemm(const LinearArgs& args, void* memory, const DecodePanel& decode, const device::Stream& stream,
                     int64_t panel_bytes = cached_panel_bytes);

/// The same of a pass in f16_rows, in memory of device::cublas_workspace_bytes.
void dense_gemm(const LinearArgs& args, void* memory, const device::Stream& stream);

}  // namespace w4q::kernels
