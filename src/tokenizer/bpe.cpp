#include "tokenizer/bpe.h"

#include <cstdio>

#include "core/text.h"
#include "text/utf8.h"

namespace w4q::tokenizer {
namespace {

using TokenPair = std::pair<std::string_view, std::string_view>;

/// "a b" or ["a", "b"].
TokenPair pair_of(const JsonNode& merges, size_t index) {
  const io::Json& merge = merges.value()[index];
  if (merge.is_string()) {
    const std::string_view text = merge.get_ref<const std::string&>();
    const size_t space = text.find(' ');
    if (space != std::string_view::npos && text.find(' ', space + 1) == std::string_view::npos) {
      return {text.substr(0, space), text.substr(space + 1)};
    }
  } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return {merge[0].get_ref<const std::string&>(), merge[1].get_ref<const std::string&>()};
  }
  throw merges.items()[index].wrong_type("two tokens, as [\"a\", \"b\"] or \"a b\"");
}

int32_t known_id(const JsonNode& merges, size_t index, const Vocabulary& vocabulary, std::string_view token) {
  if (const auto id = vocabulary.id(token)) return *id;
  const auto [left, right] = pair_of(merges, index);
  throw merges
      .error(ErrorCode::bad_file, concat("merge ", index, " (\"", printable(left), "\" and \"", printable(right),
                                         "\") needs a token that the vocabulary lacks"))
      .detail(concat("missing: \"", printable(token), "\""));
}

/// Older files carry the comment line of a merges.txt.
bool is_comment(const io::Json& merge) {
  return merge.is_string() && merge.get_ref<const std::string&>().starts_with("#version");
}

}  // namespace

Bpe Bpe::parse(const JsonNode& node) {
  Bpe result;
  result.read_options(node);
  result.vocabulary_ = Vocabulary::parse(node.at("vocab"));
  result.read_merges(node.at("merges"));
  result.index_characters();
  return result;
}

void Bpe::read_options(const JsonNode& node) {
  const auto dropout = node.find("dropout");
  if (dropout && (!dropout->value().is_number() || dropout->value().get<double>() != 0)) {
    throw dropout->error(ErrorCode::unsupported, "BPE dropout is for training; only null or 0 is supported");
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const auto mark = node.find(key);
    if (mark && !mark->string().empty()) throw mark->error(ErrorCode::unsupported, "subword marks are not supported");
  }
  if (const auto unknown = node.find("unk_token")) unknown_token_ = unknown->string();
  fuse_unknown_ = node.boolean_or("fuse_unk", false);
  byte_fallback_ = node.boolean_or("byte_fallback", false);
  ignore_merges_ = node.boolean_or("ignore_merges", false);
}

void Bpe::read_merges(const JsonNode& node) {
  if (!node.value().is_array()) throw node.wrong_type("an array of merges");
  const size_t count = node.value().size();
  if (count >= Merge::no_rank) throw node.error(ErrorCode::bad_file, "too many merges");
  merges_ = MergeTable(count);
  std::string merged;
  uint32_t rank = 0;
  for (size_t i = 0; i < count; ++i) {
    if (is_comment(node.value()[i])) continue;
    const auto [left, right] = pair_of(node, i);
    merged.assign(left).append(right);
    merges_.set(known_id(node, i, vocabulary_, left), known_id(node, i, vocabulary_, right),
                {rank++, known_id(node, i, vocabulary_, merged)});
  }
}

void Bpe::index_characters() {
  for (char32_t c = 0; c < id_of_low_character_.size(); ++c) {
    std::string character;
    text::utf8_append(character, c);
    id_of_low_character_[c] = vocabulary_.id(character).value_or(-1);
  }
  for (unsigned byte = 0; byte < id_of_byte_.size(); ++byte) {
    std::array<char, 8> name{};
    std::snprintf(name.data(), name.size(), "<0x%02X>", byte);
    id_of_byte_[byte] = vocabulary_.id(name.data()).value_or(-1);
  }
  if (unknown_token_) unknown_id_ = vocabulary_.id(*unknown_token_).value_or(-1);
}

int32_t Bpe::id_of_character(std::string_view character) const {
  if (character.size() <= 2) {
    const char32_t code_point = text::utf8_step(character).code_point;
    if (code_point < id_of_low_character_.size()) return id_of_low_character_[code_point];
  }
  return vocabulary_.id(character).value_or(-1);
}

}  // namespace w4q::tokenizer
