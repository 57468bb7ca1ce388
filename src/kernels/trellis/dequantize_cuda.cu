#include "kernels/trellis/dequantize.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/text.h"
#include "device/alignment.h"
#include "device/check.h"
#include "kernels/trellis/launch.cuh"

namespace w4q::kernels::trellis {
namespace {

constexpr int warps = 4;

struct DecodeArguments {
  const uint4* codes;
  const __half* scales;
  float unit;
  uint32_t mask;
  int64_t k, first, past;  ///< rows
  int64_t first_tile, tiles, col_groups;
  void* out;
  int64_t stride;
  bool vectors;  ///< rows begin on 16 bytes
};

__device__ void narrow(float value, float& to) { to = value; }
__device__ void narrow(float value, __half& to) { to = __float2half_rn(value); }
__device__ void narrow(float value, __nv_bfloat16& to) { to = __float2bfloat16_rn(value); }

/// Eight neighbours of a row, of which `left` exist.
template <class T>
struct alignas(16) Eight {
  T values[8];

  __device__ __forceinline__ void store(T* to, int left, bool vectors) const {
    if (vectors && left >= 8) {
      constexpr int vectors_of = static_cast<int>(sizeof(Eight) / sizeof(uint4));
#pragma unroll
      for (int i = 0; i < vectors_of; ++i) {
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(values)[i];
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < left) to[i] = values[i];
    }
  }
};

/// A warp takes a tile of 128 × 64: a lane 16 rows × 16 columns, eight columns at a time.
template <class T, class Codes>
__global__ void __launch_bounds__(warps * 32) decode_tiles(const DecodeArguments args) {
  constexpr int bits = Codes::bits;
  const int64_t at = int64_t{blockIdx.x} * warps + threadIdx.x / 32;
  if (at >= args.tiles) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t tile = args.first_tile + at;
  uint4 quads[Codes::quads];
#pragma unroll
  for (int j = 0; j < Codes::quads; ++j) quads[j] = __ldcs(args.codes + (tile * Codes::quads + j) * Map::lanes + lane);
  const auto word = [&](int w) {
    const uint4& quad = quads[w / 4];
    return w % 4 == 0 ? quad.x : w % 4 == 1 ? quad.y : w % 4 == 2 ? quad.z : quad.w;
  };
  const int64_t row = tile / args.col_groups * Map::tile_rows + 16 * (lane / 4);
  const int64_t column = tile % args.col_groups * Map::tile_cols + 16 * (lane % 4);
  unroll<2>([&]<int half>() {
    uint32_t from[4][bits];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int w = 0; w < bits; ++w) from[i][w] = word((4 * half + i) * bits + w);
    }
    const ColumnPair<Codes> pairs[4] = {ColumnPair<Codes>(from[0]), ColumnPair<Codes>(from[1]),
                                        ColumnPair<Codes>(from[2]), ColumnPair<Codes>(from[3])};
    const int left = static_cast<int>(min(int64_t{8}, args.k - column - 8 * half));
    T* const to = static_cast<T*>(args.out) + (row - args.first) * args.stride + column + 8 * half;
    unroll<16>([&]<int r>() {
      if (row + r < args.first || row + r >= args.past || left <= 0) return;
      const float scale = __half2float(__ldg(args.scales + row + r));
      Eight<T> values;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        // The sum of a product's bytes on top of 2^23, as an f32.
        const uint32_t sum = __dp4a(pairs[c / 2].template product<r>(c % 2, args.mask), 0x01010101u, 0x4B000000u);
        const float level = __uint_as_float(sum) - (8388608.0f + formats::trellis_largest_level);
        narrow(__fmul_rn(__fmul_rn(level, args.unit), scale), values.values[c]);
      }
      values.store(to + r * args.stride, left, args.vectors);
    });
  });
}

template <class T>
void launch_decoding(const DecodeArguments& args, const formats::Scheme& scheme, const device::Stream& stream) {
  const auto blocks = static_cast<unsigned>((args.tiles + warps - 1) / warps);
  with_codes(scheme, [&]<class Codes>() {
    launch<decode_tiles<T, Codes>>(LaunchShape{dim3(blocks), warps * 32, 0}, stream, "dequantize", args);
  });
}

}  // namespace

void dequantize(const DeviceTrellis& weight, int64_t first, int64_t count, const DeviceRows& out,
                const device::Stream& stream) {
  const Map map(weight.n, weight.k);
  const int64_t strip = first / Map::tile_rows, past_strip = (first + count + Map::tile_rows - 1) / Map::tile_rows;
  const int element = dtype_bits(out.dtype) / 8;
  const DecodeArguments args{.codes = reinterpret_cast<const uint4*>(weight.codes),
                             .scales = static_cast<const __half*>(weight.scales),
                             .unit = weight.unit,
                             .mask = (1u << weight.scheme.window) - 1,
                             .k = weight.k,
                             .first = first,
                             .past = first + count,
                             .first_tile = strip * map.col_groups,
                             .tiles = (past_strip - strip) * map.col_groups,
                             .col_groups = map.col_groups,
                             .out = out.data,
                             .stride = out.stride,
                             .vectors = device::aligned(out.data, 16) && out.stride * element % 16 == 0};
  if (out.dtype == DType::f32) {
    launch_decoding<float>(args, weight.scheme, stream);
  } else if (out.dtype == DType::f16) {
    launch_decoding<__half>(args, weight.scheme, stream);
  } else {
    launch_decoding<__nv_bfloat16>(args, weight.scheme, stream);
  }
  device::check_launch("dequantize", concat(to_string(weight.scheme), ", ", count, " × ", weight.k));
}

}  // namespace w4q::kernels::trellis
