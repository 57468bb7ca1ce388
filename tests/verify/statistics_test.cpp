// What the statistics rung says of seeded faults, without a base and without digests, and of sound folders.
#include "verify/statistics/statistics.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/float_formats.h"
#include "core/rng.h"
#include "packed_model.h"
#include "quantize/rounding.h"
#include "small_model.h"
#include "verify/statistics/orders.h"

namespace w4q::verify {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

using Bytes = std::vector<std::byte>;

std::vector<std::string> faults_of_folder(const std::filesystem::path& model) {
  return check_statistics(model::open_model(model)).faults;
}

/// Of the bundled model at 4 bits with one plane changed.
class Statistics : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { test::quantized_model(folder(), 4); }
  static const test::TemporaryFolder& folder() {
    static const test::TemporaryFolder folder;
    return folder;
  }

  static std::vector<std::string> faults(const test::Change& change) {
    const auto copy = folder() / "damaged";
    std::filesystem::remove_all(copy);
    std::filesystem::copy(folder() / "q", copy, std::filesystem::copy_options::recursive);
    test::rewrite(copy, change);
    return faults_of_folder(copy);
  }

  static std::vector<std::string> faults(const std::string& plane, const std::function<void(Bytes&)>& damage) {
    return faults([&](io::PlannedTensor& tensor, Bytes& bytes) {
      if (tensor.name == plane) damage(bytes);
      return true;
    });
  }
};

void exchange_halves(Bytes& bytes) {
  std::rotate(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(bytes.size() / 2), bytes.end());
}

TEST_F(Statistics, ASoundFolderHasNoFaults) {
  const auto report = check_statistics(model::open_model(folder() / "q"));
  EXPECT_THAT(report.faults, IsEmpty());
  EXPECT_THAT(report.warnings, IsEmpty());
  EXPECT_EQ(report.passes.size(), 28u);
}

TEST_F(Statistics, PlanesThatDoNotBelongTogetherAreNamed) {
  for (const std::string linear : {"model.layers.1.mlp.up_proj", "model.layers.3.self_attn.k_proj"}) {
    const auto named = Contains(StartsWith(linear + ": "));
    EXPECT_THAT(faults(linear + ".0.scales", [](Bytes& bytes) { std::ranges::fill(bytes, std::byte{0}); }), named);
    EXPECT_THAT(faults(linear + ".0.scales", exchange_halves), named);
    EXPECT_THAT(faults(linear + ".0.scales", [](Bytes& bytes) { std::ranges::reverse(bytes); }), named);
    EXPECT_THAT(faults(linear + ".0.codes", exchange_halves), named);
    EXPECT_THAT(faults(linear + ".0.codes",
                       [](Bytes& bytes) {
                         for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(random_bits(7, i));
                       }),
                named);
  }
}

TEST_F(Statistics, PlanesThatStandTwiceAreNamed) {
  Bytes first;
  const auto found = faults([&](io::PlannedTensor& tensor, Bytes& bytes) {
    if (tensor.name == "model.layers.1.mlp.down_proj.0.codes") first = bytes;
    if (tensor.name == "model.layers.2.mlp.down_proj.0.codes") bytes = first;
    return true;
  });
  EXPECT_THAT(found, Contains(StartsWith("model.layers.2.mlp.down_proj: its codes are those of")));
}

/// Codes and scales of two layers together: only what they write and read tells.
TEST_F(Statistics, LinearsInEachOthersPlaceAreNamed) {
  std::map<std::string, Bytes> planes;
  const std::string one = "model.layers.1.mlp.up_proj", other = "model.layers.3.mlp.up_proj";
  faults([&](io::PlannedTensor& tensor, Bytes& bytes) {
    planes[tensor.name] = bytes;
    return true;
  });
  const auto found = faults([&](io::PlannedTensor& tensor, Bytes& bytes) {
    for (const auto& [from, to] : {std::pair(one, other), std::pair(other, one)}) {
      if (tensor.name.starts_with(from + ".0.")) bytes = planes.at(to + tensor.name.substr(from.size()));
    }
    return true;
  });
  // Which of the two, up or down, only a third would tell, and those may have been scaled.
  EXPECT_THAT(found, Contains(AllOf(HasSubstr("model.layers.1.mlp."), HasSubstr("in their place"))));
  EXPECT_THAT(found, Contains(AllOf(HasSubstr("model.layers.3.mlp."), HasSubstr("in their place"))));
}

/// What is so in no other weight.
TEST_F(Statistics, OneBlockAndOneTableAreNamed) {
  const std::string linear = "model.layers.1.mlp.up_proj";
  // A block's 32 codes are four words: a few such blocks a sound weight may have, too.
  const auto blocks = [&](int64_t count) {
    return faults(linear + ".0.codes", [&](Bytes& bytes) {
      for (int64_t i = 0; i < count; ++i) std::fill_n(bytes.begin() + 160 + 32 * i, 16, std::byte{0});  // every other
    });
  };
  EXPECT_THAT(blocks(4), IsEmpty());
  EXPECT_THAT(blocks(40), ElementsAre(StartsWith(linear + ": all codes are the same in 40 of ")));
  const auto table = faults(linear + ".0.codebook", [](Bytes& bytes) { bytes[21] ^= std::byte{1}; });
  EXPECT_THAT(table, ElementsAre(StartsWith(linear + ": entry 5 of its table is ")));
}

/// 33 inputs are a block and a rest of one code, which is the same throughout.
TEST(RaggedBlocks, ARestOfOneCodeIsNoConstantBlock) {
  const test::TemporaryFolder folder;
  test::write_small_model(model::architecture_row("dots1"), folder / "m",
                          {{"hidden_size", 128}, {"intermediate_size", 33}, {"moe_intermediate_size", 64}});
  pipeline::QuantizeRequest request;
  request.model = folder / "m";
  request.output = folder / "q";
  request.scheme.bits = 4;
  pipeline::quantize_model(request);
  EXPECT_THAT(faults_of_folder(folder / "q"), IsEmpty());
}

TEST_F(Statistics, KeptTensorsThatNoModelHasAreNamed) {
  const std::string norm = "model.layers.1.input_layernorm.weight", table = "model.embed_tokens.weight";
  // What training, or rows for further tokens, leave, too.
  EXPECT_THAT(faults(norm, [](Bytes& bytes) { bytes[2 * 9 + 1] ^= std::byte{0x80}; }), IsEmpty());
  const auto half = [](Bytes& bytes) { std::fill(bytes.begin() + bytes.size() / 2, bytes.end(), std::byte{0}); };
  EXPECT_THAT(faults(table, half), IsEmpty());
  EXPECT_THAT(faults(norm, [](Bytes& bytes) { std::ranges::fill(bytes, std::byte{0}); }),
              ElementsAre(StartsWith(norm + ": is zero in all channels")));
  const auto relabelled = faults([&](io::PlannedTensor& tensor, Bytes&) {
    if (tensor.name == table) tensor.dtype = DType::f16;
    return true;
  });
  EXPECT_THAT(relabelled, ElementsAre(HasSubstr("BF16 labelled F16")));
}

/// A folder of the bundled model in a scheme, with planes changed.
std::vector<std::string> faults_in(const char* scheme, const test::Change& change) {
  const test::TemporaryFolder folder;
  const auto model = test::quantized_model(folder, formats::parse_scheme(scheme));
  test::rewrite(model, change);
  return faults_of_folder(model);
}

TEST(StatisticsOfOtherSchemes, SignedCodesBesideZeroPointsAreNamed) {
  const auto found = faults_in("int4-g128-f16-asym", [](io::PlannedTensor& tensor, Bytes& bytes) {
    if (!tensor.name.ends_with(".0.codes")) return true;
    for (std::byte& byte : bytes) byte ^= std::byte{0x88};
    return true;
  });
  EXPECT_EQ(
      std::ranges::count_if(found, [](const auto& fault) { return fault.find("signed codes") != std::string::npos; }),
      28);
}

TEST(StatisticsOfOtherSchemes, OneScaleThatIsFarTooLargeIsNamed) {
  const std::string linear = "model.layers.2.self_attn.q_proj";
  const auto found = faults_in("nvfp4", [&](io::PlannedTensor& tensor, Bytes& bytes) {
    if (tensor.name != linear + ".0.scales") return true;
    // Of the row with the smallest scales the median, which 16 times as large still is an E4M3.
    const auto groups = static_cast<std::ptrdiff_t>(tensor.shape[1]);
    const auto median_of = [&](std::ptrdiff_t row) {
      std::vector<std::byte> scales(bytes.begin() + row * groups, bytes.begin() + (row + 1) * groups);
      std::ranges::sort(scales);
      return scales[scales.size() / 2];
    };
    std::ptrdiff_t least = 0;
    for (std::ptrdiff_t row = 1; row < tensor.shape[0]; ++row) least = median_of(row) < median_of(least) ? row : least;
    auto& scale = *std::find(bytes.begin() + least * groups, bytes.end(), median_of(least));
    EXPECT_LT(std::to_integer<int>(scale), 0x5F);
    scale = static_cast<std::byte>(std::to_integer<int>(scale) + 0x20);  // four more in its exponent
    return true;
  });
  EXPECT_THAT(found, ElementsAre(StartsWith(linear + ": the scale of row ")));
}

/// One scale of a folder of integers, as F16, at a third of them.
std::vector<std::string> faults_with_scale(const std::string& linear, uint16_t (*change)(uint16_t)) {
  return faults_in("int4-g128-f16", [&](io::PlannedTensor& tensor, Bytes& bytes) {
    if (tensor.name != linear + ".0.scales") return true;
    uint16_t scale = 0;
    std::byte* const at = bytes.data() + bytes.size() / 6 * 2;
    std::memcpy(&scale, at, sizeof(scale));
    scale = change(scale);
    std::memcpy(at, &scale, sizeof(scale));
    return true;
  });
}

TEST(StatisticsOfOtherSchemes, ATurnedSignAndAScaleOfNextToNothingAreNamed) {
  const std::string linear = "model.layers.1.mlp.gate_proj";
  EXPECT_THAT(faults_with_scale(linear, [](uint16_t scale) { return static_cast<uint16_t>(scale | 0x8000); }),
              ElementsAre(StartsWith(linear + ": has 1 negative scales")));
  // In groups of 64 there are four of a row to be compared.
  const auto quiet = faults_in("int4-g64-f16", [&](io::PlannedTensor& tensor, Bytes& bytes) {
    if (tensor.name == linear + ".0.scales") bytes[600] = std::byte{1}, bytes[601] = std::byte{0};
    return true;
  });
  EXPECT_THAT(quiet, ElementsAre(AllOf(StartsWith(linear + ": the scale of row "), HasSubstr("is lost"))));
}

TEST(StatisticsOfOtherSchemes, ScalesOfTheOtherTypeAreNamed) {
  const auto found = faults_in("int4-g64-f16", [](io::PlannedTensor& tensor, Bytes& bytes) {
    if (!tensor.name.ends_with(".0.scales")) return true;
    for (size_t at = 0; at < bytes.size(); at += 2) {
      uint16_t scale = 0;
      std::memcpy(&scale, bytes.data() + at, sizeof(scale));
      scale = bf16_from_f32(f32_from_f16(scale));
      std::memcpy(bytes.data() + at, &scale, sizeof(scale));
    }
    return true;
  });
  EXPECT_THAT(found, Contains(HasSubstr("BF16 labelled F16")));
}

TEST(ChannelOrders, ArePermutations) {
  for (const ChannelOrder& order : channel_orders()) {
    std::vector<size_t> places;
    for (size_t i = 0; i < 256; ++i) places.push_back(order.from(i, 256));
    std::ranges::sort(places);
    std::vector<size_t> all(256);
    std::iota(all.begin(), all.end(), size_t{0});
    EXPECT_EQ(places, all) << order.name;
  }
}

/// Every family, few bits and many.
TEST(StatisticsOfSoundFolders, SayNothing) {
  for (const char* scheme : {"kbit2-b32-e4m4", "rotated2-d128", "rotated4-row-f32", "int2-g64-f16-asym",
                             "int3-g128-bf16", "int4-g128-f16-asym", "int8-row-f16"}) {
    const test::TemporaryFolder folder;
    const auto report =
        check_statistics(model::open_model(test::quantized_model(folder, formats::parse_scheme(scheme))));
    EXPECT_THAT(report.faults, IsEmpty()) << scheme;
    EXPECT_THAT(report.warnings, IsEmpty()) << scheme;
  }
}

/// A weight in groups of 128, packed by rounding.
formats::PackedWeight packed_integers(const char* scheme_name, float size) {
  const int64_t n = 64, k = 512;
  std::vector<float> values(static_cast<size_t>(n * k));
  for (size_t i = 0; i < values.size(); ++i) values[i] = size * static_cast<float>(random_normal(9, i));
  const auto scheme = formats::parse_scheme(scheme_name);
  const TensorView view{"w", DType::f32, {n, k}, bytes_of(values)};
  return quantize::rounding_quantizer(scheme).run(view, scheme, {}).weight;
}

TEST(BlockFigures, ZeroPointsThatFollowTheirGroups) {
  const auto packed = packed_integers("int4-g128-f16-asym", 0.02f);
  const BlockSample sample(packed);
  EXPECT_FALSE(sample.even_zeros().even);
  EXPECT_EQ(sample.far_zeros().groups, 0);
  EXPECT_LT(sample.far_zeros().others, 2.3);
  const auto symmetric = packed_integers("int4-g128-f16", 0.02f);
  const auto even = BlockSample(symmetric).even_zeros();
  EXPECT_TRUE(even.even);
  EXPECT_LT(even.ratio, 1.5);
  EXPECT_LT(even.ends, 0.9);
  EXPECT_EQ(BlockSample(symmetric).one_value_blocks(), 0);
}

/// A power of two may stand in the table in the place of the scales: codes that differ do so in tables of any size.
TEST(BlockFigures, TablesOfSmallWeights) {
  const auto packed = packed_integers("kbit3-b32-e4m4", 1e-4f);
  EXPECT_EQ(figures_of(packed).constant, 0);
}

/// Rows into which large scales were folded leave others next to E4M3's smallest, too coarse for a block's largest weight.
TEST(BlockFigures, CoarseScalesLeaveBlocksWithoutAnEnd) {
  const int64_t n = 64, k = 512;
  std::vector<float> values(static_cast<size_t>(n * k));
  for (size_t i = 0; i < values.size(); ++i) {
    double sum = -6;
    for (uint64_t j = 0; j < 12; ++j) sum += random_uniform(5, 12 * i + j);
    const size_t row = i / static_cast<size_t>(k);
    values[i] = static_cast<float>(0.02 * sum * (row == 3 ? 2e4 : 1));
  }
  const auto scheme = formats::parse_scheme("nvfp4");
  const TensorView view{"w", DType::f32, {n, k}, bytes_of(values)};
  const auto packed = quantize::rounding_quantizer(scheme).run(view, scheme, {}).weight;
  EXPECT_EQ(figures_of(packed).endless, 0);
}

}  // namespace
}  // namespace w4q::verify
