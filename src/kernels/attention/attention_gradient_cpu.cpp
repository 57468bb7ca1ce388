#include "kernels/attention/attention_gradient.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"
#include "kernels/linear/gemm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/attention_gradient_cpu.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// After highway.h, once per target.
#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::ScalableTag<float>;

/// Σ e^(x·scale − shift).
float sum_of_exponentials(const float* x, size_t count, float scale, float shift) {
  const Tag d;
  const size_t lanes = hn::Lanes(d);
  const auto scales = hn::Set(d, scale), shifts = hn::Set(d, shift);
  auto sum = hn::Zero(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    sum = hn::Add(sum, hn::Exp(d, hn::Sub(hn::Mul(hn::LoadU(d, x + i), scales), shifts)));
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  for (; i < count; ++i) total += std::exp(x[i] * scale - shift);
  return total;
}

/// x becomes the weight e^(x·scale − log_sum), and `by`, its gradient, that of x: weight · (by − mean) · scale. Log sums
/// and means are those of one query, or one for each value.
void weigh(float* x, float* by, size_t count, const float* log_sums, const float* means, bool each, float scale) {
  const Tag d;
  const size_t lanes = hn::Lanes(d);
  const auto scales = hn::Set(d, scale), log_sum = hn::Set(d, *log_sums), mean = hn::Set(d, *means);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto shift = each ? hn::LoadU(d, log_sums + i) : log_sum;
    const auto middle = each ? hn::LoadU(d, means + i) : mean;
    const auto weight = hn::Exp(d, hn::Sub(hn::Mul(hn::LoadU(d, x + i), scales), shift));
    hn::StoreU(weight, d, x + i);
    hn::StoreU(hn::Mul(hn::Mul(weight, hn::Sub(hn::LoadU(d, by + i), middle)), scales), d, by + i);
  }
  for (; i < count; ++i) {
    x[i] = std::exp(x[i] * scale - log_sums[each ? i : 0]);
    by[i] = x[i] * (by[i] - means[each ? i : 0]) * scale;
  }
}

}  // namespace w4q::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace w4q::kernels {
namespace {

HWY_EXPORT(sum_of_exponentials);
HWY_EXPORT(weigh);

/// Queries, and keys, of one block of scores.
constexpr int64_t score_block = 128;

/// What one head's part of a matrix is.
template <class T>
MatrixView<T> part_of(MatrixView<T> all, int64_t first, int64_t count, int64_t head, int64_t head_dim) {
  return {all.row(first) + head * head_dim, count, head_dim, all.stride};
}

class GradientPass {
 public:
  GradientPass(const AttentionRows<const float>& rows, int64_t head_dim, const AttentionOptions& options,
               MatrixView<const float> out, MatrixView<const float> gradient, const AttentionRows<float>& by)
      : rows_(rows),
        dim_(head_dim),
        heads_(rows.queries.cols / head_dim),
        kv_heads_(rows.keys.cols / head_dim),
        length_(rows.queries.rows),
        options_(options),
        scale_(options.scale > 0 ? static_cast<float>(options.scale) : 1.0f / std::sqrt(static_cast<float>(head_dim))),
        cap_(static_cast<float>(options.soft_cap)),
        out_(out),
        gradient_(gradient),
        by_(by),
        log_sums_(static_cast<size_t>(heads_ * length_)),
        means_(log_sums_.size()) {}

  void run() {
    const int64_t blocks = (length_ + score_block - 1) / score_block;
    parallel_for(heads_ * blocks, 1, [&](int64_t task, int64_t) { to_queries(task % heads_, task / heads_); });
    parallel_for(kv_heads_ * blocks, 1, [&](int64_t task, int64_t) { to_keys(task % kv_heads_, task / kv_heads_); });
  }

 private:
  struct Scratch {
    std::vector<float> scores = std::vector<float>(static_cast<size_t>(score_block * score_block));
    std::vector<float> products = std::vector<float>(static_cast<size_t>(score_block * score_block));
  };

  int64_t kv_head(int64_t head) const { return head / (heads_ / kv_heads_); }
  int64_t oldest(int64_t position) const {
    return options_.window > 0 ? std::max<int64_t>(0, position - options_.window + 1) : 0;
  }
  /// The last query that sees a key, plus one.
  int64_t last(int64_t key) const { return options_.window > 0 ? std::min(length_, key + options_.window) : length_; }

  /// With a cap raw products become logits, which are scaled already.
  float cap(float* products, int64_t count) const {
    if (cap_ == 0) return scale_;
    for (int64_t i = 0; i < count; ++i) products[i] = cap_ * std::tanh(products[i] * scale_ / cap_);
    return 1;
  }

  /// Log of the sum of exponentials of each query of a block, and Σ weight · its gradient.
  void find_sums(int64_t head, int64_t first, MatrixView<const float> queries, Scratch& scratch) {
    const float begun =
        options_.sinks.empty() ? -std::numeric_limits<float>::infinity() : options_.sinks[static_cast<size_t>(head)];
    std::vector<float> largest(static_cast<size_t>(queries.rows), begun);
    std::vector<double> sums(largest.size(), options_.sinks.empty() ? 0.0 : 1.0);
    for (int64_t key = oldest(first); key < first + queries.rows; key += score_block) {
      const int64_t count = std::min(score_block, first + queries.rows - key);
      const MatrixView<float> scores(scratch.scores.data(), queries.rows, count);
      gemm_nt(queries, part_of(rows_.keys, key, count, kv_head(head), dim_), scores);
      for (int64_t r = 0; r < queries.rows; ++r) {
        const auto at = static_cast<size_t>(r);
        const int64_t lo = std::max<int64_t>(0, oldest(first + r) - key), hi = std::min(count, first + r + 1 - key);
        if (lo >= hi) continue;
        float* const seen = scores.row(r) + lo;
        const float scale = cap(seen, hi - lo),
                    most = std::max(largest[at], *std::max_element(seen, seen + hi - lo) * scale);
        if (most > largest[at]) sums[at] *= std::exp(double{largest[at]} - double{most});
        largest[at] = most;
        sums[at] += double{HWY_DYNAMIC_DISPATCH(sum_of_exponentials)(seen, static_cast<size_t>(hi - lo), scale, most)};
      }
    }
    const auto out = part_of(out_, first, queries.rows, head, dim_);
    const auto gradient = part_of(gradient_, first, queries.rows, head, dim_);
    for (int64_t r = 0; r < queries.rows; ++r) {
      const auto at = static_cast<size_t>(head * length_ + first + r);
      log_sums_[at] =
          static_cast<float>(double{largest[static_cast<size_t>(r)]} + std::log(sums[static_cast<size_t>(r)]));
      double mean = 0;
      for (int64_t c = 0; c < dim_; ++c) mean += double{out.row(r)[c]} * double{gradient.row(r)[c]};
      means_[at] = static_cast<float>(mean);
    }
  }

  /// Turns raw products [lo, hi) of `count` into weights of values, and gradients by weights into those by products; what
  /// is not seen becomes 0. `query`: the one that all are of, or the first of `each`.
  void back(float* products, float* by_weights, int64_t count, int64_t lo, int64_t hi, size_t query, bool each) const {
    lo = std::clamp<int64_t>(lo, 0, count);
    hi = std::clamp<int64_t>(hi, lo, count);
    for (float* const row : {products, by_weights}) {
      std::fill(row, row + lo, 0.0f);
      std::fill(row + hi, row + count, 0.0f);
    }
    if (lo == hi) return;
    const float scale = cap(products + lo, hi - lo);
    thread_local std::vector<float> slopes;
    slopes.clear();
    for (int64_t i = lo; cap_ > 0 && i < hi; ++i) {
      const float share = products[i] / cap_;
      slopes.push_back(scale_ * (1.0f - share * share));
    }
    const size_t at = query + static_cast<size_t>(each ? lo : 0);
    HWY_DYNAMIC_DISPATCH(weigh)
    (products + lo, by_weights + lo, static_cast<size_t>(hi - lo), &log_sums_[at], &means_[at], each, scale);
    for (size_t i = 0; i < slopes.size(); ++i) by_weights[static_cast<size_t>(lo) + i] *= slopes[i];
  }

  void to_queries(int64_t head, int64_t block) {
    Scratch scratch;
    const int64_t first = block * score_block, rows = std::min(score_block, length_ - first);
    const auto queries = part_of(rows_.queries, first, rows, head, dim_);
    const auto gradient = part_of(gradient_, first, rows, head, dim_);
    const auto by = part_of(by_.queries, first, rows, head, dim_);
    find_sums(head, first, queries, scratch);
    const int64_t begin = oldest(first);
    for (int64_t key = begin; key < first + rows; key += score_block) {
      const int64_t count = std::min(score_block, first + rows - key);
      const auto keys = part_of(rows_.keys, key, count, kv_head(head), dim_);
      const MatrixView<float> scores(scratch.scores.data(), rows, count), weights(scratch.products.data(), rows, count);
      gemm_nt(queries, keys, scores);
      gemm_nt(gradient, part_of(rows_.values, key, count, kv_head(head), dim_), weights);
      for (int64_t r = 0; r < rows; ++r) {
        back(scores.row(r), weights.row(r), count, oldest(first + r) - key, first + r + 1 - key,
             static_cast<size_t>(head * length_ + first + r), false);
      }
      gemm_nn(weights, keys, by, key == begin ? Accumulate::no : Accumulate::yes);
    }
  }

  void to_keys(int64_t kv_head, int64_t block) {
    Scratch scratch;
    const int64_t first = block * score_block, rows = std::min(score_block, length_ - first);
    const auto keys = part_of(rows_.keys, first, rows, kv_head, dim_);
    const auto values = part_of(rows_.values, first, rows, kv_head, dim_);
    const auto by_keys = part_of(by_.keys, first, rows, kv_head, dim_);
    const auto by_values = part_of(by_.values, first, rows, kv_head, dim_);
    const int64_t groups = heads_ / kv_heads_;
    const int64_t end = options_.window > 0 ? std::min(length_, first + rows - 1 + options_.window) : length_;
    auto accumulate = Accumulate::no;
    for (int64_t head = kv_head * groups; head < (kv_head + 1) * groups; ++head) {
      for (int64_t query = first; query < end; query += score_block) {
        const int64_t count = std::min(score_block, end - query);
        const auto queries = part_of(rows_.queries, query, count, head, dim_);
        const auto gradient = part_of(gradient_, query, count, head, dim_);
        const MatrixView<float> scores(scratch.scores.data(), rows, count);
        const MatrixView<float> weights(scratch.products.data(), rows, count);
        gemm_nt(keys, queries, scores);
        gemm_nt(values, gradient, weights);
        for (int64_t r = 0; r < rows; ++r) {
          back(scores.row(r), weights.row(r), count, first + r - query, last(first + r) - query,
               static_cast<size_t>(head * length_ + query), true);
        }
        gemm_nn(scores, gradient, by_values, accumulate);
        gemm_nn(weights, queries, by_keys, accumulate);
        accumulate = Accumulate::yes;
      }
    }
  }

  const AttentionRows<const float>& rows_;
  const int64_t dim_, heads_, kv_heads_, length_;
  const AttentionOptions& options_;
  const float scale_, cap_;
  const MatrixView<const float> out_, gradient_;
  const AttentionRows<float>& by_;
  std::vector<float> log_sums_, means_;  // [heads × length]
};

bool of_one_shape(MatrixView<const float> a, MatrixView<const float> b) { return a.rows == b.rows && a.cols == b.cols; }

}  // namespace

void attention_gradient(const AttentionRows<const float>& rows, int64_t head_dim, const AttentionOptions& options,
                        MatrixView<const float> out, MatrixView<const float> gradient, const AttentionRows<float>& by) {
  const auto& [queries, keys, values] = rows;
  ensure(head_dim > 0 && keys.cols > 0 && keys.cols % head_dim == 0 && queries.cols % keys.cols == 0,
         "attention_gradient: query heads do not share key heads evenly");
  ensure(of_one_shape(keys, values) && keys.rows == queries.rows && of_one_shape(out, queries) &&
             of_one_shape(gradient, queries) && of_one_shape(by.queries, queries) && of_one_shape(by.keys, keys) &&
             of_one_shape(by.values, values),
         "attention_gradient: shapes differ");
  ensure(options.sinks.empty() || static_cast<int64_t>(options.sinks.size()) == queries.cols / head_dim,
         "attention_gradient: a sink for each head");
  GradientPass(rows, head_dim, options, out, gradient, by).run();
}

}  // namespace w4q::kernels
#endif  // HWY_ONCE
