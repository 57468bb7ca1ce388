#include "quality_options.h"

#include "common_options.h"
#include "core/error.h"
#include "core/text.h"
#include "help.h"

namespace w4q::app {
namespace {

using quantize::StepKind;
using quantize::StepRow;

constexpr std::string_view no_seed = "none";

const CLI::Validator seed_or_none{
    [](std::string& text) -> std::string { return text == no_seed ? "" : not_negative(text); }, "NONNEGATIVE"};

std::optional<uint64_t> read_seed(const std::string& text) {
  if (text == no_seed) return std::nullopt;
  uint64_t seed = 0;
  if (!CLI::detail::lexical_cast(text, seed)) throw CLI::ConversionError(text, "--rotation-seed");
  return seed;
}

bool has_calibration(const QualityArguments& arguments) {
  return arguments.calibration.has_text() || !arguments.statistics.empty();
}

/// Statistics are what was decoded before. Options of decoding are refused beside them, not ignored, unless a step goes
/// over the text itself.
void check_statistics(const QualityArguments& arguments, const quantize::Steps& steps) {
  const std::string given = given_decoding_option(arguments.calibration);
  if (arguments.statistics.empty() || given.empty() || steps.any(&StepRow::needs_text)) return;
  throw without_text(given, "--stats needs none", "--calib instead of --stats");
}

/// The parameters that options give to whatever steps are taken.
quantize::Steps with_parameters(quantize::Steps steps, const QualityArguments& arguments) {
  if (!arguments.rotation_seed && steps.has(StepKind::fold)) {
    throw Error(ErrorCode::bad_argument, "--rotation-seed none is for inputs that are rotated at run time")
        .hint("a number for --fold-rotations");
  }
  for (const auto kind : {StepKind::fold, StepKind::rotate}) {
    if (auto* step = steps.find(kind)) step->seed = arguments.rotation_seed;
  }
  if (auto* awq = steps.find(StepKind::awq)) {
    awq->clip = !arguments.no_clip;
    awq->input_scales = !arguments.no_input_scales;
  }
  if (auto* feedback = steps.find(StepKind::feedback)) feedback->damping = arguments.damping;
  return steps;
}

/// Those of the preset, or those that are named; a recipe's count where the command line names none but such as change
/// the model.
quantize::Steps chosen_steps(const QualityArguments& arguments, const pipeline::QuantizeRequest& request) {
  quantize::Steps steps = request.options.steps;  // of --codebook and --clip
  steps.add(arguments.steps);
  if (const auto* row = quantize::step_of_method(request.method)) steps.add({row->kind});
  if (!arguments.quality.empty()) {
    steps.add(quantize::preset_steps(arguments.quality, request.scheme));
  } else if (arguments.recipe && steps.without(&StepRow::of_model).empty()) {
    steps.add(*arguments.recipe);
  }
  return with_parameters(std::move(steps), arguments);
}

void check_method(const QualityArguments& arguments, const pipeline::QuantizeRequest& request, bool searches) {
  const auto refuse = [&](std::string_view what, std::string_view hint) {
    throw Error(ErrorCode::bad_argument, concat(what, " means nothing to --method ", request.method)).hint(hint);
  };
  if (request.method == "rtn" && searches) refuse("--scales search or --codebook lloyd", "they belong to kbit schemes");
  const quantize::Steps& steps = request.options.steps;
  if (!steps.has(StepKind::awq) && (arguments.no_clip || arguments.no_input_scales)) {
    refuse("--no-clip or --no-input-scales", "they belong to --method awq and --awq");
  }
  for (const quantize::Step& step : steps) {
    const StepRow& row = quantize::step_row(step.kind);
    std::string why;
    if (row.of_quantizer || request.recipe || row.accepts(request.scheme, &why)) continue;
    refuse(row.option, concat(formats::to_string(request.scheme), " has no ", why));
  }
  if (request.options.bnb_compatible && (searches || steps.has(StepKind::awq) || steps.has(StepKind::feedback))) {
    throw Error(ErrorCode::bad_argument, "--bnb-compatible writes bitsandbytes' bytes, which no step can change")
        .hint("leave out --bnb-compatible, or --quality, --scales, --codebook lloyd, --awq and --feedback");
  }
}

/// The option of a step: a width where it has some, otherwise a flag.
CLI::Option* add_step(CLI::App& command, const StepRow& row, quantize::Steps& steps) {
  const std::string name(row.option), help(row.help);
  const auto kind = row.kind;
  const auto take_flag = [&steps, kind] { steps.add({kind}); };
  if (row.blocks.empty()) return command.add_flag_callback(name, take_flag, help);
  std::vector<int64_t> widths{0};
  widths.insert(widths.end(), row.blocks.begin(), row.blocks.end());
  const auto take_width = [&steps, kind](int64_t block) {
    if (block > 0) steps.add({kind, block});
  };
  return command.add_option_function<int64_t>(name, take_width, help)->check(CLI::IsMember(widths))->default_str("0");
}

/// The options of the parameters that stand behind that of their step.
void add_parameters(CLI::App& command, StepKind kind, QualityArguments& arguments) {
  if (kind == StepKind::rotate) {
    command
        .add_option_function<std::string>(
            "--rotation-seed", [&arguments](const std::string& text) { arguments.rotation_seed = read_seed(text); },
            "Of the signs of rotations, folded or not; none: --rotate without signs, as Humming has it")
        ->check(seed_or_none)
        ->type_name("SEED")
        ->default_str("0");
  } else if (kind == StepKind::feedback) {
    command
        .add_option("--damping", arguments.damping,
                    "Feedback: added to the Gram matrix, as a share of its mean diagonal")
        ->check(CLI::Range(0.0, 1e3))
        ->capture_default_str();
  }
}

}  // namespace

CLI::Option* add_quality(CLI::App& command, QualityArguments& arguments) {
  auto* quality =
      command
          .add_option(
              "--quality", arguments.quality,
              "Steps by name. fast: searches, no calibration; good: tables learned and weighted by calibration, "
              "feedback, sweeps; best: AWQ's scales, for kbit a rotation of the inputs, targets that make up for the "
              "layers before, and distilled norms; max: gradients too")
          ->check(CLI::IsMember(quantize::preset_names()))
          ->group(aim_group);
  const InGroup steps(command, steps_group);
  const auto take_scales = [&arguments](const std::string& rule) {
    if (rule == "search") arguments.steps.add({StepKind::search_scales});
  };
  auto* scales = command
                     .add_option_function<std::string>(
                         "--scales", take_scales,
                         "kbit, rotated: scales from the largest magnitude or the norm, or by least squared error")
                     ->check(CLI::IsMember({"absmax", "search"}))
                     ->default_str("absmax");
  quality->excludes(scales);
  for (const StepRow& row : quantize::step_registry()) {
    if (row.option.empty()) continue;
    CLI::Option* option = add_step(command, row, arguments.steps);
    if (!row.of_model) quality->excludes(option);
    add_parameters(command, row.kind, arguments);
  }
  command.add_flag("--no-clip", arguments.no_clip, "awq: scale only, do not clip");
  command.add_flag("--no-input-scales", arguments.no_input_scales,
                   "awq: leave unscaled what cannot be folded, as other programs need it");
  add_calibration(command, "--calib", "--calib-ids", arguments.calibration);
  command.get_option("--calib")->group(aim_group);
  const InGroup calibration(command, calibration_group);
  command.add_option("--stats", arguments.statistics, "Statistics made by w4q calibrate, instead of --calib")
      ->type_name("FILE");
  return quality;
}

void set_quality(const QualityArguments& arguments, pipeline::QuantizeRequest& request) {
  request.preset = arguments.quality;
  request.options.steps = chosen_steps(arguments, request);
  check_statistics(arguments, request.options.steps);
  quantize::check_complete(request.options.steps);
  const bool searches = request.options.searches();
  check_method(arguments, request, searches);
  const bool needs = request.options.steps.any(&StepRow::needs_statistics);
  if (!needs && !has_calibration(arguments)) return;
  if (!needs && !searches && arguments.measures_activations) return;
  if (!needs && !searches) {
    throw Error(ErrorCode::bad_argument, concat("method ", request.method, " does not use calibration by itself"))
        .hint(
            "--method awq does, and so do --scales search, --codebook lloyd, --awq, --asym, --feedback, --sweeps and "
            "--calibrate-norms");
  }
  // Presets need no text of the user.
  pipeline::CalibrationText text = calibration_text(arguments.calibration);
  const bool reads = arguments.statistics.empty() || request.options.steps.any(&StepRow::needs_text);
  if (reads && text.empty() && !arguments.quality.empty()) text.self = true;
  request.calibrated = {.text = std::move(text),
                        .statistics = arguments.statistics,
                        .max_memory = static_cast<int64_t>(arguments.calibration.max_memory)};
}

}  // namespace w4q::app
