// text % values and text.format(values).
#include <array>
#include <cstdio>

#include "chat/jinja/operators.h"
#include "chat/jinja/printing.h"
#include "chat/jinja/python_text.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

constexpr int64_t max_width = 1000;

struct Conversion {
  bool left = false, zeros = false, sign = false, space = false;
  int64_t width = 0, precision = -1;
  char type = 0;
};

Conversion parse_conversion(std::string_view text, size_t& at) {
  Conversion result;
  const auto next = [&] {
    if (at >= text.size()) throw type_failure("a format of % is incomplete");
    return text[at];
  };
  for (; std::string_view("-0+ #").find(next()) != std::string_view::npos; ++at) {
    result.left = result.left || text[at] == '-';
    result.zeros = result.zeros || text[at] == '0';
    result.sign = result.sign || text[at] == '+';
    result.space = result.space || text[at] == ' ';
  }
  const auto number = [&] {
    int64_t value = 0;
    for (; next() >= '0' && next() <= '9' && value <= max_width; ++at) value = 10 * value + (text[at] - '0');
    if (value > max_width) throw type_failure("a format of % is too wide");
    return value;
  };
  result.width = number();
  if (next() == '.') {
    ++at;
    result.precision = number();
  }
  result.type = next();
  ++at;
  return result;
}

std::string padded(std::string text, const Conversion& how, bool number) {
  const int64_t missing = how.width - length_of(text);
  if (missing <= 0) return text;
  const auto count = static_cast<size_t>(missing);
  if (how.left) return text + std::string(count, ' ');
  if (!how.zeros || !number) return std::string(count, ' ') + text;
  const bool sign = text.starts_with('-') || text.starts_with('+') || text.starts_with(' ');
  return text.insert(sign ? 1 : 0, count, '0');
}

std::string real_text(double value, const Conversion& how) {
  std::array<char, 1500> buffer{};
  const int digits = how.precision < 0 ? 6 : static_cast<int>(how.precision);
  if (how.type == 'e') {
    std::snprintf(buffer.data(), buffer.size(), "%.*e", digits, value);
  } else if (how.type == 'g') {
    std::snprintf(buffer.data(), buffer.size(), "%.*g", digits, value);
  } else {
    std::snprintf(buffer.data(), buffer.size(), "%.*f", digits, value);
  }
  return buffer.data();
}

std::string number_text(const Value& value, const Conversion& how) {
  const Number number = number_of(value);
  if (!number.is_number) throw type_failure(concat("%", how.type, " needs a number, got ", type_name(value)));
  std::string text;
  if (how.type == 'x') {
    if (number.is_float || number.integer < 0) throw unsupported_failure(0, "%x of this number");
    std::array<char, 20> buffer{};
    std::snprintf(buffer.data(), buffer.size(), "%lx", static_cast<unsigned long>(number.integer));
    text = buffer.data();
  } else if (how.type == 'd' || how.type == 'i' || how.type == 'u') {
    if (number.is_float && !(std::abs(number.real) < 9e18)) throw type_failure("%d of a number without a size");
    text = std::to_string(number.is_float ? static_cast<int64_t>(number.real) : number.integer);
  } else {
    text = real_text(number.real, how);
  }
  if (!text.starts_with('-')) text.insert(0, how.sign ? "+" : how.space ? " " : "");
  return padded(std::move(text), how, true);
}

std::string converted(Runtime& runtime, const Value& value, const Conversion& how) {
  if (how.type == 's' || how.type == 'r') {
    std::string text = how.type == 's' ? runtime.printed(value) : represented(value, runtime.bytes_left());
    if (how.precision >= 0) text = utf8(code_points(text).substr(0, static_cast<size_t>(how.precision)));
    return padded(std::move(text), how, false);
  }
  if (std::string_view("diufegx").find(how.type) != std::string_view::npos) return number_text(value, how);
  throw unsupported_failure(0, concat("the conversion %", printable(std::string(1, how.type)), " of a format"));
}

}  // namespace

std::string percent_format(Runtime& runtime, std::string_view text, const Value& arguments) {
  const auto* list = arguments.get<const Sequence>();
  const bool several = list != nullptr && list->kind == Sequence::Kind::tuple;
  const Values values = several ? list->items : Values{arguments};
  std::string result;
  size_t used = 0;
  for (size_t at = 0; at < text.size();) {
    if (text[at] != '%') {
      result += text[at++];
    } else if (text.substr(at + 1, 1) == "%") {
      result += '%';
      at += 2;
    } else {
      const Conversion how = parse_conversion(text, ++at);
      if (used == values.size()) throw type_failure("a format of % needs more values");
      result += converted(runtime, values[used++], how);
    }
  }
  if (used < values.size() && (several || arguments.get<const Dict>() == nullptr)) {
    throw type_failure("a format of % has too many values");
  }
  return result;
}

std::string brace_format(Runtime& runtime, std::string_view text, const Arguments& arguments) {
  std::string result;
  size_t next = 0;
  const auto field = [&](std::string_view name) -> const Value& {
    if (name.find_first_of(".[!:") != std::string_view::npos) {
      throw unsupported_failure(0, concat("the field {", printable(name), "} of format()"));
    }
    const auto index = name.empty() ? std::optional(static_cast<int64_t>(next++)) : parse_integer(name, 10);
    if (index) {
      if (*index >= 0 && *index < std::ssize(arguments.positional))
        return arguments.positional[static_cast<size_t>(*index)];
    } else {
      for (const auto& [key, value] : arguments.keywords) {
        if (key == name) return value;
      }
    }
    throw type_failure(concat("format(): there is no value for {", printable(name), "}"));
  };
  for (size_t at = 0; at < text.size();) {
    if (text.substr(at, 2) == "{{" || text.substr(at, 2) == "}}") {
      result += text[at];
      at += 2;
    } else if (text[at] == '{') {
      const size_t end = text.find('}', at);
      if (end == std::string_view::npos) throw type_failure("format(): a field has no end");
      result += runtime.printed(field(text.substr(at + 1, end - at - 1)));
      at = end + 1;
    } else {
      result += text[at++];
    }
  }
  return result;
}

}  // namespace w4q::jinja
