// Integer linear layer on block-interleaved words (layout_interleaved.h) for 1 to 8 activation rows: memory-bound, so
// everything serves an unbroken stream of weights (gemv_block.cuh).
//
// A lane's 128-bit load holds 32 inputs of one output, the lane's own. Tensor cores want four lanes to hold an output
// together; here each of these four lanes has an output of its own, and the B operand keeps them apart: its column c is
// zero but where lane c mod 4 stands. So a product m16n8k16 takes 4 inputs of 64 outputs, as full of weights as any
// other, and its columns c and c + 4 are two activation rows:
//
//   A    lane 4g + t: output 4g + t (half 0) and 32 + 4g + t (half 1), inputs (p, p + 4) and (p + 1, p + 5) of a word
//   B    column t + 4·row, the same inputs at lane t's place of k, zero elsewhere
//   sums lane 4g + t: outputs 4g + 2·(t mod 2) and the next, both halves, row t div 2
#include "device/async_copy.cuh"
#include "kernels/gemv_block.cuh"
#include "kernels/integer_launch.cuh"
#include "kernels/kbit_gemv_run.cuh"
#include "repack/layout_interleaved.h"

namespace w4q::kernels::integer {
namespace {

constexpr int block_inputs = 32;
constexpr int blocks_per_tile = 2;

/// Four pairs of a word, code − 8 as pairs (j, j + 4), exactly.
template <class Type>
__device__ __forceinline__ uint32_t centered_pair(uint32_t word, int pair) {
  constexpr uint32_t mask = 0x000F000Fu;
  if constexpr (std::is_same_v<Type, device::HalfType>) {
    const uint32_t biased = device::and_or(word >> (4 * pair), mask, 0x64006400u);  // 1024 + code
    const __half2 centered = __hadd2(reinterpret_cast<const __half2&>(biased), __half2half2(__float2half(-1032.0f)));
    return reinterpret_cast<const uint32_t&>(centered);
  } else {
    const uint32_t biased = device::and_or(word >> (4 * pair), mask, 0x43004300u);  // 128 + code
    uint32_t centered;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(centered) : "r"(biased), "r"(0x3F803F80u), "r"(0xC308C308u));
    return centered;
  }
}

/// A lane's codes of 64 outputs × 64 inputs: [block][half], and its scales.
struct InterleavedTile {
  uint4 codes[blocks_per_tile][2];
  uint32_t scales[blocks_per_tile][2];  ///< of two neighbouring outputs: those whose sums the lane gets
};

struct InterleavedReader {
  const uint4* codes;
  const unsigned short* scales;
  int64_t n;
  int blocks;
  int lane_output, sum_output;

  __device__ explicit InterleavedReader(const Launch& args)
      : codes(reinterpret_cast<const uint4*>(args.codes)),
        scales(static_cast<const unsigned short*>(args.scales)),
        n(args.n),
        blocks(static_cast<int>((args.k + block_inputs - 1) / block_inputs)),
        lane_output(threadIdx.x % 32),
        sum_output(threadIdx.x % 32 / 4 * 4 + threadIdx.x % 2 * 2) {}

  /// Outputs beyond n and blocks beyond k are read from inside: their sums are not stored, or they meet zeros.
  __device__ void load(InterleavedTile& tile, int group, int column) const {
#pragma unroll
    for (int b = 0; b < blocks_per_tile; ++b) {
      const int64_t first = static_cast<int64_t>(min(blocks_per_tile * column + b, blocks - 1)) * n;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int output = 64 * group + 32 * half;
        tile.codes[b][half] = device::load_once(codes + first + min(static_cast<int64_t>(output + lane_output), n - 1));
        tile.scales[b][half] = load_scales(first, output + sum_output);
      }
    }
  }

 private:
  __device__ uint32_t load_scales(int64_t first, int output) const {
    const unsigned short* const from = scales + first;
    if (n % 2 == 0 && output < n) return __ldg(reinterpret_cast<const uint32_t*>(from + output));
    const uint32_t low = __ldg(from + min(static_cast<int64_t>(output), n - 1));
    const uint32_t high = __ldg(from + min(static_cast<int64_t>(output) + 1, n - 1));
    return low | high << 16;
  }
};

/// A warp's activations of one tile in shared memory: [row][8 inputs, 16 bytes], then 16 bytes of zeros.
template <class Scalar, int rows>
struct StagedInputs {
  static constexpr int chunks = 8;
  static constexpr int bytes = (rows * chunks + 1) * 16;

  /// Starts fetching; zeros beyond k.
  __device__ static void fetch(const Launch& args, int column, char* stage) {
    const auto* x = static_cast<const Scalar*>(args.x);
#pragma unroll
    for (int c = threadIdx.x % 32; c < rows * chunks; c += 32) {
      const int row = min(c / chunks, args.m - 1);
      const int64_t first = int64_t{64} * column + 8 * (c % chunks);
      const Scalar* from = x + row * args.ldx + first;
      const int64_t left = args.k - first;
      if (args.aligned && left >= 8) {
        device::copy_async(stage + 16 * c, from);
      } else {
        *reinterpret_cast<uint4*>(stage + 16 * c) = kbit::load_ragged(from, static_cast<int>(left));
      }
    }
  }
};

/// A lane's sums: [pair of rows][half][two neighbouring outputs].
template <int rows>
struct InterleavedTotals {
  static constexpr int operands = (rows + 1) / 2;
  float sums[operands][2][2];

  __device__ void clear() {
#pragma unroll
    for (auto& of_rows : sums) {
#pragma unroll
      for (auto& half : of_rows) half[0] = half[1] = 0;
    }
  }
  template <class Use>
  __device__ void for_each(const Use& use) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int o = 0; o < operands; ++o) {
      const int row = 2 * o + lane % 4 / 2;
      if (row >= rows) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) use(32 * (i / 2) + lane / 4 * 4 + lane % 2 * 2 + i % 2, row, sums[o][i / 2][i % 2]);
    }
  }
};

/// One warp's way through its run of tiles.
template <class Activation, int rows, int tiles, int warps>
struct InterleavedRun {
  using Scalar = typename Activation::Scalar;
  using At = kbit::Span<tiles>;
  using Inputs = StagedInputs<Scalar, rows>;
  static constexpr int operands = InterleavedTotals<rows>::operands;

  const Launch& args;
  const InterleavedReader weights;
  const int end;
  At span;
  InterleavedTile ring[tiles];
  char* stages;              ///< `tiles` of this warp
  int lane_chunk[operands];  ///< where the lane's B operand is in a stage, or the zeros

  __device__ InterleavedRun(const Launch& launch, int begin, int past)
      : args(launch), weights(launch), end(past), span(launch, begin, past) {
    extern __shared__ uint4 shared[];
    stages = reinterpret_cast<char*>(shared) + (threadIdx.x / 32) * tiles * Inputs::bytes;
    const int lane = threadIdx.x % 32;
    const int row = lane / 16;  // of the operand: column g = lane / 4 is row g / 4
#pragma unroll
    for (int o = 0; o < operands; ++o) {
      const bool mine = lane / 4 % 4 == lane % 4 && 2 * o + row < rows;
      lane_chunk[o] = mine ? (2 * o + row) * Inputs::chunks : -1;
    }
    if (lane < tiles) *reinterpret_cast<uint4*>(stages + lane * Inputs::bytes + rows * Inputs::chunks * 16) = uint4{};
  }

  /// Fills the ring; touches weights only.
  __device__ void load_first_weights() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j < span.count) weights.load(ring[j], span.group, span.column + j);
    }
  }
  __device__ void load_first_activations() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j < span.count) Inputs::fetch(args, span.column + j, stages + j * Inputs::bytes);
      device::close_async_group();
    }
  }

  /// Multiplies the span at hand, adds it to `totals`, and loads the one behind it, which becomes the one at hand.
  template <class View>
  __device__ void step(const View&, InterleavedTotals<rows>& totals) {
    const At next = span.next(args, end);
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      device::wait_async<tiles - 1>();
      __syncwarp();
      if (j < span.count) multiply(ring[j], stages + j * Inputs::bytes, totals);
      __syncwarp();
      if (j < next.count) {
        weights.load(ring[j], next.group, next.column + j);
        Inputs::fetch(args, next.column + j, stages + j * Inputs::bytes);
      }
      device::close_async_group();
    }
    span = next;
  }

 private:
  __device__ void multiply(const InterleavedTile& tile, const char* stage, InterleavedTotals<rows>& totals) const {
#pragma unroll
    for (int b = 0; b < blocks_per_tile; ++b) {
      float products[operands][4] = {};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t pairs[operands][4];
#pragma unroll
        for (int o = 0; o < operands; ++o) load_pairs(stage, o, 4 * b + w, pairs[o]);
#pragma unroll
        for (int p = 0; p < 4; p += 2) {
          uint32_t a[4];
#pragma unroll
          for (int reg = 0; reg < 4; ++reg) {
            a[reg] = centered_pair<Activation>(word(tile.codes[b][reg % 2], w), p + reg / 2);
          }
#pragma unroll
          for (int o = 0; o < operands; ++o) Activation::mma(products[o], a, pairs[o][p], pairs[o][p + 1]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 scale = __half22float2(reinterpret_cast<const __half2&>(tile.scales[b][half]));
#pragma unroll
        for (int o = 0; o < operands; ++o) {
          totals.sums[o][half][0] = fmaf(products[o][2 * half], scale.x, totals.sums[o][half][0]);
          totals.sums[o][half][1] = fmaf(products[o][2 * half + 1], scale.y, totals.sums[o][half][1]);
        }
      }
    }
  }

  /// The activations of a word's eight inputs as pairs (j, j + 4); zeros where the lane's column is another's.
  __device__ void load_pairs(const char* stage, int operand, int chunk, uint32_t (&pairs)[4]) const {
    const int at = lane_chunk[operand] < 0 ? rows * Inputs::chunks : lane_chunk[operand] + chunk;
    const uint4 x = *reinterpret_cast<const uint4*>(stage + 16 * at);
    pairs[0] = __byte_perm(x.x, x.z, 0x5410);
    pairs[1] = __byte_perm(x.x, x.z, 0x7632);
    pairs[2] = __byte_perm(x.y, x.w, 0x5410);
    pairs[3] = __byte_perm(x.y, x.w, 0x7632);
  }
  __device__ static uint32_t word(const uint4& v, int w) { return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w; }
};

template <class Activation, int most_rows>
struct InterleavedGemv {
  using Args = Launch;
  using Type = Activation;
  static constexpr int rows = most_rows;
  static constexpr int warps = 12;
  static constexpr int tiles = 3;
  using Totals = InterleavedTotals<rows>;
  using Run = InterleavedRun<Type, rows, tiles, warps>;

  /// In front of the sums: the activations on their way.
  struct Table {
    static constexpr int stage_bytes = warps * tiles * StagedInputs<typename Type::Scalar, rows>::bytes;
    static constexpr int tail_bytes = warps * 64 * rows * 4;
    static constexpr int total_bytes = stage_bytes > tail_bytes ? stage_bytes : tail_bytes;
    struct View {
      __device__ explicit View(const char*) {}
    };
    __device__ static void fill(char*, const Launch&) {}
  };
};

template <class Gemv>
__global__ void __launch_bounds__(Gemv::warps * 32, 1) interleaved_gemv_kernel(const Launch args) {
  gemv_block<Gemv>(args);
}

template <class Type, int rows>
void launch_rows(const Launch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  using Gemv = InterleavedGemv<Type, rows>;
  constexpr int shared_bytes = Gemv::Table::total_bytes + kbit::Slots<rows, Gemv::warps>::extra_bytes;
  kbit::launch_kernel<interleaved_gemv_kernel<Gemv>, shared_bytes>(args, blocks, Gemv::warps * 32, stream,
                                                                   "interleaved_gemv", shape);
}

template <class Type>
void launch_type(const Launch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  if (args.m == 1) return launch_rows<Type, 1>(args, blocks, stream, shape);
  if (args.m == 2) return launch_rows<Type, 2>(args, blocks, stream, shape);
  if (args.m <= 4) return launch_rows<Type, 4>(args, blocks, stream, shape);
  launch_rows<Type, 8>(args, blocks, stream, shape);
}

}  // namespace

void launch_interleaved_gemv(const Launch& args, DType activation, int blocks, cudaStream_t stream,
                             std::string_view shape) {
  if (activation == DType::f16) return launch_type<device::HalfType>(args, blocks, stream, shape);
  launch_type<device::Bf16Type>(args, blocks, stream, shape);
}

}  // namespace w4q::kernels::integer
