// What settings say of codes that their readers refuse, or that other codes than those stored would need.
#include <gmock/gmock.h>

#include "made_contents.h"

namespace w4q::verify {
namespace {

using test::Storage;
using ::testing::HasSubstr;
using ::testing::Not;

class ContentsSettings : public MadeContents {
 protected:
  /// With one value of quantization_config another one; null: without it.
  std::string said(Storage storage, const char* pointer, const io::Json& value) {
    auto made = test::made_mixture(storage);
    auto& settings = made.config["quantization_config"];
    const io::Json::json_pointer at(pointer);
    if (value.is_null()) {
      settings[at.parent_pointer()].erase(at.back());
    } else {
      settings[at] = value;
    }
    return faults_of(headers_of(made));
  }
  std::string of_group(Storage storage, const char* key, const io::Json& value) {
    return said(storage, concat("/config_groups/group_0/weights/", key).c_str(), value);
  }
};

TEST_F(ContentsSettings, WhatReadersOfGroupsRefuse) {
  EXPECT_EQ(of_group(Storage::fp8_channel, "observer", "minmax"), "");
  EXPECT_THAT(of_group(Storage::fp8_channel, "group_size", 128),
              HasSubstr("group_size 128 beside strategy \"channel\""));
  EXPECT_THAT(of_group(Storage::fp8_channel, "strategy", "group"), HasSubstr("which needs one"));
  EXPECT_THAT(of_group(Storage::fp8_channel, "block_structure", {128, 128}), HasSubstr("which has no blocks"));
  EXPECT_THAT(of_group(Storage::fp8_channel, "strategy", "block"), HasSubstr("without a block_structure"));
  EXPECT_THAT(of_group(Storage::fp8_channel, "dynamic", true), HasSubstr("but their scales are stored"));
  EXPECT_THAT(of_group(Storage::fp8_channel, "actorder", "group"), HasSubstr("no linear has a weight_g_idx"));
}

TEST_F(ContentsSettings, StrategiesOfFloats) {
  EXPECT_THAT(of_group(Storage::fp8_channel, "strategy", nullptr), HasSubstr("to be taken for \"tensor\""));
  EXPECT_THAT(of_group(Storage::nvfp4, "strategy", "group"), HasSubstr("NVFP4 has \"tensor_group\""));
  EXPECT_THAT(of_group(Storage::mxfp4, "strategy", "tensor_group"), HasSubstr("MXFP4 has \"group\""));
  EXPECT_THAT(of_group(Storage::nvfp4, "scale_dtype", "torch.uint8"), HasSubstr("says that scales are E8M0"));
}

TEST_F(ContentsSettings, FormatsOfGroups) {
  const char* const own = "/config_groups/group_0/format";
  EXPECT_EQ(said(Storage::nvfp4, own, "nvfp4-pack-quantized"), "");
  EXPECT_THAT(said(Storage::nvfp4, own, "pack-quantized"), HasSubstr("but its only group \"pack-quantized\""));
  EXPECT_THAT(said(Storage::nvfp4, "/format", nullptr), HasSubstr("has no format beside its config_groups"));
  EXPECT_THAT(said(Storage::nvfp4, "/format", "dense"), HasSubstr("but nothing is stored so"));
}

TEST_F(ContentsSettings, OfModelOpt) {
  const auto nvfp4 = Storage::nvfp4_modelopt;
  EXPECT_THAT(said(nvfp4, "/quant_algo", nullptr), HasSubstr("has no quant_algo"));
  EXPECT_THAT(said(nvfp4, "/quant_algo", "FP8"), HasSubstr("quant_algo \"FP8\", but all that is packed is NVFP4"));
  EXPECT_THAT(said(nvfp4, "/quant_algo", "W4A16_AWQ"), HasSubstr("but scales are F8_E4M3"));
  EXPECT_THAT(said(nvfp4, "/group_size", 32), HasSubstr("says group_size 32, NVFP4 has 16"));
  const io::Json groups = {{"group_0", {{"weights", {{"num_bits", 8}, {"type", "int"}, {"group_size", 32}}}}}};
  const std::string found = said(nvfp4, "/config_groups", groups);
  EXPECT_THAT(found, HasSubstr("says num_bits 8 in group_0, NVFP4 has 4"));
  EXPECT_THAT(found, HasSubstr("says type \"int\" in group_0, NVFP4 has \"float\""));
  EXPECT_THAT(found, HasSubstr("says group_size 32 in group_0, NVFP4 has 16"));
}

TEST_F(ContentsSettings, BlocksAndHeads) {
  auto made = test::made_mixture(Storage::fp8_blocks);
  // Twice as many outputs as a block has.
  made.config["quantization_config"].erase("weight_block_size");
  const std::string path = "model.language_model.layers.0.self_attn.q_proj.weight";
  made.tensors[path] = {DType::f8_e4m3, {256, 256}, std::vector<std::byte>(65536, std::byte{0x30})};
  made.tensors[path + "_scale_inv"] = {DType::f32, {2, 2}, std::vector<std::byte>(16, std::byte{0x3C})};
  for (auto& [name, tensor] : made.tensors) {
    if (name.ends_with("_scale_inv") && name != path + "_scale_inv")
      tensor = {DType::f32, {1, 1}, std::vector<std::byte>(4, std::byte{0x3C})};
  }
  // transformers takes blocks of 128 × 128 where nothing is said, and nobody where that is no number.
  std::vector<std::string> notes;
  check_contents(headers_of(made), &notes);
  EXPECT_THAT(notes, testing::Contains(HasSubstr("has no weight_block_size, but ")));
  EXPECT_THAT(faults_of(headers_of(made)), Not(HasSubstr("weight_block_size")));
  made.config["quantization_config"]["weight_block_size"] = nullptr;
  EXPECT_THAT(faults_of(headers_of(made)), HasSubstr("says weight_block_size null, but "));
  made.config["quantization_config"].erase("weight_block_size");
  made.tensors[path + "_scale_inv"] = {DType::f32, {4, 4}, std::vector<std::byte>(64, std::byte{0x3C})};
  EXPECT_THAT(faults_of(headers_of(made)), HasSubstr("which are not of 128 × 128"));
  auto plain = test::made_mixture(Storage::bf16);
  plain.config["quantization_config"] = {{"quant_method", "gptq"}, {"bits", 4}, {"lm_head", true}};
  plain.tensors["model.language_model.layers.0.self_attn.q_proj.qweight"] = {
      DType::i32, {16, 128}, std::vector<std::byte>(8192, std::byte{0x37})};
  EXPECT_THAT(faults_of(headers_of(plain)), HasSubstr("but there is no lm_head.qweight"));
}

}  // namespace
}  // namespace w4q::verify
