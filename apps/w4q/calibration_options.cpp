#include "calibration_options.h"

#include "core/error.h"

namespace w4q::app {

void add_calibration(CLI::App& command, const std::string& text_name, const std::string& ids_name,
                     CalibrationArguments& arguments) {
  auto* text = command.add_option(text_name, arguments.text, "Calibration text, UTF-8")->type_name("FILE");
  command.add_option(ids_name, arguments.ids, "Calibration text as token ids (uint16 or uint32 little endian)")
      ->type_name("FILE")
      ->excludes(text);
  command.add_option("--samples", arguments.samples, "Windows of it to decode, spread evenly")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command.add_option("--length", arguments.length, "Tokens of one window")
      ->check(CLI::Range(2, 1 << 20))
      ->capture_default_str();
  command
      .add_option("--max-memory", arguments.max_memory,
                  "Keep activations that would exceed this in compressed files, e.g. 8GB; 0 means no limit")
      ->transform(CLI::AsSizeValue(true))
      ->default_str("0");
}

pipeline::CalibrationText calibration_text(const CalibrationArguments& arguments) {
  return {arguments.text, arguments.ids, arguments.samples, arguments.length};
}

void add_awq(CLI::App& command, AwqArguments& arguments) {
  add_calibration(command, "--calib", "--calib-ids", arguments.calibration);
  command.add_option("--stats", arguments.statistics, "Statistics made by w4q calibrate, instead of --calib")
      ->type_name("FILE");
  command.add_flag("--no-clip", arguments.no_clip, "awq: scale only, do not clip");
  command.add_flag("--no-input-scales", arguments.no_input_scales,
                   "awq: leave unscaled what cannot be folded, as other programs need it");
}

pipeline::AwqRequest awq_request(const AwqArguments& arguments) {
  pipeline::AwqRequest result;
  result.text = calibration_text(arguments.calibration);
  result.statistics = arguments.statistics;
  result.max_memory = static_cast<int64_t>(arguments.calibration.max_memory);
  result.options.clip = !arguments.no_clip;
  result.options.input_scales = !arguments.no_input_scales;
  return result;
}

void refuse_awq(const AwqArguments& arguments, const std::string& method) {
  const bool given = !arguments.calibration.text.empty() || !arguments.calibration.ids.empty() ||
                     !arguments.statistics.empty() || arguments.no_clip || arguments.no_input_scales;
  if (!given) return;
  throw Error(ErrorCode::bad_argument, "method " + method + " does not use calibration").hint("--method awq does");
}

}  // namespace w4q::app
