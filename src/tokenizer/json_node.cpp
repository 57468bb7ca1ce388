#include "tokenizer/json_node.h"

#include "core/text.h"

namespace w4q::tokenizer {

JsonNode JsonNode::at(std::string_view key) const {
  if (!value_->is_object()) throw wrong_type("an object");
  const auto found = value_->find(key);
  if (found == value_->end()) throw error(ErrorCode::bad_file, concat("lacks \"", key, "\""));
  return {*found, concat(place_, "/", printable(key)), 0};
}

std::optional<JsonNode> JsonNode::find(std::string_view key) const {
  if (!value_->is_object()) throw wrong_type("an object");
  const auto found = value_->find(key);
  if (found == value_->end() || found->is_null()) return std::nullopt;
  return JsonNode{*found, concat(place_, "/", printable(key)), 0};
}

std::vector<JsonNode> JsonNode::items() const {
  if (!value_->is_array()) throw wrong_type("an array");
  std::vector<JsonNode> result;
  result.reserve(value_->size());
  for (const auto& element : *value_) {
    result.push_back(JsonNode{element, concat(place_, "/", result.size()), 0});
  }
  return result;
}

const std::string& JsonNode::string() const {
  if (!value_->is_string()) throw wrong_type("a string");
  return value_->get_ref<const std::string&>();
}

bool JsonNode::boolean() const {
  if (!value_->is_boolean()) throw wrong_type("true or false");
  return value_->get<bool>();
}

int64_t JsonNode::integer(int64_t low, int64_t high) const {
  const bool fits = value_->is_number_unsigned() ? value_->get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX) &&
                                                       value_->get<int64_t>() >= low && value_->get<int64_t>() <= high
                                                 : value_->is_number_integer() && value_->get<int64_t>() >= low &&
                                                       value_->get<int64_t>() <= high;
  if (!fits) throw wrong_type(concat("a whole number from ", low, " to ", high));
  return value_->get<int64_t>();
}

bool JsonNode::boolean_or(std::string_view key, bool otherwise) const {
  const auto member = find(key);
  return member ? member->boolean() : otherwise;
}

Error JsonNode::error(ErrorCode code, std::string_view what) const { return {code, concat(place_, ": ", what)}; }

Error JsonNode::wrong_type(std::string_view expected) const {
  std::string got = value_->is_primitive() ? value_->dump(-1, ' ', true) : value_->type_name();
  if (got.size() > 60) got = got.substr(0, 57) + "...";
  return error(ErrorCode::bad_file, concat("expected ", expected, ", got ", got));
}

Error JsonNode::unknown_type(std::string_view kind, std::string_view known) const {
  return error(ErrorCode::unsupported, concat(kind, " \"", printable(type()), "\" is not supported"))
      .detail(concat("supported: ", known));
}

}  // namespace w4q::tokenizer
