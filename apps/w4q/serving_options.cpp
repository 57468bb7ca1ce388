#include "serving_options.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"

namespace w4q::app {
namespace {

using Planned = std::function<serving::StoredModel(const std::string& to)>;

/// Those of integer codes that programs load at all, the most read first.
constexpr const char* loadable[] = {"compressed-tensors", "awq-gemm", "gptq-v1", "gptq-v2"};

std::vector<serving::Program> programs_of(const ServingArguments& arguments) {
  return serving::parse_programs(join(arguments.programs, ","));
}

std::vector<std::string> dialects_that_load(const ServingArguments& arguments, const Planned& planned) {
  std::vector<std::string> names;
  for (const char* name : loadable) {
    try {
      if (all_load(predict(arguments, planned(name)))) names.emplace_back(name);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::unsupported) throw;  // it does not hold these codes
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

std::vector<serving::Prediction> require_served(const ServingArguments& arguments, const std::string& to,
                                                const Planned& planned) {
  auto predictions = predict(arguments, planned(to));
  if (arguments.anyway || all_load(predictions)) return predictions;
  Error error(ErrorCode::unsupported, concat("--to ", to, ": would not load in every program of --for"));
  for (const auto& note : notes_of(predictions)) error.detail(note);
  std::vector<std::string> others = dialects_that_load(arguments, planned);
  std::erase(others, to);
  const serving::Finding* const first = worst(predictions);
  const std::string remedy = others.empty()
                                 ? (first == nullptr ? std::string() : first->remedy)
                                 : concat("--to ", join(others, " or --to "), " holds the same codes and loads");
  throw Error(error.hint(concat(remedy, remedy.empty() ? "" : "; ", "--even-if-refused writes it all the same")));
}

std::string served_dialect(const ServingArguments& arguments, const Planned& planned) {
  const auto names = dialects_that_load(arguments, planned);
  if (!names.empty()) return names.front();
  Error error(ErrorCode::unsupported, "no dialect holds these codes and loads in every program of --for");
  try {
    for (const auto& note : notes_of(predict(arguments, planned(loadable[0])))) error.detail(note);
  } catch (const Error& why) {
    if (why.code() != ErrorCode::unsupported) throw;
    error.detail(why.summary());
  }
  throw Error(error.hint("--scheme int4-g128-f16 is what all servers load; w4q list --servers has what each takes"));
}

}  // namespace w4q::app
