// What the rows of the table of linear kernels share on the host. The table itself is registry.cu.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/text.h"
#include "device/alignment.h"
#include "kernels/frame/launch.cuh"
#include "kernels/linear/packed_linear.h"

namespace w4q::kernels {

using device::aligned;

constexpr int64_t most_gemv_rows = 16;
constexpr int64_t most_rows = int64_t{1} << 30;

/// The rows of each family, the preferred ones first.
std::span<const KernelRow> kbit_rows() noexcept;
std::span<const KernelRow> integer_rows() noexcept;
/// Of integers with int8 activations (int8_linear_cuda.cu).
std::span<const KernelRow> int8_rows() noexcept;
/// Of both, on sm_90a (wgmma/rows.cu). They come before the others.
std::span<const KernelRow> wgmma_rows() noexcept;
/// Throw bad_argument for what is a family's own.
void check_kbit_weight(const DeviceWeight& weight);
void check_integer_weight(const DeviceWeight& weight);

inline void require(bool condition, const std::string& what, std::string_view hint) {
  if (!condition) throw Error(ErrorCode::bad_argument, "packed_linear: " + what).hint(hint);
}

/// The same on the stream's GPU.
inline int blocks_for(const device::Stream& stream, int64_t tiles) {
  return kernels::blocks_for(stream.context().properties(), tiles);
}
/// Throws bad_argument for a fusion that does not fit `args`, or a kernel that does not.
void check_fusion(const LinearArgs& args, std::string_view kernel, bool fuses, bool gates = false);
/// What all kernels need to know of a layer.
frame::Launch prepare(const LinearArgs& args);
std::string shape_of(const LinearArgs& args);

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

/// Whether `desc` has layout `layout` and `least` to `most` rows; otherwise `why` says so.
bool accepts_rows(const LinearDesc& desc, std::string_view layout, int64_t least, int64_t most, std::string* why);

/// Most rows for the GEMM. Beyond, decoding once and cuBLAS are faster, where there is cuBLAS (docs/kernels/kbit.md).
/// Loading that takes a while: it is not asked for as long as one launch takes all rows.
int64_t most_gemm_rows(const LinearDesc& desc);

/// Behind the mailboxes of a launch's sums, semaphores that are zero between launches.
constexpr size_t spare_semaphore_bytes = 256;
size_t gemv_workspace(const LinearDesc& desc);
/// Of kernels that take up to packed_linear_max_rows rows in a launch.
size_t gemm_workspace(const LinearDesc& desc);

}  // namespace w4q::kernels
