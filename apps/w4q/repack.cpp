// w4q repack OUT -o OUT2 --target sm89
// w4q repack FILE.gguf -o FOLDER --to hf16
// w4q repack AWQ_MODEL -o FOLDER --to gptq-v2
#include <memory>

#include "calibration_options.h"
#include "common_options.h"
#include "conversion_commands.h"
#include "core/error.h"
#include "core/text.h"
#include "pipeline/mxfp4_import.h"
#include "pipeline/repack_model.h"

namespace w4q::app {
namespace {

struct RepackOptions {
  CommonOptions common;
  OutputOptions output;
  std::string input;
  std::string target;
  std::string layout;
  std::string to;
  bool no_tokenizer = false;
  bool allow_lossy = false;
  bool no_act_order = false;
  std::string device = "auto";
  ServingArguments serving;
  bool activation_scales = false, cache_scales = false;
  CalibrationArguments calibration;
};

/// --to: another format instead of another layout.
int run_conversion(const RepackOptions& options) {
  const std::string decoding = given_decoding_option(options.calibration);
  const bool measures = options.activation_scales || options.cache_scales;
  if (!measures && (options.calibration.has_text() || !decoding.empty())) {
    throw Error(ErrorCode::bad_argument, "a text is for --activation-scales and --cache-scales")
        .hint(concat("leave out ", decoding.empty() ? "--calib, --calib-ids or --chat" : decoding));
  }
  if (!options.target.empty() || !options.layout.empty()) {
    throw Error(ErrorCode::bad_argument, "--to cannot be combined with --target or --layout");
  }
  if (options.device.starts_with("cuda")) {
    throw Error(ErrorCode::bad_argument, "--device cuda belongs to --target and --layout: --to converts on the CPU")
        .hint("leave out --device");
  }
  Conversion conversion{options.input,
                        options.to,
                        !options.no_tokenizer,
                        options.allow_lossy,
                        options.no_act_order,
                        options.serving,
                        activation_request(options.activation_scales, options.cache_scales, options.calibration)};
  if (conversion.to.empty()) {
    conversion.to = served_target(options.output, conversion);
    conversion.notes.push_back(concat("--for chose --to ", conversion.to));
  }
  return convert(options.common, options.output, conversion);
}

int run(const RepackOptions& options) {
  apply(options.common);
  check(options.output, options.common.quiet);
  check(options.serving);
  const bool layout = !options.target.empty() || !options.layout.empty();
  if (layout && !options.serving.empty()) {
    throw Error(ErrorCode::bad_argument, "--for belongs to --to: no program loads layouts");
  }
  if (!options.to.empty() || !options.serving.empty()) return run_conversion(options);
  if (options.activation_scales || options.cache_scales) {
    throw Error(ErrorCode::bad_argument, "--activation-scales and --cache-scales belong to --to");
  }
  if (options.no_act_order) throw Error(ErrorCode::bad_argument, "--no-act-order belongs to --to a dialect");
  if (options.allow_lossy) throw Error(ErrorCode::bad_argument, "--allow-lossy belongs to --to: layouts lose nothing");
  if (options.no_tokenizer) {
    throw Error(ErrorCode::bad_argument, "--no-tokenizer belongs to --to: a repacked folder keeps its files");
  }
  // --layout overrides --target, so that a script can pin one layout and keep its target.
  if (options.target.empty() && options.layout.empty()) {
    throw Error(ErrorCode::bad_argument, "--target or --layout is required")
        .hint("--target sm89 for an RTX 4090; w4q list");
  }
  if (pipeline::is_mxfp4(options.input)) {
    return from_mxfp4(options.common, options.output, options.input, options.layout.empty() ? options.target : "",
                      options.layout);
  }
  const pipeline::RepackRequest request{.input = options.input,
                                        .output = options.output.output,
                                        .target = options.layout.empty() ? options.target : "",
                                        .layout = options.layout,
                                        .write = write_options(options.output),
                                        .overwrite = options.output.overwrite,
                                        .gpu = device::open_device(options.device),
                                        .sharing = sharing(options.output)};
  if (options.output.dry_run) {
    const auto plan = pipeline::plan_repack(request);
    print(options.common, schema::plan, pipeline::to_text(plan, detail(options.common)), pipeline::to_json(plan));
  } else {
    const auto report = pipeline::repack_model(request);
    print(options.common, schema::repack, pipeline::to_text(report, detail(options.common)), pipeline::to_json(report));
  }
  return 0;
}

}  // namespace

void setup_repack(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("repack", "Move the bits of a quantized checkpoint into another layout");
  auto options = std::make_shared<RepackOptions>();
  command
      ->add_option(
          "input", options->input,
          "Folder of a packed checkpoint, w4q's, of another dialect or of MXFP4; with --to also a 16-bit model or a "
          "GGUF file")
      ->required();
  add_output(*command, options->output);
  command->add_option("--target", options->target, "GPU to lay out for: sm80, sm89, sm90");
  command->add_option("--layout", options->layout, "One layout for all tensors (w4q list); canonical goes back");
  command->add_option(
      "--to", options->to,
      "Another format: w4q or another dialect (w4q list --dialects); hf16 or hf-f32 (decoded weights); "
      "gguf (lossless), gguf-f16, gguf-q8_0, gguf-q4_k_m and all other types and mixes of the list; from a GGUF "
      "file hf16, hf-f32 or w4q (keeps Q4_0 and Q8_0 codes)");
  command->add_flag("--allow-lossy", options->allow_lossy,
                    "With --to a dialect: round anew what it cannot say, and report the error, instead of refusing");
  command->add_flag(
      "--no-act-order", options->no_act_order,
      "With --to a dialect: groups in the order of inputs, as servers want them; with --allow-lossy linears "
      "that have another order are rounded anew");
  command->add_flag("--no-tokenizer", options->no_tokenizer, "With --to, to and from GGUF: leave the tokenizer out");
  add_serving(*command, options->serving);
  add_activation_scales(*command, options->activation_scales, options->cache_scales);
  add_calibration(*command, "--calib", "--calib-ids", options->calibration);
  add_device(*command, options->device);
  add_verbose(*command, options->common);
  add_common(*command, options->common);
  set_examples(*command, {{"repack OUT -o OUT2 --target sm89", "the layout that the kernels for an RTX 4090 read"},
                          {"repack AWQ_MODEL -o OUT --to gptq-v2",
                           "between the checkpoints of other programs, with proof that no code has changed"},
                          {"repack FILE.gguf -o OUT --to hf16", "a GGUF file as a Hugging Face folder"}});
  command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace w4q::app
