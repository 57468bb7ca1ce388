// tokenizer.json: byte-level BPE (Llama 3, Qwen, Mistral's Tekken) and sentence-piece style BPE with byte fallback
// (Llama 2, Mistral v1), Unigram. The file is obeyed; nothing is assumed from the model's name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace w4q::tokenizer {

class Tokenizer {
 public:
  /// Reads `folder`/tokenizer.json. Throws bad_file when it is missing or damaged, unsupported (naming the component)
  /// when it needs something that w4q does not have: WordPiece, an unknown normalizer …
  static Tokenizer open(const std::filesystem::path& folder);
  /// From the text of a tokenizer.json; `source` names it in messages.
  static Tokenizer parse(std::string_view json, std::string_view source);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  /// Token ids of UTF-8 text. With `add_special_tokens` the file's template is applied (BOS for Llama, nothing for
  /// Qwen). Invalid UTF-8 is replaced by U+FFFD, as the reference does when it reads text. Thread-safe.
  std::vector<int32_t> encode(std::string_view text, bool add_special_tokens) const;
  /// Text of ids; special tokens are left out when `skip_special_tokens`. Unknown ids throw bad_argument.
  std::string decode(std::span<const int32_t> ids, bool skip_special_tokens) const;

  /// Largest id + 1 over vocabulary and added tokens.
  int64_t vocab_size() const noexcept;
  /// The id of a token's exact text, added tokens included.
  std::optional<int32_t> token_to_id(std::string_view token) const;

 private:
  friend class TextStream;
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

/// The text of ids that come one by one, without special tokens, as decode() gives it; but what was given is not taken
/// back where a later id would change it. Each is decoded once, or with the few before it whose text it may change;
/// with all where a decoder looks at its whole text.
class TextStream {
 public:
  /// `tokenizer` must outlive it.
  explicit TextStream(const Tokenizer& tokenizer) noexcept : tokenizer_(tokenizer) {}

  /// What `id` adds to the text: nothing while the text ends inside a character, which comes with its last token.
  /// Throws as decode() does.
  std::string add(int32_t id);
  /// What is left when no more ids come: an unfinished character as U+FFFD.
  std::string finish();

 private:
  /// The text of the tokens that are held, beyond what was given before.
  std::string rest(const std::string& text);

  const Tokenizer& tokenizer_;
  std::vector<std::string> held_;  ///< tokens that are not settled
  bool begins_text_ = true;
  size_t given_ = 0;  ///< bytes of their text that add() has given
};

}  // namespace w4q::tokenizer
