// The steps of a run beyond rounding each weight by itself (docs/quality.md): which, in their order, with what
// parameters. One table has a row for each.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/rotation.h"
#include "formats/scheme.h"

namespace w4q::quantize {

struct QuantizeOptions;

/// In the order in which they apply.
enum class StepKind {
  fold,              ///< rotations are folded into the model
  awq,               ///< scales of input channels
  rotate,            ///< weights are rounded in a rotated basis of the inputs
  learn_table,       ///< tables are learned
  search_scales,     ///< scales of blocks are searched
  clip,              ///< ranges of groups are searched
  asymmetric,        ///< targets for what the layers before, quantized, hand on
  feedback,          ///< errors are fed back along k
  feedback_outputs,  ///< and along n, by what errors of outputs cost the loss
  sweeps,            ///< what feedback made is changed block by block and code by code while its error falls
  fit_norms,         ///< norms of the scheme by least squares of the outputs
  distill_norms,     ///< norms of the model by what it predicts
};

/// A step and its parameters; those of other kinds mean nothing to it.
struct Step {
  StepKind kind;
  int64_t block = 1;                 ///< rotate: width of the blocks, or formats::whole_row
  std::optional<uint64_t> seed = 0;  ///< fold, rotate: of the signs; rotate alone may have none: all are plus
  bool folded = false;               ///< rotate: only inputs for which no rotation could be folded into the model
  bool clip = true;                  ///< awq: clips too
  bool input_scales = true;  ///< awq: scales that cannot be folded are stored; otherwise such groups stay unscaled
  double damping = 0.01;     ///< feedback: of the Gram matrix, as a share of its mean diagonal
  int64_t rounds = 150;      ///< distill: how often norms are moved

  bool operator==(const Step&) const = default;
};

struct StepRow {
  StepKind kind;
  std::string_view name;                 ///< "awq", as recipes spell it
  std::string_view option = {};          ///< of `w4q quantize`; empty: a value of another option asks for it
  std::string_view help = {};            ///< of that option
  std::string_view method = {};          ///< what `--method` with the name does; empty: it is none
  std::span<const int64_t> blocks = {};  ///< the widths that stand behind name and option
  bool of_model = false;                 ///< changes the model before it is quantized, whatever else is done
  bool of_quantizer = false;             ///< QuantizerRow::run does it; others are for whoever has the layer
  bool searches = false;                 ///< tries what errors come out, which calibration weighs
  bool needs_statistics = false;         ///< wants activations from a calibration run
  bool needs_text = false;               ///< … and goes over the text itself, which statistics cannot stand in for
  bool needs_gradients = false;          ///< … and asks for a way back through the model
  std::optional<StepKind> with = {};     ///< brings that step along, being a kind of it
  std::optional<StepKind> behind = {};   ///< goes on from what that step made, and means nothing without it
  /// Whether it means something to a scheme; otherwise `why`, if not null, gets what the scheme has not.
  bool (*accepts)(const formats::Scheme& scheme, std::string* why);
  /// Appends what the reports say of the step.
  void (*describe)(const Step& step, const QuantizeOptions& options, std::vector<std::string>& words);
};

/// In the order in which they apply.
std::span<const StepRow> step_registry() noexcept;
const StepRow& step_row(StepKind kind) noexcept;
/// The step that `--method name` asks for; null where that is a quantizer's name or none.
const StepRow* step_of_method(std::string_view name) noexcept;

/// At most one step of a kind, in the order in which they apply.
class Steps {
 public:
  Steps() = default;
  Steps(std::initializer_list<Step> steps);

  auto begin() const noexcept { return list_.begin(); }
  auto end() const noexcept { return list_.end(); }
  bool empty() const noexcept { return list_.empty(); }
  const Step* find(StepKind kind) const noexcept;
  Step* find(StepKind kind) noexcept;
  bool has(StepKind kind) const noexcept { return find(kind) != nullptr; }
  /// Takes the place of one of its kind; brings along what it does not go without.
  void add(const Step& step);
  void add(const Steps& steps);
  void remove(StepKind kind);

  /// Whether the rows of any step have this flag.
  bool any(bool StepRow::*flag) const noexcept;
  /// Those whose rows have it not.
  Steps without(bool StepRow::*flag) const;
  /// AWQ's clips are searched, which is so where nothing behind it chooses the ranges of blocks itself.
  bool awq_clips() const noexcept;
  /// Of the rotations that are folded into the model; nothing: none are.
  std::optional<uint64_t> fold_seed() const noexcept;

  bool operator==(const Steps&) const = default;

 private:
  std::vector<Step> list_;
};

/// "fold → awq → rotate128 → lloyd+search → feedback"; integers have "clip" instead of lloyd and search; "none". A
/// rotation of whole rows comes with its scheme and has no name.
std::string to_string(const Steps& steps);
/// The inverse; "->" and "," separate too. Throws bad_argument for an unknown step, one given twice, another
/// order, or one that goes on from a step which is missing.
Steps parse_steps(std::string_view text);

/// "fast", "good", "best" and "max": names for the steps of docs/quality.md.
std::vector<std::string> preset_names();
Steps preset_steps(std::string_view name, const formats::Scheme& scheme);

/// Throws bad_argument for a step that goes on from another which is missing.
void check_complete(const Steps& steps);

/// Throws bad_argument, `refusal` and what the scheme has not, for a step of quantizers that it does not accept.
void check_steps(const Steps& steps, const formats::Scheme& scheme, std::string_view refusal, std::string_view hint);

}  // namespace w4q::quantize
