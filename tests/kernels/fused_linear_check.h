// Runs what a decode step fuses (kernels/frame/linear_fusion.h), a product into the residual stream and the product
// behind the norm, and compares both with fp64.
#pragma once

#include "core/text.h"
#include "gpu.h"
#include "linear_cuda_check.h"
#include "pooled_normal.h"

namespace w4q::test {

/// A weight on both sides.
struct WeightPair {
  kernels::DevicePass on_device;
  const std::vector<float>& decoded;  ///< [n][k]
};

/// stream += W₁ · x + b₁, then z = W₂ · RMSNorm(stream) + b₂, or of tiles of gates and ups silu(gate) · up.
class FusedChain {
 public:
  FusedChain(const WeightPair& first, const WeightPair& second, const device::Stream& stream)
      : first_(first), second_(second), stream_(stream), x_(1, first.on_device.k, first.on_device.k, DType::f16) {
    const auto size = static_cast<size_t>(first.on_device.n);
    residual_ = numbers(size, 1, 8.0);
    residual_[size / 2] = 300;  // a channel of its own, as models have them
    weight_ = numbers(size, 2, 0.3);
    for (float& value : weight_) value += 1;
    first_bias_ = numbers(size, 3, 1.0);
    second_bias_ = numbers(static_cast<size_t>(second.on_device.n), 4, 1.0);
    run(first_, x_device(), {.into_stream = true});
  }

  /// The stream after the first product, relative to fp64 (Frobenius).
  double stream_error() const { return relative_error(widen_floats(stream_after_), expected_stream()); }

  /// z, relative to fp64, of the stream that the GPU made.
  double output_error(bool gated) {
    const auto z = run(second_, next_x_, {.gated = gated});
    EXPECT_EQ(run(second_, next_x_, {.gated = gated}), z) << "not the same twice";
    std::vector<double> got;
    for (const uint16_t bits : z) got.push_back(f32_from_f16(bits));
    return relative_error(got, expected_output(gated));
  }

 private:
  struct Form {
    bool into_stream = false, gated = false;
  };
  static constexpr float eps = 1e-5f;

  static std::vector<float> numbers(size_t count, uint64_t seed, double magnitude) {
    std::vector<float> values(count);
    fill_normal(values, seed, magnitude);
    return values;
  }
  static double relative_error(const std::vector<double>& got, const std::vector<double>& expected) {
    double error = 0, signal = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      error += (got[i] - expected[i]) * (got[i] - expected[i]);
      signal += expected[i] * expected[i];
    }
    return std::sqrt(error / signal);
  }
  static std::vector<double> widen_floats(const std::vector<float>& values) { return {values.begin(), values.end()}; }

  device::DeviceBuffer upload(std::span<const std::byte> bytes) const {
    auto buffer = device::DeviceBuffer::copy_of(bytes, stream_);
    stream_.synchronize();
    return buffer;
  }
  const device::DeviceBuffer& x_device() {
    if (x_on_gpu_.size() == 0) x_on_gpu_ = upload(bytes_of(x_.bits));
    return x_on_gpu_;
  }

  /// Of the stream as it is before: all but the scale of the next x is not looked at.
  std::vector<float> state_before() const {
    std::vector<float> state(static_cast<size_t>(kernels::norm_state_floats(first_.on_device.n)), NAN);
    state[1] = 0x1p-8f;
    return state;
  }

  std::vector<uint16_t> run(const WeightPair& pair, const device::DeviceBuffer& x, Form form) {
    const auto& w = pair.on_device;
    const auto bias = upload(bytes_of(form.into_stream ? first_bias_ : second_bias_));
    auto y = form.into_stream ? upload(bytes_of(residual_))
                              : device::DeviceBuffer(test::gpu(), static_cast<size_t>(w.n) * 2);
    const auto last = upload(bytes_of(state_before()));
    const auto norm_weight = upload(bytes_of(weight_));
    const kernels::DeviceLinear linear{.passes = {w}, .bias = bias.as<float>()};
    kernels::LinearCall args;
    args.m = 1;
    args.x = x.data(), args.ldx = w.k;
    args.y = y.data(), args.ldy = w.n;
    args.fusion.eps = eps;
    if (form.into_stream) {
      next_x_ = device::DeviceBuffer(test::gpu(), static_cast<size_t>(w.n) * 2);
      next_norm_ = device::DeviceBuffer(test::gpu(), last.size());
      args.residual = y.data();
      args.fp32 = true;
      args.fusion.next_x = next_x_.data();
      args.fusion.next_weight = norm_weight.as<float>();
      args.fusion.next_norm = next_norm_.as<float>();
      args.fusion.last_norm = last.as<float>();
    } else {
      args.fusion.swiglu = form.gated;
      args.fusion.input_norm = next_norm_.as<float>();
    }
    multiply_by(nullptr, linear, args, nullptr, stream_);
    std::vector<uint16_t> halves(form.into_stream ? 0 : static_cast<size_t>(form.gated ? w.n / 2 : w.n));
    if (form.into_stream) {
      stream_after_.resize(residual_.size());
      y.download(std::as_writable_bytes(std::span(stream_after_)), stream_);
    } else {
      y.download(std::as_writable_bytes(std::span(halves)), stream_);
    }
    stream_.synchronize();
    return halves;
  }

  static double product(const WeightPair& pair, int64_t row, const auto& x) {
    double sum = 0;
    for (int64_t c = 0; c < pair.on_device.k; ++c) {
      sum += double{pair.decoded[static_cast<size_t>(row * pair.on_device.k + c)]} * x[static_cast<size_t>(c)];
    }
    return sum;
  }
  std::vector<double> expected_stream() const {
    std::vector<double> expected(residual_.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      expected[i] = residual_[i] + first_bias_[i] + product(first_, static_cast<int64_t>(i), x_.values);
    }
    return expected;
  }
  std::vector<double> expected_output(bool gated) const {
    double squares = 0;
    for (const double value : stream_after_) squares += value * value;
    const double scale = 1 / std::sqrt(squares / static_cast<double>(stream_after_.size()) + eps);
    std::vector<double> normed(stream_after_.size());
    for (size_t i = 0; i < normed.size(); ++i) normed[i] = weight_[i] * (stream_after_[i] * scale);
    std::vector<double> z(static_cast<size_t>(second_.on_device.n));
    for (size_t i = 0; i < z.size(); ++i) z[i] = second_bias_[i] + product(second_, static_cast<int64_t>(i), normed);
    if (!gated) return z;
    std::vector<double> products(z.size() / 2);
    for (size_t i = 0; i < products.size(); ++i) {
      constexpr size_t turn = kernels::gate_up_turn;
      const size_t at = i / turn * 2 * turn + i % turn;
      products[i] = z[at] / (1 + std::exp(-z[at])) * z[at + turn];
    }
    return products;
  }

  WeightPair first_, second_;
  const device::Stream& stream_;
  Activations x_;
  std::vector<float> residual_, weight_, first_bias_, second_bias_, stream_after_;
  device::DeviceBuffer x_on_gpu_, next_x_, next_norm_;
};

/// Checks the chain through `hidden` values; of a gated second product where its rows come in whole tiles.
inline void check_fused_chain(const WeightPair& first, const WeightPair& second, const device::Stream& stream) {
  SCOPED_TRACE(concat(first.on_device.n, " × ", first.on_device.k, ", then ", second.on_device.n, " outputs"));
  FusedChain chain(first, second, stream);
  const double bound = linear_bound(DType::f16, first.on_device.n * first.on_device.k);
  EXPECT_LE(chain.stream_error(), bound);
  EXPECT_LE(chain.output_error(false), bound);
  if (second.on_device.n % 64 != 0) return;
  // silu and the product of two outputs: at most about the errors of both.
  EXPECT_LE(chain.output_error(true), 2 * bound);
}

}  // namespace w4q::test
