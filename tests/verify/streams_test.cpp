// Weights whose codes share bits, held against the base where their codes stand.
#include "verify/weights/streams.h"

#include <gmock/gmock.h>

#include <map>
#include <memory>
#include <string>

#include "core/rng.h"
#include "formats/scheme_registry.h"
#include "support.h"

namespace w4q::verify {
namespace {

using ::testing::HasSubstr;
using ::testing::Optional;

constexpr int64_t stream_size = 256;

/// Normal weights with two loud inputs.
std::shared_ptr<const std::vector<float>> stream_values() {
  auto values = std::make_shared<std::vector<float>>();
  for (int64_t i = 0; i < stream_size * stream_size; ++i) {
    const bool loud = i % stream_size == 17 || i % stream_size == 200;
    values->push_back((loud ? 8.0f : 1.0f) * static_cast<float>(random_normal(11, static_cast<uint64_t>(i))));
  }
  return values;
}

/// What a scheme makes of them behind a rotation, searched once.
class MadeStreams {
 public:
  explicit MadeStreams(const char* scheme_name) {
    const auto scheme = formats::parse_scheme(scheme_name);
    auto turned = *values_;
    if (scheme.family != formats::SchemeFamily::exl3) {
      packed_->rotations.emplace_back(formats::Rotation{128, 5}, stream_size);
      for (int64_t row = 0; row < stream_size; ++row)
        packed_->rotations.front().rotate(
            std::span(turned).subspan(static_cast<size_t>(row * stream_size), stream_size));
    }
    static std::map<std::string, formats::PackedWeight, std::less<>> searched;
    if (!searched.contains(scheme_name)) {
      const auto& definition = formats::scheme_row(scheme.family);
      searched.emplace(scheme_name, definition.encode(scheme, turned, stream_size, stream_size, {}));
    }
    packed_->passes.push_back(searched.find(scheme_name)->second.clone());
  }

  formats::PackedWeight& weight() { return packed_->passes.front(); }
  std::span<std::byte> bytes(formats::PlaneRole role) { return weight().plane(role).bytes.bytes(); }
  std::optional<std::string> fault(const Units& units = {}) const {
    const TensorView view{"w", DType::f32, {stream_size, stream_size}, bytes_of(*values_)};
    const kernels::LinearWeight base{"w", stream_size, stream_size, kernels::LinearWeight::Dense{view, values_}, {}};
    return stream_fault_of(base, {"w", stream_size, stream_size, packed_, {}}, units, false);
  }

 private:
  std::shared_ptr<const std::vector<float>> values_ = stream_values();
  std::shared_ptr<formats::PackedLinear> packed_ = std::make_shared<formats::PackedLinear>();
};

TEST(Streams, SoundOnesSayNothing) {
  for (const char* scheme : {"exl3-3", "trellis2-w8", "trellis3-w10"}) {
    EXPECT_EQ(MadeStreams(scheme).fault(), std::nullopt) << scheme;
  }
}

/// Tiles of 16 inputs × 16 outputs: an eighth of the weights in other places is 8 times the error of rounding to 3 bits.
TEST(Streams, TilesOfOtherInputsAreNamed) {
  MadeStreams made("exl3-3");
  const auto codes = made.bytes(formats::PlaneRole::codes);
  const auto row = codes.size() / (stream_size / 16);
  std::swap_ranges(codes.begin() + 2 * row, codes.begin() + 3 * row, codes.begin() + 9 * row);
  EXPECT_THAT(made.fault(), Optional(HasSubstr("inputs 32 to 47 behind the rotations hold")));
}

TEST(Streams, TilesOfOtherOutputsAreNamed) {
  MadeStreams made("exl3-3");
  const auto codes = made.bytes(formats::PlaneRole::codes);
  const size_t tile = 16 * 3 * 2, row = codes.size() / (stream_size / 16);
  for (size_t at = 0; at < codes.size(); at += row)
    std::swap_ranges(codes.begin() + at + 4 * tile, codes.begin() + at + 5 * tile, codes.begin() + at + 12 * tile);
  EXPECT_THAT(made.fault(), Optional(HasSubstr("outputs 64 to 79 behind the rotations hold")));
}

TEST(Streams, OneTileOfOtherCodesIsNamed) {
  MadeStreams made("exl3-3");
  const auto codes = made.bytes(formats::PlaneRole::codes);
  const auto tile = codes.size() / (stream_size / 16 * stream_size / 16);
  std::swap_ranges(codes.begin() + 35 * tile, codes.begin() + 36 * tile, codes.begin() + 200 * tile);
  EXPECT_THAT(made.fault(), Optional(HasSubstr("the codes of outputs 48 to 63, inputs 32 to 47 miss")));
}

TEST(Streams, AQuarterOfARingIsNamed) {
  for (const char* scheme : {"trellis2-w8", "trellis3-w10"}) {
    MadeStreams made(scheme);
    const auto codes = made.bytes(formats::PlaneRole::codes);
    const auto ring = codes.size() / (2 * stream_size);
    std::swap_ranges(codes.begin() + 300 * ring, codes.begin() + 300 * ring + ring / 4, codes.begin() + 310 * ring);
    EXPECT_THAT(made.fault(), Optional(HasSubstr("the codes of outputs 128 to 255, input 44 miss"))) << scheme;
  }
}

/// Of what is not known nothing is said.
TEST(Streams, MeasuredUnitsAreNotAsked) {
  MadeStreams made("trellis3-w10");
  std::ranges::fill(made.bytes(formats::PlaneRole::codes), std::byte{});
  EXPECT_NE(made.fault(), std::nullopt);
  EXPECT_EQ(made.fault({.measured = true}), std::nullopt);
}

}  // namespace
}  // namespace w4q::verify
