// GGUF files name a byte-level tokenizer's way of cutting text; tokenizer.json spells it out. This is the table between
// the two.
#pragma once

#include <string>
#include <string_view>

#include "io/json.h"

namespace w4q::gguf {

struct GgufPreTokenizer {
  std::string_view name;  ///< tokenizer.ggml.pre
  bool ignore_merges;     ///< a word that is a token is that token, whatever the merges make of it
  bool adds_bos;          ///< where tokenizer.ggml.add_bos_token is missing
  io::Json normalizer;    ///< null where there is none
  io::Json pre_tokenizer;
};

/// The row of a name, or of a name that means the same ("llama3" for "llama-bpe"). Null for an unknown one.
const GgufPreTokenizer* find_gguf_pre_tokenizer(std::string_view name);

/// The row that cuts text as these parts of a tokenizer.json do. Null when there is none: it is compared what they say,
/// not how it is written.
const GgufPreTokenizer* match_gguf_pre_tokenizer(const io::Json& normalizer, const io::Json& pre_tokenizer);

/// True when two components of tokenizer.json (null for none) do the same, however they are written.
bool same_component(const io::Json& a, const io::Json& b);

/// "llama-bpe, qwen2, …"
std::string gguf_pre_tokenizer_names();

}  // namespace w4q::gguf
