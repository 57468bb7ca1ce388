// Rows of the KV cache as operands of mma.m16n8k16, decoded in registers: what a lane reads with wide loads is what its
// place in the fragment needs, because products do not care in which order dims are summed, and outputs not in which
// order they are stored.
//
// Lane = 4 · g + t. Scores: keys are A (m = 16 tokens: 2g in row g, 2g + 1 in row g + 8), dims are summed. Output:
// values are A (m = 16 dims, two per g), tokens are summed. A page of 16 tokens is one step of each.
#pragma once

#include <cuda_fp16.h>

#include "device/fragment.cuh"
#include "kernels/attention/kv_encode.cuh"
#include "kernels/attention/kv_page.h"

namespace w4q::kernels {

template <int words>
struct Words {
  uint32_t w[words];

  /// Chunks of `chunk` words, `stride` bytes apart.
  template <int chunk>
  __device__ void load(const std::byte* from, int stride) {
    load<chunk>([&](int i) { return from + i * stride; });
  }
  /// The same; where(i) is the i-th.
  template <int chunk, class Where>
  __device__ void load(const Where& where) {
#pragma unroll
    for (int i = 0; i < words / chunk; ++i) {
      const std::byte* const at = where(i);
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

/// Where the byte at `offset` of rows stands: as everywhere in the cache.
struct InOrder {
  static constexpr int period = 1;
  __device__ static constexpr int place(int offset) { return offset; }
};
/// … in shared memory, keys. Lanes that read together have every t and neighbouring g, and rows 2g of neighbouring g
/// lie in the same banks: these exchange parts of `by` bytes.
template <int row_bytes, int by = (row_bytes < 64 ? row_bytes : 64)>
struct SpreadKeys {
  static constexpr int period = 2 * by;
  static constexpr int apart = 2 * row_bytes < 128 ? 128 : 2 * row_bytes;
  __device__ static constexpr int place(int offset) { return offset ^ (offset / apart % 2 * by); }
};
/// … values: lanes that read together have every t, and so rows 4t, which exchange parts of 32 bytes.
template <int row_bytes>
struct SpreadValues {
  static constexpr int period = 128;
  __device__ static constexpr int place(int offset) { return offset ^ (offset / (4 * row_bytes) % 4 * 32); }
};
/// What stands `further` behind a lane's first byte; the order depends on the lane only, and repeats.
template <class Order>
__device__ __forceinline__ const std::byte* in_rows(const std::byte* rows, int first, int further) {
  const int within = further % Order::period;
  return rows + Order::place(first + within) + (further - within);
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

  /// The part of lane `lane` in token `first` + `slot`.
  template <class Order>
  __device__ void load(const std::byte* page, int first, int slot, int lane) {
    constexpr int row = kv_row_bytes(type, dim), chunk = Split::chunk_words * 4;
    codes.template load<Split::chunk_words>(
        [&](int i) { return in_rows<Order>(page, first * row + lane * chunk, slot * row + i * lanes * chunk); });
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

/// Scales of one lane's part of a row of fp4r keys; four lanes share it.
template <int dim>
struct Fp4Scales {
  using Split = RowSplit<KvType::fp4r, dim, 4>;
  static constexpr int groups = Split::lane_dims / kv_fp4_group;
  static constexpr int chunk_groups = Split::chunk_dims / kv_fp4_group;

  uint32_t bytes[(groups + 1) / 2];  ///< two E4M3 each

  __device__ void load(const std::byte* page, int slot, int lane) {
    const std::byte* const from = page + (kv_page_tokens * kv_row_bytes(KvType::fp4r, dim) +
                                          slot * kv_parameter_bytes(KvType::fp4r, dim) + lane * chunk_groups);
#pragma unroll
    for (int i = 0; i < (groups + 1) / 2; ++i) {
      const std::byte* const at = from + i * 4 * chunk_groups;
      if constexpr (chunk_groups == 2) {
        bytes[i] = *reinterpret_cast<const uint16_t*>(at);
      } else {
        bytes[i] = static_cast<uint32_t>(*at);
      }
    }
  }
};
/// The same decoded, times a power of two.
template <int dim>
struct Fp4ScalePairs {
  __half2 pairs[(Fp4Scales<dim>::groups + 1) / 2];

  __device__ Fp4ScalePairs(const Fp4Scales<dim>& scales, float factor) {
#pragma unroll
    for (int i = 0; i < (Fp4Scales<dim>::groups + 1) / 2; ++i) {
      const uint32_t halves = e4m3_pair(scales.bytes[i], 0);
      pairs[i] = reinterpret_cast<const __half2&>(halves);
      if (factor * e4m3_pair_factor != 1) pairs[i] = __hmul2(pairs[i], __float2half2_rn(factor * e4m3_pair_factor));
    }
  }
  /// Two halves of dims 2 · pair and 2 · pair + 1, scaled.
  __device__ uint32_t times(uint32_t halves, int pair) const {
    const int group = 2 * pair / kv_fp4_group;
    const __half2 scale = group % 2 == 0 ? __low2half2(pairs[group / 2]) : __high2half2(pairs[group / 2]);
    const __half2 value = __hmul2(reinterpret_cast<const __half2&>(halves), scale);
    return reinterpret_cast<const uint32_t&>(value);
  }
};

/// One lane's part of the codes of a row of fp4r keys.
template <int dim>
struct Fp4Codes {
  using Split = RowSplit<KvType::fp4r, dim, 4>;
  static constexpr int row_bytes = kv_row_bytes(KvType::fp4r, dim);
  using Spread = SpreadKeys<row_bytes>;
  /// A power of two that keeps scales, and their products with the codes' halves (fp4_pair), inside f16.
  static constexpr float factor = 128.0f;
  static constexpr float scale_factor = factor;

  Words<Split::words> words;

  template <class Order>
  __device__ void load(const std::byte* page, int first, int slot, int lane) {
    constexpr int chunk = Split::chunk_words * 4;
    words.template load<Split::chunk_words>([&](int i) {
      return in_rows<Order>(page, first * row_bytes + lane * chunk, slot * row_bytes + 4 * i * chunk);
    });
  }
  __device__ uint32_t pair(int pair) const { return fp4_pair(words.w[pair / 4], pair % 4); }
};

/// … and of what they leave.
template <int dim>
struct Fp4Rest {
  using Split = RowSplit<KvType::fp4r, dim, 4>;
  /// Lanes have twice as many bytes here as of codes: of rows of 128 bytes, two chunks side by side.
  using Spread = SpreadKeys<dim, dim == 64 ? 64 : 16>;
  static constexpr float factor = e4m3_pair_factor / 2 > 1 ? e4m3_pair_factor / 2 : 1;
  static constexpr float scale_factor = e4m3_pair_factor / factor;

  Words<Split::lane_dims / 4> words;

  template <class Order>
  __device__ void load(const std::byte* page, int first, int slot, int lane) {
    constexpr int chunk = Split::chunk_dims;
    constexpr int loads = chunk / 16;  ///< of 16 bytes side by side
    const std::byte* const rest = residual_row(const_cast<std::byte*>(page), dim, 0);
    words.template load<4>([&](int i) {
      return in_rows<Order>(rest, first * dim + lane * chunk, slot * dim + 4 * (i / loads) * chunk + i % loads * 16);
    });
  }
  __device__ uint32_t pair(int pair) const { return e4m3_pair(words.w[pair / 2], pair % 2); }
};

}  // namespace w4q::kernels
