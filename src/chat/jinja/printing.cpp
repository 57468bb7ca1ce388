#include "chat/jinja/printing.h"

#include <array>
#include <charconv>
#include <cmath>

#include "chat/jinja/failure.h"
#include "chat/jinja/python_text.h"
#include "core/text.h"
#include "text/utf8.h"

namespace w4q::jinja {
namespace {

constexpr int max_depth = 2 * max_value_depth;  // namespaces may hold each other

/// repr(str) of a character that is not shown itself.
std::string escape_of(char32_t c) {
  static constexpr std::string_view hex = "0123456789abcdef";
  const int digits = c < 0x100 ? 2 : c < 0x10000 ? 4 : 8;
  std::string result = c < 0x100 ? "\\x" : c < 0x10000 ? "\\u" : "\\U";
  for (int digit = digits - 1; digit >= 0; --digit) result += hex[(c >> (4 * digit)) & 15];
  return result;
}

std::string quote_text(std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string result(1, quote);
  for (const char32_t c : code_points(text)) {
    if (c == U'\n') {
      result += "\\n";
    } else if (c == U'\t') {
      result += "\\t";
    } else if (c == U'\r') {
      result += "\\r";
    } else if (c == U'\\' || c == static_cast<char32_t>(quote)) {
      result += '\\';
      result += static_cast<char>(c);
    } else if (is_printable(c)) {
      text::utf8_append(result, c);
    } else {
      result += escape_of(c);
    }
  }
  return result + quote;
}

class Printer {
 public:
  explicit Printer(size_t max_bytes) : max_bytes_(max_bytes) {}

  void value(const Value& value, int depth) {
    if (depth > max_depth || out.size() > max_bytes_) {
      throw Failure(ErrorCode::unsupported, "a value is too deep or too large to print")
          .remedy("the template looks damaged or malicious");
    }
    if (value.undefined()) {
      out += "Undefined";
    } else if (value.text()) {
      out += value.as<Text>().markup ? concat("Markup(", quote_text(value.string()), ")") : quote_text(value.string());
    } else if (const auto* list = value.get<const Sequence>()) {
      sequence(*list, depth);
    } else if (const auto* dict = value.get<const Dict>()) {
      entries(*dict, depth);
    } else if (const auto* space = value.get<Namespace>()) {
      attributes(*space, depth);
    } else {
      scalar(value);
    }
  }

  std::string out;

 private:
  void scalar(const Value& value) {
    if (value.none()) {
      out += "None";
    } else if (value.is<bool>()) {
      out += value.as<bool>() ? "True" : "False";
    } else if (value.is<int64_t>()) {
      out += std::to_string(value.as<int64_t>());
    } else if (value.is<double>()) {
      out += float_text(value.as<double>());
    } else if (const auto* loop = value.get<Loop>()) {
      out += concat("<LoopContext ", loop->index + 1, "/", loop->items->items.size(), ">");
    } else {
      out += concat("<", type_name(value), ">");  // Python prints an address
    }
  }

  void items(const Sequence& list, int depth) {
    for (size_t i = 0; i < list.items.size(); ++i) {
      if (i > 0) out += ", ";
      value(list.items[i], depth + 1);
    }
  }

  void sequence(const Sequence& list, int depth) {
    switch (list.kind) {
      case Sequence::Kind::range:
        out += concat("range(", list.range[0], ", ", list.range[1]);
        out += list.range[2] == 1 ? ")" : concat(", ", list.range[2], ")");
        return;
      case Sequence::Kind::tuple:
        out += "(";
        items(list, depth);
        out += list.items.size() == 1 ? ",)" : ")";
        return;
      case Sequence::Kind::list:
        out += "[";
        items(list, depth);
        out += "]";
        return;
      default:
        out += list.kind == Sequence::Kind::keys     ? "dict_keys(["
               : list.kind == Sequence::Kind::values ? "dict_values(["
                                                     : "dict_items([";
        items(list, depth);
        out += "])";
    }
  }

  void entries(const Dict& dict, int depth) {
    out += "{";
    for (size_t i = 0; i < dict.entries.size(); ++i) {
      if (i > 0) out += ", ";
      value(dict.entries[i].first, depth + 1);
      out += ": ";
      value(dict.entries[i].second, depth + 1);
    }
    out += "}";
  }

  void attributes(const Namespace& space, int depth) {
    out += "<Namespace {";
    for (size_t i = 0; i < space.attributes.size(); ++i) {
      if (i > 0) out += ", ";
      out += concat(quote_text(space.attributes[i].first), ": ");
      value(space.attributes[i].second, depth + 1);
    }
    out += "}>";
  }

  size_t max_bytes_;
};

}  // namespace

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  std::array<char, 40> buffer{};
  const auto end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::scientific).ptr;
  const std::string_view written(buffer.data(), static_cast<size_t>(end - buffer.data()));
  const size_t mark = written.find('e');
  const std::string_view sign = written.starts_with('-') ? "-" : "";
  std::string digits(written.substr(sign.size(), mark - sign.size()));
  std::erase(digits, '.');
  int exponent = 0;
  const char* const first = written.data() + mark + 1;
  std::from_chars(*first == '+' ? first + 1 : first, end, exponent);
  if (exponent < -4 || exponent >= 16) {
    const std::string fraction = digits.size() > 1 ? "." + digits.substr(1) : "";
    const int size = std::abs(exponent);
    return concat(sign, digits[0], fraction, exponent < 0 ? "e-" : "e+", size < 10 ? "0" : "", size);
  }
  if (exponent < 0) return concat(sign, "0.", std::string(static_cast<size_t>(-exponent - 1), '0'), digits);
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return concat(sign, digits, std::string(whole - digits.size(), '0'), ".0");
  return concat(sign, digits.substr(0, whole), ".", digits.substr(whole));
}

std::string printed(const Value& value, size_t max_bytes) {
  if (value.text()) return value.string();
  if (value.undefined()) return {};
  return represented(value, max_bytes);
}

std::string represented(const Value& value, size_t max_bytes) {
  Printer printer(max_bytes);
  printer.value(value, 0);
  return std::move(printer.out);
}

}  // namespace w4q::jinja
