// The "model" of tokenizer.json: byte pair encoding. Turns one word into tokens.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/json_node.h"
#include "tokenizer/merge_table.h"
#include "tokenizer/vocabulary.h"

namespace w4q::tokenizer {

class Bpe {
 public:
  /// Reads vocabulary, merges and options. Throws bad_file (a merge of unknown tokens, naming it) or unsupported
  /// (dropout, subword prefixes and suffixes).
  static Bpe parse(const JsonNode& node);

  const Vocabulary& vocabulary() const noexcept { return vocabulary_; }

 private:
  friend class BpeEncoder;

  void read_options(const JsonNode& node);
  void read_merges(const JsonNode& node);
  void index_characters();
  /// The token of one character, given in UTF-8; -1 for none.
  int32_t id_of_character(std::string_view character) const;

  Vocabulary vocabulary_;
  MergeTable merges_;
  std::array<int32_t, 0x400> id_of_low_character_{};  ///< a shortcut for the most frequent characters; -1 for none
  std::array<int32_t, 256> id_of_byte_{};             ///< of the tokens <0x00> to <0xFF>; -1 for none
  std::optional<std::string> unknown_token_;
  int32_t unknown_id_ = -1;  ///< of unknown_token_; -1 when the vocabulary lacks it
  bool fuse_unknown_ = false;
  bool byte_fallback_ = false;
  bool ignore_merges_ = false;
};

/// Encodes the words of one call: working memory, and a cache of words seen before (words repeat, merging is slow).
class BpeEncoder {
 public:
  /// For a call that encodes about `text_bytes` bytes. `bpe` outlives the encoder.
  BpeEncoder(const Bpe& bpe, size_t text_bytes);

  /// Appends the tokens of `word`, valid UTF-8. O(n log n). Throws bad_file when an unknown character meets an unknown
  /// token that the vocabulary lacks, bad_argument for a word of 2 GiB or more.
  void encode(std::string_view word, std::vector<int32_t>& ids);

 private:
  /// A token of the word: a doubly linked list in an array, so that merging moves nothing.
  struct Symbol {
    int32_t id;
    int32_t previous;
    int32_t next;  ///< -1 at the end
    Merge merge;   ///< of this symbol with the next; no_rank when there is none, or the symbol was merged away
  };
  struct Candidate {
    uint32_t rank;
    int32_t position;
  };
  struct CachedWord {
    std::string word;
    std::vector<int32_t> ids;
  };

  void split_into_symbols(std::string_view word);
  bool fall_back_to_bytes(std::string_view character);
  int32_t unknown_id() const;
  void add_symbol(int32_t id);
  void merge_symbols();
  void apply_merge(int32_t position);
  void consider(int32_t position);

  const Bpe& bpe_;
  std::vector<Symbol> symbols_;
  std::vector<Candidate> heap_;
  std::vector<CachedWord> cache_;  ///< each word has one place, which the latest takes
};

}  // namespace w4q::tokenizer
