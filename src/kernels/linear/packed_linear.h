// y = x · Wᵀ + b on the GPU for kbit and integer weights, any number of activation rows. Which kernel runs is decided
// by one table (kernel_registry), by layout and rows.
//
// Exact mode, the only one: codebook values enter the product as their 16-bit roundings in the type of the activations,
// products and sums are fp32 on tensor cores, and scales multiply fp32 sums (GEMVs, up to 16 rows) or 16-bit values.
// How far that is from the fp64 product of the decoded weights says KernelRow::error_bound
// (docs/kernels/kbit.md, int4.md). Results are bit-identical from run to run: partial sums are added in a fixed order.
//
// Bytes read: n·k·(bits + 1/4)/8 for E4M4 scales, which at the card's read bandwidth is the time below which it cannot
// go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "core/dtype.h"
#include "device/stream.h"
#include "formats/scheme.h"
#include "kernels/frame/linear_fusion.h"

namespace w4q::kernels {

/// Weights in GPU memory: the planes of a layout that a row of the kernel registry reads. `codes` and `scales` are
/// aligned to 16 bytes.
struct DeviceWeight {
  formats::Scheme scheme;
  int64_t n = 0;
  int64_t k = 0;
  const uint32_t* codes = nullptr;
  const void* scales = nullptr;     ///< E4M4 bytes or f16
  const float* codebook = nullptr;  ///< [2^bits]
  float table_max = 1;              ///< largest magnitude of the codebook
  float table_stretch = 1;          ///< 1 to 2: its entries times this are nearest to f16 (table_stretch.h)
  float product_stretch = 1;        ///< the same of their products with E4M4 scales
  float scale_max = 31;             ///< an upper bound of the scales: keeps f16 products in range
  std::string_view layout = "kbit-fragment";
  const uint32_t* zeros = nullptr;       ///< integer, asymmetric: the zero points of the layout
  const int32_t* input_order = nullptr;  ///< integer, act order: [k] the input that stands at each place
};

/// What the product after this one reads. Where launches do not overlap, this one brings the beginning of every warp's
/// share to the L2 cache while it adds up its last sums.
struct L2Prefetch {
  const void* codes = nullptr;  ///< null: not known
  int64_t bytes = 0;
};

struct LinearArgs {
  int64_t m = 0;                  ///< activation rows
  DType activation = DType::f16;  ///< type of x: f16 or bf16
  const void* x = nullptr;        ///< [m, k], rows `ldx` elements apart
  int64_t ldx = 0;
  DeviceWeight weight;
  const float* bias = nullptr;     ///< [n], or null
  const void* residual = nullptr;  ///< added to the result: of the type and strides of y, may be y; or null
  void* y = nullptr;               ///< [m, n] of the activations' type or f32, rows `ldy` elements apart
  int64_t ldy = 0;
  bool fp32 = false;          ///< y and the residual are f32
  void* workspace = nullptr;  ///< kbit_linear_workspace() bytes, aligned to 256, zeroed once before its first use
  size_t workspace_bytes = 0;
  /// Weights, codebook and bias were complete before the previous launch in the stream began: on sm_90 their first
  /// bytes are then fetched while that launch still runs. x and y are not touched before it is done.
  bool weights_ready = false;
  /// Activations are rounded to int8, a row at a time (int8_rows.h). Integer weights in Marlin's words only.
  bool int8_activations = false;
  L2Prefetch prefetch;  ///< up to 16 rows; others pay no heed
  /// One row of f16, and a kernel with `fuses`; `swiglu` alone for any rows, and a kernel with `swiglu`: otherwise
  /// bad_argument. Rows of y have then n/2 values.
  LinearFusion fusion;
};

/// What decides which kernel runs.
struct LinearDesc {
  const device::Properties& gpu;  ///< that it runs on
  formats::Scheme scheme;
  std::string_view layout;
  int64_t m = 0, n = 0, k = 0;
  DType activation = DType::f16;
  bool int8_activations = false;
};
LinearDesc describe(const LinearArgs& args, const device::Properties& gpu);

/// Whether a row that fuses takes its kernel for that: also for a step's f32 outputs, which are then those of the same
/// kernel as the products around them.
inline bool takes_fused_kernel(const LinearArgs& args) {
  return args.m == 1 && (args.fusion.any() || (args.fp32 && args.activation == DType::f16));
}

/// One way to compute a linear layer on the GPU.
struct KernelRow {
  std::string_view name;
  std::string_view description;
  /// Whether it takes such a layer; otherwise `why` says what does not fit.
  bool (*accepts)(const LinearDesc&, std::string* why);
  size_t (*workspace)(const LinearDesc&);
  /// Arguments have been checked.
  void (*run)(const LinearArgs&, const device::Stream&);
  bool fuses = false;   ///< takes a LinearFusion where there is one row
  bool swiglu = false;  ///< takes LinearFusion::swiglu, by itself, for all its rows
  /// Its workspace is semaphores, and mailboxes, that are zero before and after; else it is scratch.
  bool keeps_semaphores = true;
  double fp32_error = 0;  ///< error_bound of f32 results where they are nearer than 16-bit ones; 0: they are not

  /// What the relative error (Frobenius) of a product is at most, against the fp64 product of what it multiplies: two
  /// roundings to 11 bits (weight or table entry, product with the scale) and one of the result, each at most 2^-11
  /// relative and about 0.29 · 2^-11 · √… in the mean (5e-4 was measured of f16); of bf16 8 bits. Of a thousand weights
  /// or more: fewer have the worst case instead of the mean.
  constexpr double error_bound(DType activation, bool fp32_result) const {
    if (fp32_result && fp32_error > 0) return fp32_error;
    return activation == DType::bf16 ? 6e-3 : 1e-3;
  }
};

/// All ways, the preferred ones first.
std::span<const KernelRow> kernel_registry() noexcept;
/// The first row that accepts. Throws unsupported with every row's reason when none does.
const KernelRow& pick_kernel(const LinearDesc& desc);

/// Most rows that one launch of the tensor-core kernels takes.
inline constexpr int64_t packed_linear_max_rows = 64;

/// Bytes of workspace for any number of rows from 1 to `desc.m` of such a layer.
size_t linear_workspace(LinearDesc desc);
/// The same for whoever calls layers of several sizes in turn: semaphores, zeroed once, for all kernels that keep them,
/// and scratch that may be anybody's.
struct DividedWorkspace {
  size_t semaphores = 0, scratch = 0;
};
DividedWorkspace divided_workspace(LinearDesc desc);
/// linear_workspace for kbit weights in kbit-fragment.
size_t kbit_linear_workspace(const device::Properties& gpu, int64_t m, int64_t n, int64_t k);

/// Launches on `stream`. Throws bad_argument, before any launch, for sizes, types, null or misaligned pointers or a
/// workspace that do not fit; unsupported for a layout that no kernel reads; device when the launch fails.
void packed_linear(const LinearArgs& args, const device::Stream& stream);

}  // namespace w4q::kernels
