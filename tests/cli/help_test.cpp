#include <algorithm>

#include "program.h"

namespace w4q::test {
namespace {

TEST(Help, NamesEverySubcommandAndExitsZero) {
  const auto result = run_w4q({"--help"});
  EXPECT_EQ(result.status, 0);
  for (const char* name : {"quantize", "repack", "verify", "inspect", "clean", "list", "tokenize", "generate"}) {
    EXPECT_NE(result.out.find(name), std::string::npos) << name;
    EXPECT_EQ(run_w4q({name, "--help"}).status, 0) << name;
  }
}

TEST(Help, TakesLessThanTwentyMilliseconds) {
  double best = 1;
  for (int repeat = 0; repeat < 10; ++repeat) best = std::min(best, run_w4q({"--help"}).seconds);
  EXPECT_LT(best, 0.020);
}

TEST(Usage, MistakesExitWithTwoAndSayWhat) {
  const auto nothing = run_w4q({});
  EXPECT_EQ(nothing.status, 2);
  EXPECT_NE(nothing.err.find("subcommand"), std::string::npos) << nothing.err;
  const auto unknown = run_w4q({"quantise"});
  EXPECT_EQ(unknown.status, 2);
  const auto bits = run_w4q({"quantize", bundled_model(), "-o", "never", "--k", "9"});
  EXPECT_EQ(bits.status, 2);
  EXPECT_NE(bits.err.find("--k"), std::string::npos) << bits.err;
  const auto output = run_w4q({"quantize", bundled_model()});
  EXPECT_EQ(output.status, 2);
  EXPECT_NE(output.err.find("-o"), std::string::npos) << output.err;
}

TEST(List, PrintsTheRegistriesAsTextAndJson) {
  const auto text = run_w4q({"list"});
  EXPECT_EQ(text.status, 0);
  for (const char* name : {"kbit3-b32-e4m4", "kbit5-b32-f16", "int4-g128-f16-asym", "lut4-b64-nested", "rotated4-d128",
                           "and any int{", "kbit-tile", "marlin", "canonical", "nf-quantile"}) {
    EXPECT_NE(text.out.find(name), std::string::npos) << name;
  }
  const auto json = run_w4q({"list", "--json"}).json();
  EXPECT_GT(json["schemes"].size(), 8u);
  EXPECT_EQ(json["scheme_forms"].size(), 3u);
  EXPECT_GE(json["layouts"].size(), 2u);
  EXPECT_EQ(json["methods"][0]["name"], "kbit");
}

TEST(List, SaysWhatALayoutIsFor) {
  const auto text = run_w4q({"list", "--layouts"});
  EXPECT_EQ(text.status, 0);
  EXPECT_NE(text.out.find("tensor-core register order"), std::string::npos) << text.out;
  EXPECT_LT(text.out.find("kbit-fragment"), text.out.find("kbit-tile")) << "the first fitting one is taken";
  EXPECT_EQ(text.out.find("nf-quantile"), std::string::npos);
  const auto json = run_w4q({"list", "--layouts", "--json"}).json();
  EXPECT_EQ(json.size(), 1u);
  for (const auto& layout : json["layouts"]) EXPECT_FALSE(layout["reason"].get<std::string>().empty()) << layout;
}

}  // namespace
}  // namespace w4q::test
