// The rows of the table of linear kernels for small floats, f16 activations (docs/kernels/float.md).
#include <algorithm>
#include <cmath>

#include "device/cublas.h"
#include "kernels/linear/dequantize_gemm.h"
#include "kernels/linear/rows.h"
#include "kernels/small_float/dequantize.h"
#include "kernels/small_float/launch.cuh"

namespace w4q::kernels {
namespace small_float {
namespace {

constexpr std::string_view layout = "float-fragment";

}  // namespace

bool accepts(const LinearDesc& desc, int64_t least, int64_t most, std::string* why) {
  if (!accepts_rows(desc, layout, least, most, why)) return false;
  return desc.activation == DType::f16 || because(why, "multiplies activations of f16");
}

void set_factors(const DevicePass& pass, bool rounds_scales, frame::Launch& launch) {
  const bool nvfp4 = pass.scheme.scale == formats::ScaleType::e4m3;
  launch.table_factor = nvfp4 ? E4m3Scales::divisor : 1;
  launch.result_factor = 1;
  launch.output_scales = pass.output_factors;
  launch.fp32_output_scales = true;
  if (!rounds_scales || nvfp4) return;
  // The largest scale is below 2^top; codes are at most 6, or 448: products stay below 2^15.
  const int top = pass.scheme.bits == 4 ? 12 : 6;
  const int exponent = std::clamp(top - (std::ilogb(pass.scale_max) + 1), -120, 120);
  launch.scale_factor = std::ldexp(1.0f, exponent);
  launch.result_factor *= std::ldexp(1.0f, -exponent);
}

}  // namespace small_float

void check_float_pass(const DevicePass& pass) {
  require(
      pass.scheme.family == formats::SchemeFamily::small_float,
      [&] { return concat("scheme ", formats::to_string(pass.scheme), " is no small float"); },
      "nvfp4, mxfp4, mxfp8 or fp8");
  require(pass.scales != nullptr && (pass.scheme.bits == 8 || pass.codebook != nullptr), "a null pointer",
          "scales, and of 4 bits a codebook, are needed");
  require(aligned(pass.output_factors, 4), "a misaligned pointer", "f32 to 4 bytes");
}

namespace small_float {
namespace {

void run_gemv(const LinearArgs& args, const device::Stream& stream) {
  frame::Launch launch = prepare(args);
  set_factors(args.pass(), false, launch);
  const auto launch_it = args.m == 1 ? small_float::launch_fused_gemv : small_float::launch_gemv;
  launch_it(launch, args.pass().scheme, blocks_for(stream, launch.tiles), stream, args.shape);
}

void run_gemm(const LinearArgs& args, const device::Stream& stream) {
  in_slices(args, most_launch_rows, [&](const LinearArgs& part) {
    frame::Launch launch = prepare(part);
    set_factors(part.pass(), true, launch);
    const int blocks = frame::gemm_blocks(launch, blocks_for(stream, launch.tiles));
    small_float::launch_gemm(launch, part.pass().scheme, blocks, stream, part.shape);
  });
}

void run_wide(const LinearArgs& args, const device::Stream& stream) {
  const DevicePass& pass = args.pass();
  const small_float::DeviceFloats weight{pass.scheme, pass.n, pass.k, pass.codes, pass.scales, pass.output_factors};
  dequantize_gemm(
      args, args.workspace.scratch,
      [&](int64_t first, int64_t count, const DeviceRows& out) {
        small_float::dequantize(weight, first, count, out, stream);
      },
      stream);
}

constexpr KernelRow rows[] = {
    {.name = "float-gemv",
     .description = "1 to 16 rows, memory-bound: the kbit GEMV, E4M3 codes by shifts, E4M3 scales in registers",
     .accepts = [](const LinearDesc& d, std::string* why) { return accepts(d, 1, most_gemv_rows, why); },
     .workspace = gemv_workspace,
     .check = check_float_pass,
     .run = run_gemv,
     .fuses = true},
    {.name = "float-gemm",
     .description = "17 to 128 rows, 64 at a time: activations in shared memory, scales multiply the weights",
     .accepts = [](const LinearDesc& d,
                   std::string* why) { return accepts(d, most_gemv_rows + 1, most_gemm_rows(d), why); },
     .workspace = gemm_workspace,
     .check = check_float_pass,
     .run = run_gemm,
     .swiglu = GateOrder::turns},
    {.name = "float-wide",
     .description = "more than 128 rows: weights decoded once, a strip at a time, and multiplied by cuBLAS",
     .accepts = [](const LinearDesc& d, std::string* why) { return accepts(d, most_gemm_rows(d) + 1, most_rows, why); },
     .workspace = dequantize_gemm_workspace,
     .check = check_float_pass,
     .run = run_wide},
};

}  // namespace
}  // namespace small_float

std::span<const KernelRow> float_rows() noexcept { return small_float::rows; }

}  // namespace w4q::kernels
