// The patterns of tokenizer.json, {"String": …} or {"Regex": …}, and the ways to cut a text at their matches.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/regex.h"
#include "tokenizer/json_node.h"

namespace w4q::tokenizer {

class TextPattern {
 public:
  /// The text itself.
  static TextPattern literal(std::string text);
  /// A regular expression in Oniguruma's dialect; `place` begins messages.
  static TextPattern regex(std::string_view pattern, std::string_view place);
  /// Throws bad_file or unsupported.
  static TextPattern parse(const JsonNode& node);

  /// All matches in `text`, from left to right, without overlap, into `matches`. An empty match does not follow
  /// directly behind another match.
  void find_all(std::string_view text, text::WorkBudget& budget, std::vector<text::TextRange>& matches) const;
  /// `text` with `content` in place of every match.
  std::string replace_all(std::string_view text, std::string_view content, text::WorkBudget& budget) const;

 private:
  std::string literal_;
  std::optional<text::Regex> regex_;
};

/// What becomes of the matches when a text is cut at them.
enum class SplitBehavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };

/// Throws bad_file for an unknown name.
SplitBehavior parse_split_behavior(const JsonNode& node);

/// A part of the text that is a match, or lies between two.
struct MatchPart {
  text::TextRange range;
  bool is_match;
};

/// Cuts `text` at `matches` and appends the pieces that are left, none of them empty. With `invert`, matches and what
/// lies between them change places. `parts` is working memory.
void split_at(std::string_view text, const std::vector<text::TextRange>& matches, SplitBehavior behavior, bool invert,
              std::vector<MatchPart>& parts, std::vector<text::TextRange>& pieces);

}  // namespace w4q::tokenizer
