// w4q verify OUT --ppl text.txt --base MODEL
#include "verify/perplexity.h"

#include <cmath>
#include <memory>
#include <optional>

#include "common_options.h"
#include "core/error.h"
#include "core/text.h"
#include "io/files.h"
#include "speed_options.h"
#include "tokenizer/token_file.h"
#include "tokenizer/tokenizer.h"
#include "verify/convention.h"
#include "verify/kernel_check.h"
#include "verify/kv_compare.h"
#include "verify/reference.h"
#include "verify/report.h"
#include "verify/structure.h"
#include "verify/weights.h"

namespace w4q::app {
namespace {

struct Options {
  CommonOptions common;
  std::string model;
  std::string base;
  std::string text;
  std::string ids;
  bool ppl = false;
  bool no_residual = false;
  verify::PerplexityOptions perplexity;
  std::string reference;
  DecodeOptions decode;
  bool int8_activations = false;
  bool speed = false, kernels = false, kv_compare = false;
  verify::SpeedOptions speed_options;
  std::string target;
  std::optional<double> max_diff, max_ppl_ratio, max_kl, min_sqnr;
};

/// What was measured, for the two ways of printing it.
struct Results {
  verify::Report checks;
  std::string text;
  io::Json json = io::Json::object();

  void note(const std::string& what) {
    text += "note: " + what + "\n";
    json["notes"].push_back(what);
  }
  int finish(const CommonOptions& common) {
    text += checks.text() + (checks.passed() ? "verified\n" : "verification FAILED\n");
    const io::Json verdict = checks.json();
    json["passed"] = verdict["passed"];
    json["checks"] = verdict["checks"];
    print(common, text, json);
    return checks.passed() ? 0 : describe(ErrorCode::verification_failed).exit_status;
  }
};

bool decodes(const Options& options) { return options.ppl || !options.ids.empty(); }

/// --kv-compare has a row that --kv-delta is about, whatever the type of the cache of --ppl.
DecodeOptions decode_of_text(const Options& options) {
  DecodeOptions decode = options.decode;
  if (options.kv_compare && decode.kv.type != "fp4r") decode.kv.delta = INFINITY;
  return decode;
}

/// Options of something that was not asked for would be ignored without a word.
void refuse_unused(const Options& options) {
  const auto refuse = [](bool used, const char* what, const char* hint) {
    if (!used) throw Error(ErrorCode::bad_argument, concat(what, " belongs to ", hint)).hint(hint);
  };
  const verify::PerplexityOptions usual;
  const auto& windows = options.perplexity;
  const bool on_gpu = options.speed || options.kernels || options.kv_compare;
  const char* const text = "--ppl TEXT or --ids FILE";
  refuse(decodes(options) || (windows.stride == 0 && windows.max_windows == 0 && !windows.bos), "a choice of windows",
         text);
  refuse(decodes(options) || windows.context == usual.context, "--ctx", text);
  refuse(decodes(options) || on_gpu || options.decode.device == "auto", "--device", text);
  if (const char* const given = given_cache_option(options.decode)) {
    refuse(decodes(options) || options.speed, given, "--ppl, --ids or --speed");
  }
  const verify::SpeedOptions speed;
  refuse(options.speed || (options.target.empty() && options.speed_options.prompt == speed.prompt &&
                           options.speed_options.generate == speed.generate),
         "--prompt, --generate or --target", "--speed");
}

/// What can only be measured on a GPU is refused before anything is measured. Null where nothing is.
std::shared_ptr<device::Context> open_gpu(const Options& options) {
  if (!options.speed && !options.kernels && !options.kv_compare) return nullptr;
  if (options.decode.device == "cpu") {
    throw Error(ErrorCode::bad_argument, "--speed, --kernels and --kv-compare measure a GPU").hint("--device cuda");
  }
  return device::open_gpu(options.decode.device);
}

void check_usage(const Options& options) {
  const auto refuse = [](const char* what, const char* hint) { throw Error(ErrorCode::bad_argument, what).hint(hint); };
  const bool has_text = decodes(options);
  if (options.ppl && options.text.empty() && options.ids.empty())
    refuse("--ppl needs a text", "--ppl text.txt, or --ids file.u16");
  if (!options.text.empty() && !options.ids.empty())
    refuse("--ppl text and --ids exclude each other", "give one of them");
  if (options.max_ppl_ratio && (!has_text || options.base.empty()))
    refuse("--max-ppl-ratio compares with a base", "--ppl text.txt --base MODEL");
  if (options.max_kl && (!has_text || options.base.empty()))
    refuse("--max-kl compares with a base", "--ppl text.txt --base MODEL");
  if (options.min_sqnr && options.base.empty()) refuse("--min-sqnr compares with a base", "--base MODEL");
  if (options.kv_compare && !has_text) refuse("--kv-compare needs a text", "--ppl text.txt, or --ids file.u16");
  if (options.int8_activations && !has_text && !options.kernels && !options.speed)
    refuse("--activations int8 is about --ppl, --kernels and --speed", "--ppl text.txt");
  if (options.max_diff && options.reference.empty())
    refuse("--max-diff belongs to --reference", "--reference ref.safetensors");
  refuse_unused(options);
  parse(decode_of_text(options).kv);
}

std::vector<int32_t> token_ids(const Options& options, const model::ModelConfig& config) {
  if (!options.ids.empty()) return tokenizer::read_ids(options.ids, config.vocab_size);
  return tokenizer::Tokenizer::open(options.model).encode(io::read_file(options.text), false);
}

void run_weights(const Options& options, const verify::OpenCheckpoint& candidate, const verify::OpenCheckpoint& base,
                 Results& results) {
  if (candidate.quantization.linears.empty()) return;
  const auto report = verify::compare_with_base(candidate, base);
  results.text += verify::to_text(report) + "\n";
  results.json["weights"] = verify::to_json(report);
  const double sqnr = report.total.sqnr();
  results.checks.add({"weights",
                      !std::isnan(sqnr),
                      concat("SQNR ", fixed(sqnr, 2), " dB over ", report.tensors.size(), " packed weights"),
                      {}});
  if (options.min_sqnr) results.checks.add_threshold("SQNR", sqnr, *options.min_sqnr, true);
}

void run_perplexity(const Options& options, const std::shared_ptr<device::Context>& gpu, const model::Model& candidate,
                    Results& results) {
  const auto base = options.base.empty() ? std::nullopt : std::optional(model::Model::open(options.base));
  const auto ids = token_ids(options, candidate.config());
  verify::PerplexityOptions how = options.perplexity;
  const DecodeChoice choice = choose(decode_of_text(options));
  how.gpu = gpu != nullptr ? gpu : choice.gpu;
  how.kv = choice.kv;
  how.residual_bytes = choice.residual_bytes;
  how.int8_activations = options.int8_activations;
  if (const auto most = model::most_positions(candidate.config()); most && how.context > *most) {
    results.note(concat("windows of ", how.context, " tokens, and the model was made for ", *most));
  }
  // With int8 activations the candidate is a base too: what they do by themselves.
  std::vector<verify::BaseModel> bases;
  if (base) bases.push_back({&*base});
  if (how.int8_activations) bases.push_back({&candidate, how.kv});
  const model::Model* const candidates[] = {&candidate};
  const auto reports = verify::measure_perplexities(candidates, bases, ids, how);
  auto report = reports.front();
  if (!base) report.base.reset();
  results.text += verify::to_text(report) + "\n";
  results.json["perplexity"] = verify::to_json(report);
  if (how.int8_activations) {
    const auto& beside = reports.back();
    results.text += "int8 activations; the base is this model with 16-bit ones\n" + verify::to_text(beside) + "\n";
    results.json["int8_activations"] = verify::to_json(beside);
  }
  results.checks.add({"perplexity",
                      std::isfinite(report.perplexity()),
                      concat(fixed(report.perplexity(), 4), " over ", report.scored, " tokens"),
                      {}});
  if (options.max_ppl_ratio) results.checks.add_threshold("perplexity ratio", report.ratio(), *options.max_ppl_ratio);
  if (options.max_kl) results.checks.add_threshold("KL", report.base->kl.mean, *options.max_kl);
}

void run_speed(const Options& options, device::Context& gpu, const model::Model& candidate, Results& results) {
  verify::SpeedOptions speed = options.speed_options;
  speed.kv = parse(decode_of_text(options).kv);
  speed.project_sm89 = options.target == "sm89";
  speed.residual_bytes = options.decode.residual_bytes;
  speed.int8_activations = options.int8_activations;
  const auto report = verify::measure_speed(gpu, candidate, speed);
  results.text += verify::to_text(report) + "\n";
  results.json["speed"] = verify::to_json(report);
}

void run_kernels(const Options& options, device::Context& gpu, const model::Model& candidate, Results& results) {
  const auto report = verify::check_kernels(gpu, candidate, options.int8_activations);
  results.text += verify::to_text(report) + "\n";
  results.json["kernels"] = verify::to_json(report);
  results.checks.add_threshold("relative error of the GPU's products", report.largest(), verify::most_kernel_error);
}

void run_kv_compare(const Options& options, std::shared_ptr<device::Context> gpu, const model::Model& candidate,
                    Results& results) {
  verify::PerplexityOptions how = options.perplexity;
  how.gpu = std::move(gpu);
  const auto rows = verify::compare_caches(candidate, token_ids(options, candidate.config()), how,
                                           static_cast<float>(options.decode.kv.delta));
  results.text += verify::to_text(rows) + "\n";
  results.json["kv"] = verify::to_json(rows);
}

void run_reference(const Options& options, const model::Model& candidate, Results& results) {
  const auto report = verify::compare_reference(candidate, options.reference);
  results.text += verify::to_text(report) + "\n";
  results.json["reference"] = verify::to_json(report);
  results.checks.add(
      {"reference", std::isfinite(report.largest()), concat("largest difference ", report.largest()), {}});
  if (options.max_diff) results.checks.add_threshold("largest difference", report.largest(), *options.max_diff);
}

int run(const Options& options) {
  apply(options.common);
  check_usage(options);
  const auto gpu = open_gpu(options);
  Results results;
  // Whoever wrote it, its values are only worth decoding once its conventions are known.
  const bool foreign = verify::is_foreign_checkpoint(options.model);
  if (foreign) results.checks.add(verify::check_conventions(options.model, options.base));
  if (!results.checks.passed()) return results.finish(options.common);
  const auto candidate = verify::open_checkpoint(options.model, !options.no_residual);
  for (const auto& note : candidate.quantization.notes) results.note(note);
  const auto base = options.base.empty() ? std::nullopt : std::optional(verify::open_base(options.base, candidate));
  // Other programs fold scales into what they keep, so it need not be the base's.
  results.checks.add(verify::check_structure(candidate, base && !foreign ? &*base : nullptr));
  // Beyond a broken structure there is nothing to decode.
  if (!results.checks.passed()) return results.finish(options.common);
  if (!candidate.quantization.linears.empty()) results.checks.add(verify::check_codes(candidate));
  results.checks.add(verify::check_finite(candidate));
  if (!results.checks.passed()) return results.finish(options.common);

  if (base) run_weights(options, candidate, *base, results);
  if (decodes(options) || !options.reference.empty() || options.speed || options.kernels) {
    const auto model = model::Model::open(options.model, !options.no_residual);
    if (!options.reference.empty()) run_reference(options, model, results);
    if (decodes(options)) run_perplexity(options, gpu, model, results);
    if (options.kernels) run_kernels(options, *gpu, model, results);
    if (options.kv_compare) run_kv_compare(options, gpu, model, results);
    if (options.speed) run_speed(options, *gpu, model, results);
  }
  return results.finish(options.common);
}

}  // namespace

void setup_verify(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("verify", "Prove that a checkpoint is sound and how far it is from its base");
  auto options = std::make_shared<Options>();
  command->add_option("model", options->model, "Folder of a checkpoint, quantized or 16-bit")->required();
  command->add_option("--base", options->base, "The 16-bit checkpoint it was made from");
  auto* ppl = command->add_option("--ppl", options->text, "Measure perplexity on this UTF-8 text")
                  ->expected(0, 1)
                  ->type_name("TEXT");
  command->add_option("--ids", options->ids, "Measure perplexity on token ids (uint16 or uint32 little endian)");
  command->add_option("--ctx", options->perplexity.context, "Tokens of one window")
      ->check(CLI::Range(2, 1 << 24))
      ->capture_default_str();
  command->add_option("--stride", options->perplexity.stride, "Distance of windows; 0 means --ctx")
      ->check(CLI::Range(0, 1 << 24));
  command->add_option("--windows", options->perplexity.max_windows, "Stop after this many windows; 0 means all")
      ->check(not_negative);
  command->add_flag("--bos", options->perplexity.bos, "Put BOS in front of every window");
  command->add_flag("--no-residual", options->no_residual, "Leave out residual passes: the base passes alone");
  command->add_option("--reference", options->reference, "Safetensors file with ids and logits_fp32 to compare with");
  command->add_option("--max-diff", options->max_diff, "Fail when --reference differs by more")->check(not_nan);
  command->add_option("--max-ppl-ratio", options->max_ppl_ratio, "Fail when perplexity over the base's is more")
      ->check(not_nan);
  command->add_option("--max-kl", options->max_kl, "Fail when the mean KL to the base (nats per token) is more")
      ->check(not_nan);
  command->add_option("--min-sqnr", options->min_sqnr, "Fail when the SQNR of the packed weights (dB) is less")
      ->check(not_nan);
  command->add_flag("--kernels", options->kernels, "Check every linear layer's product on this GPU");
  command->add_flag("--kv-compare", options->kv_compare,
                    "Compare the types of the KV cache on the text of --ppl or --ids");
  command->add_flag("--speed", options->speed, "Measure prompt and generation on this GPU");
  add_speed(*command, options->speed_options, options->target);
  add_activations(*command, options->int8_activations);
  add_decode(*command, options->decode);
  add_common(*command, options->common);
  command->callback([&action, options, ppl] {
    options->ppl = ppl->count() > 0;
    action = [options] { return run(*options); };
  });
}

}  // namespace w4q::app
