// w4q calibrate MODEL --text FILE -o stats.safetensors
#include <memory>

#include "calibration_options.h"
#include "common_options.h"
#include "core/error.h"
#include "device/choice.h"
#include "devices.h"
#include "pipeline/calibrate_model.h"
#include "pipeline/calibration_cuda.h"

namespace w4q::app {
namespace {

struct CalibrateOptions {
  CommonOptions common;
  CalibrationArguments calibration;
  std::string model;
  std::string output;
  std::string device = "auto";
  std::string devices;
  std::vector<std::string> merge;
  bool diagonal = false;
  bool sensitivity = false;
  bool fold = false;
  uint64_t rotation_seed = 0;
  bool overwrite = false;
};

/// Merging decodes nothing. CalibrateOptions of decoding are refused there, not ignored.
void check_merging(const CalibrateOptions& options) {
  if (options.merge.empty() || options.calibration.has_text()) return;
  std::string given = given_decoding_option(options.calibration);
  if (given.empty() && options.device != "auto") given = "--device";
  if (given.empty() && !options.devices.empty()) given = "--devices";
  if (given.empty()) return;
  throw without_text(given, "--merge alone decodes none", "--text, --ids or --chat");
}

int run(const CalibrateOptions& options) {
  apply(options.common);
  check_merging(options);
  if (options.rotation_seed != 0 && !options.fold) {
    throw Error(ErrorCode::bad_argument, "--rotation-seed belongs to --fold-rotations").hint("--fold-rotations");
  }
  pipeline::CalibrateRequest request;
  request.model = options.model;
  request.output = options.output;
  request.text = calibration_text(options.calibration);
  request.options.gram = !options.diagonal;
  request.sensitivity = options.sensitivity;
  if (options.fold) request.fold = options.rotation_seed;
  request.options.max_memory = static_cast<int64_t>(options.calibration.max_memory);
  request.merge.assign(options.merge.begin(), options.merge.end());
  request.overwrite = options.overwrite;
  const auto gpu = device::open_device(options.device);
  if (gpu != nullptr) request.options.gpu = pipeline::make_cuda_work(*gpu);
  const auto report = pipeline::calibrate_model(request);
  print(options.common, schema::calibrate, pipeline::to_text(report), pipeline::to_json(report));
  return 0;
}

}  // namespace

void setup_calibrate(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("calibrate", "Collect what the linear layers of a model read, for --stats");
  auto options = std::make_shared<CalibrateOptions>();
  command->add_option("model", options->model, "Hugging Face folder in 16 or 32 bit")->required();
  command->add_option("-o,--output", options->output, "Statistics file to write, *.safetensors")
      ->required()
      ->type_name("FILE");
  add_calibration(*command, "--text", "--ids", options->calibration);
  for (const char* text : {"--text", "--ids", "--chat"}) command->get_option(text)->group(basic_group);
  command->add_option("--merge", options->merge, "Statistics of this model to add; may be repeated")->type_name("FILE");
  command->add_flag("--diagonal", options->diagonal,
                    "Leave out the Gram matrices: a small file, and searches that ignore correlations");
  command->add_flag("--sensitivity", options->sensitivity,
                    "Also measure how much each linear layer matters, and keep tokens to measure on, for --target-bpw");
  command
      ->add_flag("--fold-rotations", options->fold,
                 "For quantize --fold-rotations: of the model with rotations folded in")
      ->group(calibration_group);
  command->add_option("--rotation-seed", options->rotation_seed, "Of their signs, as there")
      ->check(not_negative)
      ->capture_default_str()
      ->group(calibration_group);
  add_device(*command, options->device);
  add_devices(*command, options->devices);
  command->add_flag("--overwrite", options->overwrite, "Replace an existing file, but never an input");
  add_common(*command, options->common);
  set_examples(*command, {{"calibrate MODEL --text text.txt -o stats.safetensors",
                           "statistics once, for many runs of quantize --stats"},
                          {"calibrate MODEL --merge one.safetensors --merge two.safetensors -o both.safetensors",
                           "adds up what was collected before"}});
  command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace w4q::app
