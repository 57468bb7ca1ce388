// A template as a tree.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chat/jinja/value.h"

namespace w4q::jinja {

struct Expression;
using ExpressionPointer = std::unique_ptr<Expression>;

struct Expression {
  enum class Kind {
    constant,
    name,         ///< `text`
    list,         ///< `children`
    tuple,        ///< `children`
    dict,         ///< `children`: key, value, key, value …
    conditional,  ///< `children`: condition, value, otherwise (may be null)
    logical_and,
    logical_or,
    logical_not,
    unary,      ///< `text`: + or -
    binary,     ///< `text`: the operator
    compare,    ///< `children`: first, then one for each of `operators`
    attribute,  ///< `children[0]`.`text`
    item,       ///< `children[0]`[`children[1]`]
    slice,      ///< start, stop, step, each may be null; only inside item
    call,       ///< `children`: callee, positional arguments; `keywords`
    filter,     ///< `text`; `children`: value (null: of a filter block), arguments
    test        ///< likewise
  };
  Kind kind = Kind::constant;
  int line = 1;
  int depth = 1;  ///< of the tree
  std::string text = {};
  Value constant = {};
  std::vector<ExpressionPointer> children = {};
  std::vector<std::string> operators = {};
  std::vector<std::pair<std::string, ExpressionPointer>> keywords = {};
};

/// Where a value is put: a name, an attribute of a namespace, or a tuple of these.
struct Target {
  std::string name = {};
  std::string attribute = {};
  std::vector<Target> parts = {};  ///< of a tuple
};

struct Statement;
using Statements = std::vector<std::unique_ptr<Statement>>;

/// Parameters of a macro, from the first one with a default on all have one.
struct Parameter {
  std::string name;
  ExpressionPointer otherwise;
};

struct Statement {
  enum class Kind {
    text,
    print,         ///< `expression`
    branch,        ///< if, elif, else: `branches`
    loop,          ///< `target` in `expression` if `condition`: `body`, else `otherwise`
    assign,        ///< `target` = `expression`
    assign_block,  ///< `target` = `body`, through the filter `expression` if there is one
    macro,         ///< `name`, `parameters`, `body`
    call_block,    ///< `expression` is a call that gets `parameters` and `body` as caller
    filter_block,  ///< `body` through `expression`
    with,          ///< `assignments`, `body`
    scope,         ///< `body`: generation
    leave,         ///< break
    next           ///< continue
  };
  struct Branch {
    ExpressionPointer condition;  ///< null: else
    Statements body;
  };
  Kind kind = Kind::text;
  int line = 1;
  std::string text = {};  ///< or the name of a macro
  Target target = {};
  ExpressionPointer expression = {};
  ExpressionPointer condition = {};
  std::vector<Branch> branches = {};
  std::vector<Parameter> parameters = {};
  std::vector<std::pair<Target, ExpressionPointer>> assignments = {};
  Statements body = {};
  Statements otherwise = {};
};

}  // namespace w4q::jinja
