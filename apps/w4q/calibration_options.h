// The options with which calibration text is given, for the commands that decode some.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "chat/chat_text.h"
#include "core/error.h"
#include "pipeline/activation_scales.h"
#include "pipeline/calibrate.h"

namespace w4q::app {

struct CalibrationArguments {
  std::string text;
  std::string ids;
  chat::ChatFile chat;
  int64_t samples = 128;
  int64_t length = 512;
  uint64_t max_memory = 0;
  uint64_t seed = 0;
  bool has_text() const noexcept { return !text.empty() || !ids.empty() || !chat.empty(); }

  const CLI::Option* samples_option = nullptr;
  const CLI::Option* length_option = nullptr;
  std::vector<const CLI::Option*> of_decoding;  ///< --samples, --length and --max-memory
};

/// Adds --TEXT_NAME, --IDS_NAME, --chat, --samples, --length and --max-memory.
void add_calibration(CLI::App& command, const std::string& text_name, const std::string& ids_name,
                     CalibrationArguments& arguments);
/// The name of the first of --samples, --length and --max-memory that was given, for commands that may have no text to
/// decode; empty: none was.
std::string given_decoding_option(const CalibrationArguments& arguments);
/// What is wrong with such an option, and what to give `instead` of leaving it out.
Error without_text(const std::string& option, std::string_view why, std::string_view instead);
/// Adds --activation-scales and --cache-scales, for the dialects that have them.
void add_activation_scales(CLI::App& command, bool& inputs, bool& cache);
/// What they ask for. Throws bad_argument where there is no text to measure on.
pipeline::ActivationRequest activation_request(bool inputs, bool cache, const CalibrationArguments& arguments);
pipeline::CalibrationText calibration_text(const CalibrationArguments& arguments);

}  // namespace w4q::app
