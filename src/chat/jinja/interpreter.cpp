#include "chat/jinja/interpreter.h"

#include <algorithm>

#include "chat/jinja/operators.h"
#include "core/text.h"

namespace w4q::jinja {
namespace {

using Kind = Statement::Kind;

/// Puts a member back at the end of a scope, thrown out of or not.
template <class T>
class Restored {
 public:
  Restored(T& member, T value) : member_(member), before_(std::exchange(member, value)) {}
  ~Restored() { member_ = before_; }
  Restored(const Restored&) = delete;
  Restored& operator=(const Restored&) = delete;

 private:
  T& member_;
  T before_;
};

/// Forgets what loop.changed() was asked about, which may hold the loop itself.
class Ended {
 public:
  explicit Ended(Loop& loop) : loop_(loop) {}
  ~Ended() { loop_.changed = None{}; }
  Ended(const Ended&) = delete;
  Ended& operator=(const Ended&) = delete;

 private:
  Loop& loop_;
};

}  // namespace

Interpreter::Deeper::Deeper(Interpreter& interpreter) : interpreter_(interpreter) {
  if (interpreter.depth_ >= interpreter.limits_.depth) {
    throw Failure(ErrorCode::unsupported,
                  concat("macros and expressions nest deeper than ", interpreter.limits_.depth, " levels"))
        .remedy("a macro calls itself without end, or the template is damaged or malicious");
  }
  ++interpreter.depth_;
}

Interpreter::Interpreter(const Limits& limits, std::string date) : Runtime(limits), date_(std::move(date)) {}

Interpreter::~Interpreter() {
  for (const auto& space : namespaces_) space->attributes.clear();
}

std::string Interpreter::run(const Statements& statements, std::vector<std::pair<std::string, Value>> variables) {
  std::string result;
  const Restored<std::string*> out(out_, &result);
  scope_ = std::make_shared<Scope>();
  for (auto& [name, value] : variables) scope_->names[name] = std::move(value);
  run_scoped(statements);
  return result;
}

Value Interpreter::make_namespace(std::vector<std::pair<std::string, Value>> attributes) {
  spend_bytes(sizeof(Namespace) + attributes.size() * sizeof(attributes[0]));
  namespaces_.push_back(std::make_shared<Namespace>(Namespace{std::move(attributes)}));
  return namespaces_.back();
}

Interpreter::Flow Interpreter::run_all(const Statements& statements) {
  for (const auto& statement : statements) {
    if (const Flow flow = run_one(*statement); flow != Flow::on) return flow;
  }
  return Flow::on;
}

Interpreter::Flow Interpreter::run_scoped(const Statements& statements) {
  const Inside inside(*this);
  return run_all(statements);
}

Interpreter::Flow Interpreter::run_one(const Statement& node) {
  const Deeper deeper(*this);
  spend_steps(1);
  line_ = node.line;
  switch (node.kind) {
    case Kind::text:
      spend_bytes(node.text.size());
      *out_ += node.text;
      return Flow::on;
    case Kind::print:
      print(evaluate(*node.expression));
      return Flow::on;
    case Kind::branch:
      return run_branch(node);
    case Kind::loop:
      return run_loop(node);
    case Kind::assign:
      assign(node.target, evaluate(*node.expression));
      return Flow::on;
    case Kind::assign_block:
      assign(node.target, filtered(node));
      return Flow::on;
    case Kind::macro:
      scope_->names[node.text] =
          std::make_shared<const Callable>(Callable{.macro = std::make_shared<const Macro>(Macro{&node, scope_})});
      return Flow::on;
    case Kind::call_block:
      call_block(node);
      return Flow::on;
    case Kind::filter_block:
      print(filtered(node));
      return Flow::on;
    case Kind::with:
      return run_with(node);
    case Kind::scope:
      return run_scoped(node.body);
    case Kind::leave:
      return Flow::leave;
    default:
      return Flow::next;
  }
}

void Interpreter::print(const Value& value) { *out_ += printed(value); }

Interpreter::Flow Interpreter::run_branch(const Statement& node) {
  for (const auto& [condition, body] : node.branches) {
    if (condition == nullptr || truth(evaluate(*condition))) return run_all(body);
  }
  return Flow::on;
}

Interpreter::Flow Interpreter::run_with(const Statement& node) {
  Values values;
  for (const auto& [target, value] : node.assignments) values.push_back(evaluate(*value));
  const Inside inside(*this);
  for (size_t i = 0; i < values.size(); ++i) assign(node.assignments[i].first, values[i]);
  return run_all(node.body);
}

/// What a loop walks over, those that its condition holds for.
std::shared_ptr<const Sequence> Interpreter::items_of(const Statement& node) {
  auto items = walk(*this, evaluate(*node.expression));
  if (node.condition == nullptr) return items;
  Values kept;
  for (const Value& value : items->items) {
    const Inside inside(*this);
    assign(node.target, value);
    if (truth(evaluate(*node.condition))) kept.push_back(value);
  }
  return list(std::move(kept)).as<std::shared_ptr<const Sequence>>();
}

Interpreter::Flow Interpreter::run_loop(const Statement& node) {
  const auto items = items_of(node);
  if (items->items.empty()) return run_scoped(node.otherwise);
  const auto loop = std::make_shared<Loop>(Loop{items});
  const Ended ended(*loop);
  return run_items(node, loop);
}

Interpreter::Flow Interpreter::run_items(const Statement& node, const std::shared_ptr<Loop>& loop) {
  for (size_t index = 0; index < loop->items->items.size(); ++index) {
    loop->index = index;
    spend_steps(1);
    const Inside inside(*this);
    line_ = node.line;
    assign(node.target, loop->items->items[index]);
    scope_->names["loop"] = loop;
    if (run_all(node.body) == Flow::leave) break;
  }
  return Flow::on;
}

Value Interpreter::captured(const Statements& statements) {
  std::string result;
  const Restored<std::string*> out(out_, &result);
  run_scoped(statements);
  return text(std::move(result));
}

/// The body of a block through its filters.
Value Interpreter::filtered(const Statement& node) {
  const Value body = captured(node.body);
  if (node.expression == nullptr) return body;
  const Restored<const Value*> block(block_, &body);
  return evaluate(*node.expression);
}

void Interpreter::call_block(const Statement& node) {
  const Value caller =
      std::make_shared<const Callable>(Callable{.macro = std::make_shared<const Macro>(Macro{&node, scope_})});
  print(evaluate_call(*node.expression, &caller));
}

Value Interpreter::call(const Value& callee, const Arguments& arguments) {
  if (callee.undefined()) throw undefined_failure(callee);
  const auto* callable = callee.get<const Callable>();
  if (callable == nullptr) throw type_failure(concat("a value of type ", type_name(callee), " cannot be called"));
  if (callable->function != nullptr) return callable->function->run(*this, callable->self, arguments);
  return call_macro(*callable->macro, arguments);
}

Value Interpreter::call_macro(const Macro& macro, const Arguments& arguments) {
  const auto scope = macro.scope.lock();
  if (scope == nullptr) throw unsupported_failure(0, "a macro is called outside of the loop that it was defined in");
  const Deeper deeper(*this);
  const Inside inside(*this, scope);
  bind_parameters(*macro.statement, arguments);
  return captured(macro.statement->body);
}

void Interpreter::bind_parameters(const Statement& node, const Arguments& arguments) {
  const auto& parameters = node.parameters;
  const std::string name = node.kind == Kind::macro ? node.text : "caller";
  if (arguments.positional.size() > parameters.size()) {
    throw type_failure(
        concat("macro ", name, " takes ", parameters.size(), " arguments, got ", arguments.positional.size()));
  }
  auto& names = scope_->names;
  names["caller"] = undefined_value("no caller defined");
  for (size_t i = 0; i < arguments.positional.size(); ++i) names[parameters[i].name] = arguments.positional[i];
  for (const auto& [keyword, value] : arguments.keywords) {
    const auto found = std::ranges::find(parameters, keyword, &Parameter::name);
    const bool given = found != parameters.end() && names.contains(keyword);
    if ((found == parameters.end() && keyword != "caller") || given) {
      throw type_failure(concat("macro ", name, ": unexpected argument '", printable(keyword), "'"));
    }
    names[keyword] = value;
  }
  for (const Parameter& parameter : parameters) {
    if (names.contains(parameter.name)) continue;
    const Value value = parameter.otherwise != nullptr
                            ? evaluate(*parameter.otherwise)
                            : undefined_value(concat("parameter '", parameter.name, "' was not provided"));
    names[parameter.name] = value;
  }
}

void Interpreter::assign(const Target& target, const Value& value) {
  if (target.parts.empty()) {
    if (!target.attribute.empty()) return assign_attribute(target, value);
    scope_->names.insert_or_assign(target.name, value);
    return;
  }
  const auto values = walk(*this, value);
  if (values->items.size() != target.parts.size()) {
    throw type_failure(concat(target.parts.size(), " names for ", values->items.size(), " values"));
  }
  for (size_t i = 0; i < values->items.size(); ++i) assign(target.parts[i], values->items[i]);
}

void Interpreter::assign_attribute(const Target& target, const Value& value) {
  const Value* found = look_up(target.name);
  auto* space = found == nullptr ? nullptr : found->get<Namespace>();
  if (space == nullptr)
    throw type_failure(concat("'", target.name, "' is no namespace, so its attributes cannot be set"));
  const auto place = std::ranges::find(space->attributes, target.attribute, &std::pair<std::string, Value>::first);
  if (place != space->attributes.end()) {
    place->second = value;
    return;
  }
  spend_bytes(sizeof(*place) + target.attribute.size());
  space->attributes.emplace_back(target.attribute, value);
}

const Value* Interpreter::look_up(std::string_view name) const {
  for (const Scope* scope = scope_.get(); scope != nullptr; scope = scope->parent.get()) {
    const auto found = scope->names.find(name);
    if (found != scope->names.end()) return &found->second;
  }
  return nullptr;
}

}  // namespace w4q::jinja
