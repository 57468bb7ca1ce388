// Integer schemes as a user meets them: quantize → inspect → repack → verify, on the bundled model.
#include "program.h"

namespace w4q::test {
namespace {

class Integer : public OnBundledModel {
 protected:
  double perplexity(const std::string& name) const {
    const auto verify = run_w4q({"verify", path(name), "--ppl", bundled_model() + "/own/selfgen.txt", "--base",
                                 bundled_model(), "--windows", "8", "--ctx", "256", "--json", "--quiet"});
    EXPECT_EQ(verify.status, 0) << verify.out << verify.err;
    return verify.json()["perplexity"]["perplexity"];
  }
};

/// The order that more bits, smaller groups, zero points and a searched range must give.
TEST_F(Integer, QualityFollowsTheScheme) {
  const auto sqnr = [&](const std::string& name, std::vector<std::string> more) {
    more.insert(more.begin(), {"--method", "rtn"});
    const auto result = quantize(name, more);
    EXPECT_EQ(result.status, 0) << result.err;
    return result.json()["sqnr_db"].get<double>();
  };
  const double plain = sqnr("plain", {"--bits", "4", "--group", "128"});
  EXPECT_GT(sqnr("asym", {"--bits", "4", "--group", "128", "--asymmetric"}), plain);
  EXPECT_GT(sqnr("mse", {"--scheme", "int4-g128-f16", "--clip", "mse"}), plain);
  EXPECT_GT(sqnr("small", {"--bits", "4", "--group", "32"}), plain);
  EXPECT_LT(sqnr("row", {"--bits", "4", "--group", "row", "--scale-type", "bf16"}), plain);
  EXPECT_GT(sqnr("wide", {"--bits", "8", "--group", "128"}), plain + 20);
  EXPECT_LT(perplexity("wide"), perplexity("asym"));
  EXPECT_LT(perplexity("asym"), perplexity("row"));
}

TEST_F(Integer, EveryLayoutHoldsTheSameWeights) {
  ASSERT_EQ(quantize("q", {"--method", "rtn", "--group", "32"}).status, 0);
  for (const std::string layout : {"marlin", "interleaved", "awq", "gptq"}) {
    const auto there = run_w4q({"repack", path("q"), "-o", path(layout), "--layout", layout, "--json", "--quiet"});
    ASSERT_EQ(there.status, 0) << there.err;
    EXPECT_EQ(there.json()["round_trips_proven"], 28);
    EXPECT_EQ(run_w4q({"verify", path(layout), "--base", bundled_model(), "--quiet"}).status, 0) << layout;
    ASSERT_EQ(
        run_w4q({"repack", path(layout), "-o", path(layout + "-back"), "--layout", "canonical", "--quiet"}).status, 0);
    EXPECT_EQ(folder_digest(path("q")), folder_digest(path(layout + "-back"))) << layout;
  }
  const auto target = run_w4q({"repack", path("q"), "--target", "sm90", "--dry-run", "--json", "--quiet"});
  EXPECT_EQ(target.json()["tensors"][0]["layout"], "marlin");
}

TEST_F(Integer, InspectShowsScalesAndZeroPoints) {
  ASSERT_EQ(quantize("q", {"--method", "rtn", "--asymmetric"}).status, 0);
  const auto text = run_w4q({"inspect", path("q"), "--tensor", "model.layers.0.mlp.up_proj"});
  EXPECT_EQ(text.status, 0);
  for (const char* part :
       {"4.188 bits per weight", "int4-g128-f16-asym in canonical", "zero points: least", "entropy"}) {
    EXPECT_NE(text.out.find(part), std::string::npos) << part << "\n" << text.out;
  }
}

/// Rounding a prompt's activations to int8 costs something, and less than rounding weights to 4 bits; verify says both.
TEST_F(Integer, ActivationsMayBeInt8) {
  ASSERT_EQ(quantize("q", {"--method", "rtn"}).status, 0);
  const std::vector<std::string> text = {
      "--ppl", bundled_model() + "/own/selfgen.txt", "--windows", "4", "--ctx", "128", "--quiet", "--device", "cpu"};
  const auto verify = [&](const std::string& folder, std::vector<std::string> more) {
    more.insert(more.begin(), {"verify", folder});
    more.insert(more.end(), text.begin(), text.end());
    return run_w4q(more);
  };
  const auto result = verify(path("q"), {"--activations", "int8", "--base", bundled_model(), "--json"});
  ASSERT_EQ(result.status, 0) << result.err;
  const io::Json to_base = result.json()["perplexity"], to_16_bit = result.json()["int8_activations"];
  EXPECT_EQ(to_base["perplexity"], to_16_bit["perplexity"]);
  const double kl = to_16_bit["base"]["kl"];
  EXPECT_GT(kl, 1e-6);
  EXPECT_LT(kl, to_base["base"]["kl"].get<double>());
  EXPECT_NE(verify(path("q"), {"--activations", "int8"}).out.find("16-bit ones"), std::string::npos);

  const auto refused = verify(bundled_model(), {"--activations", "int8"});
  EXPECT_EQ(refused.status, 3);
  EXPECT_NE(refused.err.find("int8 activations"), std::string::npos) << refused.err;
  const auto alone = run_w4q({"verify", path("q"), "--activations", "int8"});
  EXPECT_EQ(alone.status, 2);
  EXPECT_EQ(run_w4q({"verify", path("q"), "--activations", "int4"}).status, 2);
  const auto generate = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"generate", path("q"), "--device", "cpu", "--max-tokens", "8", "--json", "--prompt",
                               "the quick brown fox jumps over the lazy dog and then it sleeps in the sun"});
    return run_w4q(more);
  };
  EXPECT_EQ(generate({"--activations", "int8"}).status, 0);
}

TEST_F(Integer, OptionsThatMeanNothingAreRefused) {
  const auto refused = [&](std::vector<std::string> more, const std::string& part) {
    const auto result = quantize("never", more);
    EXPECT_EQ(result.status, 2) << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
  };
  refused({"--group", "64"}, "--group means nothing to --method kbit");
  refused({"--clip", "mse"}, "--clip means nothing to --method kbit");
  refused({"--method", "rtn", "--absmax", "f16"}, "--absmax means nothing to --method rtn");
  refused({"--bits", "7"}, "2 to 5");
  refused({"--method", "rtn", "--bnb-compatible"}, "rtn has no bitsandbytes");
  refused({"--method", "rtn", "--scheme", "kbit3-b32-e4m4"}, "rtn cannot quantize to kbit3-b32-e4m4");
  refused({"--method", "rtn", "--scheme", "int4-g128-f16", "--bits", "3"}, "excludes");
}

}  // namespace
}  // namespace w4q::test
