// Options of quantize, repack, verify and inspect.
#include <fstream>
#include <map>

#include "device/properties.h"
#include "program.h"

namespace w4q::test {
namespace {

class Options : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name)) << text;
    return path(name);
  }
  ProgramResult quantize(std::vector<std::string> more) const {
    std::vector<std::string> arguments{"quantize", bundled_model(), "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_w4q(arguments);
  }

  TemporaryFolder folder_;
};

TEST_F(Options, DryRunPrintsThePlanAndWritesNothing) {
  const auto text = quantize({"--dry-run", "--k", "3"});
  EXPECT_EQ(text.status, 0) << text.err;
  EXPECT_NE(text.out.find("kbit3-b32-e4m4"), std::string::npos);
  EXPECT_NE(text.out.find("3.25"), std::string::npos);
  const auto json = quantize({"--dry-run", "--k", "3", "-o", path("never"), "--json"}).json();
  EXPECT_FALSE(std::filesystem::exists(path("never")));
  EXPECT_EQ(json["packed_tensors"], 28);
  EXPECT_GT(json["expected_seconds"].get<double>(), 0);
  EXPECT_GT(json["expected_memory_bytes"].get<int64_t>(), 0);
  // 3 bits and a byte per block of 32, and one table of 8 floats per tensor
  EXPECT_NEAR(json["packed_bits_per_weight"].get<double>(), 3.25, 0.01);
}

TEST_F(Options, WordsThatItDoesNotKnowAreNamedWithTheNearest) {
  const auto told = [](const std::vector<std::string>& words, std::initializer_list<const char*> parts) {
    const auto result = run_w4q(words);
    EXPECT_EQ(result.status, 2);
    for (const char* part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << part << "\n" << result.err;
  };
  told({"quantise", bundled_model()}, {"no command quantise", "did you mean quantize?"});
  told({"frobnicate"}, {"no command frobnicate", "hint: w4q --help"});
  told({"verify", bundled_model(), "--bass", "x"}, {"verify has no option --bass", "did you mean --base?"});
  told({"verify", bundled_model(), "--bass=x"}, {"verify has no option --bass", "did you mean --base?"});
  told({"verify", bundled_model(), "--frobnicate"}, {"no option --frobnicate", "hint: w4q verify --help"});
  told({}, {"subcommand is required"});
}

TEST_F(Options, RecipeDecidesAloneAndFirstMatchWins) {
  const auto recipe = write("r.json", R"({"rules": [
    {"match": "model.layers.0.*", "scheme": "keep"},
    {"match": "*.mlp.down_proj", "scheme": "kbit5-b32-f16"},
    {"match": "*.mlp.*", "scheme": "kbit2-b32-e4m4"}]})");
  const auto result = quantize({"--dry-run", "--recipe", recipe, "--json"});
  ASSERT_EQ(result.status, 0) << result.err;
  const io::Json plan = result.json();
  std::map<std::string, io::Json> scheme;
  for (const auto& tensor : plan["tensors"]) scheme[tensor["name"]] = tensor["scheme"];
  EXPECT_EQ(scheme["model.layers.1.mlp.down_proj.weight"], "kbit5-b32-f16");
  EXPECT_EQ(scheme["model.layers.1.mlp.up_proj.weight"], "kbit2-b32-e4m4");
  EXPECT_TRUE(scheme["model.layers.1.self_attn.q_proj.weight"].is_null());
  EXPECT_TRUE(scheme["model.layers.0.mlp.up_proj.weight"].is_null());
  EXPECT_EQ(plan["packed_tensors"], 9);
}

TEST_F(Options, RecipesWithMistakesAreRefused) {
  const auto refused = [&](const std::string& text, std::initializer_list<const char*> parts) {
    const auto result = quantize({"--dry-run", "--recipe", write("bad.json", text)});
    EXPECT_NE(result.status, 0) << text;
    for (const char* part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << text << "\n" << result.err;
  };
  refused("[]", {"rules"});
  refused(R"({"rules": [{"match": "*"}]})", {"rule 1", "scheme"});
  refused(R"({"rules": [{"match": "*", "scheme": "kbit9-b32-e4m4"}]})", {"kbit9"});
  refused(R"({"rules": [{"match": "*.nope.*", "scheme": "kbit4-b32-e4m4"}]})", {"matches no module"});
  refused(R"({"rules": [{"match": "model.norm", "scheme": "kbit4-b32-e4m4"}]})", {"model.norm"});
  refused(R"({"rules": [{"match": "*", "scheme": "keep"}]})", {"nothing to quantize"});
}

TEST_F(Options, KeepTakesGlobsAndRefusesOnesThatMatchNothing) {
  const auto json = quantize({"--dry-run", "--keep", "*.down_proj", "--keep", "model.layers.3.*", "--json"}).json();
  EXPECT_EQ(json["packed_tensors"], 18);  // 28 − 4 down_proj − 6 others of layer 3
  const auto refused = quantize({"--dry-run", "--keep", "*.dwon_proj"});
  EXPECT_EQ(refused.status, 2);
  EXPECT_NE(refused.err.find("matches no module"), std::string::npos) << refused.err;
}

TEST_F(Options, OwnTableFromAFile) {
  const auto table = write("t.txt", "-1 -0.3 0.3 1\n");
  ASSERT_EQ(quantize({"-o", path("own"), "--k", "2", "--codebook", table}).status, 0);
  const auto shown = run_w4q({"inspect", path("own"), "--tensor", "model.layers.0.mlp.up_proj", "--json"}).json();
  const auto codebook = shown["passes"][0]["codebook"];
  ASSERT_EQ(codebook.size(), 4u);
  EXPECT_FLOAT_EQ(codebook[2].get<float>() / codebook[3].get<float>(), 0.3f);
  EXPECT_EQ(quantize({"-o", path("never"), "--k", "3", "--codebook", table}).status, 3);
  EXPECT_EQ(quantize({"-o", path("never"), "--codebook", "no-such-table"}).status, 2);
}

TEST_F(Options, BitsandbytesBytesHaveItsTable) {
  ASSERT_EQ(quantize({"-o", path("bnb"), "--k", "3", "--bnb-compatible"}).status, 0);
  const auto shown = run_w4q({"inspect", path("bnb"), "--tensor", "model.layers.0.mlp.up_proj", "--json"}).json();
  EXPECT_FLOAT_EQ(shown["passes"][0]["codebook"][4].get<float>(), 0.10254128f);
  EXPECT_NE(quantize({"-o", path("never"), "--bnb-compatible", "--absmax", "f16"}).status, 0);
}

TEST_F(Options, InspectShowsHeaderPlanesAndDrawing) {
  ASSERT_EQ(quantize({"-o", path("k3"), "--k", "3"}).status, 0);
  const auto all = run_w4q({"inspect", path("k3")});
  EXPECT_NE(all.out.find("model.layers.0.mlp.up_proj.0.codes"), std::string::npos);
  EXPECT_NE(all.out.find("28 packed weights at 3.2"), std::string::npos) << all.out;
  const auto drawn =
      run_w4q({"inspect", path("k3"), "--tensor", "model.layers.0.mlp.up_proj", "--layout", "kbit-tile"});
  EXPECT_EQ(drawn.status, 0) << drawn.err;
  EXPECT_NE(drawn.out.find("layout kbit-tile"), std::string::npos);
  EXPECT_EQ(run_w4q({"inspect", bundled_model(), "--tensor", "model.norm.weight"}).status, 0);
  const auto missing = run_w4q({"inspect", path("k3"), "--tensor", "no.such.tensor"});
  EXPECT_EQ(missing.status, 3);
  EXPECT_NE(missing.err.find("no.such.tensor"), std::string::npos);
}

TEST_F(Options, VerifyThresholdsDecideTheExitStatus) {
  ASSERT_EQ(quantize({"-o", path("k2"), "--k", "2"}).status, 0);
  const std::string ids = bundled_model() + "/own/selfgen.ids.u16";
  const auto run = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments{"verify", path("k2"), "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_w4q(arguments);
  };
  EXPECT_EQ(run({"--ids", ids, "--windows", "2", "--base", bundled_model(), "--max-kl", "0.001"}).status, 1);
  EXPECT_EQ(run({"--ids", ids, "--windows", "2", "--base", bundled_model(), "--max-ppl-ratio", "1.001"}).status, 1);
  EXPECT_EQ(run({"--base", bundled_model(), "--min-sqnr", "40"}).status, 1);
  EXPECT_EQ(run({"--ids", ids, "--windows", "2", "--base", bundled_model(), "--max-kl", "50"}).status, 0);
  EXPECT_EQ(run({"--ids", ids, "--max-kl", "1"}).status, 2) << "a threshold without a base";
  EXPECT_EQ(run({"--ppl"}).status, 2) << "--ppl without a text";
  EXPECT_EQ(run({"--ids", ids, "--ctx", "1000000"}).status, 2) << "no whole window";
}

TEST_F(Options, VerifySaysWhatADeviceWasNotNeededFor) {
  const auto result = run_w4q({"verify", bundled_model(), "--quiet", "--device", "cpu"});
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.out.find("note: --device cpu: without --ppl"), std::string::npos) << result.out;
  const auto json = run_w4q({"verify", bundled_model(), "--quiet", "--device", "cpu", "--json"}).json();
  EXPECT_NE(json["notes"].dump().find("--device cpu"), std::string::npos) << json;
}

/// A hint that repeats the message helps nobody.
TEST_F(Options, HintsSayMoreThanTheMessage) {
  for (const std::vector<std::string>& more : std::vector<std::vector<std::string>>{
           {"--ctx", "64"}, {"--bos"}, {"--kv", "fp8"}, {"--target", "sm89"}, {"--max-ppl-ratio", "2"}}) {
    std::vector<std::string> arguments{"verify", bundled_model(), "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const std::string message = run_w4q(arguments).err;
    const size_t hint = message.find("hint: ");
    if (hint == std::string::npos) continue;
    const std::string said = message.substr(hint + 6, message.find('\n', hint) - hint - 6);
    EXPECT_EQ(message.find(said), hint + 6) << message;
  }
}

TEST_F(Options, VerifyRefusesWhatItWouldIgnore) {
  const std::string ids = bundled_model() + "/own/selfgen.ids.u16";
  for (const std::vector<std::string>& more :
       std::vector<std::vector<std::string>>{{"--kv", "fp8"},
                                             {"--kv-delta", "3"},
                                             {"--device", "bogus"},
                                             {"--residual-gpu-bytes", "1GB"},
                                             {"--target", "sm89"},
                                             {"--generate", "5"},
                                             {"--stride", "4"},
                                             {"--bos"},
                                             {"--ctx", "64"},
                                             {"--speed", "--device", "cpu"},
                                             {"--kv-compare", "--ids", ids, "--device", "cpu"},
                                             {"--ids", ids, "--kv", "bogus"},
                                             {"--ids", ids, "--kv-delta", "3"}}) {
    std::vector<std::string> arguments{"verify", bundled_model(), "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto result = run_w4q(arguments);
    EXPECT_EQ(result.status, 2) << more.front();
    EXPECT_EQ(result.err.rfind("error: ", 0), 0u) << result.err;
  }
}

TEST_F(Options, VerifySaysThatWindowsGoBeyondTheModel) {
  const auto result = run_w4q({"verify", bundled_model(), "--ids", bundled_model() + "/own/selfgen.ids.u16",
                               "--windows", "1", "--ctx", "1100", "--quiet", "--json"});
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.json()["notes"].dump().find("1024"), std::string::npos) << result.out;
}

TEST_F(Options, StrideAndBosScoreTheTokensTheyShould) {
  const std::string ids = bundled_model() + "/own/selfgen.ids.u16";
  const auto ppl = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments{"verify", bundled_model(), "--ids", ids, "--quiet", "--json", "--ctx", "64"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_w4q(arguments).json()["perplexity"];
  };
  EXPECT_EQ(ppl({"--windows", "5"})["scored_tokens"], 5 * 63);
  EXPECT_EQ(ppl({"--bos", "--windows", "5"})["scored_tokens"], 5 * 63);  // 63 ids behind a BOS, all scored
  EXPECT_EQ(ppl({"--stride", "16", "--windows", "5"})["scored_tokens"], 63 + 4 * 16);
  // More context per scored token can only help a sane model: the strided figure is lower.
  EXPECT_LT(ppl({"--stride", "16", "--windows", "40"})["perplexity"].get<double>(),
            ppl({"--windows", "10"})["perplexity"].get<double>());
}

/// The GPU gives the bytes of the CPU; without one, insisting on it is an error and `auto` is not.
TEST_F(Options, DeviceChoosesWhereNotWhat) {
  ASSERT_EQ(quantize({"-o", path("cpu"), "--k", "3", "--device", "cpu"}).status, 0);
  ASSERT_EQ(quantize({"-o", path("auto"), "--k", "3", "--device", "auto"}).status, 0);
  EXPECT_EQ(folder_digest(path("cpu")), folder_digest(path("auto")));
  const auto repack = [&](const std::string& name, const std::string& device) {
    return run_w4q({"repack", path("cpu"), "-o", path(name), "--layout", "kbit-tile", "--quiet", "--device", device});
  };
  ASSERT_EQ(repack("cpu-tile", "cpu").status, 0);
  ASSERT_EQ(repack("auto-tile", "auto").status, 0);
  EXPECT_EQ(folder_digest(path("cpu-tile")), folder_digest(path("auto-tile")));
  const auto quantized = quantize({"-o", path("cuda"), "--k", "3", "--device", "cuda"});
  const auto repacked = repack("cuda-tile", "cuda");
  if (device::find_gpu()) {
    EXPECT_EQ(quantized.status, 0) << quantized.err;
    EXPECT_EQ(folder_digest(path("cpu")), folder_digest(path("cuda")));
    EXPECT_EQ(repacked.status, 0) << repacked.err;
    EXPECT_EQ(folder_digest(path("cpu-tile")), folder_digest(path("cuda-tile")));
  } else {
    for (const auto& refused : {quantized, repacked}) {
      EXPECT_EQ(refused.status, 4) << refused.err;
      EXPECT_NE(refused.err.find("no GPU to use"), std::string::npos) << refused.err;
      EXPECT_NE(refused.err.find("--device cpu"), std::string::npos) << refused.err;
    }
    EXPECT_FALSE(std::filesystem::exists(path("cuda")));
    EXPECT_FALSE(std::filesystem::exists(path("cuda-tile")));
  }
  for (const char* word : {"tpu", "cuda:", "cuda:-1"}) {
    EXPECT_EQ(quantize({"--dry-run", "--device", word}).status, 2) << word;
  }
  const auto missing = quantize({"--dry-run", "--device", "cuda:1000"});
  EXPECT_EQ(missing.status, 4) << missing.err;
  EXPECT_NE(missing.err.find("no GPU to use"), std::string::npos) << missing.err;
}

TEST_F(Options, RepackNeedsATargetAndKnowsItsNames) {
  ASSERT_EQ(quantize({"-o", path("k4")}).status, 0);
  EXPECT_EQ(run_w4q({"repack", path("k4"), "-o", path("x")}).status, 2);
  const auto target = run_w4q({"repack", path("k4"), "-o", path("x"), "--target", "sm12"});
  EXPECT_EQ(target.status, 2);
  EXPECT_NE(target.err.find("sm89"), std::string::npos) << target.err;
  const auto layout = run_w4q({"repack", path("k4"), "-o", path("x"), "--layout", "kbit-tail"});
  EXPECT_EQ(layout.status, 2);
  EXPECT_NE(layout.err.find("kbit-tile"), std::string::npos) << layout.err;
  const auto dry = run_w4q({"repack", path("k4"), "-o", path("x"), "--target", "sm89", "--dry-run"});
  EXPECT_EQ(dry.status, 0) << dry.err;
  EXPECT_FALSE(std::filesystem::exists(path("x")));
  EXPECT_EQ(run_w4q({"repack", bundled_model(), "-o", path("x"), "--target", "sm89"}).status, 2) << "not packed";
  EXPECT_EQ(run_w4q({"quantize", path("k4"), "-o", path("x")}).status, 2) << "packed already";
}

/// The model has 1024 positions.
TEST_F(Options, GenerateStaysWithinTheModelsPositions) {
  const auto generate = [&](int words, std::vector<std::string> more) {
    std::string prompt;
    for (int i = 0; i < words; ++i) prompt += " the";
    more.insert(more.begin(), {"generate", bundled_model(), "--quiet", "--json", "--prompt", prompt});
    return run_w4q(more);
  };
  const auto few = generate(1020, {}).json();
  EXPECT_LE(few["prompt_tokens"].get<int64_t>() + static_cast<int64_t>(few["ids"].size()), 1024);
  const auto asked = generate(4, {"--max-tokens", "1048576"});
  EXPECT_EQ(asked.status, 2);
  EXPECT_NE(asked.err.find("new tokens fit behind this prompt"), std::string::npos) << asked.err;
  EXPECT_EQ(generate(1100, {}).status, 2);
}

/// In the form that all errors have, and without numbers of three hundred digits.
TEST_F(Options, NumbersThatMakeNoSenseAreRefused) {
  const std::string ids = bundled_model() + "/own/selfgen.ids.u16", model = bundled_model();
  const auto refused = [](const std::vector<std::string>& arguments, const std::string& part) {
    const auto result = run_w4q(arguments);
    EXPECT_EQ(result.status, 2) << part;
    EXPECT_EQ(result.err.rfind("error: ", 0), 0u) << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
    EXPECT_LT(result.err.size(), 200u) << result.err;
  };
  const std::string beyond = "18446744073709551615";
  refused({"quantize", model, "-o", path("q"), "--shard-size", beyond}, "--shard-size: expected a size such as 4.2GB");
  refused({"quantize", model, "-o", path("q"), "--shard-size", "-5"}, "--shard-size: expected a size such as 4.2GB");
  refused({"quantize", model, "-o", path("q"), "--target-size", "16EB"}, "--target-size: expected a size");
  refused({"quantize", model, "-o", path("q"), "--target-bpw", "nan"}, "--target-bpw: expected a number, got nan");
  refused({"quantize", model, "-o", path("q"), "--max-memory", beyond}, "--max-memory: expected a size");
  refused({"verify", model, "--ids", ids, "--windows", "-1"}, "--windows: expected at least 0");
  refused({"verify", model, "--base", model, "--min-sqnr", "nan"}, "--min-sqnr: expected a number");
  refused({"generate", model, "--prompt", "x", "--kv-delta", "nan"}, "--kv-delta: expected at least 0");
  refused({"generate", model, "--prompt", "x", "--temperature", "inf"}, "--temperature: expected at least 0");
  refused({"calibrate", model, "--ids", ids, "-o", path("s"), "--rotation-seed", "3"}, "--rotation-seed belongs to");
  refused({"quantize", model, "-o", path("q"), "--fold-rotations", "--rotation-seed", "-1"},
          "--rotation-seed: expected at least 0");
  refused({"quantize", model, "-o", path("q"), "--fold-rotations", "--rotation-seed", "none"},
          "--rotation-seed none is for inputs that are rotated at run time");
  refused({"quantize", model, "-o", path("q"), "--rotate", "64", "--rotation-seed", "1.5"}, "--rotation-seed");
  for (const char* group : {"0", "-128", "128x", ""}) {
    refused({"quantize", model, "-o", path("q"), "--method", "rtn", "--group", group}, std::string("--group ") + group);
  }
  refused({"quantize", model, "--kk", "3"}, "w4q quantize --help");
  refused({"frobnicate"}, "w4q --help");
  refused({"quantize", model, "-o", path("q"), "--shard-size", "0"}, "--shard-size: expected more than 0");
}

/// A name that was typed is wrong usage, and no bad input.
TEST_F(Options, SchemesThatDoNotExistAreRefused) {
  const std::string model = bundled_model();
  const std::vector<std::vector<std::string>> typed = {
      {"quantize", model, "-o", path("q"), "--scheme", "int4-g128-f16-asymm"},
      {"quantize", model, "-o", path("q"), "--embedding-scheme", "int9"},
      {"bench", "--shape", "llama3-8b", "--scheme", "kbit9"}};
  for (const auto& arguments : typed) {
    const auto result = run_w4q(arguments);
    EXPECT_EQ(result.status, 2) << result.err;
    for (const char* part : {"scheme: unknown scheme", "known: kbit2", "hint: w4q list"}) {
      EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
    }
  }
}

TEST_F(Options, SizesMayHaveFractionsAndUnits) {
  for (const char* size : {"1000000", "1e6", "1000kB", "1MB", "1m", "0.001 GB", "0.95367431640625MiB", "976.5625Ki"}) {
    ASSERT_EQ(quantize({"-o", path("q"), "--k", "4", "--shard-size", size, "--overwrite"}).status, 0) << size;
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(path("q"))) {
      files += entry.path().extension() == ".safetensors" ? 1 : 0;
    }
    EXPECT_EQ(files, 3) << size;  // of 2.2 MB
  }
  for (const char* size : {"", "x", "1XB", "1,5GB", "1 G B", "nan", "0x10", "-1", "inf", "8EiB"}) {
    const auto result = quantize({"--dry-run", "--shard-size", size});
    EXPECT_EQ(result.status, 2) << size;
  }
}

TEST_F(Options, WhatNeedsAGpuSaysSo) {
  if (device::find_gpu()) GTEST_SKIP() << "there is one";
  for (const std::vector<std::string>& command :
       {std::vector<std::string>{"bench"}, {"verify", bundled_model(), "--speed"}}) {
    const auto result = run_w4q(command);
    EXPECT_EQ(result.status, 4);
    EXPECT_NE(result.err.find("no GPU to measure"), std::string::npos) << result.err;
    EXPECT_EQ(result.err.find("--device"), std::string::npos) << result.err;
  }
}

TEST_F(Options, InspectDrawsOnlyWhatIsPacked) {
  const auto drawn = run_w4q({"inspect", bundled_model(), "--tensor", "model.norm.weight", "--layout", "canonical"});
  EXPECT_EQ(drawn.status, 2);
  EXPECT_NE(drawn.err.find("model.norm.weight is not packed"), std::string::npos) << drawn.err;
}

}  // namespace
}  // namespace w4q::test
