// The kernel of gemv_cuda.cu and gemv_fused_cuda.cu.
#pragma once

#include "core/with_bits.h"
#include "kernels/frame/gemv_block.cuh"
#include "kernels/rotated/gemv_run.cuh"

namespace w4q::kernels::rotated {

template <class Bits, int most_rows, bool fuses>
struct RotatedGemv {
  using Args = RotatedLaunch;
  using Type = rotated::Type;
  static constexpr int rows = most_rows;
  static constexpr bool fused = fuses;
  static constexpr int warps = rows == 16 ? 8 : 12;
  static constexpr int tiles = rows == 1 && Bits::first < 5 ? 3 : 2;
  using Totals = frame::Totals<rows>;
  using Table = Tables<Bits>;
  using Run = rotated::Run<Bits, rows, tiles>;
  static constexpr int shared_bytes = Table::total_bytes + frame::PartialSums<rows, warps>::extra_bytes;
};

template <class Gemv>
__global__ void __launch_bounds__(Gemv::warps * 32, 1) rotated_gemv_kernel(const RotatedLaunch args) {
  gemv_block<Gemv>(args);
}

template <class Bits, int rows, bool fused = false>
void launch_rows(const RotatedLaunch& args, int blocks, const device::Stream& stream, std::string_view shape) {
  using Gemv = RotatedGemv<Bits, rows, fused>;
  frame::launch_kernel<rotated_gemv_kernel<Gemv>, Gemv::shared_bytes>(args, blocks, Gemv::warps * 32, stream,
                                                                      "rotated_gemv", shape);
}

/// Calls launch.operator()<Widths<…>>() for passes of these widths; `second_bits` is 0 where there is one pass.
template <class Launch>
void with_widths(int first_bits, int second_bits, const Launch& launch) {
  if (second_bits == 2) return launch.template operator()<Widths<4, 2>>();
  if (second_bits == 3) return launch.template operator()<Widths<3, 3>>();
  if (second_bits == 4) return launch.template operator()<Widths<4, 4>>();
  with_table_bits(first_bits, [&]<int bits>() { launch.template operator()<Widths<bits, 0>>(); });
}

}  // namespace w4q::kernels::rotated
