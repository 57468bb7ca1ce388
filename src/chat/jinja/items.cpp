// Attributes, items, slices, lengths and walks.
#include <algorithm>
#include <array>
#include <limits>

#include "chat/jinja/operators.h"
#include "chat/jinja/python_text.h"
#include "core/text.h"
#include "text/utf8.h"

namespace w4q::jinja {
namespace {

/// What changes a list or a dict: transformers' sandbox forbids it.
constexpr std::array<std::string_view, 8> list_changes{"append", "clear", "pop",    "reverse",
                                                       "insert", "sort",  "extend", "remove"};
constexpr std::array<std::string_view, 5> dict_changes{"clear", "pop", "popitem", "setdefault", "update"};

std::string object_name(const Value& object) {
  return object.none() ? "None" : concat("'", type_name(object), " object'");
}

Value no_attribute(const Value& object, std::string_view name) {
  return undefined_value(concat(object_name(object), " has no attribute '", printable(name), "'"));
}

bool changes(const Value& object, std::string_view name) {
  const auto* list = object.get<const Sequence>();
  if (list != nullptr && list->kind == Sequence::Kind::list)
    return std::ranges::find(list_changes, name) != list_changes.end();
  return object.get<const Dict>() != nullptr && std::ranges::find(dict_changes, name) != dict_changes.end();
}

Value loop_attribute(const Value& object, std::string_view name) {
  const Loop& loop = *object.get<Loop>();
  const auto& items = loop.items->items;
  const auto index = static_cast<int64_t>(loop.index), size = static_cast<int64_t>(items.size());
  if (name == "index") return index + 1;
  if (name == "index0") return index;
  if (name == "revindex") return size - index;
  if (name == "revindex0") return size - index - 1;
  if (name == "first") return index == 0;
  if (name == "last") return index + 1 == size;
  if (name == "length") return size;
  if (name == "depth") return int64_t{1};  // grows in recursive loops only
  if (name == "depth0") return int64_t{0};
  if (name == "previtem") return index == 0 ? undefined_value("there is no previous item") : items[loop.index - 1];
  if (name == "nextitem") return index + 1 == size ? undefined_value("there is no next item") : items[loop.index + 1];
  return no_attribute(object, name);
}

/// The characters of a text.
Values characters(Runtime& runtime, const Text& text) {
  runtime.spend_bytes((*text).size() * sizeof(Value));
  Values result;
  for (size_t at = 0; at < (*text).size();) {
    const size_t size = text::utf8_size((*text)[at]);
    result.push_back(text_value((*text).substr(at, size), text.markup));
    at += size;
  }
  return result;
}

/// An index of Python into `size` items, -1: outside.
int64_t place(int64_t index, int64_t size) {
  const int64_t at = index < 0 ? index + size : index;
  return at >= 0 && at < size ? at : -1;
}

/// The item at an index, which may lie outside.
Value indexed(const Value& object, int64_t index) {
  const auto nothing = [&] { return undefined_value(concat(object_name(object), " has no element ", index)); };
  if (const auto* list = object.get<const Sequence>()) {
    const int64_t at = place(index, static_cast<int64_t>(list->items.size()));
    return at < 0 ? nothing() : list->items[static_cast<size_t>(at)];
  }
  const std::u32string all = code_points(object.string());
  const int64_t at = place(index, static_cast<int64_t>(all.size()));
  return at < 0 ? nothing() : text_value(utf8({&all[static_cast<size_t>(at)], 1}), object.as<Text>().markup);
}

bool has_indices(const Value& object) {
  const auto* list = object.get<const Sequence>();
  if (list == nullptr) return object.text();
  return list->kind == Sequence::Kind::list || list->kind == Sequence::Kind::tuple ||
         list->kind == Sequence::Kind::range;
}

/// The indices that a slice of `size` items picks.
std::vector<size_t> picked(int64_t size, const Value* start, const Value* stop, const Value* step) {
  const auto given = [](const Value* value) { return value != nullptr && !value->none(); };
  const int64_t by = given(step) ? integer_argument(*step, "slice") : 1;
  if (by == 0) throw type_failure("the step of a slice is zero");
  const int64_t low = by < 0 ? -1 : 0, high = by < 0 ? size - 1 : size;
  const auto bound = [&](const Value* value, int64_t otherwise) {
    if (!given(value)) return otherwise;
    const int64_t index = integer_argument(*value, "slice");
    return std::clamp(index < 0 ? std::max(index, -size - 1) + size : index, low, high);
  };
  const int64_t begin = bound(start, by < 0 ? high : low), end = bound(stop, by < 0 ? low : high);
  std::vector<size_t> result;
  const int64_t stride = std::clamp(by, -size - 1, size + 1);
  for (int64_t at = begin; by < 0 ? at > end : at < end; at += stride) result.push_back(static_cast<size_t>(at));
  return result;
}

}  // namespace

std::shared_ptr<const Sequence> walk(Runtime& runtime, const Value& value) {
  if (value.is<std::shared_ptr<const Sequence>>()) return value.as<std::shared_ptr<const Sequence>>();
  Values items;
  if (value.text()) {
    items = characters(runtime, value.as<Text>());
  } else if (const auto* dict = value.get<const Dict>()) {
    for (const auto& entry : dict->entries) items.push_back(entry.first);
  } else if (auto* iterator = value.get<Iterator>()) {
    items.assign(iterator->items.begin() + static_cast<std::ptrdiff_t>(iterator->next), iterator->items.end());
    iterator->next = iterator->items.size();
  } else if (!value.undefined()) {
    throw type_failure(concat("a value of type ", type_name(value), " cannot be walked over"));
  }
  const Value all = runtime.list(std::move(items));
  return all.as<std::shared_ptr<const Sequence>>();
}

int64_t length(const Value& value) {
  if (value.text()) return length_of(value.string());
  if (const auto* list = value.get<const Sequence>()) return static_cast<int64_t>(list->items.size());
  if (const auto* dict = value.get<const Dict>()) return static_cast<int64_t>(dict->entries.size());
  if (const auto* loop = value.get<Loop>()) return static_cast<int64_t>(loop->items->items.size());
  if (value.undefined()) return 0;
  throw type_failure(concat("a value of type ", type_name(value), " has no length"));
}

Value attribute(const Value& object, const std::string& name) {
  if (object.undefined()) throw undefined_failure(object);
  if (const auto* space = object.get<Namespace>()) {
    const auto found = std::ranges::find(space->attributes, name, &std::pair<std::string, Value>::first);
    return found == space->attributes.end() ? no_attribute(object, name) : found->second;
  }
  if (const auto* function = find_method(object, name)) return method_value(*function, object);
  if (object.get<Loop>() != nullptr) return loop_attribute(object, name);
  if (changes(object, name)) {
    return undefined_value(concat(object_name(object), ".", name, " would change a value, which transformers forbids"));
  }
  if (const auto* dict = object.get<const Dict>()) {
    if (const Value* value = find(*dict, std::string_view(name))) return *value;
  }
  return no_attribute(object, name);
}

Value item(Runtime& runtime, const Value& object, const Value& index) {
  if (object.undefined()) throw undefined_failure(object);
  if (const auto* dict = object.get<const Dict>()) {
    runtime.spend_steps(static_cast<int64_t>(dict->entries.size() / 16));
    if (const Value* value = find(*dict, index)) return *value;
  } else if (has_indices(object) && (index.is<int64_t>() || index.is<bool>())) {
    if (object.text()) runtime.spend_steps(static_cast<int64_t>(object.string().size() / 64));
    return indexed(object, number_of(index).integer);
  }
  if (!index.text()) return undefined_value(concat(object_name(object), " has no such element"));
  const auto* dict = object.get<const Dict>();
  return dict == nullptr || find_method(object, index.string()) != nullptr || changes(object, index.string())
             ? attribute(object, index.string())
             : no_attribute(object, index.string());
}

Value slice(Runtime& runtime, const Value& object, const Value* start, const Value* stop, const Value* step) {
  if (object.undefined()) throw undefined_failure(object);
  if (!has_indices(object)) throw type_failure(concat("a value of type ", type_name(object), " cannot be sliced"));
  if (object.text()) {
    const std::u32string all = code_points(object.string());
    std::u32string result;
    for (const size_t at : picked(static_cast<int64_t>(all.size()), start, stop, step)) result += all[at];
    return runtime.text(utf8(result), object.as<Text>().markup);
  }
  const auto& list = *object.get<const Sequence>();
  Values result;
  for (const size_t at : picked(static_cast<int64_t>(list.items.size()), start, stop, step))
    result.push_back(list.items[at]);
  return runtime.list(std::move(result),
                      list.kind == Sequence::Kind::tuple ? Sequence::Kind::tuple : Sequence::Kind::list);
}

}  // namespace w4q::jinja
