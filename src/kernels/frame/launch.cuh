// What the kernels on tiles share on both sides of a launch, whatever their weights are.
#pragma once

#include <string_view>

#include "device/check.h"
#include "kernels/common/dependent_launch.cuh"
#include "kernels/common/silu.cuh"
#include "kernels/common/store_value.cuh"
#include "kernels/frame/linear_fusion.h"
#include "kernels/frame/mailbox.cuh"
#include "kernels/frame/tile.cuh"
#include "repack/layout_marlin.h"

namespace w4q::kernels::frame {

/// What a launch needs, resolved on the host.
struct Launch {
  int m;
  int64_t n, k, ldx, ldy;
  int n_tiles;  ///< tiles along n
  int k_tiles;  ///< tiles along k
  int tiles;
  const void* x;
  const uint32_t* codes;
  const void* scales;
  const float* codebook;
  const float* bias;
  const void* residual;       ///< [m, n] of the type of y, rows ldy apart, added to the result; null: nothing
  const void* output_scales;  ///< one scale per output, in Marlin's order of a single group; null: none
  bool bf16_output_scales;
  bool output_scales_in_order;  ///< in the order of outputs instead
  bool fp32_output_scales;      ///< f32, in the order of outputs
  void* y;
  bool fp32;               ///< y and the residual are f32, else of the activations' type
  MailboxWord* mailboxes;  ///< sums of N-tiles that blocks share: 64 outputs × rows per block, empty between launches
  float table_factor;      ///< the codebook times this is what the table holds
  float scale_factor;      ///< scales times this are what weights are multiplied by, where scales are rounded for that
  float result_factor;     ///< takes all factors out of the sums again
  bool aligned;            ///< rows of x may be read 16 bytes at a time
  bool overlap;            ///< begin while the launch before is still running, as far as the weights go
  LinearFusion fusion;
  Routes routes;         ///< of kernels that are routed
  const char* prefetch;  ///< L2Prefetch; null: nothing to fetch
  int64_t prefetch_bytes;
};

/// The scale of an output where all inputs are one group (layout_marlin.h), as bits: of an f32, a bf16 or an f16.
__device__ __forceinline__ uint32_t output_scale_bits(const Launch& args, int row) {
  if (args.fp32_output_scales) return __ldg(static_cast<const uint32_t*>(args.output_scales) + row);
  const int at = args.output_scales_in_order ? row : repack::MarlinMap::single_order(row);
  return __ldg(static_cast<const unsigned short*>(args.output_scales) + at);
}
__device__ __forceinline__ float scale_of(const Launch& args, uint32_t bits) {
  if (args.fp32_output_scales) return __uint_as_float(bits);
  return args.bf16_output_scales ? __uint_as_float(bits << 16)
                                 : __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}
__device__ __forceinline__ float output_scale(const Launch& args, int row) {
  return scale_of(args, output_scale_bits(args, row));
}

/// sum · factor · scale + bias
__device__ __forceinline__ float output_value(const Launch& args, int row, float sum) {
  float value = sum * args.result_factor;
  if (args.output_scales != nullptr) value *= output_scale(args, row);
  return args.bias != nullptr ? value + args.bias[row] : value;
}

/// y[column][row] = value + residual, where that is inside.
template <class Type>
__device__ __forceinline__ void store_output(const Launch& args, int row, int column, float sum) {
  if (row >= args.n || column >= args.m) return;
  const int64_t at = column * args.ldy + row;
  store_value<Type>(args.y, args.residual, args.fp32, at, output_value(args, row, sum));
}

/// What all threads of a block with `warps` warps do about x before they read it, several rows: wait until it is there.
/// From begin_inputs() to finish_inputs() they may do something else, and what that returns is given to close_inputs()
/// some time later. Launches that make x of something have functions of their own (rotated/launch.cuh).
template <int warps>
__device__ __forceinline__ void begin_inputs(const Launch&) {}
template <int warps>
__device__ __forceinline__ uint32_t finish_inputs(const Launch&) {
  device::wait_grid_dependency();
  return 0;
}
__device__ __forceinline__ void close_inputs(const Launch&, uint32_t) {}

/// Words of workspace that a block sends its sums in.
inline int gemv_mailbox_words() { return 64 * 16; }
int gemm_mailbox_words(int64_t m);
/// Blocks to launch for these sizes, at most `most`.
int gemm_blocks(const Launch& args, int most);

/// Launches `kernel`; `keep_apart`: KernelNeeds.
template <auto kernel, int shared_bytes, int most_bytes = least_shared_bytes, bool keep_apart = false, class Args>
void launch_kernel(const Args& args, int blocks, int threads, const device::Stream& stream, std::string_view name,
                   std::string_view shape) {
  static_assert(shared_bytes <= most_bytes, "more shared memory than a block of the GPU has");
  const LaunchShape in{dim3(static_cast<unsigned>(blocks)), threads, shared_bytes, args.overlap, keep_apart};
  launch<kernel>(in, stream, "launching a kernel", args);
  device::check_launch(name, shape);
}

}  // namespace w4q::kernels::frame
