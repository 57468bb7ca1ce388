// The options with which calibration text is given, for the commands that decode some.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "pipeline/calibrate.h"

namespace w4q::app {

struct CalibrationArguments {
  std::string text;
  std::string ids;
  int64_t samples = 128;
  int64_t length = 512;
  uint64_t max_memory = 0;
};

/// Adds --TEXT_NAME, --ids, --samples, --length and --max-memory.
void add_calibration(CLI::App& command, const std::string& text_name, const std::string& ids_name,
                     CalibrationArguments& arguments);
pipeline::CalibrationText calibration_text(const CalibrationArguments& arguments);

}  // namespace w4q::app
