#include "kernels/rotated/dequantize_sum.h"

#include "core/with_bits.h"
#include "kernels/dequantize/fragment.cuh"
#include "repack/layout_rotated_fragment.h"

namespace w4q::kernels::rotated {
namespace {

using dequantizing::FragmentIndex;
using dequantizing::FragmentMap;

struct DecodeArgs {
  Source sources[2];
  int64_t first_group;  ///< N-tiles from here on
  int64_t tiles;
  int k_tiles;
  dequantizing::OutputRows out;
};

/// A lane's share of a tile of one pass.
template <int bits>
struct PassTile {
  uint4 words[bits];
  uint4 norms[2];  ///< of its eight rows, in either block

  __device__ void load(const Source& source, int64_t tile, int64_t group, int column, int lane) {
    const uint4* const from = source.codes + tile * (FragmentMap::tile_words(bits) / 4) + lane;
#pragma unroll
    for (int j = 0; j < bits; ++j) words[j] = __ldcs(from + j * FragmentMap::lanes);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int index = min((64 * column + 32 * block) >> source.group_shift, source.groups - 1);
      norms[block] = __ldg(source.norms + repack::norm_eight(group, index, source.groups, lane / 4));
    }
  }
  __device__ static uint32_t component(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  }
  /// The words of row tile `r`.
  __device__ void select(int r, uint32_t (&of_tile)[bits]) const {
#pragma unroll
    for (int j = 0; j < bits; ++j) of_tile[j] = component(words[(r * bits + j) / 4], (r * bits + j) % 4);
  }
  __device__ float norm(int block, int r, int half) const {
    const uint32_t pair = component(norms[block], r) >> (16 * half);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair)));
  }
};

/// values += the eight of a lane in one block of one half of a row tile.
template <int bits>
__device__ __forceinline__ void add_eight(const uint32_t (&words)[bits], int block, int half, float norm,
                                          const float2* table, int lane, float (&values)[8]) {
  using Index = FragmentIndex<bits>;
  const uint32_t gathered = Index::gather(words);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t offset = Index::offset(words, gathered, 8 * block + 2 * j + half, Index::Table::lane_offset(lane));
    const float2 pair = Index::Table::at(table, offset);
    values[2 * j] = fmaf(pair.x, norm, values[2 * j]);
    values[2 * j + 1] = fmaf(pair.y, norm, values[2 * j + 1]);
  }
}

/// No second pass.
template <>
struct PassTile<0> {
  __device__ void load(const Source&, int64_t, int64_t, int, int) {}
};

/// Passes that are equally wide share a table; the factor of the second is on its norms.
template <int first_bits, int second_bits>
struct DecodeTables {
  static constexpr bool same = first_bits == second_bits;
  static constexpr bool has_own = second_bits > 0 && !same;
  static constexpr int second_at = has_own ? FragmentIndex<first_bits>::Table::bytes : 0;
  static constexpr int second_bytes() {
    if constexpr (has_own) return FragmentIndex<second_bits>::Table::bytes;
    return 0;
  }
  static constexpr int bytes = FragmentIndex<first_bits>::Table::bytes + second_bytes();
};

/// A warp decodes a tile; neighbouring warps take neighbouring tiles along k.
template <int first_bits, int second_bits>
__global__ void __launch_bounds__(dequantizing::block_threads, dequantizing::residency)
    decode_sums_kernel(DecodeArgs a) {
  extern __shared__ float2 table[];
  using Tables = DecodeTables<first_bits, second_bits>;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t index = int64_t{blockIdx.x} * dequantizing::block_warps + threadIdx.x / 32;
  const bool inside = index < a.tiles;
  const int64_t group = a.first_group + index / a.k_tiles;
  const int column = static_cast<int>(index % a.k_tiles);
  const int64_t tile = group * a.k_tiles + column;
  PassTile<first_bits> first;
  PassTile<second_bits> second;
  if (inside) {
    first.load(a.sources[0], tile, group, column, lane);
    second.load(a.sources[1], tile, group, column, lane);
  }
  const auto fill = [&]<int bits>(float2* to, const float* levels) {
    FragmentIndex<bits>::Table::fill(to, levels[lane & ((1 << bits) - 1)], FragmentIndex<bits>::codes_of);
  };
  float2* const second_table = table + Tables::second_at / sizeof(float2);
  fill.template operator()<first_bits>(table, a.sources[0].levels);
  if constexpr (Tables::has_own) fill.template operator()<second_bits>(second_table, a.sources[1].levels);
  __syncthreads();
  if (!inside) return;
  const int64_t row = index / a.k_tiles * FragmentMap::tile_rows + lane / 4;
  const int64_t from = int64_t{column} * FragmentMap::tile_cols + 8 * (lane % 4);
  auto* to = static_cast<__half*>(a.out.data) + row * a.out.stride + from;
  const float factor = Tables::same ? a.sources[1].factor : 1;
#pragma unroll
  for (int r = 0; r < FragmentMap::row_tiles; ++r) {
    uint32_t words[first_bits], more[second_bits > 0 ? second_bits : 1];
    first.select(r, words);
    if constexpr (second_bits > 0) second.select(r, more);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        float values[8] = {};
        if constexpr (second_bits > 0) {
          add_eight<second_bits>(more, block, half, second.norm(block, r, half) * factor, second_table, lane, values);
        }
        add_eight<first_bits>(words, block, half, first.norm(block, r, half), table, lane, values);
        dequantizing::store_eight(to + 32 * block, a.out.left(row + 16 * r + 8 * half, from + 32 * block),
                                  a.out.vectors, values, lane);
      }
      to += 8 * a.out.stride;
    }
  }
}

template <int first_bits, int second_bits>
void decode(const DecodeArgs& args, const device::Stream& stream) {
  constexpr auto kernel = decode_sums_kernel<first_bits, second_bits>;
  constexpr int bytes = DecodeTables<first_bits, second_bits>::bytes;
  static_assert(bytes <= least_shared_bytes);
  const auto blocks = static_cast<unsigned>((args.tiles + dequantizing::block_warps - 1) / dequantizing::block_warps);
  const LaunchShape shape{dim3(blocks), dequantizing::block_threads, bytes, false};
  launch<kernel>(shape, stream, "decoding rotated passes", args);
}

}  // namespace

void dequantize_sum(const DecodedPasses& passes, int64_t first, int64_t count, const DeviceRows& out,
                    const device::Stream& stream) {
  const FragmentMap map(count, passes.k);
  const DecodeArgs decoding{{passes.sources[0], passes.sources[1]},
                            first / FragmentMap::tile_rows,
                            map.tiles(),
                            static_cast<int>(map.col_groups),
                            {out.data, count, passes.k, out.stride, true}};
  if (passes.bits[1] == 0) {
    return with_table_bits(passes.bits[0], [&]<int bits>() { decode<bits, 0>(decoding, stream); });
  }
  if (passes.bits[1] == 2) return decode<4, 2>(decoding, stream);
  if (passes.bits[1] == 3) return decode<3, 3>(decoding, stream);
  decode<4, 4>(decoding, stream);
}

}  // namespace w4q::kernels::rotated
