#include "core/error.h"

#include <set>

#include "support.h"

namespace w4q {
namespace {

TEST(Error, MessageHasSummaryDetailsAndHintInThatOrder) {
  try {
    throw Error(ErrorCode::unsupported, "layers.3.up: 11000 rows")
        .hint("use another layout")
        .detail("needed by x")
        .detail("nearest: 11008");
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "layers.3.up: 11000 rows\n  needed by x\n  nearest: 11008\n  hint: use another layout");
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_EQ(error.summary(), "layers.3.up: 11000 rows");
  }
}

TEST(Error, ExitStatusesAreThoseOfTheDocumentation) {
  EXPECT_EQ(describe(ErrorCode::verification_failed).exit_status, 1);
  EXPECT_EQ(describe(ErrorCode::bad_argument).exit_status, 2);
  EXPECT_EQ(describe(ErrorCode::bad_file).exit_status, 3);
  EXPECT_EQ(describe(ErrorCode::unsupported).exit_status, 3);
  EXPECT_EQ(describe(ErrorCode::mismatch).exit_status, 3);
  EXPECT_EQ(describe(ErrorCode::device).exit_status, 4);
  EXPECT_EQ(describe(ErrorCode::internal).exit_status, 5);
}

TEST(Error, EveryCodeHasItsOwnName) {
  std::set<std::string_view> names;
  for (int code = 0; code <= static_cast<int>(ErrorCode::internal); ++code) {
    EXPECT_TRUE(names.insert(describe(static_cast<ErrorCode>(code)).name).second);
  }
}

TEST(Ensure, ThrowsInternalOnlyWhenFalse) {
  ensure(true, "fine");
  test::expect_error(ErrorCode::internal, {"broken", "bug"}, [] { ensure(false, "broken"); });
}

}  // namespace
}  // namespace w4q
