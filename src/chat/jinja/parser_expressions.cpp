// The grammar of expressions, loosest first.
#include <algorithm>
#include <array>
#include <charconv>

#include "chat/jinja/failure.h"
#include "chat/jinja/parser.h"
#include "chat/jinja/python_text.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

using Type = Token::Type;
using Kind = Expression::Kind;

constexpr std::array<std::string_view, 6> comparisons{"==", "!=", ">", ">=", "<", "<="};

/// Operators that bind alike, loosest first.
constexpr std::array<std::array<std::string_view, 4>, 4> operators{{{"+", "-"}, {"~"}, {"*", "/", "//", "%"}, {"**"}}};

}  // namespace

ExpressionPointer Parser::make(Kind kind, int line, std::string text) const {
  auto node = std::make_unique<Expression>();
  node->kind = kind;
  node->line = line;
  node->text = std::move(text);
  return node;
}

/// Sets the depth of a node whose children are complete.
ExpressionPointer Parser::checked(ExpressionPointer node) const {
  for (const auto& child : node->children) {
    if (child != nullptr) node->depth = std::max(node->depth, child->depth + 1);
  }
  for (const auto& [name, value] : node->keywords) node->depth = std::max(node->depth, value->depth + 1);
  if (node->depth <= max_syntax_depth) return node;
  throw unsupported_failure(node->line, concat("an expression nests deeper than ", max_syntax_depth, " levels"));
}

ExpressionPointer Parser::expression(bool with_conditional) {
  const Deeper deeper(*this);
  return with_conditional ? conditional() : logical_or();
}

ExpressionPointer Parser::conditional() {
  auto value = logical_or();
  while (at_name("if")) {
    auto node = make(Kind::conditional, take().line);
    auto condition = logical_or();
    ExpressionPointer otherwise;
    if (skip_name("else")) {
      const Deeper deeper(*this);
      otherwise = conditional();
    }
    node->children.push_back(std::move(condition));
    node->children.push_back(std::move(value));
    node->children.push_back(std::move(otherwise));
    value = checked(std::move(node));
  }
  return value;
}

ExpressionPointer Parser::joined(std::string_view word, Kind kind, ExpressionPointer (Parser::*operand)()) {
  auto left = (this->*operand)();
  while (at_name(word)) {
    auto node = make(kind, take().line);
    node->children.push_back(std::move(left));
    node->children.push_back((this->*operand)());
    left = checked(std::move(node));
  }
  return left;
}

ExpressionPointer Parser::logical_or() { return joined("or", Kind::logical_or, &Parser::logical_and); }
ExpressionPointer Parser::logical_and() { return joined("and", Kind::logical_and, &Parser::logical_not); }

ExpressionPointer Parser::logical_not() {
  if (!at_name("not")) return compare();
  const Deeper deeper(*this);
  auto node = make(Kind::logical_not, take().line);
  node->children.push_back(logical_not());
  return checked(std::move(node));
}

ExpressionPointer Parser::compare() {
  auto first = binary(0);
  auto node = make(Kind::compare, token().line);
  while (true) {
    std::string word;
    if (token().type == Type::symbol && std::ranges::find(comparisons, token().text) != comparisons.end()) {
      word = take().text;
    } else if (skip_name("in")) {
      word = "in";
    } else if (at_name("not") && ahead().is(Type::name, "in")) {
      take();
      take();
      word = "not in";
    } else {
      break;
    }
    if (node->operators.empty()) node->children.push_back(std::move(first));
    node->operators.push_back(word);
    node->children.push_back(binary(0));
  }
  return node->operators.empty() ? std::move(first) : checked(std::move(node));
}

ExpressionPointer Parser::binary(int level) {
  if (static_cast<size_t>(level) == operators.size()) return unary(true);
  const auto& words = operators.at(static_cast<size_t>(level));
  auto left = binary(level + 1);
  while (token().type == Type::symbol && std::ranges::find(words, token().text) != words.end()) {
    const Token word = take();
    auto node = make(Kind::binary, word.line, word.text);
    node->children.push_back(std::move(left));
    node->children.push_back(binary(level + 1));
    left = checked(std::move(node));
  }
  return left;
}

ExpressionPointer Parser::unary(bool with_filter) {
  const Deeper deeper(*this);
  ExpressionPointer node;
  if (at_symbol("-") || at_symbol("+")) {
    const Token sign = take();
    node = make(Kind::unary, sign.line, sign.text);
    node->children.push_back(unary(false));
    node = checked(std::move(node));
  } else {
    node = primary();
  }
  node = postfix(std::move(node));
  return with_filter ? filters(std::move(node)) : std::move(node);
}

ExpressionPointer Parser::primary() {
  if (token().type == Type::symbol) {
    if (skip_symbol("(")) {
      auto node = tuple(true, true);
      expect_symbol(")");
      return node;
    }
    if (at_symbol("[")) return list();
    if (at_symbol("{")) return dict();
  }
  return constant_or_name();
}

ExpressionPointer Parser::constant_or_name() {
  auto node = make(Kind::constant, token().line);
  if (token().type == Type::string) {
    std::string text;
    while (token().type == Type::string) text += take().text;
    node->constant = text_value(std::move(text));
  } else if (token().type == Type::integer) {
    const std::string digits = take().text;
    int64_t number = 0;
    if (std::from_chars(digits.data(), digits.data() + digits.size(), number).ec != std::errc{}) {
      throw unsupported_failure(node->line, concat("the integer ", digits.substr(0, 40), " does not fit 64 bits"));
    }
    node->constant = number;
  } else if (token().type == Type::real) {
    node->constant = *parse_float(take().text);
  } else if (token().type == Type::name) {
    const std::string name = take().text;
    if (name == "true" || name == "True" || name == "false" || name == "False") {
      node->constant = name == "true" || name == "True";
    } else if (name != "none" && name != "None") {
      node->kind = Kind::name;
      node->text = name;
    }
  } else {
    throw unexpected("a value");
  }
  return node;
}

/// One expression, or a tuple of several; `parentheses`: around it, so that none at all is the empty tuple.
ExpressionPointer Parser::tuple(bool with_conditional, bool parentheses, std::string_view end_word) {
  const int line = token().line;
  const auto ended = [&] {
    return token().type == Type::variable_end || token().type == Type::block_end || at_symbol(")") ||
           (!end_word.empty() && at_name(end_word));
  };
  auto node = make(Kind::tuple, line);
  bool is_tuple = false;
  while (!ended()) {
    node->children.push_back(expression(with_conditional));
    if (!skip_symbol(",")) break;
    is_tuple = true;
  }
  if (!is_tuple && node->children.size() == 1) return std::move(node->children.front());
  if (node->children.empty() && !parentheses) throw unexpected("an expression");
  return checked(std::move(node));
}

ExpressionPointer Parser::list() {
  auto node = make(Kind::list, take().line);
  while (!skip_symbol("]")) {
    if (!node->children.empty()) expect_symbol(",");
    if (skip_symbol("]")) break;
    node->children.push_back(expression());
  }
  return checked(std::move(node));
}

ExpressionPointer Parser::dict() {
  auto node = make(Kind::dict, take().line);
  while (!skip_symbol("}")) {
    if (!node->children.empty()) expect_symbol(",");
    if (skip_symbol("}")) break;
    node->children.push_back(expression());
    expect_symbol(":");
    node->children.push_back(expression());
  }
  return checked(std::move(node));
}

}  // namespace w4q::jinja
