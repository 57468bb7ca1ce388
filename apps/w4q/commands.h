// All commands: what the program is made of, and what another program (the Python module) runs within itself.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>

#include "common_options.h"
#include "core/error.h"

namespace w4q::app {

/// The program with its commands and their help. Parsing a command line stores its work in `action`, which must outlive
/// the program.
std::unique_ptr<CLI::App> make_program(Action& action);

/// Whether ranks share the work of a command, by its name; any other is the work of one process.
bool shares_work(std::string_view command);

/// What a command line that does not parse is to the user.
Error wrong_command_line(const CLI::App& program, const CLI::ParseError& error);

/// What went wrong, within a handler of it; Interrupted is no error, and not for this. An input that changed while it was
/// read is the reason of whatever went wrong after that.
Error error_in_flight();

}  // namespace w4q::app
