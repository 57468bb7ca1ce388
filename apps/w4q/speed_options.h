// --prompt, --generate and --target, for commands that measure speed.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "verify/speed.h"

namespace w4q::app {

void add_speed(CLI::App& command, verify::SpeedOptions& speed, std::string& target);

}  // namespace w4q::app
