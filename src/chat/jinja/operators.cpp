#include "chat/jinja/operators.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "chat/jinja/python_text.h"
#include "core/entities.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

Failure cannot(std::string_view op, const Value& a, const Value& b) {
  for (const Value* value : {&a, &b}) {
    if (value->undefined()) return undefined_failure(*value);
  }
  return type_failure(concat("'", op, "' does not work between ", type_name(a), " and ", type_name(b)));
}

int64_t in_range(bool overflow, int64_t result) {
  if (!overflow) return result;
  throw Failure(ErrorCode::unsupported, "an integer does not fit 64 bits")
      .remedy("the template or the conversation has numbers that are far too large");
}

Failure by_zero() { return type_failure("division by zero"); }

int64_t floor_divided(int64_t a, int64_t b) {
  if (b == 0) throw by_zero();
  if (b == -1)
    return in_range(a == std::numeric_limits<int64_t>::min(), a == std::numeric_limits<int64_t>::min() ? 0 : -a);
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

int64_t remainder_of(int64_t a, int64_t b) {
  if (b == 0) throw by_zero();
  if (b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

double remainder_of(double a, double b) {
  if (b == 0) throw by_zero();
  const double rest = std::fmod(a, b);
  if (rest != 0 && (rest < 0) != (b < 0)) return rest + b;
  return rest == 0 ? std::copysign(0.0, b) : rest;
}

Value power(const Number& a, const Number& b) {
  if (a.is_float || b.is_float || b.integer < 0) {
    if (a.real == 0 && b.real < 0) throw by_zero();
    return std::pow(a.real, b.real);
  }
  int64_t result = 1, base = a.integer;
  bool overflow = false, base_overflow = false;
  for (int64_t left = b.integer; left > 0; left >>= 1) {
    if ((left & 1) != 0) overflow = overflow || base_overflow || __builtin_mul_overflow(result, base, &result);
    if (left > 1 && !base_overflow) base_overflow = __builtin_mul_overflow(base, base, &base);
  }
  return in_range(overflow, result);
}

Value of_integers(char op, int64_t a, int64_t b) {
  int64_t result = 0;
  const bool overflow = op == '+'   ? __builtin_add_overflow(a, b, &result)
                        : op == '-' ? __builtin_sub_overflow(a, b, &result)
                                    : __builtin_mul_overflow(a, b, &result);
  return in_range(overflow, result);
}

Value of_numbers(std::string_view op, const Number& a, const Number& b) {
  if (op == "**") return power(a, b);
  if (op == "/") {
    if (b.real == 0) throw by_zero();
    return a.real / b.real;
  }
  if (!a.is_float && !b.is_float) {
    if (op == "//") return floor_divided(a.integer, b.integer);
    return op == "%" ? Value(remainder_of(a.integer, b.integer)) : of_integers(op[0], a.integer, b.integer);
  }
  if (op == "//") {
    if (b.real == 0) throw by_zero();
    return std::floor(a.real / b.real);
  }
  if (op == "%") return remainder_of(a.real, b.real);
  return op == "+" ? a.real + b.real : op == "-" ? a.real - b.real : a.real * b.real;
}

Value added_texts(Runtime& runtime, const Text& a, const Text& b) {
  const bool markup = a.markup || b.markup;
  return runtime.text((markup && !a.markup ? with_entities(*a) : *a) + (markup && !b.markup ? with_entities(*b) : *b),
                      markup);
}

Value repeated(Runtime& runtime, const Value& value, int64_t times) {
  const auto count = static_cast<size_t>(std::max<int64_t>(times, 0));
  if (value.text()) {
    const std::string& once = value.string();
    if (!once.empty() && count > runtime.bytes_left() / once.size()) runtime.spend_bytes(runtime.bytes_left() + 1);
    std::string all;
    for (size_t i = 0; i < (once.empty() ? 0 : count); ++i) all += once;
    return runtime.text(std::move(all), value.as<Text>().markup);
  }
  const auto& once = *value.get<const Sequence>();
  if (!once.items.empty() && count > runtime.bytes_left() / sizeof(Value) / once.items.size()) {
    runtime.spend_bytes(runtime.bytes_left() + 1);
  }
  Values all;
  for (size_t i = 0; i < (once.items.empty() ? 0 : count); ++i)
    all.insert(all.end(), once.items.begin(), once.items.end());
  return runtime.list(std::move(all), once.kind);
}

/// Lists and tuples, but no views of dicts.
const Sequence* list_of(const Value& value) {
  const auto* list = value.get<const Sequence>();
  const bool is_list = list != nullptr && (list->kind == Sequence::Kind::list || list->kind == Sequence::Kind::tuple);
  return is_list ? list : nullptr;
}

bool is_integer(const Value& value) { return value.is<int64_t>() || value.is<bool>(); }

}  // namespace

Value binary(Runtime& runtime, std::string_view op, const Value& a, const Value& b) {
  if (op == "~") return runtime.text(runtime.printed(a) + runtime.printed(b));
  const Number x = number_of(a), y = number_of(b);
  if (x.is_number && y.is_number) return of_numbers(op, x, y);
  if (op == "+") {
    if (a.text() && b.text()) return added_texts(runtime, a.as<Text>(), b.as<Text>());
    const auto *left = list_of(a), *right = list_of(b);
    if (left != nullptr && right != nullptr && left->kind == right->kind) {
      Values items = left->items;
      items.insert(items.end(), right->items.begin(), right->items.end());
      return runtime.list(std::move(items), left->kind);
    }
  }
  if (op == "*") {
    if (is_integer(b) && (a.text() || list_of(a) != nullptr)) return repeated(runtime, a, y.integer);
    if (is_integer(a) && (b.text() || list_of(b) != nullptr)) return repeated(runtime, b, x.integer);
  }
  if (op == "%" && a.text()) return runtime.text(percent_format(runtime, a.string(), b), a.as<Text>().markup);
  throw cannot(op, a, b);
}

Value unary(std::string_view op, const Value& a) {
  const Number number = number_of(a);
  if (!number.is_number) throw cannot(op, a, a);
  if (number.is_float) return op == "-" ? -number.real : number.real;
  return op == "-" ? of_integers('-', 0, number.integer) : Value(number.integer);
}

bool less(const Value& a, const Value& b) {
  const Number x = number_of(a), y = number_of(b);
  if (x.is_number && y.is_number) return x.is_float || y.is_float ? x.real < y.real : x.integer < y.integer;
  if (a.text() && b.text()) return a.string() < b.string();
  const auto *left = list_of(a), *right = list_of(b);
  if (left == nullptr || right == nullptr || left->kind != right->kind) throw cannot("<", a, b);
  const size_t both = std::min(left->items.size(), right->items.size());
  for (size_t i = 0; i < both; ++i) {
    if (!equal(left->items[i], right->items[i])) return less(left->items[i], right->items[i]);
  }
  return left->items.size() < right->items.size();
}

bool contains(const Value& container, const Value& item) {
  if (container.text()) {
    if (item.text()) return container.string().find(item.string()) != std::string::npos;
    throw type_failure(concat("'in' a text needs a text on its left, got ", type_name(item)));
  }
  if (container.undefined()) return false;
  if (const auto* dict = container.get<const Dict>()) return find(*dict, item) != nullptr;
  const auto holds = [&](const Value& other) { return equal(other, item); };
  if (const auto* list = container.get<const Sequence>()) return std::ranges::any_of(list->items, holds);
  if (auto* iterator = container.get<Iterator>()) {
    while (iterator->next < iterator->items.size()) {
      if (holds(iterator->items[iterator->next++])) return true;
    }
    return false;
  }
  throw type_failure(concat("'in' needs a list, a dict or a text on its right, got ", type_name(container)));
}

bool compare(std::string_view op, const Value& a, const Value& b) {
  if (op == "==") return equal(a, b);
  if (op == "!=") return !equal(a, b);
  if (op == "in") return contains(b, a);
  if (op == "not in") return !contains(b, a);
  const Number x = number_of(a), y = number_of(b);
  if (x.is_number && y.is_number && (std::isnan(x.real) || std::isnan(y.real))) return false;
  if (op == "<") return less(a, b);
  if (op == ">") return less(b, a);
  return op == "<=" ? !less(b, a) : !less(a, b);
}

}  // namespace w4q::jinja
