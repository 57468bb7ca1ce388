// Runs the tree of a template.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "chat/jinja/runtime.h"
#include "chat/jinja/syntax.h"

namespace w4q::jinja {

/// Names and their values, and the scope around them.
struct Scope {
  std::shared_ptr<Scope> parent;
  std::map<std::string, Value, std::less<>> names = {};
};

/// A macro, or the body of a call block. It sees the scope that it was defined in, while that lasts.
struct Macro {
  const Statement* statement;
  std::weak_ptr<Scope> scope;
};

class Interpreter final : public Runtime {
 public:
  Interpreter(const Limits& limits, std::string date);
  ~Interpreter() override;

  /// What the template prints. Throws Failure; line() says where.
  std::string run(const Statements& statements, std::vector<std::pair<std::string, Value>> variables);
  int line() const noexcept { return line_; }

  Value call(const Value& callee, const Arguments& arguments) override;
  Value make_namespace(std::vector<std::pair<std::string, Value>> attributes) override;
  const std::string& date() const override { return date_; }

 private:
  enum class Flow { on, leave, next };
  class Deeper;
  class Inside;

  // Statements (interpreter.cpp).
  Flow run_all(const Statements& statements);
  Flow run_one(const Statement& node);
  Flow run_scoped(const Statements& statements);
  Flow run_branch(const Statement& node);
  Flow run_loop(const Statement& node);
  Flow run_items(const Statement& node, const std::shared_ptr<Loop>& loop);
  Flow run_with(const Statement& node);
  std::shared_ptr<const Sequence> items_of(const Statement& node);
  void print(const Value& value);
  /// What statements print, in a scope of their own.
  Value captured(const Statements& statements);
  Value filtered(const Statement& node);
  void call_block(const Statement& node);
  Value call_macro(const Macro& macro, const Arguments& arguments);
  void bind_parameters(const Statement& node, const Arguments& arguments);
  void assign(const Target& target, const Value& value);
  void assign_attribute(const Target& target, const Value& value);
  const Value* look_up(std::string_view name) const;

  // Expressions (interpreter_expressions.cpp).
  Value evaluate(const Expression& node);
  Value evaluate_kind(const Expression& node);
  Value evaluate_name(const Expression& node);
  Value evaluate_dict(const Expression& node);
  Value evaluate_logical(const Expression& node);
  Value evaluate_compare(const Expression& node);
  Value evaluate_item(const Expression& node);
  Value evaluate_call(const Expression& node, const Value* caller);
  Value evaluate_filter(const Expression& node);
  Value evaluate_test(const Expression& node);
  Values evaluate_all(const std::vector<ExpressionPointer>& nodes, size_t first);
  Arguments arguments_of(const Expression& node);

  const std::string date_;
  std::shared_ptr<Scope> scope_;
  std::vector<std::shared_ptr<Namespace>> namespaces_;
  std::string* out_ = nullptr;
  const Value* block_ = nullptr;  ///< what a filter block filters
  int line_ = 1;
  int depth_ = 0;
};

/// Counts a level of nesting while it lives.
class Interpreter::Deeper {
 public:
  explicit Deeper(Interpreter& interpreter);
  ~Deeper() { --interpreter_.depth_; }
  Deeper(const Deeper&) = delete;
  Deeper& operator=(const Deeper&) = delete;

 private:
  Interpreter& interpreter_;
};

/// A new scope in `parent` while it lives.
class Interpreter::Inside {
 public:
  Inside(Interpreter& interpreter, std::shared_ptr<Scope> parent)
      : interpreter_(interpreter), before_(std::move(interpreter.scope_)) {
    interpreter.scope_ = std::make_shared<Scope>(Scope{std::move(parent)});
  }
  explicit Inside(Interpreter& interpreter) : Inside(interpreter, interpreter.scope_) {}
  ~Inside() { interpreter_.scope_ = std::move(before_); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Interpreter& interpreter_;
  std::shared_ptr<Scope> before_;
};

}  // namespace w4q::jinja
