// kbit linear layer for 1 to 8 activation rows: memory-bound, so everything serves an unbroken stream of weights.
//
// Every warp of the grid works off one contiguous run of tiles, equal to ±1 tile; within a run the warp never waits for
// another. A row group (64 outputs × k) that lies in one run is stored straight from the registers. One that several
// warps share is summed at the end: in shared memory, warp by warp, and across blocks through the workspace by the
// block that arrives last, always in the order of the runs, so that the result is the same in every run of the program.
#include "kernels/kbit_launch.cuh"

namespace w4q::kernels::kbit {
namespace {

/// Contiguous runs that differ by at most one: part i of `total` things dealt to `parts`.
struct Deal {
  int quotient, remainder;
  __host__ __device__ Deal(int total, int parts) : quotient(total / parts), remainder(total % parts) {}
  __host__ __device__ int begin(int part) const { return part * quotient + min_of(part, remainder); }
  /// The part that holds thing `at`.
  __device__ int holder(int at) const {
    const int longer = remainder * (quotient + 1);
    return at < longer ? at / (quotient + 1) : remainder + (at - longer) / quotient;
  }
  __host__ __device__ static int min_of(int a, int b) { return a < b ? a : b; }
};

/// Sums that a warp leaves for others: of the row group that it came from, and of the one that it ended in.
template <int columns, int warps>
struct Slots {
  float head[warps][64 * columns];
  float tail[warps][64 * columns];
};

/// Calls use(output, column, value) for the sums of a lane; the columns beyond `columns` are those of repeated rows.
template <int columns, class Use>
__device__ __forceinline__ void for_each_sum(const Accumulator<1>& acc, const Use& use) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < Map::row_tiles; ++r) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = lane % 4 * 2 + j % 2;
      if (column < columns) use(16 * r + 8 * (j / 2) + lane / 4, column, acc.sums[r][0][j]);
    }
  }
}

/// The lane's place in the activations, moving along with the tiles.
template <class Scalar>
struct ActivationCursor {
  const Scalar* row;
  int k;
  bool aligned;

  __device__ explicit ActivationCursor(const Launch& args)
      : row(static_cast<const Scalar*>(args.x) +
            static_cast<int64_t>(min(threadIdx.x % 32 / 4, args.m - 1)) * args.ldx + 16 * (threadIdx.x % 4)),
        k(static_cast<int>(args.k) - 16 * static_cast<int>(threadIdx.x % 4)),
        aligned(args.aligned) {}

  __device__ void load(int column_group, int whole_col_groups, ActivationHalf<1> (&halves)[2]) const {
    const int column = column_group * static_cast<int>(Map::tile_cols);
    if (aligned && column_group < whole_col_groups) {
      halves[0].values[0] = __ldg(reinterpret_cast<const uint4*>(row + column));
      halves[1].values[0] = __ldg(reinterpret_cast<const uint4*>(row + column) + 1);
    } else {
      halves[0].values[0] = load_ragged(row + column, k - column);
      halves[1].values[0] = load_ragged(row + column + 8, k - column - 8);
    }
  }
};

/// Sums of the row groups that several warps share, and their way out.
template <class Type, int columns, int warps>
__device__ void combine(const Launch& args, const Deal& blocks, const Slots<columns, warps>& slots) {
  constexpr int values = 64 * columns;
  __shared__ bool last[2];
  const int block_begin = blocks.begin(blockIdx.x);
  const int block_end = blocks.begin(blockIdx.x + 1);
  const Deal runs(block_end - block_begin, warps);
  const int first_group = block_begin / args.col_groups;
  const int final_group = (block_end - 1) / args.col_groups;
  for (int v = threadIdx.x; v < (final_group - first_group + 1) * values; v += blockDim.x) {
    const int group = first_group + v / values;
    const int group_begin = group * args.col_groups;
    const int group_end = group_begin + args.col_groups;
    const int first_warp = runs.holder(max(group_begin, block_begin) - block_begin);
    const int final_warp = runs.holder(min(group_end, block_end) - 1 - block_begin);
    const bool shared_by_blocks = group_begin < block_begin || group_end > block_end;
    if (first_warp == final_warp && !shared_by_blocks) continue;  // stored by the warp itself
    float sum = 0;
    for (int warp = first_warp; warp <= final_warp; ++warp) {
      const bool ends_here = block_begin + runs.begin(warp + 1) <= group_end;
      sum += ends_here ? slots.tail[warp][v % values] : slots.head[warp][v % values];
    }
    if (shared_by_blocks) {
      args.partials[(2 * blockIdx.x + (group_begin >= block_begin)) * values + v % values] = sum;
    } else {
      store_output<Type>(args, group * 64 + v % values / columns, v % columns, sum);
    }
  }
  if (threadIdx.x < 2) last[threadIdx.x] = false;
  __syncthreads();
  if (threadIdx.x < 2 && (threadIdx.x == 0 || final_group != first_group)) {
    const int group_begin = (threadIdx.x == 0 ? first_group : final_group) * args.col_groups;
    const int group_end = group_begin + args.col_groups;
    if (group_begin < block_begin || group_end > block_end) {
      const int sharers = blocks.holder(group_end - 1) - blocks.holder(group_begin) + 1;
      unsigned* const arrivals = args.arrivals + group_begin / args.col_groups;
      __threadfence();  // for the whole block: its sums were written before the barrier
      last[threadIdx.x] = atomicAdd(arrivals, 1u) + 1 == static_cast<unsigned>(sharers);
      if (last[threadIdx.x]) *arrivals = 0;
      __threadfence();
    }
  }
  __syncthreads();
#pragma unroll
  for (int end = 0; end < 2; ++end) {
    if (!last[end]) continue;
    const int group = end == 0 ? first_group : final_group;
    const int group_begin = group * args.col_groups;
    const int first_block = blocks.holder(group_begin);
    const int final_block = blocks.holder(group_begin + args.col_groups - 1);
    for (int v = threadIdx.x; v < values; v += blockDim.x) {
      float sum = 0;
      for (int block = first_block; block <= final_block; ++block) {
        sum += __ldcg(args.partials + (2 * block + (group_begin >= blocks.begin(block))) * values + v);
      }
      store_output<Type>(args, group * 64 + v / columns, v % columns, sum);
    }
  }
}

/// One row spends the least on everything but decoding, and its small slots leave room to align the table to its size.
template <int bits, int columns>
constexpr bool aligned_table = columns == 1 && bits < 5;

__device__ inline uint32_t* align_up(uint4* shared, uint32_t alignment) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  return reinterpret_cast<uint32_t*>(shared) + (((address + alignment - 1) & ~(alignment - 1)) - address) / 4;
}

template <int bits, class Type, class Scales, int columns, int warps>
__global__ void __launch_bounds__(warps * 32, 1) kbit_gemv_kernel(const Launch args) {
  using Scalar = typename Type::Scalar;
  extern __shared__ uint4 shared[];
  constexpr bool aligned = aligned_table<bits, columns>;
  auto* const table = aligned ? align_up(shared, PairTable<bits>::total_bytes) : reinterpret_cast<uint32_t*>(shared);
  auto& slots = *reinterpret_cast<Slots<columns, warps>*>(table + PairTable<bits>::total_bytes / 4);
  const int warp = threadIdx.x / 32;
  const Deal blocks(args.tiles, gridDim.x);
  const int block_begin = blocks.begin(blockIdx.x);
  const Deal runs(blocks.begin(blockIdx.x + 1) - block_begin, warps);
  int tile = block_begin + runs.begin(warp);
  const int end = block_begin + runs.begin(warp + 1);

  WeightStream<bits, Scales> stream(args.codes, args.scales, tile);
  WeightTile<bits, Scales> next;
  if (tile < end) stream.load(next);
  const ActivationCursor<Scalar> activations(args);
  int group = tile / args.col_groups;
  int column_group = tile - group * args.col_groups;
  bool from_start = column_group == 0;
  ActivationHalf<1> next_x[2];
  if (tile < end) activations.load(column_group, args.whole_col_groups, next_x);
  PairTable<bits>::template fill<Type>(table, args.codebook, args.table_exponent);
  __syncthreads();
  const LanePairs<bits, aligned> pairs(table);
  Accumulator<1> acc;
  acc.clear();
  for (; tile < end; ++tile) {
    const WeightTile<bits, Scales> current = next;
    const ActivationHalf<1> x[2] = {next_x[0], next_x[1]};
    const bool ends_group = column_group + 1 == args.col_groups;
    if (tile + 1 < end) {
      stream.load(next);
      activations.load(ends_group ? 0 : column_group + 1, args.whole_col_groups, next_x);
    }
    multiply_half<0, bits, Type, Scales, 1, aligned>(current, x[0], pairs, acc);
    multiply_half<1, bits, Type, Scales, 1, aligned>(current, x[1], pairs, acc);
    ++column_group;
    if (!ends_group) continue;
    // The row group ends here: it is done when it began in this run, else its sums wait for the others'.
    if (from_start) {
      for_each_sum<columns>(
          acc, [&](int output, int column, float sum) { store_output<Type>(args, group * 64 + output, column, sum); });
    } else {
      float* const slot = tile + 1 < end ? slots.head[warp] : slots.tail[warp];
      for_each_sum<columns>(acc, [&](int output, int column, float sum) { slot[output * columns + column] = sum; });
    }
    acc.clear();
    ++group;
    column_group = 0;
    from_start = true;
  }
  if (column_group != 0) {
    for_each_sum<columns>(
        acc, [&](int output, int column, float sum) { slots.tail[warp][output * columns + column] = sum; });
  }
  __syncthreads();
  combine<Type, columns, warps>(args, blocks, slots);
}

template <int bits, class Type, class Scales, int columns>
void launch_columns(const Launch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  // Five bits leave less shared memory for the slots of eight columns.
  constexpr int warps = bits == 5 && columns == 8 ? 8 : 16;
  constexpr int table_bytes = PairTable<bits>::total_bytes * (aligned_table<bits, columns> ? 2 : 1);
  constexpr int shared_bytes = table_bytes + static_cast<int>(sizeof(Slots<columns, warps>));
  launch_kernel<kbit_gemv_kernel<bits, Type, Scales, columns, warps>>(args, blocks, warps * 32, shared_bytes, stream,
                                                                      "kbit_gemv", shape);
}

template <int bits, class Type, class Scales>
void launch_bits(const Launch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  if (args.m == 1) return launch_columns<bits, Type, Scales, 1>(args, blocks, stream, shape);
  launch_columns<bits, Type, Scales, 8>(args, blocks, stream, shape);
}

}  // namespace

void launch_gemv(const Launch& args, const formats::Scheme& scheme, DType activation, int blocks, cudaStream_t stream,
                 std::string_view shape) {
  with_types(scheme, activation, [&]<int bits, class Type, class Scales>() {
    launch_bits<bits, Type, Scales>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::kbit
