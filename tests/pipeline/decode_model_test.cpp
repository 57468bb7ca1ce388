// Folders of few bits as 16- and 32-bit ones: stacks stand as they did, and names are the model's own.
#include "pipeline/decode_model.h"

#include <gtest/gtest.h>

#include "core/float_formats.h"
#include "core/progress.h"
#include "core/text.h"
#include "io/checkpoint.h"
#include "io/json.h"
#include "made_checkpoint.h"
#include "support.h"

namespace w4q::pipeline {
namespace {

using test::MadeCheckpoint;

class DecodeModel : public testing::Test {
 protected:
  io::Checkpoint decoded(const MadeCheckpoint& made) {
    set_progress_enabled(false);
    made.write(folder_ / "made");
    decode_model(
        {.input = folder_ / "made", .output = folder_ / "decoded", .to = "hf-f32", .write = {}, .overwrite = true});
    return io::Checkpoint::open(folder_ / "decoded");
  }
  static std::vector<float> values(const io::Checkpoint& tensors, const std::string& name) {
    const auto loaded = tensors.load(name);
    EXPECT_EQ(loaded->dtype, DType::f32) << name;
    const auto* const values = reinterpret_cast<const float*>(loaded->bytes.data());
    return {values, values + element_count(loaded->shape)};
  }

  test::TemporaryFolder folder_;
};

TEST_F(DecodeModel, StacksWithInputsFirstStayAsTheyStood) {
  constexpr int64_t experts = 11, k = 6, n = 4;  // of ten and more names are in another order
  const std::string stack = "model.layers.0.feed_forward.experts.down_proj";
  MadeCheckpoint made;
  made.config = {{"model_type", "unseen"},
                 {"quantization_config", {{"quant_method", "modelopt"}, {"quant_algo", "FP8"}}}};
  std::vector<uint8_t> codes(static_cast<size_t>(experts * k * n));
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 37 % 127);
  made.put(stack, DType::f8_e4m3, {experts, k, n}, codes);
  made.put(stack + "_weight_scale", DType::f32, {}, std::vector<float>{0.25f});
  const auto tensors = decoded(made);
  ASSERT_EQ(tensors.at(stack).shape, (Shape{experts, k, n}));
  const auto found = values(tensors, stack);
  for (size_t i = 0; i < codes.size(); ++i) EXPECT_EQ(found[i], f32_from_e4m3(codes[i]) * 0.25f) << i;
}

TEST_F(DecodeModel, WhatMlxRenamedHasTheNamesOfTheModel) {
  constexpr int64_t n = 2, k = 64;
  const std::string layer = "language_model.model.layers.0.", own = "model.language_model.layers.0.";
  MadeCheckpoint made;
  made.config = {{"model_type", "qwen3_5"},
                 {"architectures", {"UnseenForConditionalGeneration"}},
                 {"quantization", {{"group_size", 64}, {"bits", 8}}}};
  made.put(layer + "mlp.up_proj.weight", DType::u32, {n, k / 4}, std::vector<uint32_t>(32, 0x04030201));
  made.put(layer + "mlp.up_proj.scales", DType::f32, {n, 1}, std::vector<float>{0.5f, 2});
  made.put(layer + "mlp.up_proj.biases", DType::f32, {n, 1}, std::vector<float>{-1, 1});
  made.put(layer + "input_layernorm.weight", DType::f32, {3}, std::vector<float>{1.5f, 1, 0.75f});
  made.put(layer + "linear_attn.conv1d.weight", DType::f32, {2, 4, 1}, std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8});
  made.put(layer + "linear_attn.A_log", DType::f32, {2}, std::vector<float>{-1, 3});
  made.put("language_model.lm_head.bias", DType::f32, {2}, std::vector<float>{7, 8});
  const auto tensors = decoded(made);
  std::vector<std::string> names;
  for (const auto& [name, info] : tensors.tensors()) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"lm_head.bias", own + "input_layernorm.weight", own + "linear_attn.A_log",
                                             own + "linear_attn.conv1d.weight", own + "mlp.up_proj.weight"}));
  EXPECT_EQ(tensors.at(own + "linear_attn.conv1d.weight").shape, (Shape{2, 1, 4}));
  EXPECT_EQ(values(tensors, own + "linear_attn.conv1d.weight"), (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(values(tensors, own + "input_layernorm.weight"), (std::vector<float>{0.5f, 0, -0.25f}));
  EXPECT_EQ(values(tensors, own + "linear_attn.A_log"), (std::vector<float>{-1, 3}));
  const auto weights = values(tensors, own + "mlp.up_proj.weight");
  for (size_t i = 0; i < weights.size(); ++i) {
    const float code = static_cast<float>(i % 4 + 1);
    EXPECT_EQ(weights[i], i < k ? code * 0.5f - 1 : code * 2 + 1) << i;
  }
}

}  // namespace
}  // namespace w4q::pipeline
