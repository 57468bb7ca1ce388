// What a launch of the GEMV of rotated weights needs, and which part of the rotated input a block of it holds.
#pragma once

#include "kernels/kbit_launch.cuh"

namespace w4q::kernels::rotated {

/// One pass of a launch.
struct Source {
  const uint4* codes;
  const uint4* norms;
  const float* levels;
  const uint32_t* signs;  ///< of its rotation: bit i of all is set where input i is negated
  int groups;             ///< norms of an output
  int group_shift;        ///< a group is 2^group_shift inputs; 31: all are one group
  int table_exponent;     ///< the levels times two to this is what its table holds
  float factor;           ///< its sums times this are on the scale of the first pass's
};

/// Up to two passes side by side: tiles of both stand in a row, first those of the one, then those of the other.
struct RotatedLaunch : kbit::Launch {
  Source sources[2];
  int passes;            ///< 1 or 2
  int pass_tiles;        ///< tiles along k of one pass
  int inputs;            ///< rotated inputs: 1 where passes share a rotation, otherwise one for each pass
  bool rotates;          ///< x is yet to be rotated, one row
  int block;             ///< of the rotation, where it rotates: 32, 64 or 128
  float root;            ///< 1 / √block
  int chunks;            ///< of 128 inputs, in one rotated input
  int64_t input_stride;  ///< not rotating: elements from one rotated input to the other
};

/// A tile column of a launch: the pass it belongs to, and its place there.
struct PassColumn {
  int pass, column;
  __device__ PassColumn(int pass_, int column_) : pass(pass_), column(column_) {}
  __device__ PassColumn(const RotatedLaunch& args, int column_of_launch)
      : pass(column_of_launch >= args.pass_tiles ? 1 : 0), column(column_of_launch - pass * args.pass_tiles) {}
};

constexpr int chunk = 128;  ///< inputs
constexpr int most_shared_bytes = 99 * 1024;

/// The chunks of rotated input that a block multiplies: from `first` on, `count` of a circle of `period`.
struct HeldChunks {
  int first = 0, count = 0, period = 0;

  __device__ HeldChunks() = default;
  __device__ HeldChunks(const RotatedLaunch& args, int begin, int end) : count(0), period(args.chunks * args.inputs) {
    // Fewer than a whole round, less a tile that may lie in the first chunk again: else all of them.
    count = period;
    if (end - begin + 2 > args.pass_tiles * args.inputs || end == begin) return;
    first = chunk_of(args, PassColumn(args, begin % args.col_groups));
    const int last = chunk_of(args, PassColumn(args, (end - 1) % args.col_groups));
    count = last - first + (last < first ? period : 0) + 1;
  }
  __device__ int slot(const RotatedLaunch& args, const PassColumn& at) const {
    const int index = chunk_of(args, at) - first;
    return index < 0 ? index + period : index;
  }

 private:
  __device__ static int chunk_of(const RotatedLaunch& args, const PassColumn& at) {
    return (args.inputs > 1 ? at.pass * args.chunks : 0) + at.column / 2;
  }
};

/// Which widths of codes one launch takes together.
inline bool widths_fit(int first, int second) {
  return (first == second && (first == 3 || first == 4)) || (first == 4 && second == 2);
}

/// 1 to 16 rows of f16 (rotated_gemv_cuda.cu). `second_bits` is 0 where there is one pass.
void launch_gemv(const RotatedLaunch& args, int first_bits, int second_bits, int blocks, cudaStream_t stream,
                 std::string_view shape);
/// Whether a block of such a launch has room for its part of the rotated input.
bool holds_input(const RotatedLaunch& args, int blocks);

}  // namespace w4q::kernels::rotated
