// The "decoder" of tokenizer.json: makes text of tokens.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "text/work_budget.h"
#include "tokenizer/json_node.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/text_pattern.h"

namespace w4q::tokenizer {

class TokenDecoder {
 public:
  /// Joins the tokens with spaces.
  TokenDecoder() = default;
  /// Reads ByteLevel, Metaspace, ByteFallback, Fuse, Replace, Strip and Sequence. Throws unsupported for others.
  static TokenDecoder parse(const std::optional<JsonNode>& node);

  struct Text {
    std::string text;
    bool complete = false;  ///< no token behind these can change it; not set where that is not known
  };
  /// The text of `tokens`. Bytes that are no UTF-8 become U+FFFD. Not `begins_text`: what they add to a text that is
  /// complete.
  Text apply(std::vector<std::string> tokens, bool begins_text = true) const;

 private:
  using Tokens = std::vector<std::string>;
  struct ByteLevel {};
  struct ByteFallback {};
  struct Fuse {};
  struct Replace {
    TextPattern pattern;
    std::string content;
  };
  /// Takes up to `start` and `stop` of one character off the ends of each token.
  struct Strip {
    std::string character;
    int64_t start;
    int64_t stop;
  };
  using Step = std::variant<ByteLevel, Metaspace, ByteFallback, Fuse, Replace, Strip>;

  /// One call of apply().
  struct Call {
    text::WorkBudget budget;
    bool begins_text;
    bool fused = false;          ///< the tokens have become one
    bool ends_in_bytes = false;  ///< and more of them may follow
  };

  void add(const JsonNode& node, int depth);
  bool works_token_by_token() const noexcept;
  static Tokens run(const ByteLevel& step, const Tokens& tokens, Call& call);
  static Tokens run(const Metaspace& step, Tokens tokens, Call& call);
  static Tokens run(const ByteFallback& step, Tokens tokens, Call& call);
  static Tokens run(const Fuse& step, const Tokens& tokens, Call& call);
  static Tokens run(const Replace& step, Tokens tokens, Call& call);
  static Tokens run(const Strip& step, Tokens tokens, Call& call);

  bool joins_with_space_ = true;
  bool token_by_token_ = true;  ///< but for bytes of one character
  std::vector<Step> steps_;
};

}  // namespace w4q::tokenizer
