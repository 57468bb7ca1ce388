#include "common_options.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <iostream>

#include "core/error.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/terminal.h"
#include "core/text.h"
#include "devices.h"
#include "io/lost_pages.h"
#include "io/partial.h"

namespace w4q::app {
namespace {

/// What is wrong with a number that `accepts` refuses; empty: nothing.
template <class Accepts>
CLI::Validator number_check(const char* name, const char* expected, const Accepts& accepts) {
  return {[=](std::string& text) -> std::string {
            char* end = nullptr;
            const double value = std::strtod(text.c_str(), &end);
            const bool number = !text.empty() && end == text.c_str() + text.size();
            return number && accepts(value) ? "" : concat("expected ", expected, ", got ", printable(text));
          },
          name};
}

constexpr double too_large = 9223372036854775808.0;  // 2^63

/// 1 for "" and "b", 1000 for "k" and "kb", 1024 for "ki" and "kib", and so on; 0: no unit.
long double unit_factor(std::string unit) {
  std::ranges::transform(unit, unit.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (unit.empty() || unit == "b") return 1;
  const size_t power = std::string_view("kmgtpe").find(unit.front()) + 1;
  const std::string rest = unit.substr(1);
  if (power == 0 || (rest != "" && rest != "b" && rest != "i" && rest != "ib")) return 0;
  return std::pow(rest.starts_with('i') ? 1024.0L : 1000.0L, static_cast<int>(power));
}

std::string to_bytes(std::string& text) {
  char* end = nullptr;
  const bool number = !text.empty() && std::isdigit(static_cast<unsigned char>(text.front())) != 0 &&
                      text.find_first_of("xX") == std::string::npos;  // strtold reads hexadecimal numbers too
  const long double value = number ? std::strtold(text.c_str(), &end) : 0;
  std::string unit = number ? end : "";
  unit.erase(0, unit.find_first_not_of(' '));
  const long double bytes = value * unit_factor(unit);
  if (!number || unit_factor(unit) == 0 || !(bytes >= 0 && bytes < too_large)) {
    return concat("expected a size such as 4.2GB or 512MiB, got ", printable(text));
  }
  text = std::to_string(std::llround(bytes));
  return {};
}

std::vector<std::string>& typed_words() {
  static std::vector<std::string> words;
  return words;
}

/// Words of the command that change no byte of the output; where they take a value it is the next word.
bool changes_nothing(std::string_view word) {
  constexpr std::string_view neutral[] = {"--resume", "--local-disks", "--overwrite", "--quiet", "--json", "--verbose"};
  return std::ranges::count(neutral, word) > 0 || word.starts_with("--threads=") || word.starts_with("--devices=");
}

std::function<void(const io::Json&)>& report_listener() {
  static std::function<void(const io::Json&)> listener;
  return listener;
}

const CLI::Validator device_word([](std::string& word) { return device::refused_device(word); },
                                 "{auto,cpu,cuda,cuda:N}");

}  // namespace

const CLI::Validator size_in_bytes(to_bytes, "SIZE");
const CLI::Validator positive = number_check("POSITIVE", "more than 0 and less than 2^63",
                                             [](double value) { return value > 0 && value < too_large; });
const CLI::Validator not_negative = number_check("NONNEGATIVE", "at least 0 and less than 2^63",
                                                 [](double value) { return value >= 0 && value < too_large; });
const CLI::Validator not_nan = number_check("", "a number", [](double value) { return !std::isnan(value); });

void add_common(CLI::App& command, CommonOptions& options) {
  const InGroup group(command, general_group);
  command.add_option("--threads", options.threads, "Threads to use; 0 means all cores")->check(CLI::Range(0, 4096));
  command.add_flag("--json", options.json, "Print the report as JSON");
  command.add_flag("--quiet", options.quiet, "No progress on stderr");
}

void add_verbose(CLI::App& command, CommonOptions& options) {
  const InGroup group(command, general_group);
  command.add_flag("--verbose", options.verbose, "Every tensor in the report, not just kinds of them and the worst");
}

model::Detail detail(const CommonOptions& options) {
  return options.verbose ? model::Detail::tensors : model::Detail::kinds;
}

void apply(const CommonOptions& options) {
  set_threads(options.threads);
  if (const int ranks = ranks::ranks_here(); ranks > 1) set_threads(std::max(1, threads() / ranks));
  set_progress_enabled(!options.quiet && ranks::world().first());
}

void remember_command(int argc, const char* const* argv) { typed_words().assign(argv + 1, argv + argc); }

const std::vector<std::string>& command_words() { return typed_words(); }

std::string_view kept_for_resume() {
  return std::ranges::count(typed_words(), "--resume") > 0 ? ", what is finished is kept for --resume" : "";
}

void add_device(CLI::App& command, std::string& device) {
  command
      .add_option("--device", device,
                  "Where to compute: auto takes a GPU if there is one; the bytes are the same but for what comes of "
                  "calibration")
      ->check(device_word)
      ->capture_default_str();
}

void add_decode(CLI::App& command, DecodeOptions& options) {
  command.add_option("--device", options.device, "Where to decode: auto takes a GPU if there is one")
      ->check(device_word)
      ->capture_default_str();
  add_devices(command, options.devices);
  const InGroup group(command, decoding_group);
  add_kv(command, options.kv);
  add_residual_bytes(command, options.residual_bytes);
  command
      .add_option("--split-layers", options.split_layers,
                  "Of several ranks (mpirun, srun, --devices) so many hold a model together, each a part of its layers")
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("N");
}

void add_residual_bytes(CLI::App& command, std::optional<int64_t>& bytes) {
  command
      .add_option("--residual-gpu-bytes", bytes,
                  "Residual passes take up to so much GPU memory; the others come from host memory for each product")
      ->transform(size_in_bytes)
      ->check(not_negative)
      ->type_name("SIZE");
}

void add_activations(CLI::App& command, bool& int8) {
  const InGroup group(command, decoding_group);
  command
      .add_option_function<std::string>(
          "--activations", [&int8](const std::string& word) { int8 = word == "int8"; },
          "What linear layers multiply in prompts (17 tokens or more): int8 rounds their inputs, for int4 and "
          "int8 weights")
      ->check(CLI::IsMember({"16-bit", "int8"}))
      ->default_str("16-bit");
}

void add_kv(CLI::App& command, KvWords& words) {
  command.add_option("--kv", words.type, "Type of the KV cache on the GPU: f16, fp8, q4, q4h, fp4r")
      ->capture_default_str();
  command
      .add_option("--kv-delta", words.delta,
                  "With --kv fp4r: skip pages whose scores stay this far (nats) below the largest of the first page's "
                  "and the newest pages'")
      ->check(not_negative);
}

kernels::KvChoice parse(const KvWords& words) {
  const kernels::KvChoice choice{kernels::parse_kv_type(words.type), static_cast<float>(words.delta)};
  if (std::isfinite(words.delta) && choice.type != kernels::KvType::fp4r) {
    throw Error(ErrorCode::bad_argument, "--kv-delta belongs to --kv fp4r").hint("--kv fp4r");
  }
  return choice;
}

const char* given_cache_option(const DecodeOptions& options) {
  if (options.kv.type != KvWords{}.type) return "--kv";
  if (std::isfinite(options.kv.delta)) return "--kv-delta";
  if (options.residual_bytes) return "--residual-gpu-bytes";
  if (options.split_layers) return "--split-layers";
  return options.devices.empty() ? nullptr : "--devices";
}

namespace {

/// Groups of ranks that hold a model together have all one size.
int checked_split(const DecodeOptions& options, int usual) {
  const int ranks = ranks::world().size(), split = options.split_layers.value_or(usual);
  if (ranks % split == 0) return split;
  throw Error(ErrorCode::bad_argument,
              concat("--split-layers ", split, " does not divide the number of ranks, ", ranks))
      .hint(concat("mpirun -n ", split, " w4q … or as many --devices, or a multiple of it"));
}

}  // namespace

DecodeChoice choose(const DecodeOptions& options, int usual_split) {
  const int split = checked_split(options, usual_split);
  const DecodeChoice choice{device::open_device(options.device), parse(options.kv), options.residual_bytes, split};
  if (choice.gpu == nullptr && choice.kv.type != kernels::KvType::f16) {
    throw Error(ErrorCode::bad_argument, "--kv " + options.kv.type + " is a cache of the GPU").hint("--device cuda");
  }
  if (choice.gpu == nullptr && choice.residual_bytes) {
    throw Error(ErrorCode::bad_argument, "--residual-gpu-bytes without a GPU").hint("--device cuda");
  }
  return choice;
}

void add_output(CLI::App& command, OutputOptions& options) {
  command.add_option("-o,--output", options.output, "Folder to write; must not exist unless --overwrite")
      ->type_name("FOLDER");
  command.add_flag("--dry-run", options.dry_run, "Print what would be done and write nothing");
  command.add_flag("--overwrite", options.overwrite,
                   "Replace an earlier output of w4q, if nothing else lies in it; never an input");
  const InGroup group(command, output_group);
  command.add_flag("--resume", options.resume,
                   "Take up what an ended run of this command has finished, and keep what this one finishes if it is "
                   "ended");
  command.add_flag("--local-disks", options.local_disks,
                   "Of several ranks those that do not see the output's folder write to their own disks, and the first "
                   "one puts the parts together");
  command.add_option("--shard-size", options.shard_bytes, "Largest size of a weight file, e.g. 5GB")
      ->transform(size_in_bytes)
      ->check(positive)
      ->default_str("5GB");
  command.add_flag("--copy-all", options.copy_all,
                   "Carry along sub-folders, large files and weights of other formats too, not just the tokenizer and "
                   "other small files");
  command.add_flag("--compress", options.compress, "Write .safetensors.zst in seekable zstd frames");
}

void check(const OutputOptions& options, bool quiet) {
  if (options.output.empty() && !options.dry_run) {
    throw Error(ErrorCode::bad_argument, "-o FOLDER is required").hint("--dry-run prints the plan without writing");
  }
  if (quiet || options.output.empty() || !ranks::world().first()) return;
  for (const auto& left : io::leftovers_beside(options.output)) {
    std::cerr << concat("note: ", io::shown(left.path), ": left of a run that was killed, ",
                        human_bytes(static_cast<int64_t>(left.bytes)), "; w4q clean removes it\n");
  }
}

io::WriteOptions write_options(const OutputOptions& options) {
  io::WriteOptions result;
  result.max_shard_bytes = static_cast<int64_t>(options.shard_bytes);
  result.compress = options.compress;
  result.copy_all = options.copy_all;
  return result;
}

pipeline::Sharing sharing(const OutputOptions& options) {
  std::string command = "w4q " W4Q_VERSION;
  const auto& words = command_words();
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--threads" || words[i] == "--devices")
      ++i;
    else if (!changes_nothing(words[i]))
      command += concat(" ", words[i].size(), ":", words[i]);
  }
  return {.local_disks = options.local_disks, .resume = options.resume, .command = std::move(command)};
}

void require_one_process(std::string_view what) {
  const auto found = ranks::launched();
  if (!found || found->size < 2) return;
  throw Error(ErrorCode::unsupported, concat(what, " is the work of one process, and was started as one of ",
                                             found->size, " (", found->variable, ")"))
      .hint("start it without mpirun, srun and --devices");
}

void refuse_resume(const OutputOptions& options, std::string_view what) {
  if (!options.resume) return;
  throw Error(ErrorCode::bad_argument, concat("--resume: ", what, " is not taken up where it was ended"))
      .hint("leave out --resume");
}

io::Json with_schema(const JsonSchema& schema, const io::Json& json) {
  io::Json whole = {{"schema", schema.name}, {"version", schema.version}};
  whole.update(json);
  return whole;
}

void set_report_listener(std::function<void(const io::Json&)> listener) { report_listener() = std::move(listener); }

void print(const CommonOptions& options, const JsonSchema& schema, const std::string& text, const io::Json& json) {
  if (const auto changed = io::changed_input()) throw *changed;
  if (!ranks::world().first()) return;
  if (report_listener()) return report_listener()(with_schema(schema, json));
  // Names that are not UTF-8 cannot stand in JSON: they are replaced, not refused.
  if (options.json) {
    std::cout << with_schema(schema, json).dump(2, ' ', false, io::Json::error_handler_t::replace) << "\n";
  } else {
    std::cout << (takes_colours(STDOUT_FILENO) ? coloured_lines(text) : text);
  }
}

}  // namespace w4q::app
