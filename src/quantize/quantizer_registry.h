// The table of quantizers: from a 16- or 32-bit matrix to canonical planes.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/views.h"
#include "formats/packed.h"
#include "quantize/steps.h"

namespace w4q::device {
class Context;
}

namespace w4q::quantize {

/// Which range of a group's weights the integer codes span.
enum class Clip {
  min_max,  ///< all of it
  mse,      ///< the share of it with the least squared error
};

/// How kbit chooses the scale of a block.
enum class Scales {
  absmax,  ///< the largest magnitude
  search,  ///< the least squared error among the scales that can be stored (kbit_panel.h)
};

class ErrorFactor;

/// What calibration knows of the inputs of a linear layer. Owns nothing.
struct CalibratedInput {
  std::span<const float> mean_squares;    ///< [k]: errors of a channel's weights count by it
  const ErrorFactor* feedback = nullptr;  ///< rounding errors are fed back along k through this (feedback.h)
  MatrixView<const float> gram = {};      ///< [k, k], what `feedback` was made from: sweeps want it (sweeps.h)
  /// Of Σ g·gᵀ [n, n] of the linear's outputs, in blocks of one: rounding errors are fed back along n too.
  const ErrorFactor* outputs = nullptr;
  MatrixView<const float> output_gram = {};  ///< [n, n], what `outputs` was made from: sweeps want it
};

/// What the user chose. A quantizer refuses options that it does not honour.
struct QuantizeOptions {
  std::string codebook;  ///< name in the codebook registry, empty: the method's own; unused when `table` is not empty
  std::vector<float> table;  ///< the user's own, 2^bits ascending values, largest magnitude 1
  /// bitsandbytes' bytes: its table whatever `codebook` says, its E4M4 rule, codes chosen before the scale is rounded.
  /// Refused (unsupported) with f16 scales, a `table`, or rows that are not whole blocks.
  bool bnb_compatible = false;
  Steps steps;
  const CalibratedInput* input = nullptr;  ///< of the weight that is quantized
  /// NVFP4: the factor of the tensor, a power of two that linears which servers fuse have in common; kbit: that of a
  /// `table` which is learned already and in common, too; 0: its own.
  float tensor_factor = 0;

  Clip clip() const noexcept { return steps.has(StepKind::clip) ? Clip::mse : Clip::min_max; }
  Scales scales() const noexcept { return steps.has(StepKind::search_scales) ? Scales::search : Scales::absmax; }
  /// kbit: the table is only where learning starts (kbit_search.h).
  bool learns_table() const noexcept { return steps.has(StepKind::learn_table); }
  /// The basis of the inputs in which a linear layer is rounded. Whoever has the layer rotates its rows and statistics;
  /// quantizers are given rows that are rotated already.
  formats::Rotation rotation() const noexcept;
  /// Coordinate descent goes on from what feedback made (sweeps.h).
  bool sweeps() const noexcept { return steps.has(StepKind::sweeps); }
  bool feeds_back() const noexcept { return input != nullptr && input->feedback != nullptr; }
  /// Anything but rounding each weight by itself: searched scales, learned tables, feedback.
  bool searches() const noexcept { return steps.any(&StepRow::searches) || feeds_back(); }
};

/// What happened to the blocks of one tensor.
struct QuantizeStats {
  int64_t blocks = 0;
  int64_t zero_blocks = 0;       ///< all weights zero
  int64_t saturated_scales = 0;  ///< absmax above the largest scale
  int64_t subnormal_scales = 0;  ///< scales below the normal range of their type
  int range_exponent = 0;        ///< the codebook carries 2^this
};

struct QuantizeResult {
  formats::PackedWeight weight;
  QuantizeStats stats;
};

struct QuantizerRow {
  std::string_view name;  ///< "kbit", as in --method
  std::string_view description;
  /// True for a scheme that the method can quantize to.
  bool (*accepts)(const formats::Scheme& scheme);
  /// Quantizes an n × k matrix of f32, f16 or bf16. The bytes do not depend on threads or instruction set (class E0).
  /// Throws bad_file naming tensor, row and column of a NaN or infinity, bad_argument for an option it does not honour.
  QuantizeResult (*run)(const TensorView& weight, const formats::Scheme& scheme, const QuantizeOptions& options);
  /// The same bytes and errors from a GPU; null where this build or this method has no such way. Throws device when the
  /// GPU fails.
  QuantizeResult (*run_cuda)(const TensorView& weight, const formats::Scheme& scheme, const QuantizeOptions& options,
                             device::Context& gpu);
};

std::span<const QuantizerRow> quantizer_registry() noexcept;
/// By name. Throws bad_argument and lists the names.
const QuantizerRow& quantizer_row(std::string_view name);

}  // namespace w4q::quantize
