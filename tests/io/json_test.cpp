#include "io/json.h"

#include <chrono>

#include "make.h"

namespace w4q::io {
namespace {

using test::expect_error;

void refuses(std::string_view text, std::initializer_list<std::string_view> parts) {
  expect_error(ErrorCode::bad_file, parts, [&] { parse_json(text, "config.json"); });
}

TEST(Json, BuildsWhatTheLibraryBuilds) {
  const std::string text =
      R"({"z":[1,-2,3.5,1e3,true,false,null,"\u00fc\n"],"a":{"y":{},"x":[[],[{}]]},"":18446744073709551615})";
  const Json tree = parse_json(text, "text");
  EXPECT_EQ(tree, Json::parse(text));
  EXPECT_EQ(tree.dump(), Json::parse(text).dump()) << "the order of keys is kept";
  EXPECT_EQ(tree.at("").get<uint64_t>(), 18446744073709551615u);
  EXPECT_EQ(parse_json(" 5 ", "text"), 5);
}

TEST(Json, SyntaxErrorsHaveLineAndColumn) {
  refuses("{\n  \"a\": 1,\n  \"b\" 2\n}", {"config.json: is not valid JSON", "line 3, column 7"});
  refuses("", {"config.json: is empty", "hint:"});
  refuses("{\"a\":1}x", {"line 1, column 8"});
  refuses("{\"a\":1", {"unexpected end of input"});
  refuses("[1e999]", {"config.json"});
  refuses("[\"\\ud800\"]", {"config.json"});
  refuses("{'a':1}", {"line 1, column 2"});
}

TEST(Json, RefusesDuplicateKeysAtAnyLevel) {
  refuses("{\n\"a\":1,\n\"b\":2,\n\"a\":1}", {"\"a\" appears twice", "line 4, column 3"});
  refuses(R"([{"x":{"y":[{"k":1,"j":2,"k":3}]}}])", {"\"k\" appears twice"});
  refuses(R"({"a":1,"\u0061":1})", {"\"a\" appears twice"});
  EXPECT_NO_THROW(parse_json(R"({"a":{"a":{"a":1}},"b":[{"a":1},{"a":1}]})", "text"));
}

TEST(Json, RefusesWhatIsNotUtf8) {
  refuses("\xEF\xBB\xBF{}", {"byte order mark"});
  refuses("{\"a\":\"\xC0\x80\"}", {"not valid UTF-8", "line 1, column 7"});
  refuses("[\"\xED\xA0\x80\"]", {"not valid UTF-8"});
  refuses("[\"\xF5\x80\x80\x80\"]", {"not valid UTF-8"});
  refuses("[\"\xE2\x82\"]", {"not valid UTF-8"});
  refuses(std::string_view("{}\0\0", 4), {"NUL", "line 1, column 3"});
}

TEST(Json, LimitsTheDepth) {
  EXPECT_NO_THROW(parse_json(std::string(100, '[') + std::string(100, ']'), "text"));
  refuses(std::string(101, '['), {"nested deeper than 100", "line 1, column 101"});
  std::string objects;
  for (int i = 0; i < 1'000'000; ++i) objects += "{\"a\":";
  refuses(objects, {"nested deeper than 100"});
}

TEST(Json, MessagesHoldNothingThatATerminalActsOn) {
  try {
    parse_json("{\"\x1b[2J\":1}", "evil\x07.json");
    FAIL();
  } catch (const Error& error) {
    const std::string_view what = error.what();
    EXPECT_EQ(what.find('\x1b'), std::string_view::npos);
    EXPECT_EQ(what.find('\x07'), std::string_view::npos);
  }
  const std::string long_key(1'000'000, 'k');
  try {
    parse_json("{\"" + long_key + "\":1,\"" + long_key + "\":1}", "text");
    FAIL();
  } catch (const Error& error) {
    EXPECT_LT(std::string_view(error.what()).size(), 500u);
  }
}

TEST(Json, ManyKeysTakeLinearTime) {
  // Inserting into ordered_json one by one compares each key with all earlier ones: minutes for this many.
  std::string text = "{";
  for (int i = 0; i < 200'000; ++i) text += (i ? ",\"" : "\"") + std::to_string(i) + "\":{}";
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(parse_json(text + "}", "text").size(), 200'000u);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(Json, ReadJsonNamesTheFile) {
  const test::TemporaryFolder folder;
  put(folder / "x.json", "{");
  expect_error(ErrorCode::bad_file, {"x.json: is not valid JSON"}, [&] { read_json(folder / "x.json"); });
  expect_error(ErrorCode::bad_file, {"y.json: cannot open: No such file"}, [&] { read_json(folder / "y.json"); });
}

}  // namespace
}  // namespace w4q::io
