#include "allocation_options.h"

#include <filesystem>

#include "common_options.h"
#include "core/error.h"
#include "core/text.h"

namespace w4q::app {
namespace {

/// A recipe in the output folder would go with the old one when the new one takes its place.
void check_outside(const std::filesystem::path& recipe, const std::filesystem::path& output) {
  std::error_code missing;
  const auto folder = std::filesystem::absolute(recipe).parent_path();
  if (output.empty() || !std::filesystem::equivalent(folder, output, missing)) return;
  throw Error(ErrorCode::bad_argument,
              concat("--save-recipe ", printable(recipe.native()), ": lies in the output folder"))
      .detail("which is replaced as a whole")
      .hint("save it elsewhere");
}

}  // namespace

void add_allocation(CLI::App& command, AllocationArguments& arguments, CLI::Option& recipe, CLI::Option& bits) {
  const InGroup group(command, aim_group);
  auto* weight =
      command
          .add_option("--target-bpw", arguments.bits_per_weight,
                      "Choose the bits of each linear layer, so many per weight on average: 3.5 is a good mean")
          ->check(CLI::Range(1.0, 16.0))
          ->check(not_nan);
  auto* size =
      command
          .add_option("--target-size", arguments.bytes, "The same by the size of all tensors of the output, e.g. 4.2GB")
          ->transform(size_in_bytes)
          ->check(positive);
  command.add_option("--save-recipe", arguments.save_recipe, "Write the chosen bits as a recipe")
      ->type_name("FILE")
      ->group(packed_group);
  command
      .add_flag("--no-ties", arguments.untied,
                "A width for each linear, and recipes as they are, even where --to or --for is about programs that "
                "load q, k, v and gate, up and all experts as one")
      ->group(packed_group);
  weight->excludes(size);
  for (CLI::Option* target : {weight, size}) target->excludes(&recipe)->excludes(&bits);
}

void set_allocation(const AllocationArguments& arguments, bool served, pipeline::QuantizeRequest& request) {
  if (arguments.bits_per_weight > 0 || arguments.bytes > 0) {
    if (!arguments.save_recipe.empty()) check_outside(arguments.save_recipe, request.output);
    request.allocation = {arguments.bits_per_weight, static_cast<int64_t>(arguments.bytes), arguments.save_recipe,
                          served && !arguments.untied};
  } else if (arguments.untied && !request.recipe) {
    throw Error(ErrorCode::bad_argument, "--no-ties is about --target-bpw, --target-size and a file for --recipe")
        .hint("--target-bpw 4.25");
  } else if (!arguments.save_recipe.empty()) {
    throw Error(ErrorCode::bad_argument, "--save-recipe saves what --target-bpw or --target-size chose")
        .hint("--target-bpw 3.5");
  }
}

}  // namespace w4q::app
