// Weights with folded scales, brought back to the base model's units (docs/awq.md).
//
// Nothing but the two checkpoints is asked: the scales that a norm gave away are the ratio of its two versions, and
// those that a linear's rows gave away are measured, row by row, against the base's. The weight that reads these
// channels must carry the same scales: if it does not, its error shows it.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels/linear/linear.h"
#include "model/layer_plan.h"
#include "model/opened.h"
#include "verify/weights/limit.h"

namespace w4q::verify {

/// The weight of a linear as a checkpoint stores it, packed or not. Throws as loading does.
kernels::LinearWeight stored_weight(const checkpoint::Folder& source, const std::string& module);

class RescaledWeights {
 public:
  /// Both outlive it.
  RescaledWeights(const model::OpenedModel& candidate, const model::OpenedModel& base)
      : candidate_(candidate), base_(base) {}

  /// The candidate's weight of `module` in the base's units; as it is stored where it carries no folded scales. Throws
  /// mismatch when its size is not the base's.
  kernels::LinearWeight effective(const std::string& module);
  /// What brings the base's weight of `module` into the units of the stored one; nothing where it carries no folded
  /// scales.
  Units units(const std::string& module);
  /// What each row of the base's weight was multiplied by, as the stored one says within what rounding leaves, whether
  /// it carries folded scales or not. Throws mismatch when its size is not the base's.
  std::vector<float> row_factors(const std::string& module);

 private:
  /// Whether config.json names what is rescaled: other programs do not, and what they folded is found out.
  bool says_so() const;
  bool is_rescaled_norm(const std::string& parameter) const;
  bool is_rescaled(const std::string& module);
  /// Whether rows of a linear gave scales to those that read them.
  bool folds(const std::string& producer);
  /// Whether a linear and what reads it are the base's as they stand, within what rounding may leave.
  bool are_plain(const std::string& producer, std::vector<std::string> consumers) const;
  /// Whether the columns of what reads a linear carry the factors of its rows.
  bool carries_rows(const std::string& producer, const std::vector<std::string>& consumers);
  std::vector<float> columns(const std::string& module, int64_t k);
  const std::vector<float>& rows(const std::string& module);
  /// What the channels behind a norm were multiplied by: the ratio of its two versions, or where it was tuned behind that
  /// what the weights say.
  std::vector<float> norm_ratio(const model::InputGroup& group, int64_t size) const;

  const model::OpenedModel& candidate_;
  const model::OpenedModel& base_;
  std::map<std::string, std::vector<float>> rows_;  // measured so far
  std::map<std::string, bool> folds_;               // found out so far
};

}  // namespace w4q::verify
