// kbit linear layer for 9 to 64 activation rows: each decoded register is multiplied with up to eight groups of eight
// rows.
//
// The tiles of the whole weight are dealt to the blocks in equal contiguous runs, input direction first; a block works
// a run off row group by row group, its warps side by side along k, and adds their sums through shared memory in warp
// order. A row group that several blocks share is summed by the block that arrives last, in block order: the same
// result in every run.
#include "kernels/kbit_launch.cuh"

namespace w4q::kernels::kbit {
namespace {

/// The tiles of one block.
struct Share {
  int begin, end;
  __device__ Share(int block, const Launch& args)
      : begin(static_cast<int>(int64_t{args.tiles} * block / gridDim.x)),
        end(static_cast<int>(int64_t{args.tiles} * (block + 1) / gridDim.x)) {}
};

/// The block whose share holds tile `tile`.
__device__ int block_of(int tile, const Launch& args) {
  int block = static_cast<int>(int64_t{tile} * gridDim.x / args.tiles);
  while (Share(block, args).end <= tile) ++block;
  while (Share(block, args).begin > tile) --block;
  return block;
}

/// Adds the warps' sums of one group of eight activation rows through shared memory, in warp order: thread by thread,
/// value v of 512 is output v / 8, activation row v % 8. Calls use(output, column, sum).
template <int warps, class Use>
__device__ void reduce_warps(float* scratch, const float (&sums)[Map::row_tiles][4], const Use& use) {
  constexpr int values = 64 * 8;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < Map::row_tiles; ++r) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int output = 16 * r + 8 * (j / 2) + lane / 4;
      scratch[warp * values + output * 8 + lane % 4 * 2 + j % 2] = sums[r][j];
    }
  }
  __syncthreads();
  for (int v = threadIdx.x; v < values; v += warps * 32) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < warps; ++w) sum += scratch[w * values + v];
    use(v / 8, v % 8, sum);
  }
}

/// A row group that several blocks share: each leaves its sums in the workspace; the last to arrive adds all of them in
/// block order, whoever it is, so that the result does not depend on the order of arrival.
template <class Type, int row_groups>
__device__ void finish_split(const Launch& args, int row_group) {
  __shared__ bool last;
  const int first_tile = row_group * args.col_groups;
  const int first = block_of(first_tile, args);
  const int final = block_of(first_tile + args.col_groups - 1, args);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // for the whole block: its sums were written before the barrier
    const unsigned arrived = atomicAdd(args.arrivals + row_group, 1u) + 1;
    last = arrived == static_cast<unsigned>(final - first + 1);
    if (last) args.arrivals[row_group] = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  constexpr int values = 64 * 8 * row_groups;
  for (int v = threadIdx.x; v < values; v += blockDim.x) {
    float sum = 0;
    for (int block = first; block <= final; ++block) {
      const bool starts_here = Share(block, args).begin <= first_tile;
      sum += __ldcg(args.partials + (2 * static_cast<int64_t>(block) + starts_here) * values + v);
    }
    const int group = v / 512;
    store_output<Type>(args, row_group * 64 + v % 512 / 8, 8 * group + v % 8, sum);
  }
}

template <int bits, class Type, class Scales, int row_groups, int warps>
__global__ void __launch_bounds__(warps * 32, 1) kbit_gemm_kernel(const Launch args) {
  using Scalar = typename Type::Scalar;
  extern __shared__ uint4 shared[];
  auto* table = reinterpret_cast<uint32_t*>(shared);
  auto* scratch = reinterpret_cast<float*>(table + PairTable<bits>::total_bytes / 4);
  const int warp = threadIdx.x / 32;
  const int t = threadIdx.x % 4;
  const Share share(blockIdx.x, args);
  const auto* x = static_cast<const Scalar*>(args.x) + 16 * t;

  const int first = share.begin + warp;
  WeightStream<bits, Scales> stream(args.codes, args.scales, first);
  WeightTile<bits, Scales> weights;
  if (first < share.end) stream.load(weights, warps);
  PairTable<bits>::template fill<Type>(table, args.codebook, args.table_exponent);
  __syncthreads();
  const LanePairs<bits, false> pairs(table);

  int tile = first;  // the next tile of this warp; its weights are loaded or on their way
  for (int begin = share.begin; begin < share.end;) {
    const int row_group = begin / args.col_groups;
    const int end = min((row_group + 1) * args.col_groups, share.end);
    Accumulator<row_groups> acc;
    acc.clear();
    while (tile < end) {
      const auto current = weights;
      const int column = (tile - row_group * args.col_groups) * static_cast<int>(Map::tile_cols);
      tile += warps;
      if (tile < share.end) stream.load(weights, warps);
      const bool vector_loads = args.aligned && column + Map::tile_cols <= args.k;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ActivationHalf<row_groups> activations;
        const Scalar* from = x + column + 8 * half;
        activations.load(from, args.ldx, args.m, vector_loads, static_cast<int>(args.k) - column - 16 * t - 8 * half);
        if (half == 0) {
          multiply_half<0, bits, Type, Scales, row_groups, false>(current, activations, pairs, acc);
        } else {
          multiply_half<1, bits, Type, Scales, row_groups, false>(current, activations, pairs, acc);
        }
      }
    }

    const bool whole = begin == row_group * args.col_groups && end == (row_group + 1) * args.col_groups;
    const int slot = begin == row_group * args.col_groups ? 1 : 0;
    float* partial = args.partials + (2 * static_cast<int64_t>(blockIdx.x) + slot) * 512 * row_groups;
#pragma unroll
    for (int group = 0; group < row_groups; ++group) {
      float sums[Map::row_tiles][4];
#pragma unroll
      for (int r = 0; r < Map::row_tiles; ++r) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[r][j] = acc.sums[r][group][j];
      }
      reduce_warps<warps>(scratch, sums, [&](int output, int column, float sum) {
        if (whole) {
          store_output<Type>(args, row_group * 64 + output, 8 * group + column, sum);
        } else {
          partial[group * 512 + output * 8 + column] = sum;
        }
      });
    }
    if (!whole) finish_split<Type, row_groups>(args, row_group);
    begin = end;
  }
}

/// Warps of a block: with few activation rows many warps hide latency, with many the sums need the registers.
constexpr int warps_for(int row_groups) { return row_groups <= 2 ? 16 : 8; }

template <int bits, class Type, class Scales, int row_groups>
void launch_rows(const Launch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  constexpr int warps = warps_for(row_groups);
  constexpr int shared_bytes = PairTable<bits>::total_bytes + warps * 512 * 4;
  launch_kernel<kbit_gemm_kernel<bits, Type, Scales, row_groups, warps>>(args, blocks, warps * 32, shared_bytes, stream,
                                                                         "kbit_gemm", shape);
}

}  // namespace

int gemm_partial_floats(int64_t m) { return 2 * 512 * (m <= 16 ? 2 : m <= 32 ? 4 : 8); }

void launch_gemm(const Launch& args, const formats::Scheme& scheme, DType activation, int blocks, cudaStream_t stream,
                 std::string_view shape) {
  with_types(scheme, activation, [&]<int bits, class Type, class Scales>() {
    if (args.m <= 16) return launch_rows<bits, Type, Scales, 2>(args, blocks, stream, shape);
    if (args.m <= 32) return launch_rows<bits, Type, Scales, 4>(args, blocks, stream, shape);
    launch_rows<bits, Type, Scales, 8>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::kbit
