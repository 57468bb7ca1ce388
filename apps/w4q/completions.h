// Completions of shells, made of the definitions that help is made of.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace w4q::app {

std::string bash_completion(const CLI::App& app);
std::string zsh_completion(const CLI::App& app);
std::string fish_completion(const CLI::App& app);

}  // namespace w4q::app
