// The "added_tokens" of tokenizer.json: texts that are one token wherever they stand, cut out before anything else.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/regex.h"
#include "tokenizer/json_node.h"
#include "tokenizer/text_normalizer.h"
#include "tokenizer/text_trie.h"
#include "tokenizer/vocabulary.h"

namespace w4q::tokenizer {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool single_word = false;  ///< only where no word character touches it
  bool lstrip = false;       ///< takes the white space before it
  bool rstrip = false;       ///< takes the white space after it
  bool normalized = true;    ///< looked for after the normalizer, and normalized itself
  bool special = false;      ///< left out of decoded text on request
};

class AddedTokens {
 public:
  /// A part of a text: a token when `id` is not negative, else text between tokens.
  struct Part {
    text::TextRange range;
    int32_t id;
  };

  AddedTokens() = default;
  /// Reads the list. Throws bad_file for ids and contents that contradict each other or the vocabulary.
  AddedTokens(const std::optional<JsonNode>& node, const Vocabulary& vocabulary, const TextNormalizer& normalizer);

  /// Cuts valid UTF-8 at the tokens that are looked for before (`normalized` false) or after the normalizer. No part
  /// between tokens is empty.
  std::vector<Part> split(std::string_view text, bool normalized, text::WorkBudget& budget) const;

  const AddedToken* find(int64_t id) const noexcept;
  std::optional<int32_t> id(std::string_view content) const;
  int64_t end_id() const noexcept { return end_id_; }

 private:
  void check(const AddedToken& token, const JsonNode& node, const Vocabulary& vocabulary) const;
  bool is_single_word(std::string_view text, text::TextRange range, text::WorkBudget& budget) const;

  std::vector<AddedToken> tokens_;
  std::unordered_map<int32_t, size_t> index_of_id_;
  std::unordered_map<std::string, size_t> index_of_content_;
  std::array<TextTrie, 2> tries_;  ///< before and after the normalizer
  std::optional<text::Regex> word_character_;
  int64_t end_id_ = 0;
};

}  // namespace w4q::tokenizer
