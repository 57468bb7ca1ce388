// The values of a template: those of Python that Jinja2 shows to one. All but namespaces, iterators and loops never
// change once they are made, so that copies share their contents.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "io/json.h"

namespace w4q::jinja {

struct Sequence;
struct Dict;
struct Iterator;
struct Namespace;
struct Loop;
struct Callable;
struct Function;  // runtime.h
struct Macro;     // interpreter.h

/// What a name or an attribute that is not there gives: prints as nothing, and anything else that is done with it is an
/// error that says `what`.
struct Undefined {
  std::shared_ptr<const std::string> what;
};

struct None {};

/// Text, UTF-8. `markup`: marked by `safe`; text that is added to it is escaped, as Python's markupsafe does.
struct Text {
  std::shared_ptr<const std::string> bytes;
  bool markup = false;
  const std::string& operator*() const noexcept { return *bytes; }
};

class Value {
 public:
  using Data = std::variant<Undefined, None, bool, int64_t, double, Text, std::shared_ptr<const Sequence>,
                            std::shared_ptr<const Dict>, std::shared_ptr<Iterator>, std::shared_ptr<Namespace>,
                            std::shared_ptr<Loop>, std::shared_ptr<const Callable>>;

  Value() : data_(None{}) {}
  template <class T>
  requires(!std::is_same_v<std::remove_cvref_t<T>, Value>) Value(T&& data) : data_(std::forward<T>(data)) {}

  template <class T>
  bool is() const noexcept {
    return std::holds_alternative<T>(data_);
  }
  template <class T>
  const T& as() const {
    return std::get<T>(data_);
  }
  bool undefined() const noexcept { return is<Undefined>(); }
  bool none() const noexcept { return is<None>(); }
  bool text() const noexcept { return is<Text>(); }
  /// The object of a type that is shared, null: another one.
  template <class T>
  T* get() const noexcept {
    const auto* pointer = std::get_if<std::shared_ptr<T>>(&data_);
    return pointer == nullptr ? nullptr : pointer->get();
  }
  const std::string& string() const { return *std::get<Text>(data_).bytes; }

 private:
  Data data_;
};

using Values = std::vector<Value>;

/// A list, a tuple, a view of a dict or a range.
struct Sequence {
  enum class Kind { list, tuple, keys, values, items, range };
  Kind kind = Kind::list;
  Values items = {};
  int depth = 1;                      ///< of nesting
  std::array<int64_t, 3> range = {};  ///< start, stop, step of a range
};

struct Dict {
  std::vector<std::pair<Value, Value>> entries;
  int depth = 1;
};

/// What `map`, `select` … give: it can be walked once.
struct Iterator {
  Values items;
  size_t next = 0;
  int depth = 1;
};

/// namespace(…): the only thing whose attributes a template can set.
struct Namespace {
  std::vector<std::pair<std::string, Value>> attributes;
};

/// The variable `loop`.
struct Loop {
  std::shared_ptr<const Sequence> items;
  size_t index = 0;
  int level = 0;  ///< loops around it
  Value changed = {};
};

/// What can be called: a function that may be bound to a value, or a macro.
struct Callable {
  const Function* function = nullptr;
  Value self = {};
  std::shared_ptr<const Macro> macro = {};
  int depth = 1;
};

/// How deep values may nest: those of JSON have 100 levels.
inline constexpr int max_value_depth = 250;

/// Levels of nesting, 0 for what holds no values.
int depth_of(const Value& value) noexcept;
/// "str", "list", "NoneType" …: the type as Python names it.
std::string_view type_name(const Value& value) noexcept;
/// Python's bool(value).
bool truth(const Value& value);
/// Python's a == b.
bool equal(const Value& a, const Value& b);
/// The value under `key`, null: none.
const Value* find(const Dict& dict, const Value& key);
const Value* find(const Dict& dict, std::string_view key);

Value text_value(std::string text, bool markup = false);
Value list_value(Values items, Sequence::Kind kind = Sequence::Kind::list);
Value dict_value(std::vector<std::pair<Value, Value>> entries);
Value method_value(const Function& function, const Value& self);
Value undefined_value(std::string what);
/// The values of a JSON text. Integers beyond 64 bits throw Failure.
Value from_json(const io::Json& json);

/// Whether it is a number (bool is one), and which.
struct Number {
  bool is_number = false;
  bool is_float = false;
  int64_t integer = 0;
  double real = 0;  ///< in any case
};
Number number_of(const Value& value) noexcept;

}  // namespace w4q::jinja
