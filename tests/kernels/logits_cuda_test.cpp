// Log-probabilities, comparison and choice of tokens on the GPU against the CPU's.
#include "kernels/sampling/logits_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "core/rng.h"
#include "device/properties.h"
#include "device_values.h"
#include "gpu.h"
#include "kernels/sampling/sampling_cuda.h"
#include "random_matrix.h"
#include "support.h"

namespace w4q::kernels {
namespace {

using test::from_device;
using test::on_device;
using test::RandomMatrix;

class LogitsCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }

  /// Tokens for draws 0, 1, … of one row.
  std::vector<int32_t> draws(const std::vector<float>& row, const SamplingOptions& options, int count) {
    const device::Stream stream(test::gpu());
    const auto data = on_device(row, stream);
    auto state = on_device(std::vector<StepState>{{7, 0, 0}}, stream);
    auto history = test::poisoned(static_cast<size_t>(count) * 4, stream);
    const SampleArgs args{data.as<float>(),
                          static_cast<int64_t>(row.size()),
                          options,
                          state.as<StepState>(),
                          history.as<int32_t>(),
                          count,
                          false};
    for (int i = 0; i < count; ++i) sample_cuda(args, stream);
    const auto tokens = from_device<int32_t>(history, static_cast<size_t>(count), stream);
    const auto after = from_device<StepState>(state, 1, stream)[0];
    EXPECT_EQ(after.position, 7 + count);
    EXPECT_EQ(after.token, std::max(tokens.back(), 0));  // what the next step looks up
    EXPECT_EQ(after.draw, static_cast<uint64_t>(count));
    return tokens;
  }
};

TEST_F(LogitsCuda, ComparesLikeTheCpu) {
  const device::Stream stream(test::gpu());
  for (const int64_t vocab : {3, 5, 1000, 8192, 128256}) {
    constexpr int64_t rows = 5;
    RandomMatrix a(rows, vocab, 1), b(rows, vocab, 2);
    for (size_t i = 0; i < a.values.size(); ++i) {
      a.values[i] = 3 * a.values[i];
      b.values[i] = a.values[i] + 0.2f * b.values[i];
    }
    std::vector<int32_t> ids(rows);
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<int32_t>(random_bits(4, i) % static_cast<uint64_t>(vocab));
    const auto a_device = on_device(a.values, stream), b_device = on_device(b.values, stream);
    const auto ids_device = on_device(ids, stream);
    auto out = test::poisoned(rows * sizeof(LogitComparison), stream);
    compare_logits_cuda(a_device.as<float>(), b_device.as<float>(), rows, vocab, ids_device.as<int32_t>(),
                        out.as<LogitComparison>(), stream);
    const auto got = from_device<LogitComparison>(out, rows, stream);
    compare_logits_cuda(nullptr, b_device.as<float>(), rows, vocab, ids_device.as<int32_t>(), out.as<LogitComparison>(),
                        stream);
    const auto alone = from_device<LogitComparison>(out, rows, stream);
    for (size_t r = 0; r < rows; ++r) {
      const auto row = [&](const RandomMatrix& m) {
        return std::span(m.row(static_cast<int64_t>(r)), static_cast<size_t>(vocab));
      };
      const auto expected = compare_logits(row(a), row(b), ids[r]);
      // fp32 exponentials and sums of a few hundred of them.
      EXPECT_NEAR(got[r].nll_a, expected.nll_a, 2e-6) << vocab;
      EXPECT_NEAR(got[r].nll_b, expected.nll_b, 2e-6) << vocab;
      EXPECT_NEAR(got[r].kl, expected.kl, 2e-6) << vocab;
      EXPECT_EQ(got[r].same_top1, expected.same_top1) << vocab;
      EXPECT_EQ(got[r].top5_overlap, expected.top5_overlap) << vocab;
      EXPECT_EQ(alone[r].nll_b, got[r].nll_b);
    }
  }
}

TEST_F(LogitsCuda, GreedyIsExact) {
  for (const int vocab : {1, 7, 1000, 128256}) {
    RandomMatrix row(1, vocab, 21);
    row.values = test::rounded(row.values);  // ties in large vocabularies
    EXPECT_EQ(draws(row.values, {}, 1)[0], sample(row.values, {}, 0)) << vocab;
  }
  EXPECT_EQ(draws({1, 3, 3, 2, NAN}, {}, 1)[0], 1) << "the lowest id on ties";
}

TEST_F(LogitsCuda, NothingFiniteDrawsNoToken) {
  for (const float value : {NAN, -INFINITY, INFINITY}) {
    const std::vector<float> row(1000, value);
    EXPECT_EQ(draws(row, {}, 1)[0], -1);
    EXPECT_EQ(draws(row, {.temperature = 1, .top_k = 40, .top_p = 0.9}, 2), (std::vector<int32_t>{-1, -1}));
  }
}

TEST_F(LogitsCuda, DrawsTheTokensThatTheCpuDraws) {
  RandomMatrix row(1, 5000, 31);
  for (float& value : row.values) value *= 3;
  row.values = test::rounded(row.values);
  const std::vector<SamplingOptions> cases = {{.temperature = 1},
                                              {.temperature = 0.7, .top_k = 40},
                                              {.temperature = 1.3, .top_p = 0.9},
                                              {.temperature = 1, .min_p = 0.1},
                                              {.temperature = 0.9, .top_k = 100, .top_p = 0.8, .min_p = 0.02},
                                              {.temperature = 1, .top_k = 1}};
  for (auto options : cases) {
    options.seed = 5;
    constexpr int count = 200;
    const auto tokens = draws(row.values, options, count);
    int same = 0;
    for (int i = 0; i < count; ++i) {
      same += tokens[static_cast<size_t>(i)] == sample(row.values, options, static_cast<uint64_t>(i)) ? 1 : 0;
    }
    // A draw near the border of two tokens may fall to either: exponentials differ by 1e-6.
    EXPECT_GE(same, count - 1) << options.temperature << " " << options.top_k << " " << options.top_p << " "
                               << options.min_p;
    EXPECT_EQ(draws(row.values, options, count), tokens);
  }
}

TEST_F(LogitsCuda, TiesShareTheirProbability) {
  const std::vector<float> row = {0, 2, 2, 0, 2, 2, 1, 2};
  std::map<int32_t, int> seen;
  for (const int32_t token : draws(row, {.temperature = 0.01, .top_k = 3, .seed = 9}, 600)) ++seen[token];
  // The first three of five equal ones, 200 times each: 3.5 standard deviations of 11.5.
  EXPECT_EQ(seen.size(), 3u);
  for (const int32_t token : {1, 2, 4}) EXPECT_NEAR(seen[token], 200, 41) << token;
}

}  // namespace
}  // namespace w4q::kernels
