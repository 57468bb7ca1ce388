// What the weights rung asks of every weight by default: seeded faults miss it, sound folders of every step hold it.
#include "verify/weights/limit.h"

#include <gmock/gmock.h>

#include <cstring>

#include "core/float_formats.h"
#include "core/progress.h"
#include "made_checkpoint.h"
#include "packed_model.h"
#include "verify/weights/weights.h"

namespace w4q::verify {
namespace {

const std::string planes = "model.layers.3.mlp.down_proj.0.";

WeightReport compare(const std::filesystem::path& model) {
  return compare_with_base(model::open_model(model), model::open_model(test::bundled_model()));
}

/// Quantizes, changes one plane and says which weights are named.
std::vector<std::string> named(int bits, const test::Change& change) {
  const test::TemporaryFolder folder;
  const auto model = test::quantized_model(folder, bits);
  test::rewrite(model, change);
  return faults_of(compare(model));
}

std::vector<std::string> named(int bits, const std::string& role,
                               const std::function<void(std::vector<std::byte>&)>& damage) {
  return named(bits, [&](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
    if (tensor.name == planes + role) damage(bytes);
    return true;
  });
}

/// Of rows that hold 1 / factor of the base's, and miss nothing else.
WeightLimit limit_of_rows(const std::vector<double>& factors) {
  WeightLimit limit;
  limit.bits = 4, limit.values = static_cast<int64_t>(256 * factors.size());
  for (const double factor : factors) {
    const double found = 1 / factor;
    limit.rows.push_back(
        {.signal = 1, .noise = (1 - found) * (1 - found), .product = found, .chance = 1e-6, .rounded_noise = 0.01});
  }
  return limit;
}

/// Errors that were fed back leave a row in ten with little of the base's; scales of other rows are in all of them.
TEST(WeightLimit, RowsSpreadWhereMostOfThemDo) {
  std::vector<double> few(128, 1), all(128, 1);
  for (size_t row = 0; row < 128; ++row) {
    few[row] = row % 10 == 0 ? 0.6 : 1 + 0.001 * static_cast<double>(row % 3);
    all[row] = row % 2 == 0 ? 0.8 : 1.2;
  }
  EXPECT_LT(limit_of_rows(few).row_spread(), 0.01);
  EXPECT_GT(limit_of_rows(all).row_spread(), 0.2);
}

void expect_named(const std::vector<std::string>& faults, int bits) {
  ASSERT_EQ(faults.size(), 1u) << bits;
  EXPECT_TRUE(faults.front().starts_with("model.layers.3.mlp.down_proj: ")) << faults.front();
}

void exchange_halves(std::vector<std::byte>& bytes) {
  std::rotate(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(bytes.size() / 2), bytes.end());
}

TEST(WeightLimit, DamagedPlanesAreNamed) {
  for (int bits = 2; bits <= 5; ++bits) {
    expect_named(named(bits, "scales", [](auto& bytes) { std::ranges::fill(bytes, std::byte{0}); }), bits);
    expect_named(named(bits, "codes", exchange_halves), bits);
    expect_named(named(bits, "codes", [](auto& bytes) { std::ranges::reverse(bytes); }), bits);
    expect_named(named(bits, "codebook",
                       [](auto& bytes) {
                         for (size_t at = 0; at < bytes.size(); at += 4) {
                           float value = 0;
                           std::memcpy(&value, bytes.data() + at, 4);
                           value *= 2;
                           std::memcpy(bytes.data() + at, &value, 4);
                         }
                       }),
                 bits);
  }
}

/// These two layers are alike: 8.89 dB apart at 4 bits, which 2 bits cannot tell.
TEST(WeightLimit, AnotherLayersPlanesAreNamed) {
  std::map<std::string, std::vector<std::byte>> other;
  const std::string from = "model.layers.2.mlp.down_proj.0.";
  for (int bits = 4; bits <= 5; ++bits) {
    other.clear();
    expect_named(named(bits,
                       [&](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
                         if (tensor.name.starts_with(from)) other[tensor.name.substr(from.size())] = bytes;
                         if (tensor.name.starts_with(planes)) bytes = other.at(tensor.name.substr(planes.size()));
                         return true;
                       }),
                 bits);
  }
}

TEST(WeightLimit, TwoExchangedRowsAreNamedFrom4BitsOn) {
  for (int bits = 4; bits <= 5; ++bits) {
    expect_named(named(bits,
                       [](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
                         if (tensor.name != planes + "codes" && tensor.name != planes + "scales") return true;
                         const auto row = static_cast<std::ptrdiff_t>(bytes.size()) / tensor.shape[0];
                         std::swap_ranges(bytes.begin() + 7 * row, bytes.begin() + 8 * row, bytes.begin() + 90 * row);
                         return true;
                       }),
                 bits);
  }
}

/// Where all others are rounded to nearest, one code that is not is a fault.
TEST(WeightLimit, OneBitOfACodeIsNamed) {
  for (int bits = 2; bits <= 5; ++bits) {
    const auto faults = named(bits, [](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
      if (tensor.name == planes + "codes") bytes[4001] ^= std::byte{4};
      return true;
    });
    ASSERT_EQ(faults.size(), 1u) << bits;
    EXPECT_NE(faults.front().find(planes.substr(0, planes.size() - 3)), std::string::npos) << faults.front();
    EXPECT_NE(faults.front().find("1 of 196608 codes"), std::string::npos) << faults.front();
  }
}

TEST(WeightLimit, OneScaleIsNamed) {
  const auto faults = named(4, [](io::PlannedTensor& tensor, std::vector<std::byte>& bytes) {
    if (tensor.name == planes + "scales") bytes[100] ^= std::byte{0x10};
    return true;
  });
  ASSERT_EQ(faults.size(), 1u);
  EXPECT_NE(faults.front().find("codes are not "), std::string::npos) << faults.front();
}

/// Queries that are 16 times as large give keys, which servers fuse with them, a factor beside which the scales of their least
/// columns are coarse: these are rounded so, too.
TEST(WeightLimit, AFactorThatFusedWeightsShareIsNoFault) {
  set_progress_enabled(false);
  const test::TemporaryFolder folder;
  auto made = test::MadeCheckpoint::of(test::bundled_model());
  const std::string path = "model.layers.2.self_attn.";
  const auto scale = [&](const std::string& name, size_t columns, float by) {
    auto values = made.values<uint16_t>(path + name);
    for (size_t i = 0; i < values.size(); ++i) {
      if (i % 256 < columns) values[i] = bf16_from_f32(f32_from_bf16(values[i]) * by);
    }
  };
  scale("q_proj.weight", 256, 16);
  scale("k_proj.weight", 16, 0x1p-6f);
  made.write(folder / "base");
  pipeline::QuantizeRequest request;
  request.model = folder / "base";
  request.output = folder / "q";
  request.scheme = formats::parse_scheme("nvfp4");
  request.method = quantize::rounding_quantizer(request.scheme).name;
  pipeline::quantize_model(request);
  const auto report = compare_with_base(model::open_model(folder / "q"), model::open_model(folder / "base"));
  EXPECT_THAT(faults_of(report), ::testing::IsEmpty());
  for (const auto& tensor : report.tensors) EXPECT_EQ(tensor.limit->count(&RoundedRow::unlike), 0) << tensor.name;
}

TEST(WeightLimit, SoundFoldersOfEverySchemeHold) {
  for (const char* scheme :
       {"kbit2-b32-e4m4", "kbit3-b32-f16", "kbit5-b32-e4m4", "rotated2-d128", "rotated4-row-f32", "int2-row-f16",
        "int2-g64-f16-asym", "int3-g128-bf16", "int4-g32-f32", "int8-g128-f16-asym", "int8-row-f16"}) {
    const test::TemporaryFolder folder;
    const auto report = compare(test::quantized_model(folder, formats::parse_scheme(scheme)));
    EXPECT_TRUE(faults_of(report).empty()) << scheme;
    for (const auto& tensor : report.tensors) {
      ASSERT_TRUE(tensor.limit) << scheme << " " << tensor.name;
      // The very rounding that the limit is made of.
      EXPECT_NEAR(tensor.limit->noise / tensor.limit->rounded_noise, 1, 0.02) << scheme << " " << tensor.name;
    }
  }
}

}  // namespace
}  // namespace w4q::verify
