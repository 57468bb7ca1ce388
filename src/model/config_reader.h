// Typed access to the keys of a config object, with messages that name file and key. An absent key and null are the
// same: nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "io/json.h"

namespace w4q::model {

class ConfigReader {
 public:
  /// `path` is put before keys in messages ("rope_scaling."). Throws bad_file when `object` is not a JSON object.
  ConfigReader(const io::Json& object, std::string_view source, std::string_view path = {});

  /// Each throws bad_file when the value has another type, or for numbers is not finite or too large.
  std::optional<int64_t> integer(std::string_view key) const;
  std::optional<double> number(std::string_view key) const;
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string> text(std::string_view key) const;
  /// The value of any type; null pointer when absent or null.
  const io::Json* find(std::string_view key) const;
  /// True when the key stands in the file, be it null.
  bool states(std::string_view key) const;

  /// An integer in [1, 2^31). Throws bad_file when it is outside or, without a `fallback`, absent.
  int64_t size(std::string_view key, std::optional<int64_t> fallback = std::nullopt) const;
  /// A number above 0.
  double positive(std::string_view key, std::optional<double> fallback = std::nullopt) const;

  /// Throws bad_file: "config.json: KEY: WHAT", with the value found.
  [[noreturn]] void refuse(std::string_view key, std::string_view what) const;
  [[noreturn]] void missing(std::string_view key) const;

  const std::string& source() const noexcept { return source_; }
  /// Whether the object stands within another one of the file.
  bool nested() const noexcept { return !path_.empty(); }

 private:
  const io::Json* object_;
  std::string source_;
  std::string path_;
};

}  // namespace w4q::model
