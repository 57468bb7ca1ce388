// Many activation rows: weights decoded to 16 bits a strip of outputs at a time and multiplied by cuBLAS. Needs
// device::have_cublas().
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "device/cublas.h"
#include "repack/layout_kbit_fragment.h"

namespace w4q::kernels {

/// Elements from row to row of a strip: rows begin on 16 bytes.
inline int64_t strip_stride(int64_t k) { return (k + 7) / 8 * 8; }

/// Outputs of a strip, whole row groups: decoded weights of 32 MB are still in the L2 cache when they are multiplied.
inline int64_t strip_outputs(int64_t n, int64_t k) {
  constexpr int64_t group = repack::KbitFragmentMap::tile_rows;
  const int64_t fitting = (int64_t{32} << 20) / 2 / strip_stride(k) / group * group;
  return std::min(std::max(fitting, group), (n + group - 1) / group * group);
}

/// cuBLAS' memory and a strip.
inline size_t strip_memory_bytes(int64_t n, int64_t k) {
  return device::cublas_workspace_bytes + static_cast<size_t>(strip_outputs(n, k) * strip_stride(k)) * 2;
}

/// Computes `product`, whose weight and workspace are left open: decode(first, count, strip, stride) brings outputs
/// first … first + count − 1 to rows of the strip. `memory` has strip_memory_bytes(), aligned to 256.
template <class Decode>
void multiply_strips(device::CublasProduct product, void* memory, const Decode& decode, cudaStream_t stream) {
  const int64_t n = product.n, outputs = strip_outputs(n, product.k);
  auto* const y = static_cast<std::byte*>(product.y);
  std::byte* const strip = static_cast<std::byte*>(memory) + device::cublas_workspace_bytes;
  product.w = strip;
  product.ldw = strip_stride(product.k);
  product.workspace = memory;
  for (int64_t first = 0; first < n; first += outputs) {
    product.n = std::min(outputs, n - first);
    product.y = y + first * (product.fp32_output ? 4 : 2);
    decode(first, product.n, strip, product.ldw);
    device::cublas_multiply(product, stream);
  }
}

}  // namespace w4q::kernels
