// Trellises on the GPU: rings of normal weights, by themselves and with error feedback, of the linears of one layer of an
// 8B model, those that read one input side by side and then all of them. Prints JSON to stdout; arguments are schemes.
// Feedback is measured over a sixteenth of the columns; what it takes for all of them and for 32 layers follows from that.
#include <chrono>
#include <exception>
#include <iostream>
#include <memory>
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
/// Of the columns, one in so many is measured.
constexpr int share = 16;

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
  std::vector<quantize::TrellisCudaWeight> view() {
    std::vector<quantize::TrellisCudaWeight> weights;
    for (size_t i = 0; i < planes.size(); ++i) weights.push_back({values[i].as<float>(), &planes[i]});
    return weights;
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

template <class Body>
double seconds(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Json measure(CudaWork& work, const formats::Scheme& scheme) {
  Json result;
  double plain = 0, one_by_one = 0;
  std::vector<std::unique_ptr<Weights>> layer;
  std::vector<std::unique_ptr<quantize::ErrorFactorCuda>> factors;
  std::vector<quantize::TrellisCudaInput> inputs;
  for (const Group& group : groups) {
    const int64_t columns = group.k / share;
    Weights& weights = *layer.emplace_back(std::make_unique<Weights>(work, scheme, group, columns));
    const auto& factor = *factors.emplace_back(std::make_unique<quantize::ErrorFactorCuda>(factor_of(work, columns)));
    const auto& input = inputs.emplace_back(quantize::TrellisCudaInput{weights.view(), &factor});
    const double rounded = seconds([&] {
      for (const auto& weight : input.weights) quantize::trellis_codes_cuda(work, weight);
    });
    const double moved = seconds([&] { quantize::trellis_feedback_cuda(work, {&input, 1}); });
    result[group.name] = {{"plain_ns_per_weight", 1e9 * rounded / static_cast<double>(weights.all)},
                          {"feedback_ns_per_weight", 1e9 * moved / static_cast<double>(weights.all)},
                          {"feedback_us_per_column", 1e6 * moved / static_cast<double>(columns)},
                          {"feedback_seconds_of_a_layer", share * moved}};
    plain += rounded;
    one_by_one += moved;
  }
  const double together = seconds([&] { quantize::trellis_feedback_cuda(work, inputs); });
  result["plain_seconds_of_8b"] = layers * share * plain;
  result["feedback_seconds_of_8b_group_by_group"] = layers * share * one_by_one;
  result["feedback_seconds_of_8b"] = layers * share * together;
  return result;
}

int run(int count, char** arguments) {
  std::vector<std::string> names(arguments + 1, arguments + count);
  if (names.empty()) names = {"trellis3-w16", "trellis2-w16", "trellis4-w16", "trellis3-w14", "trellis3-w12"};
  device::Context gpu;
  CudaWork work(gpu);
  Json report;
  report["gpu"] = gpu.properties().name;
  measure(work, formats::parse_scheme("trellis2-w8"));  // loads kernels and libraries
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
