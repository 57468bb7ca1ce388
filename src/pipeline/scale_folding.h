// Where the scales of input channels can go: into the norm or the linear that produces the channels, so that the model
// computes the same without knowing of them, or into the checkpoint (docs/awq.md).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/buffer.h"
#include "formats/scheme.h"
#include "io/checkpoint.h"
#include "model/config.h"
#include "pipeline/linear_groups.h"

namespace w4q::pipeline {

/// Which scheme a module gets; nothing: it stays in 16 bit.
using SchemeOf = std::function<std::optional<formats::Scheme>(std::string_view module)>;

/// Where the scales of a group go.
struct ScaleTarget {
  enum class Kind {
    norm,         ///< divided out of the weight of the norm before
    linear,       ///< divided out of the rows and the bias of the linear before
    input_scale,  ///< stored with each packed linear of the group
    none,         ///< no scales
  };
  Kind kind = Kind::none;
  std::string producer;  ///< module path of the norm or linear
};

using ScaleTargets = std::vector<ScaleTarget>;  ///< one for each group of a layer

/// Follows from the graph and from what is packed, so that it is known before anything is searched. A norm's scales
/// fold only where everything that reads the norm is packed; a linear's only where it is packed itself. What does not
/// fold becomes an input scale if `store_input_scales`, and is not scaled otherwise.
ScaleTargets scale_targets(const model::ModelConfig& config, int64_t layer, const SchemeOf& scheme_of,
                           bool store_input_scales);

/// For each input channel of a group the channel of the producer that it comes from; channels that come from the
/// same one must share a scale. Empty: each comes from its own. (Query heads that read one value head give such
/// channels to o_proj.)
std::vector<int32_t> shared_channels(const model::InputGroup& group, const ScaleTarget& target);

/// What scales do to the parameters of a layer.
struct FoldedScales {
  std::vector<std::vector<float>> columns;                      ///< multiply a group's weights; empty: ones
  std::map<std::string, std::vector<float>, std::less<>> rows;  ///< divide a producing linear's rows, by module path
  std::map<std::string, Buffer, std::less<>> tensors;           ///< norms and biases that changed, in their own type
  std::set<std::string, std::less<>> rescaled;                  ///< every parameter that changed
};

/// `scales` has the wanted scales of each group, or nothing; channels that share a producer have equal ones. Where a
/// norm or a bias is rounded to its type, the scale becomes the one that the rounded value stands for: folding changes
/// no product but by the rounding of fp32.
FoldedScales fold_scales(const io::Checkpoint& checkpoint, const model::ModelConfig& config, int64_t layer,
                         const ScaleTargets& targets, std::vector<std::vector<float>> scales);

/// A matrix or vector of a checkpoint in fp32.
struct Values {
  std::string name;
  DType dtype = DType::f32;  ///< as stored
  Shape shape;
  std::vector<float> values;

  MatrixView<float> matrix() { return {values.data(), shape[0], shape[1]}; }
};

/// Throws bad_file naming tensor, row and column of a value that is not finite.
Values load_values(const io::Checkpoint& checkpoint, const std::string& name);

}  // namespace w4q::pipeline
