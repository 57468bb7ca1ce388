// The "pre_tokenizer" of tokenizer.json: cuts the text into the words inside which pairs are merged.
//
// Every pre-tokenizer of the file becomes a few of four primitive steps: cut at a pattern, put a prefix before each
// word, replace the space, write bytes in the byte-level alphabet.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "text/regex.h"
#include "tokenizer/json_node.h"
#include "tokenizer/text_pattern.h"

namespace w4q::tokenizer {

/// A text and the words it is cut into.
struct Words {
  struct Word {
    text::TextRange range;
    bool begins_text;  ///< it begins where the whole text given to the tokenizer begins
  };
  std::string text;
  std::vector<Word> words;
};

class PreTokenizer {
 public:
  /// Leaves the text in one piece.
  PreTokenizer() = default;
  /// Reads Split, ByteLevel, Metaspace, Digits, Punctuation, Whitespace, WhitespaceSplit and Sequence. Throws
  /// unsupported for others.
  static PreTokenizer parse(const std::optional<JsonNode>& node);

  /// Cuts `text`, valid UTF-8. `begins_text` says that it begins where the whole text does.
  Words apply(std::string text, bool begins_text, text::WorkBudget& budget) const;

 private:
  struct Split {
    TextPattern pattern;
    SplitBehavior behavior;
    bool invert;
  };
  /// Before every word, or only the one that begins the text, unless the word begins with it already.
  struct Prefix {
    std::string text;
    bool everywhere;
  };
  struct ReplaceSpace {
    std::string by;
  };
  struct ByteLevel {};
  using Step = std::variant<Split, Prefix, ReplaceSpace, ByteLevel>;

  void add(const JsonNode& node, int depth);
  void add_byte_level(const JsonNode& node);
  void add_metaspace(const JsonNode& node);
  static void run(const Split& step, Words& words, text::WorkBudget& budget);
  static void run(const Prefix& step, Words& words, text::WorkBudget& budget);
  static void run(const ReplaceSpace& step, Words& words, text::WorkBudget& budget);
  static void run(const ByteLevel& step, Words& words, text::WorkBudget& budget);

  std::vector<Step> steps_;
};

/// "Metaspace" in a file, as a pre-tokenizer and as a decoder: spaces are written as `replacement`.
struct Metaspace {
  enum class Prepend { always, first, never };
  std::string replacement;
  Prepend prepend;
  bool split;
};

/// Throws bad_file.
Metaspace parse_metaspace(const JsonNode& node);

}  // namespace w4q::tokenizer
