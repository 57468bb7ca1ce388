// What config.json says of packed linears, there and back.
#include "checkpoint/packed_checkpoint.h"

#include "support.h"

namespace w4q::checkpoint {
namespace {

using formats::Rotation;

QuantizationConfig two_passes(const Rotation& first, const Rotation& second) {
  QuantizationConfig quantization;
  quantization.method = "kbit";
  PackedLinearInfo info{"up", 64, 96, DType::bf16, {}};
  info.passes.push_back({formats::parse_scheme("kbit4-b32-e4m4"), "canonical", first});
  info.passes.push_back({formats::parse_scheme("kbit2-b32-f16"), "canonical", second});
  quantization.linears.emplace("up", info);
  return quantization;
}

TEST(PackedCheckpoint, KeepsTheRotationOfEachPass) {
  io::Json config = io::Json::object();
  write_quantization_config(two_passes({64, 42}, {formats::whole_row, 1042}), config);
  EXPECT_EQ(config["quantization_config"]["format_version"], 2);
  const auto read = parse_quantization_config(config, "config.json");
  const auto& passes = read.linears.at("up").passes;
  EXPECT_EQ(passes[0].rotation, (Rotation{64, 42}));
  EXPECT_EQ(passes[1].rotation, (Rotation{formats::whole_row, 1042}));
}

TEST(PackedCheckpoint, OlderReadersTakeWhatHasNoRotation) {
  io::Json config = io::Json::object();
  write_quantization_config(two_passes({}, {}), config);
  EXPECT_EQ(config["quantization_config"]["format_version"], 1);
  EXPECT_FALSE(config["quantization_config"]["linears"]["up"]["passes"][0].contains("rotation"));
}

TEST(PackedCheckpoint, RefusesUnknownRotations) {
  io::Json config = io::Json::object();
  write_quantization_config(two_passes({64, 42}, {}), config);
  auto& rotation = config["quantization_config"]["linears"]["up"]["passes"][0]["rotation"];
  rotation = "hadamard63-s1";
  test::expect_error(ErrorCode::unsupported, {"hadamard63-s1"}, [&] { parse_quantization_config(config, "c"); });
  rotation = 3;
  test::expect_error(ErrorCode::bad_file, {"rotation", "not a string"},
                     [&] { parse_quantization_config(config, "c"); });
}

}  // namespace
}  // namespace w4q::checkpoint
