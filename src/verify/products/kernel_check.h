// Every linear layer of a model, as the GPU computes it, against the CPU's twin and an fp64 product of the same
// weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/context.h"
#include "io/json.h"
#include "model/model.h"
#include "ranks/ranks.h"
#include "verify/report.h"

namespace w4q::verify {

/// One layer, or gate and up as one: worst over the first and the last row count of every kernel that its rows choose.
/// Errors are relative: ‖y − reference‖ / ‖reference‖. What a decode step fuses and, with int8 activations, what rounds
/// them have lines of their own; the latter's references multiply the same integers.
struct KernelError {
  std::string name;          ///< "model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_proj and up_proj"
  std::string scheme = {};   ///< "kbit4-b32-e4m4", "f16"
  std::string kernels = {};  ///< "kbit-gemv, kbit-gemm, kbit-wide"
  double to_cpu = 0;
  double to_fp64 = 0;  ///< over up to 64 outputs
  /// Of the product with int8 activations to an fp64 one of the activations as they were; 0: has none.
  double rounding = 0;
  double bound = 0;  ///< of the errors, but for rounding: what its kernels claim (kernels::KernelRow::error_bound)

  double error() const noexcept;  ///< the larger one; NaN where one is
  bool passed() const noexcept { return error() <= bound; }
};

struct KernelReport {
  std::vector<KernelError> layers;
  /// Passed where no layer is beyond its bound; names those that are, and of all the one that is nearest to it.
  Check verdict() const;
};

/// Every product of a decoder with random activations: q, k and v in one, gate and up with silu, sums with the residual
/// stream, in a step with norms; the head. With `int8_activations` those of int8 with packed layers, too. Throws device
/// where this program was built without CUDA; unsupported for a model that has no products with int8. `model` is the part
/// of the stage; `ranks`, each with a GPU, share the products, and what is returned is the same at each.
KernelReport check_kernels(device::Context& gpu, const model::Model& model, bool int8_activations, ranks::Ranks& ranks,
                           const model::LayerStage& stage);
/// By this process alone.
KernelReport check_kernels(device::Context& gpu, const model::Model& model, bool int8_activations = false);

std::string to_text(const KernelReport& report);
io::Json to_json(const KernelReport& report);

}  // namespace w4q::verify
