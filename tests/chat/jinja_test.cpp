// The interpreter of templates against Jinja2: every case of testdata/chat/jinja.json, whose outputs are those of
// Jinja2 3.1.6 in the environment of transformers. Where a case has an error, Jinja2 raises one too; its words are ours.
#include <gtest/gtest.h>

#include "chat/chat_text.h"
#include "chat/jinja/template.h"
#include "core/text.h"
#include "io/json.h"
#include "support.h"

namespace w4q::jinja {
namespace {

TEST(JinjaTemplate, AgreesWithJinja2) {
  const io::Json table = io::read_json(test::testdata() / "chat/jinja.json");
  ASSERT_GT(table.at("cases").size(), 150U);
  size_t refused = 0;
  for (const auto& row : table.at("cases")) {
    const std::string source = row.at("template").get<std::string>();
    SCOPED_TRACE(source);
    try {
      const auto got = Template::parse(source, "t").render(table.at("variables"), "2025-01-31");
      EXPECT_EQ(got, row.value("output", "an error: " + row.value("error", "")));
    } catch (const Error& error) {
      ++refused;
      EXPECT_EQ(error.summary(), "t: " + row.value("error", "no error"));
      EXPECT_NE(std::string_view(error.what()).find("hint: "), std::string_view::npos) << error.what();
    }
  }
  EXPECT_GT(refused, 40U);
}

TEST(JinjaTemplate, ErrorsNameTheLine) {
  const io::Json none = io::Json::object();
  test::expect_error(ErrorCode::bad_file, {"x.jinja: line 3: expected 'in', got %}"},
                     [&] { Template::parse("a\n\n{% for x %}", "x.jinja"); });
  test::expect_error(ErrorCode::bad_file, {"x.jinja: line 2: the template refuses the conversation: no"}, [&] {
    Template::parse("{% macro f() %}\n{{ raise_exception('no') }}{% endmacro %}\n\n{{ f() }}", "x.jinja")
        .render(none, "2025-01-31");
  });
  test::expect_error(ErrorCode::bad_file, {"x.jinja: line 4: 'y' is undefined"}, [&] {
    Template::parse("{% set x = 1 %}\n{{ x }}\n\n{{ x + y }}", "x.jinja").render(none, "2025-01-31");
  });
  test::expect_error(ErrorCode::bad_file, {"is not UTF-8"}, [] { Template::parse("\xFF", "x.jinja"); });
}

TEST(JinjaTemplate, TheDateIsTheOneThatIsGiven) {
  const auto today = Template::parse("{{ strftime_now('%d %b %Y, %A') }}", "t");
  EXPECT_EQ(today.render(io::Json::object(), "2024-02-29"), "29 Feb 2024, Thursday");
  EXPECT_EQ(today.render(io::Json::object(), std::string(chat::default_date)), "01 Jan 2025, Wednesday");
}

TEST(JinjaTemplate, IntegersBeyond64BitsAreRefused) {
  const auto refuse = [](const std::string& source, const io::Json& variables) {
    test::expect_error(ErrorCode::unsupported, {"64 bits", "hint: "},
                       [&] { Template::parse(source, "t").render(variables, "2025-01-31"); });
  };
  refuse("{{ 9223372036854775807 + 1 }}", io::Json::object());
  refuse("{{ 9223372036854775808 }}", io::Json::object());
  refuse("{{ 10 ** 19 }}", io::Json::object());
  refuse("{{ '99999999999999999999'|int }}", io::Json::object());
  refuse("{{ x }}", {{"x", uint64_t{1} << 63}});
}

}  // namespace
}  // namespace w4q::jinja
