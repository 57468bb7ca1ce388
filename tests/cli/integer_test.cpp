// Integer schemes as a user meets them: quantize → inspect → repack → verify, on the bundled model.
#include "program.h"

namespace w4q::test {
namespace {

class Integer : public OnBundledModel {
 protected:
  double perplexity(const std::string& name) const {
    const auto verify = run_w4q({"verify", path(name), "--ppl", bundled_model() + "/own/selfgen.txt", "--base",
                                 bundled_model(), "--windows", "8", "--json", "--quiet"});
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
