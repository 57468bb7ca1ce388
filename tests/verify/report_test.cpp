#include "verify/report.h"

#include <cmath>

#include "support.h"

namespace w4q::verify {
namespace {

TEST(Report, PassesWhenEveryCheckDoes) {
  Report report;
  EXPECT_TRUE(report.passed());
  report.add({"structure", true, "fine", {}});
  EXPECT_TRUE(report.passed());
  report.add({"codes", false, "one bad", {"layer 3"}});
  EXPECT_FALSE(report.passed());
  EXPECT_NE(report.text().find("FAIL  codes: one bad"), std::string::npos);
  EXPECT_NE(report.text().find("layer 3"), std::string::npos);
  EXPECT_EQ(report.json()["passed"], false);
  EXPECT_EQ(report.json()["checks"][1]["faults"][0], "layer 3");
}

TEST(Report, ThresholdsIncludeTheirLimitAndFailOnNaN) {
  const auto passes = [](double value, double limit, bool at_least) {
    Report report;
    report.add_threshold("x", value, limit, at_least);
    return report.passed();
  };
  EXPECT_TRUE(passes(1.0, 1.0, false));
  EXPECT_FALSE(passes(1.1, 1.0, false));
  EXPECT_TRUE(passes(1.0, 1.0, true));
  EXPECT_FALSE(passes(0.9, 1.0, true));
  EXPECT_FALSE(passes(std::nan(""), 1.0, false));
  EXPECT_FALSE(passes(std::nan(""), 1.0, true));
}

TEST(Report, LongListsAreCutInTextOnly) {
  Report report;
  report.add({"structure", false, "", std::vector<std::string>(50, "fault")});
  EXPECT_NE(report.text().find("and 30 more"), std::string::npos);
  EXPECT_EQ(report.json()["checks"][0]["faults"].size(), 50u);
}

}  // namespace
}  // namespace w4q::verify
