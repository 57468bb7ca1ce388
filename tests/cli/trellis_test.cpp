// Trellis schemes as a user meets them, on the bundled model.
#include "io/files.h"
#include "program.h"

namespace w4q::test {
namespace {

class TrellisProgram : public OnBundledModel {
 protected:
  io::Json verified(const std::string& name, std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments{"verify", path(name), "--base", bundled_model(), "--quiet", "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto verify = run_w4q(arguments);
    EXPECT_EQ(verify.status, 0) << verify.out << verify.err;
    return verify.json();
  }
};

TEST_F(TrellisProgram, QuantizesVerifiesAndComesBackTo16Bits) {
  const auto made = quantize("q", {"--scheme", "trellis3-w8", "--rotate", "128"});
  ASSERT_EQ(made.status, 0) << made.err;
  const double sqnr = verified("q")["weights"]["sqnr_db"];
  EXPECT_NEAR(sqnr, 16.3, 0.2);  // dB of normal weights (docs/trellis.md)
  const auto planes = run_w4q({"inspect", path("q")});
  EXPECT_NE(planes.out.find("trellis3-w8 in canonical, input hadamard128-s0"), std::string::npos) << planes.out;
  EXPECT_EQ(run_w4q({"inspect", path("q"), "--tensor", "model.layers.0.mlp.up_proj"}).status, 0);
  const auto out = run_w4q({"repack", path("q"), "-o", path("hf"), "--to", "hf16", "--quiet"});
  ASSERT_EQ(out.status, 0) << out.err;
  EXPECT_EQ(run_w4q({"verify", path("hf"), "--quiet"}).status, 0);
}

TEST_F(TrellisProgram, SeveralPassesHeadEmbeddingsAndRecipes) {
  const auto made = quantize("two", {"--scheme", "trellis2-w8+trellis2-w8", "--rotate", "64", "--embedding-scheme",
                                     "trellis4-w8", "--lm-head"});
  ASSERT_EQ(made.status, 0) << made.err;
  EXPECT_GT(verified("two")["weights"]["sqnr_db"], 20);
  EXPECT_LT(verified("two", {"--no-residual", "--no-limits"})["weights"]["sqnr_db"], 14);
  ASSERT_EQ(quantize("recipe", {"--recipe", "trellis2-w8: rotate64"}).status, 0);
}

TEST_F(TrellisProgram, WhatItHasNotIsRefused) {
  const auto refused = [&](std::vector<std::string> more, const std::string& part) {
    const auto result = quantize("never", more);
    EXPECT_EQ(result.status, 2) << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
  };
  refused({"--scheme", "trellis3", "--codebook", "nf"}, "trellis has no codebook");
  refused({"--scheme", "trellis3", "--scales", "search"}, "searched scales");
  refused({"--scheme", "trellis3", "--sweeps"}, "goes on from what \"feedback\" made");
  EXPECT_FALSE(std::filesystem::exists(path("never")));
}

TEST_F(TrellisProgram, GoesToAGpuAndBack) {
  ASSERT_EQ(quantize("q", {"--scheme", "trellis2-w8"}).status, 0);
  const auto fragment = run_w4q({"repack", path("q"), "-o", path("sm89"), "--target", "sm89"});
  ASSERT_EQ(fragment.status, 0) << fragment.err;
  verified("sm89");
  ASSERT_EQ(run_w4q({"repack", path("sm89"), "-o", path("back"), "--layout", "canonical"}).status, 0);
  EXPECT_EQ(io::read_file(path("back") + "/model.safetensors"), io::read_file(path("q") + "/model.safetensors"));
}

}  // namespace
}  // namespace w4q::test
