#include "kernels/kbit_linear.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "kernels/kbit_launch.cuh"

namespace w4q::kernels {
namespace {

int multiprocessors() {
  int device = 0;
  int count = 0;
  device::check(cudaGetDevice(&device), "asking for the GPU");
  device::check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "asking for the GPU's size");
  return count;
}

/// One block a multiprocessor, and no block without a tile for each of a few warps.
int blocks_for(int64_t tiles) {
  static const int most = multiprocessors();
  return static_cast<int>(std::clamp<int64_t>(tiles / 4, 1, most));
}

constexpr int64_t most_gemv_rows = 16;

void require(bool condition, const std::string& what, std::string_view hint) {
  if (!condition) throw Error(ErrorCode::bad_argument, "kbit_linear: " + what).hint(hint);
}

bool aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

void check_args(const KbitLinearArgs& args) {
  const auto& w = args.weight;
  require(args.m >= 1 && args.m <= kbit_linear_max_rows, concat(args.m, " activation rows"),
          "1 to 64; use the dispatch for more");
  require(args.activation == DType::f16 || args.activation == DType::bf16, "activations are neither f16 nor bf16",
          "convert them");
  require(w.scheme.family == formats::SchemeFamily::kbit && w.scheme.block == 32 && w.scheme.bits >= 2 &&
              w.scheme.bits <= 5,
          "scheme " + formats::to_string(w.scheme) + " is not kbit", "kbit2 to kbit5 with blocks of 32");
  constexpr int64_t most = int64_t{1} << 30;
  require(w.n >= 1 && w.k >= 1 && w.n <= most && w.k <= most, concat("weight of ", w.n, " × ", w.k), "1 to 2^30 each");
  require(args.ldx >= w.k && args.ldy >= w.n,
          concat("row strides ", args.ldx, " and ", args.ldy, " are shorter than the rows"),
          "in elements, at least k and n");
  require(args.x != nullptr && args.y != nullptr && w.codes != nullptr && w.scales != nullptr && w.codebook != nullptr,
          "a null pointer", "x, y, codes, scales and codebook are needed");
  require(aligned(w.codes, 16) && aligned(w.scales, 16) && aligned(args.x, 2) && aligned(args.y, 2),
          "a misaligned pointer", "codes and scales to 16 bytes, x and y to their elements");
  const size_t needed = kbit_linear_workspace(args.m, w.n, w.k);
  require(args.workspace != nullptr && aligned(args.workspace, 16) && args.workspace_bytes >= needed,
          concat("workspace of ", args.workspace_bytes, " bytes"),
          concat("kbit_linear_workspace asks for ", needed, ", aligned to 16"));
  require(std::isfinite(w.table_max) && w.table_max > 0 && std::isfinite(w.scale_max) && w.scale_max > 0,
          "table_max or scale_max is not a positive number", "the largest magnitudes of codebook and scales");
}

/// Powers of two that keep table entries inside the 16-bit type; where the kernel scales weights (from 17 rows on),
/// their products with the scales too.
void set_factors(const KbitLinearArgs& args, kbit::Launch& launch) {
  const auto& w = args.weight;
  const bool half = args.activation == DType::f16;
  const bool e4m4 = w.scheme.scale == formats::ScaleType::e4m4;
  const int table_top = std::ilogb(w.table_max);
  if (args.m <= most_gemv_rows) {
    const int entry_top = half ? 10 : 0;
    launch.table_exponent = entry_top - table_top;
    launch.result_factor =
        std::ldexp(e4m4 ? kbit::E4m4Scales::sum_factor : kbit::F16Scales::sum_factor, table_top - entry_top);
    return;
  }
  // What the kernel reads as a scale is the scale times this (kbit_linear_tile.cuh).
  const int scale_exponent = e4m4 ? (half ? -4 : -116) : 0;
  const int scale_top = std::ilogb(w.scale_max);
  // f16 products stay below 2^15: table entries take what the largest scale leaves.
  const int product_top = half ? 14 : 0;
  const int entry_top = std::min(half ? 14 : 120, product_top - (scale_top + 1 + scale_exponent));
  launch.table_exponent = entry_top - table_top;
  launch.result_factor = std::ldexp(1.0f, table_top - entry_top - scale_exponent);
}

}  // namespace

size_t kbit_linear_workspace(int64_t m, int64_t n, int64_t k) {
  const kbit::Map map(n, k);
  const int packets = m <= most_gemv_rows ? kbit::gemv_packets() : kbit::gemm_packets(m);
  return static_cast<size_t>(blocks_for(map.tiles())) * static_cast<size_t>(packets) * sizeof(kbit::Packet);
}

void kbit_linear(const KbitLinearArgs& args, cudaStream_t stream) {
  check_args(args);
  const auto& w = args.weight;
  const kbit::Map map(w.n, w.k);
  kbit::Launch launch{};
  launch.m = static_cast<int>(args.m);
  launch.n = w.n;
  launch.k = w.k;
  launch.ldx = args.ldx;
  launch.ldy = args.ldy;
  launch.row_groups = static_cast<int>(map.row_groups);
  launch.col_groups = static_cast<int>(map.col_groups);
  launch.tiles = static_cast<int>(map.tiles());
  launch.x = args.x;
  launch.codes = w.codes;
  launch.scales = w.scales;
  launch.codebook = w.codebook;
  launch.bias = args.bias;
  launch.y = args.y;
  launch.packets = static_cast<kbit::Packet*>(args.workspace);
  launch.aligned = aligned(args.x, 16) && args.ldx % 8 == 0;
  launch.overlap = args.weights_ready;
  set_factors(args, launch);

  int blocks = blocks_for(map.tiles());
  if (args.m > most_gemv_rows) blocks = kbit::gemm_blocks(launch, blocks);
  const std::string shape = concat(w.n, " × ", w.k, ", ", args.m, " rows, ", formats::to_string(w.scheme));
  const auto start = args.m <= most_gemv_rows ? kbit::launch_gemv : kbit::launch_gemm;
  start(launch, w.scheme, args.activation, blocks, stream, shape);
}

}  // namespace w4q::kernels
