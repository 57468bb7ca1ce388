#include "serving_options.h"

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "core/text.h"

namespace w4q::app {
namespace {

using Planned = std::function<serving::StoredModel(const std::string& to)>;

/// Those that programs load at all, the most read first.
constexpr const char* loadable[] = {"compressed-tensors", "awq-gemm", "gptq-v1", "gptq-v2", "compressed-tensors-float",
                                    "modelopt",           "fp8",      "gpt-oss", "humming", "bitsandbytes-nf4",
                                    "auto-round"};

std::vector<serving::Program> programs_of(const ServingArguments& arguments) {
  return serving::parse_programs(join(arguments.programs, ","));
}

/// What the programs would say of it in a dialect; nothing where that does not hold these codes.
std::optional<std::vector<serving::Prediction>> predict_held(const ServingArguments& arguments, const Planned& planned,
                                                             const std::string& to) {
  try {
    return predict(arguments, planned(to));
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
    return std::nullopt;
  }
}

std::vector<std::string> dialects_that_load(const ServingArguments& arguments, const Planned& planned) {
  std::vector<std::string> names;
  for (const char* name : loadable) {
    if (const auto predictions = predict_held(arguments, planned, name); predictions && all_load(*predictions)) {
      names.emplace_back(name);
    }
  }
  return names;
}

/// The first thing that refuses it, or would compute something else.
const serving::Finding* worst(const std::vector<serving::Prediction>& predictions) {
  for (const auto& prediction : predictions) {
    if (!prediction.loads() || !prediction.right()) return &prediction.findings.front();
  }
  return nullptr;
}

/// Why none of them is loaded: what programs say of the first that holds the codes, with their remedy, or that none does.
Error unserved(const std::string& what, const ServingArguments& arguments, const Planned& planned,
               const std::string& remedy) {
  Error error(ErrorCode::unsupported, what);
  for (const char* name : loadable) {
    const auto predictions = predict_held(arguments, planned, name);
    if (!predictions) continue;
    error.detail(concat("as ", name, ":"));
    for (const auto& note : notes_of(*predictions)) error.detail(note);
    const serving::Finding* const first = worst(*predictions);
    error.hint(concat(first == nullptr || first->remedy.empty() ? "" : first->remedy + "; ",
                      "w4q list --servers has what each program takes"));
    return error;
  }
  try {
    planned(loadable[0]);
  } catch (const Error& why) {
    error.detail(why.summary());
  }
  error.hint(concat(remedy, "; w4q list --servers has what each program takes"));
  return error;
}

Error not_served(const std::string& to, const std::vector<serving::Prediction>& predictions) {
  Error error(ErrorCode::unsupported, concat("--to ", to, ": would not load in every program of --for"));
  for (const auto& note : notes_of(predictions)) error.detail(note);
  return error;
}

}  // namespace

void add_serving(CLI::App& command, ServingArguments& arguments) {
  command
      .add_option(
          "--for", arguments.programs,
          "Programs that must load the output: vllm, sglang, transformers, llama.cpp, trt-llm, mlx; refused before "
          "the work where one would not")
      ->type_name("PROGRAM")
      ->allow_extra_args(false);
  command.add_flag("--even-if-refused", arguments.anyway,
                   "With --for: write it all the same, with what they say as notes");
}

void check(const ServingArguments& arguments) {
  if (!arguments.empty()) {
    programs_of(arguments);
  } else if (arguments.anyway) {
    throw Error(ErrorCode::bad_argument, "--even-if-refused belongs to --for").hint("--for vllm");
  }
}

std::vector<serving::Prediction> predict(const ServingArguments& arguments, const serving::StoredModel& planned) {
  std::vector<serving::Prediction> predictions;
  for (const auto program : programs_of(arguments)) predictions.push_back(serving::predict(planned, program));
  return predictions;
}

bool all_load(const std::vector<serving::Prediction>& predictions) {
  return std::ranges::all_of(predictions, [](const auto& each) { return each.loads() && each.right(); });
}

std::vector<std::string> notes_of(const std::vector<serving::Prediction>& predictions) {
  std::vector<std::string> notes;
  for (const auto& prediction : predictions) {
    notes.push_back(serving::verdict(prediction));
    for (const auto& finding : prediction.findings) {
      notes.push_back(concat(serving::describe(prediction.program).name, ": ", serving::to_text(finding)));
    }
  }
  return notes;
}

void add_served(const std::vector<std::string>& served, std::vector<std::string>& notes) {
  const auto names_scales = [](const std::string& note) { return note.ends_with("[scale-dtype]"); };
  if (std::ranges::any_of(served, names_scales)) {
    std::erase_if(notes, [](const std::string& note) { return note.find(serving::rounded_mark) != std::string::npos; });
  }
  notes.insert(notes.end(), served.begin(), served.end());
}

std::vector<serving::Prediction> require_served(const ServingArguments& arguments, const std::string& to,
                                                const Planned& planned) {
  auto predictions = predict(arguments, planned(to));
  if (arguments.anyway || all_load(predictions)) return predictions;
  Error error = not_served(to, predictions);
  std::vector<std::string> others = dialects_that_load(arguments, planned);
  std::erase(others, to);
  const serving::Finding* const first = worst(predictions);
  const std::string remedy = others.empty()
                                 ? (first == nullptr ? std::string() : first->remedy)
                                 : concat("--to ", join(others, " or --to "), " holds the same codes and loads");
  throw Error(error.hint(concat(remedy, remedy.empty() ? "" : "; ", "--even-if-refused writes it all the same")));
}

std::vector<serving::Prediction> require_served(const ServingArguments& arguments, const std::string& to,
                                                const serving::StoredModel& file) {
  auto predictions = predict(arguments, file);
  if (arguments.anyway || all_load(predictions)) return predictions;
  const serving::Finding* const first = worst(predictions);
  throw Error(not_served(to, predictions)
                  .hint(concat(first == nullptr || first->remedy.empty() ? "" : first->remedy + "; ",
                               "--even-if-refused writes it all the same")));
}

bool wants_file(const ServingArguments& arguments) {
  if (arguments.empty()) return false;
  const auto programs = programs_of(arguments);
  return std::ranges::find(programs, serving::Program::llama_cpp) != programs.end();
}

std::string served_dialect(const ServingArguments& arguments, const Planned& planned) {
  const auto names = dialects_that_load(arguments, planned);
  if (!names.empty()) return names.front();
  throw unserved("no dialect holds these codes and loads in every program of --for", arguments, planned,
                 "w4q quantize MODEL --for without a scheme chooses one that loads");
}

ServedChoice served_scheme(
    const ServingArguments& arguments, const std::vector<std::string>& schemes, const std::string& to,
    const std::function<serving::StoredModel(const std::string& scheme, const std::string& to)>& planned) {
  const auto of = [&](const std::string& scheme) -> Planned {
    return [&planned, scheme](const std::string& dialect) { return planned(scheme, dialect); };
  };
  for (const auto& scheme : schemes) {
    if (to.empty()) {
      if (const auto names = dialects_that_load(arguments, of(scheme)); !names.empty()) return {scheme, names.front()};
    } else if (const auto predictions = predict_held(arguments, of(scheme), to);
               predictions && all_load(*predictions)) {
      return {scheme, to};
    }
  }
  throw unserved(
      concat("none of ", join(schemes), to.empty() ? "" : concat(" as ", to), " loads in every program of --for"),
      arguments, of(schemes.front()), "--keep GLOB leaves linears in 16 bit");
}

}  // namespace w4q::app
