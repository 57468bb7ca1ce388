#include <algorithm>

#include "chat/jinja/interpreter.h"
#include "chat/jinja/operators.h"
#include "core/text.h"

namespace w4q::jinja {

using Kind = Expression::Kind;

Value Interpreter::evaluate(const Expression& node) {
  const Deeper deeper(*this);
  spend_steps(1);
  line_ = node.line;
  return evaluate_kind(node);
}

Value Interpreter::evaluate_kind(const Expression& node) {
  switch (node.kind) {
    case Kind::constant:
      return node.constant;
    case Kind::name:
      return evaluate_name(node);
    case Kind::list:
      return list(evaluate_all(node.children, 0));
    case Kind::tuple:
      return list(evaluate_all(node.children, 0), Sequence::Kind::tuple);
    case Kind::dict:
      return evaluate_dict(node);
    case Kind::conditional:
      if (truth(evaluate(*node.children[0]))) return evaluate(*node.children[1]);
      return node.children[2] != nullptr ? evaluate(*node.children[2])
                                         : undefined_value("the condition does not hold, and there is no else");
    case Kind::logical_and:
    case Kind::logical_or:
      return evaluate_logical(node);
    case Kind::logical_not:
      return !truth(evaluate(*node.children[0]));
    case Kind::compare:
      return evaluate_compare(node);
    case Kind::item:
      return evaluate_item(node);
    case Kind::call:
      return evaluate_call(node, nullptr);
    case Kind::filter:
      return evaluate_filter(node);
    case Kind::test:
      return evaluate_test(node);
    case Kind::unary:
    case Kind::attribute: {
      const Value value = evaluate(*node.children[0]);
      line_ = node.line;
      return node.kind == Kind::unary ? unary(node.text, value) : attribute(value, node.text);
    }
    default: {
      const Value a = evaluate(*node.children[0]), b = evaluate(*node.children[1]);
      line_ = node.line;
      return binary(*this, node.text, a, b);
    }
  }
}

Value Interpreter::evaluate_name(const Expression& node) {
  if (const Value* found = look_up(node.text)) return *found;
  if (const Function* function = find_global(node.text)) return method_value(*function, None{});
  return undefined_value(concat("'", printable(node.text), "' is undefined"));
}

Values Interpreter::evaluate_all(const std::vector<ExpressionPointer>& nodes, size_t first) {
  Values values;
  for (size_t i = first; i < nodes.size(); ++i) values.push_back(evaluate(*nodes[i]));
  return values;
}

/// A later value of a key takes the place of an earlier one.
Value Interpreter::evaluate_dict(const Expression& node) {
  std::vector<std::pair<Value, Value>> entries;
  for (size_t i = 0; i < node.children.size(); i += 2) {
    const Value key = evaluate(*node.children[i]);
    const Value value = evaluate(*node.children[i + 1]);
    const auto found = std::ranges::find_if(entries, [&](const auto& entry) { return equal(entry.first, key); });
    if (found == entries.end()) {
      entries.emplace_back(key, value);
    } else {
      found->second = value;
    }
  }
  spend_bytes(entries.size() * 2 * sizeof(Value));
  return dict_value(std::move(entries));
}

Value Interpreter::evaluate_logical(const Expression& node) {
  Value left = evaluate(*node.children[0]);
  return truth(left) == (node.kind == Kind::logical_and) ? evaluate(*node.children[1]) : left;
}

Value Interpreter::evaluate_compare(const Expression& node) {
  Value left = evaluate(*node.children[0]);
  for (size_t i = 0; i < node.operators.size(); ++i) {
    const Value right = evaluate(*node.children[i + 1]);
    line_ = node.line;
    if (!compare(node.operators[i], left, right)) return false;
    left = right;
  }
  return true;
}

Value Interpreter::evaluate_item(const Expression& node) {
  const Value object = evaluate(*node.children[0]);
  const Expression& index = *node.children[1];
  if (index.kind != Kind::slice) {
    const Value at = evaluate(index);
    line_ = node.line;
    return item(*this, object, at);
  }
  Values bounds(3);
  for (size_t i = 0; i < 3; ++i) {
    if (index.children[i] != nullptr) bounds[i] = evaluate(*index.children[i]);
  }
  line_ = node.line;
  return slice(*this, object, &bounds[0], &bounds[1], &bounds[2]);
}

Arguments Interpreter::arguments_of(const Expression& node) {
  Arguments arguments{evaluate_all(node.children, 1), {}};
  for (const auto& [name, value] : node.keywords) {
    if (std::ranges::find(arguments.keywords, name, &std::pair<std::string, Value>::first) !=
        arguments.keywords.end()) {
      throw type_failure(concat("the argument '", printable(name), "' is given twice"));
    }
    arguments.keywords.emplace_back(name, evaluate(*value));
  }
  return arguments;
}

Value Interpreter::evaluate_call(const Expression& node, const Value* caller) {
  const Value callee = evaluate(*node.children[0]);
  Arguments arguments = arguments_of(node);
  if (caller != nullptr) arguments.keywords.emplace_back("caller", *caller);
  line_ = node.line;
  return call(callee, arguments);
}

Value Interpreter::evaluate_filter(const Expression& node) {
  const Value value = node.children[0] == nullptr ? *block_ : evaluate(*node.children[0]);
  const Arguments arguments = arguments_of(node);
  line_ = node.line;
  return run_filter(*this, node.text, value, arguments);
}

Value Interpreter::evaluate_test(const Expression& node) {
  const Value value = evaluate(*node.children[0]);
  const Arguments arguments = arguments_of(node);
  line_ = node.line;
  return run_test(*this, node.text, value, arguments);
}

}  // namespace w4q::jinja
