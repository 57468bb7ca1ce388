// What the files of a tokenizer and config.json say of each other, without a base (docs/verify.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "io/json.h"

namespace w4q::verify {

/// The file as an object; an empty one where it is not there. Throws bad_file.
io::Json read_object(const std::filesystem::path& file);

/// Null where it is no object, or has no such key.
const io::Json& member(const io::Json& json, const char* key);
/// The text of a token, which may stand in an object.
std::optional<std::string> token_text(const io::Json& token);

/// tokenizer.json, and which id each text has. Null where there is none.
struct TokenTable {
  explicit TokenTable(io::Json tokenizer);

  io::Json json;
  std::unordered_map<std::string, int64_t> ids;
  std::map<int64_t, std::string> texts;
  std::set<int64_t> added;  ///< ids of added_tokens
};

/// Where they contradict each other; `encodes`: the tokenizer is of a kind that w4q has. Throws bad_file.
std::vector<std::string> contradictions_of_tokenizer(const std::filesystem::path& folder, const io::Json& config,
                                                     bool encodes);

/// Of tokenizer.json alone: merges, ids, template and normalizer (vocabulary.cpp).
void add_contradictions_of_vocabulary(const TokenTable& table, std::vector<std::string>& faults);
/// Of the files that name tokens, with it (names.cpp). Throws bad_file.
void add_contradictions_of_names(const std::filesystem::path& folder, const io::Json& config, const TokenTable& table,
                                 std::vector<std::string>& faults);
/// What generation_config.json, config.json and the chat template say that no program can do; `rows`: of the embeddings.
/// Throws bad_file.
std::vector<std::string> contradictions_of_generation(const std::filesystem::path& folder, const io::Json& config,
                                                      int64_t rows);

}  // namespace w4q::verify
