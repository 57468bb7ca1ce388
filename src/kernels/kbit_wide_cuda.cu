#include "kernels/kbit_wide.h"

#include <algorithm>

#include "core/text.h"
#include "device/check.h"
#include "device/fragment.cuh"
#include "kernels/dequantize_cuda.h"
#include "kernels/dequantize_marlin.h"
#include "kernels/kbit_launch.cuh"
#include "kernels/wide_strips.h"

namespace w4q::kernels::kbit {
namespace {

size_t round_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Workspace that must stay zero, for the kernels of fewer rows.
size_t words_bytes(int64_t n, int64_t k) { return round_up(kbit_linear_workspace(packed_linear_max_rows, n, k)); }

template <class Type>
__global__ void add_bias_kernel(const float* bias, void* y, int64_t m, int64_t n, int64_t ldy) {
  auto* const values = static_cast<typename Type::Scalar*>(y);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < m * n; i += step) {
    auto& value = values[i / n * ldy + i % n];
    value = Type::narrow(Type::widen(value) + bias[i % n]);
  }
}

void add_bias(const LinearArgs& args, cudaStream_t stream) {
  constexpr int threads = 256;
  const int64_t n = args.weight.n;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((args.m * n + threads - 1) / threads, 4096));
  if (args.activation == DType::f16) {
    add_bias_kernel<device::HalfType><<<blocks, threads, 0, stream>>>(args.bias, args.y, args.m, n, args.ldy);
  } else {
    add_bias_kernel<device::Bf16Type><<<blocks, threads, 0, stream>>>(args.bias, args.y, args.m, n, args.ldy);
  }
  device::check_launch("add_bias", concat(args.m, " × ", n));
}

void copy_residual(const LinearArgs& args, cudaStream_t stream) {
  const auto pitch = static_cast<size_t>(args.ldy) * 2;
  device::check(cudaMemcpy2DAsync(args.y, pitch, args.residual, pitch, static_cast<size_t>(args.weight.n) * 2,
                                  static_cast<size_t>(args.m), cudaMemcpyDeviceToDevice, stream),
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
  product.add = args.residual != nullptr;
  const auto decode = [&](int64_t first, int64_t count, std::byte* strip, int64_t stride) {
    decode_strip(w, first, count, {strip, args.activation, stride}, stream);
  };
  multiply_strips(product, static_cast<std::byte*>(args.workspace) + words_bytes(w.n, w.k), decode, stream);
  if (args.bias != nullptr) add_bias(args, stream);
}

}  // namespace w4q::kernels::kbit
