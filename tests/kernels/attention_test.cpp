#include "kernels/attention/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "core/parallel.h"
#include "random_matrix.h"
#include "support.h"

namespace w4q::kernels {
namespace {

using test::RandomMatrix;

constexpr int64_t heads = 6, kv_heads = 2, head_dim = 40;

/// Queries, keys and values of a whole sequence, one row per position.
struct Sequence {
  explicit Sequence(int64_t length_)
      : length(length_),
        queries(length_, heads * head_dim, 1),
        keys(length_, kv_heads * head_dim, 2),
        values(length_, kv_heads * head_dim, 3) {}
  int64_t length;
  RandomMatrix queries, keys, values;
};

/// The definition in fp64: softmax(q·k / √d) over the keys that `position` sees, and a sink.
std::vector<double> reference(const Sequence& s, int64_t position, int64_t head, const AttentionOptions& options) {
  const int64_t window = options.window;
  const double scale = options.scale > 0 ? options.scale : 1 / std::sqrt(static_cast<double>(head_dim));
  const int64_t oldest = window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
  const int64_t offset = head / (heads / kv_heads) * head_dim;
  std::vector<double> weights;
  for (int64_t key = oldest; key <= position; ++key) {
    double score = 0;
    for (int64_t c = 0; c < head_dim; ++c) {
      score += double{s.queries.row(position)[head * head_dim + c]} * s.keys.row(key)[offset + c];
    }
    score *= scale;
    if (options.soft_cap > 0) score = options.soft_cap * std::tanh(score / options.soft_cap);
    weights.push_back(std::exp(score));
  }
  double sum = options.sinks.empty() ? 0 : std::exp(double{options.sinks[static_cast<size_t>(head)]});
  for (const double weight : weights) sum += weight;
  std::vector<double> out(static_cast<size_t>(head_dim), 0.0);
  for (size_t i = 0; i < weights.size(); ++i) {
    const float* value = s.values.row(oldest + static_cast<int64_t>(i)) + offset;
    for (size_t c = 0; c < out.size(); ++c) out[c] += weights[i] / sum * value[c];
  }
  return out;
}

/// Runs the sequence in the given chunks.
RandomMatrix run(const Sequence& s, int64_t capacity, const AttentionOptions& options,
                 const std::vector<int64_t>& chunks) {
  std::vector<float> keys(static_cast<size_t>(capacity * kv_heads * head_dim)), values(keys.size());
  const KeyValueCache cache{keys.data(), values.data(), kv_heads, capacity, head_dim};
  RandomMatrix out(s.length, heads * head_dim, 9);
  int64_t first = 0;
  for (const int64_t rows : chunks) {
    const auto part = [&](const RandomMatrix& m) { return MatrixView<const float>(m.row(first), rows, m.cols); };
    append(cache, first, part(s.keys), part(s.values));
    attention(part(s.queries), cache, first, options, {out.values.data() + first * out.cols, rows, out.cols});
    first += rows;
  }
  EXPECT_EQ(first, s.length);
  return out;
}

/// A score carries γ_40·Σ|q||k|/√40 ≈ 1e-5 of absolute error at worst, which moves a weight by as much relative to
/// itself, and values are a few units at most. Measured: 7.2e-7 over the cases below.
constexpr double tolerance = 1e-5;

class AttentionCases : public testing::TestWithParam<std::tuple<int, std::vector<int64_t>>> {};

TEST_P(AttentionCases, AgreesWithFp64) {
  const auto& [window, chunks] = GetParam();
  int64_t length = 0;
  for (const int64_t rows : chunks) length += rows;
  const Sequence s(length);
  const RandomMatrix out = run(s, length + 3, {.window = window}, chunks);
  for (int64_t position = 0; position < length; position += position < 10 ? 1 : 13) {
    for (int64_t head = 0; head < heads; ++head) {
      const auto exact = reference(s, position, head, {.window = window});
      for (int64_t c = 0; c < head_dim; ++c) {
        ASSERT_NEAR(out.row(position)[head * head_dim + c], exact[static_cast<size_t>(c)], tolerance)
            << "position " << position << " head " << head;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttentionCases,
                         testing::Combine(testing::Values(0, 1, 24, 300),
                                          testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{600},
                                                          std::vector<int64_t>{130, 1, 1, 257, 100})));

TEST(Attention, ScalesCapsAndSinks) {
  const Sequence s(70);
  const std::vector<float> sinks = {-1, 0, 1, 2, 3, 8};
  for (const AttentionOptions& options :
       {AttentionOptions{.scale = 0.4}, AttentionOptions{.soft_cap = 1.5}, AttentionOptions{.sinks = sinks},
        AttentionOptions{.window = 9, .scale = 0.3, .soft_cap = 2, .sinks = sinks}}) {
    for (const std::vector<int64_t>& chunks : {std::vector<int64_t>{70}, {30, 1, 1, 38}}) {
      const RandomMatrix out = run(s, 70, options, chunks);
      for (int64_t position = 0; position < 70; ++position) {
        for (int64_t head = 0; head < heads; ++head) {
          const auto exact = reference(s, position, head, options);
          for (int64_t c = 0; c < head_dim; ++c) {
            ASSERT_NEAR(out.row(position)[head * head_dim + c], exact[static_cast<size_t>(c)], tolerance);
          }
        }
      }
    }
  }
}

TEST(Attention, SurvivesLargeScores) {
  Sequence s(50);
  for (auto& value : s.queries.values) value *= 100;
  const RandomMatrix out = run(s, 50, {}, {50});
  for (const float value : out.values) ASSERT_TRUE(std::isfinite(value));
}

TEST(Attention, DoesNotDependOnTheThreadCount) {
  const Sequence s(300);
  set_threads(1);
  const RandomMatrix one = run(s, 300, {.window = 100}, {300});
  set_threads(5);
  const RandomMatrix many = run(s, 300, {.window = 100}, {300});
  set_threads(0);
  EXPECT_EQ(one.values, many.values);
}

TEST(Attention, RefusesPositionsOutsideTheCache) {
  std::vector<float> memory(kv_heads * head_dim * 4);
  const KeyValueCache cache{memory.data(), memory.data(), kv_heads, 4, head_dim};
  const Sequence s(3);
  RandomMatrix out(3, heads * head_dim, 1);
  test::expect_error(ErrorCode::internal, {"full"}, [&] { append(cache, 2, s.keys, s.values); });
  test::expect_error(ErrorCode::internal, {"cache"}, [&] { attention(s.queries, cache, 2, {}, out); });
}

}  // namespace
}  // namespace w4q::kernels
