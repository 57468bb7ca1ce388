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
  bool untied = false;  ///< each linear its own width, whatever servers load as one
};

/// Adds --target-bpw, --target-size, --save-recipe and --no-ties; the targets exclude `recipe`, and `bits` too.
void add_allocation(CLI::App& command, AllocationArguments& arguments, CLI::Option& recipe, CLI::Option& bits);

/// Puts the target into `request`; `served`: for programs that load q, k, v and gate, up as one. Throws bad_argument for
/// --save-recipe without one, and for --no-ties without one or a recipe.
void set_allocation(const AllocationArguments& arguments, bool served, pipeline::QuantizeRequest& request);

}  // namespace w4q::app
