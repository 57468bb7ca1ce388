// The rows of the table of linear kernels that sm_90a adds.
#include <algorithm>

#include "device/cublas.h"
#include "kernels/integer/launch.cuh"
#include "kernels/kbit/launch.cuh"
#include "kernels/linear/rows.h"
#include "kernels/wgmma/linear.h"
#include "kernels/wgmma/plan.h"

namespace w4q::kernels {
namespace {

constexpr int64_t most_inputs = int64_t{1} << 24;

/// Most rows, where there is cuBLAS: beyond, decoding once and cuBLAS are faster (docs/kernels/wgmma.md).
int64_t most_rows_here(const LinearDesc& desc, int64_t measured) {
  if (desc.m <= measured) return measured;
  return device::have_cublas() ? measured : most_rows;
}

/// `least` to `most` rows of a layout.
bool accepts(const LinearDesc& desc, std::string_view layout, int64_t least, int64_t most, std::string* why) {
  if (!wgmma::built() || !wgmma::runs_on(desc.gpu)) {
    if (why != nullptr) *why = "needs an sm_90 and a build for it";
    return false;
  }
  if (desc.k > most_inputs) {
    if (why != nullptr) *why = "reads weights of at most 2^24 inputs";
    return false;
  }
  return accepts_rows(desc, layout, least, most_rows_here(desc, most), why);
}

bool accepts_kbit(const LinearDesc& desc, std::string* why) {
  return accepts(desc, "kbit-fragment", most_gemv_rows + 1, 1024, why);
}

bool accepts_marlin(const LinearDesc& desc, std::string* why) {
  // At 9 to 16 rows activations would be half of what the GEMV reads.
  if (!accepts(desc, "marlin", 9, 2048, why)) return false;
  if (desc.scheme.bits == 4 && !desc.scheme.asymmetric && takes_marlin(desc.scheme)) return true;
  if (why != nullptr) *why = "reads symmetric int4 with groups of 32, 64, 128, … or a whole row";
  return false;
}

/// Words that these kernels keep zero, ahead of the arranged activations. They are as many for every layer, and at
/// least as many as those of the kernels of fewer rows: arranged activations never stand where others have words.
size_t semaphore_bytes(const device::Properties& gpu) {
  return wgmma::exchange_bytes(gpu.multiprocessors) + spare_semaphore_bytes;
}
size_t workspace(const LinearDesc& desc) { return semaphore_bytes(desc.gpu) + wgmma::workspace_bytes(desc.m, desc.k); }
void* arranged(const LinearArgs& args, const device::Stream& stream) {
  return static_cast<std::byte*>(args.workspace) + semaphore_bytes(stream.context().properties());
}

void run_kbit(const LinearArgs& args, const device::Stream& stream) {
  frame::Launch launch = prepare(args);
  set_weight_factors(args, launch);
  wgmma::launch_kbit(launch, args.weight.scheme, args.activation, arranged(args, stream), stream, shape_of(args));
}

void run_marlin(const LinearArgs& args, const device::Stream& stream) {
  integer::MarlinLaunch launch = prepare_marlin(args);
  // A code less 8 and a scale below 2^12 stay inside f16 as they are.
  if (!launch.bf16_scales && args.weight.scale_max < 0x1p12f) launch.weight_factor = 1;
  launch.result_factor = 1 / launch.weight_factor;
  wgmma::launch_marlin(launch, args.activation, arranged(args, stream), stream, shape_of(args));
}

constexpr KernelRow rows[] = {
    {.name = "kbit-wgmma",
     .description = "17 to 1024 rows on sm_90: warpgroup products, decoded weights as their operand in registers",
     .accepts = accepts_kbit,
     .workspace = workspace,
     .run = run_kbit,
     .swiglu = true},
    {.name = "marlin-wgmma",
     .description = "9 to 2048 rows on sm_90, symmetric int4: warpgroup products, decoded weights in registers",
     .accepts = accepts_marlin,
     .workspace = workspace,
     .run = run_marlin,
     .swiglu = true},
};

}  // namespace

std::span<const KernelRow> wgmma_rows() noexcept { return rows; }

}  // namespace w4q::kernels
