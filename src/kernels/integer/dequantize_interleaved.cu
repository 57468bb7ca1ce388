// A thread decodes the 32 inputs of a block of one output: neighbouring threads have neighbouring outputs, and read 16
// bytes next to each other; each writes 64 bytes of a row.
#include "kernels/integer/dequantize_interleaved.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/alignment.h"
#include "kernels/common/dependent_launch.cuh"
#include "repack/layout_interleaved.h"

namespace w4q::kernels {
namespace {

constexpr int threads = 128;
constexpr int block_inputs = 32;

struct DecodeArgs {
  repack::InterleavedMap map;
  const uint4* codes;
  const __half* scales;
  const uint32_t* zeros;  ///< null: every zero point is 8
  int64_t first, count, k, block;
  unsigned short* out;
  int64_t stride;
  bool bf16, vectors;
};

__device__ __forceinline__ uint32_t halves_of(float low, float high, bool bf16) {
  const auto round = [&](float value) -> uint32_t {
    return bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(value)) : __half_as_ushort(__float2half_rn(value));
  };
  return round(low) | round(high) << 16;
}

__global__ void __launch_bounds__(threads) decode_kernel(DecodeArgs a) {
  const int64_t at = int64_t{blockIdx.x} * threads + threadIdx.x;
  const int64_t output = at % a.count, column = at / a.count;
  if (column * block_inputs >= a.k) return;
  const int64_t row = a.first + output, group = column * block_inputs / a.block;
  const uint4 words = __ldcs(a.codes + column * a.map.padded_rows + row);
  const float scale = __half2float(a.scales[a.map.scale(row, group)]);
  const auto zero_at = a.map.zero_bit(row, group, 0);
  const int zero = a.zeros == nullptr ? 8 : static_cast<int>(__ldg(a.zeros + zero_at.word) >> zero_at.bit & 15u);
  unsigned short* const to = a.out + output * a.stride + column * block_inputs;
  const uint32_t each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int low = static_cast<int>(each[w] >> 8 * j & 15u), high = static_cast<int>(each[w] >> (8 * j + 4) & 15u);
      pairs[j] = halves_of(static_cast<float>(low - zero) * scale, static_cast<float>(high - zero) * scale, a.bf16);
    }
    const int64_t left = a.k - column * block_inputs - 8 * w;
    if (a.vectors && left >= 8) {
      *reinterpret_cast<uint4*>(to + 8 * w) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      continue;
    }
    for (int j = 0; j < 8 && j < left; ++j) {
      to[8 * w + j] = static_cast<unsigned short>(pairs[j / 2] >> 16 * (j % 2));
    }
  }
}

}  // namespace

void dequantize_interleaved(const DevicePass& pass, int64_t first, int64_t count, const DeviceRows& out,
                            const device::Stream& stream) {
  const int64_t blocks = (pass.k + block_inputs - 1) / block_inputs;
  const DecodeArgs args{.map = {4, pass.n, pass.k, 0},
                        .codes = reinterpret_cast<const uint4*>(pass.codes),
                        .scales = static_cast<const __half*>(pass.scales),
                        .zeros = pass.zeros,
                        .first = first,
                        .count = count,
                        .k = pass.k,
                        .block = pass.scheme.block,
                        .out = static_cast<unsigned short*>(out.data),
                        .stride = out.stride,
                        .bf16 = out.dtype == DType::bf16,
                        .vectors = device::aligned(out.data, 16) && out.stride % 8 == 0};
  const auto grid = static_cast<unsigned>((count * blocks + threads - 1) / threads);
  launch<decode_kernel>({dim3(grid), threads, 0, false}, stream, "decoding interleaved weights", args);
}

}  // namespace w4q::kernels
