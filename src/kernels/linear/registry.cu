#include <algorithm>
#include <cmath>
#include <vector>

#include "device/cublas.h"
#include "kernels/linear/rows.h"

namespace w4q::kernels {
namespace {

constexpr int64_t most_tiles = int64_t{1} << 30;

void check_sizes(const LinearArgs& args) {
  require(
      args.m >= 1 && args.m <= most_rows, [&] { return concat(args.m, " activation rows"); }, "1 to 2^30");
  require(args.activation == DType::f16 || args.activation == DType::bf16, "activations are neither f16 nor bf16",
          "convert them");
  const int64_t n = args.n(), k = args.k();
  require(
      n >= 1 && k >= 1 && n <= most_rows && k <= most_rows && frame::Map(n, k).tiles() <= most_tiles,
      [&] { return concat("weight of ", n, " × ", k); }, "1 to 2^30 each, together at most 2^42");
  require(
      args.ldx >= k && args.ldy >= (args.fusion.swiglu ? n / 2 : n),
      [&] { return concat("row strides ", args.ldx, " and ", args.ldy, " are shorter than the rows"); },
      "in elements, at least k and n");
  require(args.x != nullptr && args.y != nullptr, "a null pointer", "x and y are needed");
  require(aligned(args.x, 2) && aligned(args.y, 2) && aligned(args.residual, 2), "a misaligned pointer",
          "x, y and residual to their elements");
  require(!args.fp32 || (aligned(args.y, 4) && aligned(args.residual, 4)), "a misaligned pointer", "f32 to 4 bytes");
}

void check_pass(const DevicePass& pass, const DevicePass& first) {
  require(pass.n == first.n && pass.k == first.k, "passes of different sizes", "all are n × k");
  require(pass.codes != nullptr, "a null pointer", "codes are needed");
  require(aligned(pass.codes, 16) && aligned(pass.scales, 16), "a misaligned pointer", "codes and scales to 16 bytes");
  require(std::isfinite(pass.scale_max) && pass.scale_max > 0, "scale_max is not a positive number",
          "the largest scale, or more");
}

void check_workspace(const Workspace& workspace, const WorkspaceSizes& needed) {
  const auto fits = [](const void* memory, size_t bytes, size_t least) {
    return least == 0 || (memory != nullptr && aligned(memory, 256) && bytes >= least);
  };
  require(
      fits(workspace.semaphores, workspace.sizes.semaphores, needed.semaphores) &&
          fits(workspace.scratch, workspace.sizes.scratch, needed.scratch),
      [&] { return concat("workspace of ", workspace.sizes.semaphores, " and ", workspace.sizes.scratch, " bytes"); },
      "workspace_sizes() says how many, aligned to 256");
}

void check_fusion(const KernelRow& row, const LinearArgs& args) {
  const LinearFusion& fusion = args.fusion;
  if (!fusion.any()) return;
  const bool one_row = args.m == 1 && args.activation == DType::f16 && row.fuses;
  require(
      one_row || (row.swiglu != GateOrder::none && !fusion.has_norm()),
      [&] { return concat("a fused product of ", args.m, " rows of ", dtype_name(args.activation), " by ", row.name); },
      "one row of f16, and a kernel that fuses; more rows with silu alone, and a kernel that gates");
  require(!fusion.swiglu ||
              ((row.swiglu == GateOrder::halves || args.n() % 64 == 0) && !args.fp32 && args.residual == nullptr),
          "a gated product", "64 gates and ups in turn, 16-bit results, no residual");
  const bool adds = args.residual != nullptr;
  require(!adds || (args.fp32 && fusion.input_norm == nullptr), "a fused product that adds to a residual",
          "f32, and a complete x");
  const bool has_norm = fusion.next_weight != nullptr && fusion.next_norm != nullptr && fusion.last_norm != nullptr;
  require(fusion.next_x == nullptr || (adds && has_norm && fusion.last_norm != fusion.next_norm),
          "a product that leaves the next one's input",
          "y is the f32 residual stream, and the norm has weights and two states");
  const TailProduct& tail = fusion.tail;
  require(tail.weight == nullptr ||
              (fusion.next_x != nullptr && args.beside_routed && aligned(args.x, 16) && row.leaves_tail != nullptr),
          "a product that leaves parts of another one", "leaves_tail() says which do, beside routed ones");
  require(tail.weight == nullptr || (tail.outputs >= 1 && tail.outputs <= most_tail_outputs && tail.parts != nullptr &&
                                     aligned(tail.weight, 16) && aligned(tail.parts, 4)),
          "another product's parts", "1 to 384 outputs of f16 rows aligned to 16 bytes");
  require(aligned(fusion.next_x, 2) && aligned(fusion.input_norm, 4) && aligned(fusion.next_norm, 4) &&
              aligned(fusion.last_norm, 4),
          "a misaligned pointer", "f32 to 4 bytes");
}

}  // namespace

frame::Launch prepare(const LinearArgs& args) {
  const DevicePass& pass = args.pass();
  const frame::Map map(pass.n, pass.k);
  frame::Launch launch{};
  launch.m = static_cast<int>(args.m);
  launch.n = pass.n;
  launch.k = pass.k;
  launch.ldx = args.ldx;
  launch.ldy = args.ldy;
  launch.n_tiles = static_cast<int>(map.row_groups);
  launch.k_tiles = static_cast<int>(map.col_groups);
  launch.tiles = static_cast<int>(map.tiles());
  launch.x = args.x;
  launch.codes = pass.codes;
  launch.scales = pass.scales;
  launch.codebook = pass.codebook;
  launch.bias = args.bias;
  launch.residual = args.residual;
  launch.y = args.y;
  launch.fp32 = args.fp32;
  launch.mailboxes = static_cast<frame::MailboxWord*>(args.workspace.semaphores);
  launch.aligned = aligned(args.x, 16) && args.ldx % 8 == 0;
  launch.overlap = args.weights_ready;
  launch.result_factor = 1;
  launch.scale_factor = 1;
  launch.fusion = args.fusion;
  launch.prefetch = static_cast<const char*>(args.prefetch.codes);
  launch.prefetch_bytes = args.prefetch.bytes;
  return launch;
}

bool accepts_rows(const LinearDesc& desc, std::string_view layout, int64_t least, int64_t most, std::string* why) {
  const bool fits = desc.passes.size() == 1 && desc.pass().layout == layout && desc.m >= least && desc.m <= most;
  if (fits && !desc.int8_activations) return true;
  if (why == nullptr) return false;
  *why = fits ? "multiplies 16-bit activations"
              : concat("reads ", layout, " with ", least, " to ", most, " activation rows");
  return false;
}

int64_t most_gemm_rows(const LinearDesc& desc) {
  if (desc.m <= most_launch_rows) return most_launch_rows;
  return device::have_cublas() ? 128 : most_rows - 1;
}
WorkspaceSizes gemv_workspace(const LinearDesc& desc) {
  const int blocks = kernels::blocks_for(desc.gpu, frame::Map(desc.n(), desc.k()).tiles());
  return {static_cast<size_t>(blocks * frame::gemv_mailbox_words()) * sizeof(frame::MailboxWord), 0};
}
WorkspaceSizes gemm_workspace(const LinearDesc& desc) {
  const int blocks = kernels::blocks_for(desc.gpu, frame::Map(desc.n(), desc.k()).tiles());
  const int64_t words = frame::gemm_mailbox_words(std::min(desc.m, most_launch_rows));
  return {static_cast<size_t>(blocks * words) * sizeof(frame::MailboxWord), 0};
}

LinearDesc describe(const LinearArgs& args, const device::Properties& gpu) {
  return {.gpu = gpu,
          .passes = args.passes,
          .m = args.m,
          .activation = args.activation,
          .int8_activations = args.int8_activations,
          .input_scaled = args.input_scale != nullptr,
          .input_rotated = args.input_rotated};
}

std::span<const KernelRow> kernel_registry() noexcept {
  static const std::vector<KernelRow> all = [] {
    std::vector<KernelRow> rows;
    for (const auto family : {wgmma_rows(), kbit_rows(), integer_rows(), int8_rows(), rotated_rows(), trellis_rows(),
                              float_rows(), dense_rows()}) {
      rows.insert(rows.end(), family.begin(), family.end());
    }
    return rows;
  }();
  return all;
}

const KernelRow* find_kernel(const LinearDesc& desc) noexcept {
  const auto rows = kernel_registry();
  const auto found = std::ranges::find_if(rows, [&](const KernelRow& row) { return row.accepts(desc, nullptr); });
  return found == rows.end() ? nullptr : &*found;
}

const KernelRow& pick_kernel(const LinearDesc& desc) {
  if (const KernelRow* row = find_kernel(desc)) return *row;
  Error error(ErrorCode::unsupported,
              concat("no kernel for ", formats::to_string(desc.pass().scheme), " in layout ", desc.pass().layout,
                     " and ", desc.m, " activation rows", desc.int8_activations ? " of int8" : ""));
  for (const KernelRow& row : kernel_registry()) {
    std::string why;
    row.accepts(desc, &why);
    error.detail(concat(row.name, " ", why));
  }
  throw error.hint("`w4q repack --target` chooses a layout that has kernels");
}

void run_kernel(const KernelRow& row, const LinearArgs& args, const device::Stream& stream) {
  check_sizes(args);
  for (const DevicePass& pass : args.passes) {
    check_pass(pass, args.pass());
    row.check(pass);
  }
  const LinearDesc desc = describe(args, stream.context().properties());
  require(
      row.accepts(desc, nullptr), [&] { return concat("passes or rows that ", row.name, " does not take"); },
      "find_kernel() finds one that does");
  check_fusion(row, args);
  check_workspace(args.workspace, row.workspace(desc));
  row.run(args, stream);
}

}  // namespace w4q::kernels
