#include <algorithm>
#include <vector>

#include "device/cublas.h"
#include "kernels/linear/rows.h"

namespace w4q::kernels {
namespace {

constexpr int64_t most_tiles = int64_t{1} << 30;
/// Rows behind which another kernel may take over, and need another workspace.
constexpr int64_t last_rows[] = {128, 1024, 2048, most_rows};

void check_args(const LinearArgs& args) {
  const auto& w = args.weight;
  require(args.m >= 1 && args.m <= most_rows, concat(args.m, " activation rows"), "1 to 2^30");
  require(args.activation == DType::f16 || args.activation == DType::bf16, "activations are neither f16 nor bf16",
          "convert them");
  require(!args.fp32 || (aligned(args.y, 4) && aligned(args.residual, 4)), "a misaligned pointer", "f32 to 4 bytes");
  require(w.n >= 1 && w.k >= 1 && w.n <= most_rows && w.k <= most_rows && frame::Map(w.n, w.k).tiles() <= most_tiles,
          concat("weight of ", w.n, " × ", w.k), "1 to 2^30 each, together at most 2^42");
  require(args.ldx >= w.k && args.ldy >= (args.fusion.swiglu ? w.n / 2 : w.n),
          concat("row strides ", args.ldx, " and ", args.ldy, " are shorter than the rows"),
          "in elements, at least k and n");
  require(args.x != nullptr && args.y != nullptr && w.codes != nullptr && w.scales != nullptr, "a null pointer",
          "x, y, codes and scales are needed");
  require(aligned(w.codes, 16) && aligned(w.scales, 16) && aligned(args.x, 2) && aligned(args.y, 2) &&
              aligned(args.residual, 2),
          "a misaligned pointer", "codes and scales to 16 bytes, x, y and residual to their elements");
  require(std::isfinite(w.scale_max) && w.scale_max > 0, "scale_max is not a positive number",
          "the largest scale, or more");
  if (w.scheme.family == formats::SchemeFamily::integer) {
    check_integer_weight(w);
  } else {
    check_kbit_weight(w);
  }
}

void check_workspace(const LinearArgs& args, size_t needed) {
  require(args.workspace != nullptr && aligned(args.workspace, 256) && args.workspace_bytes >= needed,
          concat("workspace of ", args.workspace_bytes, " bytes"),
          concat("kbit_linear_workspace asks for ", needed, ", aligned to 256"));
}

}  // namespace

void check_fusion(const LinearArgs& args, std::string_view kernel, bool fuses, bool gates) {
  const LinearFusion& fusion = args.fusion;
  if (!fusion.any()) return;
  const bool one_row = args.m == 1 && args.activation == DType::f16 && fuses;
  require(one_row || (gates && !fusion.has_norm()),
          concat("a fused product of ", args.m, " rows of ", dtype_name(args.activation), " by ", kernel),
          "one row of f16, and a kernel that fuses; more rows with silu alone, and a kernel that gates");
  require(!fusion.swiglu || (args.weight.n % 64 == 0 && !args.fp32 && args.residual == nullptr), "a gated product",
          "64 gates and ups in turn, 16-bit results, no residual");
  const bool adds = args.residual != nullptr;
  require(!adds || (args.fp32 && fusion.input_norm == nullptr), "a fused product that adds to a residual",
          "f32, and a complete x");
  const bool has_norm = fusion.next_weight != nullptr && fusion.next_norm != nullptr && fusion.last_norm != nullptr;
  require(fusion.next_x == nullptr || (adds && has_norm && fusion.last_norm != fusion.next_norm),
          "a product that leaves the next one's input",
          "y is the f32 residual stream, and the norm has weights and two states");
  require(aligned(fusion.next_x, 2) && aligned(fusion.input_norm, 4) && aligned(fusion.next_norm, 4) &&
              aligned(fusion.last_norm, 4),
          "a misaligned pointer", "f32 to 4 bytes");
}

frame::Launch prepare(const LinearArgs& args) {
  const auto& w = args.weight;
  const frame::Map map(w.n, w.k);
  frame::Launch launch{};
  launch.m = static_cast<int>(args.m);
  launch.n = w.n;
  launch.k = w.k;
  launch.ldx = args.ldx;
  launch.ldy = args.ldy;
  launch.n_tiles = static_cast<int>(map.row_groups);
  launch.k_tiles = static_cast<int>(map.col_groups);
  launch.tiles = static_cast<int>(map.tiles());
  launch.x = args.x;
  launch.codes = w.codes;
  launch.scales = w.scales;
  launch.codebook = w.codebook;
  launch.bias = args.bias;
  launch.residual = args.residual;
  launch.y = args.y;
  launch.fp32 = args.fp32;
  launch.mailboxes = static_cast<frame::MailboxWord*>(args.workspace);
  launch.aligned = aligned(args.x, 16) && args.ldx % 8 == 0;
  launch.overlap = args.weights_ready;
  launch.result_factor = 1;
  launch.fusion = args.fusion;
  launch.prefetch = static_cast<const char*>(args.prefetch.codes);
  launch.prefetch_bytes = args.prefetch.bytes;
  return launch;
}

std::string shape_of(const LinearArgs& args) {
  return concat(args.weight.n, " × ", args.weight.k, ", ", args.m, " rows, ", formats::to_string(args.weight.scheme));
}

bool accepts_rows(const LinearDesc& desc, std::string_view layout, int64_t least, int64_t most, std::string* why) {
  const bool fits = desc.layout == layout && desc.m >= least && desc.m <= most;
  if (fits && !desc.int8_activations) return true;
  if (why == nullptr) return false;
  *why = fits ? "multiplies 16-bit activations"
              : concat("reads ", layout, " with ", least, " to ", most, " activation rows");
  return false;
}

int64_t most_gemm_rows(const LinearDesc& desc) {
  if (desc.m <= packed_linear_max_rows) return packed_linear_max_rows;
  return device::have_cublas() ? 128 : most_rows - 1;
}
size_t gemv_workspace(const LinearDesc& desc) {
  return static_cast<size_t>(kernels::blocks_for(desc.gpu, frame::Map(desc.n, desc.k).tiles()) *
                             frame::gemv_mailbox_words()) *
         sizeof(frame::MailboxWord);
}
size_t gemm_workspace(const LinearDesc& desc) {
  return static_cast<size_t>(kernels::blocks_for(desc.gpu, frame::Map(desc.n, desc.k).tiles()) *
                             frame::gemm_mailbox_words(std::min(desc.m, packed_linear_max_rows))) *
         sizeof(frame::MailboxWord);
}

LinearDesc describe(const LinearArgs& args, const device::Properties& gpu) {
  return {gpu,           args.weight.scheme, args.weight.layout, args.m,
          args.weight.n, args.weight.k,      args.activation,    args.int8_activations};
}

std::span<const KernelRow> kernel_registry() noexcept {
  static const std::vector<KernelRow> all = [] {
    std::vector<KernelRow> rows(wgmma_rows().begin(), wgmma_rows().end());
    rows.insert(rows.end(), kbit_rows().begin(), kbit_rows().end());
    rows.insert(rows.end(), integer_rows().begin(), integer_rows().end());
    rows.insert(rows.end(), int8_rows().begin(), int8_rows().end());
    return rows;
  }();
  return all;
}

const KernelRow& pick_kernel(const LinearDesc& desc) {
  for (const KernelRow& row : kernel_registry()) {
    if (row.accepts(desc, nullptr)) return row;
  }
  Error error(ErrorCode::unsupported,
              concat("no kernel for ", formats::to_string(desc.scheme), " in layout ", desc.layout, " and ", desc.m,
                     " activation rows", desc.int8_activations ? " of int8" : ""));
  for (const KernelRow& row : kernel_registry()) {
    std::string why;
    row.accepts(desc, &why);
    error.detail(concat(row.name, " ", why));
  }
  throw error.hint("`w4q repack --target` chooses a layout that has kernels");
}

size_t kbit_linear_workspace(const device::Properties& gpu, int64_t m, int64_t n, int64_t k) {
  return linear_workspace({gpu, {}, "kbit-fragment", m, n, k});
}

size_t linear_workspace(LinearDesc desc) {
  size_t most = 256;
  const int64_t m = desc.m;
  for (const int64_t rows_at_most : {std::min(m, most_gemv_rows), std::min(m, packed_linear_max_rows), m}) {
    desc.m = rows_at_most;
    most = std::max(most, pick_kernel(desc).workspace(desc));
  }
  return most;
}

DividedWorkspace divided_workspace(LinearDesc desc) {
  DividedWorkspace bytes;
  const int64_t m = desc.m;
  for (const int64_t rows_at_most : last_rows) {
    desc.m = std::min(m, rows_at_most);
    size_t& part = pick_kernel(desc).keeps_semaphores ? bytes.semaphores : bytes.scratch;
    part = std::max(part, linear_workspace(desc));
  }
  return bytes;
}

void packed_linear(const LinearArgs& args, const device::Stream& stream) {
  check_args(args);
  const LinearDesc desc = describe(args, stream.context().properties());
  const KernelRow& row = pick_kernel(desc);
  check_fusion(args, row.name, row.fuses, row.swiglu);
  check_workspace(args, linear_workspace(desc));
  row.run(args, stream);
}

}  // namespace w4q::kernels
