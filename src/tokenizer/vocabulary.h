// Tokens and their ids, both ways.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokenizer/json_node.h"

namespace w4q::tokenizer {

/// Ids are below this. The largest vocabularies have some 260,000 tokens; a lookup table up to the largest id of a
/// hostile file stays below 70 MB.
constexpr int64_t max_token_id = (1 << 24) - 1;

class Vocabulary {
 public:
  Vocabulary() = default;
  /// Reads {"token": id, …}. Throws bad_file for an id that is no number, out of range, or given twice.
  static Vocabulary parse(const JsonNode& node);
  /// Of tokens whose ids are their places; of two equal ones the last is found.
  static Vocabulary of(std::vector<std::string> tokens);

  std::optional<int32_t> id(std::string_view token) const {
    const auto found = ids_.find(token);
    return found == ids_.end() ? std::nullopt : std::optional(found->second);
  }
  /// The token of an id; nothing when no token has it.
  const std::string* token(int64_t id) const noexcept {
    if (id < 0 || id >= end_id()) return nullptr;
    const int32_t index = index_of_id_[static_cast<size_t>(id)];
    return index < 0 ? nullptr : &tokens_[static_cast<size_t>(index)];
  }
  /// Largest id + 1.
  int64_t end_id() const noexcept { return static_cast<int64_t>(index_of_id_.size()); }
  const std::vector<std::string>& tokens() const noexcept { return tokens_; }

 private:
  std::vector<std::string> tokens_;  ///< never changed after parse(): ids_ points into it
  std::vector<int32_t> index_of_id_;
  std::unordered_map<std::string_view, int32_t> ids_;
};

}  // namespace w4q::tokenizer
