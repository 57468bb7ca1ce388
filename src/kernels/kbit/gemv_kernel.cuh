// The kernel of gemv_cuda.cu, gemv_bf16_cuda.cu and gemv_fused_cuda.cu.
#pragma once

#include "kernels/frame/gemv_block.cuh"
#include "kernels/kbit/gemv_run.cuh"
#include "kernels/kbit/launch.cuh"

namespace w4q::kernels::kbit {

/// The shape of a block, measured: more warps hide more latency, more tiles in flight need more registers (8 bits, without a
/// table, have them). A compact kernel has all of a unit in flight.
template <int bits, int rows, bool is_compact = false>
struct Shape {
  static constexpr int warps = rows == 16 ? 8 : 12;
  static constexpr int tiles = is_compact ? 1 << most_unit_shift : rows == 1 && bits != 5 ? 3 : 2;
};

/// `is_compact`: of few tiles a warp, fewer than an N-tile has, most of what a launch waits for is its own code: it is one
/// small kernel for all such products of a step, whether they take one weight or some of many.
template <int bits, class Activation, class Scales, int most_rows, bool fuses, class Route = frame::NoRouter,
          bool is_compact = false>
struct KbitGemv {
  using Type = Activation;
  static constexpr int rows = most_rows;
  static constexpr bool fused = fuses;
  static constexpr bool routed = std::is_same_v<Route, frame::Router>;
  static constexpr bool compact = is_compact;
  using Args = std::conditional_t<routed, frame::RoutedLaunch, Launch>;
  static constexpr int warps = is_compact ? compact_warps : Shape<bits, rows>::warps;
  using Totals = frame::Totals<rows>;
  using Run = kbit::Run<bits, Type, Scales, rows, Shape<bits, rows, is_compact>::tiles, Route, is_compact>;

  struct Table {
    using Values = PairTable<bits, gemv_table_kilobytes>;
    using View = LanePairs<bits, gemv_table_kilobytes>;
    static constexpr int total_bytes = Values::total_bytes;
    __device__ static void fill(char* table, const Launch& args) {
      Values::template fill<Type>(table, args.codebook, args.table_factor);
    }
  };
};

template <class Gemv>
__global__ void __launch_bounds__(Gemv::warps * 32, 1) kbit_gemv_kernel(const typename Gemv::Args args) {
  frame::gemv_block<Gemv>(args);
}

template <int bits, class Type, class Scales, int rows, bool fused = false, class Route = frame::NoRouter,
          bool compact = false, class Args>
void launch_rows(const Args& args, int blocks, const device::Stream& stream, std::string_view shape) {
  using Gemv = KbitGemv<bits, Type, Scales, rows, fused, Route, compact>;
  constexpr int shared_bytes = Gemv::Table::total_bytes + frame::PartialSums<rows, Gemv::warps, compact>::extra_bytes;
  frame::launch_kernel<kbit_gemv_kernel<Gemv>, shared_bytes>(args, blocks, Gemv::warps * 32, stream, "kbit_gemv",
                                                             shape);
}

/// By the number of rows.
template <class Type>
void launch_any_rows(const Launch& args, const formats::Scheme& scheme, int blocks, const device::Stream& stream,
                     std::string_view shape) {
  with_scheme(scheme, [&]<int bits, class Scales>() {
    if (args.m == 1) return launch_rows<bits, Type, Scales, 1>(args, blocks, stream, shape);
    if (args.m <= 4) return launch_rows<bits, Type, Scales, 4>(args, blocks, stream, shape);
    if (args.m <= 8) return launch_rows<bits, Type, Scales, 8>(args, blocks, stream, shape);
    launch_rows<bits, Type, Scales, 16>(args, blocks, stream, shape);
  });
}

}  // namespace w4q::kernels::kbit
