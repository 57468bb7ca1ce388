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
#include "kernels/frame/gemv_block.cuh"
#include "kernels/frame/gemv_run.cuh"
#include "kernels/integer/launch.cuh"
#include "repack/layout_interleaved.h"

namespace w4q::kernels::integer {
namespace {

constexpr int block_inputs = 32;
constexpr int blocks_per_tile = 2;

/// A lane's codes of 64 outputs × 64 inputs: [block][half], and what scales the sums that it gets, of two neighbouring
/// outputs.
template <bool with_zeros>
struct InterleavedTile {
  uint4 codes[blocks_per_tile][2];
  uint32_t scales[blocks_per_tile][2];
  uint32_t zeros[with_zeros ? blocks_per_tile : 1][2];  ///< words; the lane's nibbles begin at zero_shift()

  __device__ static int zero_shift() { return 4 * (threadIdx.x % 8 / 4 * 4 + threadIdx.x % 2 * 2); }
};

template <bool with_zeros>
struct InterleavedReader {
  using Tile = InterleavedTile<with_zeros>;
  const uint4* codes;
  const unsigned short* scales;
  const uint32_t* zeros;
  int64_t n, zero_words;
  int blocks, group_shift;
  int lane_output, sum_output;

  __device__ explicit InterleavedReader(const InterleavedLaunch& args)
      : codes(reinterpret_cast<const uint4*>(args.codes)),
        scales(static_cast<const unsigned short*>(args.scales)),
        zeros(args.zeros),
        n(args.n),
        zero_words(args.zero_words),
        blocks(static_cast<int>((args.k + block_inputs - 1) / block_inputs)),
        group_shift(args.group_shift),
        lane_output(threadIdx.x % 32),
        sum_output(threadIdx.x % 32 / 4 * 4 + threadIdx.x % 2 * 2) {}

  __device__ void load(Tile& tile, int group, int column) const {
    const bool whole = 64 * group + 64 <= n && blocks_per_tile * (column + 1) <= blocks && n % 2 == 0;
    if (whole) {
      const uint4* const code = codes + blocks_per_tile * column * n + 64 * group + lane_output;
#pragma unroll
      for (int b = 0; b < blocks_per_tile; ++b) {
        const int64_t of_inputs = (blocks_per_tile * column + b) >> group_shift;
        const unsigned short* const scale = scales + of_inputs * n + 64 * group + sum_output;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          tile.codes[b][half] = device::load_once(code + b * n + 32 * half);
          tile.scales[b][half] = __ldg(reinterpret_cast<const uint32_t*>(scale + 32 * half));
          load_zeros(tile, b, half, of_inputs, 64 * group + 32 * half + sum_output);
        }
      }
    } else {
      load_ragged(tile, group, column);
    }
  }

 private:
  __device__ void load_zeros(Tile& tile, int block, int half, int64_t of_inputs, int64_t output) const {
    if constexpr (with_zeros) {
      tile.zeros[block][half] = __ldg(zeros + of_inputs * zero_words + min(output / 8, zero_words - 1));
    }
  }
  /// Outputs beyond n and blocks beyond k are read from inside: their sums are not stored, or they meet zeros.
  __device__ void load_ragged(Tile& tile, int group, int column) const {
    const auto inside = [&](int output) { return min(static_cast<int64_t>(output), n - 1); };
#pragma unroll
    for (int b = 0; b < blocks_per_tile; ++b) {
      const int64_t block = min(blocks_per_tile * column + b, blocks - 1);
      const int64_t of_inputs = block >> group_shift;
      const unsigned short* const scale = scales + of_inputs * n;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int output = 64 * group + 32 * half;
        tile.codes[b][half] = device::load_once(codes + block * n + inside(output + lane_output));
        tile.scales[b][half] = __ldg(scale + inside(output + sum_output)) |
                               static_cast<uint32_t>(__ldg(scale + inside(output + sum_output + 1))) << 16;
        load_zeros(tile, b, half, of_inputs, output + sum_output);
      }
    }
  }
};

/// A warp's activations of one tile in shared memory: [row][8 words of codes][inputs (j, j + 4) of the word], then 16
/// bytes of zeros.
template <class Scalar, int rows>
struct StagedInputs {
  static constexpr int chunks = 8;
  static constexpr int per_lane = (rows * chunks + 31) / 32;
  static constexpr int bytes = (rows * chunks + 1) * 16;
  uint4 x[per_lane];  ///< on their way

  __device__ void load(const Launch& args, int column) {
    const auto* const all = static_cast<const Scalar*>(args.x);
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
      const int c = threadIdx.x % 32 + 32 * i;
      if (c >= rows * chunks) break;
      const int64_t first = int64_t{64} * column + 8 * (c % chunks);
      const Scalar* const from = all + min(c / chunks, args.m - 1) * args.ldx + first;
      const int64_t left = args.k - first;
      x[i] = args.aligned && left >= 8 ? __ldg(reinterpret_cast<const uint4*>(from))
                                       : frame::load_ragged(from, static_cast<int>(left));
    }
  }
  __device__ void store(char* stage) const {
#pragma unroll
    for (int i = 0; i < per_lane; ++i) {
      const int c = threadIdx.x % 32 + 32 * i;
      if (c >= rows * chunks) break;
      *reinterpret_cast<uint4*>(stage + 16 * c) =
          make_uint4(__byte_perm(x[i].x, x[i].z, 0x5410), __byte_perm(x[i].x, x[i].z, 0x7632),
                     __byte_perm(x[i].y, x[i].w, 0x5410), __byte_perm(x[i].y, x[i].w, 0x7632));
    }
  }
};

/// A lane's sums: [pair of rows][half][two neighbouring outputs].
template <int rows>
struct InterleavedTotals {
  static constexpr int operands = (rows + 1) / 2;
  float sums[operands][2][2];

  __device__ void clear() { frame::set_zero(sums); }
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
  /// One row: outputs `lane` and `lane` + 32 of a finished N-tile.
  __device__ float2 pair() const {
    const int lane = threadIdx.x % 32;
    const auto fetch = [&](const float(&of_half)[2]) {
      const float even = __shfl_sync(0xFFFFFFFFu, of_half[0], lane / 4 * 4 + lane / 2 % 2);
      const float odd = __shfl_sync(0xFFFFFFFFu, of_half[1], lane / 4 * 4 + lane / 2 % 2);
      return lane % 2 == 0 ? even : odd;
    };
    return {fetch(sums[0][0]), fetch(sums[0][1])};
  }
};

/// One warp's way through its run of tiles.
template <class Activation, bool with_zeros, int rows, int tiles>
struct InterleavedRun {
  using Scalar = typename Activation::Scalar;
  using At = frame::Span<tiles>;
  using Inputs = StagedInputs<Scalar, rows>;
  using Code = Codec<4, Activation>;
  static constexpr int operands = InterleavedTotals<rows>::operands;

  struct Slot {
    InterleavedTile<with_zeros> weights;
    Inputs inputs;
  };

  const InterleavedLaunch& args;
  const InterleavedReader<with_zeros> weights;
  const int end;
  At span;
  Slot ring[tiles];
  char* stage;                    ///< of this warp: the activations at hand
  const char* operand[operands];  ///< where the lane's B operand begins; `step` apart, 0 for the zeros
  int step_bytes[operands];

  __device__ InterleavedRun(const InterleavedLaunch& launch, int begin, int past)
      : args(launch), weights(launch), end(past), span(launch, begin, past) {
    extern __shared__ uint4 shared[];
    stage = reinterpret_cast<char*>(shared) + threadIdx.x / 32 * Inputs::bytes;
    char* const zeros = stage + rows * Inputs::chunks * 16;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int o = 0; o < operands; ++o) {
      const int row = 2 * o + lane / 16;  // column g = lane / 4 is row g / 4 of the operand
      const bool mine = lane / 4 % 4 == lane % 4 && row < rows;
      operand[o] = mine ? stage + row * Inputs::chunks * 16 : zeros;
      step_bytes[o] = mine ? 16 : 0;
    }
    if (lane == 0) *reinterpret_cast<uint4*>(zeros) = uint4{};
  }

  /// Fills the ring; touches weights only.
  __device__ void load_first_weights() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j < span.count) weights.load(ring[j].weights, span.group, span.column + j);
    }
  }
  __device__ void load_first_activations() {
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      if (j < span.count) ring[j].inputs.load(args, span.column + j);
    }
  }

  /// Multiplies the span at hand, adds it to `totals`, and loads the one behind it, which becomes the one at hand.
  template <class View>
  __device__ void step(const View&, InterleavedTotals<rows>& totals) {
    const At next = span.next(args, end);
    frame::turn_ring(
        span, next, [&](int j) { multiply(ring[j], totals); },
        [&](int j) {
          weights.load(ring[j].weights, next.group, next.column + j);
          ring[j].inputs.load(args, next.column + j);
        });
    span = next;
  }

 private:
  __device__ void multiply(const Slot& slot, InterleavedTotals<rows>& totals) const {
    __syncwarp();
    slot.inputs.store(stage);
    __syncwarp();
#pragma unroll
    for (int b = 0; b < blocks_per_tile; ++b) {
      // The same zero point everywhere: products begin with −zero · (sum of the activations). Otherwise these sums are
      // kept, in units.
      constexpr uint32_t minus_zero = Code::half ? 0x80808080u : 0xC308C308u;
      constexpr uint32_t unit = with_zeros ? Code::unit_pair : minus_zero;
      const uint32_t units[4] = {unit, unit, unit, unit};
      float products[operands][4] = {};
      float inputs[with_zeros ? operands : 1][4] = {};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint4 x[operands];
#pragma unroll
        for (int o = 0; o < operands; ++o) {
          x[o] = *reinterpret_cast<const uint4*>(operand[o] + (4 * b + w) * step_bytes[o]);
        }
        const uint32_t code[2] = {word(slot.weights.codes[b][0], w), word(slot.weights.codes[b][1], w)};
#pragma unroll
        for (int p = 0; p < 4; p += 2) {
          uint32_t a[4];
#pragma unroll
          for (int reg = 0; reg < 4; ++reg) a[reg] = Code::pair(place(code[reg % 2], p + reg / 2));
#pragma unroll
          for (int o = 0; o < operands; ++o) {
            const uint32_t low = p == 0 ? x[o].x : x[o].z;
            const uint32_t high = p == 0 ? x[o].y : x[o].w;
            Activation::mma(with_zeros ? inputs[with_zeros ? o : 0] : products[o], units, low, high);
            Activation::mma(products[o], a, low, high);
          }
        }
      }
      if constexpr (with_zeros) take_zeros(inputs, slot.weights.zeros[b], products);
      scale(products, slot.weights.scales[b], totals);
    }
  }
  __device__ static void take_zeros(const float (&inputs)[operands][4], const uint32_t (&zeros)[2],
                                    float (&products)[operands][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t both = zeros[half] >> InterleavedTile<with_zeros>::zero_shift();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float zero = static_cast<float>(both >> (4 * i) & 15u) + Code::offset;
#pragma unroll
        for (int o = 0; o < operands; ++o) {
          products[o][2 * half + i] = fmaf(-zero, inputs[o][i], products[o][2 * half + i]);
        }
      }
    }
  }
  __device__ static void scale(const float (&products)[operands][4], const uint32_t (&scales)[2],
                               InterleavedTotals<rows>& totals) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 by = __half22float2(reinterpret_cast<const __half2&>(scales[half]));
#pragma unroll
      for (int o = 0; o < operands; ++o) {
        totals.sums[o][half][0] = fmaf(products[o][2 * half], by.x, totals.sums[o][half][0]);
        totals.sums[o][half][1] = fmaf(products[o][2 * half + 1], by.y, totals.sums[o][half][1]);
      }
    }
  }
  /// Nibbles p of a word's halves where Codec wants them.
  __device__ static uint32_t place(uint32_t word, int p) {
    if constexpr (Code::half) return p == 0 ? word * 16 : word >> (4 * p - 4);
    return word >> (4 * p);
  }
  __device__ static uint32_t word(const uint4& v, int w) { return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w; }
};

template <class Activation, int most_rows, bool with_zeros, bool fuses>
struct InterleavedGemv {
  using Args = InterleavedLaunch;
  using Type = Activation;
  static constexpr int rows = most_rows;
  static constexpr bool fused = fuses;
  static constexpr int warps = rows <= 2 && !with_zeros ? 16 : rows <= 4 ? 12 : 8;
  static constexpr int tiles = 2;
  using Totals = InterleavedTotals<rows>;
  using Run = InterleavedRun<Type, with_zeros, rows, tiles>;

  /// In front of the sums: the activations on their way.
  using Table = frame::NoTable<warps * StagedInputs<typename Type::Scalar, rows>::bytes, warps * 64 * rows * 4>;
};

template <class Gemv>
__global__ void __launch_bounds__(Gemv::warps * 32, 1) interleaved_gemv_kernel(const InterleavedLaunch args) {
  gemv_block<Gemv>(args);
}

template <class Type, bool with_zeros, int rows, bool fused = false>
void launch_rows(const InterleavedLaunch& args, int blocks, const device::Stream& stream, std::string_view shape) {
  using Gemv = InterleavedGemv<Type, rows, with_zeros, fused>;
  constexpr int shared_bytes = Gemv::Table::total_bytes + frame::PartialSums<rows, Gemv::warps>::extra_bytes;
  frame::launch_kernel<interleaved_gemv_kernel<Gemv>, shared_bytes>(args, blocks, Gemv::warps * 32, stream,
                                                                    "interleaved_gemv", shape);
}

template <class Type, bool with_zeros>
void launch_zeros(const InterleavedLaunch& args, int blocks, const device::Stream& stream, std::string_view shape) {
  if (args.m == 1) return launch_rows<Type, with_zeros, 1>(args, blocks, stream, shape);
  if (args.m == 2) return launch_rows<Type, with_zeros, 2>(args, blocks, stream, shape);
  if (args.m <= 4) return launch_rows<Type, with_zeros, 4>(args, blocks, stream, shape);
  launch_rows<Type, with_zeros, 8>(args, blocks, stream, shape);
}

template <class Type>
void launch_type(const InterleavedLaunch& args, int blocks, const device::Stream& stream, std::string_view shape) {
  if (args.zeros != nullptr) return launch_zeros<Type, true>(args, blocks, stream, shape);
  launch_zeros<Type, false>(args, blocks, stream, shape);
}

}  // namespace

void launch_interleaved_gemv(const InterleavedLaunch& args, DType activation, int blocks, const device::Stream& stream,
                             std::string_view shape) {
  if (activation == DType::f16) return launch_type<device::HalfType>(args, blocks, stream, shape);
  launch_type<device::Bf16Type>(args, blocks, stream, shape);
}

void launch_fused_interleaved_gemv(const InterleavedLaunch& args, int blocks, const device::Stream& stream,
                                   std::string_view shape) {
  using Half = device::HalfType;
  if (args.zeros != nullptr) return launch_rows<Half, true, 1, true>(args, blocks, stream, shape);
  launch_rows<Half, false, 1, true>(args, blocks, stream, shape);
}

}  // namespace w4q::kernels::integer
