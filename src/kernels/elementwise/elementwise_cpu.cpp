#include "kernels/elementwise/elementwise.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/elementwise/elementwise_cpu.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>
// After highway.h, once per target.
#include <hwy/contrib/math/math-inl.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::ScalableTag<float>;

float sum_of_squares(const float* x, size_t count) {
  const Tag d;
  const size_t lanes = hn::Lanes(d);
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d);
  size_t i = 0;
  for (; i + 2 * lanes <= count; i += 2 * lanes) {
    const auto a = hn::LoadU(d, x + i), b = hn::LoadU(d, x + i + lanes);
    sum0 = hn::MulAdd(a, a, sum0);
    sum1 = hn::MulAdd(b, b, sum1);
  }
  float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1)));
  for (; i < count; ++i) sum += x[i] * x[i];
  return sum;
}

void normalize(const float* x, const float* weight, float eps, size_t count, float* y) {
  const Tag d;
  const size_t lanes = hn::Lanes(d);
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, count) / static_cast<float>(count) + eps);
  const auto scales = hn::Set(d, scale);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, weight + i), hn::Mul(hn::LoadU(d, x + i), scales)), d, y + i);
  }
  for (; i < count; ++i) y[i] = weight[i] * (x[i] * scale);
}

/// One head: first[i], second[i] are the pairs. Products and sums are rounded one by one, as in the definition.
void rotate(float* first, float* second, const float* cosine, const float* sine, size_t count) {
  const Tag d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto a = hn::LoadU(d, first + i), b = hn::LoadU(d, second + i);
    const auto c = hn::LoadU(d, cosine + i), s = hn::LoadU(d, sine + i);
    hn::StoreU(hn::Sub(hn::Mul(a, c), hn::Mul(b, s)), d, first + i);
    hn::StoreU(hn::Add(hn::Mul(b, c), hn::Mul(a, s)), d, second + i);
  }
  for (; i < count; ++i) {
    const float a = first[i], b = second[i];
    first[i] = a * cosine[i] - b * sine[i];
    second[i] = b * cosine[i] + a * sine[i];
  }
}

/// silu(gate)·up of whole vectors. e^−x is kept finite: beyond 88 the result is below 1e-35 anyway.
HWY_INLINE hn::Vec<Tag> gated(hn::Vec<Tag> gate, hn::Vec<Tag> up) {
  const Tag d;
  const auto e = hn::Exp(d, hn::Min(hn::Neg(gate), hn::Set(d, 88.0f)));
  return hn::Mul(hn::Div(gate, hn::Add(hn::Set(d, 1.0f), e)), up);
}

void silu_multiply_row(float* gate, const float* up, size_t count) {
  const Tag d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(gated(hn::LoadU(d, gate + i), hn::LoadU(d, up + i)), d, gate + i);
  if (i == count) return;
  HWY_ALIGN float gate_tail[hn::MaxLanes(d)] = {};
  HWY_ALIGN float up_tail[hn::MaxLanes(d)] = {};
  std::copy(gate + i, gate + count, gate_tail);
  std::copy(up + i, up + count, up_tail);
  hn::Store(gated(hn::Load(d, gate_tail), hn::Load(d, up_tail)), d, gate_tail);
  std::copy_n(gate_tail, count - i, gate + i);
}

void add_row(float* x, const float* y, size_t count) {
  const Tag d;
  const size_t lanes = hn::Lanes(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) hn::StoreU(hn::Add(hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, x + i);
  for (; i < count; ++i) x[i] += y[i];
}

}  // namespace w4q::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace w4q::kernels {
namespace {

HWY_EXPORT(normalize);
HWY_EXPORT(rotate);
HWY_EXPORT(silu_multiply_row);
HWY_EXPORT(add_row);

/// Rows per task: about 16 K values, enough to outweigh handing a task out.
int64_t rows_per_task(int64_t cols) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(cols, 1)); }

/// Runs `body(row)` for every row, in parallel.
template <class Body>
void for_rows(int64_t rows, int64_t cols, const Body& body) {
  parallel_for(rows, rows_per_task(cols), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) body(r);
  });
}

/// Runs `body(head, cosines, sines)` for every head of every row.
template <class Body>
void for_heads(MatrixView<float> x, int64_t head_dim, MatrixView<const float> cosine, MatrixView<const float> sine,
               const Body& body) {
  const int64_t half = cosine.cols;
  ensure(head_dim > 0 && x.cols % head_dim == 0 && 2 * half <= head_dim && sine.cols == half && cosine.rows == x.rows &&
             sine.rows == x.rows,
         "rotate_heads: shapes differ");
  for_rows(x.rows, x.cols, [&](int64_t r) {
    for (float* head = x.row(r); head < x.row(r) + x.cols; head += head_dim) body(head, cosine.row(r), sine.row(r));
  });
}

}  // namespace

void rms_norm(MatrixView<const float> x, std::span<const float> weight, float eps, MatrixView<float> y) {
  ensure(x.rows == y.rows && x.cols == y.cols && static_cast<int64_t>(weight.size()) == x.cols,
         "rms_norm: shapes differ");
  for_rows(x.rows, x.cols, [&](int64_t r) {
    HWY_DYNAMIC_DISPATCH(normalize)(x.row(r), weight.data(), eps, weight.size(), y.row(r));
  });
}

void rms_norm_heads(MatrixView<float> x, std::span<const float> weight, float eps) {
  const auto head_dim = static_cast<int64_t>(weight.size());
  ensure(head_dim > 0 && x.cols % head_dim == 0, "rms_norm_heads: rows do not hold whole heads");
  for_rows(x.rows, x.cols, [&](int64_t r) {
    for (float* head = x.row(r); head < x.row(r) + x.cols; head += head_dim) {
      HWY_DYNAMIC_DISPATCH(normalize)(head, weight.data(), eps, weight.size(), head);
    }
  });
}

void rms_norm_gradient(MatrixView<const float> x, std::span<const float> weight, float eps,
                       MatrixView<float> gradient) {
  const auto head_dim = static_cast<int64_t>(weight.size());
  ensure(head_dim > 0 && x.cols % head_dim == 0 && x.rows == gradient.rows && x.cols == gradient.cols,
         "rms_norm_gradient: shapes differ");
  for_rows(x.rows, x.cols, [&](int64_t r) {
    for (int64_t first = 0; first < x.cols; first += head_dim) {
      const float* const from = x.row(r) + first;
      float* const by = gradient.row(r) + first;
      double squares = 0, product = 0;
      for (int64_t c = 0; c < head_dim; ++c) {
        by[c] *= weight[static_cast<size_t>(c)];
        squares += double{from[c]} * double{from[c]};
        product += double{from[c]} * double{by[c]};
      }
      const double mean = squares / static_cast<double>(head_dim) + double{eps};
      const auto scale = static_cast<float>(1.0 / std::sqrt(mean));
      const auto share = static_cast<float>(product / (mean * static_cast<double>(head_dim)));
      for (int64_t c = 0; c < head_dim; ++c) by[c] = scale * (by[c] - share * from[c]);
    }
  });
}

void rms_norm_weight_gradient(MatrixView<const float> x, float eps, MatrixView<const float> gradient,
                              std::span<double> sums) {
  const auto head_dim = static_cast<int64_t>(sums.size());
  ensure(head_dim > 0 && x.cols % head_dim == 0 && x.rows == gradient.rows && x.cols == gradient.cols,
         "rms_norm_weight_gradient: shapes differ");
  const int64_t heads = x.cols / head_dim;
  std::vector<double> scales(static_cast<size_t>(x.rows * heads));
  for_rows(x.rows, x.cols, [&](int64_t r) {
    for (int64_t head = 0; head < heads; ++head) {
      const float* const from = x.row(r) + head * head_dim;
      double squares = 0;
      for (int64_t c = 0; c < head_dim; ++c) squares += double{from[c]} * double{from[c]};
      scales[static_cast<size_t>(r * heads + head)] =
          1.0 / std::sqrt(squares / static_cast<double>(head_dim) + double{eps});
    }
  });
  parallel_for(head_dim, 64, [&](int64_t begin, int64_t end) {
    for (int64_t r = 0; r < x.rows; ++r) {
      for (int64_t head = 0; head < heads; ++head) {
        const double scale = scales[static_cast<size_t>(r * heads + head)];
        const float* const from = x.row(r) + head * head_dim;
        const float* const by = gradient.row(r) + head * head_dim;
        for (int64_t c = begin; c < end; ++c) {
          sums[static_cast<size_t>(c)] += scale * double{from[c]} * double{by[c]};
        }
      }
    }
  });
}

void rotate_heads(MatrixView<float> x, int64_t head_dim, MatrixView<const float> cosine, MatrixView<const float> sine) {
  for_heads(x, head_dim, cosine, sine, [half = cosine.cols](float* head, const float* c, const float* s) {
    HWY_DYNAMIC_DISPATCH(rotate)(head, head + half, c, s, static_cast<size_t>(half));
  });
}

void rotate_neighbours(MatrixView<float> x, int64_t head_dim, MatrixView<const float> cosine,
                       MatrixView<const float> sine) {
  for_heads(x, head_dim, cosine, sine, [half = cosine.cols](float* head, const float* c, const float* s) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = head[2 * i], b = head[2 * i + 1];
      head[2 * i] = a * c[i] - b * s[i];
      head[2 * i + 1] = b * c[i] + a * s[i];
    }
  });
}

void silu_multiply(MatrixView<float> gate, MatrixView<const float> up) {
  ensure(gate.rows == up.rows && gate.cols == up.cols, "silu_multiply: shapes differ");
  for_rows(gate.rows, gate.cols, [&](int64_t r) {
    HWY_DYNAMIC_DISPATCH(silu_multiply_row)(gate.row(r), up.row(r), static_cast<size_t>(gate.cols));
  });
}

void add_rows(MatrixView<float> x, MatrixView<const float> y) {
  ensure(x.rows == y.rows && x.cols == y.cols, "add_rows: shapes differ");
  for_rows(x.rows, x.cols, [&](int64_t r) {
    HWY_DYNAMIC_DISPATCH(add_row)(x.row(r), y.row(r), static_cast<size_t>(x.cols));
  });
}

}  // namespace w4q::kernels
#endif  // HWY_ONCE
