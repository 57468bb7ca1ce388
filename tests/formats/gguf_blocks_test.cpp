#include "formats/gguf_blocks.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "core/float_formats.h"
#include "core/rng.h"
#include "io/checkpoint.h"
#include "support.h"

namespace w4q::formats {
namespace {

std::vector<std::byte> encoded(GgmlType type, const std::vector<float>& values) {
  const auto& row = describe(type);
  std::vector<std::byte> blocks(values.size() / static_cast<size_t>(row.block) * static_cast<size_t>(row.block_bytes));
  gguf_encode(type, values, blocks);
  return blocks;
}

std::vector<float> decoded(GgmlType type, std::span<const std::byte> blocks) {
  const auto& row = describe(type);
  std::vector<float> values(blocks.size() / static_cast<size_t>(row.block_bytes) * static_cast<size_t>(row.block));
  gguf_decode(type, blocks, values);
  return values;
}

std::vector<float> normal_values(size_t count, uint64_t seed, double scale) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(scale * random_normal(seed, i));
  return values;
}

/// Types of a file whose blocks decode to what stands beside them.
int golden_types(const char* file) {
  const auto golden = io::Checkpoint::open(test::testdata() / "golden" / file);
  int types = 0;
  for (uint32_t number = 0; number < 64; ++number) {
    const auto* row = find_ggml_type(number);
    if (row == nullptr || !golden.contains(std::string(row->name) + ".blocks")) continue;
    SCOPED_TRACE(row->name);
    EXPECT_TRUE(gguf_decodes(row->type));
    const auto blocks = golden.load(std::string(row->name) + ".blocks");
    const auto expected = golden.load(std::string(row->name) + ".dequant");
    const auto values = decoded(row->type, blocks->bytes);
    EXPECT_EQ(values.size() * sizeof(float), expected->bytes.size());
    EXPECT_EQ(std::memcmp(values.data(), expected->bytes.data(), expected->bytes.size()), 0);
    ++types;
  }
  return types;
}

TEST(GgufBlocks, DecodeTheGoldenBlocksBitByBit) {
  EXPECT_EQ(golden_types("gguf_blocks.safetensors"), 12);
  EXPECT_EQ(golden_types("gguf_grids.safetensors"), 5);  // of random bytes, by the gguf package 0.19.0
}

TEST(GgufBlocks, OfEveryByteDecodeWithoutSurprise) {
  // Scales of any bits, infinite and NaN included: sanitizers watch.
  for (uint32_t number = 0; number < 64; ++number) {
    const auto* row = find_ggml_type(number);
    if (row == nullptr || !gguf_decodes(row->type)) continue;
    std::vector<std::byte> blocks(static_cast<size_t>(row->block_bytes) * 50);
    for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<std::byte>(random_bits(number, i));
    EXPECT_EQ(decoded(row->type, blocks).size(), static_cast<size_t>(row->block) * 50);
  }
}

/// |x − decode(encode(x))| in a block whose largest magnitude is `largest`: half a step, and what the f16 scale adds to
/// the farthest code, 2^-11 relative (Q4_0 has only 7 codes above zero, so its last step may be missing: a whole step).
TEST(GgufBlocks, EncodingErrsByAtMostAStep) {
  const auto values = normal_values(32 * 500, 7, 0.02);
  const struct {
    GgmlType type;
    double steps_across;  // of twice the largest magnitude
    double bound;         // in steps
  } rules[] = {{GgmlType::q4_0, 16, 1.0}, {GgmlType::q4_1, 15, 0.5}, {GgmlType::q8_0, 254, 0.5}};
  for (const auto& rule : rules) {
    const auto back = decoded(rule.type, encoded(rule.type, values));
    for (size_t block = 0; block < values.size(); block += 32) {
      double largest = 0;
      for (size_t i = 0; i < 32; ++i) largest = std::max(largest, std::abs(double{values[block + i]}));
      const double limit = 2 * largest / rule.steps_across * rule.bound + largest * 0x1p-10;
      for (size_t i = 0; i < 32; ++i) ASSERT_LE(std::abs(back[block + i] - values[block + i]), limit);
    }
  }
}

TEST(GgufBlocks, Q8_0RoundsHalvesAwayFromZero) {
  std::vector<float> values(32, 0);
  values[0] = 127;  // the scale is 1
  values[1] = 2.5f;
  values[2] = -2.5f;
  values[3] = -0.4f;
  const auto blocks = encoded(GgmlType::q8_0, values);
  EXPECT_EQ(blocks[0], std::byte{0x00});
  EXPECT_EQ(blocks[1], std::byte{0x3C});
  EXPECT_EQ(static_cast<int8_t>(blocks[3]), 3);
  EXPECT_EQ(static_cast<int8_t>(blocks[4]), -3);
  EXPECT_EQ(static_cast<int8_t>(blocks[5]), 0);
}

TEST(GgufBlocks, Q4_0MeetsTheValueOfLargestMagnitude) {
  std::vector<float> values(32, 0);
  values[5] = 4;  // the scale is −1/2: code 0 stands for 4
  values[20] = -3.6f;
  const auto blocks = encoded(GgmlType::q4_0, values);
  EXPECT_EQ(f32_from_f16(static_cast<uint16_t>(static_cast<int>(blocks[0]) | static_cast<int>(blocks[1]) << 8)), -0.5f);
  EXPECT_EQ(blocks[2 + 5], std::byte{0x80});
  EXPECT_EQ(blocks[2 + 4], std::byte{0xF8});  // weight 20 in the high nibble, the last of 15 codes
  EXPECT_EQ(decoded(GgmlType::q4_0, blocks)[5], 4.0f);
}

TEST(GgufBlocks, ZerosTinyAndHugeValuesStayFinite) {
  for (const GgmlType type : {GgmlType::q4_0, GgmlType::q4_1, GgmlType::q8_0, GgmlType::f16, GgmlType::bf16}) {
    SCOPED_TRACE(ggml_type_name(type));
    for (const float value : {0.0f, -0.0f, 1e-45f, -1e-39f, 1e-30f, gguf_largest(type), -gguf_largest(type)}) {
      std::vector<float> values(32, 0);
      values[3] = value;
      const auto back = decoded(type, encoded(type, values));
      for (const float decoded_value : back) EXPECT_TRUE(std::isfinite(decoded_value)) << value;
      if (std::abs(value) > 1) {
        EXPECT_NEAR(back[3] / value, 1, 0x1p-8) << value;
      }
    }
  }
}

TEST(GgufBlocks, PlanesComeBackAndDecodeToTheirValues) {
  constexpr size_t blocks = 40;
  std::vector<uint8_t> codes(blocks * 32), codes_back(codes.size());
  std::vector<uint16_t> scales(blocks), scales_back(blocks);
  for (size_t i = 0; i < blocks; ++i) {
    scales[i] = static_cast<uint16_t>(random_bits(1, i) & 0xBBFF);  // finite, of both signs
  }
  const auto fill = [&](uint32_t mask) {
    for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(random_bits(3, i) & mask);
  };

  fill(15);
  std::vector<std::byte> bytes(blocks * 18);
  gguf_pack_q4_0(codes, scales, bytes);
  gguf_unpack_q4_0(bytes, codes_back, scales_back);
  EXPECT_EQ(codes_back, codes);
  EXPECT_EQ(scales_back, scales);
  auto values = decoded(GgmlType::q4_0, bytes);
  for (size_t i = 0; i < codes.size(); ++i) {
    ASSERT_EQ(values[i], f32_from_f16(scales[i / 32]) * static_cast<float>(codes[i] - 8));
  }

  fill(255);
  bytes.resize(blocks * 34);
  gguf_pack_q8_0(codes, scales, bytes);
  gguf_unpack_q8_0(bytes, codes_back, scales_back);
  EXPECT_EQ(codes_back, codes);
  EXPECT_EQ(scales_back, scales);
  values = decoded(GgmlType::q8_0, bytes);
  for (size_t i = 0; i < codes.size(); ++i) {
    ASSERT_EQ(values[i], f32_from_f16(scales[i / 32]) * static_cast<float>(codes[i] - 128));
  }
}

TEST(GgufBlocks, WrongSizesAndTypesAreBugs) {
  std::vector<float> values(32);
  std::vector<std::byte> blocks(18);
  const auto refuse = [](auto action) { test::expect_error(ErrorCode::internal, {"GGUF"}, action); };
  refuse([&] { gguf_decode(GgmlType::q8_0, blocks, values); });
  refuse([&] { gguf_decode(GgmlType::iq2_xxs, blocks, values); });
  refuse([&] { gguf_encode(GgmlType::q6_k, values, blocks); });
  values.resize(31);
  refuse([&] { gguf_encode(GgmlType::q4_0, values, blocks); });
}

}  // namespace
}  // namespace w4q::formats
