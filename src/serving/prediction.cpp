#include "serving/prediction.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"

namespace w4q::serving {
namespace {

bool any(const std::vector<Finding>& findings, Severity severity) {
  return std::ranges::any_of(findings, [&](const Finding& finding) { return finding.severity == severity; });
}

std::string names(const std::vector<std::string>& tensors) {
  constexpr size_t most = 5;
  std::vector<std::string> shown;
  for (const auto& tensor : tensors) {
    if (shown.size() < most) shown.push_back(printable(tensor));
  }
  std::string text = join(shown);
  if (tensors.size() > most) text += concat(" and ", tensors.size() - most, " more");
  return text;
}

}  // namespace

bool Prediction::loads() const { return !any(findings, Severity::refused); }

bool Prediction::right() const { return !any(findings, Severity::wrong); }

Prediction predict(const StoredModel& model, Program program) {
  Findings findings;
  std::vector<int> gpus;
  try {
    const AskedSchemes asked(model);
    const Question question{model, asked, program};
    for (const Rule& rule : rules()) {
      findings.of_rule(rule.id);
      if (rule.programs.has(program)) rule.check(question, findings);
      // Of a format that is refused as such there is no more to say.
      if (rule.id == "format" && !findings.empty()) return {program, {}, std::move(findings).take()};
    }
    gpus = tensor_parallel(question, findings);
  } catch (const Error& error) {
    // A list whose pattern is no expression ends the programs that read it, too.
    if (error.code() != ErrorCode::unsupported) throw;
    findings.of_rule("patterns");
    findings.add(Severity::refused, {}, model.place(), "expressions that can be read", error.summary(),
                 "mend the pattern");
  }
  Prediction prediction{program, std::move(gpus), std::move(findings).take()};
  std::ranges::stable_sort(prediction.findings, std::ranges::greater(), &Finding::severity);
  if (!prediction.loads()) prediction.tensor_parallel.clear();
  return prediction;
}

std::string verdict(const Prediction& prediction) {
  const ProgramRow& row = describe(prediction.program);
  std::string text = concat(row.package, ": ");
  if (!prediction.loads()) return text + "does not load";
  text += prediction.right() ? "loads" : "loads, and computes something else";
  if (prediction.tensor_parallel.empty()) return text;
  std::vector<std::string> gpus;
  for (const int number : prediction.tensor_parallel) gpus.push_back(concat(number));
  return concat(text, "; tensor parallel ", join(gpus));
}

std::string to_text(const Finding& finding) {
  std::string text = finding.severity == Severity::note ? "note: " : "";
  std::string where = names(finding.tensors);
  if (!finding.place.empty()) where += concat(where.empty() ? "" : " (", finding.place, where.empty() ? "" : ")");
  text += concat(where, where.empty() ? "" : ": ", finding.got, "; expected ", finding.expected);
  if (!finding.remedy.empty()) text += concat("; ", finding.remedy);
  return concat(text, " [", finding.rule, "]");
}

std::string to_text(const Prediction& prediction) {
  std::string text = verdict(prediction) + "\n";
  for (const Finding& finding : prediction.findings) text += concat("  ", to_text(finding), "\n");
  return text;
}

io::Json to_json(const Prediction& prediction) {
  const ProgramRow& row = describe(prediction.program);
  io::Json json = {{"program", row.name},
                   {"package", row.package},
                   {"loads", prediction.loads()},
                   {"right", prediction.right()},
                   {"tensor_parallel", prediction.tensor_parallel},
                   {"findings", io::Json::array()}};
  for (const Finding& finding : prediction.findings) {
    json["findings"].push_back({{"rule", finding.rule},
                                {"severity", to_string(finding.severity)},
                                {"tensors", finding.tensors},
                                {"place", finding.place},
                                {"expected", finding.expected},
                                {"got", finding.got},
                                {"remedy", finding.remedy}});
  }
  return json;
}

}  // namespace w4q::serving
