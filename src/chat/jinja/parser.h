// Tokens to a tree, by the grammar of Jinja2.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "chat/jinja/failure.h"
#include "chat/jinja/lexer.h"
#include "chat/jinja/syntax.h"

namespace w4q::jinja {

/// How deep statements and expressions may nest: real templates have up to some 40 levels.
inline constexpr int max_syntax_depth = 200;

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  /// The whole template. Throws Failure with the line.
  Statements run();

 private:
  class Deeper;

  const Token& token() const noexcept { return tokens_[at_]; }
  const Token& ahead() const noexcept { return tokens_[at_ + 1 < tokens_.size() ? at_ + 1 : at_]; }
  Token take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool at_name(std::string_view name) const noexcept { return token().is(Token::Type::name, name); }
  bool at_symbol(std::string_view symbol) const noexcept { return token().is(Token::Type::symbol, symbol); }
  bool skip_name(std::string_view name);
  bool skip_symbol(std::string_view symbol);
  void expect_symbol(std::string_view symbol);
  std::string expect_name();
  void expect_block_end();
  Failure unexpected(std::string_view expected) const;

  // Statements (parser.cpp).
  Statements statements(std::initializer_list<std::string_view> ends);
  std::unique_ptr<Statement> statement();
  std::unique_ptr<Statement> branch();
  std::unique_ptr<Statement> loop();
  std::unique_ptr<Statement> assign();
  std::unique_ptr<Statement> macro();
  std::unique_ptr<Statement> call_block();
  std::unique_ptr<Statement> filter_block();
  std::unique_ptr<Statement> with();
  std::unique_ptr<Statement> scope();
  std::unique_ptr<Statement> jump(Statement::Kind kind);
  Target target(bool with_attributes);
  Target single_target(bool with_attributes);
  std::vector<Parameter> parameters();
  Statements body(std::string_view end);
  std::unique_ptr<Statement> make(Statement::Kind kind) const;

  // Expressions (parser_expressions.cpp).
  ExpressionPointer expression(bool with_conditional = true);
  ExpressionPointer conditional();
  /// Operands with `word` between them, from the left.
  ExpressionPointer joined(std::string_view word, Expression::Kind kind, ExpressionPointer (Parser::*operand)());
  ExpressionPointer logical_or();
  ExpressionPointer logical_and();
  ExpressionPointer logical_not();
  ExpressionPointer compare();
  ExpressionPointer binary(int level);
  ExpressionPointer unary(bool with_filter);
  ExpressionPointer primary();
  ExpressionPointer constant_or_name();
  ExpressionPointer tuple(bool with_conditional, bool parentheses, std::string_view end_word = {});
  ExpressionPointer list();
  ExpressionPointer dict();
  ExpressionPointer postfix(ExpressionPointer node);
  ExpressionPointer filters(ExpressionPointer node);
  ExpressionPointer filter(ExpressionPointer node);
  ExpressionPointer test(ExpressionPointer node);
  ExpressionPointer subscript(ExpressionPointer node);
  ExpressionPointer subscribed();
  ExpressionPointer call(ExpressionPointer node);
  void arguments(Expression& node);
  ExpressionPointer checked(ExpressionPointer node) const;
  ExpressionPointer make(Expression::Kind kind, int line, std::string text = {}) const;

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  int loops_ = 0;  ///< around this place, for break and continue
};

/// Counts a level of nesting while it lives.
class Parser::Deeper {
 public:
  explicit Deeper(Parser& parser);
  ~Deeper() { --parser_.depth_; }
  Deeper(const Deeper&) = delete;
  Deeper& operator=(const Deeper&) = delete;

 private:
  Parser& parser_;
};

}  // namespace w4q::jinja
