// The options of w4q quantize that spend time to get more out of the same bits: scale search, learned tables, AWQ's
// scales, error feedback, and the presets that stand for several of them.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "calibration_options.h"
#include "pipeline/quantize_model.h"

namespace w4q::app {

struct QualityArguments {
  CalibrationArguments calibration;
  std::string statistics;
  std::string quality;                    ///< a preset; empty: the steps by themselves
  quantize::Steps steps;                  ///< that options name
  std::optional<quantize::Steps> recipe;  ///< those of a recipe, for a command line that names none
  bool measures_activations = false;      ///< the text is for scales of activations, too
  bool no_clip = false;
  bool no_input_scales = false;
  std::optional<uint64_t> rotation_seed = 0;  ///< nothing: rotations without signs
  double damping = 0.01;
};

/// The codebook name that asks for a learned table.
inline constexpr std::string_view learned_table = "lloyd";

/// Adds --quality, --scales, --awq, --feedback, --damping, --feedback2, --sweeps, --calibrate-norms, --calib, --stats and what belongs to
/// them. Returns --quality, for the caller to exclude what else it decides.
CLI::Option* add_quality(CLI::App& command, QualityArguments& arguments);

/// Puts the steps into `request`, whose method, scheme and codebook are set. Throws bad_argument for steps that the
/// method has no use for, and for calibration that no step asks for or lacks.
void set_quality(const QualityArguments& arguments, pipeline::QuantizeRequest& request);

}  // namespace w4q::app
