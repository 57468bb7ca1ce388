#include <algorithm>
#include <array>
#include <cmath>

#include "core/convert.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "core/rng.h"
#include "core/text.h"
#include "decoder_cuda/linear.h"
#include "device/buffer.h"
#include "kernels/linear/int8_rows.h"
#include "model/int8_activations.h"
#include "verify/kernel_check.h"

namespace w4q::verify {
namespace {

using kernels::LinearWeight;

constexpr std::array<int64_t, 4> row_counts = {1, 16, 64, 200};
constexpr std::array<int64_t, 3> int8_row_counts = {kernels::least_int8_rows, 64, 200};
constexpr int64_t most_rows = 200;
constexpr int64_t fp64_outputs = 64;

/// Random activations on both sides.
struct Inputs {
  explicit Inputs(int64_t k, const device::Stream& stream) : values(static_cast<size_t>(most_rows * k)) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(random_normal(23, i));
    std::vector<std::byte> halves(values.size() * 2);
    narrow(values, DType::f16, halves);
    widen(halves, DType::f16, values);
    on_gpu = device::DeviceBuffer::copy_of(halves, stream);
    stream.synchronize();
  }
  /// Makes `values` what a product with int8 activations multiplies.
  void round_to_int8(const LinearWeight& weight) {
    const auto& packed = *std::get<std::shared_ptr<const formats::PackedLinear>>(weight.matrix);
    const auto k = static_cast<size_t>(weight.k);
    const auto divisor = [&](size_t i) { return packed.input_scale.empty() ? 1.0f : packed.input_scale[i % k]; };
    std::vector<float> scales(values.size() / k);
    for (size_t i = 0; i < values.size(); ++i) values[i] /= divisor(i);
    const MatrixView<float> rows(values.data(), most_rows, weight.k);
    kernels::quantize_int8(rows, scales, rows);
    for (size_t i = 0; i < values.size(); ++i) values[i] *= scales[i / k] * divisor(i);
  }

  std::vector<float> values;
  device::DeviceBuffer on_gpu;
};

/// Sums of squares of differences and of references.
struct Distance {
  double error = 0, signal = 0;
  void add(double got, double expected) {
    error += (got - expected) * (got - expected);
    signal += expected * expected;
  }
  double relative() const { return signal > 0 ? std::sqrt(error / signal) : std::sqrt(error); }
};

class Checker {
 public:
  Checker(device::Context& gpu, const LinearWeight& weight, bool int8_activations)
      : weight_(weight),
        stream_(gpu),
        inputs_(weight.k, stream_),
        linear_(decoder_cuda::upload_linears(std::array{&weight}, stream_)),
        multiplier_(std::array<const decoder_cuda::CudaLinear*, 1>{&linear_}, most_rows, stream_, int8_activations),
        expected_(static_cast<size_t>(most_rows * weight.n)),
        got_(expected_.size()) {}

  KernelError run() {
    kernels::linear(weight_, all_inputs(), {expected_.data(), most_rows, weight_.n});
    KernelError result{weight_.name, "f16", ""};
    const auto& product = linear_.products.front();
    if (product.packed || !product.rotated.empty()) result.scheme = formats::to_string(product.scheme);
    std::vector<std::string> names;
    for (const int64_t rows : row_counts) {
      multiply(rows);
      result.to_cpu = worse(result.to_cpu, to_cpu(rows));
      result.to_fp64 = worse(result.to_fp64, to_fp64(rows));
      for (std::string name : kernel_names(product, rows)) {
        if (rows == 1 && decoder_cuda::fuses(linear_)) name += ", fused";  // the one that single tokens run
        if (std::ranges::find(names, name) == names.end()) names.push_back(name);
      }
    }
    result.kernels = join(names);
    return result;
  }

  /// With int8 activations; rounds the inputs on the host.
  KernelError run_int8() {
    kernels::linear_int8(weight_, all_inputs(), {expected_.data(), most_rows, weight_.n});
    const auto& product = linear_.products.front();
    KernelError result{weight_.name, formats::to_string(product.scheme), join(kernel_names(product, 17, true))};
    multiplier_.set_int8_activations(true);
    for (const int64_t rows : int8_row_counts) {
      multiply(rows);
      result.to_cpu = worse(result.to_cpu, to_cpu(rows));
      result.rounding = worse(result.rounding, to_fp64(rows));
    }
    inputs_.round_to_int8(weight_);
    for (const int64_t rows : int8_row_counts) {
      multiply(rows);
      result.to_fp64 = worse(result.to_fp64, to_fp64(rows));
    }
    return result;
  }

 private:
  MatrixView<const float> all_inputs() const { return {inputs_.values.data(), most_rows, weight_.k}; }

  /// The first rows on the GPU, to got_, in f32.
  void multiply(int64_t rows) {
    const auto got = std::span(got_).first(static_cast<size_t>(rows * weight_.n));
    device::DeviceBuffer y(stream_.context(), got.size_bytes());
    y.fill(0xFF, stream_);
    multiplier_.multiply(linear_, inputs_.on_gpu.as<__half>(), rows, y.as<float>());
    y.download(std::as_writable_bytes(got), stream_);
    stream_.synchronize();
  }

  static double worse(double a, double b) { return std::isnan(a) || a > b ? a : b; }

  std::vector<std::string> kernel_names(const decoder_cuda::CudaProduct& product, int64_t rows,
                                        bool int8 = false) const {
    if (!product.rotated.empty()) {
      kernels::RotatedLinearArgs args;
      args.m = rows;
      args.passes = product.rotated;
      args.input_scale = product.input_scale;
      const auto names = kernels::rotated_kernels(args);
      return {names.begin(), names.end()};
    }
    if (!product.packed) return {rows == 1 && weight_.k % 8 == 0 ? "f16-gemv" : "cuBLAS"};
    const auto& packed = *product.packed;
    const kernels::LinearDesc desc{packed.scheme, packed.layout, rows, packed.n, packed.k, DType::f16, int8};
    return {std::string(kernels::pick_kernel(desc).name)};
  }

  double to_cpu(int64_t rows) const {
    Distance distance;
    for (int64_t i = 0; i < rows * weight_.n; ++i) {
      distance.add(got_[static_cast<size_t>(i)], expected_[static_cast<size_t>(i)]);
    }
    return distance.relative();
  }

  double to_fp64(int64_t rows) const {
    const int64_t count = std::min(fp64_outputs, weight_.n);
    const int64_t first = (weight_.n - count) / 2;
    std::vector<float> decoded(static_cast<size_t>(count * weight_.k));
    kernels::decode_rows(weight_, first, first + count, {decoded.data(), count, weight_.k});
    Distance distance;
    for (int64_t r = 0; r < rows; ++r) {
      const float* const x = inputs_.values.data() + r * weight_.k;
      for (int64_t o = 0; o < count; ++o) {
        double sum = weight_.bias.empty() ? 0 : weight_.bias[static_cast<size_t>(first + o)];
        for (int64_t c = 0; c < weight_.k; ++c) sum += double{decoded[static_cast<size_t>(o * weight_.k + c)]} * x[c];
        distance.add(got_[static_cast<size_t>(r * weight_.n + first + o)], sum);
      }
    }
    return distance.relative();
  }

  const LinearWeight& weight_;
  device::Stream stream_;
  Inputs inputs_;
  decoder_cuda::CudaLinear linear_;
  decoder_cuda::CudaMultiplier multiplier_;
  std::vector<float> expected_;
  std::vector<float> got_;
};

}  // namespace

KernelReport check_kernels(device::Context& gpu, const model::Model& model, bool int8_activations) {
  if (int8_activations) model::check_int8_activations(model);
  std::vector<const LinearWeight*> weights;
  for (const auto& layer : model.layers()) {
    for (const auto& weight : layer.linears) weights.push_back(&weight);
  }
  weights.push_back(&model.head());
  Progress progress("kernels", static_cast<int64_t>(weights.size()), "layers");
  KernelReport report;
  for (const auto* weight : weights) {
    const bool int8 = int8_activations && weight != &model.head() && kernels::takes_int8_activations(*weight);
    Checker checker(gpu, *weight, int8);
    report.layers.push_back(checker.run());
    if (int8) report.layers.push_back(checker.run_int8());
    progress.advance(1);
  }
  return report;
}

}  // namespace w4q::verify
