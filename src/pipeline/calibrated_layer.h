// One decoder layer with what calibration knows of its inputs. AWQ searches the scales of every group of linears that
// share an input, folds them into what produces that input and clips (docs/awq.md); channels weigh errors by their
// mean square, and errors are fed back along k (docs/quality.md); then each linear is packed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/buffer.h"
#include "model/opened.h"
#include "model/weight_error.h"
#include "pipeline/gradients.h"
#include "pipeline/linear_groups.h"
#include "pipeline/scale_folding.h"
#include "quantize/asymmetric.h"
#include "quantize/awq.h"
#include "quantize/passes.h"
#include "quantize/quantizer_registry.h"

namespace w4q::quantize {
struct CudaWork;
}

namespace w4q::pipeline {

/// How linears are packed with what calibration knows.
struct CalibratedPacking {
  SchemeOf scheme_of;
  quantize::QuantizeOptions options;
  /// Passes after the first, by module path.
  std::map<std::string, std::vector<quantize::Pass>, std::less<>> residual = {};
};

/// The error of a linear's outputs: mean squares over calibration rows, summed over outputs.
struct OutputError {
  double power = 0;  ///< of the outputs themselves
  double plain = 0;  ///< each weight rounded by itself
  double packed = 0;
};

/// What the search did to one group; errors are mean squares of the group's outputs, over calibration rows, summed over
/// outputs.
struct GroupReport {
  std::string name;
  ScaleTarget::Kind target = ScaleTarget::Kind::none;
  quantize::AwqPoint point;
  double output = 0;        ///< mean square of the outputs themselves
  double plain_error = 0;   ///< rounded as they are
  double scaled_error = 0;  ///< with scales
  double packed_error = 0;  ///< as packed: with scales, clips, searches, feedback
};

/// The inputs of a layer's groups in the model as it is and behind what has been quantized so far, side by side.
class PairedInputs {
 public:
  virtual ~PairedInputs() = default;
  /// Of a group, once those before it are packed. Nothing for an expert's: the router may send it other tokens.
  virtual std::optional<quantize::InputPair> of(size_t group) = 0;
  /// A linear is packed: from now on inputs are those behind this weight [n, k], scales and rotations undone.
  virtual void take(const std::string& linear, Values weight) = 0;
};

struct CalibratedLinear {
  formats::PackedLinear linear;
  quantize::QuantizeStats stats;   ///< of all passes; the exponent is that of the first
  std::vector<float> input_scale;  ///< to be stored; empty when none is
  /// What columns were multiplied and rows divided by before the weight was packed, stored or folded; empty: ones.
  std::vector<float> columns = {}, rows = {};
  model::WeightError error;  ///< of the effective weight, scales undone
  OutputError output;
  double seconds = 0;
};

/// Experts by the calibration rows that were sent to them.
struct ExpertCounts {
  int64_t all = 0;
  int64_t idle = 0;    ///< none: plainly rounded
  int64_t scarce = 0;  ///< fewer than they have input channels

  void add(const ExpertCounts& other) noexcept { all += other.all, idle += other.idle, scarce += other.scarce; }
};

struct CalibratedLayer {
  std::map<std::string, CalibratedLinear, std::less<>> linears;  ///< packed ones, by module path
  std::map<std::string, Buffer, std::less<>> tensors;            ///< norms and biases that changed, in their own type
  std::set<std::string, std::less<>> rescaled;                   ///< parameters that carry folded scales
  std::vector<GroupReport> groups;
  std::vector<std::string> notes;  ///< what was wrong with the statistics
  ExpertCounts experts;
};

/// Where the scales of a layer's groups go.
ScaleTargets wanted_targets(const model::ModelConfig& config, int64_t layer, const SchemeOf& scheme_of,
                            const quantize::Steps& steps);

/// Whether the GPU has a way for everything that is packed in a layer; otherwise the CPU packs it.
bool packs_on_gpu(const model::ModelConfig& config, int64_t layer, const CalibratedPacking& packing);

/// Whether the inputs of a layer's groups must be known before the first of them is packed; otherwise paired ones do.
bool needs_statistics(const model::ModelConfig& config, int64_t layer, const CalibratedPacking& packing);

/// What a layer is packed with beside its statistics.
struct LayerSources {
  std::shared_ptr<quantize::CudaWork> gpu = nullptr;  ///< does the work, where packs_on_gpu(); null: the CPU
  PairedInputs* paired = nullptr;                     ///< which targets are for; null: weights are their own targets
  LayerCosts costs = {};                              ///< of errors of outputs, for feedback along both sides
};

/// `statistics` may be empty where paired inputs stand in for them. Searches choose on a GPU what they choose on the CPU
/// but for ties within rounding. Throws bad_argument when errors are to be fed back and the statistics have no Gram
/// matrices, bad_file naming tensor, row and column of a weight that is not finite.
CalibratedLayer quantize_layer(const model::OpenedModel& model, int64_t layer, const LayerStatistics& statistics,
                               const CalibratedPacking& packing, const LayerSources& sources = {});

}  // namespace w4q::pipeline
