#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/error.h"
#include "core/text.h"
#include "device/check.h"
#include "kernels/kbit_linear.h"
#include "kernels/kbit_linear_tile.cuh"

namespace w4q::kernels {
namespace {

using namespace kbit;

/// What a launch needs, resolved on the host.
struct Launch {
  int m;
  int64_t n, k, ldx, ldy;
  int col_groups, tiles;
  const void* x;
  const uint32_t* codes;
  const void* scales;
  const float* codebook;
  const float* bias;
  void* y;
  float* partials;      ///< [blocks][2][64][8 · row_groups]
  unsigned* arrivals;   ///< [row groups], zero between launches
  float table_factor;   ///< the codebook times this is what the table holds
  float result_factor;  ///< takes all factors out of the sums again
  bool aligned;         ///< rows of x may be read 16 bytes at a time
};

/// The tiles of the whole weight are dealt to the blocks in equal contiguous runs, input direction first; a block works
/// a run off row group by row group.
struct Share {
  int64_t begin, end;
  __host__ __device__ Share(int block, int blocks, int64_t tiles)
      : begin(tiles * block / blocks), end(tiles * (block + 1) / blocks) {}
};

/// The block whose share holds tile `tile`.
__device__ int block_of(int64_t tile, int blocks, int64_t tiles) {
  int block = static_cast<int>(tile * blocks / tiles);
  while (Share(block, blocks, tiles).end <= tile) ++block;
  while (Share(block, blocks, tiles).begin > tile) --block;
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

template <class Type>
__device__ void store_output(const Launch& args, int64_t row, int column, float sum) {
  if (row >= args.n || column >= args.m) return;
  float value = sum * args.result_factor;
  if (args.bias != nullptr) value += args.bias[row];
  static_cast<typename Type::Scalar*>(args.y)[column * args.ldy + row] = Type::narrow(value);
}

/// A row group that several blocks share: each leaves its sums in the workspace; the last to arrive adds all of them in
/// block order, whoever it is, so that the result does not depend on the order of arrival.
template <class Type, int row_groups>
__device__ void finish_split(const Launch& args, int64_t row_group) {
  __shared__ bool last;
  const int64_t first_tile = row_group * args.col_groups;
  const int first = block_of(first_tile, gridDim.x, args.tiles);
  const int final = block_of(first_tile + args.col_groups - 1, gridDim.x, args.tiles);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned arrived = atomicAdd(args.arrivals + row_group, 1u) + 1;
    last = arrived == static_cast<unsigned>(final - first + 1);
    if (last) args.arrivals[row_group] = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  constexpr int values = 64 * 8 * row_groups;
  for (int v = threadIdx.x; v < values; v += blockDim.x) {
    float sum = 0;
    for (int block = first; block <= final; ++block) {
      const bool starts_here = Share(block, gridDim.x, args.tiles).begin <= first_tile;
      sum += __ldcg(args.partials + (2 * static_cast<int64_t>(block) + starts_here) * values + v);
    }
    const int group = v / 512;
    store_output<Type>(args, row_group * 64 + v % 512 / 8, 8 * group + v % 8, sum);
  }
}

template <int bits, class Type, class Scales, int row_groups, int warps>
__global__ void __launch_bounds__(warps * 32, 1) kbit_linear_kernel(const Launch args) {
  using Scalar = typename Type::Scalar;
  extern __shared__ uint4 shared[];
  auto* table = reinterpret_cast<uint32_t*>(shared);
  auto* scratch = reinterpret_cast<float*>(table + PairTable<bits>::total_bytes / 4);
  const int warp = threadIdx.x / 32;
  const int t = threadIdx.x % 4;
  const Share share(blockIdx.x, gridDim.x, args.tiles);
  const auto* x = static_cast<const Scalar*>(args.x) + 16 * t;

  WeightTile<bits, Scales> weights;
  const int64_t first = share.begin + warp;
  if (first < share.end) weights.load(args.codes, args.scales, first);
  PairTable<bits>::template fill<Type>(table, args.codebook, args.table_factor);
  __syncthreads();
  const uint32_t lane_table = static_cast<uint32_t>(__cvta_generic_to_shared(table)) + PairTable<bits>::lane_offset();

  int64_t tile = first;  // the next tile of this warp; its weights are loaded or on their way
  for (int64_t begin = share.begin; begin < share.end;) {
    const int64_t row_group = begin / args.col_groups;
    const int64_t end = min((row_group + 1) * args.col_groups, share.end);
    Accumulator<row_groups> acc;
    acc.clear();
    while (tile < end) {
      const auto current = weights;
      const int64_t column = (tile - row_group * args.col_groups) * Map::tile_cols;
      tile += warps;
      if (tile < share.end) weights.load(args.codes, args.scales, tile);
      const bool vector_loads = args.aligned && column + Map::tile_cols <= args.k;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ActivationHalf<row_groups> activations;
        const Scalar* from = x + column + 8 * half;
        if (vector_loads) {
          activations.load(from, args.ldx, args.m);
        } else {
          activations.load_ragged(from, args.ldx, args.m, static_cast<int>(args.k - column) - 16 * t - 8 * half);
        }
        if (half == 0) {
          multiply_half<0, bits, Type, Scales, row_groups>(current, activations, lane_table, acc);
        } else {
          multiply_half<1, bits, Type, Scales, row_groups>(current, activations, lane_table, acc);
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
void launch(const Launch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  constexpr int warps = warps_for(row_groups);
  constexpr int shared_bytes = PairTable<bits>::total_bytes + warps * 512 * 4;
  static_assert(shared_bytes <= 99 * 1024, "an sm_89 block has 99 KB");
  const auto kernel = kbit_linear_kernel<bits, Type, Scales, row_groups, warps>;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  device::check(allowed, "kernel kbit_linear: asking for shared memory");
  kernel<<<blocks, warps * 32, shared_bytes, stream>>>(args);
  device::check_launch("kbit_linear", shape);
}

template <int bits, class Type, class Scales>
void launch_rows(const Launch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  if (args.m <= 8) return launch<bits, Type, Scales, 1>(args, blocks, stream, shape);
  if (args.m <= 16) return launch<bits, Type, Scales, 2>(args, blocks, stream, shape);
  if (args.m <= 32) return launch<bits, Type, Scales, 4>(args, blocks, stream, shape);
  return launch<bits, Type, Scales, 8>(args, blocks, stream, shape);
}

template <class Type, class Scales>
void launch_bits(int bits, const Launch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  if (bits == 2) return launch_rows<2, Type, Scales>(args, blocks, stream, shape);
  if (bits == 3) return launch_rows<3, Type, Scales>(args, blocks, stream, shape);
  if (bits == 4) return launch_rows<4, Type, Scales>(args, blocks, stream, shape);
  return launch_rows<5, Type, Scales>(args, blocks, stream, shape);
}

int multiprocessors() {
  int device = 0;
  int count = 0;
  device::check(cudaGetDevice(&device), "asking for the GPU");
  device::check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "asking for the GPU's size");
  return count;
}

/// One block a multiprocessor, and no block without a tile for each of a few warps.
int blocks_for(int64_t tiles) {
  static const int most = multiprocessors();
  return static_cast<int>(std::clamp<int64_t>(tiles / 4, 1, most));
}

int row_groups_for(int64_t m) { return m <= 8 ? 1 : m <= 16 ? 2 : m <= 32 ? 4 : 8; }

size_t partial_bytes(int64_t m, int64_t tiles) {
  return size_t{2} * static_cast<size_t>(blocks_for(tiles)) * 512 * static_cast<size_t>(row_groups_for(m)) *
         sizeof(float);
}

void require(bool condition, const std::string& what, std::string_view hint) {
  if (!condition) throw Error(ErrorCode::bad_argument, "kbit_linear: " + what).hint(hint);
}

bool aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

void check_args(const KbitLinearArgs& args) {
  const auto& w = args.weight;
  require(args.m >= 1 && args.m <= kbit_linear_max_rows, concat(args.m, " activation rows"),
          "1 to 64; use the dispatch for more");
  require(args.activation == DType::f16 || args.activation == DType::bf16, "activations are neither f16 nor bf16",
          "convert them");
  require(w.scheme.family == formats::SchemeFamily::kbit && w.scheme.block == 32 && w.scheme.bits >= 2 &&
              w.scheme.bits <= 5,
          "scheme " + formats::to_string(w.scheme) + " is not kbit", "kbit2 to kbit5 with blocks of 32");
  constexpr int64_t most = int64_t{1} << 30;
  require(w.n >= 1 && w.k >= 1 && w.n <= most && w.k <= most, concat("weight of ", w.n, " × ", w.k), "1 to 2^30 each");
  require(args.ldx >= w.k && args.ldy >= w.n,
          concat("row strides ", args.ldx, " and ", args.ldy, " are shorter than the rows"),
          "in elements, at least k and n");
  require(args.x != nullptr && args.y != nullptr && w.codes != nullptr && w.scales != nullptr && w.codebook != nullptr,
          "a null pointer", "x, y, codes, scales and codebook are needed");
  const size_t scale_alignment = w.scheme.scale == formats::ScaleType::e4m4 ? 8 : 16;
  require(aligned(w.codes, 16) && aligned(w.scales, scale_alignment) && aligned(args.x, 2) && aligned(args.y, 2),
          "a misaligned pointer", "codes to 16 bytes, scales to 8 (f16: 16), x and y to their elements");
  const size_t needed = kbit_linear_workspace(args.m, w.n, w.k);
  require(args.workspace != nullptr && aligned(args.workspace, 16) && args.workspace_bytes >= needed,
          concat("workspace of ", args.workspace_bytes, " bytes"),
          concat("kbit_linear_workspace asks for ", needed, ", aligned to 16"));
  require(std::isfinite(w.table_max) && w.table_max > 0 && std::isfinite(w.scale_max) && w.scale_max > 0,
          "table_max or scale_max is not a positive number", "the largest magnitudes of codebook and scales");
}

/// Powers of two that keep table entries and their products with the scales inside the 16-bit type.
void set_factors(const KbitLinearArgs& args, Launch& launch) {
  const auto& w = args.weight;
  const bool half = args.activation == DType::f16;
  // What the kernel reads as a scale is the scale times this (kbit_linear_tile.cuh).
  const int scale_exponent = w.scheme.scale == formats::ScaleType::e4m4 ? (half ? -4 : -116) : 0;
  const int table_exponent = std::ilogb(w.table_max);
  const int scale_top = std::ilogb(w.scale_max);
  // f16 products stay below 2^15: table entries take what the largest scale leaves.
  const int product_top = half ? 14 : 0;
  const int entry_top = std::min(half ? 14 : 120, product_top - (scale_top + 1 + scale_exponent));
  launch.table_factor = std::ldexp(1.0f, entry_top - table_exponent);
  launch.result_factor = std::ldexp(1.0f, table_exponent - entry_top - scale_exponent);
}

}  // namespace

size_t kbit_linear_workspace(int64_t m, int64_t n, int64_t k) {
  const Map map(n, k);
  return (static_cast<size_t>(map.row_groups) * sizeof(unsigned) + 15) / 16 * 16 + partial_bytes(m, map.tiles());
}

void kbit_linear(const KbitLinearArgs& args, cudaStream_t stream) {
  check_args(args);
  const auto& w = args.weight;
  const Map map(w.n, w.k);
  Launch launch{};
  launch.m = static_cast<int>(args.m);
  launch.n = w.n;
  launch.k = w.k;
  launch.ldx = args.ldx;
  launch.ldy = args.ldy;
  launch.col_groups = static_cast<int>(map.col_groups);
  launch.tiles = static_cast<int>(map.tiles());
  launch.x = args.x;
  launch.codes = w.codes;
  launch.scales = w.scales;
  launch.codebook = w.codebook;
  launch.bias = args.bias;
  launch.y = args.y;
  // The arrival counters come first: their place must not depend on m, since they stay zero from launch to launch.
  launch.arrivals = static_cast<unsigned*>(args.workspace);
  const size_t counters = (static_cast<size_t>(map.row_groups) * sizeof(unsigned) + 15) / 16 * 16;
  launch.partials = reinterpret_cast<float*>(static_cast<std::byte*>(args.workspace) + counters);
  launch.aligned = aligned(args.x, 16) && args.ldx % 8 == 0;
  set_factors(args, launch);

  const int blocks = blocks_for(map.tiles());
  const std::string shape = concat(w.n, " × ", w.k, ", ", args.m, " rows, ", formats::to_string(w.scheme));
  const bool e4m4 = w.scheme.scale == formats::ScaleType::e4m4;
  if (args.activation == DType::f16) {
    if (e4m4) return launch_bits<device::HalfType, E4m4Scales>(w.scheme.bits, launch, blocks, stream, shape);
    return launch_bits<device::HalfType, F16Scales>(w.scheme.bits, launch, blocks, stream, shape);
  }
  if (e4m4) return launch_bits<device::Bf16Type, E4m4Scales>(w.scheme.bits, launch, blocks, stream, shape);
  return launch_bits<device::Bf16Type, F16Scales>(w.scheme.bits, launch, blocks, stream, shape);
}

}  // namespace w4q::kernels
