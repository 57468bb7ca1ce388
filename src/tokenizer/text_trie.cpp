#include "tokenizer/text_trie.h"

namespace w4q::tokenizer {

void TextTrie::add(std::string_view text, int32_t value) {
  begins_[static_cast<unsigned char>(text[0])] = true;
  uint32_t node = 0;
  for (const char byte : text) {
    const auto [found, is_new] = edges_.try_emplace(edge(node, byte), static_cast<uint32_t>(values_.size()));
    if (is_new) values_.push_back(-1);
    node = found->second;
  }
  if (values_[node] < 0) values_[node] = value;
}

std::optional<TextTrie::Match> TextTrie::find(std::string_view text, size_t from) const {
  if (edges_.empty()) return std::nullopt;
  for (size_t begin = from; begin < text.size(); ++begin) {
    if (!begins_[static_cast<unsigned char>(text[begin])]) continue;
    std::optional<Match> longest;
    each_prefix(text.substr(begin), [&](size_t bytes, int32_t value) {
      longest = Match{{begin, begin + bytes}, value};
    });
    if (longest) return longest;
  }
  return std::nullopt;
}

}  // namespace w4q::tokenizer
