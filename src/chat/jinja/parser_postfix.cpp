// What stands behind a value: attributes, items, calls, filters and tests.
#include <array>

#include "chat/jinja/failure.h"
#include "chat/jinja/parser.h"
#include "chat/jinja/python_text.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

using Type = Token::Type;
using Kind = Expression::Kind;

}  // namespace

ExpressionPointer Parser::postfix(ExpressionPointer node) {
  while (true) {
    if (at_symbol(".") || at_symbol("[")) {
      node = subscript(std::move(node));
    } else if (at_symbol("(")) {
      node = call(std::move(node));
    } else {
      return node;
    }
  }
}

ExpressionPointer Parser::filters(ExpressionPointer node) {
  while (true) {
    if (at_symbol("|")) {
      node = filter(std::move(node));
    } else if (at_name("is")) {
      node = test(std::move(node));
    } else if (at_symbol("(")) {
      node = call(std::move(node));
    } else {
      return node;
    }
  }
}

/// At "|", or at the name of the first filter of a filter block. `value` is null where the block gives it.
ExpressionPointer Parser::filter(ExpressionPointer value) {
  bool first = !at_symbol("|");
  while (first || at_symbol("|")) {
    if (!first) take();
    first = false;
    const int line = token().line;
    auto node = make(Kind::filter, line, expect_name());
    node->children.push_back(std::move(value));
    if (at_symbol("(")) arguments(*node);
    value = checked(std::move(node));
  }
  return value;
}

ExpressionPointer Parser::test(ExpressionPointer value) {
  const int line = take().line;
  const bool negated = skip_name("not");
  auto node = make(Kind::test, line, expect_name());
  node->children.push_back(std::move(value));
  const Type type = token().type;
  const bool word = type == Type::name && !at_name("else") && !at_name("or") && !at_name("and");
  if (at_symbol("(")) {
    arguments(*node);
  } else if (word || type == Type::string || type == Type::integer || type == Type::real || at_symbol("[") ||
             at_symbol("{")) {
    if (at_name("is")) throw syntax_failure(line, "tests with 'is' cannot be chained");
    const Deeper deeper(*this);
    node->children.push_back(postfix(primary()));
  }
  node = checked(std::move(node));
  if (!negated) return node;
  auto result = make(Kind::logical_not, line);
  result->children.push_back(std::move(node));
  return checked(std::move(result));
}

ExpressionPointer Parser::subscript(ExpressionPointer value) {
  const Token begin = take();
  auto node = make(Kind::item, begin.line);
  node->children.push_back(std::move(value));
  if (begin.text == ".") {
    if (token().type == Type::name) {
      node->kind = Kind::attribute;
      node->text = take().text;
    } else if (token().type == Type::integer) {
      node->children.push_back(constant_or_name());
    } else {
      throw unexpected("the name of an attribute");
    }
    return checked(std::move(node));
  }
  auto index = make(Kind::tuple, begin.line);
  while (!skip_symbol("]")) {
    if (!index->children.empty()) expect_symbol(",");
    index->children.push_back(subscribed());
  }
  node->children.push_back(index->children.size() == 1 ? std::move(index->children.front())
                                                       : checked(std::move(index)));
  return checked(std::move(node));
}

/// An index, or a slice: start:stop:step, each of which may be missing.
ExpressionPointer Parser::subscribed() {
  auto node = make(Kind::slice, token().line);
  const auto ended = [&] { return at_symbol("]") || at_symbol(",") || at_symbol(":"); };
  node->children.push_back(at_symbol(":") ? nullptr : expression());
  if (!at_symbol(":")) return std::move(node->children.front());
  take();
  node->children.push_back(ended() ? nullptr : expression());
  node->children.push_back(skip_symbol(":") && !ended() ? expression() : nullptr);
  return checked(std::move(node));
}

ExpressionPointer Parser::call(ExpressionPointer callee) {
  auto node = make(Kind::call, token().line);
  node->children.push_back(std::move(callee));
  arguments(*node);
  return checked(std::move(node));
}

void Parser::arguments(Expression& node) {
  expect_symbol("(");
  bool first = true;
  while (!skip_symbol(")")) {
    if (!first) {
      expect_symbol(",");
      if (skip_symbol(")")) return;
    }
    first = false;
    if (at_symbol("*") || at_symbol("**"))
      throw unsupported_failure(token().line, "arguments with * or ** are not supported");
    if (token().type == Type::name && ahead().is(Type::symbol, "=")) {
      std::string name = take().text;
      take();
      node.keywords.emplace_back(std::move(name), expression());
    } else if (!node.keywords.empty()) {
      throw syntax_failure(token().line, "a positional argument behind one with a name");
    } else {
      node.children.push_back(expression());
    }
  }
}

}  // namespace w4q::jinja
