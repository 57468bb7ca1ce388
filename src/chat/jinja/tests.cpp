// What may stand behind "is".
#include <array>
#include <cmath>

#include "chat/jinja/operators.h"
#include "chat/jinja/printing.h"
#include "chat/jinja/python_text.h"

namespace w4q::jinja {
namespace {

template <bool (*holds)(const Value&)>
Value simple(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  bind_none("test", arguments);
  return holds(self);
}

bool is_defined(const Value& value) { return !value.undefined(); }
bool is_undefined(const Value& value) { return value.undefined(); }
bool is_none(const Value& value) { return value.none(); }
bool is_boolean(const Value& value) { return value.is<bool>(); }
bool is_true(const Value& value) { return value.is<bool>() && value.as<bool>(); }
bool is_false(const Value& value) { return value.is<bool>() && !value.as<bool>(); }
bool is_integer(const Value& value) { return value.is<int64_t>(); }
bool is_float(const Value& value) { return value.is<double>(); }
bool is_number(const Value& value) { return number_of(value).is_number; }
bool is_string(const Value& value) { return value.text(); }
bool is_mapping(const Value& value) { return value.get<const Dict>() != nullptr; }
bool is_callable(const Value& value) { return value.get<const Callable>() != nullptr || value.undefined(); }
bool is_escaped(const Value& value) { return value.text() && value.as<Text>().markup; }
bool is_iterable(const Value& value) {
  return value.undefined() || value.text() || is_mapping(value) || value.get<const Sequence>() != nullptr ||
         value.get<Iterator>() != nullptr || value.get<Loop>() != nullptr;
}
/// Python asks for a length and for indices: a dict has both, a view of one has not.
bool is_sequence(const Value& value) {
  const auto* list = value.get<const Sequence>();
  if (list == nullptr) return value.undefined() || value.text() || is_mapping(value);
  return list->kind == Sequence::Kind::list || list->kind == Sequence::Kind::tuple ||
         list->kind == Sequence::Kind::range;
}

bool remainder_is(Runtime& runtime, const Value& self, const Value& by, int64_t expected) {
  return equal(binary(runtime, "%", self, by), expected);
}
Value is_odd(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("odd", arguments);
  return remainder_is(runtime, self, int64_t{2}, 1);
}
Value is_even(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("even", arguments);
  return remainder_is(runtime, self, int64_t{2}, 0);
}
Value is_divisible(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [by] = bind<1>("divisibleby", arguments, {"num"}, 1);
  return remainder_is(runtime, self, *by, 0);
}

template <bool (*holds)(std::string_view)>
Value of_text(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("test", arguments);
  return holds(runtime.printed(self));
}

enum class Op { eq, ne, lt, le, gt, ge };
template <Op op>
Value compared(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  static constexpr std::array<std::string_view, 6> words{"==", "!=", "<", "<=", ">", ">="};
  const auto [other] = bind<1>("comparison", arguments, {"other"}, 1);
  return compare(words.at(static_cast<size_t>(op)), self, *other);
}

Value is_in(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  const auto [container] = bind<1>("in", arguments, {"seq"}, 1);
  return contains(*container, self);
}

/// Python's "is": values of which there is one are themselves; others are taken by their contents.
Value is_same(Runtime& /*runtime*/, const Value& self, const Arguments& arguments) {
  const auto [other] = bind<1>("sameas", arguments, {"other"}, 1);
  return type_name(self) == type_name(*other) && equal(self, *other);
}

Value is_filter(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("filter", arguments);
  return find_filter(runtime.printed(self)) != nullptr;
}
Value is_test(Runtime& runtime, const Value& self, const Arguments& arguments) {
  bind_none("test", arguments);
  return find_test(runtime.printed(self)) != nullptr;
}

constexpr std::array<Function, 39> rows{{{"defined", simple<is_defined>},
                                         {"undefined", simple<is_undefined>},
                                         {"none", simple<is_none>},
                                         {"boolean", simple<is_boolean>},
                                         {"true", simple<is_true>},
                                         {"false", simple<is_false>},
                                         {"integer", simple<is_integer>},
                                         {"float", simple<is_float>},
                                         {"number", simple<is_number>},
                                         {"string", simple<is_string>},
                                         {"mapping", simple<is_mapping>},
                                         {"sequence", simple<is_sequence>},
                                         {"iterable", simple<is_iterable>},
                                         {"callable", simple<is_callable>},
                                         {"escaped", simple<is_escaped>},
                                         {"odd", is_odd},
                                         {"even", is_even},
                                         {"divisibleby", is_divisible},
                                         {"lower", of_text<all_lower>},
                                         {"upper", of_text<all_upper>},
                                         {"in", is_in},
                                         {"sameas", is_same},
                                         {"filter", is_filter},
                                         {"test", is_test},
                                         {"eq", compared<Op::eq>},
                                         {"equalto", compared<Op::eq>},
                                         {"==", compared<Op::eq>},
                                         {"ne", compared<Op::ne>},
                                         {"!=", compared<Op::ne>},
                                         {"lt", compared<Op::lt>},
                                         {"lessthan", compared<Op::lt>},
                                         {"<", compared<Op::lt>},
                                         {"le", compared<Op::le>},
                                         {"<=", compared<Op::le>},
                                         {"gt", compared<Op::gt>},
                                         {"greaterthan", compared<Op::gt>},
                                         {">", compared<Op::gt>},
                                         {"ge", compared<Op::ge>},
                                         {">=", compared<Op::ge>}}};

}  // namespace

std::span<const Function> tests() noexcept { return rows; }

}  // namespace w4q::jinja
