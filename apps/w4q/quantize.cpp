// w4q quantize MODEL -o OUT --method kbit --k 3
#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>

#include "allocation_options.h"
#include "checkpoint/dialect/dialect.h"
#include "common_options.h"
#include "core/error.h"
#include "core/text.h"
#include "devices.h"
#include "formats/codebook.h"
#include "io/files.h"
#include "io/output.h"
#include "pipeline/allocate.h"
#include "pipeline/convert_model.h"
#include "pipeline/output_rules.h"
#include "pipeline/quantize_model.h"
#include "pipeline/recipe_file.h"
#include "pipeline/shared_output.h"
#include "quality_options.h"
#include "quantize/rounding.h"
#include "quantize_gguf.h"
#include "scheme_options.h"
#include "serving_options.h"

namespace w4q::app {
namespace {

struct QuantizeArguments {
  CommonOptions common;
  OutputOptions output;
  QualityArguments quality;
  AllocationArguments allocation;
  std::string model;
  std::string method;  ///< empty: the one that rounds to the scheme
  SchemeOptions scheme;
  std::string codebook;  ///< empty: the method's own
  bool bnb_compatible = false;
  std::string recipe;
  std::vector<std::string> keep;
  bool lm_head = false;
  bool embeddings = false;
  std::string embedding_scheme;
  std::string to;  ///< a dialect; empty: w4q's own planes
  bool activation_scales = false, cache_scales = false;
  ServingArguments serving;
  std::string device = "auto";
  std::string devices;
  int ranks = 0;  ///< to plan for
};

/// A registered name, a table that is learned, or else a file with the user's own.
void set_codebook(const QuantizeArguments& options, pipeline::QuantizeRequest& request) {
  quantize::QuantizeOptions& target = request.options;
  if (options.codebook.empty()) return;
  if (options.codebook == learned_table) {
    target.steps.add({quantize::StepKind::learn_table});
    return;
  }
  for (const auto& row : formats::codebook_registry()) {
    if (row.name == options.codebook) {
      target.codebook = options.codebook;
      return;
    }
  }
  if (options.codebook == "nf4" || options.codebook == "fp4") {  // of bitsandbytes' schemes alone
    target.codebook = options.codebook;
    return;
  }
  if (!std::filesystem::exists(options.codebook)) {
    std::vector<std::string> names{"nf4", "fp4"};
    for (const auto& row : formats::codebook_registry()) names.emplace_back(row.name);
    names.emplace_back(learned_table);
    throw Error(ErrorCode::bad_argument, "--codebook " + options.codebook + ": neither a known table nor a file")
        .detail("known tables: " + join(names));
  }
  if (!options.recipe.empty()) {
    throw Error(ErrorCode::bad_argument,
                "a table from a file serves one bit width and cannot be combined with --recipe");
  }
  constexpr int64_t max_table_bytes = 1 << 20;
  target.table =
      formats::parse_codebook(io::read_file(options.codebook, max_table_bytes), options.scheme.bits, options.codebook);
  request.read_files.emplace_back(options.codebook);
}

/// What was asked for, or what rounds to the scheme that was.
std::string chosen_method(const QuantizeArguments& options) {
  if (!options.method.empty()) return options.method;
  if (options.scheme.scheme.empty()) return "kbit";
  return std::string(quantize::rounding_quantizer(typed_schemes("--scheme", options.scheme.scheme).front()).name);
}

void set_passes(std::vector<formats::Scheme> passes, pipeline::QuantizeRequest& request) {
  request.scheme = passes.front();
  passes.erase(passes.begin());
  request.residual = std::move(passes);
}

/// Whether the output is for programs that load several linears as one: AWQ's, GPTQ's and their like, or those of --for.
bool is_served(const QuantizeArguments& options) {
  const auto programs = options.serving.empty() ? std::vector<serving::Program>()
                                                : serving::parse_programs(join(options.serving.programs, ","));
  const bool fuses = std::ranges::any_of(programs, [](auto program) { return serving::describe(program).fuses; });
  return fuses || (!options.to.empty() && options.to != "w4q" && options.to != "exl3");
}

pipeline::QuantizeRequest request(const QuantizeArguments& options) {
  pipeline::QuantizeRequest result;
  result.model = options.model;
  result.output = options.output.output;
  result.method = chosen_method(options);
  if (quantize::step_of_method(result.method) == nullptr) quantize::quantizer_row(result.method);
  set_passes(chosen_schemes(options.scheme, result.method), result);
  result.rotation = chosen_rotation(options.scheme, options.quality.rotation_seed);
  result.options.steps = chosen_clip(options.scheme);
  result.keep = options.keep;
  if (const auto* const row = checkpoint::find_dialect(options.to)) {
    result.keep.insert(result.keep.end(), row->keeps.begin(), row->keeps.end());
  }
  result.lm_head = options.lm_head;
  result.embeddings = options.embeddings || !options.embedding_scheme.empty();
  if (!options.embedding_scheme.empty()) {
    result.table = typed_scheme("--embedding-scheme", options.embedding_scheme);
  }
  result.options.bnb_compatible = options.bnb_compatible;
  set_codebook(options, result);
  QualityArguments quality = options.quality;
  quality.measures_activations = options.activation_scales || options.cache_scales;
  if (pipeline::is_recipe_line(options.recipe)) {
    const auto line = pipeline::parse_recipe_line(options.recipe);
    set_passes(line.passes, result);
    result.method = quantize::rounding_quantizer(result.scheme).name;
    quality.recipe = line.steps;
  } else if (!options.recipe.empty()) {
    result.recipe = pipeline::read_recipe(options.recipe);
    result.fused_alike = is_served(options) && !options.allocation.untied && !options.serving.anyway;
    result.read_files.emplace_back(options.recipe);
    quality.recipe = result.recipe->steps;
  }
  set_quality(quality, result);
  // What is calibrated is rotated as one; otherwise each scheme brings its own.
  const bool rotates = result.scheme.family == formats::SchemeFamily::rotated && result.options.rotation().identity();
  if (rotates && result.calibrated) {
    result.options.steps.add(
        {.kind = quantize::StepKind::rotate, .block = result.scheme.block, .seed = result.rotation.seed});
  }
  set_allocation(options.allocation, is_served(options), result);
  if (result.allocation && !result.residual.empty()) {
    throw Error(ErrorCode::bad_argument, "bits are chosen for single passes")
        .hint("leave out --target-bpw and --target-size, or the further passes");
  }
  result.write = write_options(options.output);
  result.overwrite = options.output.overwrite;
  result.sharing = sharing(options.output);
  result.planned_ranks = options.ranks;
  result.planned_conversion = !options.to.empty();
  if (options.ranks > 0 && !options.output.dry_run) {
    throw Error(ErrorCode::bad_argument, "--ranks plans a run of several, and belongs to --dry-run")
        .hint(concat("mpirun -n ", options.ranks, " w4q quantize … starts them"));
  }
  result.gpu = device::open_device(options.device);
  if (result.calibrated) result.calibrated->gpu = result.gpu;
  return result;
}

pipeline::ActivationRequest activations_of(const QuantizeArguments& options) {
  return activation_request(options.activation_scales, options.cache_scales, options.quality.calibration);
}

/// What would only be found out after the work.
void check_dialect(const QuantizeArguments& options) {
  const auto* const row = checkpoint::find_dialect(options.to);
  const auto activations = activations_of(options);
  if (auto why = pipeline::activation_obstacle(row, activations); !why.empty()) {
    throw Error(ErrorCode::bad_argument, std::move(why)).hint(std::string(pipeline::who_has_scales));
  }
  pipeline::require_cache(options.model, activations);
  if (row == nullptr && options.to != "w4q") {
    throw Error(ErrorCode::bad_argument, concat("--to ", printable(options.to), ": no such dialect"))
        .detail("known: " + join(pipeline::convert_targets()));
  }
  if (!options.output.overwrite && std::filesystem::exists(options.output.output)) {
    throw Error(ErrorCode::bad_argument, concat(printable(options.output.output), " exists"))
        .hint("--overwrite replaces it");
  }
}

/// --to: w4q's own checkpoint is a step on the way, in a hidden folder beside the output that is never committed.
/// Making it checks the output before any work.
int run_to_dialect(const QuantizeArguments& options, pipeline::QuantizeRequest wanted,
                   const std::vector<std::string>& notes) {
  refuse_resume(options.output, "--to, which goes over a checkpoint of w4q's own,");
  const std::filesystem::path output = options.output.output;
  const pipeline::SharedFolder way(wanted.sharing, output, options.output.overwrite, pipeline::inputs_of(wanted),
                                   pipeline::former_outputs(options.model));
  wanted.output = way.staging() / "packed";
  const auto made = pipeline::quantize_model(wanted);
  const pipeline::ConvertRequest conversion{.input = wanted.output,
                                            .output = output,
                                            .to = options.to,
                                            .activations = activations_of(options),
                                            .write = write_options(options.output),
                                            .overwrite = options.output.overwrite,
                                            .sharing = wanted.sharing};
  // Where widths were chosen, only now is it known what there is to load.
  std::vector<std::string> served = notes;
  if (!options.serving.empty() && wanted.allocation) {
    served = notes_of(require_served(options.serving, options.to, [&](const std::string& to) {
      pipeline::ConvertRequest other = conversion;
      other.to = to;
      return pipeline::planned_headers(other);
    }));
  }
  auto converted = pipeline::convert_model(conversion);
  way.ranks().barrier();  // the first rank removes it, and nobody may be reading it then
  add_served(served, converted.notes);
  io::Json both = {{"quantize", pipeline::to_json(made)}, {"convert", pipeline::to_json(converted)}};
  both["quantize"]["output"] = options.output.output;
  print(options.common, schema::quantize_to,
        concat(pipeline::to_text(made, detail(options.common)), "\n",
               pipeline::to_text(converted, detail(options.common))),
        both);
  return 0;
}

/// The headers of what a plan packs, in a dialect.
serving::StoredModel planned_as(const QuantizeArguments& options, const pipeline::Plan& plan, const std::string& to) {
  const auto activations = activations_of(options);
  const auto* const row = checkpoint::find_dialect(to);
  if (auto why = pipeline::activation_obstacle(row, activations); !why.empty()) {
    throw Error(ErrorCode::unsupported, std::move(why));
  }
  return pipeline::planned_headers(plan, options.model, to, activations);
}

/// Whether nothing that was given says how weights are rounded.
bool leaves_scheme_open(const QuantizeArguments& options) {
  const SchemeOptions& parts = options.scheme;
  return options.method.empty() && options.codebook.empty() && options.recipe.empty() && !options.bnb_compatible &&
         parts.scheme.empty() && parts.absmax.empty() && parts.residual_bits.empty();
}

/// Integers of the bits, with the groups, scales and zero points that were asked for; where they were not, groups of 64,
/// scales of the type that a program computes in, and zero points up to 7 bits (kernels of servers have 8 without).
/// Behind them small floats, for programs that load no integers.
std::vector<std::string> served_schemes(const QuantizeArguments& options) {
  const SchemeOptions& parts = options.scheme;
  const auto given = [](const CLI::Option* option) { return option->count() > 0; };
  const io::Json config = io::read_json(std::filesystem::path(options.model) / "config.json");
  const io::Json& inner = serving::member(config, "text_config");
  const auto is_brain = [](const io::Json& object) {
    return serving::text(object, object.contains("dtype") ? "dtype" : "torch_dtype") == "bfloat16";
  };
  std::vector<std::string> types{"f16"}, groups{"64", "32"};
  if (is_brain(config) || is_brain(inner)) types.insert(types.begin(), "bf16");
  if (given(parts.integer_parts.front())) types = {parts.scale_type};
  if (given(parts.group_option)) groups = {parts.group};
  const bool asymmetric = given(parts.asymmetry_flag) ? parts.asymmetric : parts.bits < 8;
  std::vector<std::string> schemes;
  for (const auto& group : groups) {
    for (const auto& type : types) {
      schemes.push_back(
          concat("int", parts.bits, group == "row" ? "-" : "-g", group, "-", type, asymmetric ? "-asym" : ""));
    }
  }
  const bool any = !given(parts.integer_parts.front()) && !given(parts.group_option) && !given(parts.asymmetry_flag);
  if (any && parts.bits == 4) schemes.emplace_back("nvfp4");
  if (any && parts.bits == 8) schemes.emplace_back("fp8-channel");
  return schemes;
}

/// Fills in scheme and --to, as all programs of --for load them, where nothing says how weights are rounded. Returns what
/// was chosen, as a note.
std::vector<std::string> choose_scheme(QuantizeArguments& options) {
  if (options.serving.empty() || !leaves_scheme_open(options)) return {};
  QuantizeArguments plain = options;  // headers do not depend on how codes are searched
  plain.quality = {}, plain.allocation = {}, plain.device = "cpu", plain.activation_scales = plain.cache_scales = false;
  const auto planned = [&](const std::string& scheme, const std::string& to) {
    plain.scheme.scheme = scheme;
    return planned_as(options, pipeline::plan_quantize(request(plain)), to);
  };
  const auto chosen = served_scheme(options.serving, served_schemes(options), options.to, planned);
  const bool both = options.to.empty();
  options.scheme.scheme = chosen.scheme, options.to = chosen.to;
  return {concat("--for chose --scheme ", chosen.scheme, both ? concat(" --to ", chosen.to) : std::string())};
}

/// What --for says before the work, as notes of a report. Chooses --to where it was left out. Throws where a program
/// would not load the output. Where widths are yet to be chosen, they decide.
std::vector<std::string> serve(QuantizeArguments& options, const pipeline::QuantizeRequest& wanted) {
  if (options.serving.empty() || (wanted.allocation && !options.to.empty())) return {};
  pipeline::QuantizeRequest same = wanted;
  same.allocation.reset();
  const auto plan = pipeline::plan_quantize(same);
  const auto planned = [&](const std::string& to) { return planned_as(options, plan, to); };
  std::vector<std::string> notes;
  if (options.to.empty()) {
    options.to = served_dialect(options.serving, planned);
    notes.push_back(concat("--for chose --to ", options.to));
  }
  if (wanted.allocation) return notes;
  std::ranges::move(notes_of(require_served(options.serving, options.to, planned)), std::back_inserter(notes));
  return notes;
}

int64_t size_of(const serving::StoredModel& model) {
  int64_t sum = 0;
  for (const auto& [name, info] : model.tensors()) sum += static_cast<int64_t>(info.size());
  return sum;
}

/// Leaves widths to choose from that the dialect of --to holds and the programs of --for load, each as if all linears had
/// it, so that nothing is chosen that is refused in the end. Throws what speaks against the last where none is left.
void leave_what_loads(const QuantizeArguments& options, pipeline::QuantizeRequest& wanted) {
  if (!wanted.allocation || options.to.empty()) return;
  pipeline::QuantizeRequest same = wanted;
  same.allocation.reset();
  same.preset.clear();  // what presets cost is asked for later
  std::optional<Error> refused;
  for (const auto& scheme : pipeline::widths_of(wanted.scheme)) {
    same.scheme = scheme;
    try {
      const auto plan = pipeline::plan_quantize(same);
      const auto planned = [&](const std::string& to) { return planned_as(options, plan, to); };
      const int64_t more = size_of(planned(options.to)) - plan.bytes_after();
      if (!options.serving.empty()) require_served(options.serving, options.to, planned);
      wanted.allocation->widths.push_back(scheme.bits);
      wanted.allocation->dialect_bytes = std::max(wanted.allocation->dialect_bytes, more);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::unsupported && error.code() != ErrorCode::bad_argument) throw;
      refused = error;
    }
  }
  if (wanted.allocation->widths.empty() && refused) throw *refused;
}

/// What all ranks read that some of them wrote must stand where all see it.
void refuse_local_disks(const QuantizeArguments& options, const pipeline::QuantizeRequest& wanted) {
  if (!options.output.local_disks || ranks::world().size() == 1 || options.output.dry_run) return;
  const auto refuse = [](const char* what, const char* hint) {
    throw Error(ErrorCode::bad_argument, concat("--local-disks: ", what)).hint(hint);
  };
  if (!options.to.empty()) {
    refuse("--to goes over a checkpoint of w4q's own, which all ranks read",
           "leave out --to, and w4q repack OUT --to … afterwards; or write to a file system that all ranks share");
  }
  if (wanted.allocation) {
    refuse("bits are chosen by weights of several widths, which all ranks read",
           "leave out --target-bpw and --target-size, or write to a file system that all ranks share");
  }
}

int run(const CLI::App& command, QuantizeArguments options) {
  apply(options.common);
  check(options.output, options.common.quiet);
  check(options.serving);
  const auto file_bytes = static_cast<int64_t>(options.allocation.bytes);
  std::vector<std::string> notes;
  if (options.to.empty() && wants_file(options.serving)) {
    options.to = file_bytes > 0 ? "gguf" : "gguf-q4_k_m";
    notes.push_back(concat("--for chose --to ", options.to));
  }
  if (names_gguf_target(options.to)) {
    return quantize_gguf(command, options.common, options.output, options.quality,
                         {options.model, options.to, options.device, file_bytes, options.serving, notes});
  }
  if (options.to.empty() && options.serving.empty() && (options.activation_scales || options.cache_scales)) {
    throw Error(ErrorCode::bad_argument, "--activation-scales and --cache-scales belong to --to");
  }
  notes = choose_scheme(options);
  auto wanted = request(options);
  if (!options.to.empty()) check_dialect(options);
  std::ranges::move(serve(options, wanted), std::back_inserter(notes));
  leave_what_loads(options, wanted);
  refuse_local_disks(options, wanted);
  if (!options.to.empty() && !options.output.dry_run) return run_to_dialect(options, wanted, notes);
  if (options.output.dry_run) {
    auto plan = pipeline::plan_quantize(wanted);
    plan.notes.insert(plan.notes.end(), notes.begin(), notes.end());
    print(options.common, schema::plan, pipeline::to_text(plan, detail(options.common)), pipeline::to_json(plan));
  } else {
    const auto report = pipeline::quantize_model(wanted);
    print(options.common, schema::quantize, pipeline::to_text(report, detail(options.common)),
          pipeline::to_json(report));
  }
  return 0;
}

/// Which modules are packed. Returns --recipe, which decides alone.
CLI::Option* add_packed(CLI::App& command, QuantizeArguments& options) {
  const InGroup group(command, packed_group);
  auto* recipe = command.add_option(
      "--recipe", options.recipe,
      "JSON file of glob to scheme rules, which decides alone what is packed, or a line such as \"kbit3: "
      "awq → rotate128 → lloyd+search → feedback\"");
  command.add_option("--keep", options.keep, "Glob of modules that stay in 16 bit; may be repeated")->type_name("GLOB");
  auto* head = command.add_flag("--lm-head", options.lm_head, "Pack the head too");
  auto* embeddings = command.add_flag("--embeddings", options.embeddings, "Pack the embedding table too");
  auto* table = command.add_option("--embedding-scheme", options.embedding_scheme,
                                   "Pack the embedding table too, to this scheme, e.g. int8-row-f16 or int4-g32-f16");
  return recipe->excludes(head)->excludes(embeddings)->excludes(table);
}

}  // namespace

void setup_quantize(CLI::App& app, Action& action) {
  auto* command = app.add_subcommand("quantize", "Quantize a 16-bit checkpoint");
  auto options = std::make_shared<QuantizeArguments>();
  command->add_option("model", options->model, "Hugging Face folder: config.json and .safetensors files")->required();
  add_output(*command, options->output);
  {
    const InGroup group(*command, scheme_group);
    command->add_option("--method", options->method, "Quantizer (w4q list): kbit, or the one that rounds to --scheme");
    command->add_option("--codebook", options->codebook,
                        "Table of levels: a name (w4q list; nf for kbit, normal for rotated unless told otherwise), "
                        "lloyd (learned for each tensor), or a file with 2^k numbers");
    command->add_flag("--bnb-compatible", options->bnb_compatible,
                      "The bytes of bitsandbytes' kbit: its table and its rounding");
  }
  command
      ->add_option("--ranks", options->ranks, "With --dry-run: what each of so many ranks would read, hold and write")
      ->check(CLI::Range(1, 1 << 20))
      ->type_name("N");
  CLI::Option* const recipe = add_packed(*command, *options);
  command->add_option(
      "--to", options->to,
      "Write another program's checkpoint, or a GGUF file (w4q list --dialects), as repack --to does, with "
      "its proof");
  add_serving(*command, options->serving);
  add_activation_scales(*command, options->activation_scales, options->cache_scales);
  add_device(*command, options->device);
  add_devices(*command, options->devices);
  CLI::Option* const quality = add_quality(*command, options->quality);
  add_scheme(*command, options->scheme, *recipe);
  quality->excludes(command->get_option("--codebook"))->excludes(command->get_option("--clip"));
  add_allocation(*command, options->allocation, *recipe, *command->get_option("--bits"));
  add_verbose(*command, options->common);
  add_common(*command, options->common);
  set_examples(*command, {{"quantize MODEL -o OUT --quality good",
                           "4 bits; tables learned and errors fed back on a text that the model writes itself"},
                          {"quantize MODEL -o OUT --quality good --calib text.txt --target-bpw 3.5",
                           "3.5 bits a weight on average, each linear its own width, calibrated on your text"},
                          {"quantize MODEL -o OUT --for vllm,sglang --quality good",
                           "a checkpoint that these programs load; --scheme and --to are chosen where left out"},
                          {"quantize MODEL -o FILE.gguf --to gguf-q4_k_m --quality good",
                           "a file for llama.cpp, with searched scales and errors fed back"},
                          {"quantize MODEL -o OUT --k 3", "3 bits, rounded: no calibration, as fast as the disk"}});
  command->callback([&action, command, options] { action = [command, options] { return run(*command, *options); }; });
}

}  // namespace w4q::app
