#include "model/config_reader.h"

#include <cmath>

#include "core/error.h"
#include "core/text.h"

namespace w4q::model {
namespace {

constexpr double largest_exact_integer = 9007199254740992.0;  // 2^53

constexpr std::string_view own_config = "take config.json from the model's own folder";

/// The value as it stands in the file, cut to a length that fits a message.
std::string shown(const io::Json& value) {
  constexpr size_t limit = 60;
  std::string text = printable(value.dump(-1, ' ', false, io::Json::error_handler_t::replace));
  if (text.size() > limit) text = text.substr(0, limit) + "…";
  return text;
}

}  // namespace

ConfigReader::ConfigReader(const io::Json& object, std::string_view source, std::string_view path)
    : object_(&object), source_(source), path_(path) {
  if (object.is_object()) return;
  const std::string_view name = path.empty() ? "the file" : path.substr(0, path.size() - 1);
  throw Error(ErrorCode::bad_file, concat(source, ": ", name, " is not a JSON object"))
      .detail(concat("found ", shown(object)))
      .hint(own_config);
}

const io::Json* ConfigReader::find(std::string_view key) const {
  const auto found = object_->find(key);
  return found == object_->end() || found->is_null() ? nullptr : &*found;
}

bool ConfigReader::states(std::string_view key) const { return object_->contains(key); }

std::optional<int64_t> ConfigReader::integer(std::string_view key) const {
  const io::Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (value->is_number_unsigned() && value->get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
    refuse(key, "the number is too large");
  }
  if (value->is_number_integer()) return value->get<int64_t>();
  if (value->is_number_float()) {
    const double number = value->get<double>();
    if (std::abs(number) <= largest_exact_integer && number == std::floor(number)) return static_cast<int64_t>(number);
  }
  refuse(key, "expected an integer");
}

std::optional<double> ConfigReader::number(std::string_view key) const {
  const io::Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number()) refuse(key, "expected a number");
  const double number = value->get<double>();
  if (!std::isfinite(number)) refuse(key, "expected a finite number");
  return number;
}

std::optional<bool> ConfigReader::boolean(std::string_view key) const {
  const io::Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) refuse(key, "expected true or false");
  return value->get<bool>();
}

std::optional<std::string> ConfigReader::text(std::string_view key) const {
  const io::Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) refuse(key, "expected a string");
  return value->get<std::string>();
}

int64_t ConfigReader::size(std::string_view key, std::optional<int64_t> fallback) const {
  const auto value = integer(key);
  if (!value && !fallback) missing(key);
  if (value && (*value < 1 || *value > INT32_MAX)) refuse(key, "expected a size from 1 to 2147483647");
  return value ? *value : *fallback;
}

double ConfigReader::positive(std::string_view key, std::optional<double> fallback) const {
  const auto value = number(key);
  if (!value && !fallback) missing(key);
  if (value && *value <= 0) refuse(key, "expected a number above 0");
  return value ? *value : *fallback;
}

void ConfigReader::refuse(std::string_view key, std::string_view what) const {
  Error error(ErrorCode::bad_file, concat(source_, ": ", path_, key, ": ", what));
  if (const io::Json* value = find(key)) error.detail(concat("found ", shown(*value)));
  throw error.hint(own_config);
}

void ConfigReader::missing(std::string_view key) const {
  throw Error(ErrorCode::bad_file, concat(source_, ": ", path_, key, " is missing"))
      .hint(concat("the file must describe the model completely; ", own_config));
}

}  // namespace w4q::model
