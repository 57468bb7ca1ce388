#include "tokenizer/vocabulary.h"

#include <utility>

#include "core/text.h"

namespace w4q::tokenizer {
namespace {

int32_t checked_id(const JsonNode& node, const std::string& token, const io::Json& value) {
  const bool fits = value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(max_token_id);
  if (fits || (value.is_number_integer() && value.get<int64_t>() >= 0 && value.get<int64_t>() <= max_token_id)) {
    return value.get<int32_t>();
  }
  return static_cast<int32_t>(node.at(token).integer(0, max_token_id));
}

}  // namespace

Vocabulary Vocabulary::parse(const JsonNode& node) {
  if (!node.value().is_object()) throw node.wrong_type("an object of tokens and ids");
  Vocabulary result;
  const size_t count = node.value().size();
  result.tokens_.reserve(count);
  result.ids_.reserve(count);
  for (const auto& [token, value] : node.value().items()) {
    const auto id = static_cast<size_t>(checked_id(node, token, value));
    if (id >= result.index_of_id_.size()) result.index_of_id_.resize(id + 1, -1);
    int32_t& index = result.index_of_id_[id];
    if (index >= 0) {
      throw node.error(ErrorCode::bad_file, concat("\"", printable(result.tokens_[static_cast<size_t>(index)]),
                                                   "\" and \"", printable(token), "\" have the same id ", id));
    }
    index = static_cast<int32_t>(result.tokens_.size());
    result.tokens_.push_back(token);
    result.ids_.emplace(result.tokens_.back(), static_cast<int32_t>(id));
  }
  return result;
}

Vocabulary Vocabulary::of(std::vector<std::string> tokens) {
  Vocabulary result;
  result.tokens_ = std::move(tokens);
  for (const std::string& token : result.tokens_) {
    const auto id = static_cast<int32_t>(result.index_of_id_.size());
    result.index_of_id_.push_back(id);
    result.ids_.insert_or_assign(std::string_view(token), id);
  }
  return result;
}

}  // namespace w4q::tokenizer
