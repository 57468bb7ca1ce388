// Values as text: Python's str and repr, and the filter tojson.
#pragma once

#include <optional>
#include <string>

#include "chat/jinja/value.h"

namespace w4q::jinja {

/// repr(float), which is also what JSON shows of it but for NaN and Infinity.
std::string float_text(double value);
/// str(value). Throws Failure above `max_bytes`.
std::string printed(const Value& value, size_t max_bytes);
/// repr(value).
std::string represented(const Value& value, size_t max_bytes);

/// What json.dumps takes, with the defaults of the filter tojson.
struct JsonStyle {
  bool ascii = false;                 ///< every other character as \uXXXX
  std::optional<std::string> indent;  ///< nothing: all on one line
  std::string item_separator = ", ";
  std::string key_separator = ": ";
  bool sort_keys = false;
};
/// json.dumps(value). Throws Failure for what JSON has no form for, and above `max_bytes`.
std::string json_text(const Value& value, const JsonStyle& style, size_t max_bytes);

}  // namespace w4q::jinja
