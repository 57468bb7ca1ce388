// tokenizer.json: byte-level BPE (Llama 3, Qwen, Mistral's Tekken) and sentence-piece style BPE with byte fallback
// (Llama 2, Mistral v1). The file is obeyed; nothing is assumed from the model's name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace w4q::model {

class Tokenizer {
 public:
  /// Reads `folder`/tokenizer.json. Throws bad_file when it is missing or damaged, unsupported (naming the component)
  /// when it needs something that w4q does not have: WordPiece, Unigram, an unknown normalizer …
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
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl) noexcept;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::model
