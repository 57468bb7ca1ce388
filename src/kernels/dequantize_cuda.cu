#include "kernels/dequantize_cuda.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "formats/kbit.h"
#include "repack/layout_kbit_tile.h"

namespace w4q::kernels {
namespace {

using formats::ScaleType;

// A warp decodes 32 neighbouring blocks of a row, 8 of them in each of 4 rounds. Lane 4·b + q owns weights 8q … 8q+7 of
// block 8i + b: it loads plane word q, gets byte q of all planes by a 4 × 4 byte transpose among the four lanes of the
// block, and turns four bytes of planes into eight codes by two delta swaps of bits. The table stands in the registers
// of the warp, entry l mod 2^bits in lane l, so that a lookup is one shuffle, whose lane number needs no masking: the
// bits above a code only choose among copies of the table.
constexpr unsigned all_lanes = 0xFFFFFFFFu;
constexpr int block_threads = 256;
constexpr int block_rows = block_threads / 32;  ///< a row to a warp
constexpr int warp_blocks = 32;
constexpr int rounds = 4;

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

/// Lane q of four gives word q and gets byte q of the four words.
__device__ __forceinline__ uint32_t transpose(uint32_t word, int lane) {
  const uint32_t beside = __shfl_xor_sync(all_lanes, word, 1);
  const uint32_t halves = permute(word, beside, (lane & 1) != 0 ? 0x3715 : 0x6240);
  const uint32_t across = __shfl_xor_sync(all_lanes, halves, 2);
  return permute(halves, across, (lane & 2) != 0 ? 0x3276 : 0x5410);
}

/// Exchanges bits whose index has bit a = 0, bit b = 1 with those that have a = 1, b = 0; shift = 2^a − 2^b.
__device__ __forceinline__ uint32_t delta_swap(uint32_t x, int shift, uint32_t mask) {
  const uint32_t differ = ((x >> shift) ^ x) & mask;
  return x ^ differ ^ (differ << shift);
}

/// Bit j of byte p goes to bit p of a nibble: nibble 2·(j mod 4) + j div 4.
__device__ __forceinline__ uint32_t codes_of_planes(uint32_t bytes) {
  return delta_swap(delta_swap(bytes, 14, 0x0000CCCCu), 7, 0x00AA00AAu);
}

/// Where the blocks of a row stand.
struct CanonicalMap {
  int64_t blocks;
  __device__ int64_t slot(int64_t row, int64_t block) const { return row * blocks + block; }
};

template <class Map>
struct Arguments {
  Map map;
  const uint32_t* codes;
  const void* scales;
  const float* codebook;
  bool e4m4;
  int64_t n;
  int64_t k;
  void* out;
  int64_t stride;
  bool vectors;  ///< rows start on 16 bytes
};

/// Shifted into a half, an E4M4 byte is its value over 16, subnormals included: no branch.
template <class Map>
__device__ __forceinline__ float load_scale(const Arguments<Map>& a, int64_t slot) {
  const uint32_t raw = a.e4m4 ? static_cast<uint32_t>(static_cast<const uint8_t*>(a.scales)[slot]) << 6
                              : static_cast<const uint16_t*>(a.scales)[slot];
  const float value = __half2float(__ushort_as_half(static_cast<unsigned short>(raw)));
  return a.e4m4 ? value * 16.0f : value;
}

/// A lane's eight codes: the low four bits as nibbles in the order of codes_of_planes, bit 4 of code j as bit j.
struct LaneCodes {
  uint32_t nibbles;
  uint32_t fifth;
};

/// The codes of a lane's weights in a block; zero where `exists` is false.
template <int Bits>
__device__ __forceinline__ LaneCodes load_codes(const uint32_t* codes, int64_t slot, bool exists, int lane) {
  const int plane = lane & 3;
  const uint32_t* const words = codes + slot * Bits;
  const uint32_t word = exists && plane < Bits ? __ldcs(words + plane) : 0;
  uint32_t fifth = 0;
  if constexpr (Bits == 5) fifth = exists ? __ldcs(words + 4) >> (8 * plane) & 0xFFu : 0;
  return {codes_of_planes(transpose(word, lane)), fifth};
}

/// Table entry of weight j of eight.
template <int Bits>
__device__ __forceinline__ float look_up(float table, LaneCodes codes, int j) {
  uint32_t index = codes.nibbles >> (4 * (2 * (j & 3) + (j >> 2)));
  if constexpr (Bits == 5) index = (index & 0xFu) | (codes.fifth >> j & 1u) << 4;
  return __shfl_sync(all_lanes, table, static_cast<int>(index));
}

template <class T>
struct Output;
template <>
struct Output<__half> {
  static __device__ uint32_t pair(float a, float b) {
    const __half2 value = __floats2half2_rn(a, b);
    return static_cast<uint32_t>(__half_as_ushort(value.x)) | static_cast<uint32_t>(__half_as_ushort(value.y)) << 16;
  }
};
template <>
struct Output<__nv_bfloat16> {
  static __device__ uint32_t pair(float a, float b) {
    const __nv_bfloat162 value = __floats2bfloat162_rn(a, b);
    return static_cast<uint32_t>(__bfloat16_as_ushort(value.x)) | static_cast<uint32_t>(__bfloat16_as_ushort(value.y))
                                                                      << 16;
  }
};

/// 16 bytes to `to`, or only the first `count` elements of them.
template <class Element>
__device__ __forceinline__ void store(Element* to, const uint32_t (&words)[4], int count, bool vectors) {
  constexpr int each = 4 / sizeof(Element);
  constexpr int full = 4 * each;
  if (vectors && count >= full) {
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(words[0], words[1], words[2], words[3]));
    return;
  }
#pragma unroll
  for (int i = 0; i < full; ++i) {
    if (i < count) to[i] = static_cast<Element>(words[i / each] >> (8 * sizeof(Element) * (i % each)));
  }
}

/// Elements of a row from `column` on, as far as they exist.
__device__ __forceinline__ int remaining(int64_t k, int64_t column) {
  return static_cast<int>(min(int64_t{8}, max(int64_t{0}, k - column)));
}

/// Eight 16-bit weights a lane: one store of 16 bytes, 512 neighbouring bytes a warp.
template <class T, int Bits, class Map>
__device__ __forceinline__ void decode_round(const Arguments<Map>& a, int64_t row, int64_t block, LaneCodes codes,
                                             float table, float scales, int round, bool row_exists, int lane) {
  const float scale = __shfl_sync(all_lanes, scales, (lane & 28) | round);
  uint32_t words[4];
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = __fmul_rn(look_up<Bits>(table, codes, 2 * i), scale);
      const float high = __fmul_rn(look_up<Bits>(table, codes, 2 * i + 1), scale);
      words[i] = Output<T>::pair(low, high);
    }
    const int64_t column = (block + 8 * round + lane / 4) * 32 + 8 * (lane & 3);
    store(static_cast<uint16_t*>(a.out) + row * a.stride + column, words, row_exists ? remaining(a.k, column) : 0,
          a.vectors);
  } else {
    // Four weights a lane and step, eight lanes a block, so that a warp's store is 512 neighbouring bytes here too:
    // lane l takes half l mod 2 of the codes that lane 16·step + l div 2 holds.
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int owner = 16 * step + lane / 2;
      const int half = lane & 1;
      LaneCodes theirs;
      theirs.nibbles = __shfl_sync(all_lanes, codes.nibbles, owner) >> (4 * half);
      theirs.fifth = Bits == 5 ? __shfl_sync(all_lanes, codes.fifth, owner) >> (4 * half) : 0;
      const float factor = __shfl_sync(all_lanes, scale, owner);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = __float_as_uint(__fmul_rn(look_up<Bits>(table, theirs, i), factor));
      }
      const int64_t column = (block + 8 * round) * 32 + 128 * step + 4 * lane;
      store(static_cast<uint32_t*>(a.out) + row * a.stride + column, words, row_exists ? remaining(a.k, column) : 0,
            a.vectors);
    }
  }
}

template <class T, int Bits, class Map>
__device__ __forceinline__ void decode_task(const Arguments<Map>& a, int64_t row, int64_t block, float table,
                                            int lane) {
  const bool row_exists = row < a.n;
  const int64_t blocks = (a.k + 31) / 32;
  const int count = static_cast<int>(min(int64_t{warp_blocks}, blocks - block));
  LaneCodes codes[rounds];
#pragma unroll
  for (int i = 0; i < rounds; ++i) {
    const int mine = 8 * i + lane / 4;
    codes[i] = load_codes<Bits>(a.codes, a.map.slot(row, block + mine), row_exists && mine < count, lane);
  }
  // The scale of block 8q + b: one load a lane serves the four rounds.
  const int own = 8 * (lane & 3) + lane / 4;
  const float scales = row_exists && own < count ? load_scale(a, a.map.slot(row, block + own)) : 0.0f;
#pragma unroll
  for (int i = 0; i < rounds; ++i) {
    if (8 * i >= count) break;
    decode_round<T, Bits>(a, row, block, codes[i], table, scales, i, row_exists, lane);
  }
}

template <class T, int Bits, class Map>
__global__ void __launch_bounds__(block_threads) dequantize(Arguments<Map> a) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const float table = a.codebook[lane & ((1 << Bits) - 1)];
  const int64_t blocks = (a.k + 31) / 32;
  // The loops are the same for all warps, of which the last ones may have no row: shuffles in them need no guard.
  for (int64_t first = int64_t{blockIdx.y} * block_rows; first < a.n; first += int64_t{gridDim.y} * block_rows) {
    for (int64_t block = int64_t{blockIdx.x} * warp_blocks; block < blocks; block += int64_t{gridDim.x} * warp_blocks) {
      decode_task<T, Bits>(a, first + warp, block, table, lane);
    }
  }
}

template <class T, class Map>
void launch(int bits, const Arguments<Map>& arguments, cudaStream_t stream) {
  constexpr int64_t most_x = (int64_t{1} << 31) - 1;
  constexpr int64_t most_y = 65535;
  const int64_t groups = (formats::kbit_blocks(arguments.k) + warp_blocks - 1) / warp_blocks;
  const int64_t strips = (arguments.n + block_rows - 1) / block_rows;
  const dim3 grid(static_cast<unsigned>(std::min(groups, most_x)), static_cast<unsigned>(std::min(strips, most_y)));
  const auto kernel = bits == 2   ? dequantize<T, 2, Map>
                      : bits == 3 ? dequantize<T, 3, Map>
                      : bits == 4 ? dequantize<T, 4, Map>
                                  : dequantize<T, 5, Map>;
  kernel<<<grid, block_threads, 0, stream>>>(arguments);
}

template <class Map>
void launch_type(const Map& map, const PackedDeviceWeight& weight, const DeviceRows& out, cudaStream_t stream) {
  const int element = dtype_bits(out.dtype) / 8;
  const bool vectors =
      reinterpret_cast<uintptr_t>(out.data) % 16 == 0 && (out.stride * element % 16 == 0 || weight.n == 1);
  const Arguments<Map> arguments{
      map,      weight.codes, weight.scales, weight.codebook, weight.scheme.scale == ScaleType::e4m4,
      weight.n, weight.k,     out.data,      out.stride,      vectors};
  if (out.dtype == DType::f32) {
    launch<float>(weight.scheme.bits, arguments, stream);
  } else if (out.dtype == DType::f16) {
    launch<__half>(weight.scheme.bits, arguments, stream);
  } else {
    launch<__nv_bfloat16>(weight.scheme.bits, arguments, stream);
  }
}

bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

void check_arguments(const PackedDeviceWeight& weight, const DeviceRows& out) {
  const auto refuse = [](ErrorCode code, std::string_view what) {
    throw Error(code, concat("dequantize on the GPU: ", what));
  };
  formats::check_dimensions(weight.n, weight.k, "dequantize on the GPU");
  if (weight.scheme.family != formats::SchemeFamily::kbit || weight.scheme.bits < 2 || weight.scheme.bits > 5 ||
      weight.scheme.block != formats::kbit_block) {
    refuse(ErrorCode::unsupported, concat("scheme ", to_string(weight.scheme)));
  }
  if (!is_weight_dtype(out.dtype)) refuse(ErrorCode::unsupported, concat("to ", dtype_name(out.dtype)));
  if (out.stride < weight.k) refuse(ErrorCode::bad_argument, "the row stride is less than a row");
  if (weight.codes == nullptr || weight.scales == nullptr || weight.codebook == nullptr || out.data == nullptr) {
    refuse(ErrorCode::bad_argument, "a null pointer");
  }
  const int scale_bytes = weight.scheme.scale == ScaleType::e4m4 ? 1 : 2;
  if (!aligned(weight.codes, 4) || !aligned(weight.codebook, 4) || !aligned(weight.scales, scale_bytes) ||
      !aligned(out.data, dtype_bits(out.dtype) / 8)) {
    refuse(ErrorCode::bad_argument, "a pointer is not aligned to its elements");
  }
}

}  // namespace

void dequantize_cuda(const PackedDeviceWeight& weight, const DeviceRows& out, cudaStream_t stream) {
  check_arguments(weight, out);
  if (weight.layout == formats::canonical_layout) {
    launch_type(CanonicalMap{formats::kbit_blocks(weight.k)}, weight, out, stream);
  } else if (weight.layout == "kbit-tile") {
    launch_type(repack::KbitTileMap(weight.n, weight.k), weight, out, stream);
  } else {
    throw Error(ErrorCode::unsupported,
                concat("dequantize on the GPU: layout ", printable(weight.layout), " has no decoder"))
        .detail("known: canonical, kbit-tile");
  }
  device::check_launch("dequantize", concat(to_string(weight.scheme), ", ", weight.n, " × ", weight.k));
}

}  // namespace w4q::kernels
