#include "gguf/keys.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "core/text.h"

namespace w4q::gguf {
namespace {

template <class T>
constexpr bool is_integer_type = std::is_integral_v<T> && !std::is_same_v<T, bool>;

/// Nothing for a value above the range.
template <class T>
std::optional<int64_t> as_int64(T value) {
  return std::in_range<int64_t>(value) ? std::optional(static_cast<int64_t>(value)) : std::nullopt;
}

}  // namespace

double shortest_decimal(float value) {
  std::array<char, 64> text{};
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  double result = value;
  std::from_chars(text.data(), end, result);
  return result;
}

GgufKeys::GgufKeys(const io::GgufMetadata& metadata, std::string_view source) : metadata_(&metadata), source_(source) {
  architecture_ = text("general.architecture").value_or("");
}

bool GgufKeys::is_array(std::string_view key) const {
  const io::GgufValue* value = find(key);
  return value != nullptr && std::holds_alternative<io::GgufArray>(*value);
}

std::string GgufKeys::full(std::string_view key) const {
  return key.starts_with('%') ? concat(architecture_, key.substr(1)) : std::string(key);
}

const io::GgufValue* GgufKeys::find(std::string_view key) const { return io::find(*metadata_, full(key)); }

Error GgufKeys::error(ErrorCode code, std::string_view key, std::string_view what) const {
  return {code, concat(printable(source_), ": ", printable(full(key)), ": ", what)};
}

Error GgufKeys::wrong_type(std::string_view key, std::string_view expected) const {
  const auto* value = find(key);
  return error(ErrorCode::bad_file, key, concat("expected ", expected))
      .detail(concat("got ", value == nullptr ? "nothing" : io::type_text(*value)));
}

std::optional<int64_t> GgufKeys::integer(std::string_view key) const {
  const io::GgufValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  std::optional<int64_t> result;
  const auto take = [&]<class T>(const T& number) {
    if constexpr (is_integer_type<T>) result = as_int64(number);
  };
  std::visit(take, *value);
  const auto take_array = [&]<class T>(const T& values) {
    if constexpr (!std::is_same_v<T, std::monostate>) {
      if constexpr (is_integer_type<typename T::value_type>) {
        if (values.empty()) return;
        if (!std::ranges::all_of(values, [&](auto each) { return each == values.front(); })) {
          throw error(ErrorCode::unsupported, key, "differs between layers");
        }
        result = as_int64(values.front());
      }
    }
  };
  if (const auto* array = std::get_if<io::GgufArray>(value)) std::visit(take_array, *array);
  if (!result) throw wrong_type(key, "an integer");
  return result;
}

std::optional<double> GgufKeys::number(std::string_view key) const {
  const io::GgufValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  double result = 0;
  if (const auto* narrow = std::get_if<float>(value)) {
    result = shortest_decimal(*narrow);
  } else if (const auto* wide = std::get_if<double>(value)) {
    result = *wide;
  } else {
    result = static_cast<double>(*integer(key));
  }
  if (!std::isfinite(result)) throw error(ErrorCode::bad_file, key, "is not finite");
  return result;
}

std::optional<bool> GgufKeys::boolean(std::string_view key) const {
  const io::GgufValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  const auto* flag = std::get_if<bool>(value);
  if (flag == nullptr) throw wrong_type(key, "a boolean");
  return *flag;
}

std::optional<std::string> GgufKeys::text(std::string_view key) const {
  const io::GgufValue* value = find(key);
  if (value == nullptr) return std::nullopt;
  const auto* string = std::get_if<std::string>(value);
  if (string == nullptr) throw wrong_type(key, "a string");
  return *string;
}

template <class T>
const std::vector<T>* GgufKeys::array(std::string_view key, std::string_view expected) const {
  const io::GgufValue* value = find(key);
  if (value == nullptr) return nullptr;
  const auto* any = std::get_if<io::GgufArray>(value);
  const auto* elements = any == nullptr ? nullptr : std::get_if<std::vector<T>>(any);
  if (elements == nullptr) throw wrong_type(key, expected);
  return elements;
}

const std::vector<std::string>* GgufKeys::texts(std::string_view key) const {
  return array<std::string>(key, "an array of strings");
}
const std::vector<float>* GgufKeys::numbers(std::string_view key) const { return array<float>(key, "an array of f32"); }
const std::vector<int32_t>* GgufKeys::integers(std::string_view key) const {
  return array<int32_t>(key, "an array of i32");
}

const std::vector<bool>* GgufKeys::booleans(std::string_view key) const {
  return array<bool>(key, "an array of booleans");
}

std::vector<int64_t> GgufKeys::layers(std::string_view key, int64_t count) const {
  std::vector<int64_t> result;
  const auto take = [&]<class T>(const std::vector<T>& values) {
    if constexpr (is_integer_type<T>) {
      for (const T value : values) result.push_back(as_int64(value).value_or(0));
    }
  };
  if (!is_array(key)) return std::vector<int64_t>(static_cast<size_t>(count), size(key));
  std::visit(
      [&]<class T>(const T& values) {
        if constexpr (!std::is_same_v<T, std::monostate>) take(values);
      },
      std::get<io::GgufArray>(*find(key)));
  if (std::ssize(result) != count) {
    throw error(ErrorCode::bad_file, key, concat("expected an integer for each of ", count, " layers"));
  }
  for (const int64_t each : result) {
    if (each < 1 || each > INT32_MAX) {
      throw error(ErrorCode::bad_file, key, concat("is ", each)).detail("expected 1 to 2147483647");
    }
  }
  return result;
}

int64_t GgufKeys::size(std::string_view key, std::optional<int64_t> fallback) const {
  const auto value = integer(key);
  if (!value && !fallback) throw error(ErrorCode::bad_file, key, "is missing");
  const int64_t result = value.value_or(fallback.value_or(0));
  if (result < 1 || result > INT32_MAX)
    throw error(ErrorCode::bad_file, key, concat("is ", result)).detail("expected 1 to 2147483647");
  return result;
}

}  // namespace w4q::gguf
