// Runs a GPU linear layer and compares it with an fp64 product of the decoded weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/convert.h"
#include "core/float_formats.h"
#include "core/parallel.h"
#include "device/buffer.h"
#include "gpu.h"
#include "kernels/linear/int8_rows.h"
#include "kernels/linear/kernel_row.h"
#include "pooled_normal.h"
#include "support.h"
#include "test_workspace.h"

namespace w4q::test {

/// Activations in a 16-bit type, with a row stride of their own.
struct Activations {
  int64_t m, k, stride;
  DType dtype;
  std::vector<uint16_t> bits;
  std::vector<float> values;

  Activations(int64_t m_, int64_t k_, int64_t stride_, DType dtype_) : m(m_), k(k_), stride(stride_), dtype(dtype_) {
    bits.resize(static_cast<size_t>(m * stride), 0x7E00);  // NaN where nothing may be read
    values.resize(static_cast<size_t>(m * k));
    for (int64_t r = 0; r < m; ++r) {
      for (int64_t c = 0; c < k; ++c) {
        const float value = pooled_normal(9, static_cast<uint64_t>(r * k + c));
        const uint16_t half = dtype == DType::f16 ? f16_from_f32(value) : bf16_from_f32(value);
        bits[static_cast<size_t>(r * stride + c)] = half;
        values[static_cast<size_t>(r * k + c)] = dtype == DType::f16 ? f32_from_f16(half) : f32_from_bf16(half);
      }
    }
  }

  /// What a product with int8 activations multiplies: `values` become scale · code of their rows.
  void round_to_int8() {
    std::vector<float> scales(static_cast<size_t>(m)), codes(values.size());
    kernels::quantize_int8({values.data(), m, k}, scales, {codes.data(), m, k});
    for (size_t i = 0; i < codes.size(); ++i) values[i] = scales[i / static_cast<size_t>(k)] * codes[i];
  }
};

struct LinearOutcome {
  std::vector<std::byte> y;   ///< [m][ldy]
  double relative_error = 0;  ///< Frobenius
};

/// What is added to a product, on top of the weight.
struct LinearExtras {
  std::vector<float> bias;
  bool residual = false;  ///< ones are added, in place: y holds them before
  bool apart = false;     ///< … not in place
  bool fp32 = false;      ///< y and the residual are f32
  bool int8 = false;      ///< activations are rounded to int8; those compared with, too
  bool gated = false;     ///< rows of the weight are gates and ups in turn (kernels/frame/linear_fusion.h)
  /// The kernel that is to run, one that accepts the layer; null: the one that the table picks.
  const kernels::KernelRow* kernel = nullptr;
  /// Where semaphores are empty, and are so afterwards; null: one that is made for the call.
  TestWorkspace* workspace = nullptr;
};

/// A product of one row that is multiplied, and changes of it that are refused before any launch.
class BadArguments {
 public:
  struct Product {
    kernels::DeviceLinear linear;
    kernels::LinearCall call;
    kernels::Workspace workspace;
    kernels::DevicePass& pass() { return linear.passes.front(); }
  };

  BadArguments(const kernels::DevicePass& pass, const device::DeviceBuffer& x, device::DeviceBuffer& y,
               const device::Stream& stream)
      : good_{{.passes = {pass}}, {}, {}},
        plan_(TestWorkspace::plan(good_.linear)),
        memory_(good_.linear, 64, stream),
        stream_(stream) {
    good_.call.m = 1;
    good_.call.x = x.data();
    good_.call.ldx = pass.k;
    good_.call.y = y.data();
    good_.call.ldy = pass.n;
    good_.workspace = memory_.get();
  }
  template <class Change>
  void refuse(std::string_view part, const Change& change) const {
    Product bad = good_;
    change(bad);
    expect_error(ErrorCode::bad_argument, {"linear", part}, [&] { multiply(bad); });
  }
  void take() const { multiply(good_); }

 private:
  void multiply(const Product& product) const {
    kernels::multiply(product.linear, plan_, product.call, product.workspace, stream_);
  }

  Product good_;
  kernels::LaunchPlan plan_;
  TestWorkspace memory_;
  const device::Stream& stream_;
};

/// All kernels of the table that take such a pass.
inline std::vector<const kernels::KernelRow*> accepting_kernels(const kernels::DevicePass& pass, int64_t m, DType dtype,
                                                                bool int8 = false) {
  const kernels::LinearDesc desc{
      .gpu = test::gpu().properties(), .passes = {&pass, 1}, .m = m, .activation = dtype, .int8_activations = int8};
  std::vector<const kernels::KernelRow*> rows;
  for (const auto& row : kernels::kernel_registry()) {
    if (row.accepts(desc, nullptr)) rows.push_back(&row);
  }
  return rows;
}

inline constexpr std::byte poison{0xA5};

/// How values of y are stored.
struct OutputType {
  DType dtype;

  size_t bytes() const { return dtype == DType::f32 ? 4 : 2; }
  void put(float value, std::byte* to) const {
    const uint16_t half = dtype == DType::f16 ? f16_from_f32(value) : bf16_from_f32(value);
    std::memcpy(to, dtype == DType::f32 ? static_cast<const void*>(&value) : &half, bytes());
  }
  float get(const std::byte* from) const {
    float value = 0;
    uint16_t half = 0;
    std::memcpy(dtype == DType::f32 ? static_cast<void*>(&value) : &half, from, bytes());
    return dtype == DType::f32 ? value : dtype == DType::f16 ? f32_from_f16(half) : f32_from_bf16(half);
  }
};

/// KernelRow::error of 16-bit results, which all rows but rotated ones share. A few weights have the worst case instead
/// of the mean.
inline double linear_bound(DType dtype, int64_t weights) {
  return (dtype == DType::bf16 ? kernels::bf16_error : kernels::KernelRow{}.error) * (weights < 1000 ? 4 : 1);
}

/// Multiplies by `kernel`, or by the one that the table picks.
inline void multiply_by(const kernels::KernelRow* kernel, const kernels::DeviceLinear& linear,
                        const kernels::LinearCall& call, TestWorkspace* workspace, const device::Stream& stream) {
  if (kernel == nullptr) {
    const auto plan = TestWorkspace::plan(linear, call.int8_activations);
    TestWorkspace own(workspace == nullptr ? workspace_sizes(test::gpu().properties(), linear, plan, call.m)
                                           : kernels::WorkspaceSizes{},
                      stream);
    return kernels::multiply(linear, plan, call, (workspace == nullptr ? own : *workspace).get(), stream);
  }
  kernels::LinearArgs args;
  static_cast<kernels::LinearCall&>(args) = call;
  args.passes = linear.passes;
  args.bias = linear.bias;
  TestWorkspace own(kernel->workspace(kernels::describe(args, test::gpu().properties())), stream);
  args.workspace = (workspace == nullptr ? own : *workspace).get();
  kernels::run_kernel(*kernel, args, stream);
}

/// In fp64; four sums at a time, which need not wait for each other.
inline double dot(const float* a, const float* b, int64_t count) {
  double sums[4] = {};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int64_t j = 0; j < 4; ++j) sums[j] += double{a[i + j]} * b[i + j];
  }
  for (; i < count; ++i) sums[0] += double{a[i]} * b[i];
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

/// Runs the layer `weight` whose decoded values are `decoded`, [n][k].
inline LinearOutcome run_linear(const kernels::DevicePass& weight, const std::vector<float>& decoded, Activations x,
                                const LinearExtras& extras, const device::Stream& stream) {
  const int64_t n = weight.n;
  const int64_t k = weight.k;
  const int64_t outputs = extras.gated ? n / 2 : n;
  const int64_t ldy = outputs + (outputs % 8 == 0 ? 8 : 3);  // wide stores where they may be
  const auto x_device = device::DeviceBuffer::copy_of(bytes_of(x.bits), stream);
  const auto bias_device = device::DeviceBuffer::copy_of(bytes_of(extras.bias), stream);
  const OutputType type{extras.fp32 ? DType::f32 : x.dtype};
  const auto at = [&](int64_t row, int64_t column) { return static_cast<size_t>(row * ldy + column) * type.bytes(); };
  std::vector<std::byte> before(at(x.m, 0), poison);
  for (int64_t r = 0; extras.residual && r < x.m; ++r) {
    for (int64_t c = 0; c < outputs; ++c) type.put(1, before.data() + at(r, c));
  }
  const auto ones = device::DeviceBuffer::copy_of(before, stream);
  if (extras.apart) std::ranges::fill(before, poison);
  auto y = device::DeviceBuffer::copy_of(before, stream);
  kernels::LinearCall call;
  call.m = x.m;
  call.activation = x.dtype;
  call.x = x_device.data();
  call.ldx = x.stride;
  call.residual = !extras.residual ? nullptr : extras.apart ? ones.data() : y.data();
  call.y = y.data();
  call.ldy = ldy;
  call.fp32 = extras.fp32;
  call.fusion.swiglu = extras.gated;
  call.int8_activations = extras.int8;
  const kernels::DeviceLinear linear{.passes = {weight},
                                     .bias = extras.bias.empty() ? nullptr : bias_device.as<float>()};
  multiply_by(extras.kernel, linear, call, extras.workspace, stream);
  LinearOutcome outcome;
  outcome.y.resize(before.size());
  y.download(outcome.y, stream);
  stream.synchronize();
  if (extras.int8) x.round_to_int8();

  const auto product = [&](int64_t row, int64_t r) {
    double sum = (extras.bias.empty() ? 0 : extras.bias[static_cast<size_t>(row)]) + (extras.residual ? 1 : 0);
    const float* w = decoded.data() + row * k;
    const float* v = x.values.data() + r * k;
    return sum + dot(w, v, k);
  };
  const auto expected = [&](int64_t output, int64_t r) {
    if (!extras.gated) return product(output, r);
    const int64_t row = output + output / kernels::gate_up_turn * kernels::gate_up_turn;
    const double gate = product(row, r);
    return gate / (1 + std::exp(-gate)) * product(row + kernels::gate_up_turn, r);
  };
  std::vector<double> error(static_cast<size_t>(outputs)), signal(error.size());
  parallel_for(outputs, 8, [&](int64_t begin, int64_t end) {
    for (int64_t output = begin; output < end; ++output) {
      for (int64_t r = 0; r < x.m; ++r) {
        const double value = expected(output, r);
        const double got = type.get(outcome.y.data() + at(r, output));
        error[static_cast<size_t>(output)] += (got - value) * (got - value);
        signal[static_cast<size_t>(output)] += value * value;
      }
    }
  });
  double error_sum = 0;
  double signal_sum = 0;
  for (size_t i = 0; i < error.size(); ++i) error_sum += error[i], signal_sum += signal[i];
  outcome.relative_error = std::sqrt(error_sum / signal_sum);
  // Nothing behind a row's outputs is touched.
  for (int64_t r = 0; r < x.m; ++r) {
    for (size_t i = at(r, outputs); i < at(r + 1, 0); ++i) EXPECT_EQ(outcome.y[i], poison) << "row " << r;
  }
  return outcome;
}

/// Every kernel that takes `rows` activation rows of f16, with a bias and every way to leave results, over rows of
/// activations that are aligned and that are not.
inline void check_every_form(const kernels::DevicePass& weight, const std::vector<float>& decoded,
                             std::span<const int64_t> rows, const device::Stream& stream, bool int8 = false) {
  struct Form {
    bool residual, fp32, apart = false, gated = false;
  };
  LinearExtras extras;
  extras.int8 = int8;
  for (int64_t i = 0; i < weight.n; ++i) {
    extras.bias.push_back(pooled_normal(11, static_cast<uint64_t>(i)));
  }
  for (const auto [residual, fp32, apart, gated] : {Form{false, false},
                                                    {true, false},
                                                    {true, false, true},
                                                    {false, true},
                                                    {true, true},
                                                    {true, true, true},
                                                    {false, false, false, true}}) {
    if (gated && weight.n % 64 != 0) continue;
    extras.residual = residual;
    extras.fp32 = fp32;
    extras.apart = apart;
    extras.gated = gated;
    for (const int64_t stride : {weight.k, weight.k + 8, weight.k + 1}) {
      for (const int64_t m : rows) {
        const Activations x(m, weight.k, stride, DType::f16);
        for (const auto* kernel : accepting_kernels(weight, m, DType::f16, int8)) {
          if (gated && kernel->swiglu != kernels::GateOrder::turns) continue;
          extras.kernel = kernel;
          const auto outcome = run_linear(weight, decoded, x, extras, stream);
          // silu and the product of two outputs: at most about the errors of both.
          EXPECT_LE(outcome.relative_error, linear_bound(DType::f16, weight.n * weight.k) * (gated ? 2 : 1))
              << kernel->name << ", stride " << stride << ", " << m << " rows, residual " << residual << ", f32 "
              << fp32 << ", apart " << apart << ", gated " << gated;
        }
      }
    }
  }
}

/// What a chain of square layers leaves, each reading what the one before wrote, with row counts that use the workspace
/// in different ways.
inline std::vector<uint16_t> run_chain(const kernels::DevicePass& pass, bool overlap, const device::Stream& stream) {
  constexpr int64_t most_rows = 64;
  const int64_t size = pass.k;
  const Activations x(most_rows, size, size, DType::f16);
  auto from = device::DeviceBuffer::copy_of(bytes_of(x.bits), stream);
  device::DeviceBuffer to(test::gpu(), from.size());
  to.fill(0, stream);
  const kernels::DeviceLinear linear{.passes = {pass}};
  const kernels::LaunchPlan plan = TestWorkspace::plan(linear);
  TestWorkspace workspace(linear, most_rows, stream);
  for (const int64_t m : {64, 40, 1, 16, 3, 8, 40, 64, 1, 1, 1}) {
    kernels::LinearCall call;
    call.m = m;
    call.x = from.data();
    call.ldx = size;
    call.y = to.data();
    call.ldy = size;
    call.weights_ready = overlap;
    kernels::multiply(linear, plan, call, workspace.get(), stream);
    std::swap(from, to);
  }
  std::vector<uint16_t> bits(x.bits.size());
  from.download(std::as_writable_bytes(std::span(bits)), stream);
  stream.synchronize();
  return bits;
}

/// Launches that begin early leave what those do that wait. Values must neither grow nor vanish along the chain.
inline void check_overlapping_chain(const kernels::DevicePass& pass, const device::Stream& stream) {
  const auto apart = run_chain(pass, false, stream);
  const float first = std::abs(f32_from_f16(apart.front()));
  EXPECT_TRUE(first > 0x1p-10f && first < 0x1p10f) << first;
  for (int repeat = 0; repeat < 5; ++repeat) EXPECT_EQ(run_chain(pass, true, stream), apart);
}

/// silu(gate) · up by the kernel that the table picks, with a bias.
inline void check_gated_rows(const kernels::DevicePass& weight, const std::vector<float>& decoded,
                             std::span<const int64_t> rows, const device::Stream& stream) {
  LinearExtras extras;
  extras.gated = true;
  for (int64_t i = 0; i < weight.n; ++i) {
    extras.bias.push_back(pooled_normal(12, static_cast<uint64_t>(i)));
  }
  for (const int64_t m : rows) {
    const Activations x(m, weight.k, weight.k, DType::f16);
    const auto outcome = run_linear(weight, decoded, x, extras, stream);
    EXPECT_LE(outcome.relative_error, 2 * linear_bound(DType::f16, weight.n * weight.k)) << m << " rows";
    EXPECT_EQ(run_linear(weight, decoded, x, extras, stream).y, outcome.y) << m << " rows: not the same twice";
  }
}

}  // namespace w4q::test
