// y = x · Wᵀ + b on the GPU for kbit weights in the kbit-fragment layout, 1 to 64 activation rows, one launch.
//
// Exact mode: each weight enters the product as the 16-bit rounding of codebook[code] · scale, in the type of the
// activations; products and sums are fp32 on tensor cores. Against the fp64 product of the decoded weights the relative
// Frobenius error is below 1e-3 for f16 and 5e-3 for bf16 (two roundings to 11 and 8 bits, docs/kernels/kbit.md).
// Results are bit-identical from run to run: partial sums of a split row group are added in block order.
//
// Bytes read: n·k·(bits + 1/4)/8 for E4M4 scales, which at the card's read bandwidth is the time below which it cannot
// go.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "formats/scheme.h"

namespace w4q::kernels {

/// Weights in GPU memory. `codes` and `scales` are aligned to 16 bytes.
struct KbitDeviceWeight {
  formats::Scheme scheme;
  int64_t n = 0;
  int64_t k = 0;
  const uint32_t* codes = nullptr;  ///< [ceil(n/64)][ceil(k/64)][bits][32][4]
  const void* scales = nullptr;     ///< [ceil(n/64)][ceil(k/64)][16][8], E4M4 bytes or f16
  const float* codebook = nullptr;  ///< [2^bits]
  float table_max = 1;              ///< largest magnitude of the codebook
  float scale_max = 31;             ///< an upper bound of the scales: keeps f16 products in range
};

struct KbitLinearArgs {
  int64_t m = 0;                  ///< activation rows, 1 … kbit_linear_max_rows
  DType activation = DType::f16;  ///< type of x: f16 or bf16
  const void* x = nullptr;        ///< [m, k], rows `ldx` elements apart
  int64_t ldx = 0;
  KbitDeviceWeight weight;
  const float* bias = nullptr;  ///< [n], or null
  void* y = nullptr;            ///< [m, n] of the activations' type, rows `ldy` elements apart
  int64_t ldy = 0;
  void* workspace = nullptr;  ///< kbit_linear_workspace() bytes, aligned to 16, zeroed once before its first use
  size_t workspace_bytes = 0;
  /// Weights, codebook and bias were complete before the previous launch in the stream began: on sm_90 their first
  /// bytes are then fetched while that launch still runs. x and y are not touched before it is done.
  bool weights_ready = false;
};

inline constexpr int64_t kbit_linear_max_rows = 64;

/// Bytes of workspace for up to `m` rows of an n × k weight on the current GPU.
size_t kbit_linear_workspace(int64_t m, int64_t n, int64_t k);

/// Launches on `stream`. Throws bad_argument, before any launch, for sizes, types, null or misaligned pointers or a
/// workspace that do not fit; device when the launch fails.
void kbit_linear(const KbitLinearArgs& args, cudaStream_t stream);

}  // namespace w4q::kernels
