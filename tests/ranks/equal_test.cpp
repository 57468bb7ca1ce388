// One rank or several: the same bytes.
#include <regex>

#include "io/digest.h"
#include "launch.h"

namespace w4q::test {
namespace {

struct Way {
  const char* name;
  std::vector<int> ranks;
  std::vector<std::string> options;
};

class RanksEqual : public OnRanks, public ::testing::WithParamInterface<Way> {
 protected:
  RanksEqual() : OnRanks(two_layer_model()) {}
};

/// Each with fewer ranks than parts, and with more shards than one and another number of them than of ranks.
TEST_P(RanksEqual, OneProcessAndManyWriteTheSameBytes) {
  if (const auto why = no_ranks(); !why.empty()) GTEST_SKIP() << why;
  std::vector<std::string> arguments{"quantize", model_, "--device", "cpu", "--quiet", "--shard-size", "200kB"};
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
    ::testing::Values(
        Way{"plain", {2, 3, 5}, {"--k", "3"}},
        Way{"residual", {3}, {"--scheme", "rotated4-d128+rotated2-d128", "--compress"}},
        Way{"fold", {2}, {"--recipe", "kbit3: fold"}},
        Way{"awq",
            {5},
            {"--recipe", "kbit3: awq → rotate128 → feedback", "--calib", "TEXT", "--samples", "7", "--length", "32"}},
        Way{"gptq",
            {2, 3},
            {"--recipe", "int4-g128-f16: feedback", "--to", "gptq-v2", "--calib", "TEXT", "--samples", "3", "--length",
             "32"}},
        Way{"allocated",
            {3},
            {"--quality", "fast", "--calib", "TEXT", "--samples", "3", "--length", "32", "--target-bpw", "3.4"}}),
    [](const auto& way) { return way.param.name; });

class RanksRead : public OnRanks {};

/// A GGUF file, into each kind of folder, and what is read of small floats, decoded.
TEST_F(RanksRead, GgufAndPackedFoldersAreImportedToTheSameBytes) {
  const auto file = path("m.gguf");
  ASSERT_EQ(run_w4q({"repack", bundled_model(), "--to", "gguf-q8_0", "-o", file, "--quiet"}).status, 0);
  ASSERT_EQ(quantize("fp8", {"--scheme", "fp8-channel", "--device", "cpu"}).status, 0);
  const std::pair<std::string, std::string> ways[] = {{file, "hf16"}, {file, "w4q"}, {path("fp8"), "hf16"}};
  for (const auto& [input, to] : ways) {
    const std::vector<std::string> words{"repack", input, "--to", to, "--quiet", "--shard-size", "200kB", "-o"};
    auto alone = words, shared = words;
    alone.push_back(path("alone"));
    shared.push_back(path("shared"));
    ASSERT_EQ(run_w4q(alone).status, 0);
    const auto run = run_ranks(3, shared);
    ASSERT_EQ(run.status, 0) << run.err;
    EXPECT_EQ(folder_digest(path("shared")), folder_digest(path("alone"))) << input << " to " << to;
    for (const char* name : {"alone", "shared"}) std::filesystem::remove_all(path(name));
  }
  const auto verified = run_ranks(2, {"verify", file, "--quiet"});
  EXPECT_EQ(verified.status, 0) << verified.err << verified.out;
}

class RanksMeasure : public OnRanks {
 protected:
  /// What is printed, times and places left out.
  static std::string said(const ProgramResult& run) {
    EXPECT_EQ(run.status, 0) << run.err;
    io::Json json = run.json();
    json.erase("provenance");
    std::string text = json.dump(1);
    return std::regex_replace(text, std::regex("\"seconds\": [^\n]*"), "");
  }
};

TEST_F(RanksMeasure, PerplexityAndComparisonsAreEqualToTheLastBit) {
  ASSERT_EQ(quantize("q3", {"--k", "3", "--device", "cpu"}).status, 0);
  ASSERT_EQ(quantize("q2", {"--k", "2", "--device", "cpu"}).status, 0);
  const std::vector<std::string> how{"--ppl", own_text(), "--ctx", "32",     "--windows",
                                     "7",     "--device", "cpu",   "--json", "--quiet"};
  std::vector<std::string> verify{"verify", path("q3"), "--base", bundled_model()};
  std::vector<std::string> compare{"compare", path("q2"), path("q3"), "--base", bundled_model()};
  for (auto* words : {&verify, &compare}) {
    words->insert(words->end(), how.begin(), how.end());
    EXPECT_EQ(said(run_ranks(3, *words)), said(run_w4q(*words))) << words->front();
  }
}

/// Of weights alone, and of outputs by statistics.
TEST_F(RanksMeasure, ComparedWeightsAreEqualToTheLastBit) {
  ASSERT_EQ(quantize("q3", {"--k", "3", "--device", "cpu"}).status, 0);
  ASSERT_EQ(quantize("awq", {"--recipe", "kbit4: awq", "--calib", own_text(), "--samples", "3", "--length", "32",
                             "--device", "cpu"})
                .status,
            0);
  ASSERT_EQ(run_w4q({"calibrate", bundled_model(), "--text", own_text(), "-o", path("stats.safetensors"), "--samples",
                     "3", "--length", "32", "--device", "cpu", "--quiet"})
                .status,
            0);
  const std::vector<std::string> words{
      "compare", path("q3"), path("awq"), "--base", bundled_model(), "--stats", path("stats.safetensors"),
      "--json",  "--quiet"};
  const std::string alone = said(run_w4q(words));
  for (const int ranks : {2, 5}) EXPECT_EQ(said(run_ranks(ranks, words)), alone) << ranks << " ranks";
}

/// Each rank holds a part of the layers; two such groups share the windows.
TEST_F(RanksMeasure, RanksThatHoldAModelTogetherMeasureTheSameToTheLastBit) {
  ASSERT_EQ(quantize("q3", {"--k", "3", "--device", "cpu"}).status, 0);
  std::vector<std::string> verify{"verify", path("q3"),  "--base", bundled_model(), "--ppl", own_text(), "--ctx",
                                  "32",     "--windows", "5",      "--device",      "cpu",   "--json",   "--quiet"};
  const std::string expected = said(run_w4q(verify));
  std::vector<std::string> compare{"compare", bundled_model(), path("q3"), "--base", bundled_model()};
  compare.insert(compare.end(), verify.begin() + 4, verify.end());
  const std::string compared = said(run_w4q(compare));
  verify.insert(verify.end(), {"--split-layers", "2"});
  compare.insert(compare.end(), {"--split-layers", "3"});
  EXPECT_EQ(said(run_ranks(4, verify)), expected);
  EXPECT_EQ(said(run_ranks(3, compare)), compared);
  const auto odd = run_ranks(3, verify);
  EXPECT_EQ(odd.status, 2);
  EXPECT_NE(odd.err.find("--split-layers 2 does not divide the number of ranks, 3"), std::string::npos) << odd.err;
}

TEST_F(RanksMeasure, TextIsWrittenByRanksThatHoldTheModelTogether) {
  const std::vector<std::string> words{"generate", bundled_model(), "--prompt", "Once upon", "--max-tokens",
                                       "12",       "--device",      "cpu",      "--quiet"};
  const auto alone = run_w4q(words), shared = run_ranks(3, words);
  ASSERT_EQ(alone.status, 0) << alone.err;
  ASSERT_EQ(shared.status, 0) << shared.err;
  EXPECT_EQ(shared.out, alone.out);
}

TEST_F(RanksMeasure, StatisticsAreThoseOfOneProcess) {
  const auto calibrate = [&](const std::string& name) {
    return std::vector<std::string>{"calibrate", bundled_model(), "--text", own_text(), "-o",  path(name), "--samples",
                                    "5",         "--length",      "32",     "--device", "cpu", "--quiet"};
  };
  ASSERT_EQ(run_w4q(calibrate("one.safetensors")).status, 0);
  // With more ranks than layers and than windows too.
  for (const int ranks : {2, 6}) {
    const std::string name = "by" + std::to_string(ranks) + ".safetensors";
    const auto run = run_ranks(ranks, calibrate(name));
    ASSERT_EQ(run.status, 0) << run.err;
    EXPECT_EQ(io::digest_of_file(path(name)), io::digest_of_file(path("one.safetensors"))) << ranks << " ranks";
  }
}

}  // namespace
}  // namespace w4q::test
