#include "quantize/steps.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"
#include "core/text.h"

namespace w4q::quantize {
namespace {

constexpr std::string_view arrow = " → ";

struct Preset {
  std::string_view name, kbit, rotated, trellis, exl3, integer, floats;
};

// Without activations a learned table fits the weights better and, at few bits, the model no better. Blocks of 128
// measured best (docs/notes/quality.md); other programs' integer checkpoints have no place for a rotation.
constexpr Preset presets[] = {
    {"fast", "search", "search", "rotate128", "none", "clip", "search"},
    {"good", "lloyd+search → feedback → sweeps", "search → feedback → sweeps → norms", "rotate128 → feedback → norms",
     "feedback → norms", "clip → feedback → sweeps", "search → feedback → sweeps"},
    {"best", "awq → rotate128 → lloyd+search → asym → feedback → sweeps → distill",
     "awq → search → asym → feedback → sweeps → norms → distill", "awq → rotate128 → asym → feedback → norms → distill",
     "asym → feedback → norms → distill", "awq → clip → asym → feedback → sweeps → distill",
     "awq → search → asym → feedback → sweeps → distill"},
    {"max", "awq → rotate128 → lloyd+search → asym → feedback → feedback2 → sweeps → distill",
     "awq → search → asym → feedback → feedback2 → sweeps → norms → distill",
     "awq → rotate128 → asym → feedback → feedback2 → sweeps → norms → distill", "asym → feedback → norms → distill",
     "awq → clip → asym → feedback → feedback2 → sweeps → distill",
     "awq → search → asym → feedback → feedback2 → sweeps → distill"},
};

std::string_view trimmed(std::string_view text) {
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

/// The names between the separators; "+" joins steps that alternate.
std::vector<std::string_view> names_of(std::string_view text) {
  std::vector<std::string_view> names;
  while (true) {
    size_t end = text.size(), length = 0;
    for (const std::string_view separator : {"→", "->", ",", "+"}) {
      const size_t found = text.find(separator);
      if (found >= end) continue;
      end = found;
      length = separator.size();
    }
    names.push_back(trimmed(text.substr(0, end)));
    if (length == 0) return names;
    text.remove_prefix(end + length);
  }
}

[[noreturn]] void refuse(std::string_view name, std::string_view why) {
  throw Error(ErrorCode::bad_argument, concat("step \"", printable(name), "\": ", why))
      .hint(
          "steps are, in this order: fold → awq → rotate128 → lloyd+search → asym → feedback → feedback2 → sweeps → "
          "distill; integers have clip instead of rotate128 and lloyd+search, the rotated family search and, behind "
          "sweeps, norms; trellises rotate128 → asym → feedback → feedback2 → sweeps → norms → distill, "
          "exl3 asym → feedback → norms → distill");
}

int64_t parse_block(std::string_view name, const StepRow& row) {
  const std::string_view digits = name.substr(row.name.size());
  int64_t block = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), block);
  const bool fits = error == std::errc{} && end == digits.data() + digits.size() &&
                    std::ranges::find(row.blocks, block) != row.blocks.end();
  if (!fits) refuse(name, "rotations have blocks of 32, 64, 128 or 256");
  return block;
}

Step parse_step(std::string_view name) {
  for (const StepRow& row : step_registry()) {
    if (row.blocks.empty() && name == row.name) return {row.kind};
    if (!row.blocks.empty() && name.starts_with(row.name)) return {row.kind, parse_block(name, row)};
  }
  refuse(name, "no such step");
}

}  // namespace

const StepRow& step_row(StepKind kind) noexcept { return *std::ranges::find(step_registry(), kind, &StepRow::kind); }

const StepRow* step_of_method(std::string_view name) noexcept {
  const auto row = std::ranges::find(step_registry(), name, &StepRow::name);
  return row == step_registry().end() || row->method.empty() ? nullptr : &*row;
}

Steps::Steps(std::initializer_list<Step> steps) {
  for (const Step& step : steps) add(step);
}

Step* Steps::find(StepKind kind) noexcept {
  const auto found = std::ranges::find(list_, kind, &Step::kind);
  return found == list_.end() ? nullptr : &*found;
}

const Step* Steps::find(StepKind kind) const noexcept { return const_cast<Steps*>(this)->find(kind); }

void Steps::add(const Step& step) {
  remove(step.kind);
  list_.insert(std::ranges::lower_bound(list_, step.kind, {}, &Step::kind), step);
  const auto& with = step_row(step.kind).with;
  if (with && !has(*with)) add({*with});
}

void Steps::add(const Steps& steps) {
  for (const Step& step : steps) add(step);
}

void Steps::remove(StepKind kind) {
  std::erase_if(list_, [&](const Step& step) { return step.kind == kind; });
}

bool Steps::any(bool StepRow::*flag) const noexcept {
  return std::ranges::any_of(list_, [&](const Step& step) { return step_row(step.kind).*flag; });
}

Steps Steps::without(bool StepRow::*flag) const {
  Steps result = *this;
  std::erase_if(result.list_, [&](const Step& step) { return step_row(step.kind).*flag; });
  return result;
}

bool Steps::awq_clips() const noexcept {
  const Step* awq = find(StepKind::awq);
  return awq != nullptr && awq->clip && !has(StepKind::feedback) && !any(&StepRow::searches);
}

std::optional<uint64_t> Steps::fold_seed() const noexcept {
  const Step* fold = find(StepKind::fold);
  return fold == nullptr ? std::nullopt : fold->seed;
}

std::string to_string(const Steps& steps) {
  std::string text;
  bool searches = false;
  for (const Step& step : steps) {
    const StepRow& row = step_row(step.kind);
    if (step.block == formats::whole_row) continue;
    if (!text.empty()) text += searches && row.searches ? "+" : arrow;
    text += row.name;
    if (!row.blocks.empty()) text += concat(step.block);
    searches = row.searches;
  }
  return text.empty() ? "none" : text;
}

Steps parse_steps(std::string_view text) {
  Steps steps;
  if (trimmed(text) == "none") return steps;
  const Step* last = nullptr;
  for (const auto name : names_of(text)) {
    const Step step = parse_step(name);
    if (last != nullptr && step.kind == last->kind) refuse(name, "is given twice");
    if (last != nullptr && step.kind < last->kind) refuse(name, "comes too late");
    steps.add(step);
    last = steps.find(step.kind);
  }
  check_complete(steps);
  return steps;
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : presets) names.emplace_back(preset.name);
  return names;
}

Steps preset_steps(std::string_view name, const formats::Scheme& scheme) {
  const Preset* preset = std::ranges::find(presets, name, &Preset::name);
  ensure(preset != std::end(presets), "preset_steps: no such preset");
  switch (scheme.family) {
    case formats::SchemeFamily::kbit:
      return parse_steps(preset->kbit);
    case formats::SchemeFamily::rotated:
      return parse_steps(preset->rotated);
    case formats::SchemeFamily::trellis:
      return parse_steps(preset->trellis);
    case formats::SchemeFamily::exl3:
      return parse_steps(preset->exl3);
    case formats::SchemeFamily::small_float:
    case formats::SchemeFamily::lut:
      return parse_steps(preset->floats);
    default:
      return parse_steps(preset->integer);
  }
}

void check_complete(const Steps& steps) {
  for (const Step& step : steps) {
    const StepRow& row = step_row(step.kind);
    if (!row.behind || steps.has(*row.behind)) continue;
    const StepRow& before = step_row(*row.behind);
    throw Error(ErrorCode::bad_argument,
                concat("step \"", row.name, "\" goes on from what \"", before.name, "\" made, which is missing"))
        .hint(concat("add ", before.option, ", or \"", before.name, "\" before it in a recipe"));
  }
}

void check_steps(const Steps& steps, const formats::Scheme& scheme, std::string_view refusal, std::string_view hint) {
  for (const Step& step : steps) {
    const StepRow& row = step_row(step.kind);
    std::string why;
    if (!row.of_quantizer || row.accepts(scheme, &why)) continue;
    throw Error(ErrorCode::bad_argument, concat(refusal, why)).hint(hint);
  }
}

}  // namespace w4q::quantize
