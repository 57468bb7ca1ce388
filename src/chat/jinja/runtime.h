// What filters, tests, methods and operators need of whoever runs a template: limits, and calls back into it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "chat/jinja/failure.h"
#include "chat/jinja/value.h"

namespace w4q::jinja {

/// What one rendering may cost, so that a hostile template gives an error and not a hanging program. Real ones take some
/// hundred steps for a message.
struct Limits {
  int64_t steps = 50'000'000;     ///< nodes of the tree that are run
  int64_t bytes = 1'000'000'000;  ///< of all texts and lists that are made on the way
  int depth = 600;                ///< nodes inside each other, through macros too
};

struct Arguments {
  Values positional = {};
  std::vector<std::pair<std::string, Value>> keywords = {};
};

class Runtime {
 public:
  explicit Runtime(const Limits& limits) : limits_(limits) {}
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  virtual ~Runtime() = default;

  /// Calls what can be called. Throws Failure when it cannot.
  virtual Value call(const Value& callee, const Arguments& arguments) = 0;
  /// A new namespace, which the runtime empties at its end, as two may hold each other.
  virtual Value make_namespace(std::vector<std::pair<std::string, Value>> attributes) = 0;
  /// The date of strftime_now: "2025-01-31".
  virtual const std::string& date() const = 0;

  /// Counts work and memory. Throws Failure above the limits.
  void spend_steps(int64_t steps);
  void spend_bytes(size_t bytes);
  /// What is left of the bytes.
  size_t bytes_left() const noexcept { return static_cast<size_t>(limits_.bytes); }

  Value text(std::string text, bool markup = false);
  Value list(Values items, Sequence::Kind kind = Sequence::Kind::list);
  Value texts(const std::vector<std::string>& items, bool markup = false);
  Value iterator(Values items);

  /// str(value), counted.
  std::string printed(const Value& value);

 protected:
  Limits limits_;
};

/// A filter, a test or a method: of `self`. A function that is global has none.
struct Function {
  std::string_view name;
  Value (*run)(Runtime& runtime, const Value& self, const Arguments& arguments);
};

/// The rows of the tables, null: none of that name.
const Function* find_filter(std::string_view name) noexcept;
const Function* find_test(std::string_view name) noexcept;
const Function* find_global(std::string_view name) noexcept;
/// Of the type of `self`.
const Function* find_method(const Value& self, std::string_view name) noexcept;
Value run_filter(Runtime& runtime, std::string_view name, const Value& value, const Arguments& arguments);
bool run_test(Runtime& runtime, std::string_view name, const Value& value, const Arguments& arguments);

/// The tables, one per file.
std::span<const Function> text_filters() noexcept;
std::span<const Function> number_filters() noexcept;
std::span<const Function> list_filters() noexcept;
std::span<const Function> choice_filters() noexcept;
std::span<const Function> tests() noexcept;
std::span<const Function> globals() noexcept;
std::span<const Function> text_methods() noexcept;
std::span<const Function> text_predicates() noexcept;
std::span<const Function> list_methods() noexcept;
std::span<const Function> dict_methods() noexcept;
std::span<const Function> loop_methods() noexcept;

namespace detail {
void bind(std::string_view function, const Arguments& arguments, std::span<const std::string_view> names,
          std::span<const Value*> values, size_t required);
}

/// Arguments by the names of parameters, null where none was given; the first `required` must be.
template <size_t N>
std::array<const Value*, N> bind(std::string_view function, const Arguments& arguments,
                                 const std::array<std::string_view, N>& names, size_t required = 0) {
  std::array<const Value*, N> values{};
  detail::bind(function, arguments, names, values, required);
  return values;
}
/// Refuses any argument.
void bind_none(std::string_view function, const Arguments& arguments);

/// Values as arguments. Throw Failure, naming the function, when the type is another one.
int64_t integer_argument(const Value& value, std::string_view function);
const std::string& text_argument(const Value& value, std::string_view function);

}  // namespace w4q::jinja
