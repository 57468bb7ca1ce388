// w4q compare as a user runs it, on the bundled model.
#include "program.h"

namespace w4q::test {
namespace {

TEST(CompareCommand, SaysWhichIsCloserAndFailsWhereAsked) {
  const TemporaryFolder folder;
  const std::string three = (folder / "3").string(), four = (folder / "4").string();
  const std::string ids = bundled_model() + "/own/selfgen.ids.u16", statistics = (folder / "s.safetensors").string();
  ASSERT_EQ(run_w4q({"quantize", bundled_model(), "-o", three, "--k", "3", "--quiet"}).status, 0);
  ASSERT_EQ(run_w4q({"quantize", bundled_model(), "-o", four, "--k", "4", "--quiet"}).status, 0);
  ASSERT_EQ(run_w4q({"calibrate", bundled_model(), "--ids", ids, "-o", statistics, "--samples", "4", "--length", "128",
                     "--quiet"})
                .status,
            0);
  const std::vector<std::string> more{"--base", bundled_model(), "--ids",   ids,        "--windows", "4",
                                      "--ctx",  "128",           "--stats", statistics, "--quiet"};
  const auto compare = [&](const std::string& a, const std::string& b, const std::string& option) {
    std::vector<std::string> arguments{"compare", a, b, option};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_w4q(arguments);
  };
  const auto better = compare(three, four, "--fail-if-worse");
  EXPECT_EQ(better.status, 0) << better.err;
  for (const char* part : {"output dB", "kbit3-b32-e4m4", "KL to the base", "B is closer to the base"}) {
    EXPECT_NE(better.out.find(part), std::string::npos) << better.out;
  }
  EXPECT_EQ(compare(four, three, "--fail-if-worse").status, 1);
  const auto json = compare(four, three, "--json");
  EXPECT_EQ(json.status, 0);
  EXPECT_EQ(json.json()["verdict"], 1);
  EXPECT_GT(json.json()["kl_difference"]["low"], 0);
  EXPECT_EQ(json.json()["linears"].size(), 28u);
  const auto one = run_w4q({"compare", four, three, "--base", bundled_model(), "--ids", ids, "--windows", "1",
                            "--fail-if-worse", "--quiet"});
  EXPECT_EQ(one.status, 2) << one.out;
  EXPECT_NE(one.err.find("--windows"), std::string::npos) << one.err;
}

TEST(CompareCommand, MistakesAreExplained) {
  const auto usage =
      run_w4q({"compare", bundled_model(), bundled_model(), "--base", bundled_model(), "--fail-if-worse"});
  EXPECT_EQ(usage.status, 2);
  EXPECT_NE(usage.err.find("--ppl"), std::string::npos) << usage.err;
  EXPECT_EQ(run_w4q({"compare", bundled_model(), bundled_model()}).status, 2);
  const auto unused =
      run_w4q({"compare", bundled_model(), bundled_model(), "--base", bundled_model(), "--kv", "bogus"});
  EXPECT_EQ(unused.status, 2) << unused.out;
  EXPECT_EQ(run_w4q({"compare", "/nowhere", bundled_model(), "--base", bundled_model()}).status, 3);
}

}  // namespace
}  // namespace w4q::test
