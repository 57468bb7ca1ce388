// A warp decodes a tile of 64 outputs × 64 inputs at a time. A lane has pairs of inputs of its rows; through shared
// memory they become 16 bytes of a row each. Reads 512 bytes a step, writes 128 bytes a row.
#include "kernels/integer/dequantize_marlin.h"

#include "core/text.h"
#include "device/check.h"
#include "kernels/integer/launch.cuh"
#include "kernels/linear/rows.h"

namespace w4q::kernels {
namespace integer {
namespace {

constexpr int warps = 4;
constexpr int row_words = 32 + 4;  ///< of a tile in shared memory: rows begin in different banks
constexpr int tile_bytes = 64 * row_words * 4;

struct DecodeArgs {
  MarlinLaunch weight;
  int64_t first, count;
  void* out;
  int64_t stride;
  bool vectors;  ///< rows of `out` begin on 16 bytes
};

/// The pairs of a tile to shared memory, [row][32 pairs].
template <int bits, class Type, bool with_zeros>
__device__ void decode_tile(const DecodeArgs& args, int n_tile, int column, uint32_t* tile) {
  const MarlinLaunch& w = args.weight;
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  WeightTile<bits> codes;
  WeightReader<bits>(w).load(codes, n_tile, column);
  const GroupReader<bits, with_zeros> reader(w);
  const int last_block = static_cast<int>((w.k - 1) / 32);
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    Group<bits, with_zeros> group;
    reader.load(group, n_tile, min(2 * column + block, last_block));
#pragma unroll
    for (int r = 0; r < frame::Map::row_tiles; ++r) {
      float scale[2] = {group.scale_pair(r, w.bf16_scales).x, group.scale_pair(r, w.bf16_scales).y};
      if (w.group_shift == one_group) {
        for (int half = 0; half < 2; ++half) scale[half] = output_scale(w, 64 * n_tile + 16 * r + 8 * half + g);
      }
#pragma unroll
      for (int step = 2 * block; step < 2 * block + 2; ++step) {
#pragma unroll
        for (int reg = 0; reg < 4; ++reg) {
          const int half = reg % 2;
          const uint32_t word = codes.register_bits(r, step, reg);
          constexpr uint32_t mask = (1u << bits) - 1;
          const float zero = group.zero_code(r, half);
          tile[(16 * r + 8 * half + g) * row_words + 8 * step + 4 * (reg / 2) + t] =
              Type::pack((static_cast<float>(word & mask) - zero) * scale[half],
                         (static_cast<float>(word >> 16 & mask) - zero) * scale[half]);
        }
      }
    }
  }
}

template <int bits, class Type, bool with_zeros>
__global__ void __launch_bounds__(warps * 32) decode_kernel(const DecodeArgs args) {
  extern __shared__ uint4 shared[];
  auto* const tile = reinterpret_cast<uint32_t*>(shared) + threadIdx.x / 32 * (64 * row_words);
  const int64_t groups = (args.count + 63) / 64;
  const int64_t task = static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
  if (task >= groups * args.weight.k_tiles) return;
  const int64_t n_tile = task % groups;
  const int column = static_cast<int>(task / groups);
  decode_tile<bits, Type, with_zeros>(args, static_cast<int>(args.first / 64 + n_tile), column, tile);
  __syncwarp();
  auto* const out = static_cast<unsigned short*>(args.out);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 16; ++i) {
    const int row = 4 * i + lane / 8;
    const int64_t output = 64 * n_tile + row;
    const int64_t input = int64_t{64} * column + 8 * (lane % 8);
    if (output >= args.count) break;
    const uint32_t* const from = tile + row * row_words + 4 * (lane % 8);
    unsigned short* const to = out + output * args.stride;
    if (args.vectors && args.weight.order == nullptr && input + 8 <= args.weight.k) {
      *reinterpret_cast<uint4*>(to + input) = *reinterpret_cast<const uint4*>(from);
      continue;
    }
    for (int j = 0; j < 8 && input + j < args.weight.k; ++j) {
      const int64_t at = args.weight.order == nullptr ? input + j : __ldg(args.weight.order + input + j);
      to[at] = static_cast<unsigned short>(from[j / 2] >> (16 * (j % 2)));
    }
  }
}

}  // namespace
}  // namespace integer

void dequantize_marlin(const DevicePass& weight, int64_t first, int64_t count, const DeviceRows& out,
                       const device::Stream& stream) {
  LinearArgs layer;
  layer.passes = {&weight, 1};
  const bool vectors = aligned(out.data, 16) && out.stride % 8 == 0;
  const integer::DecodeArgs args{prepare_marlin(layer), first, count, out.data, out.stride, vectors};
  const int64_t tasks = (count + 63) / 64 * args.weight.k_tiles;
  const auto blocks = static_cast<unsigned>((tasks + integer::warps - 1) / integer::warps);
  integer::with_types(args.weight, weight.scheme.bits, out.dtype, [&]<int bits, class Type, bool with_zeros>() {
    integer::decode_kernel<bits, Type, with_zeros>
        <<<blocks, integer::warps * 32, integer::warps * integer::tile_bytes, stream.get()>>>(args);
  });
  device::check_launch("dequantize_marlin", concat(to_string(weight.scheme), ", ", weight.n, " × ", weight.k));
}

}  // namespace w4q::kernels
