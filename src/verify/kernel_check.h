// Every linear layer of a model, as the GPU computes it, against the CPU's twin and an fp64 product of the same
// weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/context.h"
#include "io/json.h"
#include "model/model.h"
#include "verify/report.h"

namespace w4q::verify {

/// One layer, worst over 1, 16, 64 and 200 activation rows. Errors are relative: ‖y − reference‖ / ‖reference‖. With
/// int8 activations a line of its own: worst over 17, 64 and 200 rows, references multiply the same integers.
struct KernelError {
  std::string name;     ///< "model.layers.0.mlp.up_proj"
  std::string scheme;   ///< "kbit4-b32-e4m4", "f16"
  std::string kernels;  ///< "kbit-gemv, kbit-gemm, kbit-wide"
  double to_cpu = 0;
  double to_fp64 = 0;  ///< over up to 64 outputs
  /// Of the product with int8 activations to an fp64 one of the activations as they were; 0: has none.
  double rounding = 0;
};

struct KernelReport {
  std::vector<KernelError> layers;
  double largest() const noexcept;  ///< error; NaN where a layer's is
};

/// Products of random activations with every linear layer and the head, and with `int8_activations` those of int8 with
/// every packed linear layer. Throws device where this program was built without CUDA; unsupported for a model that has
/// no such products.
KernelReport check_kernels(device::Context& gpu, const model::Model& model, bool int8_activations = false);

/// What the largest error may be: two roundings to f16 of what enters a product and one of the result
/// (docs/kernels/kbit.md).
inline constexpr double most_kernel_error = 1e-3;

std::string to_text(const KernelReport& report);
io::Json to_json(const KernelReport& report);

}  // namespace w4q::verify
