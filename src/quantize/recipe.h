// Which tensor gets which scheme: ordered glob → scheme rules, the first match wins, no match keeps 16 bit; and which
// steps are taken beyond rounding each weight by itself.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/scheme.h"

namespace w4q::quantize {

struct RecipeRule {
  std::string glob;                       ///< against the module path ("model.layers.0.mlp.up_proj"); * crosses dots
  std::optional<formats::Scheme> scheme;  ///< nothing: keep 16 bit
  std::vector<formats::Scheme> residual = {};  ///< further passes, each of what those before it left over
};

/// The steps of docs/quality.md, in the order in which they apply.
struct Steps {
  bool fold = false;      ///< rotations are folded into the model
  bool awq = false;       ///< scales of input channels
  int64_t rotate = 0;     ///< width of the blocks of the inputs' rotation; 0: none
  bool learn = false;     ///< kbit: tables are learned
  bool search = false;    ///< kbit: scales of blocks are searched
  bool clip = false;      ///< integers: ranges of groups are searched
  bool feedback = false;  ///< errors are fed back along k
  bool norms = false;     ///< rotated: norms by least squares of the outputs

  bool operator==(const Steps&) const = default;
};

inline constexpr std::array<int64_t, 4> rotation_widths{32, 64, 128, 256};

/// "fold → awq → rotate128 → lloyd+search → feedback"; integers have "clip" instead of lloyd and search; "none".
std::string to_string(const Steps& steps);
/// The inverse; "->" and "," separate too. Throws bad_argument for an unknown step, one given twice, or another order.
Steps parse_steps(std::string_view text);

struct Recipe {
  std::vector<RecipeRule> rules;
  std::optional<Steps> steps = {};  ///< nothing: whoever uses it says

  /// The first rule that matches `module`, or null.
  const RecipeRule* find(std::string_view module) const;
};

/// fnmatch-style: *, ?, [a-z]; the whole name must match.
bool glob_match(std::string_view glob, std::string_view name);

}  // namespace w4q::quantize
