// What a GEMM for 17 to 64 activation rows does whatever its weights are: each decoded register is multiplied with up
// to eight groups of eight rows.
//
// A block works on units: `n_tiles` groups of 64 outputs × `splits` tiles along k, a warp to each.
// The activations of a unit stand in shared memory, fetched ahead by asynchronous copies and used by all N-tiles;
// weights go straight from global memory to registers, a unit ahead. Units are dealt to the blocks in equal contiguous
// runs, input direction first. Where a run leaves a strip of N-tiles, the warps along k add up their sums by
// halving: in every round a warp gives away half of its sums and keeps the other half. A strip that several blocks
// share is completed by the block that holds its first unit, in the order of the runs: the same result every time.
#pragma once

#include <algorithm>

#include "device/async_copy.cuh"
#include "kernels/frame/launch.cuh"
#include "kernels/frame/mailbox.cuh"

namespace w4q::kernels::frame {

/// How a block is cut for `groups` groups of eight activation rows: `n_tiles` × `splits` tiles, a warp to each.
template <int groups>
struct GemmTiling {
  static constexpr int rows = 8 * groups;              ///< of activations
  static constexpr int splits = 4;                     ///< warps side by side along k
  static constexpr int n_tiles = groups == 8 ? 2 : 3;  ///< of 64 outputs; as many as the registers allow
  static constexpr int warps = splits * n_tiles;
  static constexpr int stages = 2;  ///< units of activations in shared memory
  static constexpr int tile_bytes = rows * 128;
  static constexpr int stage_bytes = splits * tile_bytes;
  static constexpr int sums = 16 * groups;        ///< of a lane
  static constexpr int own_sums = sums / splits;  ///< of a lane after the halving
  static constexpr int scratch_bytes = warps * 32 * sums / 2 * 4;
  static constexpr int work_bytes = stages * stage_bytes > scratch_bytes ? stages* stage_bytes : scratch_bytes;
  static constexpr int block_sums = n_tiles * 64 * rows;

  // The warps of a team, which wait for one another, are neighbours: they sit on different schedulers, and each
  // scheduler has warps of several teams.
  __device__ static int split(int warp) { return warp / n_tiles; }
  __device__ static int n_tile(int warp) { return warp % n_tiles; }
  __device__ static int partner(int warp, int distance) { return (split(warp) ^ distance) * n_tiles + n_tile(warp); }
};

/// A named barrier of the warps that share the activations of one tile.
template <int team_warps>
__device__ __forceinline__ void named_barrier(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(team_warps * 32) : "memory");
}

/// Chunk 4 · block + t of a row in shared memory as kbit-fragment wants it, the two halves of odd rows exchanged, so
/// that eight lanes read eight different groups of banks.
struct FragmentChunks {
  __device__ static int place(int row, int chunk) { return (row * 8 + (chunk ^ (row & 1) << 2)) * 16; }
  /// Starts bringing the chunk from `first` on of a row that has `k` inputs.
  template <class Scalar>
  __device__ static void fetch_chunk(const Scalar* row, int64_t first, int64_t k, bool aligned, char* to) {
    const int64_t left = k - first;
    if (aligned && left >= 8) {
      device::copy_async(to, row + first);
    } else {
      *reinterpret_cast<uint4*>(to) = load_ragged(row + first, static_cast<int>(left));
    }
  }
  template <int groups>
  __device__ static void read(const char* tile, int block, uint4 (&x)[groups]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < groups; ++i) {
      x[i] = *reinterpret_cast<const uint4*>(tile + place(8 * i + lane / 4, 4 * block + lane % 4));
    }
  }
};

/// The activations of one tile in shared memory: [row][8 chunks of 16 bytes], a chunk where `Order` puts it. Order has
///
///   place(row, chunk)              a byte offset
///   fetch(args, row, first, to)    starts bringing a chunk; zeros beyond k
///   read(tile, block, x)           this lane's B registers of one block for all groups of rows
template <class Scalar, int groups, class Order>
struct ActivationTile {
  using C = GemmTiling<groups>;

  /// Starts fetching one tile, the work of the warps of one team; rows beyond m repeat the last one.
  template <class Args>
  __device__ static void fetch(const Args& args, int k_tile, int member, char* tile) {
    const auto* x = static_cast<const Scalar*>(args.x);
#pragma unroll
    for (int c = member; c < C::rows * 8; c += C::n_tiles * 32) {
      const int row = c / 8;
      Order::fetch(args, x + static_cast<int64_t>(min(row, args.m - 1)) * args.ldx,
                   static_cast<int64_t>(k_tile) * Map::tile_cols + 8 * (c % 8), tile + Order::place(row, c % 8));
    }
  }
};

/// A lane's sums of 64 outputs × 8 · groups activation rows as mma leaves them: value 16·group + 4·row_tile + j.
template <int groups>
struct Accumulator {
  float values[16 * groups];

  __device__ void clear() {
#pragma unroll
    for (float& value : values) value = 0;
  }
  template <class Type>
  __device__ __forceinline__ void mma(int group, int row_tile, const uint32_t (&a)[4], uint2 b) {
    Type::mma(reinterpret_cast<float(&)[4]>(values[16 * group + 4 * row_tile]), a, b.x, b.y);
  }
};

/// One row tile of codes × one block of inputs: values from the table, times the scale of rows g and of rows g + 8,
/// each twice in a register.
template <class Type, int groups, class Codes, class View>
__device__ __forceinline__ void multiply_row_tile(const Codes& codes, int row_tile, int block,
                                                  const uint32_t (&scale)[2], const uint4 (&x)[groups],
                                                  const View& table, Accumulator<groups>& sums) {
#pragma unroll
  for (int step = 2 * block; step < 2 * block + 2; ++step) {
    uint32_t a[4];
    codes.decode(row_tile, step, table, a);
#pragma unroll
    for (int reg = 0; reg < 4; ++reg) a[reg] = Type::multiply(a[reg], scale[reg % 2]);
#pragma unroll
    for (int i = 0; i < groups; ++i) sums.template mma<Type>(i, row_tile, a, block_step(x[i], step));
  }
}

/// Adds the sums of the warps along k by halving: warps `distance` apart exchange through `scratch` (which other warps
/// may have been using) until each has 1 / splits of the sums, in front, complete. Returns the index of the first.
template <int count, int distance, int groups>
__device__ __forceinline__ int reduce_split_k(Accumulator<groups>& acc, int warp, char* scratch) {
  constexpr int half = count / 2;
  const int lane = threadIdx.x % 32;
  const bool upper = (GemmTiling<groups>::split(warp) & distance) != 0;
  auto* const slots = reinterpret_cast<float4*>(scratch);
  const auto slot = [&](int of_warp, int i) { return slots + (of_warp * (half / 4) + i) * 32 + lane; };
  __syncthreads();
#pragma unroll
  for (int i = 0; i < half; i += 4) {
    float give[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      give[j] = upper ? acc.values[i + j] : acc.values[half + i + j];
      acc.values[i + j] = upper ? acc.values[half + i + j] : acc.values[i + j];
    }
    *slot(warp, i / 4) = make_float4(give[0], give[1], give[2], give[3]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < half; i += 4) {
    const float4 got = *slot(GemmTiling<groups>::partner(warp, distance), i / 4);
    acc.values[i] += got.x;
    acc.values[i + 1] += got.y;
    acc.values[i + 2] += got.z;
    acc.values[i + 3] += got.w;
  }
  const int first = upper ? half : 0;
  if constexpr (distance > 1) return first + reduce_split_k<half, distance / 2>(acc, warp, scratch);
  return first;
}

/// A block's run of units, and where they are in the weight.
template <int groups>
struct Strips {
  using C = GemmTiling<groups>;
  int per_strip;  ///< units along k
  Partition runs;
  int run;  ///< of this block: the last block has the first run, so that who is waited for was started earlier

  __device__ explicit Strips(const Launch& args)
      : per_strip((args.k_tiles + C::splits - 1) / C::splits),
        runs(per_strip * ((args.n_tiles + C::n_tiles - 1) / C::n_tiles), gridDim.x),
        run(gridDim.x - 1 - blockIdx.x) {}
  __device__ static int block_of(int run) { return gridDim.x - 1 - run; }
};

/// Stores a lane's complete sums of an N-tile, the first of them value `first` of an Accumulator. A gate and its up
/// are two values apart.
template <class Type, int groups>
__device__ __forceinline__ void store_sums(const Launch& args, int n_tile, int first,
                                           float (&sums)[GemmTiling<groups>::own_sums]) {
  const int lane = threadIdx.x % 32;
  const int last = static_cast<int>(args.n) - 1;
  const bool gated = args.fusion.swiglu;
  const auto output = [&](int i) { return 64 * n_tile + 16 * ((first + i) / 4 % 4) + 8 * (i % 4 / 2) + lane / 4; };
#pragma unroll
  for (int i = 0; i < GemmTiling<groups>::own_sums; ++i) sums[i] = output_value(args, min(output(i), last), sums[i]);
#pragma unroll
  for (int i = 0; i < GemmTiling<groups>::own_sums; ++i) {
    if (gated && i % 4 >= 2) continue;
    const int row = gated ? (output(i) - lane / 4) / 2 + lane / 4 : output(i);
    const int column = 8 * ((first + i) / 16) + lane % 4 * 2 + i % 2;
    const float value = gated ? silu_product(sums[i], sums[(i + 2) % GemmTiling<groups>::own_sums]) : sums[i];
    if (output(i) > last || column >= args.m) continue;
    store_value<Type>(args.y, args.residual, args.fp32, column * args.ldy + row, value);
  }
}

/// Stores the complete sums of a strip, or hands them to the block that does.
template <class Type, int groups>
__device__ __forceinline__ void fix_up_strip(const Launch& args, const Strips<groups>& strips, int strip, int warp,
                                             int first, const Accumulator<groups>& acc) {
  using C = GemmTiling<groups>;
  const int lane = threadIdx.x % 32;
  const int begin = strip * strips.per_strip;
  const int end = begin + strips.per_strip;
  const auto mailbox = [&](int run) {
    return args.mailboxes + static_cast<int64_t>(strips.block_of(run)) * C::block_sums + warp * C::own_sums * 32 + lane;
  };
  if (begin < strips.runs.begin(strips.run)) {
#pragma unroll
    for (int i = 0; i < C::own_sums; ++i) send(mailbox(strips.run) + 32 * i, acc.values[i]);
    return;
  }
  float sums[C::own_sums];
#pragma unroll
  for (int i = 0; i < C::own_sums; ++i) sums[i] = acc.values[i];
  for (int run = strips.run + 1; strips.runs.begin(run) < end; ++run) receive(mailbox(run), 32, sums);
  store_sums<Type, groups>(args, strip * C::n_tiles + C::n_tile(warp), first, sums);
}

/// One warp's way through the tiles of its block's run, one in each unit.
template <class Weights, int groups>
struct WeightCursor {
  using C = GemmTiling<groups>;
  const typename Weights::Args& args;
  typename Weights::Reader reader;
  int per_strip, n_tile, column, split;

  __device__ WeightCursor(const typename Weights::Args& launch, const Strips<groups>& strips, int unit, int warp)
      : args(launch),
        reader(launch),
        per_strip(strips.per_strip),
        n_tile(unit / strips.per_strip * C::n_tiles + C::n_tile(warp)),
        column(unit % strips.per_strip * C::splits + C::split(warp)),
        split(C::split(warp)) {}

  /// Loads the tile at hand and goes on. Tiles beyond the weight are read from inside: they meet zeros, or their sums
  /// are not stored.
  __device__ void load(typename Weights::Tile& tile) {
    reader.load(tile, min(n_tile, args.n_tiles - 1), min(column, args.k_tiles - 1));
    column += C::splits;
    if (column < per_strip * C::splits) return;
    column = split;
    n_tile += C::n_tiles;
  }
};

/// The work of one block. `Weights` has
///
///   Args, Type            what a launch needs; type of the activations
///   Tile, Reader          a lane's part of a tile: codes and scales; load(tile, N-tile, column)
///   Order                 of activations in shared memory (ActivationTile)
///   fill(table, args), View   the table in shared memory, if there is one
///   multiply(tile, block, x, view, args, sums)   scales one block of a tile and multiplies it
template <class Weights, int groups>
__device__ __forceinline__ void gemm_block(const typename Weights::Args& args) {
  using C = GemmTiling<groups>;
  using Type = typename Weights::Type;
  using Activations = ActivationTile<typename Type::Scalar, groups, typename Weights::Order>;
  extern __shared__ uint4 shared[];
  auto* const table = reinterpret_cast<char*>(shared);
  char* const stages = table + Weights::table_bytes;
  device::trigger_dependent_launch();
  const int warp = warp_index();
  const Strips<groups> strips(args);
  int unit = strips.runs.begin(strips.run);
  const int end = strips.runs.begin(strips.run + 1);

  WeightCursor<Weights, groups> weights(args, strips, unit, warp);
  typename Weights::Tile next;
  if (unit < end) weights.load(next);
  begin_inputs<C::warps>(args);
  Weights::fill(table, args);
  const typename Weights::View view(table);
  const uint32_t token = finish_inputs<C::warps>(args);

  const int split = C::split(warp);
  const int member = C::n_tile(warp) * 32 + threadIdx.x % 32;
  while (unit < end) {
    const int strip = unit / strips.per_strip;
    const int strip_begin = strip * strips.per_strip;
    const int stop = min(end, strip_begin + strips.per_strip);
    const auto tile_of = [&](int at) { return stages + (at % C::stages * C::splits + split) * C::tile_bytes; };
    const auto fetch = [&](int at) {
      if (at < stop) Activations::fetch(args, (at - strip_begin) * C::splits + split, member, tile_of(at));
      device::close_async_group();
    };
    __syncthreads();  // the stages served the strip before
    fetch(unit);
    Accumulator<groups> sums;
    sums.clear();
    for (; unit < stop; ++unit) {
      device::wait_async<0>();
      named_barrier<C::n_tiles>(split);
      fetch(unit + 1);
      const typename Weights::Tile weight = next;
      if (unit + 1 < end) weights.load(next);
      const char* const tile = tile_of(unit);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        uint4 x[groups];
        Weights::Order::read(tile, block, x);
        Weights::multiply(weight, block, x, view, args, sums);
      }
    }
    const int first = reduce_split_k<C::sums, C::splits / 2>(sums, warp, stages);
    fix_up_strip<Type, groups>(args, strips, strip, warp, first, sums);
  }
  close_inputs(args, token);
}

template <class Weights, int groups>
__global__ void __launch_bounds__(GemmTiling<groups>::warps * 32, 1) gemm_kernel(const typename Weights::Args args) {
  gemm_block<Weights, groups>(args);
}

/// Launches the instance for these rows of activations.
template <class Weights>
void launch_gemm_kernel(const typename Weights::Args& args, int blocks, const device::Stream& stream,
                        std::string_view name, std::string_view shape) {
  const auto with_groups = [&]<int groups>() {
    using C = GemmTiling<groups>;
    launch_kernel<gemm_kernel<Weights, groups>, Weights::table_bytes + C::work_bytes>(args, blocks, C::warps * 32,
                                                                                      stream, name, shape);
  };
  if (args.m <= 32) return with_groups.template operator()<4>();
  with_groups.template operator()<8>();
}

}  // namespace w4q::kernels::frame
