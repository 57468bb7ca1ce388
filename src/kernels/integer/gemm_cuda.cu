// Integer linear layer on Marlin's words for 17 to 64 activation rows (gemm_block.cuh): codes become values in
// registers, and values are scaled there.
#include "kernels/frame/gemm_block.cuh"
#include "kernels/integer/inputs.cuh"
#include "kernels/integer/launch.cuh"

namespace w4q::kernels::integer {
namespace {

/// A code minus its zero point, two at a time, exactly: the code stands below the exponent of a power of two, which
/// goes with the zero point.
template <int bits, class Type>
struct CenteredCodec {
  static constexpr bool half = std::is_same_v<Type, device::HalfType>;
  static constexpr float bias = half ? 1024 : bits == 4 ? 128 : -128;

  __device__ static uint32_t pair(uint32_t word, uint32_t minus_zero) {
    uint32_t result;
    if constexpr (half) {
      constexpr uint32_t mask = bits == 4 ? 0x000F000Fu : 0x00FF00FFu;
      asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(device::and_or(word, mask, 0x64006400u)), "r"(minus_zero));
    } else {
      const uint32_t biased = Codec<bits, Type>::pair(word);
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(biased), "r"(0x3F803F80u), "r"(minus_zero));
    }
    return result;
  }
};

template <int bits, class Activation, bool with_zeros>
struct MarlinWeights {
  using Args = MarlinLaunch;
  using Type = Activation;
  using Order = MatrixOrder;
  static constexpr int table_bytes = 0;
  struct View {
    __device__ explicit View(const char*) {}
  };
  __device__ static void fill(char*, const Args&) {}

  struct Tile {
    WeightTile<bits> codes;
    Group<bits, with_zeros> groups[2];
  };
  struct Reader {
    WeightReader<bits> codes;
    TileGroups<bits, with_zeros> groups;
    __device__ explicit Reader(const Args& args) : codes(args), groups(args) {}
    __device__ void load(Tile& tile, int n_tile, int column) const {
      codes.load(tile.codes, n_tile, column);
      groups.load(tile.groups, n_tile, column);
    }
  };

  template <int groups>
  __device__ __forceinline__ static void multiply(const Tile& tile, int block, const uint4 (&x)[groups], const View&,
                                                  const Args& args, frame::Accumulator<groups>& sums) {
    const auto& group = tile.groups[block];
#pragma unroll
    for (int r = 0; r < frame::Map::row_tiles; ++r) {
      const float2 by = args.group_shift == one_group ? make_float2(1, 1) : group.scale_pair(r, args.bf16_scales);
      const float f = args.weight_factor;
      const uint32_t scale[2] = {Type::pack(by.x * f, by.x * f), Type::pack(by.y * f, by.y * f)};
      const uint32_t minus_zero[2] = {minus_zero_pair(group, r, 0), minus_zero_pair(group, r, 1)};
#pragma unroll
      for (int step = 2 * block; step < 2 * block + 2; ++step) {
        uint32_t a[4];
#pragma unroll
        for (int reg = 0; reg < 4; ++reg) {
          const uint32_t centered =
              CenteredCodec<bits, Type>::pair(tile.codes.register_bits(r, step, reg), minus_zero[reg % 2]);
          a[reg] = Type::multiply(centered, scale[reg % 2]);
        }
#pragma unroll
        for (int i = 0; i < groups; ++i) sums.template mma<Type>(i, r, a, frame::block_step(x[i], step));
      }
    }
  }

 private:
  __device__ static uint32_t minus_zero_pair(const Group<bits, with_zeros>& group, int row_tile, int half) {
    const float value = -(CenteredCodec<bits, Type>::bias + group.zero_code(row_tile, half));
    return Type::pack(value, value);
  }
};

}  // namespace

void launch_marlin_gemm(const MarlinLaunch& args, int bits, DType activation, int blocks, const device::Stream& stream,
                        std::string_view shape) {
  with_types(args, bits, activation, [&]<int width, class Type, bool with_zeros>() {
    frame::launch_gemm_kernel<MarlinWeights<width, Type, with_zeros>>(args, blocks, stream, "integer_gemm", shape);
  });
}

}  // namespace w4q::kernels::integer
