// Trellises on the GPU: rings of normal weights, by themselves and with error feedback, of the linears of one layer of an
// 8B model, those that read one input side by side. Prints JSON to stdout; arguments are schemes. Feedback is measured
// over some blocks of columns; what it takes for all columns, and for 32 layers, follows from that.
#include <chrono>
#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "device/context.h"
#include "formats/scheme_registry.h"
#include "quantize/trellis.h"
#include "quantize/trellis_cuda.h"

namespace w4q {
namespace {

using Json = nlohmann::ordered_json;
using quantize::CudaWork;

constexpr int layers = 32;

/// Linears that read one input.
struct Group {
  const char* name;
  int64_t k;
  std::vector<int64_t> rows;
};
const std::vector<Group> groups = {
    {"qkv", 4096, {4096, 1024, 1024}}, {"o", 4096, {4096}}, {"gate_up", 4096, {14336, 14336}}, {"down", 14336, {4096}}};

std::vector<float> normal(int64_t count, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = 0.02f * static_cast<float>(random_normal(seed, i));
  return values;
}

/// Weights of a group with `cols` columns, and planes for them.
struct Weights {
  Weights(CudaWork& work, const formats::Scheme& scheme, const Group& group, int64_t cols) {
    for (const int64_t n : group.rows) {
      const auto host = normal(n * cols, static_cast<uint64_t>(n));
      values.push_back(device::DeviceBuffer::copy_of(std::as_bytes(std::span(host)), work.stream));
      work.stream.synchronize();
      const auto sizes = quantize::trellis_sizes_cuda(work, values.back().as<float>(), n, cols);
      planes.push_back(quantize::allocate_trellis(scheme, n, cols, sizes));
      all += n * cols;
    }
  }
  double seconds(CudaWork& work, const quantize::ErrorFactorCuda* factor) {
    std::vector<quantize::TrellisCudaWeight> weights;
    for (size_t i = 0; i < planes.size(); ++i) weights.push_back({values[i].as<float>(), &planes[i]});
    const auto start = std::chrono::steady_clock::now();
    quantize::trellis_codes_cuda(work, weights, factor);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  std::vector<device::DeviceBuffer> values;
  std::vector<formats::PackedWeight> planes;
  int64_t all = 0;
};

/// Neighbours are alike.
quantize::ErrorFactorCuda factor_of(CudaWork& work, int64_t k) {
  std::vector<float> gram(static_cast<size_t>(k * k));
  for (int64_t i = 0; i < k; ++i) {
    float value = 1;
    for (int64_t j = i; j < k; ++j, value *= 0.8f) {
      gram[static_cast<size_t>(i * k + j)] = gram[static_cast<size_t>(j * k + i)] = value;
    }
  }
  const quantize::GramCuda on_gpu(work, MatrixView<const float>(gram.data(), k, k));
  return {work, on_gpu, 32, 0.01, "x"};
}

Json measure(CudaWork& work, const formats::Scheme& scheme) {
  Json result;
  double plain = 0, fed_back = 0;
  for (const Group& group : groups) {
    constexpr int64_t columns = 256;
    const auto factor = factor_of(work, columns);
    Weights weights(work, scheme, group, columns);
    weights.seconds(work, nullptr);  // takes memory
    const double rounded = weights.seconds(work, nullptr), moved = weights.seconds(work, &factor);
    const double share = static_cast<double>(group.k) / columns;
    result[group.name] = {{"plain_ns_per_weight", 1e9 * rounded / static_cast<double>(weights.all)},
                          {"feedback_ns_per_weight", 1e9 * moved / static_cast<double>(weights.all)},
                          {"feedback_us_per_column", 1e6 * moved / columns},
                          {"layer_seconds", moved * share}};
    plain += rounded * share;
    fed_back += moved * share;
  }
  result["plain_seconds_of_8b"] = layers * plain;
  result["feedback_seconds_of_8b"] = layers * fed_back;
  return result;
}

int run(int count, char** arguments) {
  std::vector<std::string> names(arguments + 1, arguments + count);
  if (names.empty()) names = {"trellis3-w16", "trellis2-w16", "trellis4-w16", "trellis3-w14", "trellis3-w12"};
  device::Context gpu;
  CudaWork work(gpu);
  Json report;
  report["gpu"] = gpu.properties().name;
  for (const auto& name : names) report[name] = measure(work, formats::parse_scheme(name));
  std::cout << report.dump(2) << '\n';
  return 0;
}

}  // namespace
}  // namespace w4q

int main(int count, char** arguments) {
  try {
    return w4q::run(count, arguments);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
