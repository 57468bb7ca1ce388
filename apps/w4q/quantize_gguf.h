// w4q quantize MODEL -o FILE.gguf --to gguf-q4_k: one step from a 16-bit model to blocks with searched scales.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "common_options.h"
#include "quality_options.h"
#include "serving_options.h"

namespace w4q::app {

struct QuantizeGguf {
  std::string model, to, device;
  int64_t bytes = 0;  ///< --target-size
  ServingArguments serving = {};
  std::vector<std::string> notes = {};  ///< for the report
};

/// Whether `to` asks for a GGUF file.
bool names_gguf_target(const std::string& to);

/// Throws bad_argument for options of `command` that were given and mean nothing here.
int quantize_gguf(const CLI::App& command, const CommonOptions& common, const OutputOptions& output,
                  const QualityArguments& quality, const QuantizeGguf& wanted);

}  // namespace w4q::app
