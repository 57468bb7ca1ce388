// The tokenizer of a GGUF file and the files of a Hugging Face folder that say the same. Both kinds that byte pair
// encoding has there: "gpt2" (bytes as letters, merges in a list) and "llama" (pieces of sentence-piece with scores).
#pragma once

#include <string>
#include <vector>

#include "gguf/keys.h"
#include "io/gguf.h"
#include "io/json.h"
#include "model/config.h"

namespace w4q::gguf {

struct TokenizerFiles {
  io::Json tokenizer;         ///< tokenizer.json
  io::Json tokenizer_config;  ///< tokenizer_config.json: special tokens and the chat template
};

/// Throws unsupported, naming key and reason, for what tokenizer.json would not tokenize in the same way: another kind,
/// an unknown way of cutting text, equal scores …; bad_file for contradictions.
TokenizerFiles tokenizer_from_gguf(const GgufKeys& keys);

/// The "tokenizer.*" metadata of a model with these files. Throws unsupported with the reason for what the metadata
/// cannot say: other components, options of added tokens, merges that no scores can order. Adds to `notes` what readers
/// do a little differently.
io::GgufMetadata tokenizer_to_gguf(const TokenizerFiles& files, const model::ModelConfig& config,
                                   std::vector<std::string>& notes);

/// tokenizer.ggml.model of a file without one, which readers ask for.
inline constexpr std::string_view no_vocabulary = "no_vocab";
/// That and the ids of bos and eos, for such a file.
io::GgufMetadata token_ids_to_gguf(const model::ModelConfig& config);

}  // namespace w4q::gguf
