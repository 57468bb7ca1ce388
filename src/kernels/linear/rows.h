// What the rows of the table of linear kernels share on the host. The table itself is registry.cu.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/text.h"
#include "device/alignment.h"
#include "kernels/frame/launch.cuh"
#include "kernels/linear/kernel_row.h"

namespace w4q::kernels {

using device::aligned;

constexpr int64_t most_gemv_rows = 16;
constexpr int64_t most_rows = int64_t{1} << 30;

/// The rows of each family, the preferred ones first.
std::span<const KernelRow> kbit_rows() noexcept;
std::span<const KernelRow> integer_rows() noexcept;
/// Of integers with int8 activations (int8_linear_cuda.cu).
std::span<const KernelRow> int8_rows() noexcept;
std::span<const KernelRow> rotated_rows() noexcept;
std::span<const KernelRow> trellis_rows() noexcept;
std::span<const KernelRow> float_rows() noexcept;
/// Of 16-bit weights (dense_rows_cuda.cu).
std::span<const KernelRow> dense_rows() noexcept;
/// Of kbit, integers and small floats, on sm_90a (wgmma/rows.cu). They come before the others.
std::span<const KernelRow> wgmma_rows() noexcept;
/// Throw bad_argument for what is a family's own.
void check_kbit_pass(const DevicePass& pass);
void check_integer_pass(const DevicePass& pass);
void check_float_pass(const DevicePass& pass);

inline void require(bool condition, std::string_view what, std::string_view hint) {
  if (!condition) throw Error(ErrorCode::bad_argument, concat("linear: ", what)).hint(std::string(hint));
}
/// The same where words are to be made: what() does.
template <class What>
requires std::is_invocable_r_v<std::string, What>
void require(bool condition, const What& what, std::string_view hint) {
  if (!condition) require(false, std::string_view(what()), hint);
}

/// Blocks for so many tiles on the stream's GPU.
inline int blocks_for(const device::Stream& stream, int64_t tiles) {
  return kernels::blocks_for(stream.context().properties(), tiles);
}
/// What all kernels need to know of a layer.
frame::Launch prepare(const LinearArgs& args);

/// Calls run(part) for at most `most` rows at a time of LinearArgs, or of what has its rows.
template <class Args, class Run>
void in_slices(Args args, int64_t most, const Run& run) {
  const auto* x = static_cast<const std::byte*>(args.x);
  const auto* residual = static_cast<const std::byte*>(args.residual);
  auto* const y = static_cast<std::byte*>(args.y);
  const int64_t row_bytes = args.ldy * (args.fp32 ? 4 : 2);
  const int64_t rows = args.m;
  for (int64_t first = 0; first < rows; first += most) {
    args.m = std::min(most, rows - first);
    args.x = x + 2 * first * args.ldx;
    args.y = y + first * row_bytes;
    if (residual != nullptr) args.residual = residual + first * row_bytes;
    run(args);
  }
}

/// Whether `desc` is one pass in `layout` with `least` to `most` rows; otherwise `why` says so.
bool accepts_rows(const LinearDesc& desc, std::string_view layout, int64_t least, int64_t most, std::string* why);
/// Fills `why` unless it is null, and is false.
inline bool because(std::string* why, std::string_view reason) {
  if (why != nullptr) *why = reason;
  return false;
}

/// Most rows for the GEMM. Beyond, decoding once and cuBLAS are faster, where there is cuBLAS (docs/kernels/kbit.md).
/// Loading that takes a while: it is not asked for as long as one launch takes all rows.
int64_t most_gemm_rows(const LinearDesc& desc);

/// Behind the mailboxes of a launch's sums, semaphores that are zero between launches.
constexpr size_t spare_semaphore_bytes = 256;
WorkspaceSizes gemv_workspace(const LinearDesc& desc);
/// Of kernels that take up to most_launch_rows rows in a launch.
WorkspaceSizes gemm_workspace(const LinearDesc& desc);

}  // namespace w4q::kernels
