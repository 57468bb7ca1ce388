// kbit linear layer for 1 to 16 activation rows: memory-bound, so everything serves an unbroken stream of weights.
//
// Every warp of the grid works off one contiguous run of tiles, equal to ±1 tile; within a run the warp never waits for
// another. A row group (64 outputs × k) that lies in one run is stored straight from the registers. One that several
// warps share is summed at the end: in shared memory, warp by warp, and across blocks, in their order, by the block
// that holds its last tile. So the result is the same in every run of the program.
//
// Where launches may overlap, the next one fills its table and its ring of tiles on the multiprocessors that are done
// while others still compute.
#include "kernels/kbit_exchange.cuh"
#include "kernels/kbit_launch.cuh"

namespace w4q::kernels::kbit {
namespace {

constexpr int table_kilobytes = 64;

/// Sums that the warps of a block leave for one another: of the row group that a warp came from (`heads`) and of the
/// one that it ended in (`tails`), with the numbers of these groups, or −1. Tails stand where the table stood.
template <int rows, int warps>
struct Slots {
  static constexpr int values = 64 * rows;
  static constexpr int extra_bytes = warps * values * 4 + 2 * warps * 4;  ///< beyond the table
  float* heads;
  float* tails;
  int* groups;

  __device__ Slots(char* table, int table_bytes)
      : heads(reinterpret_cast<float*>(table + table_bytes)),
        tails(reinterpret_cast<float*>(table)),
        groups(reinterpret_cast<int*>(table + table_bytes + warps * values * 4)) {}
  __device__ float* sums_of(int slot) const { return (slot < warps ? heads : tails) + slot % warps * values; }
  __device__ void leave(int slot, int group) const {
    if (threadIdx.x % 32 == 0) groups[slot] = group;
  }
};

/// What the eight columns of an mma's B operand hold. One activation row: the blocks of four tiles, each in a column of
/// its own, so that 16 mma steps add up 256 inputs before a sum meets a scale. Four rows: the two blocks of a tile.
/// Eight rows: a column each, and the sums meet their scales after every block; sixteen take two such operands.
template <int rows>
struct Columns {
  static constexpr int tiles = rows == 1 ? 4 : 1;    ///< multiplied before their sums are scaled
  static constexpr int blocks = rows >= 8 ? 1 : 2;   ///< that have columns of their own
  static constexpr int groups = rows == 16 ? 2 : 1;  ///< operands of eight columns
  /// The lane's part of B is column `lane / 4`.
  __device__ static int row() { return threadIdx.x % 32 / 4 / (tiles * blocks); }
  __device__ static int tile() { return threadIdx.x % 32 / 4 / blocks % tiles; }
  __device__ static int block() { return threadIdx.x % 32 / 4 % blocks; }
  /// The tile whose sums the lane gets.
  __device__ static int sum_tile() { return threadIdx.x % 4 % tiles; }
};

/// Up to `most` consecutive tiles of one row group.
template <int most>
struct Span {
  int tile, group, column, count;

  __device__ Span(const Launch& args, int first, int end)
      : tile(first), group(first / args.col_groups), column(first - group * args.col_groups) {
    limit(args, end);
  }
  __device__ Span next(const Launch& args, int end) const {
    Span after = *this;
    after.tile += count;
    after.column += count;
    if (after.column == args.col_groups) {
      after.column = 0;
      ++after.group;
    }
    after.limit(args, end);
    return after;
  }
  __device__ bool ends_group(const Launch& args) const { return column + count == args.col_groups; }

 private:
  __device__ void limit(const Launch& args, int end) { count = min(most, min(end - tile, args.col_groups - column)); }
};

/// A lane's activations.
template <class Scalar, int rows>
struct ActivationReader {
  const Scalar* row[Columns<rows>::groups];
  int k;
  bool aligned;

  __device__ explicit ActivationReader(const Launch& args) : k(static_cast<int>(args.k)), aligned(args.aligned) {
#pragma unroll
    for (int group = 0; group < Columns<rows>::groups; ++group) {
      const int index = min(8 * group + Columns<rows>::row(), args.m - 1);
      row[group] = static_cast<const Scalar*>(args.x) + static_cast<int64_t>(index) * args.ldx;
    }
  }

  /// The lane's eight of block `block` of the tile in column `column_group`; zeros beyond k.
  __device__ uint4 load(int column_group, int block, int group = 0) const {
    const int column = column_group * static_cast<int>(Map::tile_cols) + 32 * block + 8 * (threadIdx.x % 4);
    if (aligned && column + 8 <= k) return __ldg(reinterpret_cast<const uint4*>(row[group] + column));
    return load_ragged(row[group] + column, k - column);
  }
};

/// One place of the ring of tiles in flight. With more than one row it carries the tile's scales and activations too;
/// one row loads these per span.
template <int bits, class Scales, int rows>
struct Slot {
  WeightTile<bits> codes;
  typename Scales::Packed scales;
  uint4 x[2][Columns<rows>::groups];  ///< fewer than eight rows: only [0], of the block of the lane's column
};

/// fp32 sums of 64 outputs × 8 · groups columns as mma leaves them.
template <int groups>
struct Products {
  float sums[groups][Map::row_tiles][4];
  __device__ void clear() {
#pragma unroll
    for (auto& group : sums) {
#pragma unroll
      for (auto& tile : group) {
#pragma unroll
        for (float& sum : tile) sum = 0;
      }
    }
  }
};

/// Scaled sums of a lane: [row tile][half][activation rows that the lane has].
template <int rows>
struct Totals {
  static constexpr int groups = Columns<rows>::groups;
  static constexpr int per_lane = rows >= 8 ? 2 * groups : 1;
  float sums[Map::row_tiles][2][per_lane];

  __device__ void clear() {
#pragma unroll
    for (auto& tile : sums) {
#pragma unroll
      for (auto& half : tile) {
#pragma unroll
        for (float& sum : half) sum = 0;
      }
    }
  }

  /// Products whose columns 2t and 2t + 1 are two rows in block `block`.
  template <class Scales>
  __device__ void add_block(const Products<groups>& products, const typename Scales::Packed& scales, int block) {
#pragma unroll
    for (int r = 0; r < Map::row_tiles; ++r) {
      const float2 scale = Scales::pair_of_sums(scales, block, r);
#pragma unroll
      for (int column = 0; column < per_lane; ++column) {
        const float* const products_of = products.sums[column / 2][r];
        sums[r][0][column] = fmaf(products_of[column % 2], scale.x, sums[r][0][column]);
        sums[r][1][column] = fmaf(products_of[2 + column % 2], scale.y, sums[r][1][column]);
      }
    }
  }
  /// Products whose columns 2t and 2t + 1 are the two blocks of a tile.
  template <class Scales>
  __device__ void add_tile(const Products<groups>& products, const typename Scales::Packed& scales) {
#pragma unroll
    for (int r = 0; r < Map::row_tiles; ++r) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const float2 scale = Scales::pair_of_sums(scales, block, r);
        sums[r][0][0] = fmaf(products.sums[0][r][block], scale.x, sums[r][0][0]);
        sums[r][1][0] = fmaf(products.sums[0][r][2 + block], scale.y, sums[r][1][0]);
      }
    }
  }

  /// Calls use(output, activation row, sum) for what the lane has to give of a finished row group.
  template <class Use>
  __device__ void for_each(const Use& use) {
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (rows == 1) {
        use(16 * t + 8 * half + g, 0, sum_of_row_tile(half));
      } else {
#pragma unroll
        for (int r = 0; r < Map::row_tiles; ++r) {
#pragma unroll
          for (int column = 0; column < per_lane; ++column) {
            const int row = rows < 8 ? t : 8 * (column / 2) + 2 * t + column % 2;
            use(16 * r + 8 * half + g, row, sums[r][half][column]);
          }
        }
      }
    }
  }

 private:
  /// One row: the four lanes t have sums of different columns. Lane t gets the whole sum of row tile t, in two steps in
  /// each of which a lane keeps half of what it has and gives away the other half.
  __device__ float sum_of_row_tile(int half) const {
    const bool upper = (threadIdx.x & 2) != 0;
    const bool odd = (threadIdx.x & 1) != 0;
    const auto part = [&](int r) { return sums[r][half][0]; };
    const float even_sum = (upper ? part(2) : part(0)) + __shfl_xor_sync(0xFFFFFFFFu, upper ? part(0) : part(2), 2);
    const float odd_sum = (upper ? part(3) : part(1)) + __shfl_xor_sync(0xFFFFFFFFu, upper ? part(1) : part(3), 2);
    return (odd ? odd_sum : even_sum) + __shfl_xor_sync(0xFFFFFFFFu, odd ? even_sum : odd_sum, 1);
  }
};

/// Multiplies one block (two mma steps) of a tile with the lane's activations `x`.
template <int bits, class Type, int groups, class Table>
__device__ __forceinline__ void multiply_block(const WeightTile<bits>& tile, int block, const uint4 (&x)[groups],
                                               const Table& table, Products<groups>& products) {
#pragma unroll
  for (int r = 0; r < Map::row_tiles; ++r) {
#pragma unroll
    for (int step = 2 * block; step < 2 * block + 2; ++step) {
      uint32_t a[4];
      tile.decode(r, step, table, a);
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        const uint2 b = block_step(x[group], step);
        Type::mma(products.sums[group][r], a, b.x, b.y);
      }
    }
  }
}

__device__ __forceinline__ uint4 keep_if(bool condition, const uint4& x) {
  return make_uint4(condition ? x.x : 0, condition ? x.y : 0, condition ? x.z : 0, condition ? x.w : 0);
}

/// What a block must know to bring the sums of its row groups together; made before the sums are there.
struct Outline {
  int first_group, final_group;
  int first_sharer;   ///< the block that holds the first group's first tile
  bool shares_final;  ///< the final group goes on in the next block

  __device__ Outline(const Launch& args, const Deal& blocks) {
    const int begin = blocks.begin(blockIdx.x);
    const int end = blocks.begin(blockIdx.x + 1);
    first_group = begin / args.col_groups;
    final_group = (end - 1) / args.col_groups;
    first_sharer = blocks.holder(first_group * args.col_groups);
    shares_final = end < (final_group + 1) * args.col_groups;
  }
};

/// Sums of the row groups that several warps share, and their way out: 64 sums of one group at a time for a warp, those
/// that another block waits for first.
template <class Type, int rows, int warps>
__device__ void combine(const Launch& args, const Outline& outline, const Slots<rows, warps>& slots) {
  const int lane = threadIdx.x % 32;
  const int tasks = (outline.final_group - outline.first_group + 1) * rows;
  for (int task = threadIdx.x / 32; task < tasks; task += warps) {
    const int group = outline.final_group - task / rows;
    const int first = 64 * (task % rows) + lane;
    float sums[2] = {};
    bool any = false;
#pragma unroll
    for (int slot = 0; slot < 2 * warps; ++slot) {
      if (slots.groups[slot] != group) continue;
      any = true;
      sums[0] += slots.sums_of(slot)[first];
      sums[1] += slots.sums_of(slot)[first + 32];
    }
    if (!any) continue;  // stored by the warp that had all of it
    const auto mailbox = [&](int block) { return args.packets + static_cast<int64_t>(block) * 64 * rows + first; };
    if (group == outline.final_group && outline.shares_final) {
      send(mailbox(blockIdx.x), sums[0]);
      send(mailbox(blockIdx.x) + 32, sums[1]);
      continue;
    }
    if (group == outline.first_group) {
      float total[2] = {};
      for (int block = outline.first_sharer; block < static_cast<int>(blockIdx.x); ++block) {
        receive(mailbox(block), 32, total);
      }
      sums[0] += total[0];
      sums[1] += total[1];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int v = first + 32 * i;
      store_output<Type>(args, group * 64 + v / rows, v % rows, sums[i]);
    }
  }
}

/// One warp's way through its run of tiles.
template <int bits, class Type, class Scales, int rows, int tiles>
struct Run {
  using Scalar = typename Type::Scalar;
  using Table = LanePairs<bits, table_kilobytes>;
  using At = Span<tiles>;

  const Launch& args;
  const WeightReader<bits, Scales> weights;
  const ActivationReader<Scalar, rows> activations;
  const int end;
  At span;
  Slot<bits, Scales, rows> ring[tiles];
  typename Scales::Packed scales;  ///< one row: those of the tile whose sums the lane gets
  uint4 x;                         ///< one row: of the tile and block that the lane's column holds

  __device__ Run(const Launch& launch, int begin, int past)
      : args(launch), weights(launch.codes, launch.scales), activations(launch), end(past), span(launch, begin, past) {}

  /// Fills the ring; touches weights only.
  __device__ void load_first_weights() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j < span.count) load_weights(ring[j], span, j);
    }
    if (rows == 1 && span.count > 0) load_span_scales(span);
  }
  __device__ void load_first_activations() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (rows > 1 && j < span.count) load_activations(ring[j], span, j);
    }
    if (rows == 1 && span.count > 0) load_span_activations(span);
  }

  /// Multiplies the span at hand, adds it to `totals`, and loads the one behind it, which becomes the one at hand.
  __device__ void step(const Table& table, Totals<rows>& totals) {
    const At next = span.next(args, end);
    if constexpr (rows == 1) {
      const uint4 span_x = x;
      const typename Scales::Packed span_scales = scales;
      if (next.count > 0) {
        load_span_activations(next);
        load_span_scales(next);
      }
      Products<1> products;
      products.clear();
      turn_ring(
          next, [&](int j) { multiply_tile(ring[j], j, span_x, table, products); },
          [&](int j) { load_weights(ring[j], next, j); });
      totals.template add_tile<Scales>(products, span_scales);
    } else {
      turn_ring(
          next, [&](int j) { multiply_rows(ring[j], table, totals); },
          [&](int j) {
            load_weights(ring[j], next, j);
            load_activations(ring[j], next, j);
          });
    }
    span = next;
  }

 private:
  using Slots = Slot<bits, Scales, rows>;

  /// use(j) for the tiles of the span at hand, each followed by load(j) for the span behind it. Whole spans have a way
  /// without branches, in which the compiler can mix the work of neighbouring tiles.
  template <class Use, class Load>
  __device__ __forceinline__ void turn_ring(const At& next, const Use& use, const Load& load) {
    if (span.count == tiles && next.count == tiles) {
#pragma unroll
      for (int j = 0; j < tiles; ++j) {
        use(j);
        load(j);
      }
    } else {
#pragma unroll
      for (int j = 0; j < tiles; ++j) {
        if (j < span.count) use(j);
        if (j < next.count) load(j);
      }
    }
  }

  __device__ void load_weights(Slots& slot, const At& at, int j) {
    weights.load(slot.codes, at.tile + j);
    if (rows > 1) weights.load(slot.scales, at.tile + j);
  }
  __device__ void load_activations(Slots& slot, const At& at, int j) {
    if constexpr (rows < 8) {
      slot.x[0][0] = activations.load(at.column + j, Columns<rows>::block());
    } else {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
#pragma unroll
        for (int group = 0; group < Columns<rows>::groups; ++group) {
          slot.x[block][group] = activations.load(at.column + j, block, group);
        }
      }
    }
  }
  /// The tiles beyond the span have no sums and their columns are never filled: any tile of the span will do.
  __device__ void load_span_scales(const At& at) {
    weights.load(scales, at.tile + min(Columns<rows>::sum_tile(), at.count - 1));
  }
  __device__ void load_span_activations(const At& at) {
    x = activations.load(at.column + min(Columns<rows>::tile(), at.count - 1), Columns<rows>::block());
  }

  /// One row: the tile's two blocks go to columns of their own.
  __device__ static void multiply_tile(const Slots& slot, int j, const uint4& x, const Table& table,
                                       Products<1>& products) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const bool mine = Columns<rows>::tile() == j && Columns<rows>::block() == block;
      const uint4 b[1] = {keep_if(mine, x)};
      multiply_block<bits, Type>(slot.codes, block, b, table, products);
    }
  }
  __device__ static void multiply_rows(const Slots& slot, const Table& table, Totals<rows>& totals) {
    Products<Columns<rows>::groups> products;
    products.clear();
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      if constexpr (rows < 8) {
        const uint4 b[1] = {keep_if(Columns<rows>::block() == block, slot.x[0][0])};
        multiply_block<bits, Type>(slot.codes, block, b, table, products);
      } else {
        multiply_block<bits, Type>(slot.codes, block, slot.x[block], table, products);
        totals.template add_block<Scales>(products, slot.scales, block);
        products.clear();
      }
    }
    if constexpr (rows < 8) totals.template add_tile<Scales>(products, slot.scales);
  }
};

template <int bits, class Type, class Scales, int rows, int tiles, int warps>
__global__ void __launch_bounds__(warps * 32, 1) kbit_gemv_kernel(const Launch args) {
  using Values = PairTable<bits, table_kilobytes>;
  extern __shared__ uint4 shared[];
  auto* const table = reinterpret_cast<char*>(shared);
  const Slots<rows, warps> slots(table, Values::total_bytes);
  device::allow_next_launch();
  const int warp = warp_index();
  const Deal blocks(args.tiles, gridDim.x);
  const int block_begin = blocks.begin(blockIdx.x);
  const Deal runs(blocks.begin(blockIdx.x + 1) - block_begin, warps);
  const int begin = block_begin + runs.begin(warp);

  Run<bits, Type, Scales, rows, tiles> run(args, begin, block_begin + runs.begin(warp + 1));
  run.load_first_weights();
  Values::template fill<Type>(table, args.codebook, args.table_exponent);
  const Outline outline(args, blocks);
  const int head = warp;
  const int tail = warps + warp;
  slots.leave(head, -1);
  slots.leave(tail, -1);
  device::wait_for_previous_launch();
  run.load_first_activations();
  __syncthreads();
  const LanePairs<bits, table_kilobytes> pairs(table);
  Totals<rows> totals;
  totals.clear();
  bool from_start = run.span.column == 0;
  int tail_group = -1;
  const auto leave_sums = [&](int slot, int group) {
    float* const sums = slots.sums_of(slot);
    totals.for_each([&](int output, int row, float sum) { sums[output * rows + row] = sum; });
    slots.leave(slot, group);
  };
  while (run.span.count > 0) {
    const int group = run.span.group;
    const bool ends_group = run.span.ends_group(args);
    run.step(pairs, totals);
    const bool last = run.span.count == 0;
    if (!ends_group && !last) continue;
    // A row group is done when it began and ended in this run, else its sums wait for the others'.
    if (ends_group && from_start) {
      totals.for_each([&](int output, int row, float sum) { store_output<Type>(args, group * 64 + output, row, sum); });
    } else if (last) {
      tail_group = group;
      break;
    } else {
      leave_sums(head, group);
    }
    totals.clear();
    from_start = true;
  }
  __syncthreads();  // the table has served
  if (tail_group >= 0) leave_sums(tail, tail_group);
  __syncthreads();
  combine<Type, rows, warps>(args, outline, slots);
}

/// The shape of a block, measured: more warps hide more latency, more tiles in flight need more registers.
template <int bits, int rows>
struct Shape {
  static constexpr int warps = rows == 16 ? 8 : 12;
  static constexpr int tiles = rows == 1 && bits < 5 ? 3 : 2;
};

template <int bits, class Type, class Scales, int rows>
void launch_rows(const Launch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  constexpr int warps = Shape<bits, rows>::warps;
  constexpr int tiles = Shape<bits, rows>::tiles;
  constexpr int shared_bytes = PairTable<bits, table_kilobytes>::total_bytes + Slots<rows, warps>::extra_bytes;
  launch_kernel<kbit_gemv_kernel<bits, Type, Scales, rows, tiles, warps>, shared_bytes>(args, blocks, warps * 32,
                                                                                        stream, "kbit_gemv", shape);
}

template <int bits, class Type, class Scales>
void launch_bits(const Launch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  if (args.m == 1) return launch_rows<bits, Type, Scales, 1>(args, blocks, stream, shape);
  if (args.m <= 4) return launch_rows<bits, Type, Scales, 4>(args, blocks, stream, shape);
  if (args.m <= 8) return launch_rows<bits, Type, Scales, 8>(args, blocks, stream, shape);
  launch_rows<bits, Type, Scales, 16>(args, blocks, stream, shape);
}

}  // namespace

void launch_gemv(const Launch& args, const formats::Scheme& scheme, DType activation, int blocks, cudaStream_t stream,
                 std::string_view shape) {
  with_types(scheme, activation, [&]<int bits, class Type, class Scales>() {
    launch_bits<bits, Type, Scales>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::kbit
