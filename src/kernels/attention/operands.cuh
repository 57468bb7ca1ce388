// Keys and values of a page of any type as a warp multiplies them, a lane's part: what is loaded, and the products.
#pragma once

#include <type_traits>

#include "device/fragment.cuh"
#include "kernels/attention/decode_parts.cuh"
#include "kernels/attention/kv_fragments.cuh"
#include "kernels/attention/kv_q4.cuh"

namespace w4q::kernels::decode {

/// The queries of a block as the B operand: lane (g, t) has head g.
template <KvType type, int dim>
struct QueryFragments {
  static constexpr int steps = dim / 16;
  uint32_t words[steps][2];

  template <class Row>
  __device__ void load(const Row* queries) {
    const int g = static_cast<int>(threadIdx.x % 32 / 4);
    const int t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int step = 0; step < steps; step += 2) {
      const int d = RowSplit<type, dim, 4>::dim_of(t, 2 * step);
      const uint4 four = *reinterpret_cast<const uint4*>(&queries[g][d]);
      words[step][0] = four.x, words[step][1] = four.y, words[step + 1][0] = four.z, words[step + 1][1] = four.w;
    }
  }
};

/// Adds to c: scores of tokens 2g and 2g + 1, heads 2t and 2t + 1 of each, from rows that give pairs of dims. Two sums
/// side by side, because a product waits for the one before it.
template <class Key, class Queries>
__device__ __forceinline__ void multiply_keys(const Key (&keys)[2], const Queries& queries, float (&c)[4]) {
  float sums[2][4] = {{c[0], c[1], c[2], c[3]}, {}};
#pragma unroll
  for (int step = 0; step < Queries::steps; ++step) {
    const uint32_t a[4] = {keys[0].pair(2 * step), keys[1].pair(2 * step), keys[0].pair(2 * step + 1),
                           keys[1].pair(2 * step + 1)};
    device::HalfType::mma(sums[step % 2], a, queries.words[step][0], queries.words[step][1]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] = sums[0][i] + sums[1][i];
}

/// Queries of two parts. Where a block has at most four heads, their low parts are columns of the same product; others
/// stay in shared memory and take a second one.
template <int dim>
class SplitQueries {
 public:
  using Row = QueryRow<dim>;

  __device__ void load(const Row* queries, int heads) {
    high_.load(queries);
    low_ = low_parts_at(heads) < tile_heads ? nullptr : queries + low_parts_at(heads);
  }
  /// As multiply_keys, of sums that are zero.
  template <class Key>
  __device__ void multiply(const Key (&keys)[2], float (&c)[4]) const {
    multiply_keys(keys, high_, c);
    if (low_ == nullptr) {
#pragma unroll
      for (float& sum : c) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
      return;
    }
    QueryFragments<KvType::f16, dim> low;
    low.load(low_);
    multiply_keys(keys, low, c);
  }

 private:
  QueryFragments<KvType::f16, dim> high_;
  const Row* low_;
};

/// Two tokens' scales.
__device__ __forceinline__ float2 load_scales(const std::byte* page, int dim, int first) {
  const float2 scales = *reinterpret_cast<const float2*>(page + kv_page_tokens * dim + 4 * first);
  return make_float2(scales.x * e4m3_pair_factor, scales.y * e4m3_pair_factor);
}

/// Keys 2g and 2g + 1 of a page.
template <KvType type, int dim>
struct RowKeys {
  using Queries = std::conditional_t<has_low_parts(type), SplitQueries<dim>, QueryFragments<type, dim>>;
  using Row = LaneRow<type, dim, 4>;
  static constexpr float score_unit = 1;
  Row rows[2];
  float2 scales;  ///< fp8

  __device__ void load(const std::byte* page) {
    const int g = static_cast<int>(threadIdx.x % 32 / 4), t = static_cast<int>(threadIdx.x % 4);
    rows[0].template load<InOrder>(page, 2 * g, 0, t);
    rows[1].template load<InOrder>(page, 2 * g, 1, t);
    if constexpr (type == KvType::fp8) scales = load_scales(page, dim, 2 * g);
  }
  __device__ void scores(const Queries& queries, float (&c)[4]) const {
    c[0] = c[1] = c[2] = c[3] = 0;
    if constexpr (has_low_parts(type)) {
      queries.multiply(rows, c);
    } else {
      multiply_keys(rows, queries, c);
    }
    if constexpr (type == KvType::fp8) c[0] *= scales.x, c[1] *= scales.x, c[2] *= scales.y, c[3] *= scales.y;
  }
};

/// Codes of fp4r keys 2g and 2g + 1, or what they leave: `Part` is Fp4Codes or Fp4Rest.
template <int dim, template <int> class Part>
struct Fp4Keys {
  using Queries = QueryFragments<KvType::fp4r, dim>;
  /// What sums are to be multiplied with.
  static constexpr float unit = Part<dim>::factor;
  Part<dim> rows[2];
  Fp4Scales<dim> scales[2];

  template <bool spread = false>
  __device__ void load(const std::byte* page) {
    using Order = std::conditional_t<spread, typename Part<dim>::Spread, InOrder>;
    const int g = static_cast<int>(threadIdx.x % 32 / 4), t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i].template load<Order>(page, 2 * g, i, t);
      scales[i].load(page, 2 * g + i, t);
    }
  }
  __device__ void scores(const Queries& queries, float (&c)[4]) const {
    c[0] = c[1] = c[2] = c[3] = 0;
    add_scores(queries, c);
  }
  __device__ void add_scores(const Queries& queries, float (&c)[4]) const {
    const Scaled scaled[2] = {{rows[0], {scales[0], Part<dim>::scale_factor}},
                              {rows[1], {scales[1], Part<dim>::scale_factor}}};
    multiply_keys(scaled, queries, c);
  }

 private:
  struct Scaled {
    const Part<dim>& row;
    Fp4ScalePairs<dim> scales;
    __device__ uint32_t pair(int pair) const { return scales.times(row.pair(pair), pair); }
  };
};
template <int dim>
using CoarseKeys = Fp4Keys<dim, Fp4Codes>;
template <int dim>
using FineKeys = Fp4Keys<dim, Fp4Rest>;

/// Scores of the codes become those of whole keys.
template <int dim>
__device__ __forceinline__ void add_fine_scores(const FineKeys<dim>& keys,
                                                const QueryFragments<KvType::fp4r, dim>& queries, float (&c)[4]) {
#pragma unroll
  for (float& score : c) score *= CoarseKeys<dim>::unit / FineKeys<dim>::unit;
  keys.add_scores(queries, c);
}

/// Keys 2g and 2g + 1 of a page of fp4r: codes, and what they leave.
template <int dim>
struct WholeFp4Keys {
  using Queries = QueryFragments<KvType::fp4r, dim>;
  static constexpr float score_unit = FineKeys<dim>::unit;
  CoarseKeys<dim> coarse;
  FineKeys<dim> fine;

  __device__ void load(const std::byte* page) {
    coarse.load(page);
    fine.load(page);
  }
  __device__ void scores(const Queries& queries, float (&c)[4]) const {
    coarse.scores(queries, c);
    add_fine_scores(fine, queries, c);
  }
};

/// Values of tokens 4t … 4t + 3 of a page.
template <KvType type, int dim>
struct RowValues {
  using Row = LaneRow<type, dim, 8>;
  static constexpr bool has_scales = type == KvType::fp8;
  static constexpr float usual_scale = 0x1p-4f * e4m3_pair_factor;  ///< values up to 28
  Row rows[4];
  float2 scales;  ///< fp8: of tokens 2g and 2g + 1, as weights come

  template <bool spread = false>
  __device__ void load(const std::byte* page) {
    using Order = std::conditional_t<spread, SpreadValues<kv_row_bytes(type, dim)>, InOrder>;
    const int g = static_cast<int>(threadIdx.x % 32 / 4), t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i].template load<Order>(page, 4 * t, i, g);
    if constexpr (type == KvType::fp8) scales = load_scales(page, dim, 2 * g);
  }
  /// Forgets tokens that sees(slot) refuses.
  template <class Sees>
  __device__ void clear(const Sees& sees) {
    const int g = static_cast<int>(threadIdx.x % 32 / 4), t = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!sees(4 * t + i)) rows[i].clear();
    }
    if constexpr (has_scales) {
      if (!sees(2 * g)) scales.x = 0;
      if (!sees(2 * g + 1)) scales.y = 0;
    }
  }
  /// What weights are multiplied with, at most.
  __device__ float largest_scale() const { return has_scales ? fmaxf(scales.x, scales.y) : 0; }
  /// Dims 2·pair and 2·pair + 1 of the lane, each of tokens `first` and first + 2.
  __device__ void pair_tokens(int first, int pair, uint32_t& low, uint32_t& high) const {
    if constexpr (type == KvType::fp8) {
      const uint32_t bytes = __byte_perm(rows[first].codes.w[pair / 2], rows[first + 2].codes.w[pair / 2],
                                         pair % 2 == 0 ? 0x5140 : 0x7362);
      low = e4m3_pair(bytes, 0), high = e4m3_pair(bytes, 1);
    } else {
      const uint32_t a = rows[first].pair(pair), b = rows[first + 2].pair(pair);
      low = __byte_perm(a, b, 0x5410), high = __byte_perm(a, b, 0x7632);
    }
  }
  /// Weights of tokens 2g and 2g + 1 take the tokens' scales.
  __device__ void scale(float (&weights)[4]) const {
    if constexpr (has_scales) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[i] *= i < 2 ? scales.x : scales.y;
    }
  }
};

/// A warp's sums over values: heads 2t and 2t + 1, two dims in a tile.
template <KvType type, int dim>
struct RowSums {
  static constexpr int steps = dim / 16;
  float tiles[steps][4];
  float2 weight;  ///< the lane's share

  __device__ void clear() {
#pragma unroll
    for (auto& tile : tiles) tile[0] = tile[1] = tile[2] = tile[3] = 0;
    weight = make_float2(0, 0);
  }
  __device__ void rescale(float low, float high) {
#pragma unroll
    for (auto& tile : tiles) tile[0] *= low, tile[1] *= high, tile[2] *= low, tile[3] *= high;
    weight.x *= low, weight.y *= high;
  }
  /// Weights of tokens 4t and 4t + 2, and of 4t + 1 and 4t + 3, of head g, with their values' scales; and without them
  /// of tokens 2g and 2g + 1.
  __device__ void add(const RowValues<type, dim>& values, uint32_t b0, uint32_t b1, const float (&weights)[4]) {
    weight.x += weights[0] + weights[2];
    weight.y += weights[1] + weights[3];
#pragma unroll
    for (int tile = 0; tile < steps; ++tile) {
      uint32_t a[4];
      values.pair_tokens(0, tile, a[0], a[1]);
      values.pair_tokens(1, tile, a[2], a[3]);
      device::HalfType::mma(tiles[tile], a, b0, b1);
    }
  }
  __device__ float2 weights() const {
    float2 all = weight;
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      all.x += __shfl_xor_sync(0xFFFFFFFFu, all.x, step);
      all.y += __shfl_xor_sync(0xFFFFFFFFu, all.y, step);
    }
    return all;
  }
  /// `to(head, d, four)` takes sums of head 2t + head for dims d … d + 3.
  template <class Store>
  __device__ void store(const Store& to) const {
    const int g = static_cast<int>(threadIdx.x % 32 / 4);
#pragma unroll
    for (int tile = 0; tile < steps; tile += 2) {
      const int d = RowSplit<type, dim, 8>::dim_of(g, tile);
      const auto& first = tiles[tile];
      const auto& second = tiles[tile + 1];
      to(0, d, make_float4(first[0], first[2], second[0], second[2]));
      to(1, d, make_float4(first[1], first[3], second[1], second[3]));
    }
  }
};

template <KvType type, int dim>
using PageKeys = std::conditional_t<type == KvType::q4, Q4Keys<dim>,
                                    std::conditional_t<type == KvType::fp4r, WholeFp4Keys<dim>, RowKeys<type, dim>>>;
template <KvType type, int dim>
using PageValues = std::conditional_t<type == KvType::q4, Q4Values<dim>, RowValues<kv_value_type(type), dim>>;
template <KvType type, int dim>
using OutputSums = std::conditional_t<type == KvType::q4, Q4Sums<dim>, RowSums<kv_value_type(type), dim>>;

/// An 8 × 8 matrix of halves, two neighbours of a row in each lane, turned over its diagonal.
__device__ __forceinline__ uint32_t transposed(uint32_t word) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

}  // namespace w4q::kernels::decode
