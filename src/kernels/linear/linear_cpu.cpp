#include "kernels/linear/linear.h"

#include <algorithm>
#include <functional>
#include <span>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/text.h"
#include "kernels/dequantize/dequantize.h"
#include "kernels/linear/gemm.h"
#include "kernels/linear/int8_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/linear/linear_cpu.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace w4q::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Σ x[i]·w[i] in four independent chains, which hide the latency of the fused multiply-add.
float dot(const float* x, const float* w, size_t count) {
  const hn::ScalableTag<float> d;
  const size_t lanes = hn::Lanes(d);
  auto sum0 = hn::Zero(d), sum1 = hn::Zero(d), sum2 = hn::Zero(d), sum3 = hn::Zero(d);
  size_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    sum0 = hn::MulAdd(hn::LoadU(d, x + i), hn::LoadU(d, w + i), sum0);
    sum1 = hn::MulAdd(hn::LoadU(d, x + i + lanes), hn::LoadU(d, w + i + lanes), sum1);
    sum2 = hn::MulAdd(hn::LoadU(d, x + i + 2 * lanes), hn::LoadU(d, w + i + 2 * lanes), sum2);
    sum3 = hn::MulAdd(hn::LoadU(d, x + i + 3 * lanes), hn::LoadU(d, w + i + 3 * lanes), sum3);
  }
  for (; i + lanes <= count; i += lanes) sum0 = hn::MulAdd(hn::LoadU(d, x + i), hn::LoadU(d, w + i), sum0);
  float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3))));
  for (; i < count; ++i) sum += x[i] * w[i];
  return sum;
}

}  // namespace w4q::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace w4q::kernels {
namespace {

HWY_EXPORT(dot);

/// Rows of W that one task decodes: 64 keep a task's scratch in the second cache level up to k = 8192, and are enough
/// for the matrix product to run near its peak.
constexpr int64_t row_block = 64;
/// From so many rows of x on tasks have as many of them, and more of W: to decode it again takes less than packing x for
/// a narrow product.
constexpr int64_t many_rows = 512, wide_block = 256;
/// Up to so many rows of x, a dot product per output beats packing matrices.
constexpr int64_t few_rows = 4;
/// Weights that such a task reads at least: some 50 µs of work, which waking another thread is worth.
constexpr int64_t few_rows_weights = 1 << 18;
/// Values that such a task decodes at a time: half of a first level cache, read back at once.
constexpr int64_t few_rows_scratch = 1 << 12;

/// On the way back: rows of W that are decoded together, and columns of a task.
constexpr int64_t gradient_rows = 1024, gradient_columns = 128;

/// Scratch of at least `count` values that stays with the thread between calls.
float* scratch(int64_t count) {
  thread_local Buffer buffer;
  const auto bytes = static_cast<size_t>(count) * sizeof(float);
  if (buffer.size() < bytes) buffer = Buffer(bytes);
  return buffer.as<float>().data();
}

void add_bias(const std::vector<float>& bias, MatrixView<float> y) {
  for (int64_t r = 0; r < y.rows; ++r) {
    float* row = y.row(r);
    for (int64_t c = 0; c < y.cols; ++c) row[c] += bias[static_cast<size_t>(c)];
  }
}

/// W · (x ⊘ s) = (W ⊘ s) · x: the scale of the input's channels goes into the decoded columns.
void divide_columns(const std::vector<float>& scales, MatrixView<float> rows) {
  for (int64_t r = 0; r < rows.rows; ++r) {
    float* row = rows.row(r);
    for (int64_t c = 0; c < rows.cols; ++c) row[c] /= scales[static_cast<size_t>(c)];
  }
}

/// decode_rows without its checks.
void decode(const LinearWeight& weight, int64_t begin, MatrixView<float> out) {
  if (const auto* packed = std::get_if<std::shared_ptr<const formats::PackedLinear>>(&weight.matrix)) {
    dequantize_rows(**packed, begin, out);
    if (!(*packed)->input_scale.empty()) divide_columns((*packed)->input_scale, out);
    return;
  }
  const TensorView& view = std::get<LinearWeight::Dense>(weight.matrix).view;
  const auto row_bytes = static_cast<size_t>(weight.k * dtype_bits(view.dtype) / 8);
  const auto bytes = view.bytes.subspan(static_cast<size_t>(begin) * row_bytes);
  if (out.stride == out.cols) return widen(bytes, view.dtype, {out.data, static_cast<size_t>(out.rows * out.cols)});
  for (int64_t r = 0; r < out.rows; ++r) {
    widen(bytes.subspan(static_cast<size_t>(r) * row_bytes), view.dtype, {out.row(r), static_cast<size_t>(out.cols)});
  }
}

/// Decodes rows from `begin` on.
using DecodeRows = std::function<void(int64_t begin, MatrixView<float> out)>;

void multiply_few(const DecodeRows& decode, int64_t begin, MatrixView<const float> x, MatrixView<float> y) {
  const auto k = static_cast<size_t>(x.cols);
  const int64_t chunk = std::clamp<int64_t>(few_rows_scratch / std::max<int64_t>(x.cols, 1), 1, y.cols);
  float* memory = scratch(chunk * x.cols);
  const auto product = HWY_DYNAMIC_DISPATCH(dot);
  for (int64_t done = 0; done < y.cols; done += chunk) {
    const MatrixView<float> rows(memory, std::min(chunk, y.cols - done), x.cols);
    decode(begin + done, rows);
    for (int64_t c = 0; c < rows.rows; ++c) {
      for (int64_t r = 0; r < x.rows; ++r) y.row(r)[done + c] = product(x.row(r), rows.row(c), k);
    }
  }
}

void multiply_block(const DecodeRows& decode, int64_t begin, MatrixView<const float> x, MatrixView<float> y) {
  const MatrixView<float> rows(scratch(y.cols * x.cols), y.cols, x.cols);
  decode(begin, rows);
  gemm_nt(x, rows, y);
}

/// y ← x · Wᵀ, or y + x · Wᵀ if `add`, for the rows of W that `decode` decodes.
void multiply(const DecodeRows& decode, MatrixView<const float> x, MatrixView<float> y, bool add) {
  const bool few = x.rows <= few_rows, many = x.rows >= many_rows;
  const auto product = few ? multiply_few : multiply_block;
  const int64_t narrow = few ? std::max(row_block, few_rows_weights / std::max<int64_t>(x.cols, 1)) : row_block;
  const int64_t grain = many ? wide_block : narrow, rows = many ? many_rows : x.rows;
  const int64_t blocks = (y.cols + grain - 1) / grain, parts = many ? (x.rows + rows - 1) / rows : 1;
  parallel_for(blocks * parts, 1, [&](int64_t task, int64_t) {
    const int64_t begin = task % blocks * grain, end = std::min(begin + grain, y.cols);
    const int64_t first = task / blocks * rows, count = std::min(rows, x.rows - first);
    const MatrixView<const float> part(x.row(first), count, x.cols, x.stride);
    const MatrixView<float> block(y.row(first) + begin, count, end - begin, y.stride);
    if (!add) return product(decode, begin, part, block);
    std::vector<float> memory(static_cast<size_t>(block.rows * block.cols));
    const MatrixView<float> more(memory.data(), block.rows, block.cols);
    product(decode, begin, part, more);
    for (int64_t r = 0; r < block.rows; ++r) {
      for (int64_t c = 0; c < block.cols; ++c) block.row(r)[c] += more.row(r)[c];
    }
  });
}

/// out ← one row of x ⊘ s.
void scale_row(const float* x, const std::vector<float>& scales, MatrixView<float> out) {
  std::copy_n(x, out.cols, out.row(0));
  if (!scales.empty()) divide_columns(scales, out);
}

/// out ← R(x ⊘ s), row by row.
void rotate_input(MatrixView<const float> x, const std::vector<float>& scales, const formats::InputRotation& rotation,
                  MatrixView<float> out) {
  parallel_for(x.rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      scale_row(x.row(r), scales, {out.row(r), 1, out.cols});
      rotation.rotate({out.row(r), static_cast<size_t>(out.cols)});
    }
  });
}

/// Passes that share a rotation take the same input and are multiplied at once.
void rotated_linear(const formats::PackedLinear& packed, MatrixView<const float> x, MatrixView<float> y) {
  const std::span<const formats::PackedWeight> passes = packed.passes;
  ensure(packed.rotations.size() == passes.size(), "linear: not one rotation for each pass");
  std::vector<float> memory(static_cast<size_t>(x.rows * x.cols));
  const MatrixView<float> rotated(memory.data(), x.rows, x.cols);
  for (size_t first = 0, end = 0; first < passes.size(); first = end) {
    end = shared_input_end(packed, first);
    rotate_input(x, packed.input_scale, packed.rotations[first], rotated);
    const auto shared = passes.subspan(first, end - first);
    multiply([&](int64_t begin, MatrixView<float> rows) { dequantize_rows(shared, begin, rows); }, rotated, y,
             first != 0);
  }
}

}  // namespace

void decode_rows(const LinearWeight& weight, int64_t begin, int64_t end, MatrixView<float> out) {
  const bool fits = begin >= 0 && begin <= end && end <= weight.n && out.rows == end - begin && out.cols == weight.k;
  if (!fits) ensure(false, concat(weight.name, ": decode_rows: no such rows"));
  decode(weight, begin, out);
}

void linear(const LinearWeight& weight, MatrixView<const float> x, MatrixView<float> y) {
  const bool fits = x.rows == y.rows && x.cols == weight.k && y.cols == weight.n;
  if (!fits) ensure(false, concat(weight.name, ": linear: shapes differ"));
  const auto* packed = std::get_if<std::shared_ptr<const formats::PackedLinear>>(&weight.matrix);
  if (packed != nullptr && !(*packed)->rotations.empty()) {
    rotated_linear(**packed, x, y);
  } else {
    multiply([&](int64_t begin, MatrixView<float> rows) { decode(weight, begin, rows); }, x, y, false);
  }
  if (!weight.bias.empty()) add_bias(weight.bias, y);
}

void linear_gradient(const LinearWeight& weight, MatrixView<const float> gradient, MatrixView<float> out) {
  const bool fits = gradient.rows == out.rows && gradient.cols == weight.n && out.cols == weight.k;
  if (!fits) ensure(false, concat(weight.name, ": linear_gradient: shapes differ"));
  std::vector<float> memory(static_cast<size_t>(std::min(gradient_rows, weight.n) * weight.k));
  for (int64_t first = 0; first < weight.n; first += gradient_rows) {
    const MatrixView<float> rows(memory.data(), std::min(gradient_rows, weight.n - first), weight.k);
    parallel_for(rows.rows, row_block, [&](int64_t begin, int64_t end) {
      decode(weight, first + begin, {rows.row(begin), end - begin, rows.cols});
    });
    const MatrixView<const float> part(gradient.data + first, gradient.rows, rows.rows, gradient.stride);
    parallel_for(out.cols, gradient_columns, [&](int64_t begin, int64_t end) {
      gemm_nn(part, {rows.data + begin, rows.rows, end - begin, rows.stride},
              {out.data + begin, out.rows, end - begin, out.stride}, first == 0 ? Accumulate::no : Accumulate::yes);
    });
  }
}

bool takes_int8_activations(const LinearWeight& weight) noexcept {
  const auto* packed = std::get_if<std::shared_ptr<const formats::PackedLinear>>(&weight.matrix);
  return packed != nullptr && (*packed)->passes.size() == 1 && (*packed)->rotations.empty() &&
         takes_int8_activations((*packed)->passes.front().scheme);
}

void linear_int8(const LinearWeight& weight, MatrixView<const float> x, MatrixView<float> y) {
  const bool fits = x.rows == y.rows && x.cols == weight.k && y.cols == weight.n && takes_int8_activations(weight);
  if (!fits) ensure(false, concat(weight.name, ": linear_int8: shapes differ, or weights of 16 bits"));
  const auto& packed = *std::get<std::shared_ptr<const formats::PackedLinear>>(weight.matrix);
  std::vector<float> codes(static_cast<size_t>(x.rows * x.cols)), scales(static_cast<size_t>(x.rows));
  const MatrixView<float> rows(codes.data(), x.rows, x.cols);
  for (int64_t r = 0; r < x.rows; ++r) scale_row(x.row(r), packed.input_scale, {rows.row(r), 1, rows.cols});
  quantize_int8(rows, scales, rows);
  multiply([&](int64_t begin, MatrixView<float> out) { dequantize_rows(packed.passes, begin, out); }, rows, y, false);
  for (int64_t r = 0; r < y.rows; ++r) {
    for (int64_t c = 0; c < y.cols; ++c) y.row(r)[c] *= scales[static_cast<size_t>(r)];
  }
  if (!weight.bias.empty()) add_bias(weight.bias, y);
}

}  // namespace w4q::kernels
#endif  // HWY_ONCE
