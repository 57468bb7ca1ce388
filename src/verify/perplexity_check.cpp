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
  if (context.options().has_base()) bases.push_back({&context.base_model(planes)});
  if (how.int8_activations) bases.push_back({&context.model(planes), how.kv});
  const model::Model* const candidates[] = {&context.model(planes)};
  return measure_perplexities(candidates, bases, context.ids(), how);
}

void judge(const PerplexityReport& report, const CheckContext& context, Report& checks) {
  checks.add({"perplexity",
              std::isfinite(report.perplexity()),
              concat(fixed(report.perplexity(), 4), " over ", report.scored, " tokens"),
              {}});
  if (const auto most = context.limit("--max-ppl-ratio")) {
    checks.add_threshold("perplexity ratio", report.ratio(), *most);
  }
  if (const auto most = context.limit("--max-kl")) checks.add_threshold("KL", report.base->kl.mean, *most);
}

void run(CheckContext& context, Findings& findings) {
  const PerplexityOptions how = how_to_decode(context);
  const model::Planes planes = model::planes_for(how.gpu.get(), how.int8_activations);
  const model::Model& candidate = context.model(planes);
  if (context.options().has_base()) context.base_model(planes);
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
          .run = run};
}

}  // namespace w4q::verify
