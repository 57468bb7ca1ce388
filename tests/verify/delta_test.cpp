// Gated delta nets of a trained hybrid: vectors that were never loaded or hold something else, and channels in another order.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "core/float_formats.h"
#include "made_statistics.h"

namespace w4q::verify {
namespace {

using test::MadeCheckpoint;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr size_t hidden = 256, taps = 4, head = 64, values_begin = 256;

std::string of_delta(int layer, const char* name) { return concat("model.layers.", layer, ".linear_attn.", name); }

class DeltaNets : public ::testing::Test {
 protected:
  std::vector<std::string> faults() const { return statistics_faults(made_); }

  /// Rows of a matrix of BF16, `width` values each: row i becomes what was row from(i).
  template <class From>
  void reorder(const std::string& name, size_t width, const From& from) {
    const auto values = made_.values<uint16_t>(name);
    const std::vector<uint16_t> before(values.begin(), values.end());
    for (size_t i = 0; i < values.size(); ++i) values[i] = before[from(i / width) * width + i % width];
  }

  MadeCheckpoint made_ = MadeCheckpoint::of(test::testdata() / "w4q-hybrid-tiny");
};

TEST_F(DeltaNets, VectorsThatWereNeverLoaded) {
  for (const char* name : {"A_log", "dt_bias", "conv1d.weight"}) {
    const auto sound = made_;
    std::ranges::fill(made_.tensors.at(of_delta(1, name)).bytes, std::byte{0});
    EXPECT_THAT(faults(), Contains(HasSubstr(concat(of_delta(1, name), ": is zero throughout"))));
    made_ = sound;
  }
}

TEST_F(DeltaNets, DecaysInThePlaceOfTheirLogarithms) {
  for (float& value : made_.values<float>(of_delta(0, "A_log"))) value = -std::exp(value);
  EXPECT_THAT(faults(), Contains(HasSubstr("layers.0.linear_attn.A_log: is -5.2")));
  for (float& value : made_.values<float>(of_delta(0, "A_log"))) value = -3;  // what decays slowly
  EXPECT_THAT(faults(), Each(Not(HasSubstr("A_log"))));
}

TEST_F(DeltaNets, TapsInReverseOrder) {
  const auto values = made_.values<uint16_t>(of_delta(2, "conv1d.weight"));
  for (size_t i = 0; i < values.size(); i += taps) std::ranges::reverse(values.subspan(i, taps));
  EXPECT_THAT(faults(), Contains(HasSubstr("layers.2.linear_attn.conv1d.weight: its earlier taps are")));
  // All of them: nothing says which way is right.
  for (const int layer : {0, 1}) {
    const auto others = made_.values<uint16_t>(of_delta(layer, "conv1d.weight"));
    for (size_t i = 0; i < others.size(); i += taps) std::ranges::reverse(others.subspan(i, taps));
  }
  EXPECT_THAT(faults(), Each(Not(HasSubstr("taps are"))));
}

TEST_F(DeltaNets, ChannelsOfTheConvolution) {
  reorder(of_delta(1, "conv1d.weight"), taps,
          [](size_t row) { return (row + 2 * values_begin - head) % (2 * values_begin); });
  EXPECT_THAT(faults(), Contains(HasSubstr("conv1d.weight: its channels agree with rows")));
}

TEST_F(DeltaNets, ValuesBeforeQueriesAndKeys) {
  reorder(of_delta(1, "in_proj_qkv.weight"), hidden,
          [](size_t row) { return (row + values_begin) % (2 * values_begin); });
  EXPECT_THAT(faults(), Contains(HasSubstr("with values before queries and keys")));
}

TEST_F(DeltaNets, TransposedOutputs) {
  const auto values = made_.values<uint16_t>(of_delta(1, "out_proj.weight"));
  const std::vector<uint16_t> before(values.begin(), values.end());
  for (size_t i = 0; i < values.size(); ++i) values[i] = before[i % hidden * hidden + i / hidden];
  EXPECT_THAT(faults(), Contains(HasSubstr("layers.1.linear_attn.out_proj: its columns agree with rows of values")));
}

/// Norms of 32 bits that were read as 16, one part in the place of both, and channels that were not written.
TEST_F(DeltaNets, NormsOfOtherBytes) {
  const std::string norm = "model.layers.1.input_layernorm.weight";
  const auto values = made_.values<uint16_t>(norm);
  const std::vector<uint16_t> before(values.begin(), values.end());
  std::copy_n(before.begin(), values.size() / 2, values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2));
  EXPECT_THAT(faults(), Contains(HasSubstr(norm + ": has the same values in the second half")));
  for (size_t i = 0; i < values.size(); ++i) values[i] = i % 2 == 0 ? uint16_t{0} : before[i / 2];
  EXPECT_THAT(faults(), Contains(HasSubstr(norm + ": has zeros in every other channel")));
}

TEST(NormsOfLlama, ZerosInSomeChannelsOrAll) {
  auto made = MadeCheckpoint::of(test::testdata() / "w4q-llama-tiny");
  const auto norm = [](int layer) { return concat("model.layers.", layer, ".post_attention_layernorm.weight"); };
  const auto values = made.values<uint16_t>(norm(1));
  std::ranges::fill(values.subspan(32, 8), uint16_t{0});
  EXPECT_THAT(statistics_faults(made), Contains(HasSubstr(norm(1) + ": is zero in 8 channels in a row")));
  for (int layer = 0; layer < 4; ++layer) std::ranges::fill(made.values<uint16_t>(norm(layer)), uint16_t{0});
  EXPECT_THAT(statistics_faults(made), Contains(HasSubstr(norm(3) + ": is zero in all channels")));
}

}  // namespace
}  // namespace w4q::verify
