#include "verify/weights/weights.h"

#include <cmath>

#include "packed_model.h"

namespace w4q::verify {
namespace {

/// SQNR on real weights lies near that on N(0,1): 7.4, 14.8, 20.6, 25.3 dB by bits (docs/notes/kbit.md); 0.5 dB of room
/// below for heavier tails, 1 dB above.
TEST(Weights, SqnrOfTheBundledModelByBits) {
  const double expected[] = {7.4, 14.8, 20.6, 25.3};
  for (int bits = 2; bits <= 5; ++bits) {
    const test::TemporaryFolder folder;
    const auto candidate = model::open_model(test::quantized_model(folder, bits));
    const auto report = compare_with_base(candidate, model::open_model(test::bundled_model()));
    EXPECT_EQ(report.tensors.size(), 28u);
    EXPECT_GT(report.total.sqnr(), expected[bits - 2] - 0.5) << bits;
    EXPECT_LT(report.total.sqnr(), expected[bits - 2] + 1.0) << bits;
    EXPECT_NEAR(report.total.relative(), std::pow(10, -report.total.sqnr() / 20), 1e-12);
  }
}

TEST(Weights, AModelAgainstItselfHasNoError) {
  const test::TemporaryFolder folder;
  const auto packed = model::open_model(test::quantized_model(folder, 3));
  const auto report = compare_with_base(packed, packed);
  EXPECT_EQ(report.total.noise, 0);
  EXPECT_TRUE(std::isinf(report.total.sqnr()));
  EXPECT_EQ(report.total.max_error, 0);
}

}  // namespace
}  // namespace w4q::verify
