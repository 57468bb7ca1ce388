// Templates from strangers: what would hang or exhaust the program is an error.
#include <gtest/gtest.h>

#include "chat/jinja/template.h"
#include "core/text.h"
#include "support.h"

namespace w4q::jinja {
namespace {

std::string repeated(std::string_view text, int times) {
  std::string result;
  for (int i = 0; i < times; ++i) result += text;
  return result;
}

void expect_refused(const std::string& source) {
  SCOPED_TRACE(source.substr(0, 100));
  test::expect_error(ErrorCode::unsupported, {"t: line ", "hint: "}, [&] {
    Template::parse(source, "t").render(io::Json::object(), "2025-01-31", {.steps = 1'000'000, .bytes = 10'000'000});
  });
}

TEST(TemplateLimits, Work) {
  expect_refused("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}");
  expect_refused("{% for a in range(9999) %}{% if range(9999)|select('gt', a)|list %}{% endif %}{% endfor %}");
}

TEST(TemplateLimits, Memory) {
  expect_refused("{{ 'x' * 99999999999 }}");
  expect_refused("{{ [1] * 99999999999 }}");
  expect_refused("{{ ('%' ~ '1000d') % 1 * 99999 }}");
  expect_refused("{{ 'a'|indent(9999999999) }}");
  expect_refused("{{ '1'.zfill(99999999999) }}");
  expect_refused(
      "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}");
  expect_refused(
      "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(99) %}{% set ns.s = ns.s.replace('x', 'xxxx') %}{% "
      "endfor %}");
  expect_refused(
      "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}");
  expect_refused(
      "{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l|tojson "
      "}}");
}

TEST(TemplateLimits, Nesting) {
  expect_refused("{{ " + repeated("(", 999) + "1" + repeated(")", 999) + " }}");
  expect_refused("{{ " + repeated("[", 999) + repeated("]", 999) + " }}");
  expect_refused("{{ " + repeated("not ", 999) + "1 }}");
  expect_refused("{{ " + repeated("-", 999) + "1 }}");
  expect_refused("{{ 1" + repeated(" + 1", 999) + " }}");
  expect_refused("{{ 'a'" + repeated("|upper", 999) + " }}");
  expect_refused("{{ a" + repeated(".b", 999) + " }}");
  expect_refused("{{ 1" + repeated(" if 1 else 1", 999) + " }}");
  expect_refused(repeated("{% if 1 %}", 999) + repeated("{% endif %}", 999));
  expect_refused("{% set " + repeated("(", 999) + "a" + repeated(")", 999) + " = 1 %}");
  expect_refused("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}");
  expect_refused(
      "{% macro f() %}{{ caller() }}{% call f() %}x{% endcall %}{% endmacro %}{% call f() %}{% endcall "
      "%}");
  expect_refused("{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l] %}{% endfor %}");
  expect_refused("{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = [ns.l.count] %}{% endfor %}");
  expect_refused("{% set ns = namespace() %}{% set ns.self = ns %}{{ ns }}");
}

// Scopes, namespaces and loops that hold each other are let go (LeakSanitizer sees it).
TEST(TemplateLimits, WhatHoldsItselfIsLetGo) {
  const auto run = [](const char* source) {
    return Template::parse(source, "t").render(io::Json::object(), "2025-01-31");
  };
  EXPECT_EQ(run("{% set ns = namespace() %}{% set ns.a = namespace(b=ns) %}{{ ns.a.b is defined }}"), "True");
  EXPECT_EQ(run("{% for i in [1] %}{{ loop.changed(loop) }}{% endfor %}"), "True");
  EXPECT_EQ(run("{% set ns = namespace() %}{% for i in [1] %}{% set ns.l = loop %}{% endfor %}{{ ns.l.index }}"), "1");
}

}  // namespace
}  // namespace w4q::jinja
