// w4q calibrate and w4q quantize --method awq as a user runs them, on the bundled model.
#include <fstream>

#include "core/text.h"
#include "program.h"

namespace w4q::test {
namespace {

class Awq : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  static std::string own(const std::string& file) { return bundled_model() + "/own/" + file; }

  ProgramResult calibrate(const std::string& name, std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments{"calibrate", bundled_model(), "-o", path(name), "--quiet", "--length", "128"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_w4q(arguments);
  }
  ProgramResult quantize(const std::string& name, std::vector<std::string> more) const {
    std::vector<std::string> arguments{"quantize", bundled_model(), "-o", path(name), "--method", "awq", "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_w4q(arguments);
  }

  TemporaryFolder folder_;
};

TEST_F(Awq, CalibrateQuantizeVerify) {
  const auto statistics = calibrate("s.safetensors", {"--text", own("selfgen.txt"), "--samples", "32", "--json"});
  ASSERT_EQ(statistics.status, 0) << statistics.err;
  EXPECT_EQ(statistics.json()["tokens"], 32 * 128);
  const auto awq = quantize("awq", {"--bits", "3", "--stats", path("s.safetensors"), "--json"});
  ASSERT_EQ(awq.status, 0) << awq.err;
  EXPECT_EQ(awq.json()["groups"].size(), 16u);
  const auto rtn = run_w4q(
      {"quantize", bundled_model(), "-o", path("rtn"), "--method", "rtn", "--scheme", "int3-g128-f16-asym", "--quiet"});
  ASSERT_EQ(rtn.status, 0) << rtn.err;
  const auto divergence = [&](const char* name) {
    const auto verify = run_w4q({"verify", path(name), "--base", bundled_model(), "--ids", own("selfgen.ids.u16"),
                                 "--windows", "8", "--ctx", "256", "--json", "--quiet"});
    EXPECT_EQ(verify.status, 0) << verify.out << verify.err;
    return verify.json()["perplexity"]["base"]["kl"].get<double>();
  };
  // Measured 0.20 against 0.48.
  EXPECT_LT(divergence("awq"), 0.6 * divergence("rtn"));
}

TEST_F(Awq, CalibratesOnTheWay) {
  ASSERT_EQ(calibrate("s.safetensors", {"--ids", own("selfgen.ids.u16"), "--samples", "4"}).status, 0);
  const std::vector<std::string> text{"--calib-ids", own("selfgen.ids.u16"), "--samples", "4", "--length", "128",
                                      "--keep",      "*.layers.[123].*"};
  ASSERT_EQ(quantize("text", text).status, 0);
  auto threads = text;
  threads.insert(threads.end(), {"--threads", "1"});
  ASSERT_EQ(quantize("one", threads).status, 0);
  EXPECT_EQ(folder_digest(path("text")), folder_digest(path("one")));
  ASSERT_EQ(quantize("file", {"--stats", path("s.safetensors")}).status, 0);
  for (const auto& [option, value] :
       {std::pair{"--samples", "128"}, std::pair{"--length", "512"}, std::pair{"--max-memory", "0"}}) {
    const auto refused = quantize("refused", {"--stats", path("s.safetensors"), option, value});
    EXPECT_EQ(refused.status, 2) << option;
    EXPECT_NE(refused.err.find(concat("error: ", option)), std::string::npos) << refused.err;
    EXPECT_FALSE(std::filesystem::exists(path("refused")));
  }
}

TEST_F(Awq, MergesStatistics) {
  ASSERT_EQ(calibrate("a.safetensors", {"--ids", own("selfgen.ids.u16"), "--samples", "3"}).status, 0);
  const auto both = calibrate(
      "b.safetensors", {"--text", own("selfgen.txt"), "--samples", "5", "--merge", path("a.safetensors"), "--json"});
  ASSERT_EQ(both.status, 0) << both.err;
  EXPECT_EQ(both.json()["tokens"], 8 * 128);
  const std::vector<std::string> alone{"calibrate", bundled_model(),       "-o",      path("c.safetensors"),
                                       "--merge",   path("a.safetensors"), "--merge", path("a.safetensors")};
  // Nothing is decoded: options of decoding are refused before anything is written.
  for (const auto& [option, value] : {std::pair{"--samples", "128"}, std::pair{"--length", "512"},
                                      std::pair{"--max-memory", "0"}, std::pair{"--device", "cpu"}}) {
    auto arguments = alone;
    arguments.insert(arguments.end(), {option, value});
    const auto refused = run_w4q(arguments);
    EXPECT_EQ(refused.status, 2) << option;
    for (const auto& part : {concat("error: ", option), std::string("--merge alone"), concat("leave out ", option)}) {
      EXPECT_NE(refused.err.find(part), std::string::npos) << refused.err;
    }
    EXPECT_FALSE(std::filesystem::exists(path("c.safetensors")));
  }
  const auto twice = run_w4q(alone);
  EXPECT_EQ(twice.status, 0) << twice.err;
  EXPECT_NE(twice.out.find("counts twice"), std::string::npos) << twice.out;
}

TEST_F(Awq, DiagonalStatisticsAreSmallAndServe) {
  ASSERT_EQ(calibrate("d.safetensors", {"--ids", own("selfgen.ids.u16"), "--samples", "4", "--diagonal"}).status, 0);
  EXPECT_LT(std::filesystem::file_size(path("d.safetensors")), 200'000u);
  const auto awq = quantize("q", {"--stats", path("d.safetensors")});
  ASSERT_EQ(awq.status, 0) << awq.err;
  EXPECT_NE(awq.out.find("no Gram matrices"), std::string::npos) << awq.out;
}

TEST_F(Awq, KeptModulesGetInputScalesAndVerify) {
  const auto awq = quantize(
      "q", {"--calib-ids", own("selfgen.ids.u16"), "--samples", "4", "--length", "128", "--keep", "*.up_proj"});
  ASSERT_EQ(awq.status, 0) << awq.err;
  const auto verify = run_w4q({"verify", path("q"), "--base", bundled_model(), "--ids", own("selfgen.ids.u16"),
                               "--windows", "4", "--max-ppl-ratio", "1.2", "--quiet"});
  EXPECT_EQ(verify.status, 0) << verify.out << verify.err;
}

TEST_F(Awq, DryRunSaysWhatItNeeds) {
  const auto plan = quantize("q", {"--calib-ids", own("selfgen.ids.u16"), "--dry-run", "--json"});
  ASSERT_EQ(plan.status, 0) << plan.err;
  EXPECT_FALSE(std::filesystem::exists(path("q")));
  // 128 windows of 512 tokens in fp32 alone.
  EXPECT_GT(plan.json()["expected_memory_bytes"].get<int64_t>(), 128 * 512 * 256 * 4);
  EXPECT_GT(plan.json()["expected_seconds"].get<double>(), 0.0);
}

TEST_F(Awq, MistakesAreExplained) {
  const auto expect = [](const ProgramResult& result, int status, std::initializer_list<const char*> parts) {
    EXPECT_EQ(result.status, status) << result.err;
    for (const char* part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << part << "\n" << result.err;
  };
  expect(quantize("q", {}), 2, {"awq", "--calib"});
  expect(quantize("q", {"--calib", own("selfgen.txt"), "--calib-ids", own("selfgen.ids.u16")}), 2, {"--calib"});
  expect(run_w4q({"quantize", bundled_model(), "-o", path("q"), "--method", "rtn", "--calib", own("selfgen.txt")}), 2,
         {"rtn", "calibration", "--method awq"});
  expect(quantize("q", {"--calib", path("missing.txt")}), 3, {"missing.txt"});
  expect(quantize("q", {"--stats", own("reference.safetensors")}), 3, {"no statistics file", "calibrate"});
  expect(calibrate("s.bin", {"--text", own("selfgen.txt")}), 2, {"s.bin", ".safetensors"});
  expect(calibrate("s.safetensors"), 2, {"--text", "--merge"});
  ASSERT_EQ(calibrate("s.safetensors", {"--ids", own("selfgen.ids.u16"), "--samples", "1"}).status, 0);
  expect(calibrate("s.safetensors", {"--ids", own("selfgen.ids.u16"), "--samples", "1"}), 2, {"already exists"});
  std::ofstream(path("short.txt")) << "A river.";
  expect(calibrate("t.safetensors", {"--text", path("short.txt")}), 2, {"short.txt", "too short"});
  EXPECT_FALSE(std::filesystem::exists(path("q")));
}

}  // namespace
}  // namespace w4q::test
