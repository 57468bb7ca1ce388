// The options of w4q quantize that choose bits for each tensor by the size that the model may have.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "pipeline/quantize_model.h"

namespace w4q::app {

struct AllocationArguments {
  double bits_per_weight = 0;
  uint64_t bytes = 0;
  std::string save_recipe;
};

/// Adds --target-bpw, --target-size and --save-recipe; the targets exclude `recipe`, and `bits` too.
void add_allocation(CLI::App& command, AllocationArguments& arguments, CLI::Option& recipe, CLI::Option& bits);

/// Puts the target into `request`. Throws bad_argument for --save-recipe without one.
void set_allocation(const AllocationArguments& arguments, pipeline::QuantizeRequest& request);

}  // namespace w4q::app
