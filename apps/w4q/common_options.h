// What every subcommand shares: how it is registered, the options that all have, and how results are printed.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "device/choice.h"
#include "help.h"
#include "io/checkpoint_writer.h"
#include "io/json.h"
#include "json_schemas.h"
#include "kernels/attention/kv_page.h"
#include "model/kinds.h"
#include "pipeline/sharing.h"

namespace w4q::app {

/// The work that the command line asked for; returns the exit status.
using Action = std::function<int()>;

struct CommonOptions {
  int threads = 0;
  bool json = false;
  bool quiet = false;
  bool verbose = false;  ///< of commands that have add_verbose
};

/// Adds --threads, --json and --quiet.
void add_common(CLI::App& command, CommonOptions& options);
/// --verbose, for commands whose report has a line for every tensor.
void add_verbose(CLI::App& command, CommonOptions& options);
/// How much of its tensors a report names.
model::Detail detail(const CommonOptions& options);
/// Called once, before any command runs.
void remember_command(int argc, const char* const* argv);
/// What was typed behind the program's name.
const std::vector<std::string>& command_words();

/// What becomes of unfinished work: "" unless --resume was given.
std::string_view kept_for_resume();

/// Puts them into effect; called first in every run().
void apply(const CommonOptions& options);

/// Checks of numbers. CLI11's own let NaN through, and name a limit of three hundred digits.
extern const CLI::Validator positive;      ///< more than 0, not infinite; sizes in bytes: less than 2^63
extern const CLI::Validator not_negative;  ///< the same from 0 on
extern const CLI::Validator not_nan;
/// Transforms a size such as 4.2GB, 512MiB or 1000 into bytes; CLI11's own takes no fractions.
extern const CLI::Validator size_in_bytes;

/// Options of commands that write a checkpoint.
struct OutputOptions {
  std::string output;
  bool dry_run = false;
  bool overwrite = false;
  uint64_t shard_bytes = 5'000'000'000;
  bool compress = false;
  bool copy_all = false;
  bool resume = false;
  bool local_disks = false;
};

/// --device auto|cpu|cuda|cuda:N, for commands that can use a GPU; device::open_device understands the word.
void add_device(CLI::App& command, std::string& device);

/// --kv and --kv-delta.
struct KvWords {
  std::string type = "f16";
  double delta = INFINITY;
};
void add_kv(CLI::App& command, KvWords& words);
/// Throws bad_argument for a type that does not exist, and for a delta where nothing is skipped.
kernels::KvChoice parse(const KvWords& words);

/// --residual-gpu-bytes.
void add_residual_bytes(CLI::App& command, std::optional<int64_t>& bytes);

/// --activations 16-bit|int8, of prompts.
void add_activations(CLI::App& command, bool& int8);

/// --device, --devices, --kv, --kv-delta, --residual-gpu-bytes and --split-layers, for commands that decode a model.
struct DecodeOptions {
  std::string device = "auto";
  std::string devices;
  KvWords kv;
  std::optional<int64_t> residual_bytes;
  std::optional<int> split_layers;
};
void add_decode(CLI::App& command, DecodeOptions& options);
/// The first of these but --device that differs from its default, for commands that may have
/// nothing to decode; null: none does.
const char* given_cache_option(const DecodeOptions& options);
/// What they say: the device, and the type of the KV cache. Throws bad_argument for a cache that the CPU does not have.
struct DecodeChoice {
  std::shared_ptr<device::Context> gpu;  ///< null: the CPU
  kernels::KvChoice kv;
  std::optional<int64_t> residual_bytes;  ///< of residual passes in GPU memory; nothing: all
  int split_layers = 1;                   ///< ranks that hold a model together
};
/// `usual_split`: where --split-layers is not given.
DecodeChoice choose(const DecodeOptions& options, int usual_split = 1);

void add_output(CLI::App& command, OutputOptions& options);
/// -o is needed unless --dry-run is given. Throws bad_argument. Names on stderr, unless `quiet`, what killed runs left
/// beside the output.
void check(const OutputOptions& options, bool quiet);
io::WriteOptions write_options(const OutputOptions& options);
/// The ranks of this run, and --resume.
pipeline::Sharing sharing(const OutputOptions& options);
/// For what is not shared between ranks: throws unsupported, naming `what`, where there are several.
void require_one_process(std::string_view what);
/// Throws bad_argument for --resume with `what`, which is not taken up.
void refuse_resume(const OutputOptions& options, std::string_view what);

/// With the name and the version of its schema in front.
io::Json with_schema(const JsonSchema& schema, const io::Json& json);

/// Takes what commands report in place of stdout, with its schema. Null: stdout again.
void set_report_listener(std::function<void(const io::Json&)> listener);

/// Results go to stdout: the JSON where --json was given, with the name and the version of its schema, the text otherwise. Throws bad_file when an input changed while
/// it was read: they are of no model then.
void print(const CommonOptions& options, const JsonSchema& schema, const std::string& text, const io::Json& json);

/// One function per subcommand, each in its own file: registers itself and stores its work in `action`.
void setup_quantize(CLI::App& app, Action& action);
void setup_calibrate(CLI::App& app, Action& action);
void setup_repack(CLI::App& app, Action& action);
void setup_verify(CLI::App& app, Action& action);
void setup_compare(CLI::App& app, Action& action);
void setup_report(CLI::App& app, Action& action);
void setup_hash(CLI::App& app, Action& action);
void setup_clean(CLI::App& app, Action& action);
void setup_inspect(CLI::App& app, Action& action);
void setup_list(CLI::App& app, Action& action);
void setup_tokenize(CLI::App& app, Action& action);
void setup_doctor(CLI::App& app, Action& action);
void setup_help(CLI::App& app, Action& action);
void setup_generate(CLI::App& app, Action& action);
void setup_bench(CLI::App& app, Action& action);

}  // namespace w4q::app
