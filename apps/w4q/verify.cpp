// w4q verify OUT --ppl text.txt --base MODEL
#include <cmath>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "chat_options.h"
#include "checkpoint/digests.h"
#include "common_options.h"
#include "core/error.h"
#include "core/text.h"
#include "gguf_commands.h"
#include "io/system.h"
#include "page_options.h"
#include "pipeline/gguf_import.h"
#include "speed_options.h"
#include "verify/ladder.h"

namespace w4q::app {
namespace {

struct VerifyOptions {
  CommonOptions common;
  PageOptions page;
  bool ppl = false;
  DecodeOptions decode;
  std::string target;
  verify::CheckOptions checks;
};

bool asks(const VerifyOptions& options, const char* option) { return options.checks.asked.contains(option); }

/// --kv-compare has a row that --kv-delta is about, whatever the type of the cache of --ppl.
DecodeOptions decode_of_text(const VerifyOptions& options) {
  DecodeOptions decode = options.decode;
  if (asks(options, "--kv-compare") && decode.kv.type != "fp4r") decode.kv.delta = INFINITY;
  return decode;
}

/// VerifyOptions of something that was not asked for would be ignored without a word.
void refuse_unused(const VerifyOptions& options) {
  const auto refuse = [](bool used, const char* what, const char* owner) {
    if (!used) throw Error(ErrorCode::bad_argument, concat(what, " belongs to ", owner));
  };
  const verify::PerplexityOptions usual;
  const auto& checks = options.checks;
  const auto& windows = checks.windows;
  const bool decodes = checks.has_text(), speed = asks(options, "--speed");
  const char* const text = "--ppl TEXT, --chat FILE or --ids FILE";
  refuse(decodes || (windows.stride == 0 && windows.max_windows == 0 && !windows.bos), "a choice of windows", text);
  refuse(decodes || windows.context == usual.context, "--ctx", text);
  if (const char* const given = given_cache_option(options.decode)) {
    const bool devices = std::string_view(given) == "--devices";
    refuse(decodes || speed || (devices && asks(options, "--kernels")), given,
           devices ? "--ppl, --chat, --ids, --speed or --kernels" : "--ppl, --chat, --ids or --speed");
  }
  const verify::SpeedOptions fast;
  refuse(
      speed || (options.target.empty() && checks.speed.prompt == fast.prompt && checks.speed.generate == fast.generate),
      "--prompt, --generate or --target", "--speed");
}

void check_usage(const VerifyOptions& options) {
  const auto refuse = [](const char* what, const char* hint) { throw Error(ErrorCode::bad_argument, what).hint(hint); };
  const auto& checks = options.checks;
  if (options.ppl && !checks.has_text())
    refuse("--ppl needs a text", "--ppl text.txt, --chat chats.jsonl, or --ids file.u16");
  if (!checks.text.empty() + !checks.ids.empty() + !checks.chat.empty() > 1)
    refuse("--ppl text, --chat and --ids exclude each other", "give one of them");
  if (!checks.chat.empty() && checks.windows.bos) refuse(bos_beside_chat, "leave out --bos");
  verify::check_needs(checks);
  if (checks.int8_activations && !checks.has_text() && !asks(options, "--kernels") && !asks(options, "--speed"))
    refuse("--activations int8 is about --ppl, --kernels and --speed", "--ppl text.txt");
  refuse_unused(options);
}

/// The same for the ladder: the cache and the device that were asked for.
verify::CheckOptions checks_of(const VerifyOptions& options) {
  verify::CheckOptions checks = options.checks;
  const DecodeOptions decode = decode_of_text(options);
  checks.choose_device = [decode](verify::PerplexityOptions& how) {
    const DecodeChoice choice = choose(decode);
    how.gpu = choice.gpu;
    how.kv = choice.kv;
    how.residual_bytes = choice.residual_bytes;
    how.split_layers = choice.split_layers;
  };
  checks.device = decode.device;
  checks.detail = detail(options.common);
  checks.compared_delta = static_cast<float>(options.decode.kv.delta);
  checks.speed.kv = parse(decode.kv);
  checks.speed.project_sm89 = options.target == "sm89";
  checks.speed.residual_bytes = decode.residual_bytes;
  checks.speed.int8_activations = checks.int8_activations;
  return checks;
}

/// A folder that goes with its owner.
class ImportedFolder {
 public:
  ImportedFolder() : path_((std::filesystem::temp_directory_path() / ("w4q-verify-" + std::string(6, 'X'))).native()) {
    if (::mkdtemp(path_.data()) == nullptr) throw io::system_error(path_, "cannot create");
  }
  ~ImportedFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  ImportedFolder(const ImportedFolder&) = delete;
  ImportedFolder& operator=(const ImportedFolder&) = delete;

  /// Every value of a GGUF file, exactly, and its tokenizer; where that cannot be had and no text has to be read, a note
  /// says why.
  std::filesystem::path import(const std::filesystem::path& file, bool reads_text, std::string& note) const {
    const std::filesystem::path folder = std::filesystem::path(path_) / file.filename();
    ranks::Ranks alone;  // each rank has a folder of its own
    pipeline::GgufImportRequest request{
        .input = file, .output = folder, .to = "hf-f32", .write = {}, .sharing = {.ranks = &alone}};
    try {
      pipeline::import_gguf(request);
    } catch (const Error& error) {
      if (reads_text || error.code() != ErrorCode::unsupported) throw;
      request.tokenizer = false;
      pipeline::import_gguf(request);
      note = concat("its tokenizer is not looked at: ", error.summary());
    }
    // They are those of what was written just now, not of the file.
    std::filesystem::remove(folder / checkpoint::digests_file);
    return folder;
  }

 private:
  std::string path_;
};

/// A device that nothing of this run multiplies on: it must be there all the same, and the user hears of it.
std::string idle_device(const VerifyOptions& options) {
  const auto& checks = options.checks;
  const std::string& device = options.decode.device;
  if (device == "auto" || checks.has_text() || verify::needs_gpu(checks)) return {};
  device::open_device(device);
  return concat(
      "--device ", device,
      ": without --ppl, --chat, --ids or a check that measures a GPU nothing is multiplied; codes and weights are "
      "compared on the CPU");
}

/// What the page must not replace.
std::vector<std::filesystem::path> inputs_of(const verify::CheckOptions& checks) {
  std::vector<std::filesystem::path> inputs{checks.model, checks.base, checks.text, checks.ids, checks.chat.path};
  for (const verify::CheckRow& row : verify::ladder()) {
    if (const auto found = checks.asked.find(row.option); found != checks.asked.end() && !row.several)
      inputs.emplace_back(found->second);
  }
  std::erase_if(inputs, [](const auto& path) { return path.empty(); });
  return inputs;
}

/// The models as the user named them.
io::Json provenance_of(const verify::CheckOptions& checks) {
  std::vector<ReportedModel> models{{"model", checks.model}};
  if (checks.has_base()) models.emplace_back("base", checks.base);
  return provenance(models);
}

int run(const VerifyOptions& options) {
  apply(options.common);
  check_usage(options);
  const auto inputs = inputs_of(options.checks);
  check(options.page, inputs);
  const std::string idle = idle_device(options);
  verify::CheckOptions checks = checks_of(options);
  verify::open_gpu(checks);
  std::optional<ImportedFolder> imported;
  std::string of_tokenizer;
  if (names_gguf(checks.model.native()) && !verify::reads_headers_alone(checks)) {
    checks.given = checks.model;
    const bool reads_text = !checks.text.empty() || !checks.chat.empty();
    checks.model = imported.emplace().import(checks.model, reads_text, of_tokenizer);
  }
  verify::CheckContext context(std::move(checks));
  verify::Findings findings = verify::climb(context);
  for (const std::string& note : {idle, of_tokenizer}) {
    if (note.empty()) continue;
    findings.text = concat("note: ", note, "\n", findings.text);  // the verdict stands last
    findings.json["notes"].push_back(note);
  }
  if (imported) findings.json.erase("sizes");  // of what the file was made into
  findings.json["provenance"] = provenance_of(options.checks);
  print_and_write(options.common, options.page, schema::verify, findings.text, findings.json, inputs);
  return findings.checks.passed() ? 0 : describe(ErrorCode::verification_failed).exit_status;
}

/// The options of the ladder: those that ask for a check, and the limits that it is held against.
void add_ladder(CLI::App& command, verify::CheckOptions& checks) {
  const InGroup group(command, checks_group);
  for (const verify::CheckRow& row : verify::ladder()) {
    const std::string option(row.option);
    if (!option.empty() && row.value.empty()) {
      command.add_flag_callback(
          option, [&checks, option] { checks.asked[option] = ""; }, std::string(row.help));
    } else if (row.several) {
      command
          .add_option_function<std::vector<std::string>>(
              option,
              [&checks, option](const std::vector<std::string>& values) { checks.asked[option] = join(values, ","); },
              std::string(row.help))
          ->type_name(std::string(row.value))
          ->allow_extra_args(false);
    } else if (!option.empty()) {
      command.add_option_function<std::string>(
          option, [&checks, option](const std::string& value) { checks.asked[option] = value; }, std::string(row.help));
    }
    for (const verify::Limit& limit : row.limits) {
      command
          .add_option_function<double>(
              std::string(limit.option),
              [&checks, name = std::string(limit.option)](double value) { checks.limits[name] = value; },
              std::string(limit.help))
          ->check(not_nan)
          ->group(limits_group);
    }
  }
}

}  // namespace

void setup_verify(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("verify", "Prove that a checkpoint is sound and how far it is from its base");
  auto options = std::make_shared<VerifyOptions>();
  verify::CheckOptions& checks = options->checks;
  command->add_option("model", checks.model, "Folder of a checkpoint, quantized or 16-bit, or a GGUF file")->required();
  command->add_option("--base", checks.base, "The 16-bit checkpoint it was made from");
  auto* ppl = command->add_option("--ppl", checks.text, "Measure perplexity on this UTF-8 text")
                  ->expected(0, 1)
                  ->type_name("TEXT");
  command->add_option("--ids", checks.ids, "Measure perplexity on token ids (uint16 or uint32 little endian)")
      ->type_name("FILE");
  add_chat(*command, checks.chat, {});
  command->option_defaults()->group(text_group);
  command->add_option("--ctx", checks.windows.context, "Tokens of one window")
      ->check(CLI::Range(2, 1 << 24))
      ->capture_default_str();
  command->add_option("--stride", checks.windows.stride, "Distance of windows; 0 means --ctx")
      ->check(CLI::Range(0, 1 << 24));
  command->add_option("--windows", checks.windows.max_windows, "Stop after this many windows; 0 means all")
      ->check(not_negative);
  command->add_flag("--bos", checks.windows.bos, "Put BOS in front of every window");
  command->option_defaults()->group(checks_group);
  command->add_flag_callback(
      "--no-residual", [&checks] { checks.residual = false; }, "Leave out residual passes: the base passes alone");
  command->add_flag_callback(
      "--no-limits", [&checks] { checks.default_limits = false; }, "Only the limits that are given: none by default");
  add_ladder(*command, checks);
  command->option_defaults()->group(basic_group);
  add_speed(*command, checks.speed, options->target);
  add_activations(*command, checks.int8_activations);
  add_decode(*command, options->decode);
  add_page(*command, options->page);
  add_verbose(*command, options->common);
  add_common(*command, options->common);
  set_examples(
      *command,
      {{"verify OUT --base MODEL", "every check that needs no text: digests, structure, codes, statistics, weights"},
       {"verify OUT --base MODEL --ppl text.txt --max-kl 0.08",
        "perplexity and KL to the 16-bit model too; exit status 1 where KL is more"},
       {"verify OUT --for vllm,sglang", "whether these load it, and over how many GPUs, by its headers"}});
  command->callback([&action, options, ppl] {
    options->ppl = ppl->count() > 0;
    action = [options] { return run(*options); };
  });
}

}  // namespace w4q::app
