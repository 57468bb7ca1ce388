// Methods that ask about texts, those of lists, dicts and loops, and the functions that are global.
#include <algorithm>
#include <array>
#include <ctime>
#include <iomanip>
#include <locale>
#include <sstream>

#include "chat/jinja/operators.h"
#include "chat/jinja/python_text.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

/// Whether all characters are such, and there is one.
template <bool (*holds)(char32_t) noexcept>
Value all_are(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  bind_none("str", arguments);
  return !self.string().empty() && std::ranges::all_of(code_points(self.string()), holds);
}
bool is_alphanumeric(char32_t c) noexcept { return is_alpha(c) || is_digit(c); }

template <bool (*holds)(std::string_view)>
Value text_is(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  bind_none("str", arguments);
  return holds(self.string());
}

Value fill_zeros(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [width] = bind<1>("zfill", arguments, {"width"}, 1);
  const int64_t missing = integer_argument(*width, "zfill") - length_of(self.string());
  std::string text = self.string();
  if (missing <= 0) return self;
  runtime.spend_bytes(static_cast<size_t>(missing));
  const bool sign = text.starts_with('-') || text.starts_with('+');
  text.insert(sign ? 1 : 0, static_cast<size_t>(missing), '0');
  return runtime.text(std::move(text));
}

Value index_of(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  const auto [value] = bind<1>("index", arguments, {"value"}, 1);
  const auto& items = self.get<const Sequence>()->items;
  const auto found = std::ranges::find_if(items, [value = value](const Value& other) { return equal(other, *value); });
  if (found == items.end()) throw type_failure("index(): the value is not in the list");
  return static_cast<int64_t>(found - items.begin());
}

Value count_of(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  const auto [value] = bind<1>("count", arguments, {"value"}, 1);
  return static_cast<int64_t>(std::ranges::count_if(
      self.get<const Sequence>()->items, [value = value](const Value& other) { return equal(other, *value); }));
}

Value same(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  bind_none("copy", arguments);
  return self;  // values never change
}

Value get(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [key, otherwise] = bind<2>("get", arguments, {"key", "default"}, 1);
  const auto& dict = *self.get<const Dict>();
  runtime.spend_steps(static_cast<int64_t>(dict.entries.size() / 16));
  if (const Value* value = find(dict, *key)) return *value;
  return otherwise == nullptr ? Value() : *otherwise;
}

template <Sequence::Kind kind>
Value view(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("dict", arguments);
  Values items;
  for (const auto& [key, value] : self.get<const Dict>()->entries) {
    if (kind == Sequence::Kind::items) {
      items.push_back(runtime.list({key, value}, Sequence::Kind::tuple));
    } else {
      items.push_back(kind == Sequence::Kind::keys ? key : value);
    }
  }
  return runtime.list(std::move(items), kind);
}

Value cycle(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  if (arguments.positional.empty()) throw type_failure("loop.cycle() needs values");
  return arguments.positional[self.get<Loop>()->index % arguments.positional.size()];
}

Value changed(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Value now = runtime.list(arguments.positional, Sequence::Kind::tuple);
  Loop& loop = *self.get<Loop>();
  if (!loop.changed.none() && equal(loop.changed, now)) return false;
  loop.changed = now;
  return true;
}

Value range(Runtime& runtime, const Value& /*self*/, const Arguments& arguments) {
  constexpr int64_t most = 100'000;  // as Jinja2's sandbox
  const auto [first, second, third] = bind<3>("range", arguments, {"start", "stop", "step"}, 1);
  const int64_t start = second == nullptr ? 0 : integer_argument(*first, "range");
  const int64_t stop = integer_argument(second == nullptr ? *first : *second, "range");
  const int64_t step = third == nullptr ? 1 : integer_argument(*third, "range");
  if (step == 0) throw type_failure("the step of a range is zero");
  Sequence result{.kind = Sequence::Kind::range, .range = {start, stop, step}};
  int64_t at = start;
  for (bool past = false; !past && (step > 0 ? at < stop : at > stop); past = __builtin_add_overflow(at, step, &at)) {
    if (std::ssize(result.items) >= most) throw type_failure(concat("a range may have ", most, " numbers"));
    result.items.emplace_back(at);
  }
  runtime.spend_bytes(result.items.size() * sizeof(Value));
  return std::make_shared<const Sequence>(std::move(result));
}

/// The entries of a dict or of pairs, and the arguments with names.
std::vector<std::pair<Value, Value>> entries_of(Runtime& runtime, const Arguments& arguments,
                                                std::string_view function) {
  if (arguments.positional.size() > 1) throw type_failure(concat(function, "() takes one dict"));
  std::vector<std::pair<Value, Value>> entries;
  const auto put = [&](const Value& key, const Value& value) {
    runtime.spend_steps(static_cast<int64_t>(entries.size() / 16) + 1);
    const auto found = std::ranges::find_if(entries, [&](const auto& entry) { return equal(entry.first, key); });
    if (found == entries.end()) {
      entries.emplace_back(key, value);
    } else {
      found->second = value;
    }
  };
  if (!arguments.positional.empty()) {
    const Value& from = arguments.positional.front();
    if (const auto* dict = from.get<const Dict>()) {
      for (const auto& [key, value] : dict->entries) put(key, value);
    } else {
      const auto walked = walk(runtime, from);
      for (const Value& pair : walked->items) {
        const auto both = walk(runtime, pair);
        if (both->items.size() != 2) throw type_failure(concat(function, "() needs pairs of a key and a value"));
        put(both->items[0], both->items[1]);
      }
    }
  }
  for (const auto& [name, value] : arguments.keywords) put(text_value(name), value);
  return entries;
}

Value dict(Runtime& runtime, const Value& /*self*/, const Arguments& arguments) {
  auto entries = entries_of(runtime, arguments, "dict");
  runtime.spend_bytes(entries.size() * 2 * sizeof(Value));
  return dict_value(std::move(entries));
}

Value make_namespace(Runtime& runtime, const Value& /*self*/, const Arguments& arguments) {
  std::vector<std::pair<std::string, Value>> attributes;
  for (const auto& [key, value] : entries_of(runtime, arguments, "namespace")) {
    attributes.emplace_back(text_argument(key, "namespace"), value);
  }
  return runtime.make_namespace(std::move(attributes));
}

Value raise(Runtime& runtime, const Value& /*self*/, const Arguments& arguments) {
  const auto [message] = bind<1>("raise_exception", arguments, {"message"}, 1);
  throw Failure(ErrorCode::bad_file,
                concat("the template refuses the conversation: ", printable(runtime.printed(*message).substr(0, 500))))
      .remedy("change the conversation, or leave it out");
}

/// The date that the runtime was given, at midnight: what is rendered must not depend on the day.
Value date(Runtime& runtime, const Value& /*self*/, const Arguments& arguments) {
  const auto [format] = bind<1>("strftime_now", arguments, {"format"}, 1);
  std::tm time{};
  std::istringstream in(runtime.date());
  in.imbue(std::locale::classic());
  in >> std::get_time(&time, "%Y-%m-%d");
  std::mktime(&time);  // the day of the week and of the year
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out << std::put_time(&time, text_argument(*format, "strftime_now").c_str());
  return runtime.text(out.str());
}

constexpr std::array<Function, 8> text_rows{{{"isalnum", all_are<is_alphanumeric>},
                                             {"isalpha", all_are<is_alpha>},
                                             {"isdecimal", all_are<is_digit>},
                                             {"isdigit", all_are<is_digit>},
                                             {"islower", text_is<all_lower>},
                                             {"isspace", all_are<is_space>},
                                             {"isupper", text_is<all_upper>},
                                             {"zfill", fill_zeros}}};
constexpr std::array<Function, 3> list_rows{{{"copy", same}, {"count", count_of}, {"index", index_of}}};
constexpr std::array<Function, 5> dict_rows{{{"copy", same},
                                             {"get", get},
                                             {"items", view<Sequence::Kind::items>},
                                             {"keys", view<Sequence::Kind::keys>},
                                             {"values", view<Sequence::Kind::values>}}};
constexpr std::array<Function, 2> loop_rows{{{"changed", changed}, {"cycle", cycle}}};
constexpr std::array<Function, 5> global_rows{{{"dict", dict},
                                               {"namespace", make_namespace},
                                               {"raise_exception", raise},
                                               {"range", range},
                                               {"strftime_now", date}}};

}  // namespace

std::span<const Function> text_predicates() noexcept { return text_rows; }
std::span<const Function> list_methods() noexcept { return list_rows; }
std::span<const Function> dict_methods() noexcept { return dict_rows; }
std::span<const Function> loop_methods() noexcept { return loop_rows; }
std::span<const Function> globals() noexcept { return global_rows; }

}  // namespace w4q::jinja
