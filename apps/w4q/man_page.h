// Man pages, made of the definitions that help is made of.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace w4q::app {

/// w4q(1) of the program, or w4q-COMMAND(1) of one of its commands, as troff.
std::string man_page(const CLI::App& app, const CLI::App& command);

}  // namespace w4q::app
