// The filter tojson as transformers has it: json.dumps, without the escapes of HTML that Jinja2's own has.
#include <algorithm>
#include <cmath>

#include "chat/jinja/failure.h"
#include "chat/jinja/printing.h"
#include "chat/jinja/python_text.h"
#include "core/text.h"
#include "text/utf8.h"

namespace w4q::jinja {
namespace {

std::string unicode_escape(char32_t unit) {
  static constexpr std::string_view hex = "0123456789abcdef";
  std::string result = "\\u";
  for (int digit = 3; digit >= 0; --digit) result += hex[(unit >> (4 * digit)) & 15];
  return result;
}

void append_character(std::string& out, char32_t c, bool ascii) {
  switch (c) {
    case U'"':
      out += "\\\"";
      return;
    case U'\\':
      out += "\\\\";
      return;
    case U'\n':
      out += "\\n";
      return;
    case U'\r':
      out += "\\r";
      return;
    case U'\t':
      out += "\\t";
      return;
    case U'\b':
      out += "\\b";
      return;
    case U'\f':
      out += "\\f";
      return;
    default:
      break;
  }
  if (c >= 0x20 && (c < 0x7F || !ascii)) {
    text::utf8_append(out, c);
  } else if (c < 0x10000) {
    out += c == 0x7F ? "\x7F" : unicode_escape(c);
  } else {
    out += unicode_escape(0xD800 + ((c - 0x10000) >> 10));
    out += unicode_escape(0xDC00 + ((c - 0x10000) & 0x3FF));
  }
}

std::string number_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  return float_text(value);
}

class Writer {
 public:
  Writer(const JsonStyle& style, size_t max_bytes) : style_(style), max_bytes_(max_bytes) {}

  void value(const Value& value, size_t depth) {
    if (out.size() > max_bytes_) {
      throw Failure(ErrorCode::unsupported, "tojson: the text becomes too long")
          .remedy("the template looks damaged or malicious");
    }
    const auto* list = value.get<const Sequence>();
    if (value.text()) {
      string(value.string());
    } else if (list != nullptr && (list->kind == Sequence::Kind::list || list->kind == Sequence::Kind::tuple)) {
      array(*list, depth);
    } else if (const auto* dict = value.get<const Dict>()) {
      object(*dict, depth);
    } else {
      out += scalar(value);
    }
  }

  std::string out;

 private:
  static std::string scalar(const Value& value) {
    if (value.none()) return "null";
    if (value.is<bool>()) return value.as<bool>() ? "true" : "false";
    if (value.is<int64_t>()) return std::to_string(value.as<int64_t>());
    if (value.is<double>()) return number_text(value.as<double>());
    throw type_failure(concat("tojson: a value of type ", type_name(value), " has no form in JSON"));
  }

  void string(std::string_view text) {
    out += '"';
    for (const char32_t c : code_points(text)) append_character(out, c, style_.ascii);
    out += '"';
  }

  void new_line(size_t depth) {
    if (!style_.indent) return;
    out += '\n';
    for (size_t i = 0; i < depth; ++i) out += *style_.indent;
  }

  void array(const Sequence& list, size_t depth) {
    out += '[';
    for (size_t i = 0; i < list.items.size(); ++i) {
      if (i > 0) out += style_.item_separator;
      new_line(depth + 1);
      value(list.items[i], depth + 1);
    }
    if (!list.items.empty()) new_line(depth);
    out += ']';
  }

  void object(const Dict& dict, size_t depth) {
    auto entries = dict.entries;
    if (style_.sort_keys) {
      std::ranges::stable_sort(entries, {}, [](const auto& entry) { return key_text(entry.first); });
    }
    out += '{';
    for (size_t i = 0; i < entries.size(); ++i) {
      if (i > 0) out += style_.item_separator;
      new_line(depth + 1);
      string(key_text(entries[i].first));
      out += style_.key_separator;
      value(entries[i].second, depth + 1);
    }
    if (!entries.empty()) new_line(depth);
    out += '}';
  }

  static std::string key_text(const Value& key) { return key.text() ? key.string() : scalar(key); }

  const JsonStyle& style_;
  size_t max_bytes_;
};

}  // namespace

std::string json_text(const Value& value, const JsonStyle& style, size_t max_bytes) {
  Writer writer(style, max_bytes);
  writer.value(value, 0);
  return std::move(writer.out);
}

}  // namespace w4q::jinja
