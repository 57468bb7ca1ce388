// Stacks of experts that ModelOpt stores inputs first: each expert is the matrix that it would be by itself.
#include "checkpoint/turned_stacks.h"

#include <gtest/gtest.h>

#include "checkpoint/folder.h"
#include "core/float_formats.h"
#include "made_checkpoint.h"
#include "support.h"

namespace w4q::checkpoint {
namespace {

using test::MadeCheckpoint;

class TurnedStacks : public testing::Test {
 protected:
  std::vector<float> values(const MadeCheckpoint& made, const std::string& name) {
    made.write(folder_ / "made");
    const Folder folder = open_folder(folder_ / "made");
    const auto loaded = folder.tensors.load(name);
    EXPECT_EQ(loaded->dtype, DType::f32);
    const auto* const values = reinterpret_cast<const float*>(loaded->bytes.data());
    return {values, values + element_count(loaded->shape)};
  }

  static MadeCheckpoint stating(const char* algorithm) {
    MadeCheckpoint made;
    made.config = {{"model_type", "unseen"},
                   {"quantization_config", {{"quant_method", "modelopt"}, {"quant_algo", algorithm}}}};
    return made;
  }

  test::TemporaryFolder folder_;
};

const std::string stack = "model.layers.0.mlp.experts.down_proj";

TEST_F(TurnedStacks, FloatsOfEightBits) {
  constexpr int64_t experts = 3, k = 70, n = 5;
  for (const bool each : {false, true}) {
    auto made = stating("FP8");
    std::vector<uint8_t> codes(static_cast<size_t>(experts * k * n));
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 37 % 127);
    const std::vector<float> scales = each ? std::vector<float>{0.5f, 2, 3} : std::vector<float>{0.25f};
    made.put(stack, DType::f8_e4m3, {experts, k, n}, codes);
    made.put(stack + "_weight_scale", DType::f32, each ? Shape{experts} : Shape{}, scales);
    made.put(stack + "_input_scale", DType::f32, {}, std::vector<float>{1});
    for (int64_t expert = 0; expert < experts; ++expert) {
      const auto found = values(made, concat(stack, ".", expert, ".weight"));
      ASSERT_EQ(found.size(), static_cast<size_t>(k * n));
      for (int64_t i = 0; i < n * k; ++i) {
        const auto code = codes[static_cast<size_t>((expert * k + i % k) * n + i / k)];
        EXPECT_EQ(found[static_cast<size_t>(i)], f32_from_e4m3(code) * scales[each ? static_cast<size_t>(expert) : 0]);
      }
    }
    EXPECT_FALSE(open_folder(folder_ / "made").tensors.contains(stack));
  }
}

TEST_F(TurnedStacks, FloatsOfFourBits) {
  constexpr int64_t experts = 2, k = 32, n = 3;
  auto made = stating("NVFP4");
  std::vector<uint8_t> codes(static_cast<size_t>(experts * k / 2 * n)),
      scales(static_cast<size_t>(experts * k / 16 * n));
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 53);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<uint8_t>(48 + i);
  made.put(stack, DType::u8, {experts, k / 2, n}, codes);
  made.put(stack + "_weight_scale", DType::f8_e4m3, {experts, k / 16, n}, scales);
  made.put(stack + "_weight_scale_2", DType::f32, {}, std::vector<float>{0.5f});
  for (int64_t expert = 0; expert < experts; ++expert) {
    const auto found = values(made, concat(stack, ".", expert, ".weight"));
    ASSERT_EQ(found.size(), static_cast<size_t>(k * n));
    for (int64_t i = 0; i < n * k; ++i) {
      const int64_t row = i / k, col = i % k;
      const int byte = codes[static_cast<size_t>((expert * k / 2 + col / 2) * n + row)];
      const float scale = f32_from_e4m3(scales[static_cast<size_t>((expert * k / 16 + col / 16) * n + row)]);
      EXPECT_EQ(found[static_cast<size_t>(i)], test::e2m1_values[byte >> col % 2 * 4 & 15] * (scale * 0.5f));
    }
  }
}

TEST_F(TurnedStacks, PowersOfOutputs) {
  constexpr int64_t experts = 2, k = 7, n = 64;
  auto made = stating("MXFP8");
  std::vector<uint8_t> codes(static_cast<size_t>(experts * k * n)), scales(codes.size() / 32);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 37 % 127);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<uint8_t>(120 + i % 16);
  made.put(stack, DType::f8_e4m3, {experts, k, n}, codes);
  made.put(stack + "_weight_scale", DType::u8, {experts, k, n / 32}, scales);
  for (int64_t expert = 0; expert < experts; ++expert) {
    const auto found = values(made, concat(stack, ".", expert, ".weight"));
    ASSERT_EQ(found.size(), static_cast<size_t>(k * n));
    for (int64_t i = 0; i < n * k; ++i) {
      const auto at = static_cast<size_t>((expert * k + i % k) * n + i / k);
      EXPECT_EQ(found[static_cast<size_t>(i)], f32_from_e4m3(codes[at]) * f32_from_e8m0(scales[at / 32]));
    }
  }
}

/// Of scales that lie over codes in another way, nothing is turned.
TEST_F(TurnedStacks, OthersStay) {
  auto made = stating("MXFP8");
  made.put(stack, DType::f8_e4m3, {2, 32, 64}, std::vector<uint8_t>(4096, 56));
  made.put(stack + "_weight_scale", DType::u8, {2, 16, 2}, std::vector<uint8_t>(64, 127));
  made.write(folder_ / "made");
  EXPECT_TRUE(turn_stacks(io::Checkpoint::open(folder_ / "made")).contains(stack));
  // Without an expert it would be lost without a word.
  made.put(stack, DType::f8_e4m3, {0, 32, 64}, std::vector<uint8_t>{});
  made.put(stack + "_weight_scale", DType::f32, {}, std::vector<float>{1});
  made.write(folder_ / "made");
  EXPECT_TRUE(turn_stacks(io::Checkpoint::open(folder_ / "made")).contains(stack));
}

}  // namespace
}  // namespace w4q::checkpoint
