// Linear layer of rotated weights for 1 to 16 activation rows: memory-bound, in the frame of all GEMVs
// (gemv_block.cuh). Two passes are one weight whose rows are twice as long. One row is rotated on the spot, by every
// warp what it is about to multiply (rotated_input.cuh).
#include "kernels/gemv_block.cuh"
#include "kernels/rotated_gemv_run.cuh"

namespace w4q::kernels::rotated {
namespace {

template <class Bits, int most_rows>
struct RotatedGemv {
  using Args = RotatedLaunch;
  using Type = rotated::Type;
  static constexpr int rows = most_rows;
  static constexpr bool fused = rows == 1;
  static constexpr int warps = rows == 16 ? 8 : 12;
  static constexpr int tiles = rows == 1 && Bits::first < 5 ? 3 : 2;
  using Totals = kbit::Totals<rows>;
  using Table = Tables<Bits>;
  using Run = rotated::Run<Bits, rows, tiles>;
  static constexpr int shared_bytes = Table::total_bytes + kbit::Slots<rows, warps>::extra_bytes;
};

template <class Gemv>
__global__ void __launch_bounds__(Gemv::warps * 32, 1) rotated_gemv_kernel(const RotatedLaunch args) {
  gemv_block<Gemv>(args);
}

template <class Bits, int rows>
void launch_rows(const RotatedLaunch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  using Gemv = RotatedGemv<Bits, rows>;
  kbit::launch_kernel<rotated_gemv_kernel<Gemv>, Gemv::shared_bytes>(args, blocks, Gemv::warps * 32, stream,
                                                                     "rotated_gemv", shape);
}

template <int first_bits, int second_bits>
void launch_bits(const RotatedLaunch& args, int blocks, cudaStream_t stream, std::string_view shape) {
  using Bits = Widths<first_bits, second_bits>;
  if (args.m == 1) return launch_rows<Bits, 1>(args, blocks, stream, shape);
  if (args.m <= 8) return launch_rows<Bits, 8>(args, blocks, stream, shape);
  launch_rows<Bits, 16>(args, blocks, stream, shape);
}

}  // namespace

void launch_gemv(const RotatedLaunch& args, int first_bits, int second_bits, int blocks, cudaStream_t stream,
                 std::string_view shape) {
  if (second_bits == 2) return launch_bits<4, 2>(args, blocks, stream, shape);
  if (second_bits == 3) return launch_bits<3, 3>(args, blocks, stream, shape);
  if (second_bits == 4) return launch_bits<4, 4>(args, blocks, stream, shape);
  switch (first_bits) {
    case 2:
      return launch_bits<2, 0>(args, blocks, stream, shape);
    case 3:
      return launch_bits<3, 0>(args, blocks, stream, shape);
    case 4:
      return launch_bits<4, 0>(args, blocks, stream, shape);
    default:
      return launch_bits<5, 0>(args, blocks, stream, shape);
  }
}

}  // namespace w4q::kernels::rotated
