#include "kernels/kbit_linear.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "device/cublas.h"
#include "kernels/kbit_launch.cuh"
#include "kernels/kbit_wide.h"

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
constexpr int64_t most_rows = int64_t{1} << 30;
constexpr int64_t most_tiles = int64_t{1} << 30;

void require(bool condition, const std::string& what, std::string_view hint) {
  if (!condition) throw Error(ErrorCode::bad_argument, "kbit_linear: " + what).hint(hint);
}

bool aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

void check_args(const KbitLinearArgs& args) {
  const auto& w = args.weight;
  require(args.m >= 1 && args.m <= most_rows, concat(args.m, " activation rows"), "1 to 2^30");
  require(args.activation == DType::f16 || args.activation == DType::bf16, "activations are neither f16 nor bf16",
          "convert them");
  require(w.scheme.family == formats::SchemeFamily::kbit && w.scheme.block == 32 && w.scheme.bits >= 2 &&
              w.scheme.bits <= 5,
          "scheme " + formats::to_string(w.scheme) + " is not kbit", "kbit2 to kbit5 with blocks of 32");
  require(w.n >= 1 && w.k >= 1 && w.n <= most_rows && w.k <= most_rows && kbit::Map(w.n, w.k).tiles() <= most_tiles,
          concat("weight of ", w.n, " × ", w.k), "1 to 2^30 each, together at most 2^42");
  require(args.ldx >= w.k && args.ldy >= w.n,
          concat("row strides ", args.ldx, " and ", args.ldy, " are shorter than the rows"),
          "in elements, at least k and n");
  require(args.x != nullptr && args.y != nullptr && w.codes != nullptr && w.scales != nullptr && w.codebook != nullptr,
          "a null pointer", "x, y, codes, scales and codebook are needed");
  require(aligned(w.codes, 16) && aligned(w.scales, 16) && aligned(args.x, 2) && aligned(args.y, 2),
          "a misaligned pointer", "codes and scales to 16 bytes, x and y to their elements");
  const size_t needed = kbit_linear_workspace(args.m, w.n, w.k);
  require(args.workspace != nullptr && aligned(args.workspace, 256) && args.workspace_bytes >= needed,
          concat("workspace of ", args.workspace_bytes, " bytes"),
          concat("kbit_linear_workspace asks for ", needed, ", aligned to 256"));
  require(std::isfinite(w.table_max) && w.table_max > 0 && std::isfinite(w.scale_max) && w.scale_max > 0,
          "table_max or scale_max is not a positive number", "the largest magnitudes of codebook and scales");
}

/// Where sums are scaled: table entries inside the 16-bit type, small levels included.
void set_sum_factors(const KbitLinearArgs& args, kbit::Launch& launch) {
  const bool e4m4 = args.weight.scheme.scale == formats::ScaleType::e4m4;
  const int table_top = std::ilogb(args.weight.table_max);
  const int entry_top = args.activation == DType::f16 ? 10 : 0;
  launch.table_exponent = entry_top - table_top;
  launch.result_factor =
      std::ldexp(e4m4 ? kbit::E4m4Scales::sum_factor : kbit::F16Scales::sum_factor, table_top - entry_top);
}

/// Where weights are scaled: powers of two that keep table entries and their products with the scales inside the 16-bit
/// type.
void set_weight_factors(const KbitLinearArgs& args, kbit::Launch& launch) {
  const auto& w = args.weight;
  const bool half = args.activation == DType::f16;
  // What the kernel reads as a scale is the scale times this (kbit_linear_tile.cuh).
  const int scale_exponent = w.scheme.scale == formats::ScaleType::e4m4 ? (half ? -4 : -116) : 0;
  const int table_top = std::ilogb(w.table_max);
  const int scale_top = std::ilogb(w.scale_max);
  // f16 products stay below 2^15: table entries take what the largest scale leaves.
  const int product_top = half ? 14 : 0;
  const int entry_top = std::min(half ? 14 : 120, product_top - (scale_top + 1 + scale_exponent));
  launch.table_exponent = entry_top - table_top;
  launch.result_factor = std::ldexp(1.0f, table_top - entry_top - scale_exponent);
}

/// What all kernels need to know of a layer.
kbit::Launch prepare(const KbitLinearArgs& args) {
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
  return launch;
}

std::string shape_of(const KbitLinearArgs& args) {
  return concat(args.weight.n, " × ", args.weight.k, ", ", args.m, " rows, ", formats::to_string(args.weight.scheme));
}

void run_gemv(const KbitLinearArgs& args, cudaStream_t stream) {
  kbit::Launch launch = prepare(args);
  set_sum_factors(args, launch);
  kbit::launch_gemv(launch, args.weight.scheme, args.activation, blocks_for(launch.tiles), stream, shape_of(args));
}

/// Up to kbit_linear_max_rows rows at a time.
void run_gemm(KbitLinearArgs args, cudaStream_t stream) {
  const auto* x = static_cast<const std::byte*>(args.x);
  auto* const y = static_cast<std::byte*>(args.y);
  const int64_t rows = args.m;
  for (int64_t first = 0; first < rows; first += kbit_linear_max_rows) {
    args.m = std::min(kbit_linear_max_rows, rows - first);
    args.x = x + 2 * first * args.ldx;
    args.y = y + 2 * first * args.ldy;
    kbit::Launch launch = prepare(args);
    set_weight_factors(args, launch);
    const int blocks = kbit::gemm_blocks(launch, blocks_for(launch.tiles));
    kbit::launch_gemm(launch, args.weight.scheme, args.activation, blocks, stream, shape_of(args));
  }
}

void run_reference(const KbitLinearArgs& args, cudaStream_t stream) {
  kbit::Launch launch = prepare(args);
  launch.result_factor = 1;
  kbit::launch_reference(launch, args.weight.scheme, args.activation, stream, shape_of(args));
}

bool accepts(const LinearDesc& desc, std::string_view layout, int64_t least, int64_t most, std::string* why) {
  const bool fits = desc.layout == layout && desc.m >= least && desc.m <= most;
  if (!fits && why != nullptr) {
    *why = concat("reads ", layout, " with ", least, " to ", most, " activation rows");
  }
  return fits;
}

/// Most rows for the GEMM. Beyond, decoding once and cuBLAS are faster, where there is cuBLAS (docs/kernels/kbit.md).
/// Loading that takes a while: it is not asked for as long as one launch takes all rows.
int64_t most_gemm_rows(const LinearDesc& desc) {
  if (desc.m <= kbit_linear_max_rows) return kbit_linear_max_rows;
  return device::have_cublas() ? 128 : most_rows - 1;
}
bool gemm_accepts(const LinearDesc& desc, std::string* why) {
  return accepts(desc, "kbit-fragment", most_gemv_rows + 1, most_gemm_rows(desc), why);
}
bool wide_accepts(const LinearDesc& desc, std::string* why) {
  return accepts(desc, "kbit-fragment", most_gemm_rows(desc) + 1, most_rows, why);
}

size_t gemv_workspace(const LinearDesc& desc) {
  return static_cast<size_t>(blocks_for(kbit::Map(desc.n, desc.k).tiles()) * kbit::gemv_packets()) *
         sizeof(kbit::Packet);
}
size_t gemm_workspace(const LinearDesc& desc) {
  return static_cast<size_t>(blocks_for(kbit::Map(desc.n, desc.k).tiles()) *
                             kbit::gemm_packets(std::min(desc.m, kbit_linear_max_rows))) *
         sizeof(kbit::Packet);
}

constexpr KernelRow rows[] = {
    {.name = "kbit-gemv",
     .description = "1 to 16 rows, memory-bound: every warp streams a run of tiles, scales multiply the sums",
     .accepts = [](const LinearDesc& d,
                   std::string* why) { return accepts(d, "kbit-fragment", 1, most_gemv_rows, why); },
     .workspace = gemv_workspace,
     .run = run_gemv},
    {.name = "kbit-gemm",
     .description = "17 to 128 rows, 64 at a time: activations in shared memory, scales multiply the weights",
     .accepts = gemm_accepts,
     .workspace = gemm_workspace,
     .run = [](const KbitLinearArgs& args, cudaStream_t stream) { run_gemm(args, stream); }},
    {.name = "kbit-wide",
     .description = "more than 128 rows: weights decoded once, a strip at a time, and multiplied by cuBLAS",
     .accepts = wide_accepts,
     .workspace = kbit::wide_workspace,
     .run = kbit::run_wide},
    {.name = "kbit-reference",
     .description = "1 to 64 rows of kbit-tile: bit-planes and a shuffle per weight, the yardstick of the others",
     .accepts = [](const LinearDesc& d,
                   std::string* why) { return accepts(d, "kbit-tile", 1, kbit_linear_max_rows, why); },
     .workspace = [](const LinearDesc&) { return size_t{0}; },
     .run = run_reference},
};

}  // namespace

LinearDesc describe(const KbitLinearArgs& args) {
  return {args.weight.scheme, args.weight.layout, args.m, args.weight.n, args.weight.k, args.activation};
}

std::span<const KernelRow> kernel_registry() noexcept { return rows; }

const KernelRow& pick_kernel(const LinearDesc& desc) {
  Error error(ErrorCode::unsupported, concat("no kernel for ", formats::to_string(desc.scheme), " in layout ",
                                             desc.layout, " and ", desc.m, " activation rows"));
  for (const KernelRow& row : rows) {
    std::string why;
    if (row.accepts(desc, &why)) return row;
    error.detail(concat(row.name, " ", why));
  }
  throw error.hint("`w4q repack --target` chooses a layout that has kernels");
}

size_t kbit_linear_workspace(int64_t m, int64_t n, int64_t k) {
  size_t most = 256;
  for (const int64_t rows_at_most : {std::min(m, most_gemv_rows), std::min(m, kbit_linear_max_rows), m}) {
    const LinearDesc desc{{}, "kbit-fragment", rows_at_most, n, k};
    most = std::max(most, pick_kernel(desc).workspace(desc));
  }
  return most;
}

void kbit_linear(const KbitLinearArgs& args, cudaStream_t stream) {
  check_args(args);
  pick_kernel(describe(args)).run(args, stream);
}

}  // namespace w4q::kernels
