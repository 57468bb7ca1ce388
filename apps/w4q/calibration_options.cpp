#include "calibration_options.h"

#include <algorithm>
#include <filesystem>

#include "chat_options.h"
#include "common_options.h"
#include "core/text.h"

namespace w4q::app {

void add_calibration(CLI::App& command, const std::string& text_name, const std::string& ids_name,
                     CalibrationArguments& arguments) {
  const InGroup group(command, calibration_group);
  auto* text =
      command
          .add_option(text_name, arguments.text,
                      "Calibration text, UTF-8; self (where no file is called so): what the model itself writes")
          ->type_name("FILE");
  auto* ids =
      command.add_option(ids_name, arguments.ids, "Calibration text as token ids (uint16 or uint32 little endian)")
          ->type_name("FILE")
          ->excludes(text);
  add_chat(command, arguments.chat, {text, ids});
  auto* samples = command.add_option("--samples", arguments.samples, "Windows of it to decode, spread evenly")
                      ->check(CLI::Range(1, 1 << 20))
                      ->capture_default_str();
  auto* length = command.add_option("--length", arguments.length, "Tokens of one window")
                     ->check(CLI::Range(2, 1 << 20))
                     ->capture_default_str();
  auto* memory =
      command
          .add_option("--max-memory", arguments.max_memory,
                      "Keep activations that would exceed this in compressed files, e.g. 8GB; 0 means no limit")
          ->transform(size_in_bytes)
          ->check(not_negative)
          ->default_str("0");
  command.add_option("--calib-seed", arguments.seed, concat("Of ", text_name, " self"))->capture_default_str();
  arguments.samples_option = samples, arguments.length_option = length;
  arguments.of_decoding = {samples, length, memory};
}

std::string given_decoding_option(const CalibrationArguments& arguments) {
  const auto given =
      std::ranges::find_if(arguments.of_decoding, [](const auto* option) { return option->count() > 0; });
  return given == arguments.of_decoding.end() ? std::string() : (*given)->get_name();
}

Error without_text(const std::string& option, std::string_view why, std::string_view instead) {
  return Error(ErrorCode::bad_argument, concat(option, " is about text that is decoded; ", why))
      .hint(concat("leave out ", option, ", or give ", instead));
}

void add_activation_scales(CLI::App& command, bool& inputs, bool& cache) {
  command.add_flag(
      "--activation-scales", inputs,
      "With --to compressed-tensors-float or modelopt: programs quantize the inputs of linears too; measures "
      "the scales that NVFP4 and FP8 want on a text (--calib)");
  command.add_flag("--cache-scales", cache,
                   "The same for keys and values of a cache in FP8, of compressed-tensors' integers too");
}

pipeline::ActivationRequest activation_request(bool inputs, bool cache, const CalibrationArguments& arguments) {
  const bool wanted = inputs || cache;
  if (wanted && !arguments.has_text()) {
    throw Error(ErrorCode::bad_argument, "--activation-scales and --cache-scales are measured on a text")
        .hint("--calib FILE, --calib-ids FILE or --chat FILE");
  }
  if (!wanted) return {};
  return {calibration_text(arguments), inputs, cache};
}

pipeline::CalibrationText calibration_text(const CalibrationArguments& arguments) {
  pipeline::CalibrationText text{arguments.text, arguments.ids, arguments.samples, arguments.length, arguments.chat};
  const auto is_open = [](const CLI::Option* option) { return option == nullptr || option->count() == 0; };
  text.seed = arguments.seed;
  text.length_is_open = is_open(arguments.length_option), text.samples_are_open = is_open(arguments.samples_option);
  text.self = text.text == "self" && !std::filesystem::exists(text.text);
  if (text.self) text.text.clear();
  return text;
}

}  // namespace w4q::app
