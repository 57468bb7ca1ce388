// verify --for and list --servers as a user meets them.
#include "io/files.h"
#include "program.h"

namespace w4q::test {
namespace {

class Serving : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder;
    ASSERT_EQ(quantize("ct", "int4-g32-f16", "compressed-tensors").status, 0);
    ASSERT_EQ(quantize("asym", "int4-g32-f16-asym", "gptq-v2").status, 0);
  }
  static void TearDownTestSuite() { delete folder_; }

  static std::string path(const std::string& name) { return (*folder_ / name).string(); }
  static ProgramResult quantize(const std::string& name, const char* scheme, const char* dialect) {
    return run_w4q({"quantize", bundled_model(), "-o", path(name), "--scheme", scheme, "--to", dialect, "--quiet"});
  }
  static void expect_part(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in\n" << text;
  }

  static inline TemporaryFolder* folder_ = nullptr;
};

TEST_F(Serving, SaysThatAFolderLoadsAndOverHowManyGpus) {
  const auto result = run_w4q({"verify", path("ct"), "--for", "vllm,sglang", "--for", "transformers", "--json"});
  ASSERT_EQ(result.status, 0) << result.out << result.err;
  const io::Json json = result.json();
  ASSERT_EQ(json["serving"].size(), 3u);
  EXPECT_EQ(json["serving"][0]["program"], "vllm");
  EXPECT_EQ(json["serving"][0]["tensor_parallel"], io::Json({1, 2, 4}));
  EXPECT_EQ(json["checks"].size(), 3u) << "alone, nothing else is checked";
  EXPECT_EQ(run_w4q({"verify", path("ct"), "--for", "vllm", "--tensor-parallel", "4"}).status, 0);
  const auto three = run_w4q({"verify", path("ct"), "--for", "vllm", "--tensor-parallel", "3"});
  EXPECT_EQ(three.status, 1);
  expect_part(three.out, "tensor parallel 3");
}

TEST_F(Serving, SaysWhyOneDoesNotLoad) {
  const auto result = run_w4q({"verify", path("asym"), "--for", "vllm", "--html", path("page.html")});
  EXPECT_EQ(result.status, 1);
  expect_part(result.out, "FAIL  loads in vllm: vllm 0.33.0: does not load");
  expect_part(result.out, "quantization_config.sym");
  expect_part(result.out, "awq-gemm");
  expect_part(result.out, "[gptq-types]");
  expect_part(io::read_file(path("page.html")), "[gptq-types]");
  EXPECT_EQ(run_w4q({"verify", path("asym"), "--for", "transformers"}).status, 0);
}

TEST_F(Serving, OfAllProgramsOneThatLoadsItIsEnough) {
  const auto result = run_w4q({"verify", path("asym"), "--for", "all"});
  EXPECT_EQ(result.status, 0) << result.out;
  expect_part(result.out, "pass  loads: in transformers");
  expect_part(result.out, "mlx-lm 0.32.2: does not load");
}

TEST_F(Serving, ReadsGgufFilesAsTheyAre) {
  ASSERT_EQ(run_w4q({"repack", bundled_model(), "-o", path("model.gguf"), "--to", "gguf-q8_0", "--quiet"}).status, 0);
  EXPECT_EQ(run_w4q({"verify", path("model.gguf"), "--for", "llama.cpp,sglang"}).status, 0);
  const auto result = run_w4q({"verify", path("model.gguf"), "--for", "vllm"});
  EXPECT_EQ(result.status, 1);
  expect_part(result.out, "vllm-gguf-plugin");
  EXPECT_EQ(run_w4q({"verify", path("model.gguf"), "--for", "llama.cpp", "--base", bundled_model()}).status, 0);
}

TEST_F(Serving, TogetherWithEverythingElse) {
  const auto result = run_w4q({"verify", path("ct"), "--for", "vllm", "--base", bundled_model()});
  EXPECT_EQ(result.status, 0) << result.out;
  expect_part(result.out, "loads in vllm");
  expect_part(result.out, "pass  structure");
}

TEST_F(Serving, RefusesOtherNamesAndLimitsWithoutIt) {
  const auto other = run_w4q({"verify", path("ct"), "--for", "vlm"});
  EXPECT_EQ(other.status, 2);
  expect_part(other.err, "known: vllm, sglang, transformers, llama.cpp, trt-llm, mlx, all");
  EXPECT_EQ(run_w4q({"verify", path("ct"), "--tensor-parallel", "2"}).status, 2);
}

TEST_F(Serving, QuantizeChoosesWordsThatLoad) {
  const std::vector<std::string> asked{"quantize", bundled_model(), "--scheme", "int4-g32-f16-asym", "--quiet"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), asked.begin(), asked.end());
    return run_w4q(more);
  };
  const auto chosen = with({"-o", path("chosen"), "--for", "vllm,sglang"});
  ASSERT_EQ(chosen.status, 0) << chosen.err;
  expect_part(chosen.out, "--for chose --to compressed-tensors");
  expect_part(chosen.out, "vllm 0.33.0: loads; tensor parallel 1, 2, 4");
  EXPECT_EQ(run_w4q({"verify", path("chosen"), "--for", "vllm,sglang"}).status, 0);
  for (const bool dry : {false, true}) {
    const auto refused =
        with({dry ? "--dry-run" : "-o", dry ? "--quiet" : path("refused"), "--for", "vllm", "--to", "gptq-v2"});
    EXPECT_EQ(refused.status, 3);
    expect_part(refused.err, "[gptq-types]");
    expect_part(refused.err, "--to compressed-tensors or --to awq-gemm holds the same codes and loads");
    EXPECT_FALSE(std::filesystem::exists(path("refused")));
  }
  const auto anyway = with({"-o", path("anyway"), "--for", "vllm", "--to", "gptq-v2", "--even-if-refused"});
  ASSERT_EQ(anyway.status, 0) << anyway.err;
  expect_part(anyway.out, "does not load");
  const auto planes = run_w4q({"quantize", bundled_model(), "--dry-run", "--k", "3", "--for", "vllm"});
  EXPECT_EQ(planes.status, 3);
  expect_part(planes.err, "no dialect holds these codes");
  EXPECT_EQ(with({"--dry-run", "--even-if-refused"}).status, 2);
}

TEST_F(Serving, QuantizeRefusesSchemesThatAFusedLayerCannotHave) {
  const auto kept = run_w4q({"quantize", bundled_model(), "--dry-run", "--scheme", "int4-g32-f16", "--keep",
                             "*.1.*q_proj", "--to", "compressed-tensors", "--for", "vllm"});
  EXPECT_EQ(kept.status, 3);
  expect_part(kept.err, "ignore leaves out 1 of its 3 parts");
  EXPECT_EQ(run_w4q({"quantize", bundled_model(), "--dry-run", "--scheme", "int4-g32-f16", "--keep", "*.1.*[qkv]_proj",
                     "--to", "awq-gemm", "--for", "vllm,sglang"})
                .status,
            0);
}

TEST_F(Serving, RepackRefusesWhatWouldNotLoad) {
  const auto refused = run_w4q({"repack", path("asym"), "-o", path("none"), "--to", "gptq-v1", "--for", "vllm"});
  EXPECT_EQ(refused.status, 3);
  expect_part(refused.err, "holds the same codes and loads");
  EXPECT_FALSE(std::filesystem::exists(path("none")));
  const auto made = run_w4q({"repack", path("asym"), "-o", path("awq"), "--to", "awq-gemm", "--for", "vllm,mlx"});
  EXPECT_EQ(made.status, 0) << made.err;
  expect_part(made.out, "mlx-lm 0.32.2: loads");
  EXPECT_EQ(run_w4q({"repack", path("asym"), "-o", path("w"), "--target", "sm89", "--for", "vllm"}).status, 2);
}

TEST(ListServers, NamesEveryRuleThatThePageHas) {
  const auto result = run_w4q({"list", "--servers", "--json"});
  ASSERT_EQ(result.status, 0) << result.err;
  const std::string page = io::read_file(testdata().parent_path() / "docs" / "serving.md");
  for (const auto& rule : result.json()["rules"]) {
    EXPECT_NE(page.find(rule["name"].get<std::string>()), std::string::npos) << rule["name"];
  }
}

}  // namespace
}  // namespace w4q::test
