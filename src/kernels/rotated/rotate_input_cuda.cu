#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>

#include "core/error.h"
#include "core/text.h"
#include "device/fragment.cuh"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/hadamard.cuh"
#include "kernels/rotated/rotate_input.h"

namespace w4q::kernels {
namespace {

constexpr int warps = 4;

__device__ float load(const float* p) { return *p; }
__device__ float load(const __half* p) { return __half2float(*p); }
__device__ float load(const __nv_bfloat16* p) { return __bfloat162float(*p); }
__device__ void store(float* p, float v) { *p = v; }
__device__ void store(__half* p, float v) { *p = __float2half_rn(v); }
__device__ void store(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }

/// The pieces of what lies behind the last whole block: descending powers of two, by one warp.
template <int Values, class T>
__device__ void rotate_piece(const RotateInputArgs& args, int64_t row, int64_t start, int width) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const T* x = static_cast<const T*>(args.x) + row * args.ldx + start;
  const float* const factors = (blockIdx.y == 0 ? args.factors : args.second_factors) + start;
  T* y = static_cast<T*>(blockIdx.y == 0 ? args.y : args.second_y) + row * args.ldy + start;
  float values[Values];
#pragma unroll
  for (int j = 0; j < Values; ++j) {
    const int i = lane + 32 * j;
    values[j] = 0;
    if (i >= width) continue;
    values[j] = load(x + i);
    if (args.input_scale != nullptr) values[j] = values[j] / args.input_scale[start + i];
    values[j] = values[j] * factors[i];
  }
  warp_hadamard(values, lane, width);
#pragma unroll
  for (int j = 0; j < Values; ++j) {
    const int i = lane + 32 * j;
    if (i < width) store(y + i, values[j]);
  }
}

/// A warp for each whole block of a row, and one more for its tail; the grid has a layer for each rotation.
template <int Values, class T>
__global__ void rotate_input_kernel(RotateInputArgs args) {
  device::trigger_dependent_launch();
  device::wait_grid_dependency();
  const int64_t whole = args.k / args.block, tail = args.k % args.block;
  const int64_t pieces = whole + (tail != 0 ? 1 : 0);
  const int64_t index = int64_t{blockIdx.x} * warps + threadIdx.x / 32;
  if (index >= args.m * pieces) return;
  const int64_t row = index / pieces, piece = index % pieces;
  if (piece < whole) {
    return rotate_piece<Values, T>(args, row, piece * args.block, static_cast<int>(args.block));
  }
  int64_t start = whole * args.block;
  while (start < args.k) {
    const int width = 1 << (31 - __clz(static_cast<int>(args.k - start)));
    rotate_piece<Values, T>(args, row, start, width);
    start += width;
  }
}

template <class T>
void launch(const RotateInputArgs& args, const device::Stream& stream) {
  const int64_t pieces = (args.k + args.block - 1) / args.block;
  const auto blocks = static_cast<unsigned>((args.m * pieces + warps - 1) / warps);
  const LaunchShape shape{dim3(blocks, args.second_y == nullptr ? 1 : 2), warps * 32, 0, args.overlap};
  if (args.block <= 128) return kernels::launch<rotate_input_kernel<4, T>>(shape, stream, "rotate_input", args);
  kernels::launch<rotate_input_kernel<32, T>>(shape, stream, "rotate_input", args);
}

void require(bool holds, std::string_view what) {
  if (!holds) throw Error(ErrorCode::bad_argument, concat("rotate_input: ", what));
}

}  // namespace

void rotate_input(const RotateInputArgs& args, const device::Stream& stream) {
  require(args.m >= 1 && args.k >= 1 && args.k <= int64_t{1} << 30 && args.m <= int64_t{1} << 24, "sizes out of range");
  require(
      args.block >= 2 && args.block <= rotate_input_max_block && std::has_single_bit(static_cast<uint64_t>(args.block)),
      "the block must be a power of two from 2 to 1024");
  require(args.ldx >= args.k && args.ldy >= args.k, "rows overlap");
  require((args.second_y == nullptr) == (args.second_factors == nullptr), "half a second rotation");
  require(args.x != nullptr && args.y != nullptr && args.factors != nullptr, "a pointer is null");
  switch (args.activation) {
    case DType::f32:
      return launch<float>(args, stream);
    case DType::f16:
      return launch<__half>(args, stream);
    case DType::bf16:
      return launch<__nv_bfloat16>(args, stream);
    default:
      require(false, "activations must be f32, f16 or bf16");
  }
}

}  // namespace w4q::kernels
