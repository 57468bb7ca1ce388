// The rows of the table of linear kernels for 16-bit weights.
#include "device/cublas.h"
#include "kernels/linear/dense_gemv_cuda.h"
#include "kernels/linear/dequantize_gemm.h"
#include "kernels/linear/rows.h"

namespace w4q::kernels {
namespace dense {
namespace {

bool accepts(const LinearDesc& desc, int64_t most, std::string* why) {
  if (!accepts_rows(desc, f16_rows, 1, most, why)) return false;
  return desc.activation == DType::f16 || because(why, "multiplies activations of f16");
}

bool accepts_gemv(const LinearDesc& desc, std::string* why) {
  if (!accepts(desc, 1, why)) return false;
  return dense_gemv_accepts(desc.n(), desc.k()) || because(why, "reads weights of 8, 16, 24, … inputs");
}

void run_gemv(const LinearArgs& args, const device::Stream& stream) {
  const DevicePass& pass = args.pass();
  DenseGemvArgs gemv{reinterpret_cast<const __half*>(pass.codes), static_cast<const __half*>(args.x), args.bias, pass.n,
                     pass.k};
  require(args.residual == nullptr || (args.residual == args.y && args.fp32), "a residual apart from y, or of f16",
          "y itself, f32");
  if (args.fusion.swiglu) {
    gemv.gated = static_cast<__half*>(args.y);
  } else if (args.residual != nullptr) {
    gemv.residual = static_cast<float*>(args.y);
  } else if (args.fp32) {
    gemv.out_fp32 = static_cast<float*>(args.y);
  } else {
    gemv.out = static_cast<__half*>(args.y);
  }
  gemv.overlap = args.weights_ready;
  dense_gemv_cuda(gemv, stream);
}

void run_gemm(const LinearArgs& args, const device::Stream& stream) {
  dense_gemm(args, args.workspace.scratch, stream);
}

constexpr KernelRow rows[] = {
    {.name = "f16-gemv",
     .description = "1 row, memory-bound: weights as they stand in a checkpoint",
     .accepts = accepts_gemv,
     .workspace = [](const LinearDesc&) { return WorkspaceSizes{}; },
     .check = [](const DevicePass&) {},
     .run = run_gemv,
     .swiglu = GateOrder::halves},
    {.name = "cuBLAS",
     .description = "any number of rows of 16-bit weights",
     .accepts = [](const LinearDesc& d, std::string* why) { return accepts(d, most_rows, why); },
     .workspace =
         [](const LinearDesc&) {
           return WorkspaceSizes{0, device::cublas_workspace_bytes};
         },
     .check = [](const DevicePass&) {},
     .run = run_gemm},
};

}  // namespace
}  // namespace dense

std::span<const KernelRow> dense_rows() noexcept { return dense::rows; }

}  // namespace w4q::kernels
