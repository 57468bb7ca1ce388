#include "quantize/passes.h"

#include <cmath>
#include <limits>

#include "kbit_samples.h"
#include "kernels/dequantize/dequantize.h"
#include "quantize/rounding.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::parse_scheme;
using formats::Rotation;
using formats::Scheme;

constexpr int64_t packed_outputs = 48, packed_inputs = 416;  // three whole groups of 128 and a tail of 32

struct Weight {
  std::vector<float> values = test::sample(test::distributions[1], packed_outputs, packed_inputs);
  TensorView view() const { return {"w", DType::f32, {packed_outputs, packed_inputs}, bytes_of(values)}; }
};

QuantizeResult round_pass(const TensorView& view, const Scheme& scheme) {
  return rounding_quantizer(scheme).run(view, scheme, {});
}

double quality(const std::vector<Pass>& passes, const Weight& weight = {}) {
  const auto result = quantize_passes(weight.view(), passes, round_pass);
  std::vector<float> decoded(weight.values.size());
  kernels::dequantize_rows(result.linear, 0, MatrixView<float>(decoded.data(), packed_outputs, packed_inputs));
  return test::sqnr(weight.values, decoded);
}

TEST(Passes, RotatedSchemesBringTheirRotation) {
  const Scheme four = parse_scheme("rotated4-d128"), two = parse_scheme("rotated2-d64"),
               kbit = parse_scheme("kbit4-b32-e4m4");
  const auto shared = plan_passes(four, std::vector{two, kbit}, {});
  EXPECT_EQ(shared[0].rotation, (Rotation{128, 42}));
  EXPECT_EQ(shared[1].rotation, shared[0].rotation);
  EXPECT_EQ(shared[2].rotation, shared[0].rotation);
  const auto own = plan_passes(four, std::vector{two, kbit, two}, {.seed = 7, .residual_seed = 1007, .shared = false});
  EXPECT_EQ(own[0].rotation, (Rotation{128, 7}));
  EXPECT_EQ(own[1].rotation, (Rotation{64, 1007}));
  EXPECT_TRUE(own[2].rotation.identity());
  EXPECT_EQ(own[3].rotation, (Rotation{64, 3007}));
  EXPECT_TRUE(plan_passes(kbit, {}, {})[0].rotation.identity());
  EXPECT_EQ(plan_passes(parse_scheme("rotated3-row"), {}, {})[0].rotation.block, formats::whole_row);
}

/// A pass over normal weights gains what its Lloyd–Max quantizer does: 20.2 dB for 4 bits, 9.3 for 2. A remainder that
/// is rotated anew is normal again; in the basis of the first pass it is nearly uniform in each cell, which the table
/// serves worse. Bounds are measured, with some room.
TEST(Passes, EachPassTakesUpWhatIsLeft) {
  const Scheme four = parse_scheme("rotated4-d128"), two = parse_scheme("rotated2-d128");
  const auto sqnr = [&](const std::vector<Scheme>& further, bool shared) {
    return quality(plan_passes(four, further, {.shared = shared}));
  };
  const double one = sqnr({}, true);
  EXPECT_NEAR(one, 20.2, 0.5);
  EXPECT_NEAR(sqnr({four}, false), 40.4, 1.0);
  EXPECT_NEAR(sqnr({two}, false), 29.5, 1.0);
  EXPECT_GT(sqnr({four}, true), one + 12);
  EXPECT_GT(sqnr({two}, true), one + 5);
  EXPECT_GT(sqnr({four, four}, false), 58);
}

TEST(Passes, UnrotatedPassesHaveNoRotations) {
  const Weight weight;
  const std::vector<Pass> passes{{parse_scheme("int4-g128-f16")}, {parse_scheme("kbit3-b32-e4m4")}};
  const auto result = quantize_passes(weight.view(), passes, round_pass);
  EXPECT_TRUE(result.linear.rotations.empty());
  EXPECT_EQ(result.linear.passes.size(), 2u);
  EXPECT_EQ(result.stats.blocks, packed_outputs * 4 + packed_outputs * 13);
}

/// After a rotation every column of the block would be at fault.
TEST(Passes, NameThePlaceOfWhatIsNotFinite) {
  Weight weight;
  weight.values[2 * packed_inputs + 130] = std::numeric_limits<float>::infinity();
  test::expect_error(ErrorCode::bad_file, {"w", "2", "130"}, [&] {
    quantize_passes(weight.view(), plan_passes(parse_scheme("rotated4-d128"), {}, {}), round_pass);
  });
}

}  // namespace
}  // namespace w4q::quantize
