// w4q compare A B --base MODEL --ppl text.txt
#include "verify/compare.h"

#include <map>
#include <memory>
#include <optional>

#include "chat_options.h"
#include "common_options.h"
#include "core/error.h"
#include "io/files.h"
#include "model/opened.h"
#include "page_options.h"
#include "pipeline/statistics_file.h"
#include "quantize/awq.h"
#include "tokenizer/token_file.h"
#include "tokenizer/tokenizer.h"

namespace w4q::app {
namespace {

struct CompareOptions {
  CommonOptions common;
  PageOptions page;
  std::string a, b, base;
  std::string text, ids;
  chat::ChatFile chat;
  std::string statistics;
  DecodeOptions decode;
  verify::PerplexityOptions perplexity;
  bool fail_if_worse = false;
};

/// Errors of outputs from a statistics file, one layer of it in memory.
class OutputErrors {
 public:
  OutputErrors(const std::string& path, const model::OpenedModel& base)
      : config_(base.config), file_(pipeline::StatisticsFile::open(path, config_)) {
    file_.check_model(pipeline::model_identity(base.folder.tensors));
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      const auto groups = model::input_groups(config_, layer);
      for (size_t group = 0; group < groups.size(); ++group) {
        for (const auto& name : groups[group].names()) places_[name] = {layer, group};
      }
    }
  }

  std::optional<double> operator()(const std::string& module, MatrixView<const float> difference) {
    const auto found = places_.find(module);
    if (found == places_.end()) return std::nullopt;
    if (found->second != place_) load(found->second);
    return quantize::output_error(difference, {gram_.data(), difference.cols, difference.cols});
  }

 private:
  struct Place {
    int64_t layer = -1;
    size_t group = 0;
    bool operator==(const Place&) const = default;
  };

  void load(const Place& place) {
    if (place.layer != place_.layer) statistics_ = file_.load(place.layer);
    gram_ = quantize::mean_gram(statistics_[place.group]);
    place_ = place;
  }

  const model::ModelConfig config_;
  pipeline::StatisticsFile file_;
  std::map<std::string, Place> places_;
  Place place_;
  pipeline::LayerStatistics statistics_;
  std::vector<float> gram_;  // of place_
};

std::vector<int32_t> token_ids(const CompareOptions& options, const model::ModelConfig& config) {
  if (!options.ids.empty()) return tokenizer::read_ids(options.ids, config.vocab_size);
  if (!options.chat.empty()) return chat::encode_chats(options.base, options.chat);
  return tokenizer::Tokenizer::open(options.base).encode(io::read_file(options.text), false);
}

/// Errors of outputs are measured by statistics of one basis.
void check_same_basis(const model::OpenedModel& a, const model::OpenedModel& b) {
  if (a.folded == b.folded) return;
  throw Error(ErrorCode::bad_argument, "--stats: A and B have different rotations folded in")
      .detail("statistics know the inputs of one basis")
      .hint("leave out --stats; --ppl, --chat or --ids compares predictions");
}

/// What the page must not replace.
std::vector<std::filesystem::path> inputs_of(const CompareOptions& options) {
  std::vector<std::filesystem::path> inputs{options.a,   options.b,         options.base,      options.text,
                                            options.ids, options.chat.path, options.statistics};
  std::erase_if(inputs, [](const auto& path) { return path.empty(); });
  return inputs;
}

int run(const CompareOptions& options) {
  apply(options.common);
  const bool decodes = !options.text.empty() || !options.ids.empty() || !options.chat.empty();
  if (options.fail_if_worse && !decodes) {
    throw Error(ErrorCode::bad_argument, "--fail-if-worse goes by predictions")
        .hint("--ppl text.txt, --chat chats.jsonl, or --ids file.u16");
  }
  if (!decodes && (options.decode.device != "auto" || given_cache_option(options.decode) != nullptr)) {
    throw Error(ErrorCode::bad_argument,
                "--device, --devices, --kv, --kv-delta, --residual-gpu-bytes and --split-layers are about predictions")
        .hint("--ppl text.txt, --chat chats.jsonl, or --ids file.u16");
  }
  const auto inputs = inputs_of(options);
  check(options.page, inputs);
  const auto a = model::open_model(options.a), b = model::open_model(options.b), base = model::open_model(options.base);
  if (!options.statistics.empty()) check_same_basis(a, b);
  verify::OutputErrorOf output_error;
  if (!options.statistics.empty()) {
    output_error = [errors = std::make_shared<OutputErrors>(options.statistics, model::fold_like(base, a.folded))](
                       const std::string& module, MatrixView<const float> difference) {
      return (*errors)(module, difference);
    };
  }
  auto comparison = verify::compare_linears(a, b, base, output_error);
  if (decodes) {
    verify::PerplexityOptions how = options.perplexity;
    const DecodeChoice choice = choose(options.decode);
    how.gpu = choice.gpu;
    how.kv = choice.kv;
    how.residual_bytes = choice.residual_bytes;
    how.split_layers = choice.split_layers;
    const auto loaded = [&, planes = model::planes_for(choice.gpu.get())](const model::OpenedModel& opened) {
      return model::Model::of(opened, planes, how.stage());
    };
    comparison.predictions =
        verify::compare_predictions(loaded(a), loaded(b), loaded(base), token_ids(options, base.config), how);
  }
  if (options.fail_if_worse && comparison.predictions->a.windows < 2) {
    throw Error(ErrorCode::bad_argument, "--fail-if-worse goes by differences between windows")
        .detail("the text has one window of --ctx tokens")
        .hint("a longer text, more --windows, or a smaller --ctx");
  }
  io::Json json = verify::to_json(comparison);
  json["provenance"] = provenance({{"a", options.a}, {"b", options.b}, {"base", options.base}});
  print_and_write(options.common, options.page, schema::compare, verify::to_text(comparison, detail(options.common)),
                  json, inputs);
  const bool worse = options.fail_if_worse && verify::verdict(*comparison.predictions) > 0;
  return worse ? describe(ErrorCode::verification_failed).exit_status : 0;
}

}  // namespace

void setup_compare(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("compare", "Put two versions of a model side by side");
  auto options = std::make_shared<CompareOptions>();
  command->add_option("a", options->a, "Folder of a checkpoint")->required();
  command->add_option("b", options->b, "Folder of another one")->required();
  command->add_option("--base", options->base, "The 16-bit checkpoint that both were made from")->required();
  auto* text = command->add_option("--ppl", options->text, "Compare predictions on this UTF-8 text")->type_name("TEXT");
  auto* ids =
      command->add_option("--ids", options->ids, "Compare predictions on token ids (uint16 or uint32 little endian)")
          ->excludes(text);
  auto* chat = add_chat(*command, options->chat, {text, ids});
  command->add_option("--stats", options->statistics, "Statistics of w4q calibrate: shows errors of outputs too")
      ->type_name("FILE");
  command->option_defaults()->group(text_group);
  command->add_option("--ctx", options->perplexity.context, "Tokens of one window")
      ->check(CLI::Range(2, 1 << 24))
      ->capture_default_str();
  command->add_option("--windows", options->perplexity.max_windows, "Stop after this many windows; 0 means all")
      ->check(not_negative);
  command->add_flag("--bos", options->perplexity.bos, "Put BOS in front of every window")->excludes(chat);
  command->option_defaults()->group(basic_group);
  add_decode(*command, options->decode);
  command->add_flag("--fail-if-worse", options->fail_if_worse,
                    "Exit with status 1 when B is further from the base than A, beyond chance");
  add_page(*command, options->page);
  add_verbose(*command, options->common);
  add_common(*command, options->common);
  set_examples(*command, {{"compare A B --base MODEL", "what each does to the weights, kind by kind of linear"},
                          {"compare A B --base MODEL --ppl text.txt --fail-if-worse",
                           "which predicts more like the base, beyond chance; exit status 1 where it is A"}});
  command->callback([&action, options] { action = [options] { return run(*options); }; });
}

}  // namespace w4q::app
