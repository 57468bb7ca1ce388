// Rotated schemes and residual passes as a user meets them, on the bundled model.
#include "program.h"

namespace w4q::test {
namespace {

class RotatedProgram : public OnBundledModel {
 protected:
  double sqnr(const std::string& name, std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments{"verify", path(name), "--base", bundled_model(), "--quiet", "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto verify = run_w4q(arguments);
    EXPECT_EQ(verify.status, 0) << verify.out << verify.err;
    return verify.json()["weights"]["sqnr_db"];
  }
};

TEST_F(RotatedProgram, AFolderCanBeShippedWithoutItsResidual) {
  const auto made = quantize("q", {"--method", "rotated", "--residual-bits", "2", "--residual-rotation", "own"});
  ASSERT_EQ(made.status, 0) << made.err;
  const double both = sqnr("q"), base = sqnr("q", {"--no-residual"});
  EXPECT_GT(both, base + 8);
  const auto generate = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments{"generate", path("q"), "--prompt", "The", "--max-tokens", "4", "--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto result = run_w4q(arguments);
    EXPECT_EQ(result.status, 0) << result.err;
    return result.json()["ids"];
  };
  const auto alone = generate({"--no-residual"});
  generate({});
  std::filesystem::remove_all(path("q") + "/residual");
  EXPECT_EQ(sqnr("q"), base);
  EXPECT_EQ(generate({}), alone);
}

TEST_F(RotatedProgram, TheSchemeNamesTheMethod) {
  const auto by_name = quantize("a", {"--scheme", "rotated3-row+rotated2-d64-e4m4"});
  ASSERT_EQ(by_name.status, 0) << by_name.err;
  const auto planes = run_w4q({"inspect", path("a")});
  EXPECT_NE(planes.out.find("rotated2-d64-e4m4 in canonical, input hadamard-row-s42"), std::string::npos) << planes.out;
  ASSERT_EQ(quantize("b", {"--scheme", "rotated4-d128", "--embedding-scheme", "int8-row-f16"}).status, 0);
  const auto table = run_w4q({"inspect", path("b"), "--tensor", "model.embed_tokens"});
  EXPECT_NE(table.out.find("int8-row-f16"), std::string::npos) << table.out << table.err;
  ASSERT_EQ(quantize("c", {"--recipe", "rotated2-d32+rotated2-d32+rotated2-d32: none"}).status, 0);
  const std::vector<std::string> thrice{"--method",        "rotated", "--group",         "32", "--bits", "2",
                                        "--residual-bits", "2",       "--residual-bits", "2"};
  ASSERT_EQ(quantize("d", thrice).status, 0);
  EXPECT_EQ(folder_digest(path("c")), folder_digest(path("d")));
}

TEST_F(RotatedProgram, TurboQuantAndBack) {
  ASSERT_EQ(quantize("q", {"--scheme", "rotated4-d128-f32+rotated2-d128-f32"}).status, 0);
  const auto out = run_w4q({"repack", path("q"), "-o", path("tq"), "--to", "turboquant", "--quiet"});
  ASSERT_EQ(out.status, 0) << out.err;
  ASSERT_EQ(run_w4q({"repack", path("tq"), "-o", path("back"), "--to", "w4q", "--quiet"}).status, 0);
  EXPECT_EQ(sqnr("back"), sqnr("q"));
}

TEST_F(RotatedProgram, OptionsThatMeanNothingAreRefused) {
  const auto refused = [&](std::vector<std::string> more, const std::string& part) {
    const auto result = quantize("never", more);
    EXPECT_EQ(result.status, 2) << result.err;
    EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
  };
  refused({"--residual-bits", "2"}, "--residual-bits means nothing to --method kbit");
  refused({"--method", "rotated", "--asymmetric"}, "--asymmetric means nothing to --method rotated");
  refused({"--method", "rotated", "--bits", "6"}, "2 to 5");
  refused({"--calibrate-norms"}, "--calibrate-norms means nothing to --method kbit");
  refused({"--method", "rotated", "--calibrate-norms"}, "need calibration text");
  refused({"--scheme", "rotated4-d128+rotated2-d128", "--scales", "search", "--calib", "x", "--target-bpw", "4"},
          "bits are chosen for single passes");
}

}  // namespace
}  // namespace w4q::test
