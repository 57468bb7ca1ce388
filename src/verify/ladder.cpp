#include "verify/ladder.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "device/choice.h"
#include "io/files.h"
#include "tokenizer/token_file.h"
#include "tokenizer/tokenizer.h"
#include "verify/convention.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

bool is_asked(const CheckOptions& options, const CheckRow& row) { return options.asked.contains(row.option); }

/// Whether there is all that a row without an option needs, of rows with one the options.
bool is_due(const CheckRow& row, CheckContext& context) {
  if (!row.option.empty() && !is_asked(context.options(), row)) return false;
  const Needs& needs = row.needs;
  return (!needs.base || context.options().has_base()) && (!needs.text || context.options().has_text()) &&
         (!needs.foreign || context.foreign()) && (!needs.packed || !context.candidate().quantization.linears.empty());
}

[[noreturn]] void refuse(const std::string& what, const std::string& hint) {
  throw Error(ErrorCode::bad_argument, what).hint(hint);
}

void check_limit(const CheckOptions& options, const CheckRow& row, const Limit& limit) {
  if (!options.limits.contains(limit.option)) return;
  if (!row.option.empty() && !is_asked(options, row)) {
    refuse(concat(limit.option, " belongs to ", row.option),
           concat(row.option, row.value.empty() ? "" : " ", row.value));
  }
  if ((limit.base && !options.has_base()) || (row.needs.text && !options.has_text())) {
    refuse(concat(limit.option, limit.base ? " compares with a base" : " needs a text"),
           concat(row.needs.text ? "--ppl text.txt" : "", row.needs.text && limit.base ? " " : "",
                  limit.base ? "--base MODEL" : ""));
  }
}

}  // namespace

std::optional<double> CheckContext::limit(std::string_view option) const {
  const auto found = options_.limits.find(option);
  return found == options_.limits.end() ? std::nullopt : std::optional(found->second);
}

bool CheckContext::foreign() {
  if (!foreign_) foreign_ = is_foreign_checkpoint(options_.model);
  return *foreign_;
}

const io::Json& CheckContext::config() {
  if (!config_) config_ = io::read_json(options_.model / "config.json");
  return *config_;
}

const io::Checkpoint& CheckContext::tensors() {
  if (!tensors_) tensors_ = io::Checkpoint::open(options_.model, options_.residual);
  return *tensors_;
}

const OpenCheckpoint& CheckContext::candidate() {
  if (!candidate_) {
    model::require_folder(options_.model);
    const io::Json& json = config();
    candidate_ = open_checkpoint(options_.model, json, tensors());
  }
  return *candidate_;
}

const OpenCheckpoint& CheckContext::stored_base() {
  if (!stored_base_) stored_base_ = open_checkpoint(options_.base);
  return *stored_base_;
}

const OpenCheckpoint& CheckContext::base() {
  if (!folded_base_) folded_base_ = fold_like(stored_base(), config(), options_.model.string());
  return *folded_base_;
}

const model::Model& CheckContext::model(model::Planes planes) {
  const auto found = models_.find(planes);
  return found != models_.end() ? found->second
                                : models_.emplace(planes, load_model(candidate(), planes)).first->second;
}

const model::Model& CheckContext::base_model(model::Planes planes) {
  const auto found = base_models_.find(planes);
  if (found != base_models_.end()) return found->second;
  return base_models_.emplace(planes, load_model(stored_base(), planes)).first->second;
}

const std::vector<int32_t>& CheckContext::ids() {
  if (ids_) return *ids_;
  ids_ = options_.ids.empty() ? tokenizer::Tokenizer::open(options_.model).encode(io::read_file(options_.text), false)
                              : tokenizer::read_ids(options_.ids, candidate().model.vocab_size);
  return *ids_;
}

void Findings::note(const std::string& what) {
  text += "note: " + what + "\n";
  json["notes"].push_back(what);
}

void Findings::add(const std::string& key, const std::string& table, io::Json values) {
  text += table + "\n";
  json[key] = std::move(values);
}

std::span<const CheckRow> ladder() {
  static const std::vector<CheckRow> rows = [] {
    std::vector<CheckRow> made;
    for (const auto make : rungs) made.push_back(make());
    return made;
  }();
  return rows;
}

void check_needs(const CheckOptions& options) {
  for (const CheckRow& row : ladder()) {
    for (const Limit& limit : row.limits) check_limit(options, row, limit);
    if (!is_asked(options, row)) continue;
    if (row.needs.text && !options.has_text()) {
      refuse(concat(row.option, " needs a text"), "--ppl text.txt, or --ids file.u16");
    }
    if (row.needs.base && !options.has_base()) refuse(concat(row.option, " compares with a base"), "--base MODEL");
  }
}

bool needs_gpu(const CheckOptions& options) {
  return std::ranges::any_of(ladder(), [&](const CheckRow& row) { return row.needs.gpu && is_asked(options, row); });
}

void open_gpu(CheckOptions& options) {
  if (!needs_gpu(options)) return;
  std::vector<std::string> measuring;
  for (const CheckRow& row : ladder()) {
    if (row.needs.gpu) measuring.emplace_back(row.option);
  }
  if (options.device == "cpu") refuse(concat(join(measuring), " measure a GPU"), "--device cuda");
  options.gpu = device::open_gpu(options.device);
}

Findings climb(CheckContext& context) {
  Findings findings;
  for (const CheckRow& row : ladder()) {
    if (!is_due(row, context)) continue;
    row.run(context, findings);
    if (row.stops && !findings.checks.passed()) break;
  }
  findings.text += findings.checks.text() + (findings.checks.passed() ? "verified\n" : "verification FAILED\n");
  findings.json.update(findings.checks.json());
  return findings;
}

}  // namespace w4q::verify
