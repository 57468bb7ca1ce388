// One decoder layer with what calibration knows of its inputs. AWQ searches the scales of every group of linears that
// share an input, folds them into what produces that input and clips (docs/awq.md); channels weigh errors by their
// mean square, and errors are fed back along k (docs/quality.md); then each linear is packed.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/buffer.h"
#include "model/opened.h"
#include "model/weight_error.h"
#include "pipeline/gradients.h"
#include "pipeline/linear_groups.h"
#include "pipeline/scale_folding.h"
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

struct CalibratedLinear {
  formats::PackedLinear linear;
  quantize::QuantizeStats stats;   ///< of all passes; the exponent is that of the first
  std::vector<float> input_scale;  ///< to be stored; empty when none is
  model::WeightError error;        ///< of the effective weight, scales undone
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

/// Bytes that one layer takes beside its statistics: the largest group in fp32 twice over, its Gram matrix and factor,
/// and what is packed.
int64_t calibrated_memory(const model::OpenedModel& model, const SchemeOf& scheme_of, const quantize::Steps& steps);

/// Where the scales of a layer's groups go.
ScaleTargets wanted_targets(const model::ModelConfig& config, int64_t layer, const SchemeOf& scheme_of,
                            const quantize::Steps& steps);

/// Whether the GPU has a way for everything that is packed in a layer; otherwise the CPU packs it.
bool packs_on_gpu(const model::ModelConfig& config, int64_t layer, const CalibratedPacking& packing);

/// `costs`: of errors of the outputs of linears, for feedback along both sides.
/// Where packs_on_gpu(), `gpu` may say that the GPU does the work; otherwise it is null. Searches choose what they
/// choose on the CPU but for ties within rounding. Throws bad_argument when errors are to be fed back and the
/// statistics have no Gram matrices, bad_file naming tensor, row and column of a weight that is not finite.
CalibratedLayer quantize_layer(const model::OpenedModel& model, int64_t layer, const LayerStatistics& statistics,
                               const CalibratedPacking& packing,
                               const std::shared_ptr<quantize::CudaWork>& gpu = nullptr, const LayerCosts& costs = {});

}  // namespace w4q::pipeline
