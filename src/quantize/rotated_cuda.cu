#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/text.h"
#include "device/buffer.h"
#include "device/check.h"
#include "device/copy.h"
#include "device/stream.h"
#include "formats/kbit.h"
#include "formats/rotated.h"
#include "quantize/rotated_cuda.h"
#include "quantize/row_norms.cuh"
#include "quantize/source_matrix.h"

namespace w4q::quantize {
namespace {

using formats::kbit_block;
using formats::PlaneRole;

constexpr int block_warps = 8;
constexpr int64_t rotated_strip_bytes = int64_t{64} << 20;  ///< of weights in GPU memory at a time
constexpr int max_midpoints = 31;

struct Midpoints {
  float values[max_midpoints];
  int count;
};

__device__ float widen(float value) { return value; }
__device__ float widen(__half value) { return __half2float(value); }
__device__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

/// A warp for each group.
template <class T>
__global__ void norms_kernel(const T* weight, int64_t rows, int64_t k, int64_t group, double* norms) {
  const int64_t groups = (k + group - 1) / group;
  const int64_t index = int64_t{blockIdx.x} * block_warps + threadIdx.x / 32;
  if (index >= rows * groups) return;
  const int64_t first = index % groups * group;
  const T* values = weight + index / groups * k + first;
  const double norm = cuda::warp_norm([&](int64_t i) { return widen(values[i]); }, min(group, k - first), group);
  if (threadIdx.x % 32 == 0) norms[index] = norm;
}

/// A warp for each block of 32: a lane finds the code of its weight, and votes give the bit planes.
template <class T>
__global__ void codes_kernel(const T* weight, int64_t rows, int64_t k, int64_t group, const float* norms,
                             Midpoints midpoints, int bits, uint32_t* words) {
  const int64_t blocks = (k + kbit_block - 1) / kbit_block, groups = (k + group - 1) / group;
  const int64_t index = int64_t{blockIdx.x} * block_warps + threadIdx.x / 32;
  if (index >= rows * blocks) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t row = index / blocks, col = index % blocks * kbit_block + lane;
  const bool inside = col < k;
  const float norm = norms[row * groups + min(col, k - 1) / group];
  const float value = inside ? widen(weight[row * k + col]) : 0.0f;
  const float x = norm == 0 ? 0.0f : __fdiv_rn(value, norm);
  uint32_t code = 0;
  for (int i = 0; i < midpoints.count; ++i) code += x > midpoints.values[i] ? 1u : 0u;
  if (!inside) code = 0;
  for (int bit = 0; bit < bits; ++bit) {
    const uint32_t plane = __ballot_sync(~0u, (code >> bit & 1u) != 0);
    if (lane == bit) words[index * bits + bit] = plane;
  }
}

unsigned grid(int64_t tasks) { return static_cast<unsigned>((tasks + block_warps - 1) / block_warps); }

/// Calls body(typed device pointer, first row, rows) for strips of the weight.
template <class Body>
void each_strip(const TensorView& weight, const device::Stream& stream, Body&& body) {
  const int64_t n = weight.shape[0];
  const auto row_size = static_cast<int64_t>(row_bytes(weight, 0).size());
  const int64_t rows = std::clamp<int64_t>(rotated_strip_bytes / std::max<int64_t>(row_size, 1), 1, n);
  device::DeviceBuffer buffer(stream.context(), static_cast<size_t>(rows * row_size));
  for (int64_t first = 0; first < n; first += rows) {
    const int64_t count = std::min(rows, n - first);
    const auto bytes =
        weight.bytes.subspan(static_cast<size_t>(first * row_size), static_cast<size_t>(count * row_size));
    device::copy(device::Way::to_gpu, buffer.data(), bytes.data(), bytes.size(), stream, "copying weights");
    switch (weight.dtype) {
      case DType::f16:
        body(buffer.as<__half>(), first, count);
        break;
      case DType::bf16:
        body(buffer.as<__nv_bfloat16>(), first, count);
        break;
      default:
        body(buffer.as<float>(), first, count);
    }
    device::check_launch("rotated quantizer", concat(count, " × ", weight.shape[1]));
    stream.synchronize();
  }
}

}  // namespace

std::vector<double> rotated_norms_cuda(const TensorView& weight, int64_t group, device::Context& gpu) {
  const int64_t n = weight.shape[0], k = weight.shape[1], groups = (k + group - 1) / group;
  std::vector<double> norms(static_cast<size_t>(n * groups));
  const device::Stream stream(gpu);
  device::DeviceBuffer result(gpu, norms.size() * sizeof(double));
  each_strip(weight, stream, [&](auto* values, int64_t first, int64_t rows) {
    norms_kernel<<<grid(rows * groups), block_warps * 32, 0, stream.get()>>>(values, rows, k, group,
                                                                             result.as<double>() + first * groups);
  });
  result.download(std::as_writable_bytes(std::span(norms)), stream);
  stream.synchronize();
  return norms;
}

void rotated_codes_cuda(const TensorView& weight, std::span<const float> norms, std::span<const float> midpoints,
                        formats::PackedWeight& packed, device::Context& gpu) {
  const int64_t k = packed.k, group = formats::rotated_group(packed.scheme, k);
  const int64_t groups = formats::rotated_groups(packed.scheme, k), blocks = formats::kbit_blocks(k);
  const int bits = packed.scheme.bits;
  Midpoints table{};
  table.count = static_cast<int>(midpoints.size());
  std::copy(midpoints.begin(), midpoints.end(), table.values);
  const device::Stream stream(gpu);
  const auto scales = device::DeviceBuffer::copy_of(std::as_bytes(norms), stream);
  Buffer& codes = packed.plane(PlaneRole::codes).bytes;
  device::DeviceBuffer words(gpu, codes.size());
  each_strip(weight, stream, [&](auto* values, int64_t first, int64_t rows) {
    codes_kernel<<<grid(rows * blocks), block_warps * 32, 0, stream.get()>>>(
        values, rows, k, group, scales.as<float>() + first * groups, table, bits,
        words.as<uint32_t>() + first * blocks * bits);
  });
  words.download(codes.bytes(), stream);
  stream.synchronize();
}

}  // namespace w4q::quantize
