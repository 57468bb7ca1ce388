#include "quality_options.h"

#include "core/error.h"
#include "core/text.h"

namespace w4q::app {
namespace {

bool has_calibration(const QualityArguments& arguments) {
  return !arguments.calibration.text.empty() || !arguments.calibration.ids.empty() || !arguments.statistics.empty();
}

/// Statistics are what was decoded before. Options of decoding are refused beside them, not ignored.
void check_statistics(const QualityArguments& arguments) {
  const std::string given = given_decoding_option(arguments.calibration);
  if (arguments.statistics.empty() || given.empty()) return;
  throw without_text(given, "--stats needs none", "--calib instead of --stats");
}

/// Of --quality best, the width that measured best (docs/notes/quality.md).
constexpr int64_t preset_rotation = 128;

/// What a preset stands for. Integers have no tables and search ranges instead of scales.
void apply_preset(QualityArguments& arguments, pipeline::QuantizeRequest& request) {
  if (arguments.quality.empty()) return;
  const bool kbit = request.scheme.family == formats::SchemeFamily::kbit;
  const bool calibrates = arguments.quality != "fast";
  if (request.scheme.family == formats::SchemeFamily::rotated) {
    arguments.scales = "search";
  } else if (kbit) {
    arguments.scales = "search";
    // Without activations a learned table fits the weights better and, at few bits, the model no better.
    request.options.learn_table = calibrates;
  } else {
    request.options.clip = quantize::Clip::mse;
  }
  arguments.feedback = calibrates;
  arguments.norms = calibrates && request.scheme.family == formats::SchemeFamily::rotated;
  arguments.awq = arguments.quality == "best";
  // Other programs' integer checkpoints have no place for a rotation.
  if (kbit && arguments.awq) arguments.rotate = preset_rotation;
}

/// A recipe's steps count where the command line names none.
void apply_steps(QualityArguments& arguments, pipeline::QuantizeRequest& request) {
  const bool named = !arguments.quality.empty() || arguments.awq || arguments.rotate > 0 || arguments.feedback ||
                     arguments.norms || arguments.scales == "search" || request.options.learn_table ||
                     request.options.clip == quantize::Clip::mse;
  if (!arguments.steps || named) return;
  arguments.fold = arguments.fold || arguments.steps->fold;  // it goes with whatever else is done
  arguments.awq = arguments.steps->awq;
  arguments.rotate = arguments.steps->rotate;
  arguments.feedback = arguments.steps->feedback;
  arguments.norms = arguments.steps->norms;
  if (arguments.steps->search) arguments.scales = "search";
  request.options.learn_table = arguments.steps->learn;
  if (arguments.steps->clip) request.options.clip = quantize::Clip::mse;
}

void check_method(const QualityArguments& arguments, const pipeline::QuantizeRequest& request, bool searches) {
  const auto refuse = [&](std::string_view what, std::string_view hint) {
    throw Error(ErrorCode::bad_argument, concat(what, " means nothing to --method ", request.method)).hint(hint);
  };
  if (request.method == "rtn" && searches) refuse("--scales search or --codebook lloyd", "they belong to kbit schemes");
  if (!arguments.awq && (arguments.no_clip || arguments.no_input_scales)) {
    refuse("--no-clip or --no-input-scales", "they belong to --method awq and --awq");
  }
  if (arguments.norms && request.scheme.family != formats::SchemeFamily::rotated && !request.recipe) {
    refuse("--calibrate-norms", "it belongs to --method rotated");
  }
  if (request.options.bnb_compatible && (searches || arguments.awq || arguments.feedback)) {
    throw Error(ErrorCode::bad_argument, "--bnb-compatible writes bitsandbytes' bytes, which no step can change")
        .hint("leave out --bnb-compatible, or --quality, --scales, --codebook lloyd, --awq and --feedback");
  }
}

}  // namespace

void add_quality(CLI::App& command, QualityArguments& arguments, CLI::Option& codebook, CLI::Option& clip) {
  auto* quality =
      command
          .add_option(
              "--quality", arguments.quality,
              "Steps by name. fast: searches, no calibration; good: tables learned and weighted by calibration, "
              "feedback; best: AWQ's scales and, for kbit, a rotation of the inputs too")
          ->check(CLI::IsMember({"fast", "good", "best"}));
  auto* scales =
      command
          .add_option("--scales", arguments.scales,
                      "kbit, rotated: scales from the largest magnitude or the norm, or by least squared error")
          ->check(CLI::IsMember({"absmax", "search"}))
          ->capture_default_str();
  command.add_flag(
      "--fold-rotations", arguments.fold,
      "First fold rotations into the weights, so that no channel is louder than others: the model computes "
      "the same, and needs nothing at run time");
  auto* awq = command.add_flag("--awq", arguments.awq, "Search AWQ's scales of input channels as a first step");
  auto* rotate = command
                     .add_option("--rotate", arguments.rotate,
                                 "Round in a basis of the inputs that a Hadamard matrix of this size turns; 0: not")
                     ->check(CLI::IsMember({0, 32, 64, 128, 256}))
                     ->capture_default_str();
  command.add_option("--rotation-seed", arguments.rotation_seed, "Of the signs of rotations, folded or not")
      ->capture_default_str();
  auto* feedback = command.add_flag("--feedback", arguments.feedback,
                                    "Feed rounding errors back along k (GPTQ's order); needs calibration");
  command
      .add_option("--damping", arguments.damping, "Feedback: added to the Gram matrix, as a share of its mean diagonal")
      ->check(CLI::Range(0.0, 1e3))
      ->capture_default_str();
  auto* norms =
      command.add_flag("--calibrate-norms", arguments.norms,
                       "Rotated: norms by least squares of the outputs, once codes are chosen; needs calibration");
  for (CLI::Option* step : {&codebook, &clip, scales, awq, rotate, feedback, norms}) quality->excludes(step);
  add_calibration(command, "--calib", "--calib-ids", arguments.calibration);
  command.add_option("--stats", arguments.statistics, "Statistics made by w4q calibrate, instead of --calib")
      ->type_name("FILE");
  command.add_flag("--no-clip", arguments.no_clip, "awq: scale only, do not clip");
  command.add_flag("--no-input-scales", arguments.no_input_scales,
                   "awq: leave unscaled what cannot be folded, as other programs need it");
}

void set_quality(const QualityArguments& given, pipeline::QuantizeRequest& request) {
  QualityArguments arguments = given;
  check_statistics(arguments);
  arguments.awq = arguments.awq || request.method == "awq";
  apply_steps(arguments, request);
  apply_preset(arguments, request);
  arguments.awq = arguments.awq || request.method == "awq";
  if (arguments.scales == "search") request.options.scales = quantize::Scales::search;
  if (arguments.fold) request.fold = arguments.rotation_seed;
  if (arguments.rotate > 0) request.options.rotation = {arguments.rotate, arguments.rotation_seed};
  const bool searches = request.options.searches();
  check_method(arguments, request, searches);
  const bool needs = arguments.awq || arguments.feedback || arguments.norms;
  if (!needs && !has_calibration(arguments)) return;
  if (!needs && !searches) {
    throw Error(ErrorCode::bad_argument, concat("method ", request.method, " does not use calibration by itself"))
        .hint(
            "--method awq does, and so do --scales search, --codebook lloyd, --awq, --feedback and --calibrate-norms");
  }
  auto& calibrated = request.calibrated.emplace();
  calibrated.text = calibration_text(arguments.calibration);
  calibrated.statistics = arguments.statistics;
  calibrated.max_memory = static_cast<int64_t>(arguments.calibration.max_memory);
  calibrated.options = {.scales = arguments.awq,
                        .clip = !arguments.no_clip,
                        .input_scales = !arguments.no_input_scales,
                        .feedback = arguments.feedback,
                        .damping = arguments.damping,
                        .norms = arguments.norms};
}

}  // namespace w4q::app
