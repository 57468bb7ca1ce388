// Linear layers of rotated passes on the GPU, the shapes of an 8B model at a few rows: one 4-bit pass with its rotation
// beside the kbit product alone, two passes beside cuBLAS f16, and the rotation alone; cold caches. JSON on stdout.
#include <cublas_v2.h>

#include <iostream>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "device/properties.h"
#include "device/timing.h"
#include "formats/rotation.h"
#include "gpu_weights.h"
#include "kernels/rotate_input.h"
#include "kernels/rotated_linear.h"

namespace {

using namespace w4q;
using Json = nlohmann::ordered_json;

struct LayerShape {
  int64_t n, k;
  int per_step;  ///< times in one decode step of an 8B model
};
constexpr LayerShape shapes[] = {{4096, 4096, 32}, {6144, 4096, 32}, {4096, 14336, 32}, {28672, 4096, 32}};
constexpr int64_t row_counts[] = {1, 16};

device::TimingOptions options_for(int copies) { return {std::max(20, 2 * copies), 15}; }

double time_cublas(const LayerShape& shape, int64_t m, const device::Stream& stream) {
  const auto bytes = static_cast<size_t>(shape.n * shape.k * 2);
  const int copies = std::max(2, device::rotating_copies(static_cast<int64_t>(bytes)));
  std::vector<device::DeviceBuffer> weights;
  for (int copy = 0; copy < copies; ++copy) weights.emplace_back(bytes).fill(copy + 1, stream);
  device::DeviceBuffer x(static_cast<size_t>(m * shape.k * 2)), y(static_cast<size_t>(m * shape.n * 2));
  x.fill(1, stream);
  stream.synchronize();
  cublasHandle_t handle = nullptr;
  ensure(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS, "cublasCreate");
  device::DeviceBuffer workspace(size_t{32} << 20);
  cublasSetWorkspace(handle, workspace.data(), workspace.size());
  const float one = 1, zero = 0;
  const double seconds =
      device::time_calls(
          [&](int call, cudaStream_t capture) {
            cublasSetStream(handle, capture);
            const auto status = cublasGemmEx(
                handle, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(shape.n), static_cast<int>(m),
                static_cast<int>(shape.k), &one, weights[static_cast<size_t>(call % copies)].data(), CUDA_R_16F,
                static_cast<int>(shape.k), x.data(), CUDA_R_16F, static_cast<int>(shape.k), &zero, y.data(), CUDA_R_16F,
                static_cast<int>(shape.n), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
            ensure(status == CUBLAS_STATUS_SUCCESS, "cublasGemmEx");
          },
          options_for(copies))
          .median;
  cublasDestroy(handle);
  return seconds;
}

/// What is timed, over the same weights.
class Layer {
 public:
  Layer(const LayerShape& shape, int64_t m, const device::Stream& stream)
      : shape_(shape),
        m_(m),
        copies_(std::max(2, device::rotating_copies(shape.n * shape.k * 17 / 32))),
        weights_(formats::parse_scheme("kbit4-b32-e4m4"), "kbit-fragment", shape.n, shape.k, 2 * copies_, stream),
        y_(static_cast<size_t>(m * shape.n * 2)),
        workspace_(kernels::rotated_linear_workspace(m, shape.n, shape.k)) {
    const auto values = bench::random_halves(static_cast<size_t>(m * shape.k), 4);
    x_ = device::DeviceBuffer::copy_of(std::as_bytes(std::span(values)), stream);
    const formats::InputRotation first({128, 42}, shape.k), second({128, 1042}, shape.k);
    factors_[0] = device::DeviceBuffer::copy_of(std::as_bytes(first.factors()), stream);
    factors_[1] = device::DeviceBuffer::copy_of(std::as_bytes(second.factors()), stream);
    workspace_.fill(0, stream);
    linear(0, stream.get(), 2, false);
    stream.synchronize();
  }

  void linear(int call, cudaStream_t stream, int passes, bool shared) {
    kernels::RotatedDevicePass each[2];
    for (int p = 0; p < passes; ++p) {
      each[p] = {weights_.weight(passes * call + p), 128, factors_[shared ? 0 : p].as<float>()};
    }
    kernels::RotatedLinearArgs args;
    args.m = m_;
    args.x = x_.data(), args.ldx = shape_.k;
    args.passes = {each, static_cast<size_t>(passes)};
    args.y = y_.data(), args.ldy = shape_.n;
    args.workspace = workspace_.data(), args.workspace_bytes = workspace_.size();
    kernels::rotated_linear(args, stream);
  }

  void product(int call, cudaStream_t stream) {
    kernels::KbitLinearArgs args;
    args.m = m_;
    args.x = x_.data(), args.ldx = shape_.k;
    args.weight = weights_.weight(call);
    args.y = y_.data(), args.ldy = shape_.n;
    args.workspace = workspace_.data(), args.workspace_bytes = workspace_.size();
    kernels::kbit_linear(args, stream);
  }

  void rotation(cudaStream_t stream) {
    kernels::rotate_input(
        {m_, shape_.k, 128, DType::f16, x_.data(), shape_.k, factors_[0].as<float>(), nullptr, y_.data(), shape_.k},
        stream);
  }

  int copies() const { return copies_; }

 private:
  LayerShape shape_;
  int64_t m_;
  int copies_;
  bench::RotatingWeight weights_;
  device::DeviceBuffer x_, y_, workspace_, factors_[2];
};

Json measure(const LayerShape& shape, int64_t m, const device::Stream& stream) {
  const double cublas = time_cublas(shape, m, stream);
  Layer layer({shape.n, shape.k, shape.per_step}, m, stream);
  const auto time = [&](auto&& call) { return device::time_calls(call, options_for(layer.copies())).median; };
  const double product = time([&](int i, cudaStream_t s) { layer.product(i, s); });
  const double one = time([&](int i, cudaStream_t s) { layer.linear(i, s, 1, true); });
  const double shared = time([&](int i, cudaStream_t s) { layer.linear(i, s, 2, true); });
  const double own = time([&](int i, cudaStream_t s) { layer.linear(i, s, 2, false); });
  const double rotation = shape.n >= shape.k ? time([&](int, cudaStream_t s) { layer.rotation(s); }) : one - product;
  return {{"n", shape.n},
          {"k", shape.k},
          {"m", m},
          {"per_step", shape.per_step},
          {"cublas_us", cublas * 1e6},
          {"kbit4_us", product * 1e6},
          {"rotated4_us", one * 1e6},
          {"rotated44_shared_us", shared * 1e6},
          {"rotated44_own_us", own * 1e6},
          {"rotation_us", rotation * 1e6},
          {"rotated4_over_kbit4", one / product},
          {"cublas_over_shared", cublas / shared},
          {"cublas_over_own", cublas / own}};
}

}  // namespace

int main() {
  const auto gpu = device::find_gpu(nullptr);
  if (!gpu) {
    std::cerr << "needs a GPU\n";
    return 4;
  }
  const device::Stream stream;
  Json report = {{"gpu", gpu->name}, {"rows", Json::array()}, {"steps", Json::array()}};
  for (const int64_t m : row_counts) {
    Json step = {{"m", m},
                 {"cublas_us", 0.0},
                 {"kbit4_us", 0.0},
                 {"rotated4_us", 0.0},
                 {"rotated44_shared_us", 0.0},
                 {"rotated44_own_us", 0.0}};
    for (const auto& shape : shapes) {
      const Json row = measure(shape, m, stream);
      for (auto& [key, sum] : step.items()) {
        if (key != "m") sum = sum.get<double>() + shape.per_step * row[key].get<double>();
      }
      report["rows"].push_back(row);
    }
    report["steps"].push_back(step);
  }
  std::cout << report.dump(1) << "\n";
  return 0;
}
