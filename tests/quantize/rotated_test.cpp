#include "quantize/rotated.h"

#include <algorithm>
#include <cmath>

#include "formats/e4m4.h"
#include "formats/kbit.h"
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

/// Searching gains most on small groups, where a norm says least about the best scale.
TEST(RotatedQuantizer, SearchedNormsFitBetter) {
  const std::vector<float> values = test::sample(test::distributions[0], 32, 512);
  const auto gain = [&](std::string_view scheme) {
    QuantizeOptions options;
    const double plain = test::sqnr(values, test::decode(quantize(values, 32, 512, scheme).weight));
    options.steps = {{StepKind::search_scales}};
    return test::sqnr(values, test::decode(quantize(values, 32, 512, scheme, options).weight)) - plain;
  };
  // dB; measured 1.75, 1.29, 0.72, 0.08.
  EXPECT_GT(gain("rotated4-d32-e4m4"), 1.6);
  EXPECT_GT(gain("rotated4-d64"), 1.2);
  EXPECT_GT(gain("rotated4-d128-f32"), 0.6);
  EXPECT_GT(gain("rotated3-row"), 0.05);
}

/// No norm of the groups' neighbourhood in E4M4 serves them better than the searched one.
TEST(RotatedQuantizer, SearchedNormsAreTheBest) {
  constexpr int64_t n = 4, k = 160, group = 64;
  const std::vector<float> values = test::sample(test::distributions[3], n, k);
  QuantizeOptions options;
  options.steps = {{StepKind::search_scales}};
  auto weight = quantize(values, n, k, "rotated3-d64-e4m4", options).weight;
  const RotatedLevels table(weight.plane(formats::PlaneRole::codebook).bytes.as<float>(), group);
  auto norms = weight.plane(formats::PlaneRole::scales).bytes.as<uint8_t>();
  for (size_t i = 0; i < norms.size(); ++i) {
    const auto first = static_cast<size_t>(i / 3 * k + i % 3 * group);
    const size_t size = i % 3 == 2 ? 32 : group;
    const auto error = [&](float norm) {
      double sum = 0;
      for (size_t c = first; c < first + size; ++c) {
        const auto code = static_cast<size_t>(formats::kbit_code(values[c] / norm, table.midpoints));
        const double miss = double{values[c]} - double{table.levels[code] * norm};
        sum += miss * miss;
      }
      return sum;
    };
    const double least = error(formats::e4m4_decode(norms[i]));
    for (int step = -12; step <= 8; ++step) {
      const int byte = std::clamp(int{norms[i]} + step, 1, 255);
      EXPECT_GE(error(formats::e4m4_decode(static_cast<uint8_t>(byte))), least * (1 - 1e-5)) << i << ' ' << step;
    }
  }
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
  options.steps = {{StepKind::clip}};
  test::expect_error(ErrorCode::bad_argument, {"range to clip"},
                     [&] { quantize(values, 1, 64, "rotated4-d32", options); });
  test::expect_error(ErrorCode::bad_argument, {"kbit4-b32-e4m4"}, [&] { quantize(values, 1, 64, "kbit4-b32-e4m4"); });
}

}  // namespace
}  // namespace w4q::quantize
