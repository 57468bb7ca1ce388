// w4q repack OUT -o OUT2 --target sm89
#include <memory>

#include "common_options.h"
#include "core/error.h"
#include "pipeline/repack_model.h"

namespace w4q::app {
namespace {

struct Options {
  CommonOptions common;
  OutputOptions output;
  std::string input;
  std::string target;
  std::string layout;
  std::string device = "auto";
};

int run(const Options& options) {
  apply(options.common);
  check(options.output);
  // --layout overrides --target, so that a script can pin one layout and keep its target.
  if (options.target.empty() && options.layout.empty()) {
    throw Error(ErrorCode::bad_argument, "--target or --layout is required")
        .hint("--target sm89 for an RTX 4090; w4q list");
  }
  const pipeline::RepackRequest request{options.input,
                                        options.output.output,
                                        options.layout.empty() ? options.target : "",
                                        options.layout,
                                        write_options(options.output),
                                        options.output.overwrite,
                                        device::choose_device(options.device)};
  if (options.output.dry_run) {
    const auto plan = pipeline::plan_repack(request);
    print(options.common, pipeline::to_text(plan), pipeline::to_json(plan));
  } else {
    const auto report = pipeline::repack_model(request);
    print(options.common, pipeline::to_text(report), pipeline::to_json(report));
  }
  return 0;
}

}  // namespace

void setup_repack(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("repack", "Move the bits of a quantized checkpoint into another layout");
  auto options = std::make_shared<Options>();
  command->add_option("input", options->input, "Folder written by w4q quantize or w4q repack")->required();
  add_output(*command, options->output);
  command->add_option("--target", options->target, "GPU to lay out for: sm80, sm89, sm90");
  command->add_option("--layout", options->layout, "One layout for all tensors (w4q list); canonical goes back");
  add_device(*command, options->device);
  add_common(*command, options->common);
  command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace w4q::app
