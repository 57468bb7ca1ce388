// Filters that give lists or items of them, and default.
#include <algorithm>
#include <array>
#include <functional>

#include "chat/jinja/operators.h"
#include "chat/jinja/python_text.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

/// What is sorted and compared: texts in lower case unless `exact`.
Value key_of(const Value& value, bool exact) {
  return value.text() && !exact ? text_value(lower(value.string())) : value;
}

bool is_set(const Value* value) { return value != nullptr && truth(*value); }

/// Of an item, or of what stands at a path in it.
Value key_at(Runtime& runtime, const Value& value, const Value* path, const Value* exact) {
  return key_of(path == nullptr || path->none() ? value : value_at(runtime, value, *path), is_set(exact));
}

Value list(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("list", arguments);
  return runtime.list(walk(runtime, self)->items);
}

Value first(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("first", arguments);
  if (auto* iterator = self.get<Iterator>(); iterator != nullptr && iterator->next < iterator->items.size()) {
    return iterator->items[iterator->next++];
  }
  const auto all = walk(runtime, self);
  return all->items.empty() ? undefined_value("there is no first item, the sequence is empty") : all->items.front();
}

Value last(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("last", arguments);
  if (self.get<Iterator>() != nullptr)
    throw type_failure("last does not work on what a filter gives; put |list before it");
  const auto all = walk(runtime, self);
  return all->items.empty() ? undefined_value("there is no last item, the sequence is empty") : all->items.back();
}

Value reverse(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("reverse", arguments);
  if (self.text()) {
    std::u32string all = code_points(self.string());
    std::ranges::reverse(all);
    return runtime.text(utf8(all), self.as<Text>().markup);
  }
  Values items = walk(runtime, self)->items;
  std::ranges::reverse(items);
  return runtime.iterator(std::move(items));
}

Values pairs(const Dict& dict) {
  Values result;
  for (const auto& [key, value] : dict.entries) result.push_back(list_value({key, value}, Sequence::Kind::tuple));
  return result;
}

Value items(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("items", arguments);
  if (self.undefined()) return runtime.iterator({});
  const auto* dict = self.get<const Dict>();
  if (dict == nullptr) throw type_failure(concat("items needs a dict, got ", type_name(self)));
  return runtime.iterator(pairs(*dict));
}

void sort_by(Runtime& runtime, Values& values, bool reversed, const std::function<Value(const Value&)>& key) {
  std::vector<std::pair<Value, Value>> keyed;
  for (const Value& value : values) keyed.emplace_back(key(value), value);
  // Python sorts stably, downwards too.
  std::ranges::stable_sort(keyed, [&](const auto& a, const auto& b) {
    runtime.spend_steps(1);
    return reversed ? less(b.first, a.first) : less(a.first, b.first);
  });
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::move(keyed[i].second);
}

Value sort(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [reversed, exact, path] = bind<3>("sort", arguments, {"reverse", "case_sensitive", "attribute"});
  if (path != nullptr && path->text() && path->string().find(',') != std::string::npos) {
    throw unsupported_failure(0, "sort by several attributes");
  }
  Values values = walk(runtime, self)->items;
  sort_by(runtime, values, is_set(reversed),
          [&, exact = exact, path = path](const Value& value) { return key_at(runtime, value, path, exact); });
  return runtime.list(std::move(values));
}

Value sort_dict(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [exact, by, reversed] = bind<3>("dictsort", arguments, {"case_sensitive", "by", "reverse"});
  if (self.undefined()) throw undefined_failure(self);
  const auto* dict = self.get<const Dict>();
  if (dict == nullptr) throw type_failure(concat("dictsort needs a dict, got ", type_name(self)));
  const std::string what = by == nullptr ? "key" : text_argument(*by, "dictsort");
  if (what != "key" && what != "value") throw type_failure("dictsort sorts by 'key' or by 'value'");
  Values values = pairs(*dict);
  sort_by(runtime, values, is_set(reversed), [&, exact = exact](const Value& value) {
    return key_of(value.get<const Sequence>()->items[what == "key" ? 0 : 1], is_set(exact));
  });
  return runtime.list(std::move(values));
}

Value unique(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [exact, path] = bind<2>("unique", arguments, {"case_sensitive", "attribute"});
  Values result, keys;
  const auto walked = walk(runtime, self);
  for (const Value& value : walked->items) {
    const Value key = key_at(runtime, value, path, exact);
    runtime.spend_steps(static_cast<int64_t>(keys.size()));
    if (std::ranges::any_of(keys, [&](const Value& other) { return equal(other, key); })) continue;
    keys.push_back(key);
    result.push_back(value);
  }
  return runtime.iterator(std::move(result));
}

template <bool largest>
Value extreme(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [exact, path] = bind<2>(largest ? "max" : "min", arguments, {"case_sensitive", "attribute"});
  const auto key = [&, exact = exact, path = path](const Value& value) { return key_at(runtime, value, path, exact); };
  const auto all = walk(runtime, self);
  if (all->items.empty()) return undefined_value("there is no largest or smallest item, the sequence is empty");
  const Value* best = &all->items.front();
  for (const Value& value : all->items) {
    if (largest ? less(key(*best), key(value)) : less(key(value), key(*best))) best = &value;
  }
  return *best;
}

Value otherwise(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [value, falsy] = bind<2>("default", arguments, {"default_value", "boolean"});
  if (!self.undefined() && (!is_set(falsy) || truth(self))) return self;
  return value == nullptr ? runtime.text("") : *value;
}

constexpr std::array<Function, 12> rows{{{"d", otherwise},
                                         {"default", otherwise},
                                         {"dictsort", sort_dict},
                                         {"first", first},
                                         {"items", items},
                                         {"last", last},
                                         {"list", list},
                                         {"max", extreme<true>},
                                         {"min", extreme<false>},
                                         {"reverse", reverse},
                                         {"sort", sort},
                                         {"unique", unique}}};

}  // namespace

Value value_at(Runtime& runtime, Value value, const Value& path) {
  if (!path.text()) return item(runtime, value, path);
  for (const std::string& part : split(path.string(), ".", -1, false)) {
    const auto index = !part.empty() && std::ranges::all_of(part, [](char c) { return c >= '0' && c <= '9'; })
                           ? parse_integer(part, 10)
                           : std::nullopt;
    value = item(runtime, value, index ? Value(*index) : text_value(part));
  }
  return value;
}

std::span<const Function> list_filters() noexcept { return rows; }

}  // namespace w4q::jinja
