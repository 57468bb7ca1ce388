// How far the packed weights are from the base's, tensor by tensor, by the reference decoder.
#pragma once

#include <string>
#include <vector>

#include "model/kinds.h"
#include "model/opened.h"
#include "model/weight_error.h"
#include "verify/weights/limit.h"

namespace w4q::verify {

struct TensorError {
  std::string name;
  std::string scheme;
  model::WeightError error;
  std::optional<WeightLimit> limit = {};    ///< nothing: the base's weight cannot be rounded to the scheme
  bool folded = false;                      ///< scales were folded into it, and not into single channels
  std::optional<std::string> streams = {};  ///< what is wrong where its codes stand (streams.h)
};

struct WeightReport {
  std::vector<TensorError> tensors;
  model::WeightError total;
  std::vector<std::string> norms;        ///< faults of norms whose factors nothing carries (carried.h)
  std::vector<std::string> not_in_base;  ///< packed experts of names that the base does not have
  std::vector<std::string> extra;        ///< packed weights that the base would have under this name, and has not
  int64_t rescaled = 0;                  ///< packed weights that carry folded scales, which were undone (rescaled.h)
};

/// Compares every packed linear, folded scales undone, with the base's weight, where that has one. Throws as loading does,
/// mismatch for different sizes.
WeightReport compare_with_base(const model::OpenedModel& candidate, const model::OpenedModel& base);

/// "rotated4-d128+rotated3-d128".
std::string scheme_text(const checkpoint::PackedLinearInfo& info);

/// One line for each weight that misses what its scheme reaches on the base's: name, found, floor and remedy.
std::vector<std::string> faults_of(const WeightReport& report);

std::string to_text(const WeightReport& report, model::Detail detail = model::Detail::kinds);
io::Json to_json(const WeightReport& report);

}  // namespace w4q::verify
