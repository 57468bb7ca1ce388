// Filters that give numbers.
#include <array>
#include <cmath>
#include <cstdio>
#include <optional>

#include "chat/jinja/operators.h"
#include "chat/jinja/python_text.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

Number number_argument(const Value& value, std::string_view function) {
  if (value.undefined()) throw undefined_failure(value);
  const Number number = number_of(value);
  if (number.is_number) return number;
  throw type_failure(concat(function, "() needs a number, got ", type_name(value)));
}

Value absolute(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  bind_none("abs", arguments);
  const Number number = number_argument(self, "abs");
  if (number.is_float) return std::abs(number.real);
  return number.integer < 0 ? unary("-", self) : Value(number.integer);
}

/// int(value) of a float, nothing where Python throws OverflowError or ValueError.
std::optional<int64_t> truncated(double value) {
  if (!(std::abs(value) < 9.2e18)) return std::nullopt;
  return static_cast<int64_t>(value);
}

Value integer(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  const auto [otherwise, base] = bind<2>("int", arguments, {"default", "base"});
  const Value fallback = otherwise == nullptr ? Value(int64_t{0}) : *otherwise;
  if (self.undefined()) throw undefined_failure(self);
  if (const Number number = number_of(self); number.is_number) {
    if (!number.is_float) return number.integer;
    const auto whole = truncated(number.real);
    return whole ? Value(*whole) : fallback;
  }
  if (!self.text()) return fallback;
  const int64_t radix = base == nullptr ? 10 : integer_argument(*base, "int");
  if (radix != 2 && radix != 8 && radix != 10 && radix != 16)
    throw unsupported_failure(0, "int: the base is 2, 8, 10 or 16");
  if (const auto whole = parse_integer(self.string(), static_cast<int>(radix))) return *whole;
  const auto real = parse_float(self.string());
  const auto whole = real ? truncated(*real) : std::nullopt;
  return whole ? Value(*whole) : fallback;
}

Value real(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  const auto [otherwise] = bind<1>("float", arguments, {"default"});
  if (self.undefined()) throw undefined_failure(self);
  if (const Number number = number_of(self); number.is_number) return number.real;
  const auto parsed = self.text() ? parse_float(self.string()) : std::nullopt;
  if (parsed) return *parsed;
  return otherwise == nullptr ? Value(0.0) : *otherwise;
}

/// round(value, digits), by the decimal digits of the exact value as Python does.
double rounded(double value, int64_t digits) {
  if (!std::isfinite(value) || digits > 300) return value;
  if (digits < 0) {
    const double power = std::pow(10.0, static_cast<double>(-digits));
    return std::isinf(power) ? 0 * value : std::nearbyint(value / power) * power;
  }
  std::array<char, 700> buffer{};
  std::snprintf(buffer.data(), buffer.size(), "%.*f", static_cast<int>(digits), value);
  return parse_float(buffer.data()).value_or(value);
}

Value round_to(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  const auto [precision, how] = bind<2>("round", arguments, {"precision", "method"});
  const Number number = number_argument(self, "round");
  const int64_t digits = precision == nullptr ? 0 : integer_argument(*precision, "round");
  const std::string method = how == nullptr ? "common" : text_argument(*how, "round");
  if (method == "common") {
    if (number.is_float) return rounded(number.real, digits);
    if (digits >= 0) return number.integer;
    throw unsupported_failure(0, "round: an integer to tens or hundreds");
  }
  if (method != "ceil" && method != "floor") throw type_failure("round: the method is common, ceil or floor");
  const double power = std::pow(10.0, static_cast<double>(digits));
  const double scaled = number.real * power;
  return (method == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / power;
}

Value size(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  bind_none("length", arguments);
  return length(self);
}

Value sum(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [path, start] = bind<2>("sum", arguments, {"attribute", "start"});
  Value total = start == nullptr ? Value(int64_t{0}) : *start;
  const auto walked = walk(runtime, self);
  for (const Value& value : walked->items) {
    total = binary(runtime, "+", total, path == nullptr || path->none() ? value : value_at(runtime, value, *path));
  }
  return total;
}

constexpr std::array<Function, 7> rows{{{"abs", absolute},
                                        {"count", size},
                                        {"float", real},
                                        {"int", integer},
                                        {"length", size},
                                        {"round", round_to},
                                        {"sum", sum}}};

}  // namespace

std::span<const Function> number_filters() noexcept { return rows; }

}  // namespace w4q::jinja
