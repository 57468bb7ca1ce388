// The "model" of tokenizer.json of type Unigram: of all ways to cut a word into tokens the one with the highest sum of
// their scores.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "tokenizer/json_node.h"
#include "tokenizer/text_trie.h"
#include "tokenizer/vocabulary.h"

namespace w4q::tokenizer {

class Unigram {
 public:
  /// Reads [["token", score], …], unk_id and byte_fallback. Throws bad_file for anything malformed.
  static Unigram parse(const JsonNode& node);

  const Vocabulary& vocabulary() const noexcept { return vocabulary_; }

  /// Appends the tokens of `word`, valid UTF-8. Throws bad_file when a character is unknown and the file names no unknown
  /// token.
  void encode(std::string_view word, std::vector<int32_t>& ids) const;

 private:
  /// The best way to the end of a part of the word: where its last token begins.
  struct Way {
    double score = 0;
    size_t begin = 0;
    bool known = true;
    bool reached = false;
  };

  void read_tokens(const JsonNode& node);
  std::vector<Way> best_ways(std::string_view word) const;
  void add_part(std::string_view part, std::vector<int32_t>& ids) const;
  int32_t unknown_id() const;

  Vocabulary vocabulary_;
  std::vector<double> scores_;
  TextTrie tokens_;
  double unknown_score_ = 0;
  int32_t unknown_id_ = -1;  ///< -1: there is none
  std::array<int32_t, 256> id_of_byte_{};
  bool byte_fallback_ = false;  ///< all of the tokens <0x00> to <0xFF> that a character needs are looked for
};

}  // namespace w4q::tokenizer
