// Filters that run others, or tests, on each item: map, select, reject and their kin. Their names are resolved first.
#include <array>

#include "chat/jinja/operators.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

/// The arguments behind the first `count`.
Arguments behind(const Arguments& arguments, size_t count) {
  Arguments rest = arguments;
  rest.positional.erase(rest.positional.begin(), rest.positional.begin() + static_cast<std::ptrdiff_t>(count));
  return rest;
}

/// What the filters walk over: nothing where the value is false.
Values items_of(Runtime& runtime, const Value& self) { return truth(self) ? walk(runtime, self)->items : Values(); }

Value map_attribute(Runtime& runtime, const Value& self, const Arguments& arguments) {
  const auto [path, otherwise] = bind<2>("map", arguments, {"attribute", "default"}, 1);
  Values result;
  for (const Value& value : items_of(runtime, self)) {
    Value found = value_at(runtime, value, *path);
    const bool replaced = found.undefined() && otherwise != nullptr && !otherwise->none();
    result.push_back(replaced ? *otherwise : std::move(found));
  }
  return runtime.iterator(std::move(result));
}

Value map(Runtime& runtime, const Value& self, const Arguments& arguments) {
  if (arguments.positional.empty()) return map_attribute(runtime, self, arguments);
  const std::string name = text_argument(arguments.positional.front(), "map");
  const Arguments rest = behind(arguments, 1);
  Values result;
  for (const Value& value : items_of(runtime, self)) {
    runtime.spend_steps(1);
    result.push_back(run_filter(runtime, name, value, rest));
  }
  return runtime.iterator(std::move(result));
}

template <bool keeps, bool of_attribute>
Value choose(Runtime& runtime, const Value& self, const Arguments& arguments) {
  constexpr size_t test_at = of_attribute ? 1 : 0;
  const size_t given = arguments.positional.size();
  if (given < test_at) throw type_failure("selectattr and rejectattr need the name of an attribute");
  const std::string test = given > test_at ? text_argument(arguments.positional[test_at], "select") : "";
  const Arguments rest = given > test_at ? behind(arguments, test_at + 1) : Arguments{};
  Values result;
  for (const Value& value : items_of(runtime, self)) {
    runtime.spend_steps(1);
    const Value seen = of_attribute ? value_at(runtime, value, arguments.positional.front()) : value;
    if ((test.empty() ? truth(seen) : run_test(runtime, test, seen, rest)) == keeps) result.push_back(value);
  }
  return runtime.iterator(std::move(result));
}

constexpr std::array<Function, 5> rows{{{"map", map},
                                        {"reject", choose<false, false>},
                                        {"rejectattr", choose<false, true>},
                                        {"select", choose<true, false>},
                                        {"selectattr", choose<true, true>}}};

}  // namespace

std::span<const Function> choice_filters() noexcept { return rows; }

}  // namespace w4q::jinja
