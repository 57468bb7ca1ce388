// One warp's way through its run of tiles in the GEMV of rotated weights: that of kbit (kbit_gemv_run.cuh) with norms
// of groups for scales, with tiles of two passes, and with an input that may lie in shared memory.
#pragma once

#include "kernels/kbit_gemv_run.cuh"
#include "kernels/rotated_launch.cuh"

namespace w4q::kernels::rotated {

using kbit::Columns;
using kbit::Map;
using Type = device::HalfType;

/// Widths of the codes of a launch's passes; second 0: one pass.
template <int first_bits, int second_bits>
struct Widths {
  static constexpr int first = first_bits, second = second_bits;
  static constexpr bool single = second == 0;
  static constexpr bool same = single || first == second;
  static constexpr int widest = first > second ? first : second;
};

/// Norms of a lane's eight outputs for the two blocks of a tile, and the factor of their pass where there are two. They
/// stand where kbit has scales.
template <bool single>
struct Norms {
  struct Packed {
    uint4 blocks[2];
    float factor;
  };
  __device__ static float2 pair_of_sums(const Packed& packed, int block, int row_tile) {
    const uint4& v = packed.blocks[block];
    const uint32_t word = row_tile == 0 ? v.x : row_tile == 1 ? v.y : row_tile == 2 ? v.z : v.w;
    const float2 norms = __half22float2(reinterpret_cast<const __half2&>(word));
    if constexpr (single) return norms;
    return make_float2(norms.x * packed.factor, norms.y * packed.factor);
  }
};

/// Tables of the passes; one for both where their codes are equally wide.
template <class Bits>
struct Tables {
  static constexpr int kilobytes = Bits::same ? 64 : 32;
  static constexpr int total_bytes = 64 * 1024;
  static constexpr int second_at = Bits::same ? 0 : kilobytes * 1024;
  static constexpr int second_bits = Bits::single ? Bits::first : Bits::second;

  struct View {
    kbit::LanePairs<Bits::first, kilobytes> first;
    kbit::LanePairs<second_bits, kilobytes> second;
    __device__ explicit View(const char* table) : first(table), second(table + second_at) {}
  };
  __device__ static void fill(char* table, const RotatedLaunch& args) {
    fill_one<Bits::first>(table, args.sources[0]);
    if constexpr (!Bits::same) fill_one<second_bits>(table + second_at, args.sources[1]);
  }

 private:
  template <int bits>
  __device__ static void fill_one(char* table, const Source& source) {
    kbit::PairTable<bits, kilobytes>::template fill<Type>(table, source.levels, source.table_exponent);
  }
};

/// A tile of a launch: the pass it belongs to and its number there, in row group `group` at tile `column` of a pass.
template <bool single>
struct Place {
  int pass, group, column, tile;
  template <class Span>
  __device__ Place(const RotatedLaunch& args, const Span& at, int j)
      : pass(!single && at.column + j >= args.pass_tiles ? 1 : 0),
        group(at.group),
        column(at.column + j - (single ? 0 : pass * args.pass_tiles)),
        tile(at.tile + j - (single ? 0 : (at.group + pass) * args.pass_tiles)) {}
  /// One of two things, that of the tile's pass.
  template <class T>
  __device__ T of(const T& first, const T& second) const {
    return single || pass == 0 ? first : second;
  }
};

/// Where a lane's codes and norms stand in any tile.
template <bool single>
struct SourceReader {
  const RotatedLaunch& args;
  const uint4* codes[2];

  __device__ explicit SourceReader(const RotatedLaunch& launch)
      : args(launch),
        codes{launch.sources[0].codes + threadIdx.x % 32,
              single ? nullptr : launch.sources[1].codes + threadIdx.x % 32} {}

  template <int bits, int most_bits>
  __device__ void load(kbit::WeightTile<most_bits>& tile, const Place<single>& at) const {
    const uint4* const from = at.of(codes[0], codes[1]) + int64_t{at.tile} * (Map::tile_words(bits) / 4);
#pragma unroll
    for (int j = 0; j < bits; ++j) tile.codes[j] = device::load_once(from + j * Map::lanes);
  }
  __device__ void load(typename Norms<single>::Packed& packed, const Place<single>& at) const {
    const int groups = at.of(args.sources[0].groups, args.sources[1].groups);
    const int shift = at.of(args.sources[0].group_shift, args.sources[1].group_shift);
    const uint4* const norms = at.of(args.sources[0].norms, args.sources[1].norms) + threadIdx.x % 32 / 4;
    if constexpr (!single) packed.factor = at.of(1.0f, args.sources[1].factor);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      // Inputs beyond k are zeros: any norm will do.
      const int index = min((64 * at.column + 32 * block) >> shift, groups - 1);
      packed.blocks[block] = __ldg(norms + (int64_t{at.group} * groups + index) * 8);
    }
  }
};

/// A lane's activations: of rows rotated before this launch, or of the one that the block has rotated.
template <int rows>
struct InputReader {
  const RotatedLaunch& args;
  const __half* row[Columns<rows>::groups];
  const __half* held;
  HeldChunks chunks;

  __device__ InputReader(const RotatedLaunch& launch, const __half* rotated) : args(launch), held(rotated) {
#pragma unroll
    for (int group = 0; group < Columns<rows>::groups; ++group) {
      const int index = min(8 * group + Columns<rows>::row(), args.m - 1);
      row[group] = static_cast<const __half*>(args.x) + static_cast<int64_t>(index) * args.ldx;
    }
  }

  /// The lane's eight of block `block` of a tile; zeros beyond k.
  __device__ uint4 load(int pass, int tile_column, int block, int group = 0) const {
    const int within = 32 * block + 8 * (threadIdx.x % 4);
    if (rows == 1 && args.rotates) {
      const int place = chunks.slot(args, PassColumn(pass, tile_column)) * chunk + tile_column % 2 * 64 + within;
      return *reinterpret_cast<const uint4*>(held + place);
    }
    const int column = 64 * tile_column + within;
    const int k = static_cast<int>(args.k);
    const __half* const from = row[group] + (pass == 0 ? 0 : args.input_stride) + column;
    if (args.aligned && column + 8 <= k) return __ldg(reinterpret_cast<const uint4*>(from));
    return kbit::load_ragged(from, k - column);
  }
};

/// x ← R · x by all warps of a block, into shared memory: the chunks that it needs, zeros beyond k.
///
/// Input 16·n + m of a chunk is element (m, n) of a 16 × 8 matrix. One mma with H_16 does the butterflies of m, exactly
/// but for the fp32 sum. Of n, bit 0 is in a lane's own registers, and each further bit takes a shuffle of half of what
/// the lane has: it gives away two of four values and gets two, so that this bit and the one that told the halves
/// apart change places.
template <int warps>
class Rotator {
 public:
  __device__ void plan() {
    const int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int reg = 0; reg < 4; ++reg) hadamard_[reg] = signs_pair(row + reg % 2 * 8, column + reg / 2 * 8);
  }

  __device__ void run(const RotatedLaunch& args, const HeldChunks& chunks, __half* rotated) const {
#pragma unroll 1
    for (int slot = kbit::warp_index(); slot < chunks.count; slot += at_once * warps) {
      Raw raw[at_once];  // all on their way together
#pragma unroll
      for (int i = 0; i < at_once; ++i) raw[i].load(args, chunks, slot + i * warps);
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        if (slot + i * warps >= chunks.count) break;
        rotate(args, raw[i], rotated + (slot + i * warps) * chunk);
      }
    }
  }

 private:
  static constexpr int at_once = 6;

  /// Inputs 16·g + 2·t, + 1, + 8 and + 9 of a chunk for lane 4·g + t, and its signs.
  struct Raw {
    uint32_t low = 0, high = 0, signs = 0;
    __device__ void load(const RotatedLaunch& args, const HeldChunks& chunks, int slot) {
      if (slot >= chunks.count) return;
      int index = chunks.first + slot;
      if (index >= chunks.period) index -= chunks.period;
      const bool second = index >= args.chunks;
      if (second) index -= args.chunks;
      const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
      const int first = index * chunk + 16 * g + 2 * t;
      if (first >= args.k) return;  // k is a multiple of 32
      const auto* const x = reinterpret_cast<const uint32_t*>(static_cast<const __half*>(args.x) + first);
      low = x[0];
      high = x[4];
      signs = __ldg((second ? args.sources[1].signs : args.sources[0].signs) + 4 * index + g / 2);
    }
  };

  /// Elements (row, column) and (row, column + 1) of H_16.
  __device__ static uint32_t signs_pair(int row, int column) {
    const uint32_t low = __popc(row & column) % 2, high = __popc(row & (column + 1)) % 2;
    return 0x3C003C00u | low << 15 | high << 31;
  }

  __device__ void rotate(const RotatedLaunch& args, const Raw& raw, __half* to) const {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const uint32_t signs = raw.signs >> (g % 2 * 16 + 2 * t);
    const uint32_t low = raw.low ^ (signs << 15 & 0x8000u) ^ (signs << 30 & 0x80000000u);
    const uint32_t high = raw.high ^ (signs << 7 & 0x8000u) ^ (signs << 22 & 0x80000000u);
    float c[4] = {};
    Type::mma(c, hadamard_, low, high);
    float v[4] = {c[0] + c[1], c[0] - c[1], c[2] + c[3], c[2] - c[3]};
    if (args.block > 32) exchange(v, 1);
    if (args.block > 64) exchange(v, 2);
    const int place = args.block == 32   ? g + 32 * t
                      : args.block == 64 ? g + 8 * (t % 2) + 64 * (t / 2)
                                         : g + 8 * (t % 2) + 32 * (t / 2);
    const int apart = args.block == 32 ? 8 : args.block / 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) to[place + 16 * (j % 2) + j / 2 * apart] = __float2half_rn(v[j] * args.root);
  }

  /// The butterfly of the bit of n that lanes `distance` apart differ in.
  __device__ static void exchange(float (&v)[4], int distance) {
    const bool upper = (threadIdx.x & distance) != 0;
    const float kept[2] = {upper ? v[2] : v[0], upper ? v[3] : v[1]};
    const float given[2] = {upper ? v[0] : v[2], upper ? v[1] : v[3]};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float other = __shfl_xor_sync(~0u, given[j], distance);
      v[j] = kept[j] + other;
      v[2 + j] = upper ? other - kept[j] : kept[j] - other;
    }
  }

  uint32_t hadamard_[4];
};

/// One warp's way through its run of tiles, `tiles` of them in flight.
template <class Bits, int rows, int warps, int tiles>
struct Run {
  static constexpr int groups = Columns<rows>::groups;
  static constexpr int first_bits = Bits::first, second_bits = Tables<Bits>::second_bits;
  using View = typename Tables<Bits>::View;
  using Totals = kbit::Totals<rows>;
  using At = kbit::Span<tiles>;
  using Norms = rotated::Norms<Bits::single>;
  using Slot = kbit::Slot<Bits::widest, Norms, rows>;
  using Place = rotated::Place<Bits::single>;

  const RotatedLaunch& args;
  const SourceReader<Bits::single> weights;
  InputReader<rows> inputs;
  __half* const held;  ///< the rotated input of the block
  const int end;
  At span;
  Slot ring[tiles];
  typename Norms::Packed norms;  ///< one row: of the tile whose sums the lane gets
  uint4 x;                       ///< one row: of the tile and block that the lane's column holds

  Rotator<warps> rotator;

  __device__ Run(const RotatedLaunch& launch, int begin, int past, __half* rotated)
      : args(launch), weights(launch), inputs(launch, rotated), held(rotated), end(past), span(launch, begin, past) {}

  /// Fills the ring; touches weights only.
  __device__ void load_first_weights() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j < span.count) load_weights(ring[j], span, j);
    }
    if (rows == 1 && span.count > 0) load_span_norms(span);
  }
  __device__ void plan_input() {
    if (rows > 1 || !args.rotates) return;
    const kbit::Deal blocks(args.tiles, gridDim.x);
    inputs.chunks = HeldChunks(args, blocks.begin(blockIdx.x), blocks.begin(blockIdx.x + 1));
    rotator.plan();
  }
  __device__ void prepare_input() {
    if (rows > 1 || !args.rotates) return;
    rotator.run(args, inputs.chunks, held);
    __syncthreads();
  }
  __device__ void load_first_activations() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (rows > 1 && j < span.count) load_inputs(ring[j], span, j);
    }
    if (rows == 1 && span.count > 0) load_span_inputs(span);
  }

  /// Multiplies the span at hand, adds it to `totals`, and loads the one behind it, which becomes the one at hand.
  __device__ void step(const View& tables, Totals& totals) {
    const At next = span.next(args, end);
    if constexpr (rows == 1) {
      const uint4 span_x = x;
      const typename Norms::Packed span_norms = norms;
      if (next.count > 0) {
        load_span_inputs(next);
        load_span_norms(next);
      }
      kbit::Products<1> products;
      products.clear();
      kbit::turn_ring(
          span, next, [&](int j) { multiply_tile(ring[j], span, j, span_x, tables, products); },
          [&](int j) { load_weights(ring[j], next, j); });
      totals.template add_tile<Norms>(products, span_norms);
    } else {
      kbit::turn_ring(
          span, next, [&](int j) { multiply_rows(ring[j], span, j, tables, totals); },
          [&](int j) {
            load_weights(ring[j], next, j);
            load_inputs(ring[j], next, j);
          });
    }
    span = next;
  }

 private:
  __device__ void load_weights(Slot& slot, const At& at, int j) {
    const Place place(args, at, j);
    if (Bits::same || place.pass == 0) {
      weights.template load<first_bits>(slot.codes, place);
    } else {
      weights.template load<second_bits>(slot.codes, place);
    }
    if (rows > 1) weights.load(slot.scales, place);
  }
  __device__ void load_inputs(Slot& slot, const At& at, int j) {
    const Place place(args, at, j);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        slot.x[block][group] = inputs.load(place.pass, place.column, block, group);
      }
    }
  }
  /// The tiles beyond the span have no sums and their columns are never filled: any tile of the span will do.
  __device__ void load_span_norms(const At& at) {
    weights.load(norms, Place(args, at, min(Columns<rows>::sum_tile(), at.count - 1)));
  }
  __device__ void load_span_inputs(const At& at) {
    const Place place(args, at, min(Columns<rows>::tile(), at.count - 1));
    x = inputs.load(place.pass, place.column, Columns<rows>::block());
  }

  /// 32 inputs of a tile of either pass.
  __device__ void multiply(const Slot& slot, const At& at, int j, int block, const uint4 (&b)[groups],
                           const View& tables, kbit::Products<groups>& products) const {
    if (Bits::same || Place(args, at, j).pass == 0) {
      kbit::multiply_block<first_bits, Type>(narrowed<first_bits>(slot.codes), block, b, tables.first, products);
    } else {
      kbit::multiply_block<second_bits, Type>(narrowed<second_bits>(slot.codes), block, b, tables.second, products);
    }
  }
  template <int bits>
  __device__ static kbit::WeightTile<bits> narrowed(const kbit::WeightTile<Bits::widest>& tile) {
    kbit::WeightTile<bits> result;
#pragma unroll
    for (int j = 0; j < bits; ++j) result.codes[j] = tile.codes[j];
    return result;
  }
  /// One row: the tile's two blocks go to columns of their own.
  __device__ void multiply_tile(const Slot& slot, const At& at, int j, const uint4& span_x, const View& tables,
                                kbit::Products<1>& products) const {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const bool mine = Columns<rows>::tile() == j && Columns<rows>::block() == block;
      const uint4 b[1] = {kbit::keep_if(mine, span_x)};
      multiply(slot, at, j, block, b, tables, products);
    }
  }
  __device__ void multiply_rows(const Slot& slot, const At& at, int j, const View& tables, Totals& totals) const {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      kbit::Products<groups> products;
      products.clear();
      multiply(slot, at, j, block, slot.x[block], tables, products);
      totals.template add_block<Norms>(products, slot.scales, block);
    }
  }
};

}  // namespace w4q::kernels::rotated
