// What config.json says that no program can do, or that tensors contradict; and tensors that stand in another role's place.
#include <gmock/gmock.h>

#include "made_contents.h"

namespace w4q::verify {
namespace {

using test::MadeCheckpoint;
using test::Storage;
using ::testing::HasSubstr;

class ContentsConfig : public MadeContents {
 protected:
  std::string said(const MadeCheckpoint& made) { return faults_of(headers_of(made)); }
  std::string said_with(const char* key, const io::Json& value, Storage storage = Storage::bf16) {
    auto made = test::made_mixture(storage);
    (storage == Storage::bf16 ? made.config["text_config"] : made.config["quantization_config"])[key] = value;
    return said(made);
  }
};

TEST_F(ContentsConfig, NamesThatProgramsHave) {
  EXPECT_EQ(said_with("dtype", "bfloat16"), "");
  EXPECT_THAT(said_with("dtype", "bfloat17"), HasSubstr("values have the type \"bfloat17\""));
  EXPECT_THAT(said_with("max_position_embeddings", 1), HasSubstr("max_position_embeddings 1"));
  // Of an architecture that is not known an activation may be its own.
  EXPECT_EQ(said_with("hidden_act", "sliu"), "");
  auto made = test::made_mixture(Storage::bf16);
  made.config["text_config"]["model_type"] = "llama";
  made.config["text_config"]["hidden_act"] = "sliu";
  made.config["text_config"]["rope_scaling"] = {{"rope_type", "foo"}};
  EXPECT_THAT(said(made), HasSubstr("hidden_act \"sliu\", which no program has"));
  EXPECT_THAT(said(made), HasSubstr("of the type \"foo\", which no program has"));
}

TEST_F(ContentsConfig, NumbersAreInTheirRanges) {
  EXPECT_THAT(said_with("rope_theta", -1.0), HasSubstr("has rope_theta -1.0, expected a number above 0"));
  EXPECT_THAT(said_with("rms_norm_eps", "1e-5"), HasSubstr("has rms_norm_eps \"1e-5\""));
  EXPECT_THAT(said_with("num_experts_per_tok", 1.5), HasSubstr("expected a whole number"));
  EXPECT_THAT(said_with("rope_scaling", {{"factor", 0.0}}), HasSubstr("scales positions by 0.0"));
  EXPECT_EQ(said_with("rope_theta", nullptr), "");
}

TEST_F(ContentsConfig, RotationsAndTypes) {
  EXPECT_THAT(said_with("rope_scaling", {{"rope_type", "linear"}, {"factor", 0.25}}), HasSubstr("by 1 and more"));
  EXPECT_EQ(said_with("rope_scaling", {{"rope_type", "linear"}, {"factor", 4.0}}), "");
  io::Json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}};
  EXPECT_EQ(said_with("rope_scaling", yarn), "");
  auto made = test::made_mixture(Storage::bf16);
  made.config["text_config"]["rope_scaling"] = yarn;
  std::vector<std::string> notes;
  check_contents(headers_of(made), &notes);
  EXPECT_THAT(notes, ::testing::Contains(HasSubstr("has yarn without original_max_position_embeddings")));
  yarn["original_max_position_embeddings"] = 4096;
  EXPECT_EQ(said_with("rope_scaling", yarn), "");
  EXPECT_THAT(said_with("dtype", "int8"), HasSubstr("but all weights are floats"));
}

TEST_F(ContentsConfig, ClassAndTypeAgree) {
  auto made = test::made_mixture(Storage::bf16);
  made.config["architectures"] = {"LlamaForCausalLM"};
  made.config["model_type"] = "qwen3";
  EXPECT_THAT(said(made), HasSubstr("but model_type \"qwen3\", which is that of Qwen3ForCausalLM"));
}

TEST_F(ContentsConfig, SettingsOfFp8) {
  const auto fp8 = Storage::fp8_blocks;
  EXPECT_EQ(said(test::made_mixture(fp8)), "");
  EXPECT_THAT(said_with("fmt", "e5m2", fp8), HasSubstr("\"fmt\": \"e5m2\", but"));
  EXPECT_THAT(said_with("weight_block_size", "128x128", fp8), HasSubstr("expected two numbers"));
  EXPECT_THAT(said_with("activation_scheme", "static", fp8), HasSubstr("no linear has a scale of its inputs"));
  EXPECT_THAT(said_with("scale_fmt", "ue8m0", fp8), HasSubstr("which is no power of two"));
  EXPECT_THAT(said_with("config_groups", {{"group_0", io::Json::object()}}, fp8), HasSubstr("but has config_groups"));
}

/// Values of one norm, or of one matrix, in the place of another role's.
TEST_F(ContentsConfig, RolesAreDifferent) {
  const std::string layer = "model.language_model.layers.1.";
  const auto sound = test::made_mixture(Storage::bf16);
  auto made = sound;
  made.tensors[layer + "self_attn.v_proj.weight"] = made.tensors.at(layer + "self_attn.k_proj.weight");
  EXPECT_THAT(said(made), HasSubstr("v_proj.weight holds the bytes of model.language_model.layers.1.self_attn.k_proj"));
  made = sound;
  test::MadeWriter(made, Storage::bf16).dense(layer + "input_layernorm.weight", {128});
  made.tensors[layer + "post_attention_layernorm.weight"] = made.tensors.at(layer + "input_layernorm.weight");
  EXPECT_THAT(said(made), HasSubstr("post_attention_layernorm.weight holds the bytes of"));
}

TEST_F(ContentsConfig, CodesHaveSettings) {
  auto made = test::made_mixture(Storage::fp8_blocks);
  made.config.erase("quantization_config");
  EXPECT_THAT(said(made), HasSubstr("has no quantization_config, but "));
}

TEST_F(ContentsConfig, StatesOfAnOptimizer) {
  auto made = test::made_mixture(Storage::bf16);
  test::MadeWriter(made, Storage::bf16).dense("optimizer.state.model.norm.weight.exp_avg", {128});
  EXPECT_THAT(said(made), HasSubstr("is a state of an optimizer"));
}

TEST_F(ContentsConfig, APrefixTwice) {
  MadeCheckpoint doubled{test::made_mixture(Storage::bf16).config, {}};
  for (const auto& [name, tensor] : test::made_mixture(Storage::bf16).tensors)
    doubled.tensors.emplace(name.starts_with("model.") ? concat("model.", name) : name, tensor);
  EXPECT_THAT(said(doubled), HasSubstr("\"model.\" was put before names twice"));
}

TEST_F(ContentsConfig, AdaptersOfOtherKinds) {
  auto made = test::made_mixture(Storage::bf16);
  test::MadeWriter(made, Storage::bf16)
      .dense("model.language_model.layers.1.self_attn.q_proj.lora_magnitude_vector.weight", {128});
  EXPECT_THAT(said(made), HasSubstr("is an adapter's that was not merged"));
}

}  // namespace
}  // namespace w4q::verify
