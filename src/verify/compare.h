// Two checkpoints of one model side by side: what each does to the weights, to the outputs of its layers and to the
// predictions, and whether the difference is more than chance.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "io/json.h"
#include "model/kinds.h"
#include "model/opened.h"
#include "model/weight_error.h"
#include "ranks/ranks.h"
#include "verify/perplexity.h"
#include "verify/sizes.h"

namespace w4q::verify {

/// The error of a linear's outputs, a mean square summed over outputs, that rows of a difference of its weights make;
/// nothing where that is not known.
using OutputErrorOf =
    std::function<std::optional<double>(const std::string& module, MatrixView<const float> difference)>;

/// One linear layer of one of the two.
struct ComparedSide {
  std::string scheme;  ///< "bf16" where it is not packed
  model::WeightError error;
  std::optional<double> output;  ///< error of the outputs
};

struct ComparedLinear {
  std::string name;
  std::optional<double> power;  ///< of the outputs
  ComparedSide a, b;
};

/// The size of one of the two, and its error over all linears that either packs.
struct ComparedTotal {
  int64_t bytes = 0;           ///< of all tensors
  double bits_per_weight = 0;  ///< over the linears in the table
  model::WeightError error;
  std::vector<KindBytes> kinds = {};
};

struct Comparison {
  std::vector<ComparedLinear> linears;  ///< all that one of the two packs
  ComparedTotal a, b;

  struct Predictions {
    PerplexityReport a, b;    ///< against the base, on the same windows
    Estimate nll_difference;  ///< b − a, paired window by window
    Estimate kl_difference;
    Estimate top1_difference;  ///< of the shares of tokens whose most likely next token is not the base's
  };
  std::optional<Predictions> predictions;
};

/// Weights, folded scales undone, and outputs where `output_error` is given, each against `base` in its own basis.
/// `ranks` share the linears; what is returned is the same at each. Throws mismatch when the checkpoints are not of one
/// architecture.
Comparison compare_linears(const model::OpenedModel& a, const model::OpenedModel& b, const model::OpenedModel& base,
                           const OutputErrorOf& output_error, ranks::Ranks& ranks = ranks::world());

/// Decodes all three in lock step, the base once. Throws as measure_perplexities does.
Comparison::Predictions compare_predictions(const model::Model& a, const model::Model& b, const model::Model& base,
                                            std::span<const int32_t> ids, const PerplexityOptions& options);

/// What the difference of KL says: −1: b is closer to the base, 1: a is, 0: no difference beyond chance at 95 %.
int verdict(const Comparison::Predictions& predictions) noexcept;

std::string to_text(const Comparison& comparison, model::Detail detail = model::Detail::kinds);
io::Json to_json(const Comparison& comparison);

}  // namespace w4q::verify
