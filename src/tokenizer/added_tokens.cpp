#include "tokenizer/added_tokens.h"

#include <algorithm>

#include "core/text.h"
#include "tokenizer/characters.h"

namespace w4q::tokenizer {
namespace {

/// Bounds the time of a search on a hostile file; real ones stay below a hundred.
constexpr size_t max_content_bytes = 1000;

AddedToken parse_token(const JsonNode& node) {
  AddedToken token;
  token.id = static_cast<int32_t>(node.at("id").integer(0, max_token_id));
  token.content = node.at("content").string();
  token.single_word = node.boolean_or("single_word", false);
  token.lstrip = node.boolean_or("lstrip", false);
  token.rstrip = node.boolean_or("rstrip", false);
  token.special = node.boolean_or("special", false);
  token.normalized = node.boolean_or("normalized", !token.special);
  if (token.content.size() > max_content_bytes) {
    throw node.error(ErrorCode::unsupported, concat("an added token of ", token.content.size(), " bytes"))
        .detail(concat("at most ", max_content_bytes, " bytes are read"));
  }
  return token;
}

}  // namespace

AddedTokens::AddedTokens(const std::optional<JsonNode>& node, const Vocabulary& vocabulary,
                         const TextNormalizer& normalizer) {
  if (!node) return;
  size_t content_bytes = 0;
  for (const JsonNode& item : node->items()) {
    AddedToken token = parse_token(item);
    check(token, item, vocabulary);
    if (token.single_word && !word_character_) {
      word_character_.emplace(R"([\w\x{200C}\x{200D}])", item.place());
    }
    index_of_id_.emplace(token.id, tokens_.size());
    index_of_content_.emplace(token.content, tokens_.size());
    content_bytes += token.content.size();
    end_id_ = std::max<int64_t>(end_id_, token.id + 1);
    tokens_.push_back(std::move(token));
  }
  text::WorkBudget budget(content_bytes);
  // Of two tokens that look the same once they are normalized, a special one is found.
  for (const bool special : {true, false}) {
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const AddedToken& token = tokens_[i];
      if (token.special != special) continue;
      const std::string text = token.normalized ? normalizer.apply(token.content, budget) : token.content;
      if (!text.empty()) tries_[token.normalized].add(text, static_cast<int32_t>(i));
    }
  }
}

void AddedTokens::check(const AddedToken& token, const JsonNode& node, const Vocabulary& vocabulary) const {
  const auto conflict = [&](std::string_view what) {
    throw node.error(ErrorCode::bad_file,
                     concat("added token \"", printable(token.content), "\", id ", token.id, ": ", what));
  };
  const auto same_id = find(token.id);
  if (same_id) conflict(concat("the id belongs to the added token \"", printable(same_id->content), "\""));
  if (index_of_content_.count(token.content) != 0) conflict("it is listed twice");
  const auto known = vocabulary.id(token.content);
  if (known && *known != token.id) conflict(concat("in the vocabulary its id is ", *known));
  const std::string* owner = vocabulary.token(token.id);
  if (owner && *owner != token.content) {
    conflict(concat("in the vocabulary the id belongs to \"", printable(*owner), "\""));
  }
}

bool AddedTokens::is_single_word(std::string_view text, text::TextRange range, text::WorkBudget& budget) const {
  const auto is_word = [&](std::string_view character) {
    return word_character_->search(character, 0, budget).has_value();
  };
  const std::string_view before = text.substr(0, range.begin);
  const std::string_view after = text.substr(range.end);
  return (before.empty() || !is_word(before.substr(last_character(before)))) &&
         (after.empty() || !is_word(after.substr(0, text::utf8_size(after[0]))));
}

std::vector<AddedTokens::Part> AddedTokens::split(std::string_view text, bool normalized,
                                                  text::WorkBudget& budget) const {
  const TextTrie& trie = tries_[normalized];
  std::vector<Part> parts;
  size_t done = 0;
  size_t from = 0;
  while (const auto match = trie.find(text, from)) {
    const AddedToken& token = tokens_[static_cast<size_t>(match->value)];
    text::TextRange range = match->range;
    from = range.end;
    if (token.single_word && !is_single_word(text, range, budget)) continue;
    if (token.lstrip) range.begin = std::max(trailing_white_space(text.substr(0, range.begin)), done);
    if (token.rstrip) range.end += leading_white_space(text.substr(range.end));
    if (done < range.begin) parts.push_back({{done, range.begin}, -1});
    parts.push_back({range, token.id});
    done = range.end;
  }
  if (done < text.size()) parts.push_back({{done, text.size()}, -1});
  return parts;
}

const AddedToken* AddedTokens::find(int64_t id) const noexcept {
  if (id < 0 || id >= end_id_) return nullptr;
  const auto found = index_of_id_.find(static_cast<int32_t>(id));
  return found == index_of_id_.end() ? nullptr : &tokens_[found->second];
}

std::optional<int32_t> AddedTokens::id(std::string_view content) const {
  const auto found = index_of_content_.find(std::string(content));
  return found == index_of_content_.end() ? std::nullopt : std::optional(tokens_[found->second].id);
}

}  // namespace w4q::tokenizer
