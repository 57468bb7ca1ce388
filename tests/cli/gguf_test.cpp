// GGUF files on the command line: into one, looked at, and back.
#include <fstream>

#include "io/checkpoint.h"
#include "io/files.h"
#include "program.h"

namespace w4q::test {
namespace {

class GgufCommands : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  ProgramResult repack(const std::string& from, const std::string& to_name, const std::string& to,
                       std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments{"repack", from, "-o", path(to_name), "--to", to, "--quiet"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_w4q(arguments);
  }

  TemporaryFolder folder_;
};

TEST_F(GgufCommands, QuantizeMakesThemInOneStep) {
  ASSERT_EQ(repack(bundled_model(), "plain.gguf", "gguf-q4_k_m").status, 0);
  const auto quantize = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments{"quantize",    bundled_model(), "-o",  path("m.gguf"),
                                       "--overwrite", "--quiet",       "--to"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_w4q(arguments);
  };
  ASSERT_EQ(quantize({"gguf-q4_k_m"}).status, 0);
  EXPECT_EQ(io::read_file(path("m.gguf")), io::read_file(path("plain.gguf"))) << "nothing is known of the inputs";
  const std::string ids = bundled_model() + "/own/selfgen.ids.u16";
  const auto calibrated = quantize({"gguf-q3_k_m", "--calib-ids", ids, "--samples", "2", "--length", "64", "--json"});
  ASSERT_EQ(calibrated.status, 0) << calibrated.err;
  EXPECT_EQ(calibrated.json()["tensors"].size(), 38u);
  const auto planned = quantize({"gguf-iq4_xs", "--dry-run"});
  EXPECT_EQ(planned.status, 0) << planned.err;
  for (const std::vector<std::string>& wrong :
       std::vector<std::vector<std::string>>{{"gguf-q4_k", "--bits", "4"},
                                             {"gguf-q4_k", "--lm-head"},
                                             {"gguf-q4_k", "--samples", "3"},
                                             {"gguf"},
                                             {"gguf-q4_k", "--target-size", "2MB"},
                                             {"gguf-q4_k", "--calib-ids", ids, "--stats", "s.safetensors"}}) {
    const auto refused = quantize(wrong);
    EXPECT_EQ(refused.status, 2) << wrong.back() << refused.err;
    EXPECT_NE(refused.err.find("hint"), std::string::npos) << refused.err;
  }
}

/// The file holds the text model alone, under names of its own: the rest is said, and the text model is still compared.
TEST_F(GgufCommands, WrappedModelsAreHeldAgainstTheirBase) {
  W4Q_NEEDS_SHARED_DATA();
  const auto families = shared_data() / "families";
  const auto verify = [&](const std::string& name, const std::string& base) {
    return run_w4q({"verify", path(name + ".gguf"), "--base", (families / base).string()});
  };
  for (const std::string name : {"qwen3_5", "gemma4", "gemma4-moe", "mistral3-vision", "glm4-moe"}) {
    ASSERT_EQ(repack((families / name).string(), name + ".gguf", "gguf-q4_k_m").status, 0) << name;
    const auto found = verify(name, name);
    EXPECT_EQ(found.status, 0) << name << found.out;
    EXPECT_NE(found.out.find("stand beside its text model"), std::string::npos) << name << found.out;
  }
  const auto base = families / "qwen3_5", other = folder_ / "other";
  std::filesystem::copy(base, other, std::filesystem::copy_options::recursive);
  std::filesystem::permissions(other / "model.safetensors", std::filesystem::perms::owner_write,
                               std::filesystem::perm_options::add);
  const auto tensors = io::Checkpoint::open(base);
  const auto from = tensors.load("model.language_model.layers.0.mlp.down_proj.weight");
  const auto& to = tensors.at("model.language_model.layers.1.mlp.down_proj.weight");
  std::fstream file(other / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  uint64_t header = 0;
  file.read(reinterpret_cast<char*>(&header), sizeof header);
  file.seekp(static_cast<std::streamoff>(sizeof header + header + to.begin));
  file.write(reinterpret_cast<const char*>(from->bytes.data()), std::ssize(from->bytes));
  file.close();
  const auto found = run_w4q({"verify", path("qwen3_5.gguf"), "--base", other.string()});
  EXPECT_EQ(found.status, 1) << found.out;
  EXPECT_NE(found.out.find("layers.1.mlp.down_proj"), std::string::npos) << found.out;
}

TEST_F(GgufCommands, ThereAndBackGivesTheSamePerplexity) {
  const auto there = repack(bundled_model(), "m.gguf", "gguf", {"--json"});
  ASSERT_EQ(there.status, 0) << there.err;
  for (const auto& tensor : there.json()["tensors"]) EXPECT_EQ(tensor["values_changed"], 0) << tensor["name"];
  const auto back = repack(path("m.gguf"), "hf", "hf16");
  ASSERT_EQ(back.status, 0) << back.err;
  EXPECT_NE(back.out.find("38 of 38 tensors hold the same values"), std::string::npos) << back.out;

  const auto perplexity = [](const std::string& model) {
    const auto result = run_w4q({"verify", model, "--ppl", bundled_model() + "/own/selfgen.txt", "--ctx", "64",
                                 "--windows", "4", "--json", "--quiet"});
    EXPECT_EQ(result.status, 0) << result.err;
    return result.json()["perplexity"]["perplexity"].get<double>();
  };
  EXPECT_EQ(perplexity(path("hf")), perplexity(bundled_model()));
  const auto text = run_w4q({"generate", path("hf"), "--prompt", "The", "--max-tokens", "3", "--quiet"});
  EXPECT_EQ(text.status, 0) << text.err;
}

TEST_F(GgufCommands, InspectShowsMetadataTensorsAndValues) {
  ASSERT_EQ(repack(bundled_model(), "m.gguf", "gguf-q4_0").status, 0);
  const auto text = run_w4q({"inspect", path("m.gguf")});
  ASSERT_EQ(text.status, 0) << text.err;
  for (const char* part :
       {"general.architecture", "\"llama\"", "1024 in all", "blk.3.ffn_down.weight", "Q4_0", "38 tensors"}) {
    EXPECT_NE(text.out.find(part), std::string::npos) << part;
  }
  const auto json = run_w4q({"inspect", path("m.gguf"), "--json"}).json();
  EXPECT_EQ(json["metadata"]["llama.block_count"]["value"], 4);
  EXPECT_EQ(json["tensors"][0]["type"], "Q8_0");
  EXPECT_EQ(json["tensors"][0]["bits_per_weight"], 8.5);
  const auto one = run_w4q({"inspect", path("m.gguf"), "--tensor", "blk.0.attn_q.weight", "--json"}).json();
  EXPECT_EQ(one["first_values"].size(), 8u);
  EXPECT_EQ(run_w4q({"inspect", path("m.gguf"), "--tensor", "blk.9.attn_q.weight"}).status, 2);
  EXPECT_EQ(run_w4q({"inspect", path("m.gguf"), "--layout", "canonical"}).status, 2);
}

TEST_F(GgufCommands, OutputsAreReplacedOnlyWhenAsked) {
  ASSERT_EQ(repack(bundled_model(), "m.gguf", "gguf-q8_0").status, 0);
  const auto again = repack(bundled_model(), "m.gguf", "gguf-q8_0");
  EXPECT_EQ(again.status, 2);
  EXPECT_NE(again.err.find("--overwrite"), std::string::npos) << again.err;
  EXPECT_EQ(repack(bundled_model(), "m.gguf", "gguf-q8_0", {"--overwrite"}).status, 0);
  for (const char* to : {"hf16", "hf-f32", "w4q"}) {
    ASSERT_EQ(repack(path("m.gguf"), to, to).status, 0) << to;
    EXPECT_EQ(repack(path("m.gguf"), to, to).status, 2) << to;
    EXPECT_EQ(repack(path("m.gguf"), to, to, {"--overwrite"}).status, 0) << to;
  }
  const auto dry = repack(path("m.gguf"), "x", "hf16", {"--dry-run"});
  EXPECT_EQ(dry.status, 0) << dry.err;
  EXPECT_FALSE(std::filesystem::exists(path("x")));
}

TEST_F(GgufCommands, WrongUseAndDamagedFilesAreNamed) {
  ASSERT_EQ(repack(bundled_model(), "m.gguf", "gguf").status, 0);
  EXPECT_EQ(repack(path("m.gguf"), "x", "gguf-q4_0").status, 2) << "from GGUF to GGUF";
  EXPECT_EQ(repack(bundled_model(), "x.gguf", "hf16").status, 2) << "not from GGUF";
  EXPECT_EQ(repack(bundled_model(), "x.gguf", "gguf", {"--target", "sm89"}).status, 2);
  EXPECT_EQ(repack(bundled_model(), "x.gguf", "no-such").status, 2);
  EXPECT_EQ(repack(path("missing.gguf"), "x", "hf16").status, 3);
  std::filesystem::resize_file(path("m.gguf"), 2'000'000);
  const auto cut = repack(path("m.gguf"), "x", "hf16");
  EXPECT_EQ(cut.status, 3);
  EXPECT_NE(cut.err.find("behind the end of the file"), std::string::npos) << cut.err;
  std::ofstream(path("other.gguf")) << "not one";
  EXPECT_EQ(run_w4q({"inspect", path("other.gguf")}).status, 3);
  EXPECT_FALSE(std::filesystem::exists(path("x")));
}

/// A tokenizer that w4q would not use itself goes into no file of another program, and nothing is begun.
TEST_F(GgufCommands, TokenizersThatTokenizeRefusesAreRefused) {
  const std::string model = copy_bundled_model(folder_ / "m");
  const io::Json sound = io::read_json(model + "/tokenizer.json");
  const std::pair<const char*, io::Json> damages[] = {
      {"/model/type", "WordPiece"},
      {"/model/dropout", 0.5},
      {"/model/merges/0", "nothing nowhere"},
      {"/model/vocab/again", 0},
      {"/decoder", {{"type", "CTC"}}},
      {"/normalizer", {{"type", "BertNormalizer"}}},
      {"/post_processor/processors/1/special_tokens/<|begin_of_text|>/ids/0", 999999}};
  for (const auto& [place, value] : damages) {
    io::Json damaged = sound;
    damaged[io::Json::json_pointer(place)] = value;
    std::ofstream(model + "/tokenizer.json") << damaged.dump();
    const auto tokenize = run_w4q({"tokenize", model, model + "/config.json", "-o", path("ids.u16")});
    EXPECT_EQ(tokenize.status, 3) << place << tokenize.err;
    const auto converted = repack(model, "m.gguf", "gguf");
    EXPECT_EQ(converted.status, 3) << place << converted.out;
    EXPECT_EQ(converted.err, tokenize.err) << place;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) EXPECT_EQ(entry.path(), model);
  }
  EXPECT_EQ(repack(model, "m.gguf", "gguf", {"--no-tokenizer"}).status, 0);
}

}  // namespace
}  // namespace w4q::test
