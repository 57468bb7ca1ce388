#include "kernels/attention/attention_gradient.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/parallel.h"
#include "random_matrix.h"

namespace w4q::kernels {
namespace {

using test::RandomMatrix;

constexpr int64_t head_count = 6, kv_count = 2, width_of_head = 24;

struct Rows {
  explicit Rows(int64_t length, uint64_t seed)
      : queries(length, head_count * width_of_head, seed),
        keys(length, kv_count * width_of_head, seed + 1),
        values(length, kv_count * width_of_head, seed + 2) {}
  AttentionRows<const float> view() const { return {queries, keys, values}; }
  AttentionRows<float> mutable_view() { return {queries, keys, values}; }

  RandomMatrix queries, keys, values;
};

/// out by attention() itself.
RandomMatrix forward(const Rows& rows, const AttentionOptions& options) {
  const int64_t length = rows.queries.rows;
  std::vector<float> keys(rows.keys.values.size()), values(keys.size());
  const KeyValueCache cache{keys.data(), values.data(), kv_count, length, width_of_head};
  RandomMatrix out(length, head_count * width_of_head, 9);
  append(cache, 0, rows.keys, rows.values);
  attention(rows.queries, cache, 0, options, out);
  return out;
}

/// Σ by · softmax(…) · values in fp64.
double loss(const Rows& rows, const RandomMatrix& by, const AttentionOptions& options) {
  const double scale = options.scale > 0 ? options.scale : 1 / std::sqrt(double{width_of_head});
  double result = 0;
  for (int64_t head = 0; head < head_count; ++head) {
    const int64_t at = head / (head_count / kv_count) * width_of_head;
    for (int64_t query = 0; query < rows.queries.rows; ++query) {
      double sum = options.sinks.empty() ? 0 : std::exp(double{options.sinks[static_cast<size_t>(head)]}), product = 0;
      const int64_t oldest = options.window > 0 ? std::max<int64_t>(0, query - options.window + 1) : 0;
      for (int64_t key = oldest; key <= query; ++key) {
        double score = 0, value = 0;
        for (int64_t c = 0; c < width_of_head; ++c) {
          score += double{rows.queries.row(query)[head * width_of_head + c]} * double{rows.keys.row(key)[at + c]};
          value += double{by.row(query)[head * width_of_head + c]} * double{rows.values.row(key)[at + c]};
        }
        score *= scale;
        if (options.soft_cap > 0) score = options.soft_cap * std::tanh(score / options.soft_cap);
        sum += std::exp(score);
        product += std::exp(score) * value;
      }
      result += product / sum;
    }
  }
  return result;
}

/// The slope of the loss along the gradient by one of the three, against the gradient's length.
void expect_slope(const Rows& rows, const Rows& gradient, const RandomMatrix& by, const AttentionOptions& options,
                  RandomMatrix Rows::*part) {
  double squares = 0;
  for (const float value : (gradient.*part).values) squares += double{value} * double{value};
  const double length = std::sqrt(squares), step = 1e-2;
  double slope = 0;
  for (const double sign : {1.0, -1.0}) {
    Rows moved = rows;
    for (size_t i = 0; i < (moved.*part).values.size(); ++i) {
      (moved.*part).values[i] += static_cast<float>(sign * step * double{(gradient.*part).values[i]} / length);
    }
    slope += sign * loss(moved, by, options) / (2 * step);
  }
  EXPECT_NEAR(slope / length, 1, 1e-4);  // measured: 7e-6
}

TEST(AttentionGradient, IsTheSlope) {
  const std::vector<float> sinks = {0.5f, -1, 2, 0, 1, 3};
  const AttentionOptions all[] = {{},
                                  {.window = 7},
                                  {.window = 140, .scale = 0.3},
                                  {.soft_cap = 2},
                                  {.scale = 0.5, .sinks = sinks},
                                  {.window = 30, .soft_cap = 1.5, .sinks = sinks}};
  for (const auto& options : all) {
    for (const int64_t length : {1, 20, 290}) {
      SCOPED_TRACE(length);
      const Rows rows(length, 1);
      Rows gradient(length, 20);
      const RandomMatrix by(length, head_count * width_of_head, 4);
      attention_gradient(rows.view(), width_of_head, options, forward(rows, options), by, gradient.mutable_view());
      if (length > 1) {
        expect_slope(rows, gradient, by, options, &Rows::queries);
        expect_slope(rows, gradient, by, options, &Rows::keys);
      }
      expect_slope(rows, gradient, by, options, &Rows::values);
    }
  }
}

TEST(AttentionGradient, DoesNotDependOnThreads) {
  const Rows rows(300, 1);
  const RandomMatrix by(300, head_count * width_of_head, 4), out = forward(rows, {});
  Rows one(300, 20), three(300, 21);
  set_threads(1);
  attention_gradient(rows.view(), width_of_head, {}, out, by, one.mutable_view());
  set_threads(3);
  attention_gradient(rows.view(), width_of_head, {}, out, by, three.mutable_view());
  set_threads(0);
  EXPECT_EQ(one.queries.values, three.queries.values);
  EXPECT_EQ(one.keys.values, three.keys.values);
  EXPECT_EQ(one.values.values, three.values.values);
}

}  // namespace
}  // namespace w4q::kernels
