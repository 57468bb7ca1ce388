// Filters that give texts.
#include <algorithm>
#include <array>

#include "chat/jinja/operators.h"
#include "chat/jinja/printing.h"
#include "chat/jinja/python_text.h"
#include "core/entities.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

/// soft_str: a text stays what it is, with its mark.
Text softly(Runtime& runtime, const Value& value) {
  return value.text() ? value.as<Text>() : runtime.text(runtime.printed(value)).as<Text>();
}

template <std::string (*change)(std::string_view)>
Value changed(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("filter", arguments);
  const Text text = softly(runtime, self);
  return runtime.text(change(*text), text.markup);
}

/// A word begins behind white space, hyphens and opening brackets; the filter is not str.title().
std::string words_titled(std::string_view text) {
  std::u32string all = code_points(text);
  std::string result, word;
  const auto flush = [&] {
    result += capitalize(word);
    word.clear();
  };
  for (const char32_t c : all) {
    const bool separates = is_space(c) || std::u32string_view(U"-({[<").find(c) != std::u32string_view::npos;
    if (separates) flush();
    (separates ? result : word) += utf8({&c, 1});
  }
  flush();
  return result;
}

Value string(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("string", arguments);
  return softly(runtime, self);
}

Value trim(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [characters] = bind<1>("trim", arguments, {"chars"});
  const Text text = softly(runtime, self);
  std::optional<std::string> set;
  if (characters != nullptr && !characters->none()) set = text_argument(*characters, "trim");
  return runtime.text(strip(*text, set, {}), text.markup);
}

Value replace_in(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [old, with, count] = bind<3>("replace", arguments, {"old", "new", "count"}, 2);
  const int64_t most = count == nullptr || count->none() ? -1 : integer_argument(*count, "replace");
  return runtime.text(
      replace(runtime.printed(self), runtime.printed(*old), runtime.printed(*with), most, runtime.bytes_left()));
}

Value safe(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("safe", arguments);
  return runtime.text(runtime.printed(self), true);
}

Value escape(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("escape", arguments);
  if (self.text() && self.as<Text>().markup) return self;
  return runtime.text(with_entities(runtime.printed(self)), true);
}

Value force_escape(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("forceescape", arguments);
  return runtime.text(with_entities(runtime.printed(self)), true);
}

std::string spaces(Runtime& runtime, const Value& width) {
  if (width.text()) return width.string();
  const auto count = static_cast<size_t>(std::max<int64_t>(integer_argument(width, "indent"), 0));
  runtime.spend_bytes(count);
  return std::string(count, ' ');
}

Value indent(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [width, first, blank] = bind<3>("indent", arguments, {"width", "first", "blank"});
  const std::string margin = width == nullptr ? "    " : spaces(runtime, *width);
  const auto lines = split_lines(text_argument(self, "indent") + "\n", false);
  std::string result = first != nullptr && truth(*first) ? margin : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    const bool indented = i > 0 && (!lines[i].empty() || (blank != nullptr && truth(*blank)));
    runtime.spend_bytes(margin.size());
    result += concat(i > 0 ? "\n" : "", indented ? margin : "", lines[i]);
  }
  return runtime.text(std::move(result), self.as<Text>().markup);
}

Value join(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [between, path] = bind<2>("join", arguments, {"d", "attribute"});
  const std::string separator = between == nullptr ? "" : runtime.printed(*between);
  Values items = walk(runtime, self)->items;
  if (path != nullptr && !path->none()) {
    for (Value& value : items) value = value_at(runtime, value, *path);
  }
  std::string result;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) {
      runtime.spend_bytes(separator.size());
      result += separator;
    }
    result += runtime.printed(items[i]);
  }
  return runtime.text(std::move(result));
}

Value format(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const Text text = softly(runtime, self);
  if (arguments.keywords.empty()) {
    return runtime.text(percent_format(runtime, *text, runtime.list(arguments.positional, Sequence::Kind::tuple)));
  }
  throw unsupported_failure(0, "the filter format takes no arguments with names");
}

/// The spelling that transformers' filter tojson takes.
JsonStyle json_style(const Arguments& arguments) {
  const auto [ascii, indentation, separators, sort] =
      bind<4>("tojson", arguments, {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ascii = ascii != nullptr && truth(*ascii);
  style.sort_keys = sort != nullptr && truth(*sort);
  if (indentation != nullptr && !indentation->none()) {
    const auto width = indentation->text() ? 0 : std::clamp<int64_t>(integer_argument(*indentation, "tojson"), 0, 1000);
    style.indent = indentation->text() ? indentation->string() : std::string(static_cast<size_t>(width), ' ');
    style.item_separator = ",";
  }
  if (separators != nullptr && !separators->none()) {
    const auto* pair = separators->get<const Sequence>();
    if (pair == nullptr || pair->items.size() != 2) throw type_failure("tojson: separators are a pair of texts");
    style.item_separator = text_argument(pair->items[0], "tojson");
    style.key_separator = text_argument(pair->items[1], "tojson");
  }
  return style;
}

Value to_json(Runtime& runtime, const Value& self, const Arguments& arguments) {
  return runtime.text(json_text(self, json_style(arguments), runtime.bytes_left()));
}

constexpr std::array<Function, 15> rows{{{"capitalize", changed<capitalize>},
                                         {"e", escape},
                                         {"escape", escape},
                                         {"forceescape", force_escape},
                                         {"format", format},
                                         {"indent", indent},
                                         {"join", join},
                                         {"lower", changed<lower>},
                                         {"replace", replace_in},
                                         {"safe", safe},
                                         {"string", string},
                                         {"title", changed<words_titled>},
                                         {"tojson", to_json},
                                         {"trim", trim},
                                         {"upper", changed<upper>}}};

}  // namespace

std::span<const Function> text_filters() noexcept { return rows; }

}  // namespace w4q::jinja
