// Targets for linears whose inputs are those of a model that is quantized up to them: W' = W + W·D·(Ĝ + λ)⁻¹ lets W'·x̂
// be nearest to W·x, with x the input in the model as it is, x̂ the one behind quantized layers, Ĝ the mean of x̂ᵀx̂ and D
// that of (x − x̂)ᵀx̂, rows being tokens (docs/quality.md).
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/views.h"
#include "quantize/error_factor.h"
#include "quantize/statistics.h"

namespace w4q::quantize {

class DriftCuda;

/// Sums over tokens of both inputs.
struct InputPair {
  InputStatistics quantized;             ///< of x̂, with its Gram matrix
  std::vector<double> drift;             ///< Σ (x − x̂)ᵀx̂, [k × k] row-major
  std::shared_ptr<DriftCuda> gpu_drift;  ///< its mean instead, where it was made and is used: in GPU memory
};

/// Sums of nothing.
InputPair make_input_pair(int64_t width);

/// Adds rows x and x̂ [rows, k] of the same tokens; sums as add_rows() for statistics. Throws as that does.
void add_rows(InputPair& pair, MatrixView<const float> plain, MatrixView<const float> quantized, std::string_view name);

/// The mean of (x − x̂)ᵀx̂, [k × k] row-major.
std::vector<float> mean_drift(const InputPair& pair);

/// Moves `weight` [n, k] to W + W·D·(Ĝ + λ)⁻¹. `factor` is that of Ĝ, the mean of whose diagonal is `mean` and whose
/// damping is λ / mean; both in the basis of the weight. The result does not depend on the number of threads.
void follow_inputs(MatrixView<float> weight, MatrixView<const float> drift, const ErrorFactor& factor, double mean);

}  // namespace w4q::quantize
