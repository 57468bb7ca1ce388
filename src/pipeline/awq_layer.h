// AWQ on one decoder layer: searches the scales of every group of linears that share an input, folds them into what
// produces that input, clips, and packs (docs/awq.md).
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/buffer.h"
#include "io/checkpoint.h"
#include "model/config.h"
#include "model/weight_error.h"
#include "pipeline/linear_groups.h"
#include "pipeline/scale_folding.h"
#include "quantize/quantizer_registry.h"

namespace w4q::pipeline {

struct AwqOptions {
  bool clip = true;
  /// Store scales that cannot be folded as input scales; otherwise such groups stay unscaled, which every reader of
  /// AWQ checkpoints understands.
  bool input_scales = true;
};

/// What the search did to one group; errors are mean squares of the group's outputs, over calibration rows, summed over
/// outputs.
struct AwqGroupReport {
  std::string name;
  ScaleTarget::Kind target = ScaleTarget::Kind::none;
  double alpha = 0;
  double output = 0;         ///< mean square of the outputs themselves
  double plain_error = 0;    ///< rounded as they are
  double scaled_error = 0;   ///< with scales
  double clipped_error = 0;  ///< with scales and clips
};

struct PackedByAwq {
  quantize::QuantizeResult result;
  std::vector<float> input_scale;  ///< to be stored; empty when none is
  model::WeightError error;        ///< of the effective weight, scales undone
  double seconds = 0;
};

struct AwqLayer {
  std::map<std::string, PackedByAwq, std::less<>> linears;  ///< packed ones, by module path
  std::map<std::string, Buffer, std::less<>> tensors;       ///< norms and biases that changed, in their own type
  std::set<std::string, std::less<>> rescaled;              ///< parameters that carry folded scales
  std::vector<AwqGroupReport> groups;
};

/// Bytes that one layer takes beside its statistics: the largest group in fp32 twice over, its Gram matrix, and what is
/// packed.
int64_t awq_memory(const io::Checkpoint& checkpoint, const model::ModelConfig& config, const SchemeOf& scheme_of);

/// Throws bad_file naming tensor, row and column of a weight that is not finite.
AwqLayer quantize_layer(const io::Checkpoint& checkpoint, const model::ModelConfig& config, int64_t layer,
                        const LayerStatistics& statistics, const SchemeOf& scheme_of,
                        const quantize::QuantizeOptions& options, const AwqOptions& awq);

}  // namespace w4q::pipeline
