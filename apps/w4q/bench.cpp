// w4q bench --shape llama3-8b --scheme kbit3
#include <memory>
#include <optional>
#include <sstream>
#include <vector>

#include "common_options.h"
#include "core/error.h"
#include "core/text.h"
#include "device/choice.h"
#include "model/shapes.h"
#include "scheme_options.h"
#include "speed_options.h"

namespace w4q::app {
namespace {

struct BenchOptions {
  CommonOptions common;
  std::string shape = "llama3-8b";
  std::string scheme = "kbit4";
  KvWords kv;
  std::optional<int64_t> residual_bytes;
  std::string target;
  bool int8_activations = false;
  verify::SpeedOptions speed;
};

/// A scheme, or the start of one: "kbit3" is "kbit3-b32-e4m4", "int4-g128" is "int4-g128-f16", "rotated4" is
/// "rotated4-d128".
formats::Scheme scheme_of(const std::string& word) {
  const auto typed = [](const std::string& name) { return typed_scheme("--scheme", name); };
  if (word.starts_with("kbit") && word.size() == 5) return typed(word + "-b32-e4m4");
  if (word == "int4" || word == "int8") return typed(word + "-g128-f16");
  if (word.starts_with("rotated") && word.size() == 8) return typed(word + "-d128");
  const bool scaled = word.find("f16") != std::string::npos || word.find("f32") != std::string::npos;
  return typed(word.starts_with("int") && !scaled ? word + "-f16" : word);
}

/// "f16" is no pass at all.
std::vector<formats::Scheme> passes_of(const std::string& text) {
  std::vector<formats::Scheme> passes;
  if (text == "f16") return passes;
  if (text.empty()) throw Error(ErrorCode::bad_argument, "--scheme is empty").hint("--scheme f16 for no passes");
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, '+');) passes.push_back(scheme_of(word));
  return passes;
}

int run(const BenchOptions& options) {
  apply(options.common);
  verify::SpeedOptions speed = options.speed;
  speed.kv = parse(options.kv);
  speed.project_sm89 = options.target == "sm89";
  speed.residual_bytes = options.residual_bytes;
  speed.int8_activations = options.int8_activations;
  const auto shape = model::named_shape(options.shape);
  const auto passes = passes_of(options.scheme);
  const auto gpu = device::open_gpu();
  const auto report = verify::measure_random_speed(*gpu, shape, passes, speed);
  print(options.common, schema::bench, verify::to_text(report), verify::to_json(report));
  return 0;
}

}  // namespace

void add_speed(CLI::App& command, verify::SpeedOptions& speed, std::string& target) {
  const InGroup group(command, speed_group);
  command.add_option("--prompt", speed.prompt, "Tokens of the prompt, and context of the generation")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command.add_option("--generate", speed.generate, "Tokens to generate")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command.add_option("--target", target, "Add what this GPU should do: sm89, an RTX 4090")
      ->check(CLI::IsMember({"sm89"}));
}

void setup_bench(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("bench", "Measure decoding on this GPU with random weights of a known shape");
  auto options = std::make_shared<BenchOptions>();
  command
      ->add_option("--shape", options->shape,
                   "llama3-8b, llama2-7b, qwen3-8b, mistral-7b, llama3-1b, llama3-70b, qwen3-30b-a3b, qwen3.6-35b-a3b, "
                   "gpt-oss-20b, qwen3.6-27b")
      ->capture_default_str();
  command
      ->add_option("--scheme", options->scheme,
                   "f16, kbit2 to kbit5, int4-g128, int8-g128, nvfp4, mxfp4, mxfp8, fp8-channel, rotated2 to rotated5, "
                   "rotated4+rotated4")
      ->capture_default_str();
  const InGroup decoding(*command, decoding_group);
  add_residual_bytes(*command, options->residual_bytes);
  add_kv(*command, options->kv);
  add_activations(*command, options->int8_activations);
  add_speed(*command, options->speed, options->target);
  add_common(*command, options->common);
  set_examples(*command,
               {{"bench --shape llama3-8b --scheme kbit4", "tokens a second of an 8B model in 4 bits on this GPU"}});
  command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace w4q::app
