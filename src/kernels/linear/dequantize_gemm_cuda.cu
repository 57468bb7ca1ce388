#include "kernels/linear/dequantize_gemm.h"

#include "device/check.h"
#include "kernels/dequantize/dequantize_cuda.h"
#include "kernels/dequantize/marlin.h"
#include "kernels/elementwise/elementwise_cuda.h"
#include "kernels/frame/launch.cuh"
#include "kernels/linear/wide_strips.h"

namespace w4q::kernels::kbit {
namespace {

size_t round_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Workspace that must stay zero, for the kernels of fewer rows.
size_t words_bytes(int64_t n, int64_t k) { return round_up(kbit_linear_workspace(packed_linear_max_rows, n, k)); }

void add_bias(const LinearArgs& args, cudaStream_t stream) {
  const auto add = [&](auto* y) { add_bias_cuda(args.bias, args.m, args.weight.n, y, args.ldy, stream); };
  if (args.fp32) return add(static_cast<float*>(args.y));
  if (args.activation == DType::f16) return add(static_cast<__half*>(args.y));
  add(static_cast<__nv_bfloat16*>(args.y));
}

void copy_residual(const LinearArgs& args, cudaStream_t stream) {
  const size_t bytes = args.fp32 ? 4 : 2;
  const size_t pitch = static_cast<size_t>(args.ldy) * bytes, width = static_cast<size_t>(args.weight.n) * bytes;
  device::check(cudaMemcpy2DAsync(args.y, pitch, args.residual, pitch, width, static_cast<size_t>(args.m),
                                  cudaMemcpyDeviceToDevice, stream),
                "copying a residual");
}

/// Outputs `first` … first + count − 1 as 16-bit rows.
void decode_strip(const DeviceWeight& w, int64_t first, int64_t count, const DeviceRows& out, cudaStream_t stream) {
  if (w.scheme.family == formats::SchemeFamily::integer) return dequantize_marlin(w, first, count, out, stream);
  const int64_t scale_bytes = w.scheme.scale == formats::ScaleType::e4m4 ? 1 : 2;
  const int64_t tile = Map(w.n, w.k).tile(first, 0);
  const PackedDeviceWeight part{w.scheme,
                                w.layout,
                                count,
                                w.k,
                                w.codes + tile * Map::tile_words(w.scheme.bits),
                                static_cast<const std::byte*>(w.scales) + tile * Map::tile_scales * scale_bytes,
                                w.codebook};
  dequantize_cuda(part, out, stream);
}

}  // namespace

size_t wide_workspace(const LinearDesc& desc) {
  return words_bytes(desc.n, desc.k) + strip_memory_bytes(desc.n, desc.k);
}

void run_wide(const LinearArgs& args, cudaStream_t stream) {
  const auto& w = args.weight;
  if (args.residual != nullptr && args.residual != args.y) copy_residual(args, stream);
  device::CublasProduct product{};
  product.m = args.m;
  product.n = w.n;
  product.k = w.k;
  product.dtype = args.activation;
  product.x = args.x;
  product.ldx = args.ldx;
  product.y = args.y;
  product.ldy = args.ldy;
  product.fp32_output = args.fp32;
  product.add = args.residual != nullptr;
  const auto decode = [&](int64_t first, int64_t count, std::byte* strip, int64_t stride) {
    decode_strip(w, first, count, {strip, args.activation, stride}, stream);
  };
  multiply_strips(product, static_cast<std::byte*>(args.workspace) + words_bytes(w.n, w.k), decode, stream);
  if (args.bias != nullptr) add_bias(args, stream);
}

}  // namespace w4q::kernels::kbit
