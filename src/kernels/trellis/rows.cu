// The rows of the table of linear kernels for trellises, f16 activations (docs/kernels/trellis.md).
//
// One row: a GEMV that divides and rotates its input itself. 2 to 16 rows: blocks rotate the input together
// (kernels/rotated/share.cuh), and levels are multiplied exactly. More: decoded to 16 bits and multiplied by cuBLAS.
#include <algorithm>
#include <cmath>

#include "device/cublas.h"
#include "kernels/linear/dequantize_gemm.h"
#include "kernels/linear/rows.h"
#include "kernels/rotated/input.cuh"
#include "kernels/rotated/rotate_input.h"
#include "kernels/trellis/dequantize.h"
#include "kernels/trellis/launch.cuh"
#include "kernels/trellis/wgmma.h"
#include "kernels/wgmma/linear.h"
#include "kernels/wgmma/plan.h"

namespace w4q::kernels {
namespace trellis {
namespace {

// -- which row takes what

bool accepts(const LinearDesc& desc, int64_t least, int64_t most, std::string* why) {
  if (!accepts_rows(desc, "trellis-fragment", least, most, why)) return false;
  return desc.activation == DType::f16 || because(why, "multiplies activations of f16");
}
bool accepts_gemv(const LinearDesc& desc, std::string* why) {
  return accepts(desc, 1, 1, why) && (desc.k() <= trellis::most_inputs || because(why, "takes up to 28672 inputs"));
}
int blocks_of(const device::Properties& gpu, int64_t n, int64_t k) { return blocks_for(gpu, 2 * Map(n, k).tiles()); }
bool accepts_units(const LinearDesc& desc, std::string* why) {
  if (!accepts(desc, 1, 1, why)) return false;
  const int blocks = blocks_of(desc.gpu, desc.n(), desc.k());
  return trellis::unit_gemv_takes(desc.gpu, desc.pass().scheme.bits, desc.n(), desc.k(), blocks) ||
         because(why, "takes multiples of 1024 inputs that fit shared memory");
}
/// Loading cuBLAS takes a while: it is not asked for as long as one launch takes all rows.
bool accepts_few(const LinearDesc& desc, std::string* why) {
  const bool alone = desc.m > most_gemv_rows && !device::have_cublas();
  return accepts(desc, 1, alone ? most_rows : most_gemv_rows, why);
}
bool accepts_unit_rows(const LinearDesc& desc, std::string* why) {
  if (!accepts(desc, 2, most_gemv_rows, why)) return false;
  const int blocks = blocks_of(desc.gpu, desc.n(), desc.k());
  return trellis::unit_rows_take(desc.gpu, desc.pass().scheme.bits, desc.n(), desc.k(), desc.m, blocks) ||
         because(why, "takes inputs that fit shared memory");
}
/// Below, other kernels come first. Beyond, decoding once and cuBLAS are as fast: 29.8 and 29.2 ms a step of 1024 rows
/// (docs/notes/kernels/trellis.md).
constexpr int64_t least_warpgroup_rows = 9, most_warpgroup_rows = 512;
bool accepts_wgmma(const LinearDesc& desc, std::string* why) {
  const std::string_view refusal = wgmma::refusal(desc.gpu, desc.k());
  if (!refusal.empty()) return because(why, refusal);
  return accepts(desc, least_warpgroup_rows, wgmma::most_rows_here(desc.m, most_warpgroup_rows), why);
}
bool accepts_wide(const LinearDesc& desc, std::string* why) {
  return accepts(desc, most_gemv_rows + 1, most_rows, why);
}

// -- inputs

bool rotates(const DevicePass& pass) { return pass.rotation.block > 1; }
/// Whether the GEMV rotates its input itself.
bool rotates_inside(const LinearArgs& args) {
  const int64_t block = args.pass().rotation.block;
  return !args.input_rotated && block >= 32 && block <= 128 && args.k() % block == 0;
}

int64_t padded_inputs(int64_t k) { return (k + 63) / 64 * 64; }
size_t input_bytes(const LinearDesc& desc) {
  return rotates(desc.pass()) ? device::round_up_256(static_cast<size_t>(desc.m * padded_inputs(desc.k())) * 2) : 0;
}

/// The same product of the rotated input, which stands at the beginning of the scratch.
LinearArgs with_rotated_input(LinearArgs args, const device::Stream& stream) {
  const DeviceRotation& rotation = args.pass().rotation;
  if (args.input_rotated || !rotates(args.pass())) return args;
  const int64_t stride = padded_inputs(args.k());
  if (args.rotated_input == nullptr || *args.rotated_input != rotation.factors) {
    rotate_input({.m = args.m,
                  .k = args.k(),
                  .block = rotation.block,
                  .activation = args.activation,
                  .x = args.x,
                  .ldx = args.ldx,
                  .factors = rotation.factors,
                  .input_scale = args.input_scale,
                  .y = args.workspace.scratch,
                  .ldy = stride,
                  .overlap = args.weights_ready},
                 stream);
    if (args.rotated_input != nullptr) *args.rotated_input = rotation.factors;
  }
  args.x = args.workspace.scratch;
  args.ldx = stride;
  args.input_scale = nullptr;
  return args;
}

// -- launches

/// Of blocks that hand so many sums to others.
WorkspaceSizes workspace_of(const LinearDesc& desc, int64_t sums) {
  const int blocks = blocks_of(desc.gpu, desc.n(), desc.k());
  return {device::round_up_256(static_cast<size_t>(blocks * sums) * sizeof(frame::MailboxWord)), input_bytes(desc)};
}
WorkspaceSizes workspace_of_gemv(const LinearDesc& desc) {  // a strip, or one of gates and one of ups
  return workspace_of(desc, 2 * Map::tile_rows);
}
WorkspaceSizes workspace_of_unit_rows(const LinearDesc& desc) {
  return workspace_of(desc, Map::tile_rows * most_gemv_rows);
}
WorkspaceSizes workspace_of_few(const LinearDesc& desc) {
  WorkspaceSizes sizes = workspace_of_unit_rows(desc);
  sizes.semaphores += spare_semaphore_bytes;  // of the blocks that rotate together
  return sizes;
}
/// Of decoded weights: decoding waits for its stores wherever they go, and cuBLAS is faster with more outputs.
constexpr int64_t panel_bytes = int64_t{128} << 20;
WorkspaceSizes workspace_of_wide(const LinearDesc& desc) {
  return {0, input_bytes(desc) + panel_memory_bytes(desc.n(), desc.k(), panel_bytes)};
}

/// Of activations that the blocks rotate and arrange, whole tiles of rows.
size_t arranged_bytes(const LinearDesc& desc) {
  const int64_t rows = std::min(desc.m, most_warpgroup_rows), tile = wgmma::tile_rows(rows, 256);
  return static_cast<size_t>((rows + tile - 1) / tile * tile * padded_inputs(desc.k())) * 2;
}
WorkspaceSizes workspace_of_wgmma(const LinearDesc& desc) {
  const size_t exchange = device::round_up_256(wgmma::exchange_bytes(desc.gpu.multiprocessors));
  return {exchange + spare_semaphore_bytes, input_bytes(desc) + arranged_bytes(desc)};
}

TrellisLaunch launch_of(const LinearArgs& args) {
  const DevicePass& pass = args.pass();
  const Map map(pass.n, pass.k);
  TrellisLaunch launch{};
  static_cast<frame::Launch&>(launch) = prepare(args);
  launch.n_tiles = static_cast<int>(map.row_groups);
  launch.k_tiles = static_cast<int>(map.col_groups);
  launch.tiles = static_cast<int>(map.tiles());
  launch.output_scales = pass.scales;
  launch.output_scales_in_order = true;
  launch.result_factor = pass.table_max;  // u
  launch.mask = (1u << pass.scheme.window) - 1;
  launch.input_scale = args.input_scale;
  launch.block = 128;
  return launch;
}

/// A launch whose blocks rotate what they need, each by itself.
void run_alone(decltype(trellis::launch_gemv)& launch_rows, const LinearArgs& args, const device::Stream& stream) {
  const bool inside = rotates_inside(args);
  TrellisLaunch launch = launch_of(inside ? args : with_rotated_input(args, stream));
  if (inside) {
    const DeviceRotation& rotation = args.pass().rotation;
    launch.signs = rotation.signs;
    launch.block = static_cast<int>(rotation.block);
    launch.result_factor *= rotated::FragmentRotation::scale(launch.block);
  }
  const int blocks = blocks_of(stream.context().properties(), args.n(), args.k());
  launch_rows(launch, args.pass().scheme, blocks, stream, args.shape);
}
void run_gemv(const LinearArgs& args, const device::Stream& stream) { run_alone(trellis::launch_gemv, args, stream); }
void run_units(const LinearArgs& args, const device::Stream& stream) {
  run_alone(trellis::launch_unit_gemv, args, stream);
}
void run_unit_rows(const LinearArgs& args, const device::Stream& stream) {
  run_alone(trellis::launch_unit_rows, args, stream);
}

/// What the blocks rotate together, or only arrange; `semaphores`: bytes before the word that they meet at.
void share_input(TrellisLaunch& launch, const LinearArgs& args, bool rotates, size_t semaphores) {
  const DeviceRotation& rotation = args.pass().rotation;
  if (rotates && args.rotated_input != nullptr) *args.rotated_input = nullptr;  // what is there lacks a factor
  launch.inputs = {
      .x = static_cast<const __half*>(launch.x),
      .ldx = launch.ldx,
      .m = launch.m,
      .k = static_cast<int>(args.k()),
      .aligned = launch.aligned,
      .rotations = 1,
      .block = rotates ? static_cast<int>(rotation.block) : 1,
      .signs = {rotation.signs, rotation.signs},
      .barrier = reinterpret_cast<uint32_t*>(static_cast<std::byte*>(args.workspace.semaphores) + semaphores)};
  if (rotates) launch.result_factor *= rotated::FragmentRotation::scale(launch.inputs.block);
}

void run_few(const LinearArgs& args, const device::Stream& stream) {
  const int blocks = blocks_of(stream.context().properties(), args.n(), args.k());
  const bool inside = rotates_inside(args);
  in_slices(inside ? args : with_rotated_input(args, stream), most_gemv_rows, [&](const LinearArgs& part) {
    TrellisLaunch launch = launch_of(part);
    if (inside) {
      const auto sums = static_cast<size_t>(int64_t{blocks} * Map::tile_rows * most_gemv_rows);
      share_input(launch, part, true, sums * sizeof(frame::MailboxWord));
      launch.x = part.workspace.scratch;
      launch.ldx = padded_inputs(part.k());
      launch.aligned = true;
    }
    trellis::launch_rows(launch, part.pass().scheme, blocks, stream, part.shape);
  });
}

void run_wgmma(const LinearArgs& args, const device::Stream& stream) {
  const device::Properties& gpu = stream.context().properties();
  const bool inside = rotates_inside(args);
  const size_t inputs = input_bytes(describe(args, gpu));
  in_slices(inside ? args : with_rotated_input(args, stream), most_warpgroup_rows, [&](const LinearArgs& part) {
    TrellisLaunch launch = launch_of(part);
    share_input(launch, part, inside, device::round_up_256(wgmma::exchange_bytes(gpu.multiprocessors)));
    std::byte* const arranged = static_cast<std::byte*>(part.workspace.scratch) + inputs;
    trellis::launch_wgmma(launch, part.pass().scheme, arranged, stream, part.shape);
  });
}

void run_wide(const LinearArgs& args, const device::Stream& stream) {
  const DevicePass& pass = args.pass();
  const trellis::DeviceTrellis weight{pass.scheme, pass.n, pass.k, pass.codes, pass.scales, pass.table_max};
  const size_t inputs = input_bytes(describe(args, stream.context().properties()));
  dequantize_gemm(
      with_rotated_input(args, stream), static_cast<std::byte*>(args.workspace.scratch) + inputs,
      [&](int64_t first, int64_t count, const DeviceRows& out) {
        trellis::dequantize(weight, first, count, out, stream);
      },
      stream, panel_bytes);
}

void check_pass(const DevicePass& pass) {
  const formats::Scheme& scheme = pass.scheme;
  require(
      scheme.family == formats::SchemeFamily::trellis && scheme.bits >= 2 && scheme.bits <= 4 && scheme.window >= 8 &&
          scheme.window <= 16,
      [&] { return concat("scheme ", formats::to_string(scheme), " is not a trellis"); },
      "2 to 4 bits, windows of 8 to 16");
  require(pass.scales != nullptr, "a null pointer", "scales are needed");
  require(!rotates(pass) || (pass.rotation.factors != nullptr && pass.rotation.signs != nullptr), "a null pointer",
          "a rotation has factors and signs");
  require(std::isfinite(pass.table_max) && pass.table_max > 0, "table_max is not a positive number", "the unit u");
}

/// Rounding the rotated input to 16 bits, as of rotated weights.
constexpr double trellis_error = 1.5e-3;

constexpr KernelRow rows[] = {
    {.name = "trellis-unit-gemv",
     .description = "1 row, k a multiple of 1024, much shared memory: as trellis-gemv with fewer instructions",
     .accepts = accepts_units,
     .workspace = workspace_of_gemv,
     .check = check_pass,
     .run = run_units,
     .fuses = true,
     .swiglu = GateOrder::halves,
     .scales_input = true,
     .error = trellis_error},
    {.name = "trellis-gemv",
     .description =
         "1 row: bytes of products straight into the tensor core, inputs as two terms of int8, rotated inside",
     .accepts = accepts_gemv,
     .workspace = workspace_of_gemv,
     .check = check_pass,
     .run = run_gemv,
     .fuses = true,
     .swiglu = GateOrder::halves,
     .scales_input = true,
     .error = trellis_error},
    {.name = "trellis-unit-rows",
     .description = "2 to 16 rows, much shared memory: as trellis-rows, blocks rotate and share less",
     .accepts = accepts_unit_rows,
     .workspace = workspace_of_unit_rows,
     .check = check_pass,
     .run = run_unit_rows,
     .error = trellis_error},
    {.name = "trellis-rows",
     .description = "2 to 16 rows: levels as f16, exactly; without cuBLAS any number of rows, 16 at a time",
     .accepts = accepts_few,
     .workspace = workspace_of_few,
     .check = check_pass,
     .run = run_few,
     .error = trellis_error},
    {.name = "trellis-wgmma",
     .description = "up to 512 rows on sm_90: warpgroup products, levels as their operand in registers",
     .accepts = accepts_wgmma,
     .workspace = workspace_of_wgmma,
     .check = check_pass,
     .run = run_wgmma,
     .error = trellis_error},
    {.name = "trellis-wide",
     .description = "more than 16 rows: weights decoded once, a strip at a time, and multiplied by cuBLAS",
     .accepts = accepts_wide,
     .workspace = workspace_of_wide,
     .check = check_pass,
     .run = run_wide,
     .error = trellis_error},
};

}  // namespace
}  // namespace trellis

std::span<const KernelRow> trellis_rows() noexcept { return trellis::rows; }

}  // namespace w4q::kernels
