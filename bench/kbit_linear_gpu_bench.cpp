// kbit GEMV and GEMM on the GPU, all shapes of an 8B model: time, bandwidth, share of the read floor for the same
// bytes, and ratio to cuBLAS f16, all in one process with cold caches. JSON on stdout, a line of progress per shape on
// stderr.
#include <cublas_v2.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/text.h"
#include "device/ceilings.h"
#include "device/properties.h"
#include "device/timing.h"
#include "kbit_gpu_weights.h"

namespace {

using namespace w4q;
using Json = nlohmann::ordered_json;

struct LayerShape {
  int64_t n, k;
  int per_step;  ///< times in one decode step of an 8B model
};
constexpr LayerShape shapes[] = {{4096, 4096, 32},  {6144, 4096, 32},  {14336, 4096, 0},
                                 {4096, 14336, 32}, {28672, 4096, 32}, {128256, 4096, 1}};
constexpr int64_t row_counts[] = {1, 2, 4, 8, 16, 32, 64};
constexpr int64_t most_rows = 64;

device::TimingOptions options_for(int copies) { return {std::max(20, 2 * copies), 15}; }

/// cuBLAS f16 times by activation rows for one shape.
std::map<int64_t, double> time_cublas(const LayerShape& shape, const device::Stream& stream) {
  const auto bytes = shape.n * shape.k * 2;
  const int copies = std::max(2, device::rotating_copies(bytes));
  const auto values = bench::random_halves(size_t{1} << 22, 3);
  std::vector<device::DeviceBuffer> weights;
  for (int copy = 0; copy < copies; ++copy) {
    weights.emplace_back(static_cast<size_t>(bytes));
    for (size_t at = 0; at < weights.back().size(); at += values.size() * 2) {
      const size_t size = std::min(values.size() * 2, weights.back().size() - at);
      cudaMemcpyAsync(weights.back().data() + at, values.data(), size, cudaMemcpyHostToDevice, stream.get());
    }
  }
  const auto activations = bench::random_halves(static_cast<size_t>(most_rows * shape.k), 5);
  const auto x = device::DeviceBuffer::copy_of(std::as_bytes(std::span(activations)), stream);
  device::DeviceBuffer y(static_cast<size_t>(most_rows * shape.n * 2));
  stream.synchronize();
  cublasHandle_t handle = nullptr;
  ensure(cublasCreate(&handle) == CUBLAS_STATUS_SUCCESS, "cublasCreate");
  device::DeviceBuffer workspace(size_t{32} << 20);
  cublasSetWorkspace(handle, workspace.data(), workspace.size());
  std::map<int64_t, double> result;
  const float one = 1;
  const float zero = 0;
  for (const int64_t m : row_counts) {
    result[m] = device::time_calls(
                    [&](int call, cudaStream_t capture) {
                      cublasSetStream(handle, capture);
                      const auto status = cublasGemmEx(
                          handle, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(shape.n), static_cast<int>(m),
                          static_cast<int>(shape.k), &one, weights[static_cast<size_t>(call % copies)].data(),
                          CUDA_R_16F, static_cast<int>(shape.k), x.data(), CUDA_R_16F, static_cast<int>(shape.k), &zero,
                          y.data(), CUDA_R_16F, static_cast<int>(shape.n), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
                      ensure(status == CUBLAS_STATUS_SUCCESS, "cublasGemmEx");
                    },
                    options_for(copies))
                    .median;
  }
  cublasDestroy(handle);
  return result;
}

/// `overlap`: each call may fetch its first weights while the one before it still runs, as in a decoder.
device::Timing time_kbit(const bench::RotatingKbitWeight& weights, const LayerShape& shape, int64_t m, int copies,
                         bool overlap, const device::Stream& stream) {
  const auto values = bench::random_halves(static_cast<size_t>(m * shape.k), 4);
  const auto x = device::DeviceBuffer::copy_of(std::as_bytes(std::span(values)), stream);
  device::DeviceBuffer y(static_cast<size_t>(m * shape.n * 2));
  device::DeviceBuffer workspace(kernels::kbit_linear_workspace(m, shape.n, shape.k));
  workspace.fill(0, stream);
  stream.synchronize();
  return device::time_calls(
      [&](int call, cudaStream_t capture) {
        kernels::KbitLinearArgs args;
        args.m = m;
        args.x = x.data();
        args.ldx = shape.k;
        args.weight = weights.weight(call);
        args.y = y.data();
        args.ldy = shape.n;
        args.workspace = workspace.data();
        args.workspace_bytes = workspace.size();
        args.weights_ready = overlap;
        kernels::kbit_linear(args, capture);
      },
      options_for(copies));
}

/// Least squares of seconds = t0 + bytes / bandwidth over one width at one row.
Json fit(const std::vector<std::pair<double, double>>& points) {
  double sx = 0, sy = 0, sxx = 0, sxy = 0;
  for (const auto& [bytes, seconds] : points) {
    sx += bytes;
    sy += seconds;
    sxx += bytes * bytes;
    sxy += bytes * seconds;
  }
  const auto count = static_cast<double>(points.size());
  const double slope = (count * sxy - sx * sy) / (count * sxx - sx * sx);
  return {{"t0_us", (sy - slope * sx) / count * 1e6}, {"bandwidth_gbs", 1e-9 / slope}};
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("kbit GEMV and GEMM on the GPU");
  std::vector<int64_t> chosen_rows(std::begin(row_counts), std::end(row_counts));
  std::vector<int> chosen_bits = {2, 3, 4, 5};
  app.add_option("--rows", chosen_rows, "activation rows")->check(CLI::Range(int64_t{1}, most_rows));
  app.add_option("--bits", chosen_bits, "code widths")->check(CLI::Range(2, 5));
  std::vector<int64_t> chosen_outputs;
  app.add_option("--outputs", chosen_outputs, "only the shapes with these many outputs");
  CLI11_PARSE(app, argc, argv);
  const auto gpu = device::find_gpu();
  if (!gpu) {
    std::cerr << "no GPU\n";
    return 4;
  }
  const device::Stream stream;
  const auto ceilings = device::measure_ceilings();
  Json report = {{"gpu", gpu->name},
                 {"sm", gpu->sm},
                 {"read_gbs", ceilings.read * 1e-9},
                 {"write_gbs", ceilings.write * 1e-9},
                 {"copy_gbs", ceilings.copy * 1e-9},
                 {"rows", Json::array()}};
  std::map<std::pair<int, int64_t>, double> step, alone_step;
  std::map<int64_t, double> cublas_step;
  std::map<int, std::vector<std::pair<double, double>>> points;
  for (const LayerShape& shape : shapes) {
    const bool chosen = std::find(chosen_outputs.begin(), chosen_outputs.end(), shape.n) != chosen_outputs.end();
    if (!chosen_outputs.empty() && !chosen) continue;
    const auto cublas = time_cublas(shape, stream);
    for (const auto& [m, seconds] : cublas) cublas_step[m] += shape.per_step * seconds;
    for (const int bits : chosen_bits) {
      const int64_t bytes = shape.n * shape.k * (4 * bits + 1) / 32;
      const int copies = std::max(2, device::rotating_copies(bytes));
      const double floor = device::read_floor_seconds(bytes);
      const bench::RotatingKbitWeight weights(bits, shape.n, shape.k, copies, stream);
      for (const int64_t m : chosen_rows) {
        const auto timing = time_kbit(weights, shape, m, copies, true, stream);
        const auto alone = time_kbit(weights, shape, m, copies, false, stream);
        step[{bits, m}] += shape.per_step * timing.median;
        alone_step[{bits, m}] += shape.per_step * alone.median;
        if (m == 1) points[bits].emplace_back(static_cast<double>(bytes), timing.median);
        report["rows"].push_back({{"n", shape.n},
                                  {"k", shape.k},
                                  {"bits", bits},
                                  {"m", m},
                                  {"us", timing.median * 1e6},
                                  {"us_min", timing.least * 1e6},
                                  {"us_max", timing.most * 1e6},
                                  {"us_without_overlap", alone.median * 1e6},
                                  {"gbs", static_cast<double>(bytes) / timing.median * 1e-9},
                                  {"percent_of_read_floor", 100 * floor / timing.median},
                                  {"times_cublas", cublas.at(m) / timing.median}});
      }
      std::cerr << concat(shape.n, " × ", shape.k, " k", bits, "\n");
    }
  }
  for (const auto& [key, seconds] : step) {
    report["steps"].push_back({{"bits", key.first},
                               {"m", key.second},
                               {"ms", seconds * 1e3},
                               {"ms_without_overlap", alone_step[key] * 1e3},
                               {"cublas_ms", cublas_step[key.second] * 1e3}});
  }
  for (const auto& [bits, values] : points) report["fits"].push_back({{"bits", bits}, {"fit", fit(values)}});
  std::cout << report.dump(1) << "\n";
  return 0;
}
