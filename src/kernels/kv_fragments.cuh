// Rows of the KV cache as operands of mma.m16n8k16, decoded in registers: what a lane reads with wide loads is what its
// place in the fragment needs, because products do not care in which order dims are summed, and outputs not in which
// order they are stored.
//
// Lane = 4 · g + t. Scores: keys are B (n = 8 keys, one per g), dims are summed. Output: values are A (m = 16 dims, two
// per g), keys are summed. A page of 16 tokens is two steps of scores and one of output.
#pragma once

#include <cuda_fp16.h>

#include "kernels/kv_page.h"

namespace w4q::kernels {

template <int words>
struct Words {
  uint32_t w[words];

  /// Chunks of `chunk` words, `stride` bytes apart.
  template <int chunk>
  __device__ void load(const std::byte* from, int stride) {
#pragma unroll
    for (int i = 0; i < words / chunk; ++i) {
      const std::byte* const at = from + i * stride;
      if constexpr (chunk == 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(at);
        w[4 * i] = four.x, w[4 * i + 1] = four.y, w[4 * i + 2] = four.z, w[4 * i + 3] = four.w;
      } else if constexpr (chunk == 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(at);
        w[2 * i] = two.x, w[2 * i + 1] = two.y;
      } else {
        w[i] = *reinterpret_cast<const uint32_t*>(at);
      }
    }
  }
};

/// Halves of two E4M3 bytes of `word` (0: the low two, 1: the high two), times 2^−8.
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t word, int upper) {
  const uint32_t spread = __byte_perm(word, 0, upper == 0 ? 0x1404 : 0x3424);
  return (spread & 0x80008000u) | ((spread & 0x7F007F00u) >> 1);
}
constexpr float e4m3_pair_factor = 256.0f;

/// Halves of codes `pair` and `pair` + 4 of a word, decoded with (step, least).
__device__ __forceinline__ uint32_t q4_pair(uint32_t word, int pair, __half2 parameters) {
  const uint32_t biased = ((word >> (4 * pair)) & 0x000F000Fu) | 0x64006400u;  // 1024 + code
  const __half2 code = __hsub2(reinterpret_cast<const __half2&>(biased), __half2half2(__ushort_as_half(0x6400)));
  const __half2 value = __hfma2(code, __low2half2(parameters), __high2half2(parameters));
  return reinterpret_cast<const uint32_t&>(value);
}

/// How a type spreads the dims of a row over lanes: `lanes` of them share the row (4 for keys, 8 for values), each
/// takes chunks of `chunk_dims`, the lanes' chunks side by side.
template <KvType type, int dim, int lanes>
struct RowSplit {
  static constexpr int lane_dims = dim / lanes;
  static constexpr int widest = type == KvType::f16 ? 8 : type == KvType::fp8 ? 16 : 32;  ///< dims of 16 bytes
  static constexpr int chunk_dims = lane_dims < widest ? lane_dims : widest;
  static constexpr int words = kv_row_bytes(type, dim) / lanes / 4;
  static constexpr int chunk_words = chunk_dims * 4 / widest;

  /// The first dim of pair `pair` of lane `lane`.
  __device__ static constexpr int dim_of(int lane, int pair) {
    return (2 * pair / chunk_dims * lanes + lane) * chunk_dims + 2 * pair % chunk_dims;
  }
};

/// One lane's part of a row.
template <KvType type, int dim, int lanes>
struct LaneRow {
  using Split = RowSplit<type, dim, lanes>;
  static constexpr int groups = type == KvType::q4 ? (Split::lane_dims + kv_group - 1) / kv_group : 1;

  Words<Split::words> codes;
  __half2 parameters[groups];  ///< q4: step and least of its groups
  float scale = 1;             ///< fp8

  __device__ void load(const std::byte* page, int slot, int lane) {
    constexpr int row_bytes = kv_row_bytes(type, dim);
    constexpr int chunk_bytes = Split::chunk_words * 4;
    codes.template load<Split::chunk_words>(page + slot * row_bytes + lane * chunk_bytes, lanes * chunk_bytes);
    const std::byte* const row_parameters = page + kv_page_tokens * row_bytes + slot * kv_parameter_bytes(type, dim);
    if constexpr (type == KvType::fp8) scale = *reinterpret_cast<const float*>(row_parameters) * e4m3_pair_factor;
    if constexpr (type == KvType::q4) {
#pragma unroll
      for (int i = 0; i < groups; ++i) {
        parameters[i] =
            reinterpret_cast<const __half2*>(row_parameters)[Split::dim_of(lane, i * kv_group / 2) / kv_group];
      }
    }
  }
  /// Decodes to zeros: what an unused slot of a page holds must not reach a sum.
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < Split::words; ++i) codes.w[i] = 0;
    if constexpr (type == KvType::q4) {
#pragma unroll
      for (int i = 0; i < groups; ++i) parameters[i] = __half2half2(__ushort_as_half(0));
    }
    scale = 0;
  }
  /// Pair `pair` as halves; fp8: without `scale`.
  __device__ uint32_t pair(int pair) const {
    if constexpr (type == KvType::f16) return codes.w[pair];
    if constexpr (type == KvType::fp8) return e4m3_pair(codes.w[pair / 2], pair % 2);
    if constexpr (type == KvType::q4) return q4_pair(codes.w[pair / 4], pair % 4, parameters[2 * pair / kv_group]);
  }
};

}  // namespace w4q::kernels
