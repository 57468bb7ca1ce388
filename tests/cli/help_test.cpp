#include <algorithm>
#include <regex>
#include <set>
#include <sstream>

#include "core/terminal.h"
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

/// The commands that `w4q --help` lists.
std::vector<std::string> commands() {
  std::istringstream text(run_w4q({"--help"}).out);
  std::vector<std::string> result;
  bool here = false;
  for (std::string line; std::getline(text, line);) {
    if (here && line.empty()) break;
    if (here) result.push_back(line.substr(2, line.find(' ', 2) - 2));
    here = here || line == "Commands:";
  }
  return result;
}

/// The words of `text` that begin with two dashes, without what stands behind a name.
std::set<std::string> options_in(const std::string& text) {
  static const std::regex option("--[a-z][a-z0-9-]*");
  return {std::sregex_token_iterator(text.begin(), text.end(), option), std::sregex_token_iterator()};
}

TEST(Help, EveryCommandHasExamplesWhoseOptionsItHas) {
  const auto all = commands();
  ASSERT_GE(all.size(), 12u);
  for (const auto& name : all) {
    const std::string text = run_w4q({name, "--help-all"}).out;
    const size_t examples = text.find("\nExamples:\n");
    ASSERT_NE(examples, std::string::npos) << name;
    EXPECT_EQ(text.find("  w4q " + name, examples), examples + 11) << name;
    const auto known = options_in(text.substr(0, examples));
    std::istringstream lines(text.substr(examples));
    for (std::string line; std::getline(lines, line);) {
      if (!line.starts_with("  w4q ")) continue;
      for (const auto& used : options_in(line)) EXPECT_TRUE(known.contains(used)) << line;
    }
  }
}

TEST(Help, IsBasicFirstAndWholeWhenAskedFor) {
  const std::string basic = run_w4q({"quantize", "--help"}).out, all = run_w4q({"quantize", "--help-all"}).out;
  EXPECT_LT(basic.find("--quality"), basic.find("--k")) << "presets lead";
  EXPECT_EQ(basic.find("--damping"), std::string::npos);
  EXPECT_NE(basic.find("More with --help-all: "), std::string::npos);
  EXPECT_NE(all.find("--damping"), std::string::npos);
  EXPECT_EQ(all.find("More with --help-all: "), std::string::npos);
  const auto of_all = options_in(all);
  for (const auto& option : options_in(basic)) EXPECT_TRUE(of_all.contains(option)) << option;
}

TEST(Help, FitsInAHundredColumns) {
  for (const auto& name : commands()) {
    std::istringstream text(run_w4q({name, "--help-all"}).out);
    for (std::string line; std::getline(text, line);) EXPECT_LE(display_width(line), 100u) << line;
  }
}

TEST(Help, TakesLessThanTwentyMilliseconds) {
  double best = 1;  // of so many that one of them has a core of a busy machine to itself
  for (int repeat = 0; repeat < 200 && best >= 0.020; ++repeat) best = std::min(best, run_w4q({"--help"}).seconds);
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
  EXPECT_EQ(json["scheme_forms"].size(), 6u);
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
  EXPECT_EQ(json.size(), 3u) << "schema, version, layouts";
  for (const auto& layout : json["layouts"]) EXPECT_FALSE(layout["reason"].get<std::string>().empty()) << layout;
}

}  // namespace
}  // namespace w4q::test
