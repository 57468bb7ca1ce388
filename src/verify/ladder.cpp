#include "verify/ladder.h"

#include <algorithm>
#include <memory>
#include <set>

#include "checkpoint/low_precision.h"
#include "core/error.h"
#include "core/text.h"
#include "device/choice.h"
#include "io/files.h"
#include "model/experts_like.h"
#include "model/stored_sizes.h"
#include "ranks/ranks.h"
#include "tokenizer/token_file.h"
#include "tokenizer/tokenizer.h"
#include "verify/rungs.h"
#include "verify/sizes.h"

namespace w4q::verify {
namespace {

bool is_asked(const CheckOptions& options, const CheckRow& row) { return options.asked.contains(row.option); }

/// Whether there is all that a row without an option needs, of rows with one the options.
bool is_due(const CheckRow& row, CheckContext& context) {
  if (!row.option.empty() && !is_asked(context.options(), row)) return false;
  const Needs& needs = row.needs;
  return (!needs.base || context.holds_base()) && (!needs.text || context.options().has_text()) &&
         (!needs.foreign || context.foreign()) &&
         (!needs.packed || !context.candidate().folder.quantization.linears.empty());
}

[[noreturn]] void refuse(const std::string& what, const std::string& hint) {
  throw Error(ErrorCode::bad_argument, what).hint(hint);
}

void check_limit(const CheckOptions& options, const CheckRow& row, const Limit& limit) {
  if (!options.limits.contains(limit.option)) return;
  if (!row.option.empty() && !is_asked(options, row)) {
    refuse(concat(limit.option, " belongs to ", row.option),
           row.value.empty() ? std::string() : concat(row.option, " ", row.value));
  }
  if ((limit.base && !options.has_base()) || (row.needs.text && !options.has_text())) {
    refuse(concat(limit.option, limit.base ? " compares with a base" : " needs a text"),
           concat(row.needs.text ? "--ppl text.txt" : "", row.needs.text && limit.base ? " " : "",
                  limit.base ? "--base MODEL" : ""));
  }
}

/// `candidate` with the experts of those stacks in the stacks' place that the base has one by one, as small floats.
model::OpenedModel apart_like(model::OpenedModel candidate, const io::Checkpoint& base) {
  candidate = model::take_apart_like(std::move(candidate), base);
  if (candidate.apart.empty()) return candidate;
  std::set<std::string, std::less<>> stacks;
  for (const auto& stack : candidate.apart) stacks.insert(stack.name);
  const auto whole = std::make_shared<const io::Checkpoint>(std::move(candidate.folder.tensors));
  candidate.folder.tensors = io::Checkpoint::derive(whole, {}, whole->derivation(), stacks);
  return candidate;
}

/// What held, and what nothing was there to hold against: no checkpoint is simply right.
std::string verdict(CheckContext& context, const Findings& findings) {
  if (!findings.checks.passed()) return "verification FAILED\n";
  std::vector<std::string> held, missing;
  for (const Check& check : findings.checks.checks()) held.push_back(check.name);
  if (reads_headers_alone(context.options())) {
    return concat("verified: ", join(held), "; not checked: what the weights hold (leave out --for)\n");
  }
  const CheckOptions& options = context.options();
  if (!context.candidate().folder.quantization.linears.empty()) {
    held.emplace_back("decoder");
    if (!options.has_base()) missing.emplace_back("weights (no --base)");
    if (options.has_base() && !context.holds_base()) missing.emplace_back("weights (turned by transform_config)");
  }
  if (!options.has_text()) missing.emplace_back("perplexity (no --ppl)");
  if (!options.default_limits) missing.emplace_back("limits that are not given (--no-limits)");
  return concat("verified: ", join(held), missing.empty() ? "" : "; not checked: ", join(missing), "\n");
}

}  // namespace

std::optional<double> CheckContext::limit(std::string_view option) const {
  const auto found = options_.limits.find(option);
  return found == options_.limits.end() ? std::nullopt : std::optional(found->second);
}

bool CheckContext::foreign() {
  if (!foreign_) {
    const bool has_config = std::filesystem::exists(options_.model / "config.json");
    const auto stated = has_config ? checkpoint::stated_quantization(config(), options_.model) : std::nullopt;
    foreign_ = stated && stated->foreign &&
               (!checkpoint::is_low_precision(stated->json) || checkpoint::has_packed_floats(headers(), *stated));
  }
  return *foreign_;
}

bool CheckContext::holds_base() {
  if (!options_.has_base()) return false;
  if (!turned_) {
    const auto stated = checkpoint::stated_quantization(config(), options_.model);
    turned_ = stated && checkpoint::turns_weights(*stated);
  }
  return !*turned_;
}

const io::Json& CheckContext::config() {
  if (!config_) config_ = checkpoint::read_config_file(options_.model);
  return *config_;
}

const checkpoint::Folder& CheckContext::headers() {
  if (!headers_) headers_ = checkpoint::open_headers(options_.model, options_.residual);
  return *headers_;
}

checkpoint::Folder CheckContext::base_headers() const { return checkpoint::open_headers(options_.base); }

const model::OpenedModel& CheckContext::candidate() {
  if (!candidate_) {
    checkpoint::require_folder(options_.model);
    candidate_ = model::open_model(checkpoint::read_quantization(headers(), checkpoint::FloatForm::either));
    if (options_.has_base()) candidate_ = apart_like(std::move(*candidate_), stored_base().folder.tensors);
  }
  return *candidate_;
}

const model::OpenedModel& CheckContext::stored_base() {
  if (!stored_base_) stored_base_ = model::open_model(options_.base);
  return *stored_base_;
}

const model::OpenedModel& CheckContext::base() {
  if (!folded_base_) {
    // Of the config alone: the candidate may be too damaged to be opened.
    const auto rotations = model::read_folded_rotations(config(), options_.model.string());
    folded_base_ = model::fold_like(stored_base(), rotations);
    // Decoded weights are held against what a base of few bits stands for.
    const bool plain = !checkpoint::stated_quantization(config(), options_.model);
    const auto& packed = folded_base_->folder.quantization.linears;
    if (plain && !packed.empty()) folded_base_->folder = model::decoded(std::move(folded_base_->folder));
    if (!options_.given.empty()) {
      folded_base_ = model::text_alone(std::move(*folded_base_), candidate().config, left_out_);
    }
    if (folded_base_->config.architecture == nullptr) {
      folded_base_ = model::take_apart_like(std::move(*folded_base_), headers().tensors);
    }
    stack_base_alike();
    folded_base_ = model::untied_like(std::move(*folded_base_), headers().tensors);
  }
  return *folded_base_;
}

void CheckContext::stack_base_alike() {
  try {
    const model::OpenedModel& opened = candidate();
    folded_base_ = model::experts_like(std::move(*folded_base_), opened);
  } catch (const Error& error) {  // what cannot be read, the rungs that open it say
    if (error.code() == ErrorCode::internal) throw;
  }
}

const model::Model& CheckContext::model(model::Planes planes, const model::LayerStage& stage) {
  const auto key = std::pair(planes, stage.count());
  const auto found = models_.find(key);
  return found != models_.end() ? found->second
                                : models_.emplace(key, model::Model::of(candidate(), planes, stage)).first->second;
}

const model::Model& CheckContext::base_model(model::Planes planes, const model::LayerStage& stage) {
  const auto key = std::pair(planes, stage.count());
  const auto found = base_models_.find(key);
  if (found != base_models_.end()) return found->second;
  return base_models_.emplace(key, model::Model::of(stored_base(), planes, stage)).first->second;
}

const std::vector<int32_t>& CheckContext::ids() {
  if (ids_) return *ids_;
  if (!options_.ids.empty()) {
    ids_ = tokenizer::read_ids(options_.ids, candidate().config.vocab_size);
  } else if (!options_.chat.empty()) {
    ids_ = chat::encode_chats(options_.model, options_.chat);
  } else {
    ids_ = tokenizer::Tokenizer::open(options_.model).encode(io::read_file(options_.text), false);
  }
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

bool reads_headers_alone(const CheckOptions& options) {
  if (options.asked.empty() || options.has_base() || options.has_text()) return false;
  const auto rows = ladder();
  return std::ranges::all_of(options.asked, [&](const auto& asked) {
    const auto row = std::ranges::find(rows, asked.first, &CheckRow::option);
    return row != rows.end() && row->alone;
  });
}

void check_needs(const CheckOptions& options) {
  for (const CheckRow& row : ladder()) {
    for (const Limit& limit : row.limits) check_limit(options, row, limit);
    if (!is_asked(options, row)) continue;
    if (row.needs.text && !options.has_text()) {
      refuse(concat(row.option, " needs a text"), "--ppl text.txt, --chat chats.jsonl, or --ids file.u16");
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

namespace {

/// What cannot be opened has none: then a check has said why.
void add_sizes(CheckContext& context, Findings& findings) {
  try {
    findings.json["sizes"] = sizes_json(context.candidate().folder);
  } catch (const Error&) {
    if (findings.checks.passed()) throw;
  }
}

/// Whether this rank has a part in a check. What was found before it is the first rank's: it decides whether the climb
/// has `ended`, and what an error means.
bool takes_part(const CheckRow& row, bool ended, Findings& findings) {
  auto& ranks = ranks::world();
  if (!row.shared || ranks.size() == 1) return ranks.first() && !ended;
  const std::string state = ranks.broadcast(ended ? "ended" : findings.checks.passed() ? "passed" : "failed");
  if (state == "failed" && !ranks.first()) findings.checks.add({"before", false, "the first rank found a fault", {}});
  return state != "ended";
}

}  // namespace

Findings climb(CheckContext& context) {
  Findings findings;
  bool holds = true, ended = false;
  const bool headers_alone = reads_headers_alone(context.options());
  for (const CheckRow& row : ladder()) {
    // Where the climb has ended, other ranks must still hear of it.
    if (ended && (!row.shared || ranks::world().size() == 1)) continue;
    if ((headers_alone && !row.alone) || !is_due(row, context)) continue;
    if (!takes_part(row, ended, findings)) continue;
    const auto before = static_cast<std::ptrdiff_t>(findings.checks.checks().size());
    try {
      row.run(context, findings);
    } catch (const Error& error) {
      if (findings.checks.passed()) throw;
      // What was found to be wrong before says why it cannot go on.
      findings.checks.add({std::string(row.name), false, "could not go on", {error.what()}});
      ended = true;
      continue;
    }
    const auto& checks = findings.checks.checks();
    holds = holds && (row.aside || std::all_of(checks.begin() + before, checks.end(), std::mem_fn(&Check::passed)));
    ended = row.stops && !holds;
  }
  if (!headers_alone) add_sizes(context, findings);
  findings.text += findings.checks.text() + verdict(context, findings);
  findings.json.update(findings.checks.json());
  return findings;
}

}  // namespace w4q::verify
