// Weights with folded scales, brought back to the base model's units (docs/awq.md).
//
// Nothing but the two checkpoints is asked: the scales that a norm gave away are the ratio of its two versions, and
// those that a linear's rows gave away are measured, row by row, against the base's. The weight that reads these
// channels must carry the same scales: if it does not, its error shows it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kernels/linear/linear.h"
#include "model/layer_plan.h"
#include "model/opened.h"
#include "verify/weights/factors.h"
#include "verify/weights/limit.h"
#include "verify/weights/norm_factors.h"

namespace w4q::verify {

/// The weight of a linear as a checkpoint stores it, packed or not. Throws as loading does.
kernels::LinearWeight stored_weight(const checkpoint::Folder& source, const std::string& module);

/// What reads a group's norm, in all groups of its layer; of mixtures the first few.
std::vector<std::string> norm_readers(const model::ModelConfig& config, const model::InputGroup& group);

/// Whether something reads the rows of a linear that may have been scaled for it.
bool gives_rows(const model::ModelConfig& config, const std::string& module);

/// What columns were multiplied by. `unsure`: 1 where that is known within wide bounds only; empty: all are known.
struct ChannelScales {
  std::vector<float> factors;
  std::vector<uint8_t> unsure = {};
};

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
  /// The same with rows, and columns that read rows, as they are measured, whether anything shows that scales were folded into
  /// them or not. Nothing where no scales can have been.
  std::optional<Units> measured_units(const std::string& module);
  /// What each row of the base's weight was multiplied by, as the stored one says within what rounding leaves, whether
  /// it carries folded scales or not. Throws mismatch when its size is not the base's.
  std::vector<float> row_factors(const std::string& module);

 private:
  /// Whether config.json names what is rescaled: other programs do not, and what they folded is found out.
  bool says_so() const;
  bool is_rescaled_norm(const model::PlannedNorm& norm) const;
  bool is_rescaled(const std::string& module);
  /// Whether rows of a linear gave scales to those that read them.
  bool folds(const std::string& producer);
  /// Whether a linear and what reads it are the base's as they stand, within what rounding may leave.
  bool are_plain(const std::string& producer, std::vector<std::string> consumers);
  /// Whether the columns of what reads a linear carry the factors of its rows.
  bool carries_rows(const std::string& producer, const std::vector<std::string>& consumers);
  std::vector<float> columns(const std::string& module, int64_t k);
  /// What the channels behind a norm were multiplied by: the ratio of its two versions, of channels whose ratio the norm's
  /// type cannot say what its readers carry, within what it leaves open; where it was tuned behind that what they say.
  const ChannelScales& norm_scales(const model::InputGroup& group, int64_t size);
  void measure_unsure(const model::InputGroup& group, const std::vector<NormFactor>& factors,
                      ChannelScales& scales) const;
  const std::vector<float>& rows(const std::string& module);
  /// Puts what the readers' columns carry in the place of factors of rows that say little.
  void ask_readers(const std::string& module, const std::vector<Factor>& rows, std::vector<float>& result) const;

  const model::OpenedModel& candidate_;
  const model::OpenedModel& base_;
  std::map<std::string, std::vector<float>> rows_;  // measured so far
  std::map<std::string, bool> folds_;               // found out so far
  std::map<std::string, ChannelScales> norms_;      // asked for so far
};

}  // namespace w4q::verify
