#include <type_traits>

#include "device/alignment.h"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/dequantize/pairs.cuh"
#include "kernels/small_float/dequantize.h"
#include "kernels/small_float/launch.cuh"

namespace w4q::kernels::small_float {
namespace {

using dequantizing::block_threads;
using dequantizing::block_warps;
using dequantizing::OutputRows;

struct Arguments {
  int64_t tiles, k_tiles;
  const uint32_t* codes;
  const char* scales;
  const float* factors;
  OutputRows out;
};

__device__ __forceinline__ float half_bits(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

/// E2M1 shifted into an f16 reads value · 2^-14, E4M3 value · 2^-8.
template <int bits>
__device__ __forceinline__ float value_of(uint32_t code) {
  if constexpr (bits == 4) return half_bits((code & 8u) << 12 | (code & 7u) << 9) * 0x1p14f;
  return half_bits((code & 0x80u) << 8 | (code & 0x7Fu) << 7) * 0x1p8f;
}

/// A lane's scale of a block and half of a row tile.
template <class Scales>
__device__ __forceinline__ float scale_of(const typename Scales::Packed& packed, int block, int row_tile, int half) {
  if constexpr (std::is_same_v<Scales, E4m3Scales>) {
    return half_bits((E4m3Scales::halves(packed, block, row_tile) >> 8 * half & 0xFFu) << 7) * E4m3Scales::divisor;
  } else {
    const float2 both = Scales::pair_of_sums(packed, block, row_tile);
    return half == 0 ? both.x : both.y;
  }
}

/// A warp takes a tile; neighbours take neighbouring ones along k.
template <class T, int bits, class Scales>
__global__ void __launch_bounds__(block_threads, dequantizing::residency) dequantize_floats(Arguments a) {
  const int64_t tile = int64_t{blockIdx.x} * block_warps + threadIdx.x / 32;
  if (tile >= a.tiles) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  kbit::WeightTile<bits> codes;
  typename Scales::Packed scales;
  const kbit::WeightReader<bits, Scales> reader(a.codes, a.scales);
  reader.load(codes, tile);
  reader.load(scales, tile);
  const int64_t first_row = tile / a.k_tiles * Map::tile_rows + lane / 4;
  const int64_t column = tile % a.k_tiles * Map::tile_cols + 8 * (lane % 4);
#pragma unroll
  for (int r = 0; r < Map::row_tiles; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = first_row + 16 * r + 8 * half;
      const float factor = a.factors != nullptr && row < a.out.n ? __ldg(a.factors + row) : 1.0f;
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const float scale = __fmul_rn(scale_of<Scales>(scales, block, r, half), factor);
        float values[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int bit = (4 * (2 * block + j / 4) + 2 * (j / 2 % 2) + half) * 2 * bits + j % 2 * bits;
          values[j] = __fmul_rn(value_of<bits>(codes.word(r * bits + bit / 32) >> bit % 32), scale);
        }
        T* const to = static_cast<T*>(a.out.data) + row * a.out.stride + column + 32 * block;
        dequantizing::store_eight(to, a.out.left(row, column + 32 * block), a.out.vectors, values, lane);
      }
    }
  }
}

template <class T>
void launch_rows(const formats::Scheme& scheme, const Arguments& arguments, const device::Stream& stream) {
  const LaunchShape shape{dim3(static_cast<unsigned>((arguments.tiles + block_warps - 1) / block_warps)), block_threads,
                          0};
  with_scheme(scheme, [&]<int bits, class Scales>() {
    launch(dequantize_floats<T, bits, Scales>, shape, stream, "dequantize floats", arguments);
  });
}

}  // namespace

void dequantize(const DeviceFloats& weight, int64_t first, int64_t count, const DeviceRows& out,
                const device::Stream& stream) {
  const Map whole(weight.n, weight.k), part(count, weight.k);
  const int64_t before = whole.tile(first, 0);
  const auto* scales = static_cast<const char*>(weight.scales);
  with_scheme(weight.scheme,
              [&]<int, class Scales>() { scales += before * (32 / kbit::sharers<Scales> * Scales::bytes_per_lane); });
  const int element = dtype_bits(out.dtype) / 8;
  const bool vectors = device::aligned(out.data, 16) && (out.stride * element % 16 == 0 || count == 1);
  const Arguments arguments{part.tiles(),
                            part.col_groups,
                            weight.codes + before * Map::tile_words(weight.scheme.bits),
                            scales,
                            weight.output_factors != nullptr ? weight.output_factors + first : nullptr,
                            {out.data, count, weight.k, out.stride, vectors}};
  if (out.dtype == DType::f32) return launch_rows<float>(weight.scheme, arguments, stream);
  ensure(out.dtype == DType::f16, "small floats are decoded to f32 or f16");
  launch_rows<__half>(weight.scheme, arguments, stream);
}

}  // namespace w4q::kernels::small_float
