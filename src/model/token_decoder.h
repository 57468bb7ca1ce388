// The "decoder" of tokenizer.json: makes text of tokens.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "model/json_node.h"
#include "model/pre_tokenizer.h"
#include "model/text_pattern.h"

namespace w4q::model {

class TokenDecoder {
 public:
  /// Joins the tokens with spaces.
  TokenDecoder() = default;
  /// Reads ByteLevel, Metaspace, ByteFallback, Fuse, Replace, Strip and Sequence. Throws unsupported for others.
  static TokenDecoder parse(const std::optional<JsonNode>& node);

  /// The text of `tokens`. Bytes that are no UTF-8 become U+FFFD.
  std::string apply(std::vector<std::string> tokens) const;

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

  void add(const JsonNode& node, int depth);
  static Tokens run(const ByteLevel& step, const Tokens& tokens, WorkBudget& budget);
  static Tokens run(const Metaspace& step, Tokens tokens, WorkBudget& budget);
  static Tokens run(const ByteFallback& step, Tokens tokens, WorkBudget& budget);
  static Tokens run(const Fuse& step, const Tokens& tokens, WorkBudget& budget);
  static Tokens run(const Replace& step, Tokens tokens, WorkBudget& budget);
  static Tokens run(const Strip& step, Tokens tokens, WorkBudget& budget);

  bool joins_with_space_ = true;
  std::vector<Step> steps_;
};

}  // namespace w4q::model
