#include <algorithm>
#include <bit>

#include "device/alignment.h"
#include "kernels/integer/int8_linear.h"
#include "kernels/integer/int8_rows_cuda.h"
#include "kernels/integer/int8_tiling.h"
#include "kernels/linear/int8_rows.h"
#include "kernels/linear/rows.h"

namespace w4q::kernels {
namespace int8 {
namespace {

/// Rows of a launch: more are cut, so that their int8 copy stays small.
constexpr int64_t most_slice_rows = 4096;

/// The parts of the workspace, one behind the other.
struct Parts {
  size_t codes, scales, sums, counters, partials;
  size_t bytes() const { return codes + scales + sums + counters + partials; }

  Parts(const device::Properties& gpu, int64_t m, int64_t n, int64_t k) {
    const Int8Order order(m, k);
    const Tiling tiling = int8::tiling_of(gpu, m, n, k);
    const auto size = [](int64_t bytes) { return device::round_up_256(static_cast<size_t>(bytes)); };
    codes = size(order.bytes());
    scales = size(order.padded_rows * 4);
    sums = size(order.padded_rows * order.chunks * 4 * 2);
    counters = size(tiling.count() * 4);
    partials = tiling.splits > 1 ? size(tiling.count() * tiling.splits * int8::tile_outputs * int8::tile_rows * 4) : 0;
  }
};

/// Fewer rows may be cut more finely along k, and need more.
WorkspaceSizes workspace(const LinearDesc& desc) {
  const int64_t m = std::min(desc.m, most_slice_rows);
  size_t most = 0;
  for (int64_t rows = 1; rows < m + int8::tile_rows; rows += int8::tile_rows) {
    most = std::max(most, Parts(desc.gpu, std::min(rows, m), desc.n(), desc.k()).bytes());
  }
  return {0, most};
}

bool accepts(const LinearDesc& desc, std::string* why) {
  if (!desc.int8_activations) {
    if (why != nullptr) *why = "rounds activations to int8, which was not asked for";
    return false;
  }
  if (desc.passes.size() == 1 && desc.pass().layout == "marlin" && desc.m >= 1 && desc.m <= most_rows &&
      takes_int8_activations(desc.pass().scheme))
    return true;
  if (why != nullptr) *why = "reads marlin, int4 and int8 with f16 or bf16 scales";
  return false;
}

/// Whether four values of y, and of the residual, may be read and written at a time.
bool takes_vectors(const LinearArgs& args) {
  const size_t bytes = args.fp32 ? 16 : 8;
  return args.ldy % 4 == 0 && aligned(args.y, bytes) && aligned(args.residual, bytes);
}

/// Both launches of a layer: their parts of the workspace lie one behind the other.
struct Launches {
  Int8RowsArgs rows;
  GemmLaunch gemm;
};

Launches prepare_launches(const LinearArgs& args, const device::Properties& gpu) {
  const auto& w = args.pass();
  const Parts parts(gpu, args.m, w.n, w.k);
  const Int8Order order(args.m, w.k);
  const Tiling tiling = int8::tiling_of(gpu, args.m, w.n, w.k);
  auto* at = static_cast<uint8_t*>(args.workspace.scratch);
  Int8RowsArgs rows{args.m, w.k, args.activation, args.x, args.ldx, w.input_order, at};
  rows.scales = reinterpret_cast<float*>(at += parts.codes);
  rows.sums = reinterpret_cast<int16_t*>(at += parts.scales);
  rows.counters = reinterpret_cast<unsigned*>(at += parts.sums);
  rows.counter_count = tiling.splits > 1 ? static_cast<int>(tiling.count()) : 0;
  GemmLaunch gemm{};
  static_cast<integer::MarlinLaunch&>(gemm) = prepare_marlin(args);
  gemm.result_factor = w.scheme.bits == 4 ? 1.0f / 16 : 1.0f;
  rows.sum_inputs = int8::sum_inputs(gemm.group_shift);
  gemm.rows_codes = rows.codes, gemm.rows_scales = rows.scales, gemm.rows_sums = rows.sums;
  gemm.padded = order.padded_rows;
  gemm.chunks = static_cast<int>(order.chunks);
  gemm.counters = rows.counters;
  gemm.partials = reinterpret_cast<float*>(at + parts.counters);
  gemm.splits = tiling.splits;
  gemm.row_tiles = static_cast<int>(tiling.rows);
  gemm.output_tiles = static_cast<int>(tiling.outputs);
  gemm.bf16 = args.activation == DType::bf16;
  gemm.vectors = takes_vectors(args);
  // Where there are no zero points of their own, codes of 4 bits lose 8 as they are decoded; 8 bits have one kernel.
  if (gemm.zeros == nullptr && w.scheme.bits == 4) rows.sums = nullptr;
  return {rows, gemm};
}

void run(const LinearArgs& args, const device::Stream& stream) {
  in_slices(args, most_slice_rows, [&](const LinearArgs& part) {
    const Launches launches = prepare_launches(part, stream.context().properties());
    int8_rows_cuda(launches.rows, stream);
    int8::launch_gemm(launches.gemm, part.pass().scheme.bits, stream, part.shape);
  });
}

constexpr KernelRow rows[] = {
    {.name = "marlin-int8",
     .description = "any number of rows, rounded to int8: integer tensor cores, exact sums of up to 128 inputs",
     .accepts = accepts,
     .workspace = workspace,
     .check = check_integer_pass,
     .run = run,
     .begins_early = false,
     // Integers are exact: f32 sums of groups, the scales' products and the result are rounded, in f32
     // (128 groups + 3) · 2^-24 at most.
     .fp32_error = 1e-5},
};

}  // namespace
}  // namespace int8

std::span<const KernelRow> int8_rows() noexcept { return int8::rows; }

}  // namespace w4q::kernels
