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

/// What prompts ask for: many rows of 16-bit values in whole blocks of 128. A block is half a warp's, 16 bytes of it a
/// lane's, and several rows of it come one after the other with the factors in registers.
namespace wide {

constexpr int block = 128, lane_values = 8, lanes = block / lane_values;
constexpr int block_pieces = 32 * warps / lanes, rows = 8, rows_at_once = 4;

__host__ bool takes(const RotateInputArgs& args) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return args.m >= rows && args.block == block && args.k % block == 0 && args.ldx % lane_values == 0 &&
         args.ldy % lane_values == 0 && aligned(args.x) && aligned(args.y) && aligned(args.second_y) &&
         aligned(args.factors) && aligned(args.second_factors) && aligned(args.input_scale);
}

__device__ void read(const float* from, float (&values)[lane_values]) {
  const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
  values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
  values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
}

/// As warp_hadamard, by distances from 1 to 64; a lane has neighbours.
__device__ __forceinline__ void hadamard(float (&values)[lane_values], int lane) {
#pragma unroll
  for (int distance = 1; distance < lane_values; distance *= 2) {
#pragma unroll
    for (int j = 0; j < lane_values; ++j) {
      if ((j & distance) != 0) continue;
      const float low = values[j], high = values[j + distance];
      values[j] = low + high;
      values[j + distance] = low - high;
    }
  }
#pragma unroll
  for (int distance = 1; distance < lanes; distance *= 2) {
#pragma unroll
    for (float& value : values) {
      const float other = __shfl_xor_sync(~0u, value, distance);
      value = (lane & distance) != 0 ? other - value : value + other;
    }
  }
}

template <class T, bool scaled>
__global__ void __launch_bounds__(32 * warps) rotate_input_wide_kernel(RotateInputArgs args) {
  device::trigger_dependent_launch();
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int64_t pieces = args.k / block;
  // Lanes without a block take part in shuffles with the last one's.
  const int64_t wanted = int64_t{blockIdx.x} * block_pieces + threadIdx.x / lanes;
  const int64_t column = min(wanted, pieces - 1) * block + lane * lane_values;
  float factors[lane_values], divisors[lane_values];
  read((blockIdx.z == 0 ? args.factors : args.second_factors) + column, factors);
  if constexpr (scaled) read(args.input_scale + column, divisors);
  device::wait_grid_dependency();
  const auto* const x = static_cast<const T*>(args.x) + column;
  auto* const y = static_cast<T*>(blockIdx.z == 0 ? args.y : args.second_y) + column;
  const int64_t first = int64_t{blockIdx.y} * rows, end = min(first + rows, args.m);
#pragma unroll 1
  for (int64_t row = first; row < end; row += rows_at_once) {
    uint4 in[rows_at_once];
#pragma unroll
    for (int i = 0; i < rows_at_once; ++i) {
      in[i] = *reinterpret_cast<const uint4*>(x + min(row + i, end - 1) * args.ldx);
    }
#pragma unroll
    for (int i = 0; i < rows_at_once; ++i) {
      const T* const own = reinterpret_cast<const T*>(&in[i]);
      float values[lane_values];
#pragma unroll
      for (int j = 0; j < lane_values; ++j) {
        values[j] = load(own + j);
        if constexpr (scaled) values[j] = values[j] / divisors[j];
        values[j] = values[j] * factors[j];
      }
      hadamard(values, lane);
      uint4 out;
#pragma unroll
      for (int j = 0; j < lane_values; ++j) store(reinterpret_cast<T*>(&out) + j, values[j]);
      if (wanted < pieces && row + i < end) *reinterpret_cast<uint4*>(y + (row + i) * args.ldy) = out;
    }
  }
}

template <class T>
void launch(const RotateInputArgs& args, const device::Stream& stream) {
  const auto across = static_cast<unsigned>((args.k / block + block_pieces - 1) / block_pieces);
  const auto down = static_cast<unsigned>((args.m + rows - 1) / rows);
  const LaunchShape shape{dim3(across, down, args.second_y == nullptr ? 1 : 2), 32 * warps, 0, args.overlap};
  if (args.input_scale == nullptr) {
    return kernels::launch<rotate_input_wide_kernel<T, false>>(shape, stream, "rotate_input", args);
  }
  kernels::launch<rotate_input_wide_kernel<T, true>>(shape, stream, "rotate_input", args);
}

}  // namespace wide

template <class T>
void launch(const RotateInputArgs& args, const device::Stream& stream) {
  if constexpr (sizeof(T) == 2) {
    if (wide::takes(args)) return wide::launch<T>(args, stream);
  }
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
