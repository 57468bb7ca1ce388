// The ladder climbed as a program climbs it: order, stops, limits and refusals.
#include "verify/ladder.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "made_checkpoint.h"
#include "packed_model.h"

namespace w4q::verify {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;

const std::filesystem::path ids = test::bundled_model() / "own" / "selfgen.ids.u16";

std::vector<std::string> names(const Findings& findings) {
  std::vector<std::string> result;
  for (const Check& check : findings.checks.checks()) result.push_back(check.name);
  return result;
}

Findings climb_for(CheckOptions options) {
  CheckContext context(std::move(options));
  return climb(context);
}

class Ladder : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { test::quantized_model(folder(), 3); }
  static const test::TemporaryFolder& folder() {
    static const test::TemporaryFolder folder;
    return folder;
  }
  static std::filesystem::path packed() { return folder() / "q"; }

  /// A copy with changes.
  static std::filesystem::path damaged(const test::Change& change) {
    const auto copy = folder() / "damaged";
    std::filesystem::remove_all(copy);
    std::filesystem::copy(packed(), copy, std::filesystem::copy_options::recursive);
    test::rewrite(copy, change);
    return copy;
  }
};

TEST_F(Ladder, RowsAreComplete) {
  std::set<std::string_view> seen;
  for (const CheckRow& row : ladder()) {
    EXPECT_TRUE(seen.insert(row.name).second) << row.name;
    EXPECT_FALSE(row.help.empty()) << row.name;
    EXPECT_NE(row.run, nullptr) << row.name;
    EXPECT_FALSE(row.needs.gpu && row.option.empty()) << row.name << " would need a GPU unasked";
    EXPECT_TRUE(row.option.empty() || (row.option.starts_with("--") && seen.insert(row.option).second)) << row.option;
    for (const Limit& limit : row.limits) {
      EXPECT_TRUE(limit.option.starts_with("--") && seen.insert(limit.option).second) << limit.option;
      EXPECT_FALSE(limit.help.empty()) << limit.option;
    }
  }
}

TEST_F(Ladder, ASoundModelIsVerified) {
  const Findings plain = climb_for(test::check_options(test::bundled_model()));
  EXPECT_THAT(names(plain), ElementsAre("structure", "tokenizer", "finite"));
  EXPECT_TRUE(plain.json["passed"]);
  const Findings packed = climb_for(test::check_options(this->packed(), test::bundled_model()));
  EXPECT_THAT(names(packed),
              ElementsAre("digests", "base", "structure", "tokenizer", "codes", "finite", "statistics", "weights"));
  EXPECT_THAT(packed.text,
              EndsWith("verified: digests, base, structure, tokenizer, codes, finite, statistics, weights, decoder; "
                       "not checked: perplexity (no --ppl)\n"));
  EXPECT_EQ(packed.json["weights"]["tensors"].size(), 28u);
  EXPECT_EQ(packed.json["checks"].size(), 8u);
}

/// Programs that write tied models store the head, too, which those that read them leave out.
TEST_F(Ladder, AStoredHeadIsTheEmbeddings) {
  auto made = test::MadeCheckpoint::of(test::bundled_model());
  made.tensors["lm_head.weight"] = made.tensors.at("model.embed_tokens.weight");
  const auto path = folder() / "headed";
  made.write(path);
  const Findings sound = climb_for(test::check_options(path));
  EXPECT_TRUE(sound.checks.passed()) << sound.text;
  pipeline::QuantizeRequest request;
  request.model = path, request.output = folder() / "headed-q";
  request.scheme = formats::parse_scheme("kbit4-b32-e4m4");
  pipeline::quantize_model(request);
  const Findings packed = climb_for(test::check_options(request.output, path));
  EXPECT_TRUE(packed.checks.passed()) << packed.text;
  made.values<uint16_t>("lm_head.weight")[7] ^= 0x8000u;
  made.write(path);
  EXPECT_THAT(climb_for(test::check_options(path)).text, HasSubstr("lm_head.weight differs from the embeddings"));
}

TEST_F(Ladder, ABrokenStructureEndsTheClimb) {
  const auto path = damaged([](auto& tensor, auto&) { return tensor.name != "model.norm.weight"; });
  const Findings findings = climb_for(test::check_options(path, test::bundled_model(), ids));
  EXPECT_THAT(names(findings), ElementsAre("digests", "base", "structure"));
  EXPECT_THAT(findings.text, EndsWith("verification FAILED\n"));
  EXPECT_FALSE(findings.json["passed"]);
  EXPECT_FALSE(findings.json.contains("weights"));
}

TEST_F(Ladder, BrokenCodesEndTheClimbBehindFinite) {
  const auto path = damaged([](auto& tensor, auto& bytes) {
    if (tensor.name == "model.layers.2.mlp.gate_proj.0.codebook") std::fill(bytes.begin(), bytes.end(), std::byte{0});
    return true;
  });
  const Findings findings = climb_for(test::check_options(path, test::bundled_model(), ids));
  EXPECT_THAT(names(findings), ElementsAre("digests", "base", "structure", "tokenizer", "codes", "finite"));
  EXPECT_FALSE(findings.checks.passed());
}

/// The decoder that the quantizer measures with, too: only the definition can tell.
TEST_F(Ladder, AWrongDecoderIsFound) {
  CheckOptions options = test::check_options(packed(), test::bundled_model());
  options.decode_rows = [](const kernels::LinearWeight& weight, int64_t begin, int64_t end, MatrixView<float> out) {
    kernels::decode_rows(weight, begin, end, out);
    if (weight.name != "model.layers.1.mlp.up_proj" || begin > 37 || end <= 37) return;
    float& value = out.row(37 - begin)[5];
    value = std::nextafter(value, 1.0f);
  };
  const Findings findings = climb_for(options);
  EXPECT_THAT(names(findings), ElementsAre("digests", "base", "structure", "tokenizer", "codes", "finite", "decoder"));
  EXPECT_THAT(findings.text, HasSubstr("model.layers.1.mlp.up_proj: row 37, column 5 decodes fast to"));
  EXPECT_FALSE(findings.checks.passed());
}

TEST_F(Ladder, TheDecoderIsHeldAgainstTheDefinitionRowByRow) {
  const Findings findings = climb_for(test::check_options(packed()));
  const io::Json& schemes = findings.json["decoder"];
  ASSERT_EQ(schemes.size(), 1u);
  EXPECT_EQ(schemes[0]["scheme"], "kbit3-b32-e4m4");
  EXPECT_EQ(schemes[0]["linears"], 28);
  EXPECT_EQ(schemes[0]["rows"], schemes[0]["of"]);
}

TEST_F(Ladder, LimitsAreChecksOfTheirOwn) {
  CheckOptions options = test::check_options(packed(), test::bundled_model(), ids);
  options.windows.context = 64;
  options.windows.max_windows = 2;
  options.limits = {{"--min-sqnr", 5}, {"--max-kl", 1e-6}, {"--max-ppl-ratio", 5}};
  const Findings findings = climb_for(options);
  EXPECT_THAT(names(findings), ElementsAre("digests", "base", "structure", "tokenizer", "codes", "finite", "statistics",
                                           "weights", "SQNR", "perplexity", "perplexity ratio", "KL"));
  for (const Check& check : findings.checks.checks()) EXPECT_EQ(check.passed, check.name != "KL") << check.name;
  EXPECT_TRUE(findings.json["perplexity"].contains("base"));
}

TEST_F(Ladder, AReferenceIsAsked) {
  const auto file = test::bundled_model() / "own" / "reference.safetensors";
  CheckOptions options = test::check_options(test::bundled_model());
  options.asked = {{"--reference", file.string()}};
  options.limits = {{"--max-diff", 1e-4}};
  EXPECT_TRUE(climb_for(options).checks.passed());
  options.limits = {{"--max-diff", 1e-12}};
  EXPECT_FALSE(climb_for(options).checks.passed());
}

/// What was opened stays open: nothing is looked for on disk again.
TEST_F(Ladder, EveryFolderIsOpenedOnce) {
  const auto candidate = damaged([](auto&, auto&) { return true; });
  const auto base = folder() / "base";
  std::filesystem::copy(test::bundled_model(), base, std::filesystem::copy_options::recursive);
  CheckContext context(test::check_options(candidate, base, ids));
  EXPECT_FALSE(context.foreign());
  EXPECT_EQ(context.candidate().folder.quantization.linears.size(), 28u);
  EXPECT_FALSE(context.base().folder.tensors.tensors().empty());
  std::filesystem::remove_all(candidate);
  std::filesystem::remove_all(base);
  EXPECT_EQ(context.model().layers().size(), 4u);
  EXPECT_EQ(context.base_model().layers().size(), 4u);
}

TEST_F(Ladder, OptionsWithoutWhatTheyNeedAreRefused) {
  const auto refused = [&](CheckOptions options, std::string_view message, std::string_view hint) {
    test::expect_error(ErrorCode::bad_argument, {message, hint}, [&] { check_needs(options); });
  };
  CheckOptions options = test::check_options(packed());
  options.limits = {{"--max-kl", 1}};
  refused(options, "--max-kl compares with a base", "--ppl text.txt --base MODEL");
  options.limits = {{"--min-sqnr", 1}};
  refused(options, "--min-sqnr compares with a base", "--base MODEL");
  options.limits = {{"--max-diff", 1}};
  refused(options, "--max-diff belongs to --reference", "--reference ref.safetensors");
  options.limits.clear();
  options.asked = {{"--kv-compare", ""}};
  refused(options, "--kv-compare needs a text", "--ppl text.txt, --chat chats.jsonl, or --ids file.u16");
  options.ids = ids;
  EXPECT_NO_THROW(check_needs(options));
  EXPECT_TRUE(needs_gpu(options));
  options.device = "cpu";
  test::expect_error(ErrorCode::bad_argument, {"measure a GPU", "--kv-compare"}, [&] { open_gpu(options); });
}

}  // namespace
}  // namespace w4q::verify
