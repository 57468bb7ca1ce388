// The options of w4q quantize that say which scheme a method makes.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "formats/scheme.h"
#include "quantize/quantizer_registry.h"

namespace w4q::app {

struct SchemeOptions {
  std::string scheme;  ///< a whole name; the others are its parts
  int bits = 4;
  std::string absmax = "e4m4";     ///< kbit
  std::string group = "128";       ///< integer: a number or "row"
  std::string scale_type = "f16";  ///< integer
  bool asymmetric = false;         ///< integer
  std::string clip = "none";       ///< integer
  CLI::Option* asymmetry_flag = nullptr;
  std::vector<CLI::Option*> kbit_parts;
  std::vector<CLI::Option*> integer_parts;
};

/// Adds --scheme, --k/--bits, --absmax, --group, --scale-type, --asymmetric and --clip; `recipe` excludes them all but
/// the last.
void add_scheme(CLI::App& command, SchemeOptions& options, CLI::Option& recipe);

/// The scheme that the options ask for. Throws bad_argument for options that mean nothing to the method, unsupported
/// for a scheme that does not exist.
formats::Scheme chosen_scheme(const SchemeOptions& options, std::string_view method);

quantize::Clip chosen_clip(const SchemeOptions& options);

}  // namespace w4q::app
