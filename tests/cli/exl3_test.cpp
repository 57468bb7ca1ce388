// EXL3 as a user meets it: written and read, with padding, biases and a head of its own; what is refused.
#include "io/json.h"
#include "program.h"
#include "small_model.h"

namespace w4q::test {
namespace {

class Exl3Program : public OnBundledModel {
 protected:
  /// Of one layer, and half of that: a search takes long.
  std::vector<std::string> first_layer(std::vector<std::string> more) const {
    for (const char* left : {"*.layers.1.*", "*.layers.2.*", "*.layers.3.*", "*.gate_proj", "*.up_proj"})
      more.insert(more.end(), {"--keep", left});
    return more;
  }
  static void expect_part(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in\n" << text;
  }
};

TEST_F(Exl3Program, WritesWhatExllamav3Reads) {
  const auto made = quantize("q", first_layer({"--scheme", "exl3-3", "--to", "exl3"}));
  ASSERT_EQ(made.status, 0) << made.err;
  EXPECT_EQ(made.json()["convert"]["proof"]["complete"], true);
  const auto verify = run_w4q({"verify", path("q"), "--base", bundled_model(), "--quiet", "--json"});
  EXPECT_EQ(verify.status, 0) << verify.out << verify.err;
  EXPECT_NEAR(verify.json()["weights"]["sqnr_db"].get<double>(), 17.5, 0.2);  // dB of normal weights (docs/exl3.md)
  const io::Json config = io::read_json(path("q") + "/config.json")["quantization_config"];
  EXPECT_EQ(config["quant_method"], "exl3");
  EXPECT_EQ(config["bits"], 3.0);
  EXPECT_EQ(config["head_bits"], 16);
  EXPECT_EQ(config["codebook"], "mul1");
  const io::Json beside = io::read_json(path("q") + "/quantization_config.json");
  const io::Json& module = beside["tensor_storage"]["model.layers.0.mlp.down_proj"];
  EXPECT_EQ(module["quant_format"], "exl3");
  EXPECT_EQ(module["bits_per_weight"], 3);
  EXPECT_EQ(module["mul1_multiplier"], 2212286765u);
  EXPECT_EQ(module["stored_tensors"]["model.layers.0.mlp.down_proj.trellis"]["dtype"], "torch.int16");
  const auto planes = run_w4q({"inspect", path("q")});
  expect_part(planes.out, "exl3-3 in exl3");
  const auto back = run_w4q({"repack", path("q"), "-o", path("w4q"), "--to", "w4q", "--quiet"});
  ASSERT_EQ(back.status, 0) << back.err;
  const auto same = run_w4q({"compare", path("q"), path("w4q"), "--base", bundled_model(), "--quiet"});
  EXPECT_EQ(same.status, 0) << same.err;
  const auto plain = run_w4q({"repack", path("q"), "-o", path("hf"), "--to", "hf-f32", "--quiet"});
  ASSERT_EQ(plain.status, 0) << plain.err;
  const auto held = run_w4q({"verify", path("hf"), "--base", bundled_model(), "--quiet"});
  EXPECT_EQ(held.status, 0) << held.out << held.err;
}

TEST_F(Exl3Program, AHeadBesideTiedEmbeddings) {
  const auto made = quantize("q", {"--scheme", "exl3-2", "--lm-head", "--to", "exl3", "--keep", "*.layers.*"});
  ASSERT_EQ(made.status, 0) << made.err;
  const io::Json config = io::read_json(path("q") + "/config.json");
  EXPECT_EQ(config["tie_word_embeddings"], false);
  EXPECT_EQ(config["quantization_config"]["head_bits"], 6);
  const auto verify = run_w4q({"verify", path("q"), "--base", bundled_model(), "--quiet"});
  EXPECT_EQ(verify.status, 0) << verify.out << verify.err;
  expect_part(verify.out, "lm_head");
  const auto plain = run_w4q({"repack", path("q"), "-o", path("hf"), "--to", "hf16", "--quiet"});
  ASSERT_EQ(plain.status, 0) << plain.err;
  EXPECT_EQ(run_w4q({"verify", path("hf"), "--quiet"}).status, 0);
}

/// 64, 96 and 160 inputs and outputs, and biases, which are padded and F16 in such files.
TEST_F(Exl3Program, PaddingAndBiases) {
  const std::string source = path("small");
  write_small_model(model::architecture_row("qwen2"), source);
  const auto made =
      run_w4q({"quantize", source, "-o", path("q"), "--scheme", "exl3-4", "--lm-head", "--to", "exl3", "--quiet"});
  ASSERT_EQ(made.status, 0) << made.err;
  const auto stored = io::Checkpoint::open(path("q"));
  EXPECT_EQ(stored.at("model.layers.0.self_attn.q_proj.bias").shape, Shape{128});
  EXPECT_EQ(stored.at("model.layers.0.self_attn.q_proj.bias").dtype, DType::f16);
  EXPECT_EQ(stored.at("lm_head.trellis").shape, (Shape{8, 16, 96}));
  const auto verify = run_w4q({"verify", path("q"), "--base", source, "--quiet"});
  EXPECT_EQ(verify.status, 0) << verify.out << verify.err;
  for (const char* to : {"hf-f32", "w4q"}) {
    const auto plain = run_w4q({"repack", path("q"), "-o", path(to), "--to", to, "--quiet"});
    ASSERT_EQ(plain.status, 0) << plain.err;
    const auto again = run_w4q({"verify", path(to), "--quiet"});
    EXPECT_EQ(again.status, 0) << to << "\n" << again.out << again.err;
  }
  EXPECT_EQ(io::Checkpoint::open(path("hf-f32")).at("lm_head.weight").shape, (Shape{160, 64}));
}

TEST_F(Exl3Program, WhatItHasNotIsRefused) {
  const auto refused = [&](std::vector<std::string> more, int status, const std::string& part) {
    const auto result = quantize("never", more);
    EXPECT_EQ(result.status, status) << result.err;
    expect_part(result.err, part);
    EXPECT_FALSE(std::filesystem::exists(path("never")));
  };
  refused({"--scheme", "exl3-9"}, 2, "exl3-<1 to 8>");
  refused({"--scheme", "exl3-3", "--codebook", "nf"}, 2, "exl3 has no codebook");
  refused({"--scheme", "exl3-3", "--feedback", "--sweeps"}, 2, "--sweeps means nothing to --method exl3");
  ASSERT_EQ(quantize("trellis", first_layer({"--scheme", "trellis2-w8"})).status, 0);
  const auto other = run_w4q({"repack", path("trellis"), "-o", path("never"), "--to", "exl3", "--allow-lossy"});
  EXPECT_EQ(other.status, 3) << other.err;
  expect_part(other.err, "exl3 cannot hold trellis2-w8");
  expect_part(other.err, "quantize --scheme exl3-3 --to exl3");
  EXPECT_FALSE(std::filesystem::exists(path("never")));
}

}  // namespace
}  // namespace w4q::test
