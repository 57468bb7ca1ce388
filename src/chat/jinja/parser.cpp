#include "chat/jinja/parser.h"

#include <algorithm>
#include <array>

#include "chat/jinja/failure.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

using Type = Token::Type;
using Kind = Statement::Kind;

constexpr std::array<std::string_view, 8> foreign{"extends", "block", "include",    "import",
                                                  "from",    "do",    "autoescape", "trans"};

std::string shown(const Token& token) {
  switch (token.type) {
    case Type::end:
      return "the end of the template";
    case Type::block_end:
      return "%}";
    case Type::variable_end:
      return "}}";
    case Type::data:
      return "text";
    default:
      return concat("'", printable(token.text.substr(0, 60)), "'");
  }
}

}  // namespace

Parser::Deeper::Deeper(Parser& parser) : parser_(parser) {
  if (parser.depth_ >= max_syntax_depth) {
    throw unsupported_failure(parser.token().line,
                              concat("the template nests deeper than ", max_syntax_depth, " levels"));
  }
  ++parser.depth_;
}

Failure Parser::unexpected(std::string_view expected) const {
  return syntax_failure(token().line, concat("expected ", expected, ", got ", shown(token())));
}

bool Parser::skip_name(std::string_view name) {
  if (!at_name(name)) return false;
  take();
  return true;
}

bool Parser::skip_symbol(std::string_view symbol) {
  if (!at_symbol(symbol)) return false;
  take();
  return true;
}

void Parser::expect_symbol(std::string_view symbol) {
  if (!skip_symbol(symbol)) throw unexpected(concat("'", symbol, "'"));
}

std::string Parser::expect_name() {
  if (token().type != Type::name) throw unexpected("a name");
  return take().text;
}

void Parser::expect_block_end() {
  if (token().type != Type::block_end) throw unexpected("%}");
  take();
}

Statements Parser::run() {
  Statements result = statements({});
  if (token().type != Type::end) throw unexpected("the end of the template");
  return result;
}

std::unique_ptr<Statement> Parser::make(Kind kind) const {
  auto node = std::make_unique<Statement>();
  node->kind = kind;
  node->line = token().line;
  return node;
}

/// Until the end, or a tag of one of these names, of which the name is next.
Statements Parser::statements(std::initializer_list<std::string_view> ends) {
  const Deeper deeper(*this);
  Statements result;
  while (token().type != Type::end) {
    auto node = make(Kind::text);
    const Token begin = take();
    if (begin.type == Type::data) {
      node->text = begin.text;
    } else if (begin.type == Type::variable_begin) {
      node->kind = Kind::print;
      node->expression = tuple(true, false);
      if (token().type != Type::variable_end) throw unexpected("}}");
      take();
    } else {
      if (std::ranges::any_of(ends, [&](std::string_view end) { return at_name(end); })) return result;
      node = statement();
      expect_block_end();
    }
    result.push_back(std::move(node));
  }
  if (ends.size() > 0) throw unexpected(concat("{% ", *(ends.end() - 1), " %}"));
  return result;
}

std::unique_ptr<Statement> Parser::statement() {
  if (token().type != Type::name) throw unexpected("the name of a tag");
  if (skip_name("if")) return branch();
  if (skip_name("for")) return loop();
  if (skip_name("set")) return assign();
  if (skip_name("macro")) return macro();
  if (skip_name("call")) return call_block();
  if (skip_name("filter")) return filter_block();
  if (skip_name("with")) return with();
  if (skip_name("generation")) return scope();
  if (skip_name("break")) return jump(Kind::leave);
  if (skip_name("continue")) return jump(Kind::next);
  if (std::ranges::find(foreign, token().text) != foreign.end()) {
    throw unsupported_failure(token().line,
                              concat("the tag {% ", token().text, " %} is not supported in chat templates"));
  }
  throw syntax_failure(token().line, concat("unknown tag {% ", printable(token().text.substr(0, 60)), " %}"));
}

/// Statements up to the tag `end`, whose name is taken.
Statements Parser::body(std::string_view end) {
  expect_block_end();
  Statements result = statements({end});
  take();
  return result;
}

std::unique_ptr<Statement> Parser::branch() {
  auto node = make(Kind::branch);
  while (true) {
    Statement::Branch next{tuple(false, false), {}};
    expect_block_end();
    next.body = statements({"elif", "else", "endif"});
    node->branches.push_back(std::move(next));
    const std::string word = take().text;
    if (word == "elif") continue;
    if (word == "else") node->branches.push_back({nullptr, body("endif")});
    return node;
  }
}

std::unique_ptr<Statement> Parser::loop() {
  auto node = make(Kind::loop);
  node->target = target(false);
  if (!skip_name("in")) throw unexpected("'in'");
  node->expression = tuple(false, false, "recursive");
  if (skip_name("if")) node->condition = expression();
  if (at_name("recursive")) throw unsupported_failure(token().line, "recursive loops are not supported");
  expect_block_end();
  ++loops_;
  node->body = statements({"else", "endfor"});
  --loops_;
  if (take().text == "else") node->otherwise = body("endfor");
  return node;
}

std::unique_ptr<Statement> Parser::jump(Kind kind) {
  if (loops_ == 0) throw syntax_failure(token().line, "{% break %} or {% continue %} outside of a loop");
  return make(kind);
}

std::unique_ptr<Statement> Parser::assign() {
  auto node = make(Kind::assign);
  node->target = target(true);
  if (skip_symbol("=")) {
    node->expression = tuple(true, false);
    return node;
  }
  node->kind = Kind::assign_block;
  if (at_symbol("|")) node->expression = filter(nullptr);
  node->body = body("endset");
  return node;
}

Target Parser::single_target(bool with_attributes) {
  if (skip_symbol("(")) {
    Target inside = target(with_attributes);
    expect_symbol(")");
    return inside;
  }
  Target result{.name = expect_name()};
  if (with_attributes && skip_symbol(".")) result.attribute = expect_name();
  const std::array<std::string_view, 6> constants{"true", "false", "none", "True", "False", "None"};
  if (std::ranges::find(constants, result.name) != constants.end()) {
    throw syntax_failure(token().line, concat("cannot assign to ", result.name));
  }
  return result;
}

Target Parser::target(bool with_attributes) {
  const Deeper deeper(*this);
  Target first = single_target(with_attributes);
  if (!at_symbol(",")) return first;
  Target result;
  result.parts.push_back(std::move(first));
  while (skip_symbol(",")) {
    if (token().type != Type::name && !at_symbol("(")) break;
    if (at_name("in")) break;
    result.parts.push_back(single_target(with_attributes));
  }
  return result;
}

std::vector<Parameter> Parser::parameters() {
  std::vector<Parameter> result;
  expect_symbol("(");
  while (!skip_symbol(")")) {
    if (!result.empty()) expect_symbol(",");
    if (skip_symbol(")")) break;
    Parameter next{expect_name(), nullptr};
    if (skip_symbol("=")) {
      next.otherwise = expression();
    } else if (!result.empty() && result.back().otherwise != nullptr) {
      throw syntax_failure(token().line,
                           concat("parameter ", next.name, " without a default behind one with a default"));
    }
    result.push_back(std::move(next));
  }
  return result;
}

/// A macro's body is a function of its own: loops around it are not its loops.
std::unique_ptr<Statement> Parser::macro() {
  auto node = make(Kind::macro);
  node->text = expect_name();
  node->parameters = parameters();
  const int around = std::exchange(loops_, 0);
  node->body = body("endmacro");
  loops_ = around;
  return node;
}

std::unique_ptr<Statement> Parser::call_block() {
  auto node = make(Kind::call_block);
  if (at_symbol("(")) node->parameters = parameters();
  node->expression = expression();
  if (node->expression->kind != Expression::Kind::call) throw syntax_failure(node->line, "{% call %} needs a call");
  const int around = std::exchange(loops_, 0);
  node->body = body("endcall");
  loops_ = around;
  return node;
}

std::unique_ptr<Statement> Parser::filter_block() {
  auto node = make(Kind::filter_block);
  node->expression = filter(nullptr);
  node->body = body("endfilter");
  return node;
}

std::unique_ptr<Statement> Parser::with() {
  auto node = make(Kind::with);
  while (token().type != Type::block_end) {
    if (!node->assignments.empty()) expect_symbol(",");
    Target name = single_target(false);
    expect_symbol("=");
    node->assignments.emplace_back(std::move(name), expression());
  }
  node->body = body("endwith");
  return node;
}

std::unique_ptr<Statement> Parser::scope() {
  auto node = make(Kind::scope);
  node->body = body("endgeneration");
  return node;
}

}  // namespace w4q::jinja
