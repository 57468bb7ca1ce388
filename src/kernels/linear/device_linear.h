// y = Σ_p W_p · R_p(x ⊘ s) + b on the GPU, whatever the format of the weights: a linear layer in GPU memory, the plan of
// its launches, made once when it is uploaded, and its product with any number of activation rows. Which kernel runs is
// decided by one table (kernel_row.h).
//
// Exact mode, the only one: codebook values enter the product as their 16-bit roundings in the type of the activations,
// products and sums are fp32 on tensor cores, and scales multiply fp32 sums (GEMVs, up to 16 rows) or 16-bit values.
// How far that is from the fp64 product of the decoded weights says error_bound() (docs/kernels/kbit.md, int4.md,
// rotated.md). Results are bit-identical from run to run: partial sums are added in a fixed order.
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "device/stream.h"
#include "formats/scheme.h"
#include "kernels/frame/linear_fusion.h"
#include "kernels/frame/route.h"

namespace w4q::kernels {

/// Of the input of a pass (formats/rotation.h).
struct DeviceRotation {
  int64_t block = 1;                ///< inputs that are mixed, at least 2; 1: there is no rotation
  const float* factors = nullptr;   ///< [k]: InputRotation::factors(); equal pointers where passes share a rotation
  const uint32_t* signs = nullptr;  ///< rotation_signs (kernels/rotated/pack.h)
};

/// The layout of 16-bit weights: rows of f16 as they stand in a checkpoint.
inline constexpr std::string_view f16_rows = "f16-rows";

/// One pass: the planes of a layout that rows of the kernel registry read. `codes` and `scales` are aligned to 16
/// bytes.
struct DevicePass {
  formats::Scheme scheme =
      {};  ///< of rotated passes with f16 norms, whatever they are in the file; of f16_rows nothing
  std::string_view layout = "kbit-fragment";
  int64_t n = 0;
  int64_t k = 0;
  const uint32_t* codes = nullptr;        ///< of f16_rows [n × k] halves
  const void* scales = nullptr;           ///< E4M4 bytes or f16; of rotated-fragment f16 norms at norm_place; of
                                          ///< trellis-fragment f16 of rows; of float-fragment the layout's, of FP8 the
                                          ///< f32 pairs of kernels/small_float/tile_scales.h
  const float* codebook = nullptr;        ///< [2^bits]; of trellises none
  float table_max = 1;                    ///< largest magnitude of the codebook; of trellises the unit u
  float table_stretch = 1;                ///< 1 to 2: its entries times this are nearest to f16 (table_stretch.h)
  float product_stretch = 1;              ///< the same of their products with E4M4 scales
  float table_over_first = 0;             ///< its table is this times that of the first pass; 0: they are not alike
  float scale_max = 31;                   ///< an upper bound of the scales: keeps f16 products in range
  const float* output_factors = nullptr;  ///< of float-fragment: [n] that outputs are multiplied by; null: none
  const uint32_t* zeros = nullptr;        ///< integer, asymmetric: the zero points of the layout
  const int32_t* input_order = nullptr;   ///< integer, act order: [k] the input that stands at each place
  DeviceRotation rotation = {};
  bool resident = true;  ///< false: its planes come to the GPU for each product (PassSource)
};

/// How rows of gates and ups stand in one weight.
enum class GateOrder {
  none,    ///< there are none
  halves,  ///< all gates, then all ups
  turns,   ///< gate_up_turn gates and their ups in turn
};

/// A linear layer, or several that read the same input, in GPU memory. At least one pass, all of them n × k.
struct DeviceLinear {
  std::vector<DevicePass> passes;
  const float* bias = nullptr;         ///< [n], or null
  const float* input_scale = nullptr;  ///< s: [k] that divides the input, or null
  GateOrder gates = GateOrder::none;

  int64_t n() const noexcept { return passes.front().n; }
  int64_t k() const noexcept { return passes.front().k; }
};

/// "kbit4-b32-e4m4", "rotated4-d128+rotated4-d128", "f16".
std::string scheme_text(const DeviceLinear& linear);

/// What the product after this one reads. Where launches do not overlap, this one brings the beginning of every warp's
/// share to the L2 cache while it adds up its last sums.
struct L2Prefetch {
  const void* codes = nullptr;  ///< null: not known
  int64_t bytes = 0;
};

/// A product that is wanted.
struct LinearCall {
  int64_t m = 0;                  ///< activation rows
  DType activation = DType::f16;  ///< type of x: f16, of kbit and integer weights also bf16
  const void* x = nullptr;        ///< [m, k], rows `ldx` elements apart
  int64_t ldx = 0;
  bool input_rotated = false;      ///< x is R(x ⊘ s) already, and all passes share R
  const void* residual = nullptr;  ///< added to the result: of the type and strides of y, may be y; or null
  void* y = nullptr;               ///< [m, n] of the activations' type or f32, rows `ldy` elements apart
  int64_t ldy = 0;
  bool fp32 = false;  ///< y and the residual are f32
  /// Weights, codebook and bias were complete before the previous launch in the stream began: on sm_90 their first
  /// bytes are then fetched while that launch still runs. x and y are not touched before it is done.
  bool weights_ready = false;
  /// Activations are rounded to int8, a row at a time (int8_rows.h). Integer weights in Marlin's words only.
  bool int8_activations = false;
  /// One row, in a step with launches that take some of many weights: what suits their kernel uses it, too. It is larger
  /// than those of one weight, and two of them do not fit the instruction cache (docs/notes/kernels/decode.md).
  bool beside_routed = false;
  L2Prefetch prefetch;  ///< up to 16 rows; others pay no heed
  /// One row of f16, and a linear that fuses(); `swiglu` alone for any rows, where the plan applies it (gates()).
  /// Otherwise bad_argument. Rows of y have then n/2 values.
  LinearFusion fusion;
};

struct KernelRow;

/// One launch, but for what small kernels prepare: one pass, or two that a kernel takes together.
struct LaunchStep {
  size_t first = 0, count = 1;  ///< passes
  const KernelRow* row = nullptr;

  bool operator==(const LaunchStep&) const = default;
};
using LaunchSteps = std::vector<LaunchStep>;

/// The steps of up to so many rows, more than the range before.
struct LaunchRange {
  int64_t most_rows = 0;
  LaunchSteps steps;
};

/// Bytes, aligned to 256. Semaphores, and mailboxes, are zeroed once before their first use, zero between launches, and
/// may be those of other linears; scratch may be anybody's.
struct WorkspaceSizes {
  size_t semaphores = 0, scratch = 0;

  void include(const WorkspaceSizes& other) noexcept;  ///< the larger of both
};
struct Workspace {
  void* semaphores = nullptr;
  void* scratch = nullptr;
  WorkspaceSizes sizes = {};
};

/// How a linear is multiplied on one GPU, for any number of rows.
struct LaunchPlan {
  std::vector<LaunchRange> ranges;  ///< ascending
  bool int8_activations = false;
  std::string text;  ///< "4096 × 4096, kbit4-b32-e4m4", for messages

  const LaunchSteps& steps(int64_t rows) const;
};

/// Throws unsupported with every kernel's reason where none takes a pass.
LaunchPlan plan_launches(const device::Properties& gpu, const DeviceLinear& linear, bool int8_activations = false);
/// What a call of these rows needs alone.
LaunchSteps choose_launches(const device::Properties& gpu, const DeviceLinear& linear, int64_t rows,
                            DType activation = DType::f16, bool int8_activations = false);

/// Of calls of 1 to `most_rows` rows.
WorkspaceSizes workspace_sizes(const device::Properties& gpu, const DeviceLinear& linear, const LaunchPlan& plan,
                               int64_t most_rows);

/// Whether the product of one row takes a LinearFusion: one launch, of a kernel that fuses.
bool fuses(const LaunchSteps& steps);
/// Whether a product of one row beside routed ones (LinearCall::beside_routed) makes a TailProduct of so many outputs.
bool leaves_tail(const device::Properties& gpu, const DeviceLinear& linear, const LaunchSteps& steps, int64_t outputs);
/// Whether the kernel of so many rows makes silu(gate) · up.
bool gates(const DeviceLinear& linear, const LaunchSteps& steps, int64_t rows);

/// One row through some of the weights of a linear, which stand one below the other: the experts that a token is sent to.
struct RoutedCall {
  const __half* x = nullptr;
  int64_t x_stride = 0;              ///< elements from the input of a place to the next one's; 0: they share one
  const int32_t* experts = nullptr;  ///< [places], in GPU memory
  int places = 0;                    ///< at most 32
  int64_t n = 0;                     ///< outputs of one weight, a multiple of 64
  void* y = nullptr;                 ///< f32 [places × n]; with fusion.swiglu f16 [places × n/2]
  /// [places], in GPU memory: y [n] += Σ shares · products, a sum of f32. Of linears that add_up().
  const float* shares = nullptr;
  LinearFusion fusion = {};  ///< what completes inputs that places share; what lies behind a sum
  RouteArgs choice =
      {};  ///< logits: the launch chooses `experts` itself, of those that chooses() accepts; null: they stand
  ExpertPrefetch next = {};    ///< what the launch behind this one reads of the same experts
  bool weights_ready = false;  ///< LinearCall
  bool places_stand = false;   ///< experts and shares are those that the routed launch before this one chose
};
/// Whether a linear of weights with n outputs each can be multiplied so.
bool routes(const DeviceLinear& linear, const LaunchPlan& plan, int64_t n);
/// Whether the products of several of its weights can be added up as they are made.
bool adds_up(const DeviceLinear& linear);
/// Whether a routed launch can make such a choice.
bool chooses(const RouteArgs& choice);
/// What a routed launch of these weights, with n outputs each, reads of each.
ExpertPrefetch expert_codes(const DeviceLinear& linear, int64_t n);
/// In one launch. Throws bad_argument for a linear that does not route.
void multiply_routed(const DeviceLinear& linear, const LaunchPlan& plan, const RoutedCall& call,
                     const Workspace& workspace, const device::Stream& stream);
/// Many rows through the weights of a linear that stand one below the other, each through its own: rows that have been sorted
/// by the experts that they are sent to.
struct GroupedCall {
  const __half* x = nullptr;         ///< [rows × k]
  const RowGroup* groups = nullptr;  ///< [count], in GPU memory, none of them empty
  int count = 0;                     ///< at most 65535
  int most_rows = 0;                 ///< of a group, at most most_group_rows
  int64_t n = 0;                     ///< outputs of one weight, a multiple of 64
  void* y = nullptr;                 ///< f32 [rows × n]; with `swiglu` f16 [rows × n/2]
  bool swiglu = false;               ///< of gates and ups in turn
};
/// Whether a linear of weights with n outputs each can be multiplied so.
bool multiplies_groups(const device::Properties& gpu, const DeviceLinear& linear, int64_t n);
/// In one launch. Throws bad_argument for a linear whose groups cannot be multiplied.
void multiply_groups(const DeviceLinear& linear, const LaunchPlan& plan, const GroupedCall& call,
                     const device::Stream& stream);
/// Weight `index` of so many outputs by itself: planes of the same memory. Of one pass that routes, or of 16-bit rows.
DeviceLinear one_of(const DeviceLinear& linear, int64_t index, int64_t n);

/// What the relative error (Frobenius) of a product of f16 activations is at most, against the fp64 product of what it
/// multiplies.
double error_bound(const LaunchSteps& steps, bool fp32_result);

/// Where passes come from that are not resident.
struct PassSource {
  std::function<DevicePass(size_t pass)> acquire;  ///< its planes are there once the stream comes to this point
  std::function<void(size_t pass)> release;        ///< its product has been queued
};

/// Launches on `stream`. Throws bad_argument, before any launch, for sizes, types, null or misaligned pointers or a
/// workspace that do not fit; device when a launch fails.
void multiply(const DeviceLinear& linear, const LaunchPlan& plan, const LinearCall& call, const Workspace& workspace,
              const device::Stream& stream, const PassSource& source = {});

}  // namespace w4q::kernels
