// A JSON value that knows its place, so that every complaint about a file names it:
// "tokenizer.json: /pre_tokenizer/behavior: expected a string, got a number".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "io/json.h"

namespace w4q::tokenizer {

class JsonNode {
 public:
  /// `value` outlives the node; `source` names the file.
  JsonNode(const io::Json& value, std::string_view source) : value_(&value), place_(std::string(source) + ": ") {}

  const io::Json& value() const noexcept { return *value_; }
  /// "<source>: /path/to/value".
  const std::string& place() const noexcept { return place_; }

  /// The member `key` of an object. Throws bad_file when this is no object or lacks it.
  JsonNode at(std::string_view key) const;
  /// The member `key` of an object, nothing when it is absent or null. Throws bad_file when this is no object.
  std::optional<JsonNode> find(std::string_view key) const;
  /// The elements of an array. Throws bad_file when this is none.
  std::vector<JsonNode> items() const;

  /// The value as the type asked for. Throw bad_file when it has another one.
  const std::string& string() const;
  bool boolean() const;
  int64_t integer(int64_t low, int64_t high) const;

  /// Optional members with a default.
  bool boolean_or(std::string_view key, bool otherwise) const;
  /// The member "type", which says what kind of component this is.
  const std::string& type() const { return at("type").string(); }

  /// An error about this value.
  Error error(ErrorCode code, std::string_view what) const;
  /// bad_file: expected something else.
  Error wrong_type(std::string_view expected) const;
  /// unsupported: `kind` ("normalizer") of a type that w4q does not have.
  Error unknown_type(std::string_view kind, std::string_view known) const;

 private:
  JsonNode(const io::Json& value, std::string place, int) : value_(&value), place_(std::move(place)) {}

  const io::Json* value_;
  std::string place_;
};

}  // namespace w4q::tokenizer
