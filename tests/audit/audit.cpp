#include "audit/audit.h"

#include <algorithm>
#include <fstream>

#include "audit/sources.h"
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

std::string_view name_of(Way way) noexcept {
  constexpr std::string_view names[] = {"with digests", "with the base", "alone"};
  return names[static_cast<size_t>(way)];
}

fs::path Workshop::source(const std::string& name, bool other) {
  const fs::path folder = folder_ / concat("source-", name, other ? "-other" : "");
  if (!fs::exists(folder)) (other ? write_other_source : write_source)(name, folder, options_.text);
  return folder;
}

Specimen Workshop::make(const VariantRow& row) {
  const fs::path sound = folder_ / "sound", other = folder_ / "other", base = source(row.source, false);
  for (const auto& folder : {sound, other}) fs::remove_all(folder);
  row.make(base, sound);
  row.make(source(row.source, true), other);
  const auto as_stored = [](const fs::path& folder) {
    return model::open_model(checkpoint::open_folder(folder, true, checkpoint::FloatForm::either));
  };
  Specimen specimen{&row, base, as_stored(sound), as_stored(other), {}, {}, {}};
  specimen.copy = CheckpointCopy::of(specimen.sound.folder);
  specimen.other_copy = CheckpointCopy::of(specimen.other.folder);
  specimen.digests = io::read_file(sound / checkpoint::digests_file);
  for (const Answer& answer : judge(specimen, specimen.copy).answers) {
    ensure(!answer.named, concat(row.name, " is sound, but ", answer.rung, " says: ", answer.detail));
  }
  return specimen;
}

Outcome Workshop::judge(const Specimen& specimen, const CheckpointCopy& copy) {
  const fs::path folder = folder_ / "damaged";
  copy.write(folder);
  const fs::path digests = folder / checkpoint::digests_file;
  std::ofstream(digests, std::ios::binary) << specimen.digests;
  Outcome outcome;
  for (const Way way : ways) {
    outcome.answers[static_cast<size_t>(way)] = ask(options_for(folder, specimen.base, way, options_), way);
    if (way == Way::digests) fs::remove(digests);
  }
  outcome.changes_values =
      outcome.answers[static_cast<size_t>(Way::alone)].named || !means_the_same(folder, specimen, copy);
  return outcome;
}

std::optional<Outcome> Workshop::seed(const Specimen& specimen, const FaultRow& fault) {
  Subject subject(specimen, concat(fault.group, fault.kind));
  if (!fault.damage(subject) || same(subject.copy, specimen.copy)) return std::nullopt;
  return judge(specimen, subject.copy);
}

std::array<Answer, ways.size()> Workshop::verify_sound(const VariantRow& row) {
  const fs::path folder = folder_ / "sound", base = source(row.source, false);
  fs::remove_all(folder);
  row.make(base, folder);
  std::array<Answer, ways.size()> answers;
  for (const Way way : ways) {
    answers[static_cast<size_t>(way)] = ask(options_for(folder, base, way, options_), way);
    if (way == Way::digests) fs::remove(folder / checkpoint::digests_file);
  }
  return answers;
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

double Tally::share(Way way) const {
  int64_t named = 0;
  for (const Row& row : rows_) named += row.named[static_cast<size_t>(way)];
  return static_cast<double>(named) / static_cast<double>(faults(true));
}

namespace {

std::string percent(int64_t part, int64_t all) {
  return all == 0 ? "–" : concat(fixed(100.0 * static_cast<double>(part) / static_cast<double>(all), 0), " %");
}

}  // namespace

std::string Tally::table() const {
  std::string text = "| fault | seeded | with digests | with the base | alone |\n|---|---|---|---|---|\n";
  for (const Row& row : rows_) {
    text += concat("| ", row.group, ": ", row.kind, " | ", row.seeded);
    for (const Way way : ways) {
      const auto at = static_cast<size_t>(way);
      std::vector<std::string> rungs;
      for (const auto& [rung, count] : row.rungs[at]) rungs.push_back(rung);
      text += concat(" | ", percent(row.named[at], row.seeded));
      if (way != Way::digests && !rungs.empty()) text += concat(" ", join(rungs));
    }
    text += " |\n";
  }
  return text;
}

std::string Tally::summary() const {
  struct Group {
    std::string name;
    int64_t kinds = 0, seeded = 0;
    std::array<int64_t, ways.size()> named{};
  };
  std::vector<Group> groups;
  Group all{.name = "all"};
  for (const Row& row : rows_) {
    auto group = std::ranges::find(groups, row.group, &Group::name);
    if (group == groups.end()) group = groups.insert(group, Group{.name = row.group});
    for (Group* each : {&*group, &all}) {
      ++each->kinds;
      each->seeded += row.seeded;
      for (const Way way : ways) each->named[static_cast<size_t>(way)] += row.named[static_cast<size_t>(way)];
    }
  }
  groups.push_back(all);
  std::string text = "| faults | kinds | seeded | with digests | with the base | alone |\n|---|---|---|---|---|---|\n";
  for (const Group& group : groups) {
    text += concat("| ", group.name, " | ", group.kinds, " | ", group.seeded);
    for (const Way way : ways) text += concat(" | ", percent(group.named[static_cast<size_t>(way)], group.seeded));
    text += " |\n";
  }
  return text + concat(faults(false), " more change nothing that is read\n");
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
