#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"
#include "kernels/linear/gemm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/attention_cpu.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// After highway.h, once per target.
#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::ScalableTag<float>;

float maximum(const float* x, size_t count) {
  const Tag d;
  const size_t lanes = hn::Lanes(d);
  float result = -std::numeric_limits<float>::infinity();
  size_t i = 0;
  if (count >= lanes) {
    auto largest = hn::LoadU(d, x);
    for (i = lanes; i + lanes <= count; i += lanes) largest = hn::Max(largest, hn::LoadU(d, x + i));
    result = hn::GetLane(hn::MaxOfLanes(d, largest));
  }
  for (; i < count; ++i) result = std::max(result, x[i]);
  return result;
}

/// x = e^(x·scale − shift); returns the sum.
float exponentials(float* x, size_t count, float scale, float shift) {
  const Tag d;
  const size_t lanes = hn::Lanes(d);
  const auto scales = hn::Set(d, scale), shifts = hn::Set(d, shift);
  auto sum = hn::Zero(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto e = hn::Exp(d, hn::Sub(hn::Mul(hn::LoadU(d, x + i), scales), shifts));
    hn::StoreU(e, d, x + i);
    sum = hn::Add(sum, e);
  }
  float total = hn::GetLane(hn::SumOfLanes(d, sum));
  if (i == count) return total;
  HWY_ALIGN float tail[hn::MaxLanes(d)] = {};
  std::copy(x + i, x + count, tail);
  hn::Store(hn::Exp(d, hn::Sub(hn::Mul(hn::Load(d, tail), scales), shifts)), d, tail);
  for (size_t t = 0; i < count; ++i, ++t) total += x[i] = tail[t];
  return total;
}

void multiply(float* x, size_t count, float factor) {
  const Tag d;
  const size_t lanes = hn::Lanes(d);
  const auto factors = hn::Set(d, factor);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(hn::Mul(hn::LoadU(d, x + i), factors), d, x + i);
  for (; i < count; ++i) x[i] *= factor;
}

}  // namespace w4q::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace w4q::kernels {
namespace {

HWY_EXPORT(maximum);
HWY_EXPORT(exponentials);
HWY_EXPORT(multiply);

/// Queries and keys of one block of scores: 128 KB, which stay in the second cache level beside the block's keys and
/// values, and are large enough for the products to run near their peak.
constexpr int64_t query_block = 128;
constexpr int64_t key_block = 256;
/// Products that a task computes at least: some 20 µs of work, which waking another thread is worth.
constexpr int64_t task_products = 1 << 17;

/// The softmax of one query so far: scores were shifted by `shift`, and their exponentials add up to `sum`.
struct RunningSoftmax {
  float shift = -std::numeric_limits<float>::infinity();
  float sum = 0;
};

/// One head and one block of queries at positions first, first + 1, …
struct Task {
  MatrixView<const float> queries;
  MatrixView<float> out;
  const float* keys;
  const float* values;
  int64_t first;
  int64_t window;
  float scale;
  float soft_cap;
  RunningSoftmax begun;  ///< what each softmax begins with

  /// The oldest key that the query at `position` sees.
  int64_t oldest(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
};

/// Turns one row of raw scores of keys [begin, begin + count) into weights for their values; what the query does not
/// see becomes 0. `out` holds the sum over earlier keys and is brought to the new shift.
void update(RunningSoftmax& softmax, float* scores, int64_t begin, int64_t count, int64_t oldest, int64_t position,
            float scale, float* out, int64_t head_dim) {
  const int64_t lo = std::clamp<int64_t>(oldest - begin, 0, count);
  const int64_t hi = std::clamp<int64_t>(position + 1 - begin, lo, count);
  std::fill(scores, scores + lo, 0.0f);
  std::fill(scores + hi, scores + count, 0.0f);
  if (lo == hi) return;
  const auto visible = static_cast<size_t>(hi - lo);
  const float shift = std::max(softmax.shift, HWY_DYNAMIC_DISPATCH(maximum)(scores + lo, visible) * scale);
  if (shift > softmax.shift && softmax.sum > 0) {
    const float correction = std::exp(softmax.shift - shift);
    softmax.sum *= correction;
    HWY_DYNAMIC_DISPATCH(multiply)(out, static_cast<size_t>(head_dim), correction);
  }
  softmax.shift = shift;
  softmax.sum += HWY_DYNAMIC_DISPATCH(exponentials)(scores + lo, visible, scale, shift);
}

/// c · tanh(x · scale / c).
void cap(MatrixView<float> scores, float scale, float limit) {
  for (int64_t r = 0; r < scores.rows; ++r) {
    for (int64_t c = 0; c < scores.cols; ++c) scores.row(r)[c] = limit * std::tanh(scores.row(r)[c] * scale / limit);
  }
}

void attend(const Task& task) {
  const int64_t rows = task.queries.rows, head_dim = task.queries.cols;
  thread_local std::vector<float> scratch(static_cast<size_t>(query_block * key_block));
  std::vector<RunningSoftmax> softmax(static_cast<size_t>(rows), task.begun);
  const float scale = task.soft_cap > 0 ? 1.0f : task.scale;
  const int64_t begin = task.oldest(task.first), end = task.first + rows;
  for (int64_t key = begin; key < end; key += key_block) {
    const int64_t count = std::min(key_block, end - key);
    const MatrixView<const float> keys(task.keys + key * head_dim, count, head_dim);
    const MatrixView<const float> values(task.values + key * head_dim, count, head_dim);
    const MatrixView<float> scores(scratch.data(), rows, count);
    gemm_nt(task.queries, keys, scores);
    if (task.soft_cap > 0) cap(scores, task.scale, task.soft_cap);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = task.first + r;
      update(softmax[static_cast<size_t>(r)], scores.row(r), key, count, task.oldest(position), position, scale,
             task.out.row(r), head_dim);
    }
    gemm_nn(scores, values, task.out, key == begin ? Accumulate::no : Accumulate::yes);
  }
  for (int64_t r = 0; r < rows; ++r) {
    HWY_DYNAMIC_DISPATCH(multiply)
    (task.out.row(r), static_cast<size_t>(head_dim), 1.0f / softmax[static_cast<size_t>(r)].sum);
  }
}

void check(MatrixView<const float> queries, const KeyValueCache& cache, int64_t first, MatrixView<float> out) {
  const int64_t key_width = cache.kv_heads * cache.head_dim;
  ensure(key_width > 0 && queries.cols % key_width == 0, "attention: query heads do not share key heads evenly");
  ensure(out.rows == queries.rows && out.cols == queries.cols, "attention: shapes differ");
  ensure(first >= 0 && first + queries.rows <= cache.capacity, "attention: positions outside the cache");
}

}  // namespace

void append(const KeyValueCache& cache, int64_t first, MatrixView<const float> keys, MatrixView<const float> values) {
  const int64_t width = cache.kv_heads * cache.head_dim;
  ensure(keys.rows == values.rows && keys.cols == width && values.cols == width, "append: shapes differ");
  ensure(first >= 0 && first + keys.rows <= cache.capacity, "append: the cache is full");
  parallel_for(keys.rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t h = 0; h < cache.kv_heads; ++h) {
        const int64_t place = (h * cache.capacity + first + r) * cache.head_dim;
        std::copy_n(keys.row(r) + h * cache.head_dim, cache.head_dim, cache.keys + place);
        std::copy_n(values.row(r) + h * cache.head_dim, cache.head_dim, cache.values + place);
      }
    }
  });
}

void attention(MatrixView<const float> queries, const KeyValueCache& cache, int64_t first,
               const AttentionOptions& options, MatrixView<float> out) {
  check(queries, cache, first, out);
  if (queries.rows == 0) return;
  const int64_t head_dim = cache.head_dim, heads = queries.cols / head_dim, groups = heads / cache.kv_heads;
  const int64_t blocks = (queries.rows + query_block - 1) / query_block;
  const float scale =
      options.scale > 0 ? static_cast<float>(options.scale) : 1.0f / std::sqrt(static_cast<float>(head_dim));
  const int64_t window = options.window;
  ensure(options.sinks.empty() || static_cast<int64_t>(options.sinks.size()) == heads,
         "attention: a sink for each head");
  const auto attend_task = [&](int64_t task) {
    // Late queries see the most keys: they go first, so that the threads finish together.
    const int64_t head = task % heads, begin = (blocks - 1 - task / heads) * query_block;
    const int64_t rows = std::min(query_block, queries.rows - begin);
    const int64_t offset = head * head_dim, cache_offset = head / groups * cache.capacity * head_dim;
    attend({.queries = {queries.row(begin) + offset, rows, head_dim, queries.stride},
            .out = {out.row(begin) + offset, rows, head_dim, out.stride},
            .keys = cache.keys + cache_offset,
            .values = cache.values + cache_offset,
            .first = first + begin,
            .window = window,
            .scale = scale,
            .soft_cap = static_cast<float>(options.soft_cap),
            .begun = options.sinks.empty() ? RunningSoftmax{}
                                           : RunningSoftmax{options.sinks[static_cast<size_t>(head)], 1}});
  };
  const int64_t seen = window > 0 ? std::min(window + queries.rows, first + queries.rows) : first + queries.rows;
  const int64_t products = 2 * std::min(queries.rows, query_block) * seen * head_dim;
  parallel_for(heads * blocks, std::max<int64_t>(1, task_products / products), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) attend_task(task);
  });
}

}  // namespace w4q::kernels
#endif  // HWY_ONCE
