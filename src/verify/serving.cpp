// --for: whether programs load it, by rules of serving/.
#include <algorithm>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "serving/prediction.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

constexpr std::string_view option = "--for", parallel_option = "--tensor-parallel";

/// A number of GPUs that was asked for is one that it must spread over.
void require_parallel(CheckContext& context, const serving::Prediction& prediction, Check& check) {
  const auto wanted = context.limit(parallel_option);
  const auto& possible = prediction.tensor_parallel;
  if (!wanted || !serving::describe(prediction.program).splits || !check.passed) return;
  const auto gpus = static_cast<int>(*wanted);
  if (std::ranges::find(possible, gpus) != possible.end()) return;
  check.passed = false;
  check.faults.push_back(
      concat("tensor parallel ", gpus, ": cuts heads, groups or words; ", serving::verdict(prediction)));
}

Check check_of(CheckContext& context, const serving::Prediction& prediction) {
  Check check{concat("loads in ", serving::describe(prediction.program).name),
              prediction.loads() && prediction.right(),
              serving::verdict(prediction),
              {}};
  for (const auto& finding : prediction.findings) {
    if (finding.severity != serving::Severity::note) check.faults.push_back(serving::to_text(finding));
  }
  require_parallel(context, prediction, check);
  return check;
}

/// Of all programs none needs to load it but one, and none may load it wrong.
Check check_of_all(const std::vector<serving::Prediction>& predictions) {
  std::vector<std::string> loading, wrong;
  for (const auto& prediction : predictions) {
    const std::string name(serving::describe(prediction.program).name);
    if (prediction.loads()) (prediction.right() ? loading : wrong).push_back(name);
  }
  Check check{
      "loads", !loading.empty() && wrong.empty(), concat("in ", loading.empty() ? "no program" : join(loading)), {}};
  if (loading.empty()) check.faults.emplace_back("no program loads it");
  for (const auto& name : wrong) check.faults.push_back(name + " loads it, and computes something else");
  return check;
}

void run_serving(CheckContext& context, Findings& findings) {
  const auto& options = context.options();
  const std::string& list = context.value(option);
  const auto model = serving::StoredModel::open(options.given.empty() ? options.model : options.given);
  std::vector<serving::Prediction> predictions;
  io::Json json = io::Json::array();
  for (const auto program : serving::parse_programs(list)) {
    predictions.push_back(serving::predict(model, program));
    json.push_back(serving::to_json(predictions.back()));
  }
  findings.json["serving"] = std::move(json);
  const bool all = list.find("all") != std::string::npos;
  for (const auto& prediction : predictions) {
    const auto name = serving::describe(prediction.program).name;
    if (all) {
      findings.text += serving::to_text(prediction);
      continue;
    }
    for (const auto& finding : prediction.findings) {
      if (finding.severity == serving::Severity::note) findings.note(concat(name, ": ", serving::to_text(finding)));
    }
    findings.checks.add(check_of(context, prediction));
  }
  if (all) findings.checks.add(check_of_all(predictions));
}

constexpr Limit limits[] = {
    {.option = parallel_option, .help = "With --for: the number of GPUs that it must spread over"}};

}  // namespace

CheckRow serving_check() {
  return {.name = "serving",
          .option = option,
          .value = "PROGRAM",
          .help =
              "Whether vllm, sglang, transformers, llama.cpp, trt-llm or mlx load it, or all, by its headers; several "
              "may be asked; alone, nothing else is checked",
          .several = true,
          .alone = true,
          .limits = limits,
          .aside = true,
          .run = run_serving};
}

}  // namespace w4q::verify
