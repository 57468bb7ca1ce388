// The plain kernel that the fast ones are compared with: bit-planes as they stand in kbit-tile, a codebook in the lanes
// of a warp, a shuffle per weight. A warp computes 8 outputs over the whole of k: weights are the B operand of
// mma.m16n8k16, 16 activation rows at a time the A operand. No pipeline, no split of k, one order of sums.
#include <type_traits>

#include "device/fragment.cuh"
#include "kernels/kbit/launch.cuh"
#include "repack/layout_kbit_tile.h"

namespace w4q::kernels::kbit {
namespace {

constexpr int warps = 8;
constexpr int warp_outputs = 8;
constexpr int most_row_tiles = 4;  ///< of 16 activation rows

__device__ float decode_scale(const Launch& args, int64_t slot, bool e4m4) {
  if (!e4m4) return __half2float(static_cast<const __half*>(args.scales)[slot]);
  // An E4M4 byte at this place of a float reads value · 2^-116.
  return __uint_as_float(static_cast<uint32_t>(static_cast<const uint8_t*>(args.scales)[slot]) << 19) * 0x1p116f;
}

/// The codes of a lane's output in one block: a word per plane.
template <int bits>
struct PlaneWords {
  uint32_t words[bits];

  __device__ void load(const uint32_t* from) {
#pragma unroll
    for (int plane = 0; plane < bits; ++plane) words[plane] = from[plane];
  }
  __device__ int code(int column) const {
    int code = 0;
#pragma unroll
    for (int plane = 0; plane < bits; ++plane) code |= (words[plane] >> column & 1u) << plane;
    return code;
  }
};

/// Two neighbouring activations of a row as a register of A; zeros outside.
template <class Scalar>
__device__ uint32_t load_pair(const Launch& args, int row, int64_t column) {
  if (row >= args.m) return 0;
  const auto* from = static_cast<const unsigned short*>(args.x) + row * args.ldx + column;
  const uint32_t low = column < args.k ? from[0] : 0;
  const uint32_t high = column + 1 < args.k ? from[1] : 0;
  return low | high << 16;
}

template <int bits, class Type, bool e4m4>
__global__ void __launch_bounds__(warps * 32) kbit_reference_kernel(const Launch args) {
  using Scalar = typename Type::Scalar;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int64_t output = (static_cast<int64_t>(blockIdx.x) * warps + threadIdx.x / 32) * warp_outputs + g;
  const repack::KbitTileMap map(args.n, args.k);
  const int64_t row = min(output, args.n - 1);  // rows beyond n are decoded as the last one and not stored
  const float level = args.codebook[lane % (1 << bits)];
  float sums[most_row_tiles][4] = {};
  for (int64_t block = 0; block < map.blocks(); ++block) {
    const int64_t slot = map.slot(row, block);
    PlaneWords<bits> planes;
    planes.load(args.codes + slot * bits);
    const float scale = decode_scale(args, slot, e4m4);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t b[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = 16 * step + 8 * half + 2 * t;
        const float low = __shfl_sync(0xFFFFFFFFu, level, planes.code(column)) * scale;
        const float high = __shfl_sync(0xFFFFFFFFu, level, planes.code(column + 1)) * scale;
        b[half] = Type::pack(low, high);
      }
#pragma unroll
      for (int tile = 0; tile < most_row_tiles; ++tile) {
        if (16 * tile >= args.m) break;
        uint32_t a[4];
#pragma unroll
        for (int reg = 0; reg < 4; ++reg) {
          const int64_t column = 32 * block + 16 * step + 8 * (reg / 2) + 2 * t;
          a[reg] = load_pair<Scalar>(args, 16 * tile + 8 * (reg % 2) + g, column);
        }
        Type::mma(sums[tile], a, b[0], b[1]);
      }
    }
  }
  const int64_t first = output - g + 2 * t;  // mma leaves outputs 2t and 2t + 1 of activation rows g and g + 8
#pragma unroll
  for (int tile = 0; tile < most_row_tiles; ++tile) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      frame::store_output<Type>(args, static_cast<int>(first) + j % 2, 16 * tile + 8 * (j / 2) + g, sums[tile][j]);
    }
  }
}

}  // namespace

void launch_reference(const Launch& args, const formats::Scheme& scheme, DType activation, const device::Stream& stream,
                      std::string_view shape) {
  const auto blocks = static_cast<int>((args.n + warps * warp_outputs - 1) / (warps * warp_outputs));
  with_types(scheme, activation, [&]<int bits, class Type, class Scales>() {
    constexpr bool e4m4 = std::is_same_v<Scales, E4m4Scales>;
    kbit_reference_kernel<bits, Type, e4m4><<<blocks, warps * 32, 0, stream.get()>>>(args);
    device::check_launch("kbit_reference", shape);
  });
}

}  // namespace w4q::kernels::kbit
