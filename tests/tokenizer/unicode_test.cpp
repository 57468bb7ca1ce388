// UTF-8 and the normalization forms.
#include <gtest/gtest.h>

#include <chrono>

#include "text/utf8.h"
#include "tokenizer/byte_level.h"
#include "tokenizer/characters.h"
#include "tokenizer/unicode_form.h"

namespace w4q::tokenizer {
namespace {

TEST(Utf8, TakesEveryCodePointAndNothingElse) {
  for (char32_t code_point = 0; code_point < 0x110000; ++code_point) {
    if (code_point >= 0xD800 && code_point < 0xE000) continue;
    std::string text;
    text::utf8_append(text, code_point);
    const text::Utf8Step step = text::utf8_step(text);
    ASSERT_TRUE(step.valid && step.code_point == code_point && step.size == text.size())
        << static_cast<uint32_t>(code_point);
    ASSERT_EQ(text::utf8_size(text[0]), text.size());
    // Cut anywhere, it is one ill-formed part.
    for (size_t size = 1; size < text.size(); ++size) {
      const text::Utf8Step cut = text::utf8_step(std::string_view(text).substr(0, size));
      ASSERT_TRUE(!cut.valid && cut.size == size) << static_cast<uint32_t>(code_point);
    }
  }
}

TEST(Utf8, CountsEveryTwoBytePrefixAsTheStandardDoes) {
  // Unicode 15, table 3-7: the pairs that begin a character.
  int valid = 0;
  for (int first = 0x80; first < 0x100; ++first) {
    for (int second = 0; second < 0x100; ++second) {
      const std::string text = {static_cast<char>(first), static_cast<char>(second), '\x80', '\x80'};
      valid += text::utf8_step(text).valid ? 1 : 0;
    }
  }
  EXPECT_EQ(valid, 30 * 64 + (32 + 12 * 64 + 32 + 2 * 64) + (48 + 3 * 64 + 16));
}

TEST(UnicodeForm, KnownForms) {
  EXPECT_EQ(unicode_normalized("e\xCC\x81", UnicodeForm::nfc), "\xC3\xA9");
  EXPECT_EQ(unicode_normalized("x\xC3\xA9y", UnicodeForm::nfd), "xe\xCC\x81y");
  EXPECT_EQ(unicode_normalized("\xEF\xAC\x81", UnicodeForm::nfkc), "fi");
  EXPECT_EQ(unicode_normalized("\xEF\xAC\x81", UnicodeForm::nfc), "\xEF\xAC\x81");
  EXPECT_EQ(unicode_normalized("q\xCC\x87\xCC\xA3", UnicodeForm::nfc), "q\xCC\xA3\xCC\x87") << "marks in order";
  EXPECT_EQ(unicode_normalized("\xE1\x84\x92\xE1\x85\xA1\xE1\x86\xAB", UnicodeForm::nfc), "\xED\x95\x9C");
  EXPECT_EQ(unicode_normalized("\xEA\xB0\x80\xE1\x86\xA7", UnicodeForm::nfc), "\xEA\xB0\x80\xE1\x86\xA7")
      << "U+11A7 is no trailing consonant";
  EXPECT_EQ(unicode_normalized("\xE0\xA5\x98", UnicodeForm::nfc), "\xE0\xA4\x95\xE0\xA4\xBC")
      << "excluded from composition";
}

TEST(UnicodeForm, LeavesAsciiAlone) {
  std::string ascii;
  for (char c = 0; c < 0x7F; ++c) ascii += c;
  for (const auto form : {UnicodeForm::nfc, UnicodeForm::nfd, UnicodeForm::nfkc, UnicodeForm::nfkd}) {
    EXPECT_EQ(unicode_normalized(ascii, form), ascii);
    EXPECT_EQ(unicode_normalized("", form), "");
  }
}

TEST(UnicodeForm, FormsAreStable) {
  std::string text;
  for (char32_t c = 0x80; c < 0x3100; ++c) text::utf8_append(text, c);
  for (const auto form : {UnicodeForm::nfc, UnicodeForm::nfd, UnicodeForm::nfkc, UnicodeForm::nfkd}) {
    const std::string once = unicode_normalized(text, form);
    EXPECT_EQ(unicode_normalized(once, form), once);
    EXPECT_EQ(text::utf8_valid_prefix(once), once.size());
  }
}

TEST(UnicodeForm, SortsALongRunOfMarksQuickly) {
  std::string text = "a";
  for (int i = 0; i < 300'000; ++i) text += "\xCC\x81\xCC\xA3";  // above, below: every pair is out of order
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(unicode_normalized(text, UnicodeForm::nfd).size(), text.size());
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  // Measured: 0.1 s; a sort by exchanging neighbours needs 9e10 steps.
  EXPECT_LT(seconds.count(), 10);
}

TEST(Lowercase, MapsFully) {
  EXPECT_EQ(unicode_lowercase("A\xC3\x84\xCE\xA3\xC4\xB0z"), "a\xC3\xA4\xCF\x83i\xCC\x87z");
}

TEST(ByteLevel, GoesThereAndBack) {
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes += static_cast<char>(byte);
  std::string level;
  append_byte_level(bytes, level);
  EXPECT_EQ(text::utf8_valid_prefix(level), level.size());
  std::string back;
  append_bytes_of_level(level, back);
  EXPECT_EQ(back, bytes);
  std::string space;
  append_byte_level(" \n", space);
  EXPECT_EQ(space, "\xC4\xA0\xC4\x8A");
}

TEST(ByteLevel, LeavesOtherTextAlone) {
  std::string out = "x";
  append_bytes_of_level("a b", out);  // a space is no character of the alphabet
  EXPECT_EQ(out, "xa b");
}

TEST(Characters, WhiteSpaceAtTheEnds) {
  EXPECT_EQ(leading_white_space(" \t\xE3\x80\x80x "), 5U);
  EXPECT_EQ(trailing_white_space(" x\xC2\xA0\n"), 2U);
  EXPECT_EQ(trailing_white_space("  "), 0U);
  EXPECT_EQ(trailing_white_space("\xE1\xA0\x8E"), 3U);
}

}  // namespace
}  // namespace w4q::tokenizer
