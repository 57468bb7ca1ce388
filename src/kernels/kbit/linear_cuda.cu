#include <algorithm>
#include <cmath>

#include "device/cublas.h"
#include "kernels/common/grid.h"
#include "kernels/common/table_stretch.h"
#include "kernels/frame/grouped.cuh"
#include "kernels/kbit/launch.cuh"
#include "kernels/linear/dequantize_gemm.h"
#include "kernels/linear/rows.h"

namespace w4q::kernels {
namespace kbit {
namespace {

/// A stretch is for f16.
float factor_of_table(const DevicePass& pass, DType activation, float stretch, int entry_top) {
  return table_factor(pass.table_max, activation == DType::f16 ? stretch : 1.0f, entry_top);
}

/// Where sums are scaled: table entries inside the 16-bit type, small levels included.
void set_sum_factors(const LinearArgs& args, frame::Launch& launch) {
  const bool e4m4 = args.pass().scheme.scale == formats::ScaleType::e4m4;
  launch.table_factor =
      factor_of_table(args.pass(), args.activation, args.pass().table_stretch, args.activation == DType::f16 ? 10 : 0);
  launch.result_factor = (e4m4 ? kbit::E4m4Scales::sum_factor : kbit::F16Scales::sum_factor) / launch.table_factor;
}

/// Whether a launch suits the compact kernel: no warp has a whole N-tile, and all of x can be read 16 bytes at a time.
bool is_compact(const frame::Launch& launch, int blocks) {
  const int warps = blocks * kbit::compact_warps, most = (launch.tiles + warps - 1) / warps;
  const int group = launch.k_tiles * launch.routes.sums;
  return launch.aligned && launch.k % 64 == 0 && most < group;
}

/// What is_compact() will say of a product of one row, whose x can be read 16 bytes at a time.
bool leaves_tail(const LinearDesc& desc) {
  frame::Launch launch{};
  const frame::Map map(desc.n(), desc.k());
  launch.k = desc.k();
  launch.k_tiles = static_cast<int>(map.col_groups);
  launch.tiles = static_cast<int>(map.tiles());
  launch.aligned = true;
  launch.routes.sums = 1;
  return desc.m == 1 && is_compact(launch, blocks_for(desc.gpu, launch.tiles));
}

/// The least units that give every warp one at most; single tiles where none does, or k does not end with a unit.
int unit_shift_of(const frame::Launch& launch, int blocks) {
  for (int shift = 0; shift <= kbit::most_unit_shift && launch.k_tiles % (1 << shift) == 0; ++shift) {
    if (launch.tiles >> shift <= blocks * kbit::compact_warps) return shift;
  }
  return 0;
}

/// Where every warp has a unit at most and the launch behind begins meanwhile, no more blocks than that takes. A sixteenth
/// of the multiprocessors is left at most: without more of them at work, bytes take longer.
int compact_blocks(int units, int most, bool overlap) {
  if (!overlap || units > most * kbit::compact_warps) return most;
  return std::max(fewest_blocks(units, kbit::compact_warps, most), most - most / 16);
}

void launch_compact(frame::RoutedLaunch launch, const LinearArgs& args, int most, const device::Stream& stream) {
  const int shift = unit_shift_of(launch, most), sums = launch.routes.sums;
  const int blocks = compact_blocks(launch.tiles >> shift, most, launch.overlap);
  launch.cut = {.unit_shift = shift,
                .units = frame::Partition(launch.tiles >> shift, blocks),
                .k_tiles = Divider(static_cast<uint32_t>(launch.k_tiles)),
                .output_tiles = Divider(static_cast<uint32_t>(launch.k_tiles * sums)),
                .inner = Divider(static_cast<uint32_t>(std::max(frame::inner_of(launch.routes), 1)))};
  kbit::launch_compact_gemv(launch, args.pass().scheme, blocks, stream, args.shape);
}

void run_gemv(const LinearArgs& args, const device::Stream& stream) {
  frame::Launch launch = prepare(args);
  set_sum_factors(args, launch);
  if (takes_fused_kernel(args)) {
    const int blocks = blocks_for(stream, launch.tiles);
    if (!args.beside_routed || !is_compact(launch, blocks)) {
      ensure(args.fusion.tail.weight == nullptr, "kbit: a product that leaves no tail");
      return kbit::launch_fused_gemv(launch, args.pass().scheme, blocks, stream, args.shape);
    }
    return launch_compact(frame::RoutedLaunch{launch, {}, {}}, args, blocks, stream);
  }
  const auto launch_it = args.activation == DType::f16 ? kbit::launch_gemv : kbit::launch_bf16_gemv;
  launch_it(launch, args.pass().scheme, blocks_for(stream, launch.tiles), stream, args.shape);
}

void run_routed(const LinearArgs& args, const RoutedArgs& routed, const device::Stream& stream) {
  frame::RoutedLaunch launch{prepare(args), routed.choice, routed.next};
  set_sum_factors(args, launch);
  launch.routes = routed.routes;
  launch.tiles *= routed.routes.sums;
  const int blocks = blocks_for(stream, launch.tiles);
  if (is_compact(launch, blocks)) return launch_compact(launch, args, blocks, stream);
  kbit::launch_routed_gemv(launch, args.pass().scheme, blocks, stream, args.shape);
}

/// Up to most_launch_rows rows at a time.
void run_gemm(const LinearArgs& args, const device::Stream& stream) {
  in_slices(args, most_launch_rows, [&](const LinearArgs& part) {
    frame::Launch launch = prepare(part);
    set_weight_factors(part.pass(), part.activation, launch);
    const int blocks = frame::gemm_blocks(launch, blocks_for(stream, launch.tiles));
    kbit::launch_gemm(launch, part.pass().scheme, part.activation, blocks, stream, part.shape);
  });
}

void run_grouped(const LinearArgs& args, const GroupedArgs& grouped, const device::Stream& stream) {
  frame::GroupedLaunch launch{prepare(args), grouped.groups, grouped.count, grouped.most_rows};
  set_weight_factors(args.pass(), args.activation, launch);
  kbit::launch_grouped_gemm(launch, args.pass().scheme, stream, args.shape);
}

/// Outputs `first` … first + count − 1 as 16-bit rows.
void decode_panel(const DevicePass& w, int64_t first, int64_t count, const DeviceRows& out,
                  const device::Stream& stream) {
  const int64_t scale_bytes = w.scheme.scale == formats::ScaleType::e4m4 ? 1 : 2;
  const int64_t tile = frame::Map(w.n, w.k).tile(first, 0);
  PackedDeviceWeight part;
  part.scheme = w.scheme;
  part.layout = w.layout;
  part.n = count;
  part.k = w.k;
  part.codes = w.codes + tile * frame::Map::tile_words(w.scheme.bits);
  part.scales = static_cast<const std::byte*>(w.scales) + tile * frame::Map::tile_scales * scale_bytes;
  part.codebook = w.codebook;
  dequantize_cuda(part, out, stream);
}

void run_dequantize_gemm(const LinearArgs& args, const device::Stream& stream) {
  const auto decode = [&](int64_t first, int64_t count, const DeviceRows& out) {
    decode_panel(args.pass(), first, count, out, stream);
  };
  dequantize_gemm(args, args.workspace.scratch, decode, stream);
}

void run_reference(const LinearArgs& args, const device::Stream& stream) {
  in_slices(args, most_launch_rows, [&](const LinearArgs& part) {
    kbit::launch_reference(prepare(part), part.pass().scheme, part.activation, stream, part.shape);
  });
}

bool gemm_accepts(const LinearDesc& desc, std::string* why) {
  return accepts_rows(desc, "kbit-fragment", most_gemv_rows + 1, most_gemm_rows(desc), why);
}
bool wide_accepts(const LinearDesc& desc, std::string* why) {
  return accepts_rows(desc, "kbit-fragment", most_gemm_rows(desc) + 1, most_rows, why);
}

constexpr KernelRow rows[] = {
    {.name = "kbit-gemv",
     .description = "1 to 16 rows, memory-bound: every warp streams a run of tiles, scales multiply the sums",
     .accepts = [](const LinearDesc& d,
                   std::string* why) { return accepts_rows(d, "kbit-fragment", 1, most_gemv_rows, why); },
     .workspace = gemv_workspace,
     .check = check_kbit_pass,
     .run = run_gemv,
     .run_routed = run_routed,
     .leaves_tail = leaves_tail,
     .fuses = true},
    {.name = "kbit-gemm",
     .description = "17 to 128 rows, 64 at a time: activations in shared memory, scales multiply the weights",
     .accepts = gemm_accepts,
     .workspace = gemm_workspace,
     .check = check_kbit_pass,
     .run = run_gemm,
     .run_grouped = run_grouped,
     .swiglu = GateOrder::turns},
    {.name = "kbit-wide",
     .description = "more than 128 rows: weights decoded once, a strip at a time, and multiplied by cuBLAS",
     .accepts = wide_accepts,
     .workspace = dequantize_gemm_workspace,
     .check = check_kbit_pass,
     .run = run_dequantize_gemm},
    {.name = "kbit-reference",
     .description = "any number of rows of kbit-tile, 64 at a time: bit-planes and a shuffle per weight, the yardstick "
                    "of the others",
     .accepts = [](const LinearDesc& d, std::string* why) { return accepts_rows(d, "kbit-tile", 1, most_rows, why); },
     .workspace = [](const LinearDesc&) { return WorkspaceSizes{}; },
     .check = check_kbit_pass,
     .run = run_reference},
};

}  // namespace
}  // namespace kbit

void set_weight_factors(const DevicePass& pass, DType activation, frame::Launch& launch) {
  const bool half = activation == DType::f16;
  // What the kernel reads as a scale is the scale times this (tile.cuh).
  const bool e4m4 = pass.scheme.scale == formats::ScaleType::e4m4;
  const int scale_exponent = e4m4 ? (half ? -4 : -116) : 0;
  const int scale_top = std::ilogb(pass.scale_max);
  // f16 products stay below 2^15: table entries take what the largest scale leaves.
  const int product_top = half ? 14 : 0;
  const int entry_top = std::min(half ? 14 : 120, product_top - (scale_top + 1 + scale_exponent));
  launch.table_factor =
      kbit::factor_of_table(pass, activation, e4m4 ? pass.product_stretch : pass.table_stretch, entry_top);
  launch.result_factor = std::ldexp(1.0f, -scale_exponent) / launch.table_factor;
}

std::span<const KernelRow> kbit_rows() noexcept { return kbit::rows; }

void check_kbit_pass(const DevicePass& w) {
  require(
      w.scheme.family == formats::SchemeFamily::kbit && w.scheme.block == 32 && w.scheme.bits >= 2 &&
          w.scheme.bits <= 5,
      [&] { return concat("scheme ", formats::to_string(w.scheme), " is not kbit"); },
      "kbit2 to kbit5 with blocks of 32");
  require(w.scales != nullptr && w.codebook != nullptr, "a null pointer", "scales and a codebook are needed");
  require(std::isfinite(w.table_max) && w.table_max > 0, "table_max is not a positive number",
          "the largest magnitude of the codebook");
  require(w.table_stretch >= 1 && w.table_stretch < 2, "table_stretch is not from 1 to 2", "what table_stretch() says");
  require(w.product_stretch >= 1 && w.product_stretch < 2, "product_stretch is not from 1 to 2",
          "what product_stretch() says");
}

}  // namespace w4q::kernels
