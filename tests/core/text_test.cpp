#include "core/text.h"

#include "support.h"

namespace w4q {
namespace {

TEST(Text, HumanBytesAreDecimal) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(999), "999 B");
  EXPECT_EQ(human_bytes(1234), "1.23 kB");
  EXPECT_EQ(human_bytes(55'600'080), "55.6 MB");
  EXPECT_EQ(human_bytes(5'000'000'000), "5.00 GB");
}

TEST(Text, HumanSeconds) {
  EXPECT_EQ(human_seconds(0.25), "250 ms");
  EXPECT_EQ(human_seconds(2.5), "2.5 s");
  EXPECT_EQ(human_seconds(42), "42 s");
  EXPECT_EQ(human_seconds(185), "3 min 05 s");
  EXPECT_EQ(human_seconds(7620), "2 h 07 min");
}

TEST(Text, PrintableKeepsUtf8AndShowsTheRest) {
  EXPECT_EQ(printable("größe.weight"), "größe.weight");
  EXPECT_EQ(printable("a\nb\x1b[31m"), "a\\x0Ab\\x1B[31m");
  EXPECT_EQ(printable("\xff"), "\\xFF");
  EXPECT_EQ(printable("\xe2\x82"), "\\xE2\\x82");  // cut short in the middle of a character
}

TEST(Text, TableAlignsNumbersRightAndWordsLeft) {
  TextTable table({"name", "bits"});
  table.row({"a", "3.250"});
  table.row({"größer", "16.000"});
  EXPECT_EQ(table.str(), "name      bits\na        3.250\ngrößer  16.000\n");
}

TEST(Text, JoinAndShape) {
  EXPECT_EQ(join({"a", "b", "c"}), "a, b, c");
  EXPECT_EQ(join({}), "");
  EXPECT_EQ(shape_text({4096, 128, 3}), "[4096, 128, 3]");
  EXPECT_EQ(shape_text({}), "[]");
}

TEST(Text, NamesAreAsAlikeAsTheirEnds) {
  EXPECT_EQ(likeness("quantise", "quantize"), 7u);
  EXPECT_EQ(likeness("--bass", "--base"), 5u);
  EXPECT_EQ(likeness("abc", "xyz"), 0u);
  EXPECT_EQ(likeness("", "a"), 0u);
}

}  // namespace
}  // namespace w4q
