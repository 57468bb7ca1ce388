// A template cut into text and tokens as Jinja2 does with trim_blocks and lstrip_blocks, which transformers sets.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace w4q::jinja {

struct Token {
  enum class Type {
    data,
    variable_begin,
    variable_end,
    block_begin,
    block_end,
    name,
    string,
    integer,
    real,
    symbol,
    end
  };
  Type type = Type::end;
  std::string text;  ///< of a string: without quotes and escapes
  int line = 1;

  bool is(Type other, std::string_view what) const noexcept { return type == other && text == what; }
};

/// All tokens, the last of which is `end`; comments are gone. Throws Failure with the line.
std::vector<Token> tokenize(std::string_view source);

}  // namespace w4q::jinja
