#include "formats/dialect/turboquant.h"

#include <algorithm>
#include <cmath>

#include "formats/rotated.h"
#include "formats/rotation.h"
#include "io/checkpoint.h"
#include "kbit_samples.h"
#include "support.h"

namespace w4q::formats {
namespace {

constexpr int64_t d = 128;

std::vector<float> golden(const std::string& name) {
  static const auto file = io::Checkpoint::open(test::testdata() / "golden" / "turboquant.safetensors");
  const Buffer copy = Buffer::copy_of(file.load(name)->bytes);
  return {copy.as<float>().begin(), copy.as<float>().end()};
}

/// One row as the project stores it, from the numbers of its golden file: how many boundaries lie below √d·y/‖x‖, two
/// codes a byte, the even column low.
struct StoredRow {
  Buffer indices{static_cast<size_t>(d / 2)};
  float norm = 0;

  StoredRow(std::span<const float> x, std::span<const float> rotated, std::span<const float> boundaries) {
    double square = 0;
    for (const float value : x) square += double{value} * value;
    norm = static_cast<float>(std::sqrt(square));
    for (size_t i = 0; i < rotated.size(); ++i) {
      const double y = rotated[i] / double{norm} * std::sqrt(double{d});
      const auto code = std::ranges::count_if(boundaries, [&](float boundary) { return double{boundary} < y; });
      indices.data()[i / 2] |= static_cast<std::byte>(code << (i % 2 * 4));
    }
  }
};

/// The golden vectors, in and out again byte for byte; and the family's own encoder finds the same codes.
TEST(TurboQuantTensors, GoldenRowsGoInAndOutByteForByte) {
  const auto x = golden("in.x"), rotated = golden("rotated");
  const uint64_t seeds[] = {42, 170, 1042};
  for (const int bits : {2, 3, 4}) {
    const std::string table = "lloyd_" + std::to_string(bits) + "bit.";
    const auto boundaries = golden(table + "boundaries"), codebook = golden(table + "centroids");
    const Scheme scheme = parse_scheme("rotated" + std::to_string(bits) + "-d128-f32");
    for (size_t row = 0; row < 3; ++row) {
      const auto values = std::span(x).subspan(row * d, d), turned = std::span(rotated).subspan(row * d, d);
      const StoredRow stored(values, turned, boundaries);
      const auto norms = std::as_bytes(std::span(&stored.norm, 1));
      const PackedWeight weight = decode_turboquant(scheme, 1, d, stored.indices.bytes(), norms, codebook, "golden");
      EXPECT_TRUE(std::ranges::equal(turboquant_indices(weight).bytes(), stored.indices.bytes()));
      EXPECT_TRUE(std::ranges::equal(turboquant_norms(weight, DType::f32).bytes(), norms));

      const auto& row_of = scheme_row(SchemeFamily::rotated);
      const PackedWeight own = row_of.encode(scheme, turned, 1, d, codebook);
      EXPECT_TRUE(std::ranges::equal(turboquant_indices(own).bytes(), stored.indices.bytes())) << bits << " " << row;
      std::vector<float> decoded(d);
      row_of.decode_row(weight, 0, decoded);
      InputRotation({d, seeds[row]}, d).restore(decoded);
      // Lloyd and Max's quantizers of N(0, 1) have 9.3, 14.6 and 20.2 dB; one row of 128 strays from that.
      EXPECT_NEAR(test::sqnr(values, decoded), bits == 2 ? 9.3 : bits == 3 ? 14.6 : 20.2, 1.5);
    }
  }
}

TEST(TurboQuantTensors, AnIndexBeyondTheTableIsNamed) {
  Buffer indices(static_cast<size_t>(d));
  indices.data()[64 + 5] = std::byte{0x80};
  const float norms[] = {1, 1};
  const Scheme scheme = parse_scheme("rotated3-d128-f32");
  test::expect_error(ErrorCode::bad_file, {"up", "index 8", "row 1, column 11"}, [&] {
    decode_turboquant(scheme, 2, d, indices.bytes(), std::as_bytes(std::span(norms)), normal_codebook(3), "up");
  });
}

TEST(TurboQuantTensors, WhatHasNoPlaceSaysWhy) {
  EXPECT_EQ(turboquant_loss(parse_scheme("rotated4-d128"), 4096), "");
  EXPECT_NE(turboquant_loss(parse_scheme("rotated4-d128"), 4096 + 64), "");
  EXPECT_NE(turboquant_loss(parse_scheme("rotated5-d128"), 4096), "");
  EXPECT_NE(turboquant_loss(parse_scheme("kbit4-b32-e4m4"), 4096), "");
}

}  // namespace
}  // namespace w4q::formats
