// One rank or several: the same bytes.
#include "launch.h"

namespace w4q::test {
namespace {

struct Way {
  const char* name;
  std::vector<int> ranks;
  std::vector<std::string> options;
};

std::string own_text() { return bundled_model() + "/own/selfgen.txt"; }

class RanksEqual : public OnRanks, public ::testing::WithParamInterface<Way> {};

/// Each with fewer ranks than parts, and with more shards than one and another number of them than of ranks.
TEST_P(RanksEqual, OneProcessAndManyWriteTheSameBytes) {
  if (const auto why = no_ranks(); !why.empty()) GTEST_SKIP() << why;
  std::vector<std::string> arguments{"quantize", bundled_model(), "--device", "cpu",
                                     "--quiet",  "--shard-size",  "200kB"};
  for (const auto& word : GetParam().options) arguments.push_back(word == "TEXT" ? own_text() : word);
  const auto to = [&](const std::string& name) {
    auto words = arguments;
    words.insert(words.end(), {"-o", path(name)});
    return words;
  };
  const auto alone = run_w4q(to("alone"));
  ASSERT_EQ(alone.status, 0) << alone.err;
  const std::string expected = folder_digest(path("alone"));
  for (const int ranks : GetParam().ranks) {
    const std::string name = "by" + std::to_string(ranks);
    const auto run = run_ranks(ranks, to(name));
    ASSERT_EQ(run.status, 0) << run.err;
    EXPECT_EQ(folder_digest(path(name)), expected) << ranks << " ranks";
    EXPECT_EQ(run.err, "");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ways, RanksEqual,
    ::testing::Values(Way{"plain", {2, 3, 5}, {"--k", "3"}},
                      Way{"residual", {3}, {"--scheme", "rotated4-d128+rotated2-d128", "--compress"}},
                      Way{"fold", {2}, {"--recipe", "kbit3: fold"}},
                      Way{"awq",
                          {2, 5},
                          {"--recipe", "kbit3: awq → rotate128 → feedback", "--calib", "TEXT", "--samples", "7",
                           "--length", "32"}},
                      Way{"gptq",
                          {3},
                          {"--recipe", "int4-g128-f16: feedback", "--to", "gptq-v2", "--calib", "TEXT", "--samples",
                           "3", "--length", "32"}}),
    [](const auto& way) { return way.param.name; });

}  // namespace
}  // namespace w4q::test
