// bitsandbytes' bytes against golden vectors, and the plain argmin that they are defined by.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "formats/codebook.h"
#include "formats/e4m4.h"
#include "io/checkpoint.h"
#include "kbit_samples.h"
#include "quantize/quantizer_registry.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::PlaneRole;
using formats::Scheme;

Scheme kbit_of_bnb(int bits) { return {formats::SchemeFamily::kbit, bits, 32, formats::ScaleType::e4m4}; }

QuantizeResult quantize(const TensorView& view, const Scheme& scheme, QuantizeOptions options = {}) {
  options.bnb_compatible = true;
  return quantizer_row("kbit").run(view, scheme, options);
}

class Bnb : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Bits, Bnb, testing::Values(2, 3, 4, 5));

TEST_P(Bnb, ReproducesTheGoldenBytes) {
  const auto golden =
      io::Checkpoint::open(test::testdata() / "golden" / ("bnb_kbit_k" + std::to_string(GetParam()) + ".safetensors"));
  const auto input = golden.load("in.weight");
  const QuantizeResult result = quantize(input.view(), kbit_of_bnb(GetParam()));
  const auto expect_bytes = [&](PlaneRole role, std::string_view tensor) {
    const auto expected = golden.load(tensor);
    EXPECT_TRUE(std::ranges::equal(result.weight.plane(role).bytes.bytes(), expected->bytes)) << tensor;
  };
  expect_bytes(PlaneRole::codes, "packed_flat");
  expect_bytes(PlaneRole::scales, "absmax_e4m4");
  expect_bytes(PlaneRole::codebook, "codebook");
}

/// The rule as written: the first entry with the least distance.
int first_nearest(float x, std::span<const float> table) {
  int best = 0;
  float least = 1e10f;
  for (size_t i = 0; i < table.size(); ++i) {
    const float distance = std::abs(x - table[i]);
    if (distance < least) {
      least = distance;
      best = static_cast<int>(i);
    }
  }
  return best;
}

TEST_P(Bnb, ChoosesTheFirstNearestEntry) {
  const std::vector<float> table = formats::codebook("nf-quantile", GetParam());
  std::vector<float> values = test::sample(test::distributions[0], 1, 4096);
  // Blocks with absmax 1 and values around every midpoint, where rounded distances tie.
  for (size_t i = 0; i + 1 < table.size(); ++i) {
    const float midpoint = (table[i] + table[i + 1]) / 2;
    float* block = values.data() + 32 * i;
    std::fill_n(block, 32, 1.0f);
    float x = midpoint;
    for (int step = 0; step < 8; ++step) x = std::nextafter(x, -2.0f);
    for (int lane = 1; lane < 18; ++lane) {
      block[lane] = x;
      x = std::nextafter(x, 2.0f);
    }
  }
  const TensorView view{"w", DType::f32, {1, 4096}, bytes_of(values)};
  const QuantizeResult result = quantize(view, kbit_of_bnb(GetParam()));
  const auto words = result.weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  const auto scales = result.weight.plane(PlaneRole::scales).bytes.as<uint8_t>();
  const auto bits = static_cast<size_t>(GetParam());
  for (size_t i = 0; i < values.size(); ++i) {
    const float absmax = test::block_absmax_at(values, i);
    int code = 0;
    for (size_t bit = 0; bit < bits; ++bit)
      code |= static_cast<int>((words[i / 32 * bits + bit] >> (i % 32)) & 1) << bit;
    ASSERT_EQ(code, first_nearest(values[i] / std::max(absmax, 1e-8f), table)) << i;
    ASSERT_EQ(scales[i / 32], formats::e4m4_encode_bnb(absmax));
  }
}

TEST(BnbOptions, RefuseWhatTheFormatDoesNotHave) {
  const std::vector<float> values(96, 0.5f);
  const TensorView whole{"up.weight", DType::f32, {3, 32}, bytes_of(values)};
  const TensorView ragged{"up.weight", DType::f32, {2, 48}, bytes_of(values)};
  Scheme f16 = kbit_of_bnb(4);
  f16.scale = formats::ScaleType::f16;
  test::expect_error(ErrorCode::unsupported, {"up.weight", "f16"}, [&] { quantize(whole, f16); });
  test::expect_error(ErrorCode::unsupported, {"up.weight", "48", "nearest: 64"},
                     [&] { quantize(ragged, kbit_of_bnb(4)); });
  QuantizeOptions options;
  options.table = formats::codebook("nf", 4);
  test::expect_error(ErrorCode::unsupported, {"table"}, [&] { quantize(whole, kbit_of_bnb(4), options); });
}

TEST(BnbOptions, ScalesAbove31AreCounted) {
  std::vector<float> values(64, 40.0f);
  values[40] = -1e-12f;
  const TensorView view{"w", DType::f32, {1, 64}, bytes_of(values)};
  const QuantizeResult result = quantize(view, kbit_of_bnb(4));
  EXPECT_EQ(result.stats.saturated_scales, 2);
  EXPECT_EQ(result.stats.range_exponent, 0);
  EXPECT_EQ(result.weight.plane(PlaneRole::scales).bytes.as<uint8_t>()[0], 0xF4);  // the peer's 40 reads as 20
}

}  // namespace
}  // namespace w4q::quantize
