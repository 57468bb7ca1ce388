// Methods of Python's str.
#include <algorithm>
#include <array>

#include "chat/jinja/operators.h"
#include "chat/jinja/python_text.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

/// The mark of `self` on a new text.
Value like(Runtime& runtime, const Value& self, std::string text) {
  return runtime.text(std::move(text), self.as<Text>().markup);
}

template <std::string (*change)(std::string_view)>
Value changed(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("str", arguments);
  return like(runtime, self, change(self.string()));
}

template <bool left, bool right>
Value stripped(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [characters] = bind<1>("strip", arguments, {"chars"});
  std::optional<std::string> set;
  if (characters != nullptr && !characters->none()) set = text_argument(*characters, "strip");
  return like(runtime, self, strip(self.string(), set, {left, right}));
}

template <bool from_right>
Value split_up(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [by, most] = bind<2>("split", arguments, {"sep", "maxsplit"});
  std::optional<std::string> separator;
  if (by != nullptr && !by->none()) separator = text_argument(*by, "split");
  if (separator && separator->empty()) throw type_failure("split() needs a separator that is not empty");
  const int64_t count = most == nullptr ? -1 : integer_argument(*most, "split");
  return runtime.texts(split(self.string(), separator, count, from_right), self.as<Text>().markup);
}

Value lines(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [keep] = bind<1>("splitlines", arguments, {"keepends"});
  return runtime.texts(split_lines(self.string(), keep != nullptr && truth(*keep)), self.as<Text>().markup);
}

template <bool from_right>
Value partition(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [by] = bind<1>("partition", arguments, {"sep"}, 1);
  const std::string& text = self.string();
  const std::string& separator = text_argument(*by, "partition");
  if (separator.empty()) throw type_failure("partition() needs a separator that is not empty");
  const size_t at = from_right ? text.rfind(separator) : text.find(separator);
  std::array<std::string, 3> parts{from_right ? "" : text, "", from_right ? text : ""};
  if (at != std::string::npos) parts = {text.substr(0, at), separator, text.substr(at + separator.size())};
  Values values;
  for (std::string& part : parts) values.push_back(like(runtime, self, std::move(part)));
  return runtime.list(std::move(values), Sequence::Kind::tuple);
}

/// The part of a text that the arguments start and end of a method pick, and how many characters stand before it.
struct Part {
  std::string text;
  int64_t before = 0;
  bool beyond = false;  ///< it starts behind the end
};
Part part_of(const std::string& text, const Value* start, const Value* end, std::string_view function) {
  const auto given = [](const Value* value) { return value != nullptr && !value->none(); };
  if (!given(start) && !given(end)) return {text};
  const std::u32string all = code_points(text);
  const auto size = static_cast<int64_t>(all.size());
  const auto bound = [&](const Value* value, int64_t otherwise) {
    if (!given(value)) return otherwise;
    const int64_t index = integer_argument(*value, function);
    return std::max<int64_t>(index < 0 ? std::max(index, -size) + size : index, 0);
  };
  const int64_t from = bound(start, 0), to = std::min(bound(end, size), size);
  if (from > size) return {"", 0, true};
  return {utf8(std::u32string_view(all).substr(static_cast<size_t>(from),
                                               static_cast<size_t>(std::max<int64_t>(to - from, 0)))),
          from, from > to};
}

bool matches(std::string_view text, const Value& what, bool at_start) {
  if (const auto* several = what.get<const Sequence>(); several != nullptr && several->kind == Sequence::Kind::tuple) {
    return std::ranges::any_of(several->items, [&](const Value& one) { return matches(text, one, at_start); });
  }
  const std::string& affix = text_argument(what, at_start ? "startswith" : "endswith");
  return at_start ? text.starts_with(affix) : text.ends_with(affix);
}

template <bool at_start>
Value has_affix(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  const auto [what, start, end] =
      bind<3>(at_start ? "startswith" : "endswith", arguments, {"prefix", "start", "end"}, 1);
  const Part part = part_of(self.string(), start, end, "startswith");
  return !part.beyond && matches(part.text, *what, at_start);
}

template <bool at_start>
Value remove_affix(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [what] = bind<1>(at_start ? "removeprefix" : "removesuffix", arguments, {"prefix"}, 1);
  const std::string& text = self.string();
  const std::string& affix = text_argument(*what, "removeprefix");
  if (at_start) return like(runtime, self, text.starts_with(affix) ? text.substr(affix.size()) : text);
  return like(runtime, self, text.ends_with(affix) ? text.substr(0, text.size() - affix.size()) : text);
}

Value replaced(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [old, with, count] = bind<3>("replace", arguments, {"old", "new", "count"}, 2);
  const int64_t most = count == nullptr ? -1 : integer_argument(*count, "replace");
  return like(runtime, self,
              replace(self.string(), text_argument(*old, "replace"), text_argument(*with, "replace"), most,
                      runtime.bytes_left()));
}

template <bool from_right, bool must>
Value place_of(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  const auto [what, start, end] = bind<3>("find", arguments, {"sub", "start", "end"}, 1);
  const Part part = part_of(self.string(), start, end, "find");
  const std::string& sought = text_argument(*what, "find");
  const size_t at = part.beyond ? std::string::npos : from_right ? part.text.rfind(sought) : part.text.find(sought);
  if (at != std::string::npos) return part.before + length_of(std::string_view(part.text).substr(0, at));
  if (must) throw type_failure("index(): the text is not there");
  return int64_t{-1};
}

Value count_of(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  const auto [what, start, end] = bind<3>("count", arguments, {"sub", "start", "end"}, 1);
  const Part part = part_of(self.string(), start, end, "count");
  const std::string& sought = text_argument(*what, "count");
  if (sought.empty()) return part.beyond ? int64_t{0} : length_of(part.text) + 1;
  int64_t count = 0;
  for (size_t at = part.text.find(sought); at != std::string::npos; at = part.text.find(sought, at + sought.size()))
    ++count;
  return count;
}

Value join(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [all] = bind<1>("join", arguments, {"iterable"}, 1);
  std::string result;
  bool first = true;
  const auto walked = walk(runtime, *all);
  for (const Value& value : walked->items) {
    if (!first) result += self.string();
    first = false;
    result += text_argument(value, "join");
    runtime.spend_bytes(self.string().size());
  }
  return like(runtime, self, std::move(result));
}

Value format(Runtime& runtime, const Value& self, const Arguments& arguments) {
  return like(runtime, self, brace_format(runtime, self.string(), arguments));
}

constexpr std::array<Function, 25> rows{{{"capitalize", changed<capitalize>},
                                         {"casefold", changed<lower>},
                                         {"count", count_of},
                                         {"endswith", has_affix<false>},
                                         {"find", place_of<false, false>},
                                         {"format", format},
                                         {"index", place_of<false, true>},
                                         {"join", join},
                                         {"lower", changed<lower>},
                                         {"lstrip", stripped<true, false>},
                                         {"partition", partition<false>},
                                         {"removeprefix", remove_affix<true>},
                                         {"removesuffix", remove_affix<false>},
                                         {"replace", replaced},
                                         {"rfind", place_of<true, false>},
                                         {"rindex", place_of<true, true>},
                                         {"rpartition", partition<true>},
                                         {"rsplit", split_up<true>},
                                         {"rstrip", stripped<false, true>},
                                         {"split", split_up<false>},
                                         {"splitlines", lines},
                                         {"startswith", has_affix<true>},
                                         {"strip", stripped<true, true>},
                                         {"title", changed<title>},
                                         {"upper", changed<upper>}}};

}  // namespace

std::span<const Function> text_methods() noexcept { return rows; }

}  // namespace w4q::jinja
