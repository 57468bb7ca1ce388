// Rows of the KV cache as operands of mma.m16n8k16, decoded in registers: what a lane reads with wide loads is what its
// place in the fragment needs, because products do not care in which order dims are summed, and outputs not in which
// order they are stored.
//
// Lane = 4 · g + t. Scores: keys are A (m = 16 tokens: 2g in row g, 2g + 1 in row g + 8), dims are summed. Output:
// values are A (m = 16 dims, two per g), tokens are summed. A page of 16 tokens is one step of each.
#pragma once

#include <cuda_fp16.h>

#include "device/fragment.cuh"
#include "kernels/kv_encode.cuh"
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

/// Halves of two E4M3 bytes of `word` (0: the low two, 1: the high two), over e4m3_pair_factor. sm_89 converts; before
/// it, bits are moved to where an f16 has them.
#if __CUDA_ARCH__ >= 890
constexpr float e4m3_pair_factor = 1.0f;
#else
constexpr float e4m3_pair_factor = 256.0f;
#endif
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t word, int upper) {
#if __CUDA_ARCH__ >= 890
  const auto bytes = static_cast<unsigned short>(upper == 0 ? word : word >> 16);
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bytes));
  return halves;
#else
  const uint32_t spread = __byte_perm(word, 0, upper == 0 ? 0x1404 : 0x3424);
  return device::and_or(spread, 0x80008000u, spread >> 1 & 0x3F803F80u);
#endif
}

/// Halves of the two E2M1 codes j (fp4_halfword) of a word, times 2^-14. Sign and magnitude of codes 2 and 3 go
/// different ways: a product moves both.
__device__ __forceinline__ uint32_t fp4_pair(uint32_t word, int j) {
  constexpr uint32_t code = 0x8E008E00u;
  if (j == 0) return word & code;
  if (j == 1) return word << 3 & code;
  if (j == 2) return (word & 0x40074007u) * ((1u << 9) + (1u << 1)) & code;
  return (word & 0x20382038u) * ((1u << 6) + (1u << 2)) & code;
}

/// How f16, fp8 and the codes of fp4r spread the dims of a row over lanes: `lanes` of them share the row (4 for keys, 8
/// for values), each takes chunks of `chunk_dims`, the lanes' chunks side by side.
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

/// One lane's part of a row of f16 or fp8.
template <KvType type, int dim, int lanes>
struct LaneRow {
  using Split = RowSplit<type, dim, lanes>;

  Words<Split::words> codes;

  /// Where a lane's codes begin on a page. Further rows are whole rows away.
  __device__ static const std::byte* codes_at(const std::byte* page, int slot, int lane) {
    return page + (slot * kv_row_bytes(type, dim) + lane * Split::chunk_words * 4);
  }
  __device__ void load(const std::byte* from) {
    codes.template load<Split::chunk_words>(from, lanes * Split::chunk_words * 4);
  }
  /// What an unused slot of a page holds must not reach a sum.
  __device__ void clear() {
#pragma unroll
    for (uint32_t& word : codes.w) word = 0;
  }
  /// Pair `pair` as halves; fp8: over its row's scale.
  __device__ uint32_t pair(int pair) const {
    if constexpr (type == KvType::f16) return codes.w[pair];
    return e4m3_pair(codes.w[pair / 2], pair % 2);
  }
};

/// One lane's part of a row of fp4r keys; four lanes share it.
template <int dim>
struct Fp4Row {
  using Split = RowSplit<KvType::fp4r, dim, 4>;
  static constexpr int groups = Split::lane_dims / kv_fp4_group;
  static constexpr int chunk_groups = Split::chunk_dims / kv_fp4_group;

  /// Powers of two that keep scales, and their products with the codes' halves (fp4_pair), inside f16.
  static constexpr float coarse_factor = 128.0f;
  static constexpr float fine_factor = e4m3_pair_factor / 2 > 1 ? e4m3_pair_factor / 2 : 1;
  static constexpr float fine_scale_factor = e4m3_pair_factor / fine_factor;

  Words<Split::words> codes;
  uint32_t scale_bytes[(groups + 1) / 2];  ///< two E4M3 each
  Words<Split::lane_dims / 4> rest;        ///< E4M3, four in a word

  __device__ static const std::byte* codes_at(const std::byte* page, int slot, int lane) {
    return page + (slot * kv_row_bytes(KvType::fp4r, dim) + lane * Split::chunk_words * 4);
  }
  __device__ static const std::byte* parameters_at(const std::byte* page, int slot, int lane) {
    return page + (kv_page_tokens * kv_row_bytes(KvType::fp4r, dim) + slot * kv_parameter_bytes(KvType::fp4r, dim) +
                   lane * chunk_groups);
  }
  __device__ static const std::byte* rest_at(const std::byte* page, int slot, int lane) {
    return residual_row(const_cast<std::byte*>(page), dim, slot) + lane * Split::chunk_dims;
  }
  __device__ void load(const std::byte* codes_from, const std::byte* scales_from) {
    codes.template load<Split::chunk_words>(codes_from, 4 * Split::chunk_words * 4);
#pragma unroll
    for (int i = 0; i < (groups + 1) / 2; ++i) {
      const std::byte* const at = scales_from + i * 4 * chunk_groups;
      if constexpr (chunk_groups == 2) {
        scale_bytes[i] = *reinterpret_cast<const uint16_t*>(at);
      } else {
        scale_bytes[i] = static_cast<uint32_t>(*at);
      }
    }
  }
  __device__ void load_rest(const std::byte* from) {
#pragma unroll
    for (int chunk = 0; chunk < Split::lane_dims / Split::chunk_dims; ++chunk) {
#pragma unroll
      for (int i = 0; i < Split::chunk_dims / 16; ++i) {
        const uint4 four = *reinterpret_cast<const uint4*>(from + chunk * 4 * Split::chunk_dims + 16 * i);
        const int at = chunk * Split::chunk_dims / 4 + 4 * i;
        rest.w[at] = four.x, rest.w[at + 1] = four.y, rest.w[at + 2] = four.z, rest.w[at + 3] = four.w;
      }
    }
  }
  /// Scales times `factor`, two groups each.
  __device__ __half2 scale_pair(int i, float factor) const {
    const uint32_t halves = e4m3_pair(scale_bytes[i], 0);
    return __hmul2(reinterpret_cast<const __half2&>(halves), __float2half2_rn(factor * e4m3_pair_factor));
  }
  __device__ static __half2 of_group(const __half2& scales, int group) {
    return group % 2 == 0 ? __low2half2(scales) : __high2half2(scales);
  }
  /// Pair `pair` of the codes alone, over coarse_factor; `scales` are times that.
  __device__ uint32_t coarse_pair(int pair, const __half2& scales) const {
    const uint32_t code = fp4_pair(codes.w[pair / 4], pair % 4);
    const __half2 value = __hmul2(reinterpret_cast<const __half2&>(code), of_group(scales, 2 * pair / kv_fp4_group));
    return reinterpret_cast<const uint32_t&>(value);
  }
  /// The same with what the codes leave, over fine_factor; `scales` are times fine_scale_factor.
  __device__ uint32_t fine_pair(int pair, const __half2& scales) const {
    const uint32_t code = fp4_pair(codes.w[pair / 4], pair % 4);
    const uint32_t left = e4m3_pair(rest.w[pair / 2], pair % 2);
    const __half2 sum = __hfma2(reinterpret_cast<const __half2&>(code), __float2half2_rn(16384.0f / e4m3_pair_factor),
                                reinterpret_cast<const __half2&>(left));
    const __half2 value = __hmul2(sum, of_group(scales, 2 * pair / kv_fp4_group));
    return reinterpret_cast<const uint32_t&>(value);
  }
};

}  // namespace w4q::kernels
