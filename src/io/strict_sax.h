// What every JSON reader of this folder refuses: a byte order mark, NUL, invalid UTF-8, duplicate keys and deep
// nesting. nlohmann/json alone would skip the first, stop at the second, and keep the last of two equal keys.
#pragma once

#include <cstddef>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "io/system.h"

namespace w4q::io {

inline constexpr size_t max_json_depth = 100;

/// The first byte that does not belong to well-formed UTF-8; npos when there is none.
size_t invalid_utf8_offset(std::string_view text) noexcept;

/// "line 3, column 14" of a byte in `text`; both count from 1.
std::string line_and_column(std::string_view text, size_t offset);

/// Throws bad_file for a byte order mark, a NUL or invalid UTF-8.
void check_json_text(std::string_view text, std::string_view source);

/// The part of a SAX handler that does not depend on what is built. A handler derives from it, calls open() and close()
/// around every object and array and add_key() for every key, and adds the callbacks for values.
class StrictSax {
 public:
  StrictSax(std::string_view text, std::string_view source) : text_(text), source_(source), read_(text.data()) {}

  /// The keys of an object, in file order. Throws bad_file when two are equal.
  std::vector<std::string> close_object();
  void close_array() noexcept { levels_.pop_back(); }
  /// Throws bad_file when the nesting becomes too deep.
  void open();
  void add_key(std::string& key) { keys_.push_back({std::move(key), offset()}); }

  /// bad_file: "<source>: <problem>", with the place that has been read so far.
  Error error(std::string_view problem) const { return error_at(problem, offset()); }

  /// SAX callbacks that are the same for all.
  bool binary(nlohmann::ordered_json::binary_t& /*bytes*/) { return false; }
  bool parse_error(size_t position, const std::string& /*last_token*/, const nlohmann::detail::exception& exception);

  const char** read_cursor() noexcept { return &read_; }

 private:
  struct Key {
    std::string text;
    size_t offset;  ///< of its closing quote
  };

  size_t offset() const noexcept { return read_ == text_.data() ? 0 : static_cast<size_t>(read_ - text_.data()) - 1; }
  Error error_at(std::string_view problem, size_t offset) const;

  std::string_view text_;
  std::string_view source_;
  const char* read_;
  std::vector<Key> keys_;       ///< of all open objects
  std::vector<size_t> levels_;  ///< for each open object or array, where its keys begin
};

/// An input iterator that also tells the handler how far the parser has read.
class TrackedIterator {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  TrackedIterator(const char* at, const char** read) : at_(at), read_(read) {}
  reference operator*() const noexcept { return *at_; }
  TrackedIterator& operator++() noexcept {
    *read_ = ++at_;
    return *this;
  }
  TrackedIterator operator++(int) noexcept {
    const TrackedIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const TrackedIterator& other) const noexcept { return at_ == other.at_; }

 private:
  const char* at_;
  const char** read_;
};

/// Runs `handler` over `text`. Throws bad_file on anything that is not one JSON value.
template <class Handler>
void parse_strict(std::string_view text, std::string_view source, Handler& handler) {
  check_json_text(text, source);
  const TrackedIterator first(text.data(), handler.read_cursor());
  const TrackedIterator last(text.data() + text.size(), handler.read_cursor());
  nlohmann::ordered_json::sax_parse(first, last, &handler);
}

}  // namespace w4q::io
