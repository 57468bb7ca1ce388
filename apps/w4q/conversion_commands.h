// What `w4q repack --to` does: one table of everything that a file or a folder can become.
#pragma once

#include <string>
#include <vector>

#include "common_options.h"
#include "pipeline/activation_scales.h"
#include "serving_options.h"

namespace w4q::app {

struct Conversion {
  std::string input;
  std::string to;
  bool tokenizer = true;     ///< GGUF: convert it too
  bool allow_lossy = false;  ///< dialects: round anew what the target cannot say
  bool no_act_order = false;
  ServingArguments serving = {};
  pipeline::ActivationRequest activations = {};  ///< dialects: scales to measure
  std::vector<std::string> notes = {};           ///< for the report, of dialects and GGUF files
};

struct ConversionRow {
  std::string to;
  enum class Kind { dialect, turboquant, decode, to_gguf, from_gguf } kind = Kind::dialect;
  std::string description;
  int (*run)(const CommonOptions&, const OutputOptions&, const Conversion&);
};

/// In the order in which they are listed.
std::vector<ConversionRow> conversion_table();

/// What `to` is where --for alone was given: the first that holds the codes and loads in all of its programs. Throws
/// unsupported where there is none.
std::string served_target(const OutputOptions& output, const Conversion& conversion);

/// Runs the row for the input and `to`. Throws bad_argument, with the names that there are, when there is none, and for
/// options that mean nothing to it.
int convert(const CommonOptions& common, const OutputOptions& output, const Conversion& conversion);

/// A folder of MXFP4 weights as table planes of the same values, laid out for `target` or in `layout`; canonical where
/// both are empty.
int from_mxfp4(const CommonOptions& common, const OutputOptions& output, const std::string& input,
               const std::string& target, const std::string& layout);

}  // namespace w4q::app
