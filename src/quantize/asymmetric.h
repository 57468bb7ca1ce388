// Targets for linears whose inputs are those of a model that is quantized up to them: W' = W + W·D·(Ĝ + λ)⁻¹ lets W'·x̂
// be nearest to W·x, with x the input in the model as it is, x̂ the one behind quantized layers, Ĝ the mean of x̂ᵀx̂ and D
// that of (x − x̂)ᵀx̂, rows being tokens (docs/quality.md).
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>
#include <vector>

#include "core/host_device.h"
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

/// How far a row may move from W_r to W'_r, over |W_r|². Inputs of few tokens, or such as lost what they were, ask for
/// several times the weight itself, and for its opposite: what is left is no longer the model's.
struct MoveLimit {
  double share = 1;                                         ///< of the move that is made at most
  double size = std::numeric_limits<double>::infinity();    ///< |W'_r − W_r|²
  double growth = std::numeric_limits<double>::infinity();  ///< ⟨W'_r − W_r, W_r⟩
  double loss = std::numeric_limits<double>::infinity();    ///< its opposite
};
/// For rows that are to be rounded to so many bits: 6 times the noise of that rounding, 4 times from 4 bits on, and a
/// fifth of what they are. Measured on trained models: whole matrices at most 0.57, 0.10, 0.022 and 0.0001 with 2, 3, 4
/// and 8 bits; rows grow by 0.26 of themselves at most, and lose 0.12.
inline MoveLimit move_limit(int bits) { return {1, (bits < 4 ? 12 : 8) * std::pow(0.25, bits), 0.4, 0.2}; }

/// A row's move is k numbers that are fitted to tokens: of few, most of it is noise, and less is made of it.
inline MoveLimit move_limit(int bits, int64_t tokens, int64_t width) {
  MoveLimit limit = move_limit(bits);
  limit.share = supported_share(tokens, width);
  return limit;
}

/// What of a row's move is made: `own` is |W_r|², `size` and `along` are of the whole move, as in MoveLimit.
W4Q_HOST_DEVICE inline double part_of_move(double own, double size, double along, const MoveLimit& limit) {
  double part = limit.share;
  if (part * part * size > limit.size * own) part = std::sqrt(limit.size * own / size);
  if (along * part > limit.growth * own) part = limit.growth * own / along;
  if (-along * part > limit.loss * own) part = limit.loss * own / -along;
  return part;
}

/// Moves `weight` [n, k] to W + W·D·(Ĝ + λ)⁻¹, each row as far as `limit` lets it, in that direction. `factor` is that of
/// Ĝ, the mean of whose diagonal is `mean` and whose damping is λ / mean; both in the basis of the weight. The result
/// does not depend on the number of threads.
void follow_inputs(MatrixView<float> weight, MatrixView<const float> drift, const ErrorFactor& factor, double mean,
                   const MoveLimit& limit);

}  // namespace w4q::quantize
