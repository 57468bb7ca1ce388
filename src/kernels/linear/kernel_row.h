// The table of kernels that multiply with weights: which of them takes which passes and rows (device_linear.h).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "kernels/linear/device_linear.h"

namespace w4q::kernels {

/// What decides which kernel runs: a pass, or two to be multiplied together.
struct LinearDesc {
  const device::Properties& gpu;  ///< that it runs on
  std::span<const DevicePass> passes;
  int64_t m = 0;
  DType activation = DType::f16;
  bool int8_activations = false;
  bool input_scaled = false, input_rotated = false;

  const DevicePass& pass() const { return passes.front(); }
  int64_t n() const { return pass().n; }
  int64_t k() const { return pass().k; }
};

/// A launch of a kernel. Residual and bias are those of this launch.
struct LinearArgs : LinearCall {
  std::span<const DevicePass> passes;  ///< as many as the row accepted
  const float* bias = nullptr;
  const float* input_scale = nullptr;  ///< for rows that scale their input
  Workspace workspace;
  std::string_view shape;  ///< of the linear, for messages
  /// The factors of the rotation whose input stands at the beginning of the scratch, left there by the launch before;
  /// null: none does. Rows that rotate keep it true.
  const float** rotated_input = nullptr;

  const DevicePass& pass() const { return passes.front(); }
  int64_t n() const { return pass().n; }
  int64_t k() const { return pass().k; }
};

/// What a launch of some of many weights is told beside.
struct RoutedArgs {
  Routes routes;
  RouteArgs choice;
  ExpertPrefetch next;
};

/// What a launch of many weights is told beside: rows of x and y are those of all groups.
struct GroupedArgs {
  const RowGroup* groups = nullptr;
  int count = 0, most_rows = 0;  ///< rows of a group
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
  /// Whether it takes such passes; otherwise `why`, unless null, says what does not fit.
  bool (*accepts)(const LinearDesc&, std::string* why);
  /// Of `desc`, which it accepts.
  WorkspaceSizes (*workspace)(const LinearDesc& desc);
  /// Throws bad_argument for planes that are not what it reads.
  void (*check)(const DevicePass&);
  /// Arguments have been checked.
  void (*run)(const LinearArgs&, const device::Stream&);
  /// One row, of some of many weights; the pass has as many outputs as all places that do not add up. Null: it cannot.
  void (*run_routed)(const LinearArgs&, const RoutedArgs&, const device::Stream&) = nullptr;
  /// Up to most_group_rows rows of each of many weights; the pass has the outputs of one. Null: it cannot.
  void (*run_grouped)(const LinearArgs&, const GroupedArgs&, const device::Stream&) = nullptr;
  /// Whether its kernel of one row beside routed ones makes a TailProduct. Null: it does not.
  bool (*leaves_tail)(const LinearDesc&) = nullptr;
  bool fuses = false;                  ///< takes a LinearFusion where there is one row, with gates in turns
  GateOrder swiglu = GateOrder::none;  ///< takes LinearFusion::swiglu, by itself, for all its rows, of such gates
  bool begins_early = true;            ///< may begin while the launch before still runs
  bool scales_input = false;           ///< divides x by the input scale; for others that is done before
  /// error_bound of f16 activations. Two roundings to 11 bits (weight or table entry, product with the scale) and one
  /// of the result, each at most 2^-11 relative and about 0.29 · 2^-11 · √… in the mean (5e-4 was measured). Of a
  /// thousand weights or more: fewer have the worst case instead of the mean.
  double error = 1e-3;
  double fp32_error = 0;  ///< the same of f32 results where they are nearer than 16-bit ones; 0: they are not
};
/// KernelRow::error of bf16 activations, which have 8 bits.
inline constexpr double bf16_error = 6e-3;

/// All ways, the preferred ones first.
std::span<const KernelRow> kernel_registry() noexcept;
/// The first row that accepts, or null.
const KernelRow* find_kernel(const LinearDesc& desc) noexcept;
/// The same. Throws unsupported with every row's reason when none does.
const KernelRow& pick_kernel(const LinearDesc& desc);

/// Checks `args` and launches `row`, which accepts them. Throws as multiply().
void run_kernel(const KernelRow& row, const LinearArgs& args, const device::Stream& stream);

/// Most rows that one launch of the tensor-core kernels takes.
inline constexpr int64_t most_launch_rows = 64;

}  // namespace w4q::kernels
