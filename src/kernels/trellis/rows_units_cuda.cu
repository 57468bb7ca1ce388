// 2 to 16 rows of f16 by trellises where a block has much shared memory: exactly, as rows_cuda.cu, with less that warps
// wait for and less that blocks hand to one another late.
//
//   bytes   n·k·bits/8 of codes, 2·n of scales, once
//   decode  levels.cuh
//   inputs  a block rotates what it needs by itself into shared memory, in the order of B operands: no barrier of the grid
//   work    every warp of the grid works off a contiguous run of units (units.cuh). Its sums wait in shared memory, those
//           of the strip that it ended in where codes and inputs stood, those of strips before it in places of their own;
//           they come together in the order of warps, across blocks by mailboxes in the order of blocks
//   class   E2
#include "kernels/common/grid.h"
#include "kernels/frame/fix_up.cuh"
#include "kernels/trellis/gemv_sums.cuh"
#include "kernels/trellis/levels.cuh"
#include "kernels/trellis/units.cuh"

namespace w4q::kernels::trellis {
namespace {

template <int rows>
struct UnitShape {
  static constexpr int groups = rows / 8;  ///< operands of eight columns
  static constexpr int warps = rows == 8 ? 16 : 12;
  static constexpr int threads = warps * 32;
  static constexpr int unit_bytes = groups * 512;  ///< of inputs
  static constexpr int values = rows * static_cast<int>(Map::tile_rows);
  static constexpr int sum_bytes = values * 4;

  /// Bytes from the beginning of a unit's inputs to the lane's eight of a row of a group, which lane 4·g + t multiplies.
  /// What lanes of a piece store together stands in different banks.
  __device__ static int input_at(int group, int lane, int unit) { return 512 * group + 16 * (lane ^ unit % 2 * 4); }
  /// The place of an output's sum in a row of 128, such that lanes store and load without conflicts.
  __device__ static int sum_at(int row, int output) {
    return row * static_cast<int>(Map::tile_rows) + (output ^ row / 2 % 4 * 4);
  }
};

/// Shared memory: codes and inputs, where sums are to stand in the end, and behind them those that warps leave on the way.
template <int bits, int rows>
struct RowsMemory {
  using Shape = UnitShape<rows>;
  static constexpr int inputs_at = Shape::warps * UnitRing<bits>::bytes;

  __host__ __device__ static int left_at(int pieces) {
    const int inputs_end = inputs_at + pieces * piece_units * Shape::unit_bytes,
              sums_end = Shape::warps * Shape::sum_bytes;
    return inputs_end > sums_end ? inputs_end : sums_end;
  }
  /// Of a block with `most` units of strips of `units`.
  static int64_t bytes(int64_t most, int units) {
    const int64_t strip_ends = (most + units - 2) / units;
    return left_at(static_cast<int>(UnitPieces::most(most, units))) + strip_ends * Shape::sum_bytes;
  }
};

/// Rotates where the launch says so and stages the inputs of a block, by all warps.
template <int rows>
struct RowsStager {
  using Shape = UnitShape<rows>;
  static constexpr int at_once = 4;  ///< rows of a piece
  const UnitLaunch& args;
  const UnitPieces& pieces;

  /// Brings the signs of the rotation to the L2 cache; waits for nothing.
  __device__ __forceinline__ void prefetch() const {
    if (args.signs == nullptr) return;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < pieces.count(); i += Shape::threads) {
      const int column = piece_inputs * pieces.piece(i);
      if (column < args.k) asm volatile("prefetch.global.L2 [%0];" ::"l"(args.signs + column / 32));
    }
  }
  __device__ __forceinline__ void run(char* to) const {
    const rotated::FragmentRotation rotation(args.block);
    const int lane = static_cast<int>(threadIdx.x) % 32, count = pieces.count();
    int piece = frame::warp_index(), row = 0;  // of the next batch
    Batch next{};
    bool loaded = false;
    while (true) {
      const Batch batch = next;
      const bool stages = loaded;
      const int at = piece, first = row;
      if (stages) piece += Shape::warps;
      while (piece >= count && row < args.m) piece -= count, row += at_once;
      loaded = row < args.m;
      if (loaded) next = load(pieces.piece(piece), row);
      if (stages) {
        const int unit = at * piece_units + lane / 8 * 2 + lane % 2;
#pragma unroll
        for (int j = 0; j < at_once; ++j) {
          const uint4 words = args.signs == nullptr ? batch.x[j] : rotation.rotate({batch.x[j], batch.signs});
          const int of_group = (first + j) % 8 * 4 + lane % 8 / 2;
          *reinterpret_cast<uint4*>(to + unit * Shape::unit_bytes + Shape::input_at((first + j) / 8, of_group, unit)) =
              words;
        }
      }
      if (!loaded) break;
    }
    __syncthreads();
  }

 private:
  struct Batch {
    uint4 x[at_once];
    uint32_t signs;
  };
  /// A lane's eight inputs of some rows, zeros beyond k; what is beyond m repeats the last row.
  __device__ __forceinline__ Batch load(int piece, int row) const {
    const int column = piece_inputs * piece + 8 * static_cast<int>(threadIdx.x % 32);
    const int left = static_cast<int>(args.k) - column;
    Batch batch{};
    if (args.signs != nullptr && left > 0) batch.signs = __ldg(args.signs + column / 32);
#pragma unroll
    for (int j = 0; j < at_once; ++j) {
      const __half* const from = static_cast<const __half*>(args.x) + min(row + j, args.m - 1) * args.ldx + column;
      batch.x[j] = args.aligned && left >= 8 ? *reinterpret_cast<const uint4*>(from) : frame::load_ragged(from, left);
    }
    return batch;
  }
};

/// Leaves the sums of a warp's strip: lane 4·g + t has rows 2·t and 2·t + 1 of a group, outputs 16·g … 16·g + 15.
template <int rows>
__device__ __forceinline__ void leave_sums(const LevelSums<rows / 8>& sums, char* to) {
  using Shape = UnitShape<rows>;
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int group = 0; group < Shape::groups; ++group) {
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const float offset = level_offset * sums.input_sum(group, column);
#pragma unroll
      for (int quad = 0; quad < 4; ++quad) {
        const float* const low = sums.sums[group][2 * quad];
        const float* const high = sums.sums[group][2 * quad + 1];
        reinterpret_cast<float4*>(to)[Shape::sum_at(8 * group + 2 * t + column, 16 * g + 4 * quad) / 4] = make_float4(
            low[column] - offset, low[2 + column] - offset, high[column] - offset, high[2 + column] - offset);
      }
    }
  }
}

/// Brings sums together and stores them, rows of a strip side by side: a warp has some of them, a lane four outputs of
/// each.
template <int bits, int rows>
struct RowsEnd {
  using Shape = UnitShape<rows>;
  const UnitLaunch& args;
  const frame::FixUp& plan;
  const frame::Partition& runs;
  const int begin, end;    ///< units of the block
  const char* const sums;  ///< of the strips that warps ended in
  const char* const left;  ///< of a strip that a warp went on from
  const int warp;

  /// By all warps, which meet when they have asked for what the first strip takes beside sums.
  __device__ __forceinline__ void run() const {
    int strip = plan.final_group;
    Strip of = prepared(strip);
    __syncthreads();
#pragma unroll 1
    while (true) {
      finish(strip, of);
      if (--strip < plan.first_group) break;
      of = prepared(strip);
    }
  }

 private:
  static constexpr int mine = (rows + Shape::warps - 1) / Shape::warps;  ///< rows of a warp
  struct Strip {
    int first, last;        ///< warps that left sums of it, but for the last
    const char* last_sums;  ///< of the last
    uint32_t scales[4];
    float bias[4];
  };

  __device__ __forceinline__ int row(int i) const { return warp + i * Shape::warps; }
  __device__ __forceinline__ static int output(int strip) {
    return strip * static_cast<int>(Map::tile_rows) + 4 * (static_cast<int>(threadIdx.x) % 32);
  }
  __device__ __forceinline__ bool sends(int strip) const { return strip == plan.final_group && plan.shares_final; }

  __device__ __forceinline__ Strip prepared(int strip) const {
    Strip of{};
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = max(strip * args.units, begin) - begin, past = min((strip + 1) * args.units, end) - begin;
    const unsigned members =
        __ballot_sync(0xFFFFFFFFu, lane < Shape::warps && runs.begin(lane) < past && runs.begin(lane + 1) > first);
    of.first = __ffs(static_cast<int>(members)) - 1;
    of.last = 31 - __clz(static_cast<int>(members));
    const bool goes_on = runs.begin(of.last + 1) > past;
    of.last_sums = goes_on ? left + (strip - plan.first_group) * Shape::sum_bytes : sums + of.last * Shape::sum_bytes;
    if (sends(strip)) return of;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = min(output(strip) + j, static_cast<int>(args.n) - 1);
      of.scales[j] = frame::output_scale_bits(args, at);
      if (args.bias != nullptr) of.bias[j] = __ldg(args.bias + at);
    }
    return of;
  }

  __device__ __forceinline__ void finish(int strip, const Strip& of) const {
    const int quad = 4 * (static_cast<int>(threadIdx.x) % 32);
    float total[mine][4] = {};
    const auto add = [&](const char* of_warp) {
#pragma unroll
      for (int i = 0; i < mine; ++i) {
        if (row(i) >= rows) continue;
        const float4 sum = *reinterpret_cast<const float4*>(of_warp + 4 * Shape::sum_at(row(i), quad));
        total[i][0] += sum.x, total[i][1] += sum.y, total[i][2] += sum.z, total[i][3] += sum.w;
      }
    };
#pragma unroll 4
    for (int member = of.first; member < of.last; ++member) add(sums + member * Shape::sum_bytes);
    add(of.last_sums);
    if (sends(strip)) {
#pragma unroll
      for (int i = 0; i < mine; ++i) {
        if (row(i) < args.m) frame::send(mailbox(static_cast<int>(blockIdx.x), i), total[i]);
      }
      return;
    }
    if (strip == plan.first_group) {
#pragma unroll 1
      for (int block = plan.first_sharer; block < static_cast<int>(blockIdx.x); block += at_once) receive(block, total);
    }
#pragma unroll
    for (int i = 0; i < mine; ++i) {
      if (row(i) < args.m) store(output(strip), row(i), total[i], of);
    }
  }

  static constexpr int at_once = 4;  ///< blocks that are asked together
  __device__ __forceinline__ uint4* mailbox(int block, int i) const {
    auto* const of_block = args.mailboxes + static_cast<int64_t>(block) * Shape::values;
    return reinterpret_cast<uint4*>(of_block) + row(i) * 32 + threadIdx.x % 32;
  }
  /// Adds the sums of up to four blocks from `block` on, in their order.
  __device__ __forceinline__ void receive(int block, float (&total)[mine][4]) const {
    const auto comes = [&](int sender, int i) {
      return block + sender < static_cast<int>(blockIdx.x) && row(i) < args.m;
    };
    uint4 words[at_once][mine];
    bool complete = false;
    while (!complete) {
#pragma unroll
      for (int sender = 0; sender < at_once; ++sender) {
#pragma unroll
        for (int i = 0; i < mine; ++i) {
          words[sender][i] = comes(sender, i) ? frame::peek(mailbox(block + sender, i)) : make_uint4(1, 1, 1, 1);
        }
      }
      complete = true;
#pragma unroll
      for (int sender = 0; sender < at_once; ++sender) {
#pragma unroll
        for (int i = 0; i < mine; ++i) complete &= frame::are_there(words[sender][i]);
      }
    }
#pragma unroll
    for (int sender = 0; sender < at_once; ++sender) {
#pragma unroll
      for (int i = 0; i < mine; ++i) {
        if (!comes(sender, i)) continue;
        frame::add_sums(words[sender][i], total[i]);
        *mailbox(block + sender, i) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  __device__ __forceinline__ void store(int output, int row, const float (&sums)[4], const Strip& of) const {
    const int64_t at = row * args.ldy + output;
    float values[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      values[j] = sums[j] * args.result_factor * frame::scale_of(args, of.scales[j]) + of.bias[j];
    }
    if (args.stores_quads) {
      if (output >= args.n) return;
      *reinterpret_cast<uint2*>(static_cast<__half*>(args.y) + at) =
          make_uint2(device::HalfType::pack(values[0], values[1]), device::HalfType::pack(values[2], values[3]));
      return;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (output + j < args.n) {
        store_value<device::HalfType>(args.y, args.residual, args.fp32, at + j, values[j]);
      }
    }
  }
};

template <class Codes, int rows>
__global__ void __launch_bounds__(UnitShape<rows>::threads, 1) trellis_unit_rows_kernel(const UnitLaunch args) {
  using Shape = UnitShape<rows>;
  constexpr int bits = Codes::bits;
  using Memory = RowsMemory<bits, rows>;
  extern __shared__ __align__(128) char memory[];
  device::trigger_dependent_launch();
  const int warp = frame::warp_index(), lane = static_cast<int>(threadIdx.x) % 32;
  const int begin = args.blocks.begin(blockIdx.x), end = args.blocks.begin(blockIdx.x + 1);
  const frame::Partition runs(end - begin, Shape::warps);
  const int run_begin = begin + runs.begin(warp), run_end = begin + runs.begin(warp + 1);
  UnitRing<bits> ring(memory + warp * UnitRing<bits>::bytes);
  const uint4* codes = reinterpret_cast<const uint4*>(args.codes) + int64_t{run_begin} * ring.unit_quads + lane;
  int to_fetch = run_end - run_begin;
  const auto fetch = [&](int place) {
    if (to_fetch > 0) {
      ring.copy(place, codes);
      codes += ring.unit_quads;
      --to_fetch;
    }
    device::close_async_group();
  };
#pragma unroll
  for (int stage = 0; stage < ring.stages - 1; ++stage) fetch(stage * ring.stage_bytes);
  const int units = args.units;
  const UnitPieces pieces(begin - args.group_of(begin) * units, end - begin, units);
  const RowsStager<rows> stager{args, pieces};
  stager.prefetch();
  const frame::FixUp plan(units, args.blocks);
  if (warp == 0) prefetch_scales<false>(args, plan);
  device::wait_grid_dependency();
  char* const inputs = memory + Memory::inputs_at;
  stager.run(inputs);

  char* const left = memory + Memory::left_at(pieces.count());
  LevelSums<Shape::groups> sums;
  int strip = args.group_of(run_begin), unit = run_begin - strip * units;
  for (int at = run_begin; at < run_end;) {
    const int past = min(unit + run_end - at, units);
    at += past - unit;
    sums.clear();
#pragma unroll 1
    for (; unit < past; ++unit) {
      device::wait_async<ring.stages - 2>();
      uint32_t words[4 * bits];
      ring.read(words);
      const char* const of_unit = inputs + pieces.place(unit) * Shape::unit_bytes;
      uint4 x[Shape::groups];
#pragma unroll
      for (int group = 0; group < Shape::groups; ++group) {
        x[group] = *reinterpret_cast<const uint4*>(of_unit + Shape::input_at(group, lane, unit));
      }
      unroll<2>([&]<int step>() {
        uint32_t first[bits], second[bits];
#pragma unroll
        for (int w = 0; w < bits; ++w) {
          first[w] = words[2 * bits * step + w];
          second[w] = words[2 * bits * step + bits + w];
        }
        const ColumnPair<Codes> low(first), high(second);
        uint2 b[Shape::groups];
#pragma unroll
        for (int group = 0; group < Shape::groups; ++group) b[group] = frame::block_step(x[group], step);
        sums.multiply(low, high, args.mask, b);
        if constexpr (step == 0) fetch(ring.used);
      });
      ring.next();
    }
    if (at < run_end) leave_sums<rows>(sums, left + (strip - plan.first_group) * Shape::sum_bytes);
    ++strip;
    unit = 0;
  }
  __syncthreads();  // codes and inputs are used up
  if (run_begin < run_end) leave_sums<rows>(sums, memory + warp * Shape::sum_bytes);
  RowsEnd<bits, rows>{args, plan, runs, begin, end, memory, left, warp}.run();
}

constexpr int schedulers = 4;  ///< of a multiprocessor, among which the units of a block are shared
int strip_units(int64_t k) { return static_cast<int>(2 * ((k + Map::tile_cols - 1) / Map::tile_cols)); }

int rows_blocks(int64_t strips, int64_t k, int most) {
  return fewest_blocks(strips * strip_units(k), schedulers, most);
}

/// Shared memory of a block.
template <int bits, int rows>
int64_t rows_bytes(int64_t strips, int64_t k, int blocks) {
  const int64_t units = strip_units(k);
  return RowsMemory<bits, rows>::bytes((strips * units + blocks - 1) / blocks, static_cast<int>(units));
}

template <class Codes, int rows>
void launch_unit_shape(const TrellisLaunch& args, int most_blocks, const device::Stream& stream,
                       std::string_view shape) {
  const int units = strip_units(args.k), blocks = rows_blocks(args.n_tiles, args.k, most_blocks);
  const auto bytes = static_cast<size_t>(rows_bytes<Codes::bits, rows>(args.n_tiles, args.k, blocks));
  const LaunchShape in{dim3(static_cast<unsigned>(blocks)), UnitShape<rows>::threads, bytes, args.overlap};
  launch<trellis_unit_rows_kernel<Codes, rows>>(in, stream, "launching a kernel",
                                                UnitLaunch(args, blocks, units, units));
  device::check_launch("trellis_unit_rows", shape);
}

}  // namespace

bool unit_rows_take(const device::Properties& gpu, int bits, int64_t n, int64_t k, int64_t m, int most_blocks) {
  const int64_t strips = Map(n, k).row_groups, units = strip_units(k);
  if (strips * units * units > UINT32_MAX) return false;
  const int blocks = rows_blocks(strips, k, most_blocks);
  int64_t bytes = 0;
  with_bits<2, 3, 4>(bits, [&]<int width>() {
    bytes = m <= 8 ? rows_bytes<width, 8>(strips, k, blocks) : rows_bytes<width, 16>(strips, k, blocks);
  });
  return bytes <= static_cast<int64_t>(gpu.shared_bytes_per_block_optin);
}

void launch_unit_rows(const TrellisLaunch& args, const formats::Scheme& scheme, int blocks,
                      const device::Stream& stream, std::string_view shape) {
  with_codes(scheme, [&]<class Codes>() {
    if (args.m <= 8) return launch_unit_shape<Codes, 8>(args, blocks, stream, shape);
    launch_unit_shape<Codes, 16>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::trellis
