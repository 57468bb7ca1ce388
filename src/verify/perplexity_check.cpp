#include <cmath>
#include <vector>

#include "core/text.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

PerplexityOptions how_to_decode(CheckContext& context) {
  PerplexityOptions how = context.options().windows;
  if (context.options().choose_device) context.options().choose_device(how);
  if (context.options().gpu != nullptr) how.gpu = context.options().gpu;
  how.int8_activations = context.options().int8_activations;
  return how;
}

/// The candidate against the base, if there is one; with int8 activations also against itself: what they do alone.
std::vector<PerplexityReport> measure(CheckContext& context, const PerplexityOptions& how, model::Planes planes) {
  std::vector<BaseModel> bases;
  if (context.options().has_base()) bases.push_back({&context.base_model(planes, how.stage())});
  if (how.int8_activations) bases.push_back({&context.model(planes, how.stage()), how.kv});
  const model::Model* const candidates[] = {&context.model(planes, how.stage())};
  return measure_perplexities(candidates, bases, context.ids(), how);
}

/// Where no limit is given: far above what 2 bits with a scale a row and no calibration cost, which is a ratio of 195
/// and a KL of 5.4 nats. A uniform guess has a perplexity of the vocabulary's size; without a base it takes several
/// times as much to be called wrong, because that model reaches 3150.
constexpr double most_ratio = 1000, most_kl = 8, most_over_uniform = 8;

std::string perplexity_text(const PerplexityReport& report, std::optional<double> most) {
  return concat(fixed(report.perplexity(), 4), " over ", report.scored, " tokens",
                most ? concat(", more than ", most_over_uniform, " times that of a uniform guess, ", *most) : "");
}

void judge(const PerplexityReport& report, CheckContext& context, Report& checks) {
  const bool defaults = context.options().default_limits;
  const double uniform = static_cast<double>(context.candidate().config.vocab_size);
  Check check{"perplexity", std::isfinite(report.perplexity()), {}, {}};
  if (defaults && !report.base) {
    check.verdicts.push_back({"perplexity", report.perplexity(), most_over_uniform * uniform});
  }
  const bool absurd = !check.verdicts.empty() && !check.verdicts.front().passed();
  check.passed = check.passed && !absurd;
  check.detail = perplexity_text(report, absurd ? std::optional(uniform) : std::nullopt);
  // One that holds unasked is not worth a line.
  std::vector<Verdict> failed;
  const auto hold_unasked = [&](const char* name, std::string_view option, double value, double usual) {
    if (!report.base || context.limit(option) || !defaults) return;
    const Verdict verdict{name, value, usual};
    (verdict.passed() ? check.verdicts : failed).push_back(verdict);
  };
  hold_unasked("perplexity ratio", "--max-ppl-ratio", report.base ? report.ratio() : 0, most_ratio);
  hold_unasked("KL", "--max-kl", report.base ? report.base->kl.mean : 0, most_kl);
  checks.add(std::move(check));
  if (!report.base) return;
  for (const Verdict& verdict : failed) checks.add_threshold(verdict.of, verdict.value, verdict.limit);
  if (const auto most = context.limit("--max-ppl-ratio"))
    checks.add_threshold("perplexity ratio", report.ratio(), *most);
  if (const auto most = context.limit("--max-kl")) checks.add_threshold("KL", report.base->kl.mean, *most);
}

void run_perplexity(CheckContext& context, Findings& findings) {
  const PerplexityOptions how = how_to_decode(context);
  const model::Planes planes = model::planes_for(how.gpu.get(), how.int8_activations);
  const model::Model& candidate = context.model(planes, how.stage());
  if (context.options().has_base()) context.base_model(planes, how.stage());
  context.ids();
  if (const auto most = model::most_positions(candidate.config()); most && how.context > *most) {
    findings.note(concat("windows of ", how.context, " tokens, and the model was made for ", *most));
  }
  const auto reports = measure(context, how, planes);
  PerplexityReport report = reports.front();
  if (!context.options().has_base()) report.base.reset();
  findings.add("perplexity", to_text(report), to_json(report));
  if (how.int8_activations) {
    const PerplexityReport& beside = reports.back();
    findings.add("int8_activations", "int8 activations; the base is this model with 16-bit ones\n" + to_text(beside),
                 to_json(beside));
  }
  judge(report, context, findings.checks);
}

}  // namespace

CheckRow perplexity_check() {
  static constexpr Limit limits[] = {{"--max-ppl-ratio", "Fail when perplexity over the base's is more", true},
                                     {"--max-kl", "Fail when the mean KL to the base (nats per token) is more", true}};
  return {.name = "perplexity",
          .help = "full decode of a text, with a base both models in lock step",
          .limits = limits,
          .needs = {.text = true},
          .shared = true,
          .run = run_perplexity};
}

}  // namespace w4q::verify
