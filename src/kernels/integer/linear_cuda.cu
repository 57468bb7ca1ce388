#include <algorithm>
#include <bit>
#include <cmath>

#include "device/cublas.h"
#include "formats/integer.h"
#include "kernels/integer/dequantize_interleaved.h"
#include "kernels/integer/dequantize_marlin.h"
#include "kernels/integer/launch.cuh"
#include "kernels/linear/dequantize_gemm.h"
#include "kernels/linear/int8_rows.h"
#include "kernels/linear/rows.h"
#include "repack/layout_marlin.h"

namespace w4q::kernels {
namespace integer {
namespace {

using formats::ScaleType;
using formats::Scheme;

constexpr int64_t most_interleaved_rows = 8;

/// One group for all inputs: its scale multiplies the output.
bool single_group(const Scheme& scheme, int64_t k) { return formats::integer_groups(scheme, k) == 1; }

bool accepts_marlin(const LinearDesc& desc, int64_t least, int64_t most, std::string* why) {
  if (!accepts_rows(desc, "marlin", least, most, why)) return false;
  if (takes_marlin(desc.pass().scheme)) return true;
  if (why != nullptr) *why = "reads int4 and int8 with f16 or bf16 scales and groups of 32, 64, 128, … or a whole row";
  return false;
}

bool accepts_interleaved(const LinearDesc& desc, int64_t least, int64_t most, std::string* why) {
  if (!accepts_rows(desc, "interleaved", least, most, why)) return false;
  const Scheme& s = desc.pass().scheme;
  const bool groups = s.block == 32 || s.block == 64 || s.block == 128;
  if (s.family == formats::SchemeFamily::integer && s.bits == 4 && groups && s.scale == ScaleType::f16) return true;
  if (why != nullptr) *why = "reads int4 in groups of 32, 64 or 128 with f16 scales";
  return false;
}

/// Most rows for the GEMV, which reads the weights for each eight. Beyond, decoding once and cuBLAS are faster, where
/// there is cuBLAS.
int64_t most_interleaved(const LinearDesc& desc) {
  return desc.m <= most_launch_rows || device::have_cublas() ? most_launch_rows : most_rows;
}

/// Where weights become values of the activations' type in registers: a power of two that keeps (code − zero) · scale
/// inside f16.
float weight_factor(const LinearArgs& args) {
  if (args.activation != DType::f16) return 1;
  const auto& w = args.pass();
  if (single_group(w.scheme, w.k)) return 1;
  return std::ldexp(1.0f, 14 - w.scheme.bits - (std::ilogb(w.scale_max) + 1));
}

/// 1 / the unit that codes are read in (integer::Codec).
float code_factor(DType activation, int bits) {
  if (activation == DType::bf16) return 1;
  return bits == 4 ? 0x1p20f : 0x1p24f;
}

void run_marlin_gemv(const LinearArgs& args, const device::Stream& stream) {
  integer::MarlinLaunch launch = prepare_marlin(args);
  launch.result_factor = code_factor(args.activation, args.pass().scheme.bits);
  if (takes_fused_kernel(args)) {
    return integer::launch_fused_marlin_gemv(launch, args.pass().scheme.bits, blocks_for(stream, launch.tiles), stream,
                                             args.shape);
  }
  integer::launch_marlin_gemv(launch, args.pass().scheme.bits, args.activation, blocks_for(stream, launch.tiles),
                              stream, args.shape);
}

void run_marlin_gemm(const LinearArgs& args, const device::Stream& stream) {
  in_slices(args, most_launch_rows, [&](const LinearArgs& part) {
    integer::MarlinLaunch launch = prepare_marlin(part);
    launch.result_factor = 1 / launch.weight_factor;
    integer::launch_marlin_gemm(launch, part.pass().scheme.bits, part.activation,
                                frame::gemm_blocks(launch, blocks_for(stream, launch.tiles)), stream, part.shape);
  });
}

void run_dequantize_gemm(const LinearArgs& args, const device::Stream& stream) {
  const auto decode = [&](int64_t first, int64_t count, const DeviceRows& out) {
    dequantize_marlin(args.pass(), first, count, out, stream);
  };
  dequantize_gemm(args, args.workspace.scratch, decode, stream);
}

void run_interleaved_gemm(const LinearArgs& args, const device::Stream& stream) {
  const auto decode = [&](int64_t first, int64_t count, const DeviceRows& out) {
    dequantize_interleaved(args.pass(), first, count, out, stream);
  };
  dequantize_gemm(args, args.workspace.scratch, decode, stream);
}

void run_interleaved_gemv(const LinearArgs& args, const device::Stream& stream) {
  in_slices(args, most_interleaved_rows, [&](const LinearArgs& part) {
    integer::InterleavedLaunch launch{};
    static_cast<frame::Launch&>(launch) = prepare(part);
    launch.zeros = part.pass().zeros;
    launch.zero_words = (part.pass().n + 7) / 8;
    launch.group_shift = std::countr_zero(static_cast<unsigned>(part.pass().scheme.block)) - 5;
    launch.result_factor = code_factor(part.activation, part.pass().scheme.bits);
    if (takes_fused_kernel(part)) {
      return integer::launch_fused_interleaved_gemv(launch, blocks_for(stream, launch.tiles), stream, part.shape);
    }
    integer::launch_interleaved_gemv(launch, part.activation, blocks_for(stream, launch.tiles), stream, part.shape);
  });
}

constexpr KernelRow rows[] = {
    {.name = "marlin-gemv",
     .description = "1 to 16 rows, memory-bound: every warp streams a run of tiles, scales multiply the sums",
     .accepts = [](const LinearDesc& d, std::string* why) { return accepts_marlin(d, 1, most_gemv_rows, why); },
     .workspace = gemv_workspace,
     .check = check_integer_pass,
     .run = run_marlin_gemv,
     .fuses = true},
    {.name = "marlin-gemm",
     .description = "17 to 128 rows, 64 at a time: activations in shared memory, scales multiply the weights",
     .accepts = [](const LinearDesc& d,
                   std::string* why) { return accepts_marlin(d, most_gemv_rows + 1, most_gemm_rows(d), why); },
     .workspace = gemm_workspace,
     .check = check_integer_pass,
     .run = run_marlin_gemm,
     .swiglu = GateOrder::turns,
     .begins_early = false},
    {.name = "marlin-wide",
     .description = "more than 128 rows: weights decoded once, a strip at a time, and multiplied by cuBLAS",
     .accepts = [](const LinearDesc& d,
                   std::string* why) { return accepts_marlin(d, most_gemm_rows(d) + 1, most_rows, why); },
     .workspace = dequantize_gemm_workspace,
     .check = check_integer_pass,
     .run = run_dequantize_gemm,
     .begins_early = false},
    {.name = "interleaved-gemv",
     .description = "1 to 64 rows, 8 at a time: a lane holds inputs of one output, the B operand keeps lanes apart",
     .accepts = [](const LinearDesc& d,
                   std::string* why) { return accepts_interleaved(d, 1, most_interleaved(d), why); },
     .workspace = gemv_workspace,
     .check = check_integer_pass,
     .run = run_interleaved_gemv,
     .fuses = true},
    {.name = "interleaved-wide",
     .description = "more than 64 rows: weights decoded once, a strip at a time, and multiplied by cuBLAS",
     .accepts = [](const LinearDesc& d,
                   std::string* why) { return accepts_interleaved(d, most_interleaved(d) + 1, most_rows, why); },
     .workspace = dequantize_gemm_workspace,
     .check = check_integer_pass,
     .run = run_interleaved_gemm,
     .begins_early = false},
};

}  // namespace
}  // namespace integer

bool takes_marlin(const formats::Scheme& scheme) { return takes_int8_activations(scheme); }

integer::MarlinLaunch prepare_marlin(const LinearArgs& args) {
  const auto& w = args.pass();
  const repack::MarlinMap map(w.scheme.bits, w.n, w.k, formats::integer_groups(w.scheme, w.k));
  integer::MarlinLaunch launch{};
  static_cast<frame::Launch&>(launch) = prepare(args);
  launch.zeros = w.zeros;
  launch.order = w.input_order;
  launch.input_tiles = static_cast<int>(map.padded_cols / repack::MarlinMap::tile_cols);
  launch.input_tile_loads = map.row_words() / 4;
  launch.padded_rows = map.padded_rows;
  launch.bf16_scales = w.scheme.scale == formats::ScaleType::bf16;
  launch.weight_factor = integer::weight_factor(args);
  if (map.single_group) {
    launch.group_shift = integer::one_group;
    launch.output_scales = w.scales;
    launch.bf16_output_scales = launch.bf16_scales;
  } else {
    launch.group_shift = std::countr_zero(static_cast<unsigned>(w.scheme.block)) - 5;
  }
  return launch;
}

std::span<const KernelRow> integer_rows() noexcept { return integer::rows; }

void check_integer_pass(const DevicePass& w) {
  require(w.scales != nullptr, "a null pointer", "scales are needed");
  require(!w.scheme.asymmetric || w.zeros != nullptr, "a null pointer", "asymmetric weights need their zero points");
  require(!w.scheme.act_order || w.input_order != nullptr, "a null pointer", "act order needs the order of inputs");
  require(aligned(w.zeros, 16) && aligned(w.input_order, 4), "a misaligned pointer",
          "zero points to 16 bytes, the order of inputs to 4");
}

}  // namespace w4q::kernels
