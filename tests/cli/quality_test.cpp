// The steps of w4q quantize beyond round-to-nearest, as a user runs them, on the bundled model.
#include <filesystem>
#include <fstream>

#include "io/files.h"
#include "program.h"

namespace w4q::test {
namespace {

class Quality : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  static std::string own(const std::string& file) { return bundled_model() + "/own/" + file; }

  ProgramResult quantize(const std::string& name, std::vector<std::string> more) const {
    std::vector<std::string> arguments{"quantize", bundled_model(), "-o", path(name), "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_w4q(arguments);
  }
  double divergence(const std::string& name) const {
    const auto verify = run_w4q({"verify", path(name), "--base", bundled_model(), "--ids", own("selfgen.ids.u16"),
                                 "--windows", "8", "--ctx", "256", "--json", "--quiet"});
    EXPECT_EQ(verify.status, 0) << verify.out << verify.err;
    return verify.json()["perplexity"]["base"]["kl"].get<double>();
  }

  TemporaryFolder folder_;
};

TEST_F(Quality, PresetsImproveStepByStep) {
  const std::vector<std::string> calibration{"--calib", own("selfgen.txt"), "--samples", "16", "--length", "128"};
  ASSERT_EQ(quantize("plain", {"--k", "3"}).status, 0);
  ASSERT_EQ(quantize("fast", {"--k", "3", "--quality", "fast"}).status, 0);
  std::vector<std::string> arguments{"--k", "3", "--quality", "good", "--json"};
  arguments.insert(arguments.end(), calibration.begin(), calibration.end());
  const auto good = quantize("good", arguments);
  ASSERT_EQ(good.status, 0) << good.err;
  EXPECT_LT(good.json()["tensors"][0]["output"]["packed_error"], good.json()["tensors"][0]["output"]["plain_error"]);
  EXPECT_EQ(good.json()["steps"].size(), 5u);
  const double plain = divergence("plain"), fast = divergence("fast");
  EXPECT_LT(fast, plain);
  // Measured 0.46 of plain, with 2048 tokens of calibration.
  const double best = divergence("good");
  EXPECT_LT(best, 0.55 * plain);
  EXPECT_LT(best, fast);
}

/// Presets without a text: the model writes one, the same each time, and says so.
TEST_F(Quality, AModelCalibratesItself) {
  const auto silent = quantize("silent", {"--k", "3", "--quality", "good", "--samples", "12", "--length", "100"});
  ASSERT_EQ(silent.status, 0) << silent.err;
  EXPECT_NE(silent.out.find("12 windows of 100 tokens that the model wrote, seed 0"), std::string::npos) << silent.out;
  // Whether bytes are the same one layer of four and few tokens say, too.
  const auto with = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--samples", "4", "--length", "64"});
    return arguments;
  };
  const auto one_layer = [&](const std::string& name, std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--k", "3", "--quality", "good", "--keep", "*.layers.[123].*"});
    return quantize(name, arguments).status;
  };
  ASSERT_EQ(one_layer("layer", with({})), 0);
  ASSERT_EQ(one_layer("self", with({"--calib", "self"})), 0);
  const auto statistics = [&](const std::string& name, const std::string& seed) {
    return run_w4q(
        with({"calibrate", bundled_model(), "--text", "self", "--calib-seed", seed, "-o", path(name), "--quiet"}));
  };
  ASSERT_EQ(statistics("s.safetensors", "0").status, 0);
  ASSERT_EQ(statistics("t.safetensors", "1").status, 0);
  ASSERT_EQ(one_layer("stats", {"--stats", path("s.safetensors")}), 0);
  ASSERT_EQ(one_layer("other", {"--stats", path("t.safetensors")}), 0);
  const auto weights = [&](const std::string& name) { return io::read_file(path(name) + "/model.safetensors"); };
  EXPECT_EQ(weights("layer"), weights("self"));
  EXPECT_EQ(weights("layer"), weights("stats"));
  EXPECT_NE(weights("layer"), weights("other"));
  ASSERT_EQ(quantize("plain", {"--k", "3"}).status, 0);
  // Measured 0.62, with 1200 tokens.
  EXPECT_LT(divergence("silent"), 0.75 * divergence("plain"));
  const auto chosen =
      quantize("chosen", with({"--quality", "good", "--target-bpw", "3.5", "--keep", "*.layers.[123].*"}));
  ASSERT_EQ(chosen.status, 0) << chosen.err;
  EXPECT_NE(chosen.out.find("that the model wrote"), std::string::npos) << chosen.out;
  // Other steps ask for a text, as they did.
  EXPECT_EQ(quantize("none", {"--k", "3", "--feedback"}).status, 2);
}

TEST_F(Quality, IntegersFeedBackToo) {
  const std::vector<std::string> scheme{"--method", "rtn", "--bits", "3", "--asymmetric"};
  ASSERT_EQ(quantize("plain", scheme).status, 0);
  auto arguments = scheme;
  arguments.insert(arguments.end(), {"--feedback", "--calib-ids", own("selfgen.ids.u16"), "--length", "128"});
  const auto result = quantize("feedback", arguments);
  ASSERT_EQ(result.status, 0) << result.err;
  EXPECT_NE(result.out.find("steps: feedback"), std::string::npos) << result.out;
  EXPECT_LT(divergence("feedback"), 0.7 * divergence("plain"));
}

TEST_F(Quality, DryRunShowsStepsAndCost) {
  const auto plan = quantize("q", {"--k", "3", "--scales", "search", "--codebook", "lloyd", "--feedback", "--calib",
                                   own("selfgen.txt"), "--dry-run"});
  ASSERT_EQ(plan.status, 0) << plan.err;
  for (const char* part :
       {"table learned from nf → scales searched → weighted by calibration → feedback", "expected:"}) {
    EXPECT_NE(plan.out.find(part), std::string::npos) << plan.out;
  }
  EXPECT_FALSE(std::filesystem::exists(path("q")));
}

TEST_F(Quality, BitsAreChosenForATarget) {
  const std::vector<std::string> calibration{"--calib-ids", own("selfgen.ids.u16"), "--samples", "4", "--length", "64",
                                             "--keep",      "*.layers.[123].*"};
  std::vector<std::string> arguments{"--quality", "good", "--target-bpw", "3.5", "--save-recipe", path("r.json")};
  arguments.insert(arguments.end(), calibration.begin(), calibration.end());
  arguments.emplace_back("--dry-run");
  const auto plan = quantize("q", arguments);
  ASSERT_EQ(plan.status, 0) << plan.err;
  for (const char* part : {"uniform", "expected KL", "chosen", "bits allocated"}) {
    EXPECT_NE(plan.out.find(part), std::string::npos) << plan.out;
  }
  EXPECT_FALSE(std::filesystem::exists(path("q")));
  // The recipe knows its steps, and these ask for calibration.
  EXPECT_EQ(quantize("q", {"--recipe", path("r.json")}).status, 2);
  arguments = {"--recipe", path("r.json"), "--json"};
  arguments.insert(arguments.end(), calibration.begin(), calibration.end());
  const auto result = quantize("q", arguments);
  ASSERT_EQ(result.status, 0) << result.err;
  const double bits = result.json()["packed_bits_per_weight"].get<double>();
  EXPECT_GT(bits, 3.45);
  EXPECT_LE(bits, 3.5);
  EXPECT_EQ(result.json()["steps"].back(), "sweeps over blocks and codes");
}

/// What it writes is no longer than the positions that it has, unless somebody asks for more.
TEST_F(Quality, AModelOfFewPositionsWritesShorterTexts) {
  const std::string few = path("few");
  std::filesystem::copy(bundled_model(), few, std::filesystem::copy_options::recursive);
  io::Json config = io::read_json(few + "/config.json");
  config["max_position_embeddings"] = 96;
  std::ofstream(few + "/config.json") << config.dump();
  const auto run = [&](std::vector<std::string> arguments, int status, const char* says) {
    const auto result = run_w4q(arguments);
    EXPECT_EQ(result.status, status) << result.out << result.err;
    EXPECT_NE((result.out + result.err).find(says), std::string::npos) << result.out << result.err;
  };
  const char* const all = "683 windows of 96 tokens that the model wrote, seed 0; it has no more positions";
  const char* const two = "2 windows of 96 tokens that the model wrote, seed 0; it has no more positions";
  const std::vector<std::string> quantizes{"quantize",  few,    "-o",     path("q"),         "--k",    "3",
                                           "--quality", "good", "--keep", "*layers.[123].*", "--quiet"};
  const std::vector<std::string> exports{"quantize",  few,         "-o",   path("q.gguf"), "--to",
                                         "gguf-q4_k", "--quality", "good", "--quiet"};
  const std::vector<std::string> calibrates{"calibrate", few, "--text", "self", "-o", path("s.safetensors"), "--quiet"};
  for (const auto& command : {quantizes, exports, calibrates}) {
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.begin(), command.begin(), command.end());
      return more;
    };
    run(with({"--samples", "2"}), 0, two);
    run(with({"--samples", "2", "--length", "97", "--overwrite"}), 2, "97 tokens go beyond the model's 96 positions");
    if (command == calibrates) continue;
    run(with({"--dry-run", "--overwrite"}), 0, all);
    run(with({"--dry-run", "--overwrite", "--length", "97"}), 2, "97 tokens go beyond the model's 96 positions");
  }
}

/// Targets for quantized inputs that few tokens asked for are still this model's, in another program's format too; a folder
/// that says nothing of them is held to what rounding may do.
TEST_F(Quality, VerifyAllowsWhatTargetsMayMove) {
  W4Q_NEEDS_SHARED_DATA();
  const std::string base = shared_data() / "families/qwen3_5-moe", key = "targets_for_quantized_inputs";
  const auto verify = [&](const std::string& name) {
    return run_w4q({"verify", path(name), "--base", base, "--quiet"});
  };
  const auto config_of = [&](const std::string& name) { return io::read_json(path(name) + "/config.json"); };
  ASSERT_EQ(run_w4q({"quantize", base, "-o", path("few"), "--k", "2", "--quality", "max", "--samples", "32", "--length",
                     "64", "--device", "cpu", "--quiet"})
                .status,
            0);
  EXPECT_EQ(config_of("few")[key], true);
  const auto held = verify("few");
  EXPECT_EQ(held.status, 0) << held.out;
  ASSERT_EQ(quantize("other", {"--scheme", "int4-g32-bf16-asym", "--asym", "--feedback", "--to", "compressed-tensors",
                               "--calib-ids", own("selfgen.ids.u16"), "--samples", "2", "--length", "64"})
                .status,
            0);
  EXPECT_EQ(config_of("other")[key], true);
  std::filesystem::remove(path("few") + "/w4q_digests.json");
  const auto write = [&](const io::Json& value) {
    io::Json config = config_of("few");
    config[key] = value;
    std::ofstream(path("few") + "/config.json") << config.dump();
  };
  write(false);
  const auto silent = verify("few");
  EXPECT_EQ(silent.status, 1) << silent.out;
  EXPECT_NE(silent.out.find("0.5 to 1.6 expected"), std::string::npos) << silent.out;
  write("yes");
  const auto wrong = verify("few");
  EXPECT_NE((wrong.out + wrong.err).find("neither true nor false"), std::string::npos) << wrong.out << wrong.err;
}

TEST_F(Quality, ALineNamesSchemeAndSteps) {
  const auto plan = quantize("q", {"--recipe", "kbit3: awq → rotate128 → lloyd+search → feedback", "--calib-ids",
                                   own("selfgen.ids.u16"), "--samples", "8", "--length", "128", "--dry-run", "--json"});
  ASSERT_EQ(plan.status, 0) << plan.err;
  EXPECT_EQ(plan.json()["steps"][0], "awq scales");
  EXPECT_EQ(plan.json()["steps"][1], "inputs rotated, hadamard128-s0");
  EXPECT_EQ(plan.json()["tensors"][2]["scheme"], "kbit3-b32-e4m4");
  EXPECT_EQ(quantize("q", {"--recipe", "kbit3: polish"}).status, 2);
}

/// By the flag, by a recipe's step, in another program's format: verified and compared with the model as it was.
TEST_F(Quality, RotationsAreFoldedIntoTheModel) {
  ASSERT_EQ(quantize("plain", {"--k", "4"}).status, 0);
  const auto folded = quantize("folded", {"--k", "4", "--fold-rotations", "--rotation-seed", "7"});
  ASSERT_EQ(folded.status, 0) << folded.err;
  for (const char* part : {"rotations folded, seed 7", "down_proj's input", "the head becomes a tensor of its own"}) {
    EXPECT_NE(folded.out.find(part), std::string::npos) << folded.out;
  }
  const double plain = divergence("plain");
  EXPECT_LT(divergence("folded"), 1.5 * plain);  // verifies the structure too
  const std::vector<std::string> both{"compare", path("plain"), path("folded"), "--base", bundled_model(), "--json"};
  const auto compared = run_w4q(both);
  ASSERT_EQ(compared.status, 0) << compared.err;
  EXPECT_NEAR(compared.json()["b"]["sqnr_db"].get<double>(), compared.json()["a"]["sqnr_db"].get<double>(), 1);

  ASSERT_EQ(run_w4q({"calibrate", bundled_model(), "--ids", own("selfgen.ids.u16"), "--samples", "8", "--length", "128",
                     "--fold-rotations", "-o", path("s.safetensors"), "--quiet"})
                .status,
            0);
  auto wrong = both;
  wrong.insert(wrong.end(), {"--stats", path("s.safetensors")});
  EXPECT_EQ(run_w4q(wrong).status, 2);
  const auto recipe = quantize(
      "recipe", {"--recipe", "int4-g128-f16: fold → feedback", "--stats", path("s.safetensors"), "--to", "gptq-v2"});
  ASSERT_EQ(recipe.status, 0) << recipe.err;
  EXPECT_LT(divergence("recipe"), 1.5 * plain);
  const auto twice = run_w4q({"quantize", path("recipe"), "-o", path("no"), "--fold-rotations"});
  EXPECT_NE(twice.status, 0);
}

TEST_F(Quality, MistakesAreExplained) {
  const auto expect = [](const ProgramResult& result, int status, std::initializer_list<const char*> parts) {
    EXPECT_EQ(result.status, status) << result.err;
    for (const char* part : parts) EXPECT_NE(result.err.find(part), std::string::npos) << part << "\n" << result.err;
  };
  expect(quantize("q", {"--feedback"}), 2, {"feedback", "--calib"});
  expect(quantize("q", {"--quality", "good", "--scales", "search"}), 2, {"--quality", "--scales"});
  expect(quantize("q", {"--calib", own("selfgen.txt")}), 2, {"calibration", "--scales search"});
  expect(quantize("q", {"--scales", "search", "--bnb-compatible"}), 2, {"--bnb-compatible"});
  expect(quantize("q", {"--method", "rtn", "--scales", "search"}), 2, {"rtn", "--scales"});
  expect(quantize("q", {"--scales", "search", "--no-clip"}), 2, {"--no-clip", "--awq"});
  expect(quantize("q", {"--feedback", "--damping", "-1", "--calib", own("selfgen.txt")}), 2, {"--damping"});
  expect(quantize("q", {"--sweeps", "--calib", own("selfgen.txt")}), 2, {"sweeps", "--feedback"});
  expect(quantize("q", {"--target-bpw", "3.5"}), 2, {"calibration", "--stats"});
  expect(quantize("q", {"--target-bpw", "3.5", "--k", "3"}), 2, {"--target-bpw", "--k"});
  expect(quantize("q", {"--save-recipe", path("r")}), 2, {"--save-recipe", "--target-bpw"});
  EXPECT_FALSE(std::filesystem::exists(path("q")));
}

}  // namespace
}  // namespace w4q::test
