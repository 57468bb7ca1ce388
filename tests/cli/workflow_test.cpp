// The whole way as a user goes it: quantize → repack → verify, on the bundled model.
#include <cmath>
#include <fstream>

#include "program.h"

namespace w4q::test {
namespace {

std::string own(const std::string& file) { return bundled_model() + "/own/" + file; }

class Workflow : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  void quantize(const std::string& name, std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments{"quantize", bundled_model(), "-o", path(name), "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto result = run_w4q(arguments);
    ASSERT_EQ(result.status, 0) << result.err;
  }

  TemporaryFolder folder_;
};

TEST_F(Workflow, QuantizeRepackVerifyHoldsTogether) {
  quantize("k3", {"--method", "kbit", "--k", "3"});
  const auto repack = run_w4q({"repack", path("k3"), "-o", path("k3-sm89"), "--target", "sm89", "--json", "--quiet"});
  ASSERT_EQ(repack.status, 0) << repack.err;
  EXPECT_EQ(repack.json()["round_trips_proven"], 28);  // 4 layers of 7 linears

  const auto verify =
      run_w4q({"verify", path("k3-sm89"), "--ppl", own("selfgen.txt"), "--base", bundled_model(), "--windows", "8",
               "--max-ppl-ratio", "2", "--max-kl", "0.6", "--min-sqnr", "12", "--json", "--quiet"});
  ASSERT_EQ(verify.status, 0) << verify.out << verify.err;
  const auto json = verify.json();
  EXPECT_TRUE(json["passed"]);
  EXPECT_EQ(json["perplexity"]["windows"], 8);
  EXPECT_GT(json["perplexity"]["base"]["kl"].get<double>(), 0.0);
  EXPECT_GT(json["perplexity"]["perplexity"].get<double>(), json["perplexity"]["base"]["perplexity"].get<double>());
}

TEST_F(Workflow, RepackingThereAndBackGivesTheSameBytes) {
  quantize("k5", {"--k", "5"});
  ASSERT_EQ(run_w4q({"repack", path("k5"), "-o", path("tile"), "--layout", "kbit-tile", "--quiet"}).status, 0);
  ASSERT_EQ(run_w4q({"repack", path("tile"), "-o", path("back"), "--layout", "canonical", "--quiet"}).status, 0);
  EXPECT_EQ(folder_digest(path("k5")), folder_digest(path("back")));
  EXPECT_NE(folder_digest(path("k5")), folder_digest(path("tile")));
}

TEST_F(Workflow, BytesDoNotDependOnThreads) {
  quantize("one", {"--threads", "1"});
  quantize("three", {"--threads", "3"});
  EXPECT_EQ(folder_digest(path("one")), folder_digest(path("three")));
}

TEST_F(Workflow, ShardsAndCompressionHoldTheSameTensors) {
  quantize("plain", {"--k", "4"});
  quantize("shards", {"--k", "4", "--shard-size", "500kB"});
  quantize("zst", {"--k", "4", "--compress"});
  EXPECT_TRUE(std::filesystem::exists(path("shards") + "/model.safetensors.index.json"));
  EXPECT_TRUE(std::filesystem::exists(path("zst") + "/model.safetensors.zst"));
  for (const char* name : {"shards", "zst"}) {
    ASSERT_EQ(
        run_w4q({"repack", path(name), "-o", path(std::string(name) + "-plain"), "--layout", "canonical", "--quiet"})
            .status,
        0);
    EXPECT_EQ(folder_digest(path("plain")), folder_digest(path(std::string(name) + "-plain"))) << name;
    EXPECT_EQ(run_w4q({"verify", path(name), "--base", bundled_model(), "--quiet"}).status, 0) << name;
  }
}

TEST_F(Workflow, EverythingElseInTheFolderTravels) {
  quantize("k4");
  for (const char* file :
       {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"}) {
    EXPECT_TRUE(std::filesystem::exists(path("k4") + "/" + file)) << file;
  }
}

TEST_F(Workflow, TiedHeadKeepsWorkingWhenItsTableIsPacked) {
  quantize("head", {"--k", "5", "--lm-head"});
  const auto verify = run_w4q({"verify", path("head"), "--ppl", own("selfgen.txt"), "--base", bundled_model(),
                               "--windows", "4", "--max-ppl-ratio", "1.2", "--json", "--quiet"});
  EXPECT_EQ(verify.status, 0) << verify.out << verify.err;
  const auto inspect = run_w4q({"inspect", path("head"), "--json"}).json();
  EXPECT_EQ(inspect["packed_weights"], 29);
}

TEST_F(Workflow, ReferenceActivationsOfTheBundledModel) {
  const auto good =
      run_w4q({"verify", bundled_model(), "--reference", own("reference.safetensors"), "--max-diff", "1e-4", "--json"});
  EXPECT_EQ(good.status, 0) << good.out << good.err;
  EXPECT_LT(good.json()["reference"]["largest_difference"].get<double>(), 1e-4);
  const auto strict =
      run_w4q({"verify", bundled_model(), "--reference", own("reference.safetensors"), "--max-diff", "1e-12"});
  EXPECT_EQ(strict.status, 1);
}

/// 12.8355 over 47 windows: the value that the model's own reference states
/// (testdata/w4q-llama-tiny/own/reference.json).
TEST_F(Workflow, PerplexityOfTheBundledModelIsItsReference) {
  const auto result = run_w4q({"verify", bundled_model(), "--ids", own("selfgen.ids.u16"), "--json", "--quiet"});
  ASSERT_EQ(result.status, 0) << result.err;
  const auto ppl = result.json()["perplexity"];
  EXPECT_EQ(ppl["windows"], 47);
  EXPECT_EQ(ppl["scored_tokens"], 24017);
  EXPECT_NEAR(ppl["perplexity"].get<double>(), 12.835453819515724, 12.8355 * 1e-5);
}

TEST_F(Workflow, TokenizeGivesTheReferenceIds) {
  ASSERT_EQ(run_w4q({"tokenize", bundled_model(), own("selfgen.txt"), "-o", path("ids.u16")}).status, 0);
  std::ifstream ours(path("ids.u16"), std::ios::binary);
  std::ifstream theirs(own("selfgen.ids.u16"), std::ios::binary);
  const std::string a((std::istreambuf_iterator<char>(ours)), {});
  const std::string b((std::istreambuf_iterator<char>(theirs)), {});
  EXPECT_EQ(a.size(), 48986u);
  EXPECT_EQ(a, b);
  ASSERT_EQ(run_w4q({"tokenize", bundled_model(), own("selfgen.txt"), "-o", path("bos.u32"), "--bos"}).status, 0);
  EXPECT_EQ(std::filesystem::file_size(path("bos.u32")), 2 * (48986u + 2));
}

TEST_F(Workflow, GenerateIsGreedyAndSeeded) {
  const auto greedy = run_w4q({"generate", bundled_model(), "--prompt", "The river", "--max-tokens", "12", "--json"});
  ASSERT_EQ(greedy.status, 0) << greedy.err;
  EXPECT_EQ(
      greedy.json()["ids"],
      run_w4q({"generate", bundled_model(), "--prompt", "The river", "--max-tokens", "12", "--json"}).json()["ids"]);
  const auto sampled = [](const char* seed) {
    return run_w4q({"generate", bundled_model(), "--prompt", "The river", "--max-tokens", "12", "--temperature", "1",
                    "--seed", seed, "--json"})
        .json()["ids"];
  };
  EXPECT_EQ(sampled("7"), sampled("7"));
  EXPECT_NE(sampled("7"), sampled("8"));
}

/// What comes of calibration depends on the products' last bits: the output says whose they were, its repacked forms too.
TEST_F(Workflow, ACalibratedModelSaysWhatMultiplied) {
  const auto run = [](std::vector<std::string> arguments) {
    arguments.emplace_back("--quiet");
    const auto result = run_w4q(arguments);
    EXPECT_EQ(result.status, 0) << result.err;
  };
  const auto products_of = [&](const char* name) {
    const auto config = io::read_json(path(name) + "/config.json");
    return config["quantization_config"].value("calibrated_with", "");
  };
  run({"calibrate", bundled_model(), "--text", own("selfgen.txt"), "-o", path("s.safetensors"), "--samples", "2",
       "--length", "32"});
  const std::vector<std::string> awq{"--scheme", "int4-g128-f16", "--awq", "--device", "cpu"};
  const auto quantize_awq = [&](const char* name, std::vector<std::string> more) {
    more.insert(more.end(), awq.begin(), awq.end());
    quantize(name, more);
  };
  quantize_awq("text", {"--calib", own("selfgen.txt"), "--samples", "2", "--length", "32"});
  quantize_awq("file", {"--stats", path("s.safetensors")});
  run({"repack", path("file"), "-o", path("repacked"), "--target", "sm89", "--device", "cpu"});
  quantize("plain", {"--scheme", "int4-g128-f16"});
  const std::string products = products_of("text");
  EXPECT_TRUE(products.starts_with("oneDNN ") || products == "Eigen") << products;
  EXPECT_EQ(products_of("file"), products);
  EXPECT_EQ(products_of("repacked"), products);
  EXPECT_EQ(products_of("plain"), "");
}

}  // namespace
}  // namespace w4q::test
