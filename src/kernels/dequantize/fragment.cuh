// Decoding kbit-fragment: a warp takes a tile of 64 × 64. Lane 4·g + t holds the codes of rows g and g + 8 of four row
// tiles, 8 columns from 8·t on in either block, as pairs of neighbours whose indices stand in its words as they are.
#pragma once

#include "kernels/dequantize/pairs.cuh"
#include "repack/layout_kbit_fragment.h"

namespace w4q::kernels::dequantizing {

using FragmentMap = repack::KbitFragmentMap;

struct FragmentArguments {
  FragmentMap map;
  const uint32_t* codes;
  const void* scales;
  const float* codebook;
  OutputRows out;
};

template <int bits>
struct FragmentIndex {
  using Table = PairTable<2 * bits>;

  static __device__ int2 codes_of(int entry) { return make_int2(entry & ((1 << bits) - 1), entry >> bits); }

  /// The pairs that the map scatters over the tops of the words, put together: pairs 12 … 15 of 3 bits as bytes, pair
  /// 15 of 5 bits.
  static __device__ uint32_t gather(const uint32_t* words) {
    uint32_t gathered = 0;
    if constexpr (bits == 3) {
#pragma unroll
      for (int j = 0; j < bits; ++j) gathered |= words[j] >> (6 - 2 * j) & 0x03030303u << 2 * j;
    }
    if constexpr (bits == 5) {
#pragma unroll
      for (int j = 0; j < bits; ++j) gathered |= words[j] >> (30 - 2 * j) & 3u << 2 * j;
    }
    return gathered;
  }

  /// Byte offset of a pair of a row tile, given its words and what gather() made of them.
  static __device__ uint32_t offset(const uint32_t* words, uint32_t gathered, int pair, uint32_t lane_offset) {
    const bool scattered = (bits == 3 && pair >= 12) || (bits == 5 && pair == 15);
    const auto at = FragmentMap::pair_bit(bits, pair, 0);
    const uint32_t word = scattered ? gathered : words[at.word];
    const int position = !scattered ? at.bit : bits == 3 ? 8 * (pair - 12) : 0;
    return (Table::aligned(word, position) & Table::index_mask) | lane_offset;
  }
};

/// A lane's share of a tile: 4 · bits words and 16 scales.
template <int bits, class Scale>
struct FragmentWords {
  static constexpr int scale_vectors = sizeof(Scale);
  uint4 words[bits];
  uint4 scales[scale_vectors];

  __device__ void load(const FragmentArguments& a, int64_t tile, int lane) {
    const auto* const from = reinterpret_cast<const uint4*>(a.codes + tile * FragmentMap::tile_words(bits));
#pragma unroll
    for (int j = 0; j < bits; ++j) words[j] = __ldcs(from + j * FragmentMap::lanes + lane);
    const auto* const first = static_cast<const Scale*>(a.scales) + tile * FragmentMap::tile_scales + lane / 4 * 16;
#pragma unroll
    for (int j = 0; j < scale_vectors; ++j) scales[j] = __ldcs(reinterpret_cast<const uint4*>(first) + j);
  }
  /// Component i of a group of vectors, i constant after unrolling.
  static __device__ uint32_t component(const uint4* vectors, int i) {
    const uint4& v = vectors[i / 4];
    return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
  }
  __device__ uint32_t word(int w) const { return component(words, w); }
  __device__ float scale(int i) const {
    constexpr int each = 4 / sizeof(Scale);
    constexpr uint32_t mask = sizeof(Scale) == 1 ? 0xFFu : 0xFFFFu;
    const uint32_t raw = component(scales, i / each) >> (8 * sizeof(Scale) * (i % each)) & mask;
    return scale_value(raw, sizeof(Scale) == 1);
  }
};

template <class T, int bits, class Scale>
__device__ __forceinline__ void decode_fragment(const FragmentArguments& a, const FragmentWords<bits, Scale>& loaded,
                                                int64_t row, int64_t column, const float2* table, int lane) {
  using Index = FragmentIndex<bits>;
  const uint32_t lane_offset = Index::Table::lane_offset(lane);
  row += lane / 4;
  column += 8 * (lane % 4);
  const int left = static_cast<int>(a.out.k - column);
  const int rows_left = static_cast<int>(a.out.n - row);
  T* to = static_cast<T*>(a.out.data) + row * a.out.stride + column;
#pragma unroll
  for (int r = 0; r < FragmentMap::row_tiles; ++r) {
    uint32_t words[bits];
#pragma unroll
    for (int j = 0; j < bits; ++j) words[j] = loaded.word(r * bits + j);
    const uint32_t gathered = Index::gather(words);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const float scale = loaded.scale(8 * block + 2 * r + half);
        float values[8];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair =
              Index::Table::at(table, Index::offset(words, gathered, 8 * block + 2 * j + half, lane_offset));
          values[2 * j] = __fmul_rn(pair.x, scale);
          values[2 * j + 1] = __fmul_rn(pair.y, scale);
        }
        const int columns = rows_left > 16 * r + 8 * half ? left - 32 * block : -(1 << 30);
        store_eight(to + 32 * block, columns, a.out.vectors, values, lane);
      }
      to += 8 * a.out.stride;
    }
  }
}

/// Neighbouring warps take neighbouring tiles along k.
template <class T, int bits, class Scale>
__global__ void __launch_bounds__(block_threads, residency) dequantize_fragments(FragmentArguments a) {
  extern __shared__ float2 table[];
  using Index = FragmentIndex<bits>;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t tile = int64_t{blockIdx.x} * block_warps + threadIdx.x / 32;
  FragmentWords<bits, Scale> loaded;
  if (tile < a.map.tiles()) loaded.load(a, tile, lane);
  Index::Table::fill(table, a.codebook[lane & ((1 << bits) - 1)], Index::codes_of);
  __syncthreads();
  if (tile >= a.map.tiles()) return;
  decode_fragment<T, bits>(a, loaded, tile / a.map.col_groups * FragmentMap::tile_rows,
                           tile % a.map.col_groups * FragmentMap::tile_cols, table, lane);
}

}  // namespace w4q::kernels::dequantizing
