// The passes of linears that read one calibrated input: each is quantized with what the Gram matrix says, in the basis
// of its rotation, and taken from what the passes before it have left over (docs/rotated.md).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "formats/rotation.h"
#include "pipeline/calibrated_layer.h"
#include "pipeline/shared_table.h"
#include "quantize/error_factor.h"

namespace w4q::pipeline {

/// A linear on its way through its passes.
struct PassWork {
  std::string name;
  Values rest;  ///< the weight, its scales applied, less the passes so far, in the basis of the latest
  CalibratedLinear packed;
  std::vector<float> output_costs = {};               ///< of errors of its outputs, [n, n]; empty: not known
  std::optional<quantize::ErrorFactor> outputs = {};  ///< of that, for the latest pass
};

/// Of a square matrix.
std::vector<float> diagonal(MatrixView<const float> matrix);

class CalibratedPasses {
 public:
  /// The mean xᵀx of the group's inputs, k × k, is turned from basis to basis in place. `gram`, `options` must
  /// outlive this; `group` names the linears.
  CalibratedPasses(MatrixView<float> gram, const quantize::QuantizeOptions& options, std::string group);

  /// From now on weights follow their inputs (quantize/asymmetric.h): `drift` [k, k] is that of the inputs of so many
  /// tokens, and is turned as the Gram matrix is; it must outlive this.
  void follow(MatrixView<float> drift, int64_t tokens) { drift_ = drift, drift_tokens_ = tokens; }
  /// The target for `weight`, in the present basis, whose first pass will be `scheme` and whose passes have `bits` in
  /// all; the weight itself where nothing is followed.
  void aim(MatrixView<float> weight, const formats::Scheme& scheme, int bits);
  /// Goes over to the basis of a rotation.
  void turn(const formats::InputRotation& rotation);
  /// In the present basis.
  MatrixView<const float> gram() const noexcept { return gram_; }
  /// The largest damping that error feedback has needed; 0 without.
  double damping() const noexcept { return damping_; }

  /// NVFP4's factor of all first passes from now on; 0: each has its own.
  void share_factor(float factor) { tensor_factor_ = factor; }
  /// kbit's tables of first passes from now on, by scheme; those of other schemes have their own.
  void share_tables(SharedTables tables) { tables_ = std::move(tables); }

  /// The first pass, in the present basis, stands for `weight`: that of the work, or what clipping made of it.
  void add_first(PassWork& work, const formats::Scheme& scheme, const Values& weight);
  /// A further one, for what is left over; goes over to its basis.
  void add_further(PassWork& work, const quantize::Pass& pass);

 private:
  void add(PassWork& work, const formats::Scheme& scheme, const Values& weight, quantize::QuantizeOptions options);
  const quantize::ErrorFactor& factor(int64_t block);
  /// Passes of other families may have other blocks.
  const quantize::ErrorFactor& factor_outputs(PassWork& work, MatrixView<const float> costs, int64_t block) const;

  MatrixView<float> gram_, drift_;
  int64_t drift_tokens_ = 0;
  formats::InputRotation rotation_;
  const quantize::QuantizeOptions& options_;
  std::string group_;
  double damping_ = 0;
  float tensor_factor_ = 0;
  SharedTables tables_;
  std::map<std::pair<std::string, int64_t>, quantize::ErrorFactor> factors_;  // by rotation and block
};

}  // namespace w4q::pipeline
