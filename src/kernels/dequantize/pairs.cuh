// What the decoders of dequantize_cuda.cu share: a table of value pairs in shared memory, and storing eight weights a
// lane. A warp has one task, which it loads before the table is made, so that the table costs no time of its own;
// blocks are short, because memory is written fastest when what is written at a time lies close together.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace w4q::kernels::dequantizing {

constexpr unsigned all_lanes = 0xFFFFFFFFu;
constexpr int block_threads = 512;
constexpr int block_warps = block_threads / 32;
constexpr int residency = 2;  ///< thread blocks on an SM: leaves 64 registers a thread

/// The fp32 values of two codes by their joint index, so that two weights cost one look-up. An entry stands there once
/// for each of 16 lanes (8 where the table would get too large): the lanes of a half warp read different banks.
template <int index_bits>
struct PairTable {
  static constexpr int entries = 1 << index_bits;
  static constexpr int copies = index_bits > 8 ? 8 : 16;
  static constexpr int entry_shift = index_bits > 8 ? 6 : 7;  ///< log2 of the bytes of an entry
  static constexpr int bytes = entries << entry_shift;
  static constexpr uint32_t index_mask = (entries - 1u) << entry_shift;

  /// All threads of a block. `level`: the codebook, entry l mod 2^bits in lane l; codes_of(entry) gives its two codes.
  template <class CodesOf>
  static __device__ void fill(float2* table, float level, const CodesOf& codes_of) {
    for (int i = static_cast<int>(threadIdx.x); i < entries * copies; i += block_threads) {
      const int2 codes = codes_of(i / copies);
      const float low = __shfl_sync(all_lanes, level, codes.x);
      const float high = __shfl_sync(all_lanes, level, codes.y);
      table[i] = make_float2(low, high);
    }
  }
  /// Byte offset of the copy that a lane reads, within an entry.
  static __device__ uint32_t lane_offset(int lane) { return static_cast<uint32_t>(lane % copies) * 8; }
  /// `word` moved so that the index, which starts at bit `position`, is the entry of a byte offset.
  static __device__ uint32_t aligned(uint32_t word, int position) {
    return position <= entry_shift ? word << (entry_shift - position) : word >> (position - entry_shift);
  }
  static __device__ float2 at(const float2* table, uint32_t offset) {
    return *reinterpret_cast<const float2*>(reinterpret_cast<const char*>(table) + offset);
  }
};

/// An E4M4 byte or the bits of an f16 scale as its value. Shifted into a half, an E4M4 byte is its value over 16,
/// subnormals included: no branch.
__device__ __forceinline__ float scale_value(uint32_t raw, bool e4m4) {
  const float value = __half2float(__ushort_as_half(static_cast<unsigned short>(e4m4 ? raw << 6 : raw)));
  return e4m4 ? value * 16.0f : value;
}

/// Where rows go.
struct OutputRows {
  void* data;
  int64_t n;
  int64_t k;
  int64_t stride;
  bool vectors;  ///< rows start on 16 bytes

  /// How many elements a row has from `column` on; far below zero where there is no such row.
  __device__ int left(int64_t row, int64_t column) const { return row < n ? static_cast<int>(k - column) : -(1 << 30); }
};

template <class T>
struct Words;
template <>
struct Words<__half> {
  static __device__ uint32_t pair(float a, float b) {
    const __half2 value = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t&>(value);
  }
};
template <>
struct Words<__nv_bfloat16> {
  static __device__ uint32_t pair(float a, float b) {
    const __nv_bfloat162 value = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const uint32_t&>(value);
  }
};

/// 16 bytes to `to`, or those elements of them that the row has, `left` in all.
template <class Element>
__device__ __forceinline__ void store_words(Element* to, int left, bool vectors, const uint32_t (&words)[4]) {
  constexpr int each = 4 / sizeof(Element);
  constexpr int full = 4 * each;
  if (vectors && left >= full) {
    __stcs(reinterpret_cast<uint4*>(to), make_uint4(words[0], words[1], words[2], words[3]));
    return;
  }
#pragma unroll
  for (int i = 0; i < full; ++i) {
    if (i < left) to[i] = static_cast<Element>(words[i / each] >> (8 * sizeof(Element) * (i % each)));
  }
}

/// Eight weights a lane to `to`, where the row has `left` more. Lanes 2i and 2i + 1 have neighbouring eights of one
/// row; the whole warp comes here.
template <class T>
__device__ __forceinline__ void store_eight(T* to, int left, bool vectors, const float (&values)[8], int lane) {
  uint32_t words[4];
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = Words<T>::pair(values[2 * i], values[2 * i + 1]);
    store_words(reinterpret_cast<uint16_t*>(to), left, vectors, words);
  } else {
    // The two lanes exchange halves, so that each store of theirs is 32 neighbouring bytes: first the eight of lane 2i.
    const bool odd = lane % 2 != 0;
    auto* const out = reinterpret_cast<uint32_t*>(to);
    float theirs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) theirs[i] = __shfl_xor_sync(all_lanes, odd ? values[i] : values[4 + i], 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(odd ? theirs[i] : values[i]);
    store_words(odd ? out - 4 : out, odd ? left + 4 : left, vectors, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = __float_as_uint(odd ? values[4 + i] : theirs[i]);
    store_words(odd ? out + 4 : out + 8, odd ? left - 4 : left - 8, vectors, words);
  }
}

}  // namespace w4q::kernels::dequantizing
