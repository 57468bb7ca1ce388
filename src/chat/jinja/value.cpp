#include "chat/jinja/value.h"

#include <algorithm>
#include <limits>

#include "chat/jinja/failure.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

constexpr std::array<std::string_view, 6> sequence_names{"list",        "tuple",      "dict_keys",
                                                         "dict_values", "dict_items", "range"};

int deeper(int depth) {
  if (depth < max_value_depth) return depth + 1;
  throw Failure(ErrorCode::unsupported, concat("a value nests deeper than ", max_value_depth, " levels"))
      .remedy("the template or the conversation looks damaged or malicious");
}

int depth_of_all(const Values& values) noexcept {
  int depth = 0;
  for (const Value& value : values) depth = std::max(depth, depth_of(value));
  return depth;
}

bool equal_items(const Values& a, const Values& b) {
  return std::ranges::equal(a, b, [](const Value& x, const Value& y) { return equal(x, y); });
}

bool equal_dicts(const Dict& a, const Dict& b) {
  if (a.entries.size() != b.entries.size()) return false;
  return std::ranges::all_of(a.entries, [&](const auto& entry) {
    const Value* other = find(b, entry.first);
    return other != nullptr && equal(entry.second, *other);
  });
}

}  // namespace

int depth_of(const Value& value) noexcept {
  if (const auto* list = value.get<const Sequence>()) return list->depth;
  if (const auto* dict = value.get<const Dict>()) return dict->depth;
  if (const auto* iterator = value.get<Iterator>()) return iterator->depth;
  if (const auto* loop = value.get<Loop>()) return loop->items->depth + 1;
  const auto* callable = value.get<const Callable>();
  return callable == nullptr ? 0 : callable->depth;
}

std::string_view type_name(const Value& value) noexcept {
  if (value.undefined()) return "Undefined";
  if (value.none()) return "NoneType";
  if (value.is<bool>()) return "bool";
  if (value.is<int64_t>()) return "int";
  if (value.is<double>()) return "float";
  if (value.text()) return "str";
  if (const auto* list = value.get<const Sequence>()) return sequence_names.at(static_cast<size_t>(list->kind));
  if (value.get<const Dict>() != nullptr) return "dict";
  if (value.get<Iterator>() != nullptr) return "generator";
  if (value.get<Namespace>() != nullptr) return "Namespace";
  return value.get<Loop>() != nullptr ? "LoopContext" : "function";
}

bool truth(const Value& value) {
  if (value.undefined() || value.none()) return false;
  if (value.text()) return !value.string().empty();
  if (const Number number = number_of(value); number.is_number)
    return number.is_float ? number.real != 0 : number.integer != 0;
  if (const auto* list = value.get<const Sequence>()) return !list->items.empty();
  if (const auto* dict = value.get<const Dict>()) return !dict->entries.empty();
  return true;
}

bool equal(const Value& a, const Value& b) {
  if (a.undefined() || b.undefined()) return a.undefined() && b.undefined();
  if (a.none() || b.none()) return a.none() && b.none();
  if (a.text() || b.text()) return a.text() && b.text() && a.string() == b.string();
  const Number x = number_of(a), y = number_of(b);
  if (x.is_number || y.is_number) {
    if (!x.is_number || !y.is_number) return false;
    return x.is_float || y.is_float ? x.real == y.real : x.integer == y.integer;
  }
  if (const auto* list = a.get<const Sequence>()) {
    const auto* other = b.get<const Sequence>();
    return other != nullptr && other->kind == list->kind && equal_items(list->items, other->items);
  }
  if (const auto* dict = a.get<const Dict>()) {
    const auto* other = b.get<const Dict>();
    return other != nullptr && equal_dicts(*dict, *other);
  }
  if (a.get<Iterator>() != nullptr) return a.get<Iterator>() == b.get<Iterator>();
  if (a.get<Namespace>() != nullptr) return a.get<Namespace>() == b.get<Namespace>();
  if (a.get<Loop>() != nullptr) return a.get<Loop>() == b.get<Loop>();
  return a.get<const Callable>() == b.get<const Callable>();
}

const Value* find(const Dict& dict, const Value& key) {
  const auto found = std::ranges::find_if(dict.entries, [&](const auto& entry) { return equal(entry.first, key); });
  return found == dict.entries.end() ? nullptr : &found->second;
}

const Value* find(const Dict& dict, std::string_view key) {
  const auto found = std::ranges::find_if(
      dict.entries, [&](const auto& entry) { return entry.first.text() && entry.first.string() == key; });
  return found == dict.entries.end() ? nullptr : &found->second;
}

Value text_value(std::string text, bool markup) {
  return Text{std::make_shared<const std::string>(std::move(text)), markup};
}

Value list_value(Values items, Sequence::Kind kind) {
  Sequence list{.kind = kind, .items = std::move(items)};
  list.depth = deeper(depth_of_all(list.items));
  return std::make_shared<const Sequence>(std::move(list));
}

Value dict_value(std::vector<std::pair<Value, Value>> entries) {
  int depth = 0;
  for (const auto& [key, value] : entries) depth = std::max({depth, depth_of(key), depth_of(value)});
  return std::make_shared<const Dict>(Dict{std::move(entries), deeper(depth)});
}

Value method_value(const Function& function, const Value& self) {
  return std::make_shared<const Callable>(Callable{&function, self, {}, deeper(depth_of(self))});
}

Value undefined_value(std::string what) { return Undefined{std::make_shared<const std::string>(std::move(what))}; }

Value from_json(const io::Json& json) {
  using Type = io::Json::value_t;
  switch (json.type()) {
    case Type::boolean:
      return json.get<bool>();
    case Type::number_integer:
      return json.get<int64_t>();
    case Type::number_unsigned:
      if (json.get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()}) return json.get<int64_t>();
      throw Failure(ErrorCode::unsupported,
                    concat("the integer ", json.get<uint64_t>(), " does not fit 64 bits with a sign"))
          .remedy("write it as a string");
    case Type::number_float:
      return json.get<double>();
    case Type::string:
      return text_value(json.get_ref<const std::string&>());
    case Type::array: {
      Values items;
      for (const auto& item : json) items.push_back(from_json(item));
      return list_value(std::move(items));
    }
    case Type::object: {
      std::vector<std::pair<Value, Value>> entries;
      for (const auto& [key, item] : json.items()) entries.emplace_back(text_value(key), from_json(item));
      return dict_value(std::move(entries));
    }
    default:
      return None{};
  }
}

Number number_of(const Value& value) noexcept {
  if (value.is<bool>()) return {true, false, value.as<bool>() ? 1 : 0, value.as<bool>() ? 1.0 : 0.0};
  if (value.is<int64_t>()) return {true, false, value.as<int64_t>(), static_cast<double>(value.as<int64_t>())};
  if (value.is<double>()) return {true, true, 0, value.as<double>()};
  return {};
}

}  // namespace w4q::jinja
