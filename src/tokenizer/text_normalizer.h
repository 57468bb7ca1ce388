// The "normalizer" of tokenizer.json: rewrites the text between special tokens before it is cut up.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "text/regex.h"
#include "tokenizer/json_node.h"
#include "tokenizer/text_pattern.h"
#include "tokenizer/unicode_form.h"

namespace w4q::tokenizer {

class TextNormalizer {
 public:
  /// Does nothing.
  TextNormalizer() = default;
  /// Reads NFC, NFD, NFKC, NFKD, Prepend, Replace, Strip, Lowercase and Sequence. Throws unsupported for others.
  static TextNormalizer parse(const std::optional<JsonNode>& node);

  /// The rewritten text; `text` is valid UTF-8.
  std::string apply(std::string_view text, text::WorkBudget& budget) const;

 private:
  struct Prepend {
    std::string text;
  };
  struct Replace {
    TextPattern pattern;
    std::string content;
  };
  struct Strip {
    bool left;
    bool right;
  };
  struct Lowercase {};
  using Step = std::variant<UnicodeForm, Prepend, Replace, Strip, Lowercase>;

  void add(const JsonNode& node, int depth);
  static std::string run(UnicodeForm form, const std::string& text, text::WorkBudget& budget);
  static std::string run(const Prepend& step, const std::string& text, text::WorkBudget& budget);
  static std::string run(const Replace& step, const std::string& text, text::WorkBudget& budget);
  static std::string run(const Strip& step, const std::string& text, text::WorkBudget& budget);
  static std::string run(const Lowercase& step, const std::string& text, text::WorkBudget& budget);

  std::vector<Step> steps_;
};

}  // namespace w4q::tokenizer
