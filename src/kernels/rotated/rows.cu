// The rows of the table of linear kernels for rotated weights, f16 activations (docs/rotated.md).
//
// One launch takes two passes that fit together, with a norm where kbit has the scale of a block, and rotates the input
// itself: at one row every warp what it multiplies, at more all blocks together (share.cuh). 1 to 16 rows: a GEMV; from
// 9 on, on an sm_90, warpgroup products; 17 to 128 rows elsewhere: a GEMM. More rows: the passes, two that share a
// rotation as their sum, decoded to 16 bits, and cuBLAS.
//
// Bytes that one pass reads: n·k·bits/8 of codes and 2·n·k/d of norms, 4.125 bits a weight at 4 bits and d = 128.
#include <algorithm>
#include <cmath>

#include "device/cublas.h"
#include "kernels/kbit/launch.cuh"
#include "kernels/linear/dequantize_gemm.h"
#include "kernels/linear/rows.h"
#include "kernels/rotated/dequantize_sum.h"
#include "kernels/rotated/input.cuh"
#include "kernels/rotated/passes.h"
#include "kernels/rotated/rotate_input.h"
#include "kernels/rotated/wgmma.h"
#include "kernels/wgmma/linear.h"
#include "kernels/wgmma/plan.h"

namespace w4q::kernels {
namespace rotated {
namespace {

/// From so many rows on two passes that share a rotation are decoded into one weight for cuBLAS (dequantize_sum.h),
/// later where warpgroup products are to be had.
constexpr int64_t least_sum_rows = 128, least_sum_rows_beside_warpgroups = 257;
/// From so many rows on warpgroup products are faster than the GEMV.
constexpr int64_t least_warpgroup_rows = 9;
/// As kbit's, measured.
constexpr int64_t most_warpgroup_rows = 1024;

bool is_pair(const LinearDesc& desc) { return desc.passes.size() > 1; }

// -- which row takes what

bool accepts_passes(const LinearDesc& desc, int64_t least, int64_t most, std::string* why) {
  const auto is_rotated = [](const DevicePass& pass) { return pass.layout == "rotated-fragment"; };
  if (!std::ranges::all_of(desc.passes, is_rotated) || desc.m < least || desc.m > most) {
    if (why == nullptr) return false;  // planning asks every row at many numbers of rows
    return because(why, concat("reads rotated-fragment with ", least, " to ", most, " activation rows"));
  }
  if (desc.activation != DType::f16 || desc.int8_activations) return because(why, "multiplies activations of f16");
  return !is_pair(desc) || rotated::fit_together(desc.pass(), desc.passes.back()) ||
         because(why, "takes two passes of widths, blocks and tables that fit together");
}

bool all_resident(const LinearDesc& desc) {
  return !is_pair(desc) || std::ranges::all_of(desc.passes, &DevicePass::resident);
}

/// Of the kernels of more rows.
bool rows_fit(const LinearDesc& desc) {
  return !is_pair(desc) || (all_resident(desc) && rotated::rows_fit_together(desc.pass(), desc.passes.back()) &&
                            (rotate_alike(desc.passes) || rotates_inside(desc)));
}

bool have_warpgroups(const LinearDesc& desc) {
  const int64_t rows = std::max(desc.m, most_gemv_rows + 1);
  return wgmma::refusal(desc.gpu, desc.k()).empty() && rows <= wgmma::most_rows_here(rows, most_warpgroup_rows);
}

bool accepts_gemv(const LinearDesc& desc, std::string* why) {
  return accepts_passes(desc, 1, most_gemv_rows, why) && (all_resident(desc) || because(why, "takes resident passes"));
}

bool accepts_gemm(const LinearDesc& desc, std::string* why) {
  if (!accepts_passes(desc, most_gemv_rows + 1, most_gemm_rows(desc), why)) return false;
  return rows_fit(desc) || because(why, "takes two passes of one width that rotate alike");
}

bool accepts_wgmma(const LinearDesc& desc, std::string* why) {
  if (!have_warpgroups(desc)) return because(why, "needs an sm_90, a build for it, and no more rows than pay");
  if (!accepts_passes(desc, least_warpgroup_rows, most_rows, why)) return false;
  return rows_fit(desc) || because(why, "takes two passes of one width that rotate alike");
}

/// One pass where no other kernel takes so many rows; two that share a rotation.
bool accepts_wide(const LinearDesc& desc, std::string* why) {
  if (!accepts_passes(desc, least_sum_rows, most_rows, why)) return false;
  const bool warpgroups = have_warpgroups(desc);
  const bool wide = !is_pair(desc) ? !warpgroups && desc.m > most_gemm_rows(desc)
                                   : rotate_alike(desc.passes) && desc.pass().resident &&
                                         (desc.m >= least_sum_rows_beside_warpgroups || !warpgroups ||
                                          !rotated::rows_fit_together(desc.pass(), desc.passes.back()));
  return (wide && device::have_cublas()) || because(why, "decodes for cuBLAS where others take fewer rows");
}

// -- inputs

int64_t padded_inputs(int64_t k) { return (k + 63) / 64 * 64; }
/// Bytes of a rotated input, whole tiles of rows.
size_t input_bytes(int64_t m, int64_t k) {
  const int tile = wgmma::tile_rows(m);
  return device::round_up_256(static_cast<size_t>((m + tile - 1) / tile * tile * padded_inputs(k)) * 2);
}

/// Semaphores of the frame and one of the blocks that rotate together; the scratch begins with up to two inputs.
WorkspaceSizes with_inputs(size_t semaphores, const LinearDesc& desc) {
  return {device::round_up_256(semaphores) + spare_semaphore_bytes, 2 * input_bytes(desc.m, desc.k())};
}
WorkspaceSizes workspace_of_gemv(const LinearDesc& desc) { return with_inputs(gemv_workspace(desc).semaphores, desc); }
WorkspaceSizes workspace_of_gemm(const LinearDesc& desc) { return with_inputs(gemm_workspace(desc).semaphores, desc); }
WorkspaceSizes workspace_of_wgmma(const LinearDesc& desc) {
  return with_inputs(wgmma::exchange_bytes(desc.gpu.multiprocessors), desc);
}
WorkspaceSizes workspace_of_wide(const LinearDesc& desc) {
  return {0, input_bytes(desc.m, desc.k()) + panel_memory_bytes(desc.n(), desc.k())};
}

std::byte* scratch_of(const LinearArgs& args) { return static_cast<std::byte*>(args.workspace.scratch); }

void set_rotated_input(const LinearArgs& args, const float* factors) {
  if (args.rotated_input != nullptr) *args.rotated_input = factors;
}

void rotate(const LinearArgs& args, const device::Stream& stream) {
  const DevicePass& first = args.pass();
  RotateInputArgs rotation{.m = args.m,
                           .k = first.k,
                           .block = first.rotation.block,
                           .activation = args.activation,
                           .x = args.x,
                           .ldx = args.ldx,
                           .factors = first.rotation.factors,
                           .input_scale = args.input_scale,
                           .y = scratch_of(args),
                           .ldy = padded_inputs(first.k)};
  const bool alike = rotate_alike(args.passes);
  if (!alike) {
    rotation.second_factors = args.passes.back().rotation.factors;
    rotation.second_y = scratch_of(args) + input_bytes(args.m, first.k);
  }
  rotation.overlap = args.weights_ready;
  rotate_input(rotation, stream);
  set_rotated_input(args, alike ? first.rotation.factors : nullptr);
}

/// The same product of the rotated input.
LinearArgs with_rotated_input(LinearArgs args, const device::Stream& stream) {
  if (args.input_rotated) return args;
  const bool at_hand = args.rotated_input != nullptr && *args.rotated_input == args.pass().rotation.factors;
  if (!at_hand || !rotate_alike(args.passes)) rotate(args, stream);
  args.x = args.workspace.scratch;
  args.ldx = padded_inputs(args.k());
  return args;
}

/// Elements from one rotated input to the other.
int64_t input_stride(const LinearArgs& args) {
  return rotate_alike(args.passes) ? 0 : static_cast<int64_t>(input_bytes(args.m, args.k()) / 2);
}

/// Passes side by side, but for factors.
RotatedLaunch launch_of(const LinearArgs& args) {
  const DevicePass& first = args.pass();
  RotatedLaunch launch{};
  static_cast<frame::Launch&>(launch) = prepare(args);
  launch.passes = static_cast<int>(args.passes.size());
  launch.pass_tiles = launch.k_tiles;
  launch.k_tiles *= launch.passes;
  launch.tiles *= launch.passes;
  launch.sources[0] = rotated::source_of(first, first);
  launch.sources[1] = rotated::source_of(first, args.passes.back());
  launch.block = static_cast<int>(first.rotation.block);
  return launch;
}

/// The blocks make their input of x, by rotations of `block`. One more semaphore is used, behind the first `behind`
/// bytes.
void make_input(RotatedLaunch& launch, const LinearArgs& args, int64_t block, size_t behind) {
  if (block > 1) set_rotated_input(args, nullptr);
  auto* const barrier = static_cast<std::byte*>(args.workspace.semaphores) + device::round_up_256(behind);
  launch.inputs = {.x = static_cast<const __half*>(launch.x),
                   .ldx = launch.ldx,
                   .m = launch.m,
                   .k = static_cast<int>(args.k()),
                   .aligned = launch.aligned,
                   .rotations = rotate_alike(args.passes) ? 1 : 2,
                   .block = static_cast<int>(block),
                   .signs = {args.pass().rotation.signs, args.passes.back().rotation.signs},
                   .barrier = reinterpret_cast<uint32_t*>(barrier)};
  if (block > 1) launch.result_factor *= rotated::FragmentRotation::scale(static_cast<int>(block));
  launch.x = args.workspace.scratch;
  launch.ldx = padded_inputs(args.k());
  launch.aligned = true;
  launch.input_stride = input_stride(args);
}

/// The factors of weights that are scaled in registers, such that those of all passes stay inside f16.
void set_factors(RotatedLaunch& launch, Passes passes) {
  float least = INFINITY;
  for (DevicePass pass : passes) {
    pass.table_stretch = passes.front().table_stretch;  // whose table serves all
    set_weight_factors(pass, DType::f16, launch);
    least = std::min(least, launch.table_factor);
  }
  launch.table_factor = least;
  launch.result_factor = 1 / least;
}

// -- launches

void run_gemv(const LinearArgs& args, const device::Stream& stream) {
  const DevicePass& first = args.pass();
  const LinearDesc desc = describe(args, stream.context().properties());
  const bool inside = rotates_inside(desc);
  const bool by_warps = inside && args.m == 1 && prepare(args).aligned;
  const bool apart = !inside || (args.m == 1 && !by_warps);
  RotatedLaunch launch = launch_of(apart ? with_rotated_input(args, stream) : args);
  if (apart) launch.input_stride = input_stride(args);
  launch.result_factor = 1 / rotated::table_factor(first);
  launch.rotates = by_warps;
  if (by_warps) {
    launch.result_factor *= rotated::FragmentRotation::scale(launch.block);
  } else if (!apart) {
    make_input(launch, args, first.rotation.block, gemv_workspace(desc).semaphores);
  }
  const int second_bits = args.passes.size() > 1 ? args.passes.back().scheme.bits : 0;
  const auto launch_it = takes_fused_kernel(args) ? rotated::launch_fused_gemv : rotated::launch_gemv;
  launch_it(launch, first.scheme.bits, second_bits, blocks_for(stream, frame::Map(first.n, first.k).tiles()), stream,
            args.shape);
}

void run_gemm(const LinearArgs& args, const device::Stream& stream) {
  const DevicePass& first = args.pass();
  const LinearDesc desc = describe(args, stream.context().properties());
  const bool inside = rotates_inside(desc);
  in_slices(inside ? args : with_rotated_input(args, stream), most_launch_rows, [&](const LinearArgs& part) {
    RotatedLaunch launch = launch_of(part);
    set_factors(launch, part.passes);
    const int blocks = frame::gemm_blocks(launch, blocks_for(stream, frame::Map(first.n, first.k).tiles()));
    const size_t mailboxes = gemm_workspace(describe(part, desc.gpu)).semaphores;
    if (inside) make_input(launch, part, first.rotation.block, mailboxes);
    rotated::launch_gemm(launch, first.scheme.bits, blocks, stream, part.shape);
  });
}

void run_wgmma(const LinearArgs& args, const device::Stream& stream) {
  const DevicePass& first = args.pass();
  const LinearDesc desc = describe(args, stream.context().properties());
  const bool inside = rotates_inside(desc);
  const LinearArgs all = inside ? args : with_rotated_input(args, stream);
  RotatedLaunch launch = launch_of(all);
  set_factors(launch, all.passes);
  make_input(launch, all, inside ? first.rotation.block : 1, wgmma::exchange_bytes(desc.gpu.multiprocessors));
  std::byte* const arranged = scratch_of(args) + (inside ? 0 : input_bytes(args.m, first.k));
  rotated::launch_wgmma(launch, first.scheme.bits, arranged, stream, args.shape);
}

void run_wide(const LinearArgs& args, const device::Stream& stream) {
  const DevicePass &first = args.pass(), &last = args.passes.back();
  const rotated::DecodedPasses passes{.sources = {rotated::source_of(first, first), rotated::source_of(first, last)},
                                      .bits = {first.scheme.bits, args.passes.size() > 1 ? last.scheme.bits : 0},
                                      .k = first.k};
  const auto decode = [&](int64_t at, int64_t count, const DeviceRows& out) {
    rotated::dequantize_sum(passes, at, count, out, stream);
  };
  std::byte* const memory = scratch_of(args) + input_bytes(args.m, first.k);
  dequantize_gemm(with_rotated_input(args, stream), memory, decode, stream);
}

void check_pass(const DevicePass& pass) {
  require(pass.scheme.bits >= 2 && pass.scheme.bits <= 5, "rotated codes of another width", "2 to 5 bits");
  const int64_t group = group_of(pass);
  require(group >= pass.k || (group >= 32 && std::has_single_bit(static_cast<uint64_t>(group))),
          "a group that is not 32 · 2^i inputs", "or all of them");
  const DeviceRotation& rotation = pass.rotation;
  require(
      pass.scales != nullptr && pass.codebook != nullptr && rotation.factors != nullptr && rotation.signs != nullptr,
      "a null pointer", "norms, levels, factors and signs are needed");
  require(rotation.block >= 2, "a pass without a rotation", "of blocks of 2 and more");
  require(std::isfinite(pass.table_max) && pass.table_max > 0, "table_max is not a positive number",
          "the largest magnitude of the levels");
  require(pass.table_stretch >= 1 && pass.table_stretch < 2, "table_stretch is not from 1 to 2",
          "what table_stretch() says");
}

/// Rounding the rotated input to 16 bits adds 2^-11 / √3 · √… in the mean, 1.3e-3 with what the kernels add by
/// themselves.
constexpr double rotated_error = 1.5e-3;

constexpr KernelRow rows[] = {
    {.name = "rotated-wide",
     .description = "more than 128 rows: one pass, or two as their sum, decoded once and multiplied by cuBLAS",
     .accepts = accepts_wide,
     .workspace = workspace_of_wide,
     .check = check_pass,
     .run = run_wide,
     .scales_input = true,
     .error = rotated_error},
    {.name = "rotated-wgmma",
     .description = "9 rows and more on sm_90: warpgroup products of one pass or two, which rotate their input",
     .accepts = accepts_wgmma,
     .workspace = workspace_of_wgmma,
     .check = check_pass,
     .run = run_wgmma,
     .scales_input = true,
     .error = rotated_error},
    {.name = "rotated-gemv",
     .description = "1 to 16 rows, memory-bound: one pass or two, which rotate their input, norms multiply the sums",
     .accepts = accepts_gemv,
     .workspace = workspace_of_gemv,
     .check = check_pass,
     .run = run_gemv,
     .fuses = true,
     .scales_input = true,
     .error = rotated_error},
    {.name = "rotated-gemm",
     .description = "17 to 128 rows, 64 at a time: one pass or two, norms multiply the weights",
     .accepts = accepts_gemm,
     .workspace = workspace_of_gemm,
     .check = check_pass,
     .run = run_gemm,
     .scales_input = true,
     .error = rotated_error},
};

}  // namespace
}  // namespace rotated

std::span<const KernelRow> rotated_rows() noexcept { return rotated::rows; }

}  // namespace w4q::kernels
