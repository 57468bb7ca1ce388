// Table-coded formats that are not schemes: what NVFP4 and MXFP4 need of the family.
#include "formats/table/table_format.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/float_formats.h"
#include "formats/scale_codec.h"
#include "io/checkpoint.h"
#include "kbit_samples.h"
#include "support.h"

namespace w4q::formats {
namespace {

constexpr TableFormat nvfp4{
    .bits = 4, .ascending = false, .block = 16, .scale = ScaleType::e4m3, .ties = Ties::even, .tensor_scale = true};
constexpr TableFormat mxfp4{.bits = 4, .ascending = false, .block = 32, .scale = ScaleType::e8m0, .ties = Ties::even};

std::vector<float> e2m1_table() {
  std::vector<float> table(16);
  for (uint32_t code = 0; code < 16; ++code) table[code] = f32_from_e2m1(code);
  return table;
}

PackedWeight encode(const TableFormat& format, std::span<const float> values, int64_t n, int64_t k) {
  PackedWeight weight = allocate_planes({}, canonical_layout, n, k, table_planes(format, n, k, "w"));
  table_encode(format, values, e2m1_table(), weight);
  return weight;
}

std::vector<float> decode(const TableFormat& format, const PackedWeight& weight) {
  std::vector<float> values(static_cast<size_t>(weight.n * weight.k));
  const auto k = static_cast<size_t>(weight.k);
  for (int64_t row = 0; row < weight.n; ++row) {
    table_decode_row(format, weight, row, std::span(values).subspan(static_cast<size_t>(row) * k, k));
  }
  return values;
}

uint32_t code_at(const TableFormat& format, const PackedWeight& weight, int64_t row, int64_t col) {
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  uint32_t code = 0;
  for (int bit = 0; bit < format.bits; ++bit) {
    const BitPlace at = table_place(format, weight.k, row, col, bit);
    code |= (words[static_cast<size_t>(at.word)] >> at.bit & 1u) << bit;
  }
  return code;
}

/// What compressed-tensors makes of the same weight: its codes, −0 among them, and its scales, byte for byte.
TEST(TableFormat, EncodesTheGoldenNvfp4Weight) {
  const auto file = io::Checkpoint::open(test::testdata() / "golden" / "ct_nvfp4.safetensors");
  constexpr int64_t n = 16, k = 64;
  std::vector<float> values(n * k);
  std::memcpy(values.data(), file.load("in.weight")->bytes.data(), values.size() * sizeof(float));
  const PackedWeight weight = encode(nvfp4, values, n, k);
  EXPECT_TRUE(std::ranges::equal(weight.plane(PlaneRole::scales).bytes.bytes(), file.load("weight_scale")->bytes));
  float global = 0;  // its scales are divided by this one
  std::memcpy(&global, file.load("weight_global_scale")->bytes.data(), sizeof global);
  const float factor = weight.plane(PlaneRole::tensor_scale).bytes.as<float>()[0];
  EXPECT_FLOAT_EQ(factor, 1 / global);
  const auto packed = file.load("weight_packed");
  const std::vector<float> decoded = decode(nvfp4, weight);
  int negative_zeros = 0;
  for (int64_t i = 0; i < n * k; ++i) {
    const uint32_t code = static_cast<uint32_t>(packed->bytes[static_cast<size_t>(i / 2)]) >> (i % 2 * 4) & 15u;
    ASSERT_EQ(code_at(nvfp4, weight, i / k, i % k), code) << i;
    const float scale = f32_from_e4m3(weight.plane(PlaneRole::scales).bytes.as<uint8_t>()[static_cast<size_t>(i / 16)]);
    ASSERT_EQ(decoded[static_cast<size_t>(i)], f32_from_e2m1(code) * (scale * factor));
    negative_zeros += code == 8;
    ASSERT_EQ(std::signbit(decoded[static_cast<size_t>(i)]), code >= 8);
  }
  EXPECT_EQ(negative_zeros, 17);
  EXPECT_NO_THROW(table_validate(nvfp4, weight, "w"));
}

TEST(TableFormat, RecodingWhatWasDecodedKeepsEveryCode) {
  for (const TableFormat& format : {nvfp4, mxfp4}) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{3, 200}, {1, 1}, {5, 33}, {2, 48}}) {
      const PackedWeight once = encode(format, test::sample(test::distributions[3], n, k), n, k);
      EXPECT_NO_THROW(table_validate(format, once, "w"));
      PackedWeight again = once.clone();
      table_recode(format, again, decode(format, once));
      EXPECT_TRUE(bytes_equal(again, once)) << n << " × " << k;
    }
  }
}

/// A block of 16 in a unit of 32 has a scale of its own; MXFP4's are powers of two that no value outgrows.
TEST(TableFormat, ErrorsStayBelowTheBound) {
  constexpr int64_t n = 4, k = 200;
  for (const test::Distribution& distribution : {test::distributions[0], test::distributions[3]}) {
    const std::vector<float> values = test::sample(distribution, n, k);
    for (const TableFormat& format : {nvfp4, mxfp4}) {
      const PackedWeight weight = encode(format, values, n, k);
      const std::vector<float> decoded = decode(format, weight);
      const double factor =
          format.tensor_scale ? double{weight.plane(PlaneRole::tensor_scale).bytes.as<float>()[0]} : 1.0;
      TableFormat blocks = format;  // in units of the tensor's factor
      blocks.tensor_scale = false;
      for (int64_t i = 0; i < n * k; ++i) {
        const int64_t row = i / k, first = i % k / format.block * format.block;
        double absmax = 0;
        for (int64_t col = first; col < std::min(first + format.block, k); ++col) {
          absmax = std::max(absmax, std::abs(double{values[static_cast<size_t>(row * k + col)]}));
        }
        const double bound = table_error_bound(blocks, absmax / factor, e2m1_table()) * factor * (1 + 0x1p-20);
        ASSERT_LE(std::abs(double{values[static_cast<size_t>(i)]} - decoded[static_cast<size_t>(i)]), bound) << i;
      }
    }
  }
}

TEST(TableFormat, ValidateRefusesWhatCannotBe) {
  const auto refused = [](std::string_view part, auto&& damage) {
    PackedWeight weight = encode(nvfp4, test::sample(test::distributions[0], 2, 40), 2, 40);
    damage(weight);
    test::expect_error(ErrorCode::bad_file, {"layer.x", part}, [&] { table_validate(nvfp4, weight, "layer.x"); });
  };
  refused("row 1, block 1", [](PackedWeight& w) { w.plane(PlaneRole::scales).bytes.as<uint8_t>()[4] = 0x7F; });
  refused("negative", [](PackedWeight& w) { w.plane(PlaneRole::scales).bytes.as<uint8_t>()[0] |= 0x80; });
  refused("tensor_scale", [](PackedWeight& w) { w.plane(PlaneRole::tensor_scale).bytes.as<float>()[0] = 0; });
  refused("padding", [](PackedWeight& w) { w.plane(PlaneRole::codes).bytes.as<uint32_t>().back() |= 1u << 31; });
}

/// Entries in any order: codes are indices, and the sign of a zero survives where it is no table of sign and magnitude.
TEST(NearestEntry, TellsEqualEntriesApartByTheSignBit) {
  const std::vector<float> table = {2.0f, 0.0f, -1.0f, -0.0f, 5.0f, 5.0f, -7.0f, 1.0f};
  const NearestEntry nearest(table);
  EXPECT_EQ(nearest(0.0f), 1u);
  EXPECT_EQ(nearest(-0.0f), 3u);
  EXPECT_EQ(nearest(-0.2f), 3u);
  EXPECT_EQ(nearest(1.5f), 7u);  // a tie: the lower entry
  EXPECT_EQ(nearest(1.6f), 0u);
  EXPECT_EQ(nearest(100.0f), 4u);
  EXPECT_EQ(nearest(-100.0f), 6u);
}

TEST(NearestEntry, RoundsAsE2m1Does) {
  const NearestEntry nearest(e2m1_table(), Ties::even);
  for (int i = -1024; i <= 1024; ++i) {
    const float x = static_cast<float>(i) / 128;  // all ties, and beyond both ends
    ASSERT_EQ(nearest(x), e2m1_from_f32(x)) << x;
  }
  EXPECT_EQ(nearest(-0.0f), 8u);
}

}  // namespace
}  // namespace w4q::formats
