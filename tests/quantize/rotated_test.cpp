#include "quantize/rotated.h"

#include <cmath>

#include "kbit_samples.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::parse_scheme;
using formats::Scheme;

QuantizeResult quantize(const std::vector<float>& values, int64_t n, int64_t k, std::string_view scheme,
                        const QuantizeOptions& options = {}) {
  return quantizer_row("rotated").run({"w", DType::f32, {n, k}, bytes_of(values)}, parse_scheme(scheme), options);
}

/// Norms of 1e-30 and 1e30 lose nothing: the table carries the range.
TEST(RotatedQuantizer, TheTableCarriesTheRange) {
  const std::vector<float> plain = test::sample(test::distributions[0], 8, 256);
  const double expected = test::sqnr(plain, test::decode(quantize(plain, 8, 256, "rotated4-d128-e4m4").weight));
  for (float factor : {0x1p-100f, 0x1p-20f, 0x1p100f}) {
    std::vector<float> values = plain;
    for (float& value : values) value *= factor;
    const auto result = quantize(values, 8, 256, "rotated4-d128-e4m4");
    EXPECT_NE(result.stats.range_exponent, 0);
    EXPECT_EQ(result.stats.subnormal_scales, 0);
    EXPECT_NEAR(test::sqnr(values, test::decode(result.weight)), expected, 0.05);
  }
}

/// Searching gains 0.2 dB on normal groups of 32, where a norm says least about the best scale (measured: 0.24).
TEST(RotatedQuantizer, SearchedNormsFitBetter) {
  const std::vector<float> values = test::sample(test::distributions[0], 32, 512);
  QuantizeOptions options;
  const double plain = test::sqnr(values, test::decode(quantize(values, 32, 512, "rotated4-d32-e4m4").weight));
  options.scales = Scales::search;
  const double searched =
      test::sqnr(values, test::decode(quantize(values, 32, 512, "rotated4-d32-e4m4", options).weight));
  EXPECT_GT(searched, plain + 0.15);
}

/// Other tables stand for the same range whatever scale they come in.
TEST(RotatedQuantizer, TakesAnyTable) {
  const std::vector<float> values = test::sample(test::distributions[0], 16, 256);
  QuantizeOptions options;
  options.table = {-3, -1, 1, 3};
  const auto once = test::decode(quantize(values, 16, 256, "rotated2-d64", options).weight);
  options.table = {-0.75f, -0.25f, 0.25f, 0.75f};
  EXPECT_EQ(test::decode(quantize(values, 16, 256, "rotated2-d64", options).weight), once);
  EXPECT_GT(test::sqnr(values, once), 9.0);
}

TEST(RotatedQuantizer, RefusesWhatItDoesNotHonour) {
  const std::vector<float> values(64, 1.0f);
  QuantizeOptions options;
  options.clip = Clip::mse;
  test::expect_error(ErrorCode::bad_argument, {"range to clip"},
                     [&] { quantize(values, 1, 64, "rotated4-d32", options); });
  test::expect_error(ErrorCode::bad_argument, {"kbit4-b32-e4m4"}, [&] { quantize(values, 1, 64, "kbit4-b32-e4m4"); });
}

}  // namespace
}  // namespace w4q::quantize
