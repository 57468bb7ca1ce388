#include "chat/jinja/runtime.h"

#include <algorithm>

#include "chat/jinja/printing.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

const Function* find_in(std::span<const Function> table, std::string_view name) noexcept {
  const auto found = std::ranges::find(table, name, &Function::name);
  return found == table.end() ? nullptr : &*found;
}

Failure too_much(std::string_view what) {
  return Failure(ErrorCode::unsupported, concat("the template takes too much ", what))
      .remedy("it looks damaged or malicious, or a conversation is far too long: cut it");
}

}  // namespace

void Runtime::spend_steps(int64_t steps) {
  limits_.steps -= steps;
  if (limits_.steps < 0) throw too_much("time");
}

void Runtime::spend_bytes(size_t bytes) {
  if (bytes > bytes_left()) throw too_much("memory");
  limits_.bytes -= static_cast<int64_t>(bytes);
}

Value Runtime::text(std::string text, bool markup) {
  spend_bytes(text.size());
  return text_value(std::move(text), markup);
}

Value Runtime::list(Values items, Sequence::Kind kind) {
  spend_bytes(items.size() * sizeof(Value));
  return list_value(std::move(items), kind);
}

Value Runtime::texts(const std::vector<std::string>& items, bool markup) {
  Values values;
  for (const std::string& item : items) values.push_back(text(item, markup));
  return list(std::move(values));
}

Value Runtime::iterator(Values items) {
  const Value all = list(std::move(items));
  const auto& sequence = *all.get<const Sequence>();
  return std::make_shared<Iterator>(Iterator{sequence.items, 0, sequence.depth});
}

std::string Runtime::printed(const Value& value) {
  std::string text = jinja::printed(value, bytes_left());
  spend_bytes(text.size());
  return text;
}

const Function* find_filter(std::string_view name) noexcept {
  for (const auto table : {text_filters(), number_filters(), list_filters(), choice_filters()}) {
    if (const auto* found = find_in(table, name)) return found;
  }
  return nullptr;
}

const Function* find_test(std::string_view name) noexcept { return find_in(tests(), name); }
const Function* find_global(std::string_view name) noexcept { return find_in(globals(), name); }

const Function* find_method(const Value& self, std::string_view name) noexcept {
  if (self.text()) {
    const auto* found = find_in(text_methods(), name);
    return found != nullptr ? found : find_in(text_predicates(), name);
  }
  if (const auto* list = self.get<const Sequence>()) {
    const bool has = list->kind == Sequence::Kind::list || list->kind == Sequence::Kind::tuple;
    return has ? find_in(list_methods(), name) : nullptr;
  }
  if (self.get<const Dict>() != nullptr) return find_in(dict_methods(), name);
  return self.get<Loop>() != nullptr ? find_in(loop_methods(), name) : nullptr;
}

Value run_filter(Runtime& runtime, std::string_view name, const Value& value, const Arguments& arguments) {
  const auto* function = find_filter(name);
  if (function == nullptr) throw unsupported_failure(0, concat("there is no filter '", printable(name), "'"));
  return function->run(runtime, value, arguments);
}

bool run_test(Runtime& runtime, std::string_view name, const Value& value, const Arguments& arguments) {
  const auto* function = find_test(name);
  if (function == nullptr) throw unsupported_failure(0, concat("there is no test '", printable(name), "'"));
  return truth(function->run(runtime, value, arguments));
}

void detail::bind(std::string_view function, const Arguments& arguments, std::span<const std::string_view> names,
                  std::span<const Value*> values, size_t required) {
  if (arguments.positional.size() > names.size()) {
    throw type_failure(concat(function, "() takes ", names.size(), " arguments, got ", arguments.positional.size()));
  }
  for (size_t i = 0; i < arguments.positional.size(); ++i) values[i] = &arguments.positional[i];
  for (const auto& [name, value] : arguments.keywords) {
    const auto found = std::ranges::find(names, name);
    const auto index = static_cast<size_t>(found - names.begin());
    if (found == names.end() || values[index] != nullptr) {
      throw type_failure(concat(function, "(): unexpected argument '", printable(name), "'"));
    }
    values[index] = &value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (values[i] == nullptr) throw type_failure(concat(function, "() needs the argument '", names[i], "'"));
  }
}

void bind_none(std::string_view function, const Arguments& arguments) {
  if (arguments.positional.empty() && arguments.keywords.empty()) return;
  throw type_failure(concat(function, "() takes no arguments"));
}

int64_t integer_argument(const Value& value, std::string_view function) {
  if (value.undefined()) throw undefined_failure(value);
  const Number number = number_of(value);
  if (number.is_number && !number.is_float) return number.integer;
  throw type_failure(concat(function, "() needs an integer, got ", type_name(value)));
}

const std::string& text_argument(const Value& value, std::string_view function) {
  if (value.undefined()) throw undefined_failure(value);
  if (value.text()) return value.string();
  throw type_failure(concat(function, "() needs a text, got ", type_name(value)));
}

}  // namespace w4q::jinja
