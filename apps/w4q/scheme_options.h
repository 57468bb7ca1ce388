// The options of w4q quantize that say which scheme a method makes.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "formats/scheme.h"
#include "quantize/passes.h"
#include "quantize/quantizer_registry.h"

namespace w4q::app {

struct SchemeOptions {
  std::string scheme;  ///< a whole name; the others are its parts
  int bits = 4;
  std::string absmax;              ///< kbit: e4m4 unless f16; rotated: f16 unless e4m4
  std::string group = "128";       ///< integer and rotated: a number or "row"
  std::string scale_type = "f16";  ///< integer
  bool asymmetric = false;         ///< integer
  std::string clip = "none";       ///< integer
  std::vector<int> residual_bits;  ///< rotated: of further passes
  std::string residual_rotation = "shared";
  CLI::Option* asymmetry_flag = nullptr;
  CLI::Option* group_option = nullptr;
  std::vector<CLI::Option*> kbit_parts;
  std::vector<CLI::Option*> integer_parts;
  std::vector<CLI::Option*> rotated_parts;
};

/// Adds --scheme, --k/--bits, --absmax, --group, --scale-type, --asymmetric, --clip and what belongs to rotated
/// schemes; `recipe` excludes all that name a scheme.
void add_scheme(CLI::App& command, SchemeOptions& options, CLI::Option& recipe);

/// Schemes as they were typed behind `option`, several with "+" between them: a name that is none is wrong usage. Throws
/// bad_argument.
std::vector<formats::Scheme> typed_schemes(std::string_view option, const std::string& text);
/// One alone.
formats::Scheme typed_scheme(std::string_view option, const std::string& text);

/// The schemes that the options ask for, one for each pass. Throws bad_argument for options that mean nothing to the
/// method, and for a scheme that does not exist.
std::vector<formats::Scheme> chosen_schemes(const SchemeOptions& options, std::string_view method);

/// Seed 0 stands for the one that rotated schemes have unless told otherwise.
quantize::RotationChoice chosen_rotation(const SchemeOptions& options, std::optional<uint64_t> seed);

/// The steps that --clip asks for.
quantize::Steps chosen_clip(const SchemeOptions& options);

}  // namespace w4q::app
