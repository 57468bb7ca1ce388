// Scales of FP8 in blocks, of matrices that have too few of them to be known one by one.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "core/float_formats.h"
#include "core/rng.h"
#include "made_contents.h"

namespace w4q::verify {
namespace {

using test::MadeCheckpoint;
using test::Storage;
using ::testing::HasSubstr;

constexpr const char* linear_roles[] = {"self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"};
constexpr int layer_count = 24;

std::string linear_path(int layer, const char* role) { return concat("model.layers.", layer, ".", role); }

class ContentsBlocks : public MadeContents {
 protected:
  /// Matrices of 4 × 8 blocks of 8 × 8 weights of one size, of which each has one large weight that its scale is made of.
  ContentsBlocks() {
    test::MadeWriter(made_, Storage::bf16).dense("model.embed_tokens.weight", {64, 64});
    uint64_t drawn = 0;
    for (int layer = 0; layer < layer_count; ++layer) {
      for (const char* role : linear_roles) {
        std::vector<float> scales;
        for (int i = 0; i < 32; ++i) scales.push_back(1e-3f * std::exp(0.1f * normal(drawn++)));
        std::vector<uint8_t> codes;
        for (size_t at = 0; at < 32 * 64; ++at) {
          const float scale = scales[at / 64 / 8 * 8 + at % 64 / 8];
          const bool largest = at / 64 % 8 == 3 && at % 8 == 5;
          // The same sizes in every block.
          const float value = 0.1f * normal(at / 64 % 8 * 8 + at % 8) / scale;
          codes.push_back(e4m3_from_f32(largest ? 448 : std::clamp(value, -400.0f, 400.0f)));
        }
        made_.put(linear_path(layer, role) + ".weight", DType::f8_e4m3, {32, 64}, codes);
        made_.put(linear_path(layer, role) + ".weight_scale_inv", DType::f32, {4, 8}, scales);
      }
    }
    made_.config = {{"model_type", "unseen"},
                    {"num_hidden_layers", layer_count},
                    {"tie_word_embeddings", true},
                    {"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {8, 8}}}}};
  }

  static float normal(uint64_t at) { return static_cast<float>(random_normal(3, at)); }
  std::span<float> scales(int layer, const char* role) {
    auto& bytes = made_.tensors.at(linear_path(layer, role) + ".weight_scale_inv").bytes;
    return {reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)};
  }
  static void shuffle(std::span<float> values) {
    const std::vector<float> before(values.begin(), values.end());
    for (size_t i = 0; i < values.size(); ++i) values[i] = before[(i * 13 + 5) % values.size()];
  }
  std::string said() { return faults_of(headers_of(made_)); }

  MadeCheckpoint made_;
};

TEST_F(ContentsBlocks, SoundOnesAreLeftAlone) { EXPECT_EQ(said(), ""); }

TEST_F(ContentsBlocks, OfOneMatrix) {
  shuffle(scales(1, "mlp.up_proj"));
  EXPECT_THAT(said(), HasSubstr("layers.1.mlp.up_proj has the scales of other blocks: sizes of its blocks differ by"));
}

TEST_F(ContentsBlocks, OfAWholeRole) {
  for (int layer = 0; layer < layer_count; ++layer) shuffle(scales(layer, "mlp.down_proj"));
  const std::string found = said();
  EXPECT_THAT(found, HasSubstr("layers.0.mlp.down_proj has the scales of other blocks: they follow from its codes by"));
  EXPECT_THAT(found, HasSubstr("as those of all of its role"));
}

TEST_F(ContentsBlocks, OfAWholeFile) {
  for (int layer = 0; layer < layer_count; ++layer) {
    for (const char* role : linear_roles) shuffle(scales(layer, role));
  }
  EXPECT_THAT(said(), HasSubstr("as in all of this file"));
}

TEST_F(ContentsBlocks, OneScaleForAll) {
  std::ranges::fill(scales(2, "mlp.up_proj"), scales(2, "mlp.up_proj")[0]);
  EXPECT_THAT(said(), HasSubstr("layers.2.mlp.up_proj has one scale for all its blocks, but each of them"));
}

TEST_F(ContentsBlocks, CodesOfOtherBlocks) {
  auto& bytes = made_.tensors.at(linear_path(1, "mlp.up_proj") + ".weight").bytes;
  // Every other block's largest one stands in the block beside it.
  for (size_t at = 0; at + 8 < bytes.size(); ++at) {
    if (bytes[at] == std::byte{0x7E} && at % 16 == 5) std::swap(bytes[at], bytes[at + 7]);
  }
  EXPECT_THAT(said(), HasSubstr("layers.1.mlp.up_proj has no code at the end of the range in"));
}

}  // namespace
}  // namespace w4q::verify
