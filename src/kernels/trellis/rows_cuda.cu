// 2 to 16 rows of f16 by trellises, exactly: levels are whole numbers that f16 holds, products and sums are fp32.
//
//   bytes   n·k·bits/8 of codes, 2·n of scales, once
//   decode  a product's four bytes are added up to 1024 + sum in the bits of an f16 (dp4a), two columns are a register of
//           mma.m16n8k16. 1024 + 510 times the sum of the inputs, which a row tile of ones makes, is taken off in the end. Rows 16·g + 2·r and + 1 are row tile r, columns 4·i … 4·i + 3 of a
//           lane step i
//   work    a block takes a contiguous run of tiles. Of each strip in it all warps take a share, whose sums are added up
//           in shared memory; a strip that blocks share is completed by the block with its last tile, at the very end
//   class   E2
#include "kernels/frame/fix_up.cuh"
#include "kernels/trellis/gemv_run.cuh"
#include "kernels/trellis/levels.cuh"

namespace w4q::kernels::trellis {
namespace {

using device::HalfType;

template <int rows>
struct Shape {
  static constexpr int groups = rows / 8;  ///< operands of eight columns
  static constexpr int warps = 12;
  static constexpr int threads = warps * 32;
  static constexpr int values = 8 * Map::tile_rows;  ///< of a group
  static constexpr int stride = Map::tile_rows + 4;  ///< floats from row to row of sums
  static constexpr int slot = 8 * stride;            ///< of a group
  static constexpr int shared_bytes = (warps + groups) * slot * 4;

  /// Where an output of a row stands, such that neither lanes of an mma nor neighbouring outputs meet in a bank.
  __device__ static constexpr int place(int output) {
    const int g = output / 16, r = output % 16 / 2;
    return 16 * r + ((2 * g + output % 2 + 4 * (r / 2)) & 15);
  }
};

/// A strip, or the part of one, that a block has: tiles [begin, end).
struct Segment {
  int group, begin, end;
  __device__ Segment(const TrellisLaunch& args, int at, int past)
      : group(at / args.k_tiles), begin(at), end(min(past, (group + 1) * args.k_tiles)) {}
};

template <class Codes, int rows>
struct RowsRun {
  static constexpr int bits = Codes::bits, groups = Shape<rows>::groups;
  const TrellisLaunch& args;
  const uint4* const codes;
  const __half* x[groups];
  int tile = 0, end = 0;
  WordRing<Codes::quads> ring;
  uint4 inputs[groups][2];  ///< the lane's 16 of a row
  LevelSums<groups> sums;

  __device__ explicit RowsRun(const TrellisLaunch& launch)
      : args(launch), codes(reinterpret_cast<const uint4*>(launch.codes) + threadIdx.x % 32) {
    const int g = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      x[group] = static_cast<const __half*>(args.x) + min(8 * group + g, args.m - 1) * args.ldx;
    }
  }

  /// This warp's share of a segment; touches weights only.
  __device__ __forceinline__ void begin(const Segment& segment) {
    const frame::Partition shares(segment.end - segment.begin, Shape<rows>::warps);
    tile = segment.begin + shares.begin(frame::warp_index());
    end = segment.begin + shares.begin(frame::warp_index() + 1);
    if (tile >= end) return;
#pragma unroll
    for (int j = 0; j < Codes::quads; ++j) ring.load(words_of(tile), j);
  }
  __device__ __forceinline__ void load_first_inputs() {
    if (tile >= end) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) load_inputs(tile, half);
  }
  __device__ __forceinline__ void multiply_all() {
    sums.clear();
    for (; tile < end; ++tile) multiply(tile + 1 < end);
  }
  /// Those of eight rows to a slot.
  __device__ __forceinline__ void leave_sums(int group, float* to) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const float offset = level_offset * sums.input_sum(group, column);
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const float* const of = sums.sums[group][r];
        *reinterpret_cast<float2*>(to + (2 * t + column) * Shape<rows>::stride + Shape<rows>::place(16 * g + 2 * r)) =
            make_float2(of[column] - offset, of[2 + column] - offset);
      }
    }
  }

 private:
  __device__ __forceinline__ const uint4* words_of(int at) const {
    return codes + int64_t{at} * (Map::tile_words(bits) / 4);
  }
  __device__ __forceinline__ void load_inputs(int at, int half) {
    const int column = at % args.k_tiles * 64 + 16 * static_cast<int>(threadIdx.x % 4) + 8 * half;
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      const int left = static_cast<int>(args.k) - column;
      inputs[group][half] = args.aligned && left >= 8 ? *reinterpret_cast<const uint4*>(x[group] + column)
                                                      : frame::load_ragged(x[group] + column, left);
    }
  }
  __device__ __forceinline__ void multiply(bool goes_on) {
    const uint4* const next = words_of(tile + 1);
    unroll<4>([&]<int i>() {
      uint32_t first[bits], second[bits];
#pragma unroll
      for (int w = 0; w < bits; ++w) {
        first[w] = ring.word(2 * bits * i + w);
        second[w] = ring.word(2 * bits * i + bits + w);
      }
      const ColumnPair<Codes> low(first), high(second);
      // What is used up is loaded anew.
      constexpr int used = bits * i / 2, now_used = bits * (i + 1) / 2;
#pragma unroll
      for (int j = used; j < now_used; ++j) {
        if (goes_on) ring.load(next, j);
      }
      uint2 b[groups];
#pragma unroll
      for (int group = 0; group < groups; ++group) b[group] = frame::block_step(inputs[group][i / 2], i);
      sums.multiply(low, high, args.mask, b);
      if (i % 2 == 1 && goes_on) load_inputs(tile + 1, i / 2);
    });
  }
};

/// A thread's sums of those that other blocks made, of all groups: of several blocks at once, one trip to the L2 cache.
template <class Shape>
struct SharedSums {
  static constexpr int count = (Shape::values + Shape::threads - 1) / Shape::threads;  ///< of a group
  static constexpr int words = Shape::groups * count, at_once = 4;
  float totals[words] = {};

  __device__ static bool exists(int word) {
    return static_cast<int>(threadIdx.x) + word % count * Shape::threads < Shape::values;
  }
  /// In the order of blocks, of which `senders` left theirs from `from` on.
  __device__ __forceinline__ void receive(frame::MailboxWord* from, int senders) {
    constexpr int apart = Shape::groups * Shape::values;
#pragma unroll 1
    for (int done = 0; done < senders; done += at_once, from += at_once * apart) {
      frame::MailboxWord got[at_once][words];
      bool complete = false;
      while (!complete) {
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
#pragma unroll
          for (int j = 0; j < words; ++j) {
            got[i][j] = done + i < senders && exists(j) ? frame::peek(from + i * apart + place(j)) : ~0ull;
          }
        }
        complete = true;
#pragma unroll
        for (int i = 0; i < at_once; ++i) {
#pragma unroll
          for (int j = 0; j < words; ++j) complete &= got[i][j] >> 32 != 0;
        }
      }
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        if (done + i >= senders) break;
#pragma unroll
        for (int j = 0; j < words; ++j) {
          if (!exists(j)) continue;
          from[i * apart + place(j)] = 0;
          totals[j] += __uint_as_float(static_cast<uint32_t>(got[i][j]));
        }
      }
    }
  }

 private:
  __device__ static int place(int word) {
    return word / count * Shape::values + static_cast<int>(threadIdx.x) + word % count * Shape::threads;
  }
};

template <class Codes, int rows>
__global__ void __launch_bounds__(Shape<rows>::warps * 32, 1) trellis_rows_kernel(const TrellisLaunch args) {
  using Shape = trellis::Shape<rows>;
  extern __shared__ uint4 shared[];
  device::trigger_dependent_launch();
  float* const slots = reinterpret_cast<float*>(shared);
  float* const held = slots + Shape::warps * Shape::slot;  // of the strip that other blocks began
  const frame::Partition blocks(args.tiles, gridDim.x);
  const int begin = blocks.begin(blockIdx.x), end = blocks.begin(blockIdx.x + 1);
  const frame::FixUp plan(args, blocks);
  const bool holds = plan.first_sharer < static_cast<int>(blockIdx.x);
  RowsRun<Codes, rows> run(args);
  Segment segment(args, begin, end);
  run.begin(segment);
  const rotated::RowShare share{args.inputs, const_cast<__half*>(static_cast<const __half*>(args.x)), args.ldx, 0};
  const bool shares = args.inputs.barrier != nullptr;
  uint32_t token = 0;
  if (shares) {
    share.template begin<Shape::warps>();
    token = share.template finish<Shape::warps>();
  } else {
    device::wait_grid_dependency();
  }
  const auto mailbox = [&](int block, int group) {
    return args.mailboxes + (static_cast<int64_t>(block) * Shape::groups + group) * Shape::values;
  };
  constexpr int outputs = Map::tile_rows;
  const auto for_each_value = [&](const auto& use) {  // use(i, value, place in a slot)
#pragma unroll
    for (int i = 0; i < SharedSums<Shape>::count; ++i) {
      const int value = static_cast<int>(threadIdx.x) + i * Shape::threads;
      if (value < Shape::values) use(i, value, value / outputs * Shape::stride + Shape::place(value % outputs));
    }
  };
  const auto store = [&](int strip, int group, int value, float sum) {
    frame::store_output<HalfType>(args, strip * outputs + value % outputs, 8 * group + value / outputs, sum);
  };
  while (true) {
    run.load_first_inputs();
    if (shares && threadIdx.x == 0 && segment.begin == begin) frame::empty_if_last(args.inputs.barrier, token);
    run.multiply_all();
    const Segment here = segment;
    if (here.end < end) {
      segment = Segment(args, here.end, end);
      run.begin(segment);
    }
    const bool sends = here.group == plan.final_group && plan.shares_final;
    const bool waits = !sends && holds && here.group == plan.first_group;
#pragma unroll
    for (int group = 0; group < Shape::groups; ++group) {
      run.leave_sums(group, slots + frame::warp_index() * Shape::slot);
      __syncthreads();
      for_each_value([&](int, int value, int at) {
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < Shape::warps; ++warp) sum += slots[warp * Shape::slot + at];
        if (sends) return frame::send(mailbox(static_cast<int>(blockIdx.x), group) + value, sum);
        if (waits) {
          held[group * Shape::slot + at] = sum;
        } else {
          store(here.group, group, value, sum);
        }
      });
      if (group + 1 < Shape::groups || here.end < end) __syncthreads();
    }
    if (here.end == end) break;
  }
  if (!holds || (plan.first_group == plan.final_group && plan.shares_final)) return;
  SharedSums<Shape> others;
  others.receive(mailbox(plan.first_sharer, 0), static_cast<int>(blockIdx.x) - plan.first_sharer);
#pragma unroll
  for (int group = 0; group < Shape::groups; ++group) {
    for_each_value([&](int i, int value, int at) {  // by the thread that left it there
      store(plan.first_group, group, value,
            others.totals[group * SharedSums<Shape>::count + i] + held[group * Shape::slot + at]);
    });
  }
}

template <class Codes, int rows>
void launch_shape(const TrellisLaunch& args, int blocks, const device::Stream& stream, std::string_view shape) {
  frame::launch_kernel<trellis_rows_kernel<Codes, rows>, Shape<rows>::shared_bytes>(
      args, blocks, Shape<rows>::warps * 32, stream, "trellis_rows", shape);
}

}  // namespace

void launch_rows(const TrellisLaunch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                 std::string_view shape) {
  with_codes(scheme, [&]<class Codes>() {
    if (args.m <= 8) return launch_shape<Codes, 8>(args, blocks, stream, shape);
    launch_shape<Codes, 16>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::trellis
