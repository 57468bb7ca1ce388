// w4q generate MODEL --prompt "…"
#include "model/generate.h"

#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>

#include "common_options.h"
#include "core/error.h"
#include "core/interrupt.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "decoder_cuda/generate.h"
#include "model/model.h"
#include "ranks/ranks.h"
#include "tokenizer/tokenizer.h"

namespace w4q::app {
namespace {

struct GenerateOptions {
  CommonOptions common;
  std::string model;
  std::string prompt;
  std::optional<int64_t> max_tokens;
  bool no_residual = false;
  bool int8_activations = false;
  model::SamplingOptions sampling;
  DecodeOptions decode;
};

/// Prints text as its tokens arrive: a character whose bytes are spread over tokens waits for the last of them.
class StreamPrinter {
 public:
  StreamPrinter(const tokenizer::Tokenizer& tokenizer, bool enabled) : stream_(tokenizer), enabled_(enabled) {}

  void add(int32_t id) {
    if (enabled_) emit(stream_.add(id));
  }

  void finish() {
    if (!enabled_) return;
    emit(stream_.finish());
    std::cout << "\n";
  }

 private:
  static void emit(const std::string& text) {
    if (!text.empty()) std::cout << text << std::flush;
  }

  tokenizer::TextStream stream_;
  bool enabled_;
};

/// Unless told otherwise 128, or as many as the model has positions for.
int64_t tokens_to_generate(const GenerateOptions& options, const model::ModelConfig& config, size_t prompt) {
  constexpr int64_t usual = 128;
  if (options.max_tokens) return *options.max_tokens;
  const int64_t room = model::most_positions(config).value_or(INT64_MAX) - static_cast<int64_t>(prompt);
  return std::clamp<int64_t>(room, 1, usual);
}

int run(const GenerateOptions& options) {
  apply(options.common);
  auto& ranks = ranks::world();
  const DecodeChoice choice = choose(options.decode, ranks.size());
  if (choice.split_layers != ranks.size()) {
    throw Error(ErrorCode::bad_argument,
                "generate: one text is written by ranks that hold the model together, all of them")
        .hint("leave out --split-layers");
  }
  const model::LayerStage stage(ranks, choice.split_layers);
  const auto model = model::Model::of(model::open_model(options.model, !options.no_residual),
                                      model::planes_for(choice.gpu.get(), options.int8_activations), stage);
  const auto tokenizer = tokenizer::Tokenizer::open(options.model);
  const auto prompt = tokenizer.encode(options.prompt, true);
  if (prompt.empty()) {
    throw Error(ErrorCode::bad_argument, "--prompt is empty and the tokenizer adds no BOS")
        .hint("give at least one character");
  }
  const int64_t max_tokens = tokens_to_generate(options, model.config(), prompt.size());
  StreamPrinter printer(tokenizer, ranks.first() && !options.common.json);
  const Stopwatch watch;
  const auto on_token = [&](int32_t id) {
    check_interrupt();
    printer.add(id);
    return true;
  };
  const auto generated =
      choice.gpu != nullptr
          ? decoder_cuda::generate_cuda(*choice.gpu, model, prompt, max_tokens, options.sampling, choice.kv, on_token,
                                        choice.residual_bytes, options.int8_activations, stage)
          : model::generate(model, prompt, max_tokens, options.sampling, on_token, options.int8_activations, stage);
  printer.finish();
  const double seconds = watch.seconds();
  const double speed = static_cast<double>(generated.size()) / seconds;
  if (options.common.json) {
    print(options.common, schema::generate, "",
          {{"prompt_tokens", prompt.size()},
           {"ids", generated},
           {"text", tokenizer.decode(generated, true)},
           {"seconds", seconds},
           {"tokens_per_second", speed}});
  } else if (ranks.first() && !options.common.quiet) {
    std::cerr << concat(prompt.size(), " prompt tokens, ", generated.size(), " generated, ", fixed(speed, 1),
                        " tokens/s\n");
  }
  return 0;
}

}  // namespace

void setup_generate(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("generate", "Continue a prompt");
  auto options = std::make_shared<GenerateOptions>();
  command->add_option("model", options->model, "Folder of a checkpoint, quantized or 16-bit")->required();
  command->add_option("--prompt", options->prompt, "Text to continue")->required();
  command->add_flag("--no-residual", options->no_residual, "Leave out residual passes: the base passes alone")
      ->group(decoding_group);
  command
      ->add_option("--max-tokens", options->max_tokens,
                   "Tokens to generate at most; 128 unless told otherwise, or fewer where the model's positions end")
      ->check(CLI::Range(1, 1 << 20));
  command->option_defaults()->group(sampling_group);
  command->add_option("--temperature", options->sampling.temperature, "0 is greedy")
      ->check(not_negative)
      ->capture_default_str();
  command->add_option("--top-k", options->sampling.top_k, "Sample among the k most likely; 0 means all")
      ->check(not_negative);
  command->add_option("--top-p", options->sampling.top_p, "Sample among the most likely that sum to p")
      ->check(CLI::Range(0.0, 1.0));
  command->add_option("--min-p", options->sampling.min_p, "Drop tokens below this share of the most likely one")
      ->check(CLI::Range(0.0, 1.0));
  command->add_option("--seed", options->sampling.seed, "Seed of the sampling")->capture_default_str();
  command->get_option("--temperature")->group(basic_group);
  command->option_defaults()->group(basic_group);
  add_activations(*command, options->int8_activations);
  add_decode(*command, options->decode);
  add_common(*command, options->common);
  set_examples(*command, {{"generate OUT --prompt \"Once upon a time\"", "the most likely continuation"},
                          {"generate OUT --prompt \"Once upon a time\" --temperature 0.8 --top-p 0.95 --seed 7",
                           "a sampled one"}});
  command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace w4q::app
