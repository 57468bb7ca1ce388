// What shows beside other layers and experts, or by what config.json claims of them: each is named, and what is sound is
// not.
#include <gtest/gtest.h>

#include <numeric>

#include "checkpoint/affine_integers.h"
#include "core/progress.h"
#include "made_checkpoint.h"
#include "made_contents.h"
#include "packed_model.h"
#include "support.h"
#include "verify/contents/contents.h"
#include "verify/weights/nearest.h"
#include "verify/weights/rescaled.h"

namespace w4q::verify {
namespace {

using test::MadeCheckpoint;
using test::MadeWriter;
using test::Storage;

class ContentsLayers : public MadeContents {
 protected:
  std::string said(const MadeCheckpoint& made) { return faults_of(headers_of(made)); }
  void expect_said(const MadeCheckpoint& made, std::string_view text) {
    const std::string faults = said(made);
    EXPECT_NE(faults.find(text), std::string::npos) << faults;
  }
};

const std::string layer1 = "model.language_model.layers.1.";

TEST_F(ContentsLayers, RoutersHaveARowForEachExpert) {
  auto made = test::made_mixture(Storage::bf16);
  EXPECT_EQ(said(made), "");
  MadeWriter(made, Storage::bf16).dense(layer1 + "mlp.gate.weight", {5, 128});
  expect_said(made, "layers.1.mlp.gate has 5 rows, config.json says that there are 4 experts");
  made.config["text_config"]["zero_expert_num"] = 1;
  EXPECT_EQ(said(made), "");
  MadeWriter(made, Storage::bf16).dense(layer1 + "mlp.gate.weight", {128, 4});
  expect_said(made, "layers.1.mlp.gate is transposed");
  made.put(layer1 + "mlp.gate.weight", DType::bf16, {4, 128}, std::vector<uint16_t>(512, 0x3c00));
  expect_said(made, "layers.1.mlp.gate has the same row for every expert");
}

/// Six layers that are alike: one norm was cut; and a whole layer of another width is a kind of its own.
TEST_F(ContentsLayers, AShapeOfItsOwn) {
  MadeCheckpoint made;
  made.config = {{"model_type", "unseen"}, {"hidden_size", 64}, {"num_hidden_layers", 6}, {"num_attention_heads", 4}};
  MadeWriter writer(made, Storage::bf16);
  writer.dense("model.embed_tokens.weight", {96, 64});
  writer.dense("model.norm.weight", {64});
  for (int layer = 0; layer < 6; ++layer) {
    const std::string path = concat("model.layers.", layer, ".");
    writer.dense(path + "norm.weight", {64});
    writer.dense(path + "self_attn.q_norm.weight", {16});
    writer.dense(path + "mlp.up_proj.weight", {80, 64});
    writer.dense(path + "mlp.down_proj.weight", {64, 80});
  }
  EXPECT_EQ(said(made), "");
  auto wide = made, cut = made;
  MadeWriter(cut, Storage::bf16).dense("model.layers.3.self_attn.q_norm.weight", {8});
  expect_said(cut, "model.layers.3.self_attn.q_norm.weight has shape [8], as in no other layer");
  MadeWriter(wide, Storage::bf16).dense("model.layers.3.mlp.up_proj.weight", {96, 64});
  MadeWriter(wide, Storage::bf16).dense("model.layers.3.mlp.down_proj.weight", {64, 96});
  EXPECT_EQ(said(wide), "");
}

TEST_F(ContentsLayers, BlocksOfTowersAreAlike) {
  auto made = test::made_mixture(Storage::bf16);
  made.config["vision_config"]["depth"] = 7;
  for (int block = 0; block < 7; ++block) {
    MadeWriter(made, Storage::bf16).dense(concat("model.visual.blocks.", block, ".attn.qkv.weight"), {96, 32});
    MadeWriter(made, Storage::bf16).dense(concat("model.visual.blocks.", block, ".norm.weight"), {32});
  }
  EXPECT_EQ(said(made), "");
  auto lacking = made;
  lacking.tensors.erase("model.visual.blocks.4.norm.weight");
  expect_said(lacking, "model.visual.blocks.4.norm.weight is missing: all other blocks have it");
  MadeWriter(made, Storage::bf16).dense("model.visual.blocks.4.attn.qkv.weight", {64, 32});
  expect_said(made, "model.visual.blocks.4.attn.qkv.weight has shape [64, 32], as in no other block");
}

TEST_F(ContentsLayers, PartsBesideTheTextModel) {
  const auto made = test::made_mixture(Storage::bf16);
  auto alone = made, zero = made, unjoined = made, bare = made;
  alone.tensors.erase("model.visual.merger.weight");
  expect_said(alone, "the vision tower leads nowhere");
  std::ranges::fill(zero.tensors["model.visual.blocks.1.attn.qkv.weight"].bytes, std::byte{0});
  expect_said(zero, "model.visual.blocks.1.attn.qkv holds nothing but zeros");
  unjoined.tensors.erase("mtp.fc.weight");
  expect_said(unjoined, "have nothing that joins a state and an embedding");
  bare.tensors.erase("mtp.layers.0.self_attn.q_proj.weight");
  expect_said(bare, "but no layer behind it");
}

TEST_F(ContentsLayers, ExpertsOfAStack) {
  auto made = test::made_mixture(Storage::mxfp4_stack);
  EXPECT_EQ(said(made), "");
  auto& bytes = made.tensors[layer1 + "mlp.experts.down_proj_blocks"].bytes;
  const auto plane = static_cast<std::ptrdiff_t>(bytes.size() / 4);
  auto zero = made;
  std::copy_n(bytes.begin(), plane, bytes.begin() + 2 * plane);
  expect_said(made, "down_proj[2] holds the codes of expert 0");
  std::fill_n(zero.tensors[layer1 + "mlp.experts.down_proj_blocks"].bytes.begin() + plane, plane, std::byte{0});
  expect_said(zero, "down_proj[1] is an expert of zeros");
}

TEST_F(ContentsLayers, OneLayerUnderAnotherPrefix) {
  auto made = test::made_mixture(Storage::bf16);
  for (const auto& [name, tensor] : std::map(made.tensors)) {
    if (!name.starts_with(layer1)) continue;
    made.tensors["model." + name.substr(std::string_view("model.language_model.").size())] = tensor;
    made.tensors.erase(name);
  }
  expect_said(made, "has another prefix than the other layers");
}

TEST_F(ContentsLayers, ListsAndGroups) {
  const auto made = test::made_mixture(Storage::nvfp4);
  EXPECT_EQ(said(made), "");
  const auto changed = [&](const auto& change) {
    auto other = made;
    change(other.config["quantization_config"]);
    return other;
  };
  expect_said(changed([](io::Json& config) { config["ignore"].push_back(""); }), "in ignore, which names no module");
  expect_said(changed([](io::Json& config) { config["ignore"].push_back(7); }), "in ignore, which names no module");
  expect_said(changed([](io::Json& config) { config["ignore"] = "lm_head"; }), "ignore that is no list");
  expect_said(changed([](io::Json& config) { config["ignore"].push_back(layer1 + "self_attn.o_proj.weight_packed"); }),
              "a tensor of a module that is quantized");
  expect_said(changed([](io::Json& config) {
                io::Json group = config["config_groups"].begin().value();
                group["targets"] = {"re:.*mlp_experts.*"};
                config["config_groups"]["group_9"] = group;
              }),
              "name nothing that is there");
  expect_said(changed([](io::Json& config) {
                for (auto& group : config["config_groups"]) group.erase("format");
                config["format"] = "float-quantized";
              }),
              "but nothing is stored so");
  expect_said(changed([](io::Json& config) {
                for (auto& group : config["config_groups"])
                  group["input_activations"] = {{"num_bits", 4}, {"dynamic", "local"}};
              }),
              "promises measured scales of inputs");
}

TEST_F(ContentsLayers, ScalesThatNoCacheHas) {
  const auto made = test::made_mixture(Storage::fp8_channel);
  const auto with = [&](const std::string& name, float value, const Shape& shape = {}) {
    auto other = made;
    for (int layer = 0; layer < 2; ++layer) {
      for (const char* part : {"k_scale", "v_scale"})
        other.put(concat("model.language_model.layers.", layer, ".self_attn.", part), DType::f32, {},
                  std::vector<float>{0.5f});
    }
    const auto count = static_cast<size_t>(element_count(shape));
    other.put(layer1 + "self_attn." + name, DType::f32, shape, std::vector<float>(count, value));
    return other;
  };
  EXPECT_EQ(said(with("k_scale", 0.25f)), "");
  for (const float value : {1e-20f, 1e20f}) expect_said(with("k_scale", value), "k_scale is ");
  for (const char* name : {"kv_scale", "q_scale", "k_proj.output_scale"}) expect_said(with(name, 0), name);
  auto odd = with("k_scale", 0.25f, {3});
  odd.config["text_config"]["num_key_value_heads"] = 4;
  expect_said(odd, "k_scale has shape [3]");
  auto three = test::made_mixture(Storage::fp8_channel);
  for (const auto& [name, tensor] : std::map(three.tensors)) {
    if (name.starts_with(layer1)) three.tensors["model.language_model.layers.2." + name.substr(layer1.size())] = tensor;
  }
  three.config["text_config"]["num_hidden_layers"] = 3;
  for (const char* name : {"layers.0.self_attn.k_scale", "layers.0.self_attn.v_scale", "layers.2.self_attn.k_scale",
                           "layers.2.self_attn.v_scale"}) {
    three.put(concat("model.language_model.", name), DType::f32, {}, std::vector<float>{0.5f});
  }
  expect_said(three, "layer 1 has no scale of the cache");
}

/// Layers that config.json says are dense, and mixtures that choose nothing.
TEST_F(ContentsLayers, ClaimsOfMixtures) {
  const auto made = test::made_mixture(Storage::bf16);
  const auto stating = [&](const char* key, const io::Json& value) {
    auto other = made;
    other.config["text_config"][key] = value;
    return other;
  };
  expect_said(stating("mlp_only_layers", {1}), "layer 1 has no experts");
  expect_said(stating("first_k_dense_replace", 1), "layer 0 has no experts");
  expect_said(stating("num_experts_per_tok", 0), "chooses 0 of 4 experts");
}

/// mlx-lm names stacks of experts switch_mlp: each of them is a matrix by the model's own name.
TEST_F(ContentsLayers, ExpertsByTheNamesOfMlx) {
  MadeCheckpoint made;
  const auto stack = [&](const std::string& path) {
    made.put(path + ".weight", DType::u32, {2, 4, 8}, std::vector<uint32_t>(64, 0x12345678));
    made.put(path + ".scales", DType::bf16, {2, 4, 1}, std::vector<uint16_t>(8, 0x3c00));
    made.put(path + ".biases", DType::bf16, {2, 4, 1}, std::vector<uint16_t>(8, 0));
  };
  stack("model.layers.0.mlp.switch_mlp.gate_proj");
  stack("model.layers.0.block_sparse_moe.switch_mlp.up_proj");
  // Of inputs that the groups do not divide.
  made.put("model.layers.0.mlp.switch_mlp.down_proj.weight", DType::bf16, {2, 4, 6}, std::vector<uint16_t>(48, 0x3c00));
  made.config = {{"model_type", "unseen"}, {"quantization", {{"group_size", 64}, {"bits", 4}}}};
  made.write(folder_ / "made");
  const auto all =
      checkpoint::read_affine_integers(std::make_shared<const io::Checkpoint>(io::Checkpoint::open(folder_ / "made")),
                                       made.config, made.config["quantization"]);
  for (const char* name :
       {"model.layers.0.mlp.experts.1.gate_proj.weight", "model.layers.0.block_sparse_moe.experts.0.w3.weight",
        "model.layers.0.mlp.experts.1.down_proj.weight"}) {
    EXPECT_TRUE(all.derived.contains(name)) << name;
  }
}

TEST_F(ContentsLayers, WhatTheGroupsOfMlxLeave) {
  MadeCheckpoint made;
  made.put("model.layers.0.mlp.up_proj.weight", DType::u32, {96, 8}, std::vector<uint32_t>(768, 0x9abcdef1));
  made.put("model.layers.0.mlp.up_proj.scales", DType::bf16, {96, 1}, std::vector<uint16_t>(96, 0x3c00));
  made.put("model.layers.0.mlp.up_proj.biases", DType::bf16, {96, 1}, std::vector<uint16_t>(96, 0xbc00));
  MadeWriter(made, Storage::bf16).dense("model.layers.0.mlp.down_proj.weight", {64, 96});
  made.config = {{"model_type", "unseen"}, {"quantization", {{"group_size", 64}, {"bits", 4}}}};
  EXPECT_EQ(said(made), "");
}

/// By how much of itself the first value of a row that has a nearer code is off: codes are chosen under the scale that is
/// rounded to a byte afterwards, so that more is allowed where scales are nested.
TEST(NestedScales, CodesWereChosenUnderTheScaleThatWasRounded) {
  const auto first_off = [](const char* scheme) {
    const test::TemporaryFolder folder;
    const auto opened = model::open_model(test::quantized_model(folder, formats::parse_scheme(scheme)));
    const auto stored = stored_weight(opened.folder, "model.layers.0.mlp.up_proj");
    const auto& packed = std::get<std::shared_ptr<const formats::PackedLinear>>(stored.matrix)->passes.front();
    NearestCodes codes(packed, false);
    std::vector<float> values(static_cast<size_t>(packed.k));
    kernels::decode_rows(stored, 0, 1, {values.data(), 1, packed.k});
    for (float more = 0; more < 4; more += 0x1p-10f) {
      auto moved = values;
      moved[0] += more * std::abs(moved[0]);
      bool off = false;
      codes.look_at(0, moved, [&](int64_t col) { off = off || col == 0; });
      if (off) return more;
    }
    return 0.0f;
  };
  // 0.5 + 0.3 / 2 of the distance to the next level, and 0.5 + 0.6 / 2.
  const float plain = first_off("lut4-b64-f32"), nested = first_off("lut4-b64-nested");
  ASSERT_GT(plain, 0);
  EXPECT_NEAR(nested / plain, 0.8f / 0.65f, 0.05f);
}

}  // namespace
}  // namespace w4q::verify
