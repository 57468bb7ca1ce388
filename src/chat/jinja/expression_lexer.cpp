#include "chat/jinja/expression_lexer.h"

#include <algorithm>
#include <array>

#include "chat/jinja/failure.h"
#include "chat/jinja/python_text.h"
#include "core/text.h"
#include "text/utf8.h"

namespace w4q::jinja {
namespace {

using Type = Token::Type;

constexpr std::array<std::string_view, 26> symbols{"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                                   "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                                   ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};

bool is_number(char c) noexcept { return c >= '0' && c <= '9'; }

/// Of the digits behind \x, \u or \U.
char32_t code_of(std::string_view digits, int line) {
  char32_t code = 0;
  for (const char c : digits) {
    const size_t digit = std::string_view("0123456789abcdef").find(static_cast<char>(c | (c >= 'A' ? 0x20 : 0)));
    if (digit == std::string_view::npos) throw syntax_failure(line, "a text has a damaged escape with \\x, \\u or \\U");
    code = 16 * code + static_cast<char32_t>(digit);
  }
  if (code <= 0x10FFFF && (code < 0xD800 || code > 0xDFFF)) return code;
  throw syntax_failure(line, "a text has an escape that is no character");
}

/// Appends what the escape behind the backslash at `at` means, and gives where it ends.
size_t append_escape(std::string& out, std::string_view text, size_t at, int line) {
  static constexpr std::string_view letters = "\\'\"abfnrtv", meanings = "\\'\"\a\b\f\n\r\t\v";
  const char c = text[at + 1];
  if (const size_t found = letters.find(c); found != std::string_view::npos) {
    out += meanings[found];
    return at + 2;
  }
  if (c == '\n') return at + 2;
  if (c == 'x' || c == 'u' || c == 'U') {
    const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
    if (text.size() < at + 2 + digits) throw syntax_failure(line, "a text ends inside an escape");
    text::utf8_append(out, code_of(text.substr(at + 2, digits), line));
    return at + 2 + digits;
  }
  if (c >= '0' && c <= '7') {
    char32_t code = 0;
    size_t end = at + 1;
    for (; end < text.size() && end < at + 4 && text[end] >= '0' && text[end] <= '7'; ++end) {
      code = 8 * code + static_cast<char32_t>(text[end] - '0');
    }
    text::utf8_append(out, code);
    return end;
  }
  out += '\\';
  return at + 1;
}

std::string unescaped(std::string_view text, int line) {
  std::string result;
  for (size_t at = 0; at < text.size();) {
    if (text[at] == '\\') {
      at = append_escape(result, text, at, line);
    } else {
      result += text[at++];
    }
  }
  return result;
}

}  // namespace

size_t ExpressionLexer::skip_space(size_t at) const noexcept {
  while (at < source_.size()) {
    const auto step = text::utf8_step(source_.substr(at));
    if (!step.valid || !is_space(step.code_point)) break;
    at += step.size;
  }
  return std::min(at, source_.size());
}

bool ExpressionLexer::ends(size_t at, bool block) const noexcept {
  const std::string_view rest = source_.substr(at);
  if (block) return rest.starts_with("%}") || rest.starts_with("-%}") || rest.starts_with("+%}");
  return rest.starts_with("}}") || rest.starts_with("-}}");
}

size_t ExpressionLexer::name(size_t at) const noexcept {
  while (at < source_.size()) {
    const auto step = text::utf8_step(source_.substr(at));
    const char32_t c = step.code_point;
    if (!step.valid || !(c == U'_' || is_alpha(c) || is_digit(c))) break;
    at += step.size;
  }
  return at;
}

Token ExpressionLexer::number(size_t& at, int line) const {
  const size_t begin = at;
  const auto digits = [&] {
    while (at < source_.size() && (is_number(source_[at]) || source_[at] == '_')) ++at;
  };
  const auto next_is_digit = [&](size_t place) { return place < source_.size() && is_number(source_[place]); };
  if (source_[at] == '0' && at + 1 < source_.size() &&
      std::string_view("xXoObB").find(source_[at + 1]) != std::string_view::npos) {
    throw unsupported_failure(line, "a number is not decimal");
  }
  digits();
  Type type = Type::integer;
  if (at < source_.size() && source_[at] == '.' && next_is_digit(at + 1) && (begin == 0 || source_[begin - 1] != '.')) {
    type = Type::real;
    ++at;
    digits();
  }
  if (at < source_.size() && (source_[at] == 'e' || source_[at] == 'E')) {
    const size_t sign = at + 1 < source_.size() && (source_[at + 1] == '+' || source_[at + 1] == '-') ? 1 : 0;
    if (next_is_digit(at + 1 + sign)) {
      type = Type::real;
      at += 1 + sign;
      digits();
    }
  }
  std::string text(source_.substr(begin, at - begin));
  std::erase(text, '_');
  return {type, text, line};
}

Token ExpressionLexer::string(size_t& at, int& line) const {
  const char quote = source_[at];
  size_t end = at + 1;
  while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
  if (end >= source_.size()) throw syntax_failure(line, "a text in quotes has no end");
  const std::string_view inside = source_.substr(at + 1, end - at - 1);
  Token token{Type::string, unescaped(inside, line), line};
  line += static_cast<int>(std::ranges::count(inside, '\n'));
  at = end + 1;
  return token;
}

Token ExpressionLexer::symbol(size_t& at, int line) const {
  const auto found =
      std::ranges::find_if(symbols, [&](std::string_view symbol) { return source_.substr(at).starts_with(symbol); });
  if (found == symbols.end()) {
    throw syntax_failure(
        line, concat("unexpected character '", printable(source_.substr(at, text::utf8_size(source_[at]))), "'"));
  }
  at += found->size();
  return {Type::symbol, std::string(*found), line};
}

size_t ExpressionLexer::run(size_t at, bool block, int& line, std::vector<Token>& tokens) const {
  std::string open;  // brackets: a tag does not end inside them
  while (true) {
    const size_t next = skip_space(at);
    line += static_cast<int>(std::ranges::count(source_.substr(at, next - at), '\n'));
    at = next;
    if (at >= source_.size()) throw syntax_failure(line, "the template ends inside a tag");
    if (open.empty() && ends(at, block)) return at;
    const char c = source_[at];
    if (is_number(c)) {
      tokens.push_back(number(at, line));
    } else if (const size_t end = name(at); end > at) {
      tokens.push_back({Type::name, std::string(source_.substr(at, end - at)), line});
      at = end;
    } else if (c == '\'' || c == '"') {
      tokens.push_back(string(at, line));
    } else {
      tokens.push_back(symbol(at, line));
      const char bracket = tokens.back().text.front();
      if (const size_t kind = std::string_view("([{").find(bracket); kind != std::string_view::npos) {
        open += ")]}"[kind];
      } else if (bracket == ')' || bracket == ']' || bracket == '}') {
        if (open.empty() || open.back() != bracket) throw syntax_failure(line, concat("unexpected '", bracket, "'"));
        open.pop_back();
      }
    }
  }
}

}  // namespace w4q::jinja
