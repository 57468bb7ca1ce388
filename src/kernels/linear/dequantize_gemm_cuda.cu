#include "kernels/linear/dequantize_gemm.h"

#include <algorithm>

#include "device/alignment.h"
#include "device/copy.h"
#include "device/cublas.h"
#include "kernels/elementwise/elementwise_cuda.h"
#include "repack/layout_kbit_fragment.h"

namespace w4q::kernels {
namespace {

/// Elements from row to row of a panel: rows begin on 16 bytes.
int64_t panel_stride(int64_t k) { return (k + 7) / 8 * 8; }

/// Outputs of a panel of at most so many bytes, whole N-tiles.
int64_t panel_outputs(int64_t n, int64_t k, int64_t bytes) {
  constexpr int64_t group = repack::KbitFragmentMap::tile_rows;
  const int64_t fitting = bytes / 2 / panel_stride(k) / group * group;
  return std::min(std::max(fitting, group), (n + group - 1) / group * group);
}

void add_bias(const LinearArgs& args, const device::Stream& stream) {
  const auto add = [&](auto* y) { add_bias_cuda(args.bias, args.m, args.n(), y, args.ldy, stream); };
  if (args.fp32) return add(static_cast<float*>(args.y));
  if (args.activation == DType::f16) return add(static_cast<__half*>(args.y));
  add(static_cast<__nv_bfloat16*>(args.y));
}

void copy_residual(const LinearArgs& args, const device::Stream& stream) {
  const size_t bytes = args.fp32 ? 4 : 2;
  const size_t pitch = static_cast<size_t>(args.ldy) * bytes, width = static_cast<size_t>(args.n()) * bytes;
  device::copy_rows(device::Way::on_gpu, {args.y, pitch}, {args.residual, pitch}, width, static_cast<size_t>(args.m),
                    stream, "copying a residual");
}

/// All of `args` but for the weight and what it gives: n, w, ldw, y.
device::CublasProduct product_of(const LinearArgs& args, void* memory) {
  device::CublasProduct product{};
  product.m = args.m;
  product.k = args.k();
  product.dtype = args.activation;
  product.x = args.x;
  product.ldx = args.ldx;
  product.ldy = args.ldy;
  product.fp32_output = args.fp32;
  product.add = args.residual != nullptr;
  product.workspace = memory;
  return product;
}

}  // namespace

size_t panel_memory_bytes(int64_t n, int64_t k, int64_t panel_bytes) {
  return device::cublas_workspace_bytes + static_cast<size_t>(panel_outputs(n, k, panel_bytes) * panel_stride(k)) * 2;
}

WorkspaceSizes dequantize_gemm_workspace(const LinearDesc& desc) { return {0, panel_memory_bytes(desc.n(), desc.k())}; }

void dequantize_gemm(const LinearArgs& args, void* memory, const DecodePanel& decode, const device::Stream& stream,
                     int64_t panel_bytes) {
  const int64_t n = args.n(), outputs = panel_outputs(n, args.k(), panel_bytes);
  if (args.residual != nullptr && args.residual != args.y) copy_residual(args, stream);
  std::byte* const panel = static_cast<std::byte*>(memory) + device::cublas_workspace_bytes;
  device::CublasProduct product = product_of(args, memory);
  product.w = panel;
  product.ldw = panel_stride(args.k());
  for (int64_t first = 0; first < n; first += outputs) {
    product.n = std::min(outputs, n - first);
    product.y = static_cast<std::byte*>(args.y) + first * (args.fp32 ? 4 : 2);
    decode(first, product.n, {panel, args.activation, product.ldw});
    device::cublas_multiply(product, stream);
  }
  if (args.bias != nullptr) add_bias(args, stream);
}

void dense_gemm(const LinearArgs& args, void* memory, const device::Stream& stream) {
  if (args.residual != nullptr && args.residual != args.y) copy_residual(args, stream);
  device::CublasProduct product = product_of(args, memory);
  product.n = args.n();
  product.w = args.pass().codes;
  product.ldw = args.k();
  product.y = args.y;
  device::cublas_multiply(product, stream);
  if (args.bias != nullptr) add_bias(args, stream);
}

}  // namespace w4q::kernels
