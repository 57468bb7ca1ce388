// Regular expressions mean what Oniguruma makes of them, and cutting at matches does what the file's words say.
#include "text/regex.h"

#include <gtest/gtest.h>

#include "support.h"
#include "tokenizer/text_pattern.h"

namespace w4q::text {
namespace {

std::vector<std::string> pieces(std::string_view pattern, std::string_view text,
                                tokenizer::SplitBehavior behavior = tokenizer::SplitBehavior::removed,
                                bool invert = true) {
  WorkBudget budget(text.size());
  std::vector<TextRange> matches;
  std::vector<TextRange> ranges;
  std::vector<tokenizer::MatchPart> parts;
  tokenizer::TextPattern::regex(pattern, "test").find_all(text, budget, matches);
  tokenizer::split_at(text, matches, behavior, invert, parts, ranges);
  std::vector<std::string> result;
  for (const auto& range : ranges) result.emplace_back(text.substr(range.begin, range.size()));
  return result;
}

using Texts = std::vector<std::string>;

// What the reference gives was looked up with its Python package for each of these.
TEST(Regex, WhiteSpaceIsTheUnicodeProperty) {
  EXPECT_EQ(pieces(R"(\S+)",
                   "a\xE1\xA0\x8E"
                   "b c"),
            (Texts{"a\xE1\xA0\x8E"
                   "b",
                   "c"}))
      << "U+180E is no white space";
  EXPECT_EQ(pieces(R"([^\s]+)",
                   "a\xC2\x85"
                   "b"),
            (Texts{"a", "b"}))
      << "U+0085 is";
  EXPECT_EQ(pieces(R"([\S]+)",
                   "a\xE3\x80\x80"
                   "b"),
            (Texts{"a", "b"}));
}

TEST(Regex, WordsAndDigitsAreUnicode) {
  EXPECT_EQ(pieces(R"(\d+)", "12\xD9\xA3\xC2\xB2x"), (Texts{"12\xD9\xA3"}));
  EXPECT_EQ(pieces(R"(\w+)", "e\xCC\x81_\xC2\xB2-"), (Texts{"e\xCC\x81_\xC2\xB2"}));
  EXPECT_EQ(pieces(R"([\w]+)", "e\xCC\x81_\xC2\xB2-"), (Texts{"e\xCC\x81_"})) << "without the digit in a class";
  EXPECT_EQ(pieces(R"([^\W\d_]+)", "ab_12\xC3\xA9"), (Texts{"ab", "\xC3\xA9"}));
  EXPECT_EQ(pieces(R"(\b\w)", "one two"), (Texts{"o", "t"}));
  EXPECT_EQ(pieces(R"(\h+)", "xyz12afg"), (Texts{"12af"}));
}

TEST(Regex, CaseFoldsOverUnicode) {
  EXPECT_EQ(pieces("(?i:'s|'t)", "it's IT'S it'\xC5\xBF"), (Texts{"'s", "'S", "'\xC5\xBF"}));
  EXPECT_EQ(pieces("(?i:k)", "kK\xE2\x84\xAA"), (Texts{"k", "K", "\xE2\x84\xAA"}));
}

TEST(Regex, OptionsHoldAcrossAlternatives) {
  EXPECT_EQ(pieces("x(?i)y|THE", "xY xthe XY the"), (Texts{"xY", "xthe"}));
  EXPECT_EQ(pieces("(?m:a.b)", "a\nb"), (Texts{"a\nb"})) << "m lets the dot match a line feed";
  EXPECT_EQ(pieces("^.", "ab\ncd"), (Texts{"a", "c"})) << "lines always count";
}

TEST(Regex, RepetitionsOfRepetitions) {
  EXPECT_EQ(pieces(R"(\d{1,3}+)", "1234567"), (Texts{"1234567"})) << "not possessive";
  EXPECT_EQ(pieces(R"(\d{2}?)", "12345"), (Texts{"12", "34"})) << "twice or not at all, not lazy";
  EXPECT_EQ(pieces(R"(a{,2}b)", "aaab"), (Texts{"aab"}));
  EXPECT_EQ(pieces("a{x}", "a{x}"), (Texts{"a{x}"}));
}

TEST(Regex, ClassesNestAndIntersect) {
  EXPECT_EQ(pieces("[a-c[x-z]]+", "abxyq"), (Texts{"abxy"}));
  EXPECT_EQ(pieces("[a-z&&[^aeiou]]+", "stone"), (Texts{"st", "n"}));
  EXPECT_EQ(pieces("[^a-z&&[^aeiou]]+", "aBe"), (Texts{"aBe"})) << "the complement of the consonants";
  EXPECT_EQ(pieces("[]a]+", "a]b"), (Texts{"a]"}));
  EXPECT_EQ(pieces(R"([\w-]+)", "a-b c"), (Texts{"a-b", "c"}));
  EXPECT_EQ(pieces("[[:punct:]]+", "a+.b"), (Texts{"+."}));
  EXPECT_EQ(pieces(R"(\p{Han}+)", "\xE6\x9D\xB1\xE3\x80\x81"), (Texts{"\xE6\x9D\xB1"}))
      << "the script, without its extensions";
}

TEST(Regex, EmptyMatchesDoNotLoop) {
  EXPECT_EQ(pieces("x*", "axxb", tokenizer::SplitBehavior::isolated, false), (Texts{"a", "xx", "b"}));
  EXPECT_EQ(pieces("", "ab", tokenizer::SplitBehavior::isolated, false), (Texts{"a", "b"}));
  EXPECT_EQ(pieces("(?=b)", "abab", tokenizer::SplitBehavior::isolated, false), (Texts{"a", "ba", "b"}));
}

TEST(Regex, SplitBehaviors) {
  const auto split = [](tokenizer::SplitBehavior behavior, bool invert = false) {
    return pieces("-", "the-final--countdown-", behavior, invert);
  };
  EXPECT_EQ(split(tokenizer::SplitBehavior::removed), (Texts{"the", "final", "countdown"}));
  EXPECT_EQ(split(tokenizer::SplitBehavior::isolated), (Texts{"the", "-", "final", "-", "-", "countdown", "-"}));
  EXPECT_EQ(split(tokenizer::SplitBehavior::merged_with_previous), (Texts{"the-", "final-", "-", "countdown-"}));
  EXPECT_EQ(split(tokenizer::SplitBehavior::merged_with_next), (Texts{"the", "-final", "-", "-countdown", "-"}));
  EXPECT_EQ(split(tokenizer::SplitBehavior::contiguous), (Texts{"the", "-", "final", "--", "countdown", "-"}));
  EXPECT_EQ(split(tokenizer::SplitBehavior::removed, true), (Texts{"-", "-", "-", "-"}));
}

TEST(Regex, RefusesWhatItCannotTranslate) {
  for (const char* pattern :
       {"(a",       "a)",     "[a",    "[a&&",     R"(\)",    R"(\q)",   R"(\y)",   R"(\X)",      R"(\p{NoSuchThing})",
        R"(\p{L)",  "(?x) a", "(?~a)", "(?P<n>a)", "(*FAIL)", R"(\xFF)", R"([\X])", "[[:nope:]]", "a**",
        "(?<=a+)b", R"(\u12)"}) {
    test::expect_error(ErrorCode::unsupported, {"test: ", "not understood"}, [&] { Regex(pattern, "test"); });
  }
  test::expect_error(ErrorCode::unsupported, {"bytes"}, [] { Regex(std::string(100'000, 'a'), "test"); });
  test::expect_error(ErrorCode::unsupported, {"test"}, [] { Regex(std::string(3000, '['), "test"); });
  test::expect_error(ErrorCode::unsupported, {"test"}, [] { Regex(std::string(3000, '('), "test"); });
}

TEST(Regex, FindsADistantMatchInALongText) {
  const std::string text = std::string(3'000'000, 'a') + "\xC3\xA9Z";
  EXPECT_EQ(pieces("Z", text), (Texts{"Z"}));
  EXPECT_EQ(pieces("(?<=\xC3\xA9)Z", text), (Texts{"Z"}));
}

TEST(Regex, BacktracksOverALongRunOfWhiteSpace) {
  const std::string text = std::string(3'000'000, ' ') + "x";
  const auto got = pieces(R"(\s*[\r\n]+|\s+(?!\S)|\s+)", text);
  ASSERT_EQ(got.size(), 2U);
  EXPECT_EQ(got[0].size(), 2'999'999U);
}

}  // namespace
}  // namespace w4q::text
