#include "audit/audit.h"

#include <algorithm>
#include <fstream>

#include "checkpoint/digests.h"
#include "core/error.h"
#include "core/text.h"
#include "io/files.h"
#include "kernels/linear/linear.h"
#include "model/model.h"
#include "verify/ladder.h"
#include "verify/rungs.h"

namespace w4q::audit {
namespace {

namespace fs = std::filesystem;

verify::CheckOptions options_for(const fs::path& folder, const fs::path& base, Way way, const Options& options) {
  verify::CheckOptions result;
  result.model = folder;
  if (way == Way::base) result.base = base;
  if (options.text && way != Way::digests) {
    result.text = test::testdata() / "w4q-llama-tiny/own/selfgen.txt";
    result.windows.context = 64;
    result.windows.max_windows = 4;
    result.device = "cpu";
  }
  return result;
}

Answer answer_of(const verify::Report& report) {
  const auto failed = std::ranges::find(report.checks(), false, &verify::Check::passed);
  if (failed == report.checks().end()) return {};
  return {true, failed->name, failed->faults.empty() ? failed->detail : failed->faults.front()};
}

Answer ask(const verify::CheckOptions& options, Way way) {
  try {
    verify::CheckContext context(options);
    if (way != Way::digests) return answer_of(verify::climb(context).checks);
    verify::Findings findings;
    verify::digests_check().run(context, findings);
    return answer_of(findings.checks);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::internal) throw;
    return {true, "open", error.summary()};
  }
}

/// All that a decoder reads, as it reads it.
std::vector<std::vector<float>> all_values(const fs::path& folder) {
  const auto model = model::Model::open(folder);
  std::vector<std::vector<float>> all;
  const auto add = [&](const kernels::LinearWeight& weight) {
    std::vector<float> values(static_cast<size_t>(weight.n * weight.k));
    kernels::decode_rows(weight, 0, weight.n, {values.data(), weight.n, weight.k});
    all.push_back(std::move(values));
    all.push_back(weight.bias);
  };
  for (const auto& layer : model.layers()) {
    all.insert(all.end(), layer.norms.begin(), layer.norms.end());
    for (const auto& linear : layer.linears) add(linear);
  }
  all.push_back(model.final_norm());
  add(model.embeddings());
  add(model.head());
  return all;
}

/// Whether the damaged folder is the sound one to whoever decodes it.
bool means_the_same(const fs::path& damaged, const Specimen& specimen, const CheckpointCopy& copy) {
  const auto without = [](io::Json config) {
    config.erase("quantization_config");
    return nlohmann::json(config);
  };
  if (copy.files != specimen.copy.files || !copy.further_files.empty()) return false;
  try {
    return without(io::read_json(damaged / "config.json")) == without(specimen.copy.config) &&
           all_values(damaged) == all_values(specimen.sound.folder.path);
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

fs::path Workshop::source(const std::string& name, bool other) {
  const fs::path folder = folder_ / concat("source-", name, other ? "-other" : "");
  if (!fs::exists(folder)) write_source(name, other, folder);
  return folder;
}

Specimen Workshop::make(const VariantRow& row) {
  const fs::path sound = folder_ / "sound", other = folder_ / "other", base = source(row.source, false);
  for (const auto& folder : {sound, other}) fs::remove_all(folder);
  row.make(base, sound);
  row.make(source(row.source, true), other);
  Specimen specimen{&row, base, model::open_model(sound), model::open_model(other), {}, {}, {}};
  specimen.copy = CheckpointCopy::of(specimen.sound.folder);
  specimen.other_copy = CheckpointCopy::of(specimen.other.folder);
  specimen.digests = io::read_file(sound / checkpoint::digests_file);
  return specimen;
}

Answer Workshop::verify(const fs::path& folder, const fs::path& base, Way way, const Options& options) const {
  return ask(options_for(folder, base, way, options), way);
}

Outcome Workshop::judge(const Specimen& specimen, const CheckpointCopy& copy, const Options& options) {
  const fs::path folder = folder_ / "damaged";
  copy.write(folder);
  const fs::path digests = folder / checkpoint::digests_file;
  std::ofstream(digests, std::ios::binary) << specimen.digests;
  Outcome outcome;
  for (const Way way : ways) {
    outcome.answers[static_cast<size_t>(way)] = verify(folder, specimen.base, way, options);
    if (way == Way::digests) fs::remove(digests);
  }
  outcome.changes_values =
      outcome.answers[static_cast<size_t>(Way::alone)].named || !means_the_same(folder, specimen, copy);
  return outcome;
}

std::optional<Outcome> Workshop::seed(const Specimen& specimen, const FaultRow& fault, const Options& options) {
  Subject subject(specimen, concat(fault.group, fault.kind));
  if (!fault.damage(subject) || same(subject.copy, specimen.copy)) return std::nullopt;
  return judge(specimen, subject.copy, options);
}

std::array<Answer, ways.size()> Workshop::verify_sound(const Specimen& specimen, const Options& options) {
  return judge(specimen, specimen.copy, options).answers;
}

// ---- what comes of it -----------------------------------------------------------------------------------------------

void Tally::add(const FaultRow& fault, const VariantRow& variant, const Outcome& outcome) {
  auto row = std::ranges::find_if(
      rows_, [&](const Row& each) { return each.kind == fault.kind && each.group == fault.group; });
  if (row == rows_.end())
    row = rows_.insert(
        row, Row{.group = std::string(fault.group), .kind = std::string(fault.kind), .rungs = {}, .missed = {}});
  if (!outcome.changes_values) {
    ++row->silent;
    return;
  }
  ++row->seeded;
  for (const Way way : ways) {
    const auto at = static_cast<size_t>(way);
    const Answer& answer = outcome.answers[at];
    if (answer.named) {
      ++row->named[at];
      ++row->rungs[at][answer.rung];
    } else {
      row->missed[at].push_back(variant.name);
    }
  }
}

int64_t Tally::faults(bool of_values) const {
  int64_t sum = 0;
  for (const Row& row : rows_) sum += of_values ? row.seeded : row.silent;
  return sum;
}

int64_t Tally::named(Way way) const {
  int64_t sum = 0;
  for (const Row& row : rows_) sum += row.named[static_cast<size_t>(way)];
  return sum;
}

std::string Tally::table() const {
  std::string text = "| fault | seeded | with digests | with the base | alone |\n|---|---|---|---|---|\n";
  for (const Row& row : rows_) {
    text += concat("| ", row.group, ": ", row.kind, " | ", row.seeded);
    if (row.silent > 0) text += concat(" (+", row.silent, " that change nothing)");
    for (const Way way : ways) {
      const auto at = static_cast<size_t>(way);
      std::vector<std::string> rungs;
      for (const auto& [rung, count] : row.rungs[at]) rungs.push_back(rung);
      text += concat(" | ", row.seeded == 0 ? 0 : row.named[at] * 100 / row.seeded, " %");
      if (way != Way::digests && !rungs.empty()) text += concat(": ", join(rungs));
    }
    text += " |\n";
  }
  text += concat("| all | ", faults(true));
  for (const Way way : ways) text += concat(" | ", fixed(100 * share(way), 1), " %");
  return text + " |\n";
}

std::string Tally::misses(Way way) const {
  std::string text;
  for (const Row& row : rows_) {
    const auto& missed = row.missed[static_cast<size_t>(way)];
    if (!missed.empty())
      text +=
          concat(row.group, ": ", row.kind, " (", missed.size(), " of ", row.seeded, "): ", join(missed, "; "), "\n");
  }
  return text;
}

}  // namespace w4q::audit
