// The rows of the table of linear kernels that sm_90a adds.
#include <algorithm>

#include "device/cublas.h"
#include "kernels/integer/launch.cuh"
#include "kernels/kbit/launch.cuh"
#include "kernels/linear/rows.h"
#include "kernels/small_float/launch.cuh"
#include "kernels/wgmma/linear.h"
#include "kernels/wgmma/plan.h"

namespace w4q::kernels {

std::string_view wgmma::refusal(const device::Properties& gpu, int64_t k) {
  constexpr int64_t most_inputs = int64_t{1} << 24;
  if (!built() || !runs_on(gpu)) return "needs an sm_90 and a build for it";
  return k > most_inputs ? "reads weights of at most 2^24 inputs" : "";
}

/// Beyond what was measured, decoding once and cuBLAS are faster (docs/kernels/wgmma.md).
int64_t wgmma::most_rows_here(int64_t rows, int64_t measured) {
  return rows <= measured || device::have_cublas() ? measured : most_rows;
}

namespace wgmma {
namespace {

/// `least` to `most` rows of a layout.
bool accepts(const LinearDesc& desc, std::string_view layout, int64_t least, int64_t most, std::string* why) {
  const std::string_view refusal = wgmma::refusal(desc.gpu, desc.k());
  if (!refusal.empty()) return because(why, refusal);
  return accepts_rows(desc, layout, least, wgmma::most_rows_here(desc.m, most), why);
}

bool accepts_kbit(const LinearDesc& desc, std::string* why) {
  return accepts(desc, "kbit-fragment", most_gemv_rows + 1, 1024, why);
}

bool accepts_float(const LinearDesc& desc, std::string* why) {
  if (!small_float::accepts(desc, most_gemv_rows + 1, wgmma::most_rows_here(desc.m, 1024), why)) return false;
  const std::string_view refusal = wgmma::refusal(desc.gpu, desc.k());
  if (!refusal.empty()) return because(why, refusal);
  // Bulk copies take rows of scales that are multiples of 16 bytes.
  const bool fits = !small_float::has_tiles(desc.pass().scheme) || desc.k() % 128 == 0;
  return fits || because(why, "of FP8 reads inputs in multiples of 128");
}

bool accepts_marlin(const LinearDesc& desc, std::string* why) {
  // At 9 to 16 rows activations would be half of what the GEMV reads.
  if (!accepts(desc, "marlin", 9, 2048, why)) return false;
  if (desc.pass().scheme.bits == 4 && !desc.pass().scheme.asymmetric && takes_marlin(desc.pass().scheme)) return true;
  if (why != nullptr) *why = "reads symmetric int4 with groups of 32, 64, 128, … or a whole row";
  return false;
}

WorkspaceSizes workspace(const LinearDesc& desc) {
  return {wgmma::exchange_bytes(desc.gpu.multiprocessors), wgmma::workspace_bytes(desc.m, desc.k())};
}

void run_kbit(const LinearArgs& args, const device::Stream& stream) {
  frame::Launch launch = prepare(args);
  set_weight_factors(args.pass(), args.activation, launch);
  wgmma::launch_kbit(launch, args.pass().scheme, args.activation, args.workspace.scratch, stream, args.shape);
}

void run_float(const LinearArgs& args, const device::Stream& stream) {
  frame::Launch launch = prepare(args);
  small_float::set_factors(args.pass(), true, launch);
  wgmma::launch_float(launch, args.pass().scheme, args.workspace.scratch, stream, args.shape);
}

void run_marlin(const LinearArgs& args, const device::Stream& stream) {
  integer::MarlinLaunch launch = prepare_marlin(args);
  // A code less 8 and a scale below 2^12 stay inside f16 as they are.
  if (!launch.bf16_scales && args.pass().scale_max < 0x1p12f) launch.weight_factor = 1;
  launch.result_factor = 1 / launch.weight_factor;
  wgmma::launch_marlin(launch, args.activation, args.workspace.scratch, stream, args.shape);
}

constexpr KernelRow rows[] = {
    {.name = "kbit-wgmma",
     .description = "17 to 1024 rows on sm_90: warpgroup products, decoded weights as their operand in registers",
     .accepts = accepts_kbit,
     .workspace = workspace,
     .check = check_kbit_pass,
     .run = run_kbit,
     .swiglu = GateOrder::turns},
    {.name = "float-wgmma",
     .description = "17 to 1024 rows on sm_90: kbit's warpgroup kernel with codes and scales of small floats",
     .accepts = accepts_float,
     .workspace = workspace,
     .check = check_float_pass,
     .run = run_float,
     .swiglu = GateOrder::turns},
    {.name = "marlin-wgmma",
     .description = "9 to 2048 rows on sm_90, symmetric int4: warpgroup products, decoded weights in registers",
     .accepts = accepts_marlin,
     .workspace = workspace,
     .check = check_integer_pass,
     .run = run_marlin,
     .swiglu = GateOrder::turns},
};

}  // namespace
}  // namespace wgmma

std::span<const KernelRow> wgmma_rows() noexcept { return wgmma::rows; }

}  // namespace w4q::kernels
