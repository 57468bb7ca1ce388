#include "kernels/trellis/dequantize.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

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

/// Two neighbours of a row as the bits of T, the first one low: a word, or two of f32.
template <class T>
struct Two {
  uint32_t words[sizeof(T) / 2];
};

/// Weights in f32, rounded once: any type, any unit.
template <class T>
struct FloatWeights {
  float unit;

  __device__ explicit FloatWeights(float unit_) : unit(unit_) {}
  /// From the products that they are the sums of the bytes of.
  __device__ __forceinline__ Two<T> pair(uint32_t first, uint32_t second, __half scale) const {
    const float low = weight(first, scale), high = weight(second, scale);
    if constexpr (sizeof(T) == 4)
      return {{__float_as_uint(low), __float_as_uint(high)}};
    else
      return {{bits(low) | bits(high) << 16}};
  }

 private:
  __device__ __forceinline__ float weight(uint32_t product, __half scale) const {
    // The sum of a product's bytes on top of 2^23, as an f32.
    const uint32_t sum = __dp4a(product, 0x01010101u, 0x4B000000u);
    const float level = __uint_as_float(sum) - (8388608.0f + formats::trellis_largest_level);
    return __fmul_rn(__fmul_rn(level, unit), __half2float(scale));
  }
  __device__ static uint32_t bits(float value) {
    if constexpr (std::is_same_v<T, __half>)
      return __half_as_ushort(__float2half_rn(value));
    else
      return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
};

/// Weights in f16, two at once: a level times a unit that is a power of two is a number of f16, so that the product with
/// the scale is the only rounding here, too.
struct HalfWeights {
  __half2 unit, middle;  ///< middle = −(1024 + largest level) · unit

  static bool exact(float unit) {
    int exponent = 0;
    return std::frexp(unit, &exponent) == 0.5f && exponent >= -13 && exponent <= 6;  // u = 2^−14 … 2^5
  }
  __device__ explicit HalfWeights(float unit_)
      : unit(__float2half2_rn(unit_)), middle(__float2half2_rn(-(1024.0f + formats::trellis_largest_level) * unit_)) {}
  __device__ __forceinline__ Two<__half> pair(uint32_t first, uint32_t second, __half scale) const {
    // The sums of bytes on top of the bits of 1024 in f16.
    const uint32_t low = __dp4a(first, 0x01010101u, 0x6400u), high = __dp4a(second, 0x01010101u, 0x6400u);
    const __half2 sums = __halves2half2(__ushort_as_half(static_cast<unsigned short>(low)),
                                        __ushort_as_half(static_cast<unsigned short>(high)));
    const __half2 values = __hmul2(__hfma2(sums, unit, middle), __half2half2(scale));
    return {{__half_as_ushort(__low2half(values)) | uint32_t{__half_as_ushort(__high2half(values))} << 16}};
  }
};

/// Sixteen neighbours of a row, as bits.
template <class T>
struct Sixteen {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, unsigned short>;
  static constexpr int vectors = static_cast<int>(sizeof(T));  ///< of 16 bytes
  static constexpr int in_vector = 16 / vectors;
  uint32_t words[4 * vectors];

  /// By a whole warp: the two lanes of a pair have 32 neighbours, the even one the first half. Each store of the two
  /// writes 32 bytes in one piece, for half a sector takes as long as a whole one. `to`: the pair's first element, of
  /// which `left` exist; none where it is null.
  __device__ __forceinline__ void store_as_pair(T* to, int left, bool aligned) const {
    const bool odd = threadIdx.x % 2 != 0;
#pragma unroll
    for (int j = 0; j < vectors; j += 2) {
      const uint4 first = vector(j), second = vector(j + 1);
      const uint4 other = exchange(choose(odd, first, second));
      const int at = (j + (odd ? 1 : 0)) * in_vector;
      store(choose(odd, other, first), to, at, left, aligned);
      store(choose(odd, second, other), to, 16 + at, left, aligned);
    }
  }

 private:
  __device__ __forceinline__ uint4 vector(int i) const {
    return {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
  }
  /// Word by word: the choice between two variables would be one between their addresses.
  __device__ __forceinline__ static uint4 choose(bool first, const uint4& a, const uint4& b) {
    return {first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w};
  }
  __device__ __forceinline__ static uint4 exchange(const uint4& mine) {
    const auto swap = [](uint32_t word) { return __shfl_xor_sync(0xFFFFFFFFu, word, 1); };
    return {swap(mine.x), swap(mine.y), swap(mine.z), swap(mine.w)};
  }
  __device__ __forceinline__ static void store(const uint4& vector, T* to, int at, int left, bool aligned) {
    if (to == nullptr || at >= left) return;
    if (aligned && at + in_vector <= left) {
      *reinterpret_cast<uint4*>(to + at) = vector;
      return;
    }
    constexpr int in_word = in_vector / 4;
    unroll<in_vector>([&]<int i>() {
      constexpr int word = i / in_word;
      const uint32_t from = word == 0 ? vector.x : word == 1 ? vector.y : word == 2 ? vector.z : vector.w;
      if (at + i < left) reinterpret_cast<Bits*>(to)[at + i] = static_cast<Bits>(from >> (i % in_word * 16));
    });
  }
};

/// A warp takes a tile of 128 × 64: a lane 16 rows × 16 columns, a row at a time.
template <class T, class Codes, class Weights>
__global__ void __launch_bounds__(warps * 32) decode_tiles(const DecodeArguments args) {
  constexpr int bits = Codes::bits, column_pairs = Map::lane_cols / 2;
  const int64_t at = int64_t{blockIdx.x} * warps + threadIdx.x / 32;
  if (at >= args.tiles) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t tile = args.first_tile + at;
  uint32_t words[Codes::quads * 4];
#pragma unroll
  for (int j = 0; j < Codes::quads; ++j) {
    const uint4 quad = __ldcs(args.codes + (tile * Codes::quads + j) * Map::lanes + lane);
    words[4 * j] = quad.x, words[4 * j + 1] = quad.y, words[4 * j + 2] = quad.z, words[4 * j + 3] = quad.w;
  }
  const auto pair = [&](int i) {
    return ColumnPair<Codes>(reinterpret_cast<const uint32_t(&)[bits]>(words[i * bits]));
  };
  const ColumnPair<Codes> pairs[column_pairs] = {pair(0), pair(1), pair(2), pair(3),
                                                 pair(4), pair(5), pair(6), pair(7)};
  const int64_t row = tile / args.col_groups * Map::tile_rows + Map::lane_rows * (lane / 4);
  const int64_t column = tile % args.col_groups * Map::tile_cols + 2 * Map::lane_cols * (lane % 4 / 2);  // the pair's
  const int left = static_cast<int>(min(int64_t{2 * Map::lane_cols}, args.k - column));
  T* const to = static_cast<T*>(args.out) + (row - args.first) * args.stride + column;
  const Weights weights(args.unit);
  unroll<Map::lane_rows>([&]<int r>() {
    const bool exists = row + r >= args.first && row + r < args.past;
    const __half scale = exists ? __ldg(args.scales + row + r) : __half(0.0f);
    Sixteen<T> values;
#pragma unroll
    for (int i = 0; i < column_pairs; ++i) {
      const Two<T> two =
          weights.pair(pairs[i].template product<r>(0, args.mask), pairs[i].template product<r>(1, args.mask), scale);
#pragma unroll
      for (int w = 0; w < Sixteen<T>::vectors / 2; ++w) values.words[Sixteen<T>::vectors / 2 * i + w] = two.words[w];
    }
    values.store_as_pair(exists ? to + r * args.stride : nullptr, left, args.vectors);
  });
}

template <class T, class Weights>
void launch_decoding(const DecodeArguments& args, const formats::Scheme& scheme, const device::Stream& stream) {
  const auto blocks = static_cast<unsigned>((args.tiles + warps - 1) / warps);
  with_codes(scheme, [&]<class Codes>() {
    launch<decode_tiles<T, Codes, Weights>>(LaunchShape{dim3(blocks), warps * 32, 0}, stream, "dequantize", args);
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
    launch_decoding<float, FloatWeights<float>>(args, weight.scheme, stream);
  } else if (out.dtype == DType::bf16) {
    launch_decoding<__nv_bfloat16, FloatWeights<__nv_bfloat16>>(args, weight.scheme, stream);
  } else if (HalfWeights::exact(weight.unit)) {
    launch_decoding<__half, HalfWeights>(args, weight.scheme, stream);
  } else {
    launch_decoding<__half, FloatWeights<__half>>(args, weight.scheme, stream);
  }
  device::check_launch("dequantize", concat(to_string(weight.scheme), ", ", count, " × ", weight.k));
}

}  // namespace w4q::kernels::trellis
