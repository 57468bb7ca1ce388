// verify --for and list --servers as a user meets them.
#include <array>

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
    expect_part(refused.err, "--to compressed-tensors or --to awq-gemm or --to humming holds the same codes and loads");
    EXPECT_FALSE(std::filesystem::exists(path("refused")));
  }
  const auto anyway = with({"-o", path("anyway"), "--for", "vllm", "--to", "gptq-v2", "--even-if-refused"});
  ASSERT_EQ(anyway.status, 0) << anyway.err;
  expect_part(anyway.out, "does not load");
  const auto planes =
      run_w4q({"quantize", bundled_model(), "--dry-run", "--scheme", "kbit3-b32-e4m4", "--for", "vllm"});
  EXPECT_EQ(planes.status, 3);
  expect_part(planes.err, "no dialect holds these codes");
  expect_part(planes.err, "cannot hold kbit3-b32-e4m4");
  EXPECT_EQ(with({"--dry-run", "--even-if-refused"}).status, 2);
}

/// What --for alone chooses of the bundled model, whose config says bfloat16, and that its programs load it.
TEST_F(Serving, QuantizeChoosesASchemeWhereNoneIsGiven) {
  struct Row {
    std::vector<std::string> asked;
    std::string programs, chosen;
  };
  const std::vector<Row> rows{
      {{}, "vllm,sglang,transformers", "--for chose --scheme int4-g64-bf16-asym --to compressed-tensors\n"},
      {{"--group", "32", "--symmetric"}, "vllm", "--for chose --scheme int4-g32-bf16 --to compressed-tensors\n"},
      {{"--k", "3"}, "sglang", "--for chose --scheme int3-g64-bf16-asym --to humming\n"},
      {{"--k", "8"}, "vllm,sglang", "--for chose --scheme int8-g64-bf16 --to compressed-tensors\n"},
      {{"--k", "8"}, "trt-llm,vllm", "--for chose --scheme fp8-channel --to compressed-tensors-float\n"},
      {{}, "trt-llm", "--for chose --scheme nvfp4 --to modelopt\n"},
      {{}, "mlx,vllm", "--for chose --scheme int4-g64-bf16-asym --to awq-gemm\n"},
      {{"--to", "awq-gemm"}, "vllm", "--for chose --scheme int4-g64-bf16-asym\n"},
      {{}, "llama.cpp,sglang", "--for chose --to gguf-q4_k_m\n"},
  };
  for (const auto& [asked, programs, chosen] : rows) {
    const std::string out = path("open-" + std::to_string(&asked - &rows.front().asked));
    std::vector<std::string> command{"quantize", bundled_model(), "-o",          out,
                                     "--for",    programs,        "--overwrite", "--quiet"};
    command.insert(command.end(), asked.begin(), asked.end());
    const auto made = run_w4q(command);
    ASSERT_EQ(made.status, 0) << programs << made.err;
    expect_part(made.out + "\n", chosen);
    EXPECT_EQ(run_w4q({"verify", out, "--for", programs}).status, 0) << chosen;
  }
}

TEST_F(Serving, QuantizeFindsDialectsOfSmallFloats) {
  const std::string llama = bundled_model(), hybrid = (testdata() / "w4q-hybrid-tiny").string();
  const std::vector<std::array<std::string, 4>> rows{
      {llama, "nvfp4", "vllm,sglang,transformers", "compressed-tensors-float"},
      {llama, "nvfp4", "trt-llm,vllm", "modelopt"},
      {llama, "fp8-block128", "vllm,trt-llm", "compressed-tensors-float"},
      {hybrid, "fp8-block128", "sglang,trt-llm", "fp8"},
      {llama, "nf4", "sglang,transformers", "bitsandbytes-nf4"}};
  for (const auto& [model, scheme, programs, to] : rows) {
    const auto result = run_w4q({"quantize", model, "--dry-run", "--scheme", scheme, "--for", programs, "--quiet"});
    ASSERT_EQ(result.status, 0) << scheme << result.err;
    expect_part(result.out, "--for chose --to " + to + "\n");
  }
  const auto refused = run_w4q({"quantize", bundled_model(), "--dry-run", "--scheme", "nvfp4", "--for", "mlx"});
  // A Llama's code in SGLang looks for the scales of blocks under another name.
  const auto dropped = run_w4q(
      {"quantize", llama, "--dry-run", "--scheme", "fp8-block128", "--to", "fp8", "--for", "sglang", "--quiet"});
  EXPECT_EQ(dropped.status, 3);
  expect_part(dropped.err, "[scale-names]");
  EXPECT_EQ(refused.status, 3);
  expect_part(refused.err, "as compressed-tensors-float:");
  expect_part(refused.err, "[mlx-names]");
}

/// FP8 of tensors loads as ModelOpt's with a scale of inputs alone, which exists after the work.
TEST_F(Serving, CountsOnScalesThatWillBeMeasured) {
  const auto measured = [&](std::vector<std::string> more) {
    std::vector<std::string> command{"quantize", bundled_model(), "--dry-run", "--scheme", "fp8-tensor",
                                     "--for",    "trt-llm",       "--to",      "modelopt", "--quiet"};
    command.insert(command.end(), more.begin(), more.end());
    return run_w4q(command);
  };
  EXPECT_EQ(measured({}).status, 3);
  const auto planned =
      measured({"--activation-scales", "--cache-scales", "--calib-ids", bundled_model() + "/own/selfgen.ids.u16"});
  EXPECT_EQ(planned.status, 0) << planned.err;
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

/// Of experts the type that servers load is chosen and written, of others as before.
TEST_F(Serving, QuantizeChoosesWhatLoadsOfExpertsInFp8) {
  const std::string mixture = (testdata() / "w4q-mixture-tiny").string();
  for (const char* scheme : {"fp8-channel", "fp8-block128"}) {
    const auto chosen = run_w4q({"quantize", mixture, "-o", path(scheme), "--scheme", scheme, "--for", "vllm,sglang"});
    ASSERT_EQ(chosen.status, 0) << chosen.err;
    expect_part(chosen.out, "--for chose --to compressed-tensors-float\n");
    expect_part(chosen.out, "config.json says dynamic inputs in FP8");
    EXPECT_EQ(run_w4q({"verify", path(scheme), "--for", "vllm,sglang"}).status, 0);
  }
  const auto refused = run_w4q({"quantize", mixture, "--dry-run", "--scheme", "fp8-tensor", "--for", "vllm", "--to",
                                "compressed-tensors-float"});
  EXPECT_EQ(refused.status, 3);
  expect_part(refused.err, "--activation-scales --calib TEXT measures them");
}

/// The words of GPTQ under AutoRound's config, read and loaded as such, and back to the same file.
TEST_F(Serving, AutoRoundIsWritten) {
  ASSERT_EQ(run_w4q({"repack", path("ct"), "-o", path("rounded-auto"), "--to", "auto-round", "--quiet"}).status, 0);
  EXPECT_EQ(run_w4q({"verify", path("rounded-auto"), "--for", "vllm,sglang,transformers"}).status, 0);
  const auto sound = run_w4q({"verify", path("rounded-auto"), "--base", bundled_model()});
  EXPECT_EQ(sound.status, 0) << sound.out;
  expect_part(sound.out, "read as auto-round");
  ASSERT_EQ(run_w4q({"repack", path("rounded-auto"), "-o", path("words"), "--to", "gptq-v1", "--quiet"}).status, 0);
  EXPECT_EQ(io::read_file(path("rounded-auto") + "/model.safetensors"),
            io::read_file(path("words") + "/model.safetensors"));
}

TEST_F(Serving, RecipesOfSeveralSchemesInAFusedLayerAreRefused) {
  io::write_file(path("widths.json"),
                 R"({"rules": [{"match": "*.q_proj", "scheme": "int8-g128-bf16"}, )"
                 R"({"match": "*.layers.*_proj", "scheme": "int4-g128-bf16"}]})",
                 false);
  const auto with = [&](std::vector<std::string> more) {
    std::vector<std::string> command{"quantize", bundled_model(),     "--dry-run",
                                     "--recipe", path("widths.json"), "--quiet"};
    command.insert(command.end(), more.begin(), more.end());
    return run_w4q(command);
  };
  for (const char* to : {"compressed-tensors", "humming"}) {
    const auto refused = with({"--to", to});
    EXPECT_EQ(refused.status, 2);
    expect_part(refused.err, "model.layers.0.self_attn.qkv_proj is one layer");
    expect_part(refused.err, "q_proj: int8-g128-bf16");
    expect_part(refused.err, "k_proj: int4-g128-bf16");
    expect_part(refused.err, "--no-ties");
    EXPECT_EQ(with({"--to", to, "--no-ties"}).status, 0);
    const auto unserved = with({"--to", to, "--no-ties", "--for", "vllm"});
    EXPECT_EQ(unserved.status, 3);
    EXPECT_EQ(unserved.err.find("--to humming holds"), std::string::npos) << unserved.err;
    EXPECT_EQ(with({"--to", to, "--for", "vllm", "--even-if-refused"}).status, 0);
  }
  EXPECT_EQ(with({}).status, 0) << "w4q's own planes are read one by one";
  EXPECT_EQ(run_w4q({"quantize", bundled_model(), "--dry-run", "--no-ties"}).status, 2);
}

TEST_F(Serving, ScalesThatReadersRoundAreNotedOnce) {
  const std::string mark = "F16 beside torch_dtype bfloat16";
  const auto made = quantize("rounded", "int4-g128-f16", "compressed-tensors");
  expect_part(made.out, mark);
  expect_part(run_w4q({"verify", path("rounded")}).out, mark);
  const auto packed = run_w4q({"repack", path("rounded"), "--dry-run", "--to", "gptq-v1", "--json"});
  EXPECT_NE(packed.json()["notes"].dump().find(mark), std::string::npos) << packed.out;
  const auto asked = run_w4q({"repack", path("rounded"), "--dry-run", "--to", "gptq-v1", "--for", "vllm"});
  expect_part(asked.out, "[scale-dtype]");
  EXPECT_EQ(asked.out.find(mark), std::string::npos) << asked.out;
  EXPECT_EQ(quantize("kept", "int4-g128-bf16", "compressed-tensors").out.find(mark), std::string::npos);
}

TEST_F(Serving, IntegersOfCompressedTensorsCarryScalesOfTheCache) {
  const std::vector<std::string> text{
      "--calib-ids", bundled_model() + "/own/selfgen.ids.u16", "--samples", "1", "--length", "32"};
  const auto with = [&](const std::string& name, std::vector<std::string> more) {
    std::vector<std::string> command{"repack", path("ct"), "-o", path(name), "--to", "compressed-tensors", "--quiet"};
    command.insert(command.end(), text.begin(), text.end());
    command.insert(command.end(), more.begin(), more.end());
    return run_w4q(command);
  };
  const auto made = with("cached", {"--cache-scales"});
  ASSERT_EQ(made.status, 0) << made.err;
  expect_part(made.out, "8 scales of activations");
  EXPECT_EQ(io::read_json(path("cached") + "/config.json")["quantization_config"]["kv_cache_scheme"]["num_bits"], 8);
  EXPECT_EQ(run_w4q({"verify", path("cached"), "--base", bundled_model()}).status, 0);
  EXPECT_EQ(run_w4q({"verify", path("cached"), "--for", "vllm,sglang"}).status, 0);
  ASSERT_EQ(run_w4q({"repack", path("cached"), "-o", path("awq-again"), "--to", "w4q", "--quiet"}).status, 0)
      << "scales of the cache are not carried along";
  const auto inputs = with("inputs", {"--activation-scales"});
  EXPECT_EQ(inputs.status, 2);
  expect_part(inputs.err, "none of inputs (--activation-scales)");
}

TEST_F(Serving, ANoteSaysWherePresetsAreTheSame) {
  const auto file = run_w4q({"quantize", bundled_model(), "--dry-run", "--to", "gguf-q4_k_m", "--quality", "max"});
  ASSERT_EQ(file.status, 0) << file.err;
  expect_part(file.out, "--quality max has the steps of good for blocks of GGUF");
  const auto tiles = run_w4q({"quantize", bundled_model(), "--dry-run", "--scheme", "exl3-2", "--quality", "max"});
  ASSERT_EQ(tiles.status, 0) << tiles.err;
  expect_part(tiles.out, "--quality max has the steps of best for exl3-2");
  for (const char* scheme : {"nvfp4", "trellis2-w8"}) {
    const auto other = run_w4q({"quantize", bundled_model(), "--dry-run", "--scheme", scheme, "--quality", "max"});
    EXPECT_EQ(other.out.find("has the steps of"), std::string::npos) << scheme;
  }
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

TEST_F(Serving, RepackChoosesWordsThatLoad) {
  const auto chosen = run_w4q({"repack", path("asym"), "-o", path("for-vllm"), "--for", "vllm", "--quiet"});
  ASSERT_EQ(chosen.status, 0) << chosen.err;
  expect_part(chosen.out, "--for chose --to compressed-tensors\n");
  EXPECT_EQ(run_w4q({"verify", path("for-vllm"), "--for", "vllm"}).status, 0);
  const auto file = run_w4q({"repack", path("ct"), "-o", path("for.gguf"), "--for", "llama.cpp", "--quiet"});
  ASSERT_EQ(file.status, 0) << file.err;
  expect_part(file.out, "--for chose --to gguf\n");
  const auto types = run_w4q({"repack", bundled_model(), "--dry-run", "--to", "gguf-mxfp4", "--for", "sglang"});
  EXPECT_EQ(types.status, 3);
  expect_part(types.err, "[gguf-types]");
  EXPECT_EQ(run_w4q({"repack", bundled_model(), "--dry-run", "--for", "vllm"}).status, 2) << "nothing is packed";
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
