// The inside of {{ … }} and {% … %} cut into tokens.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "chat/jinja/lexer.h"

namespace w4q::jinja {

class ExpressionLexer {
 public:
  /// `source` must outlive it.
  explicit ExpressionLexer(std::string_view source) noexcept : source_(source) {}

  /// Appends the tokens from `at` to the end of the tag, and gives where that stands: at "}}", "%}", or the sign before.
  /// `line` is counted on. Throws Failure.
  size_t run(size_t at, bool block, int& line, std::vector<Token>& tokens) const;
  /// The first byte from `at` that is no white space.
  size_t skip_space(size_t at) const noexcept;

 private:
  bool ends(size_t at, bool block) const noexcept;
  size_t name(size_t at) const noexcept;
  Token number(size_t& at, int line) const;
  Token string(size_t& at, int& line) const;
  Token symbol(size_t& at, int line) const;

  std::string_view source_;
};

}  // namespace w4q::jinja
