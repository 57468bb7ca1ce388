// Linear layers of trellises on the GPU: those of an 8B model one after the other, inputs rotated in the product, as in a
// decode step; cold by size, launches that overlap. JSON on stdout: µs of each shape, the first layer's alone, and ms of
// the linears of a step, by the kernel that the table picks or by one that is named.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/text.h"
#include "cublas_gpu.h"
#include "device/properties.h"
#include "formats/rotation.h"
#include "gpu_weights.h"
#include "kernels/linear/kernel_row.h"
#include "kernels/rotated/pack.h"

namespace {

using namespace w4q;
using Json = nlohmann::ordered_json;

struct LayerShape {
  int64_t n, k;
};
/// Of a layer of an 8B model, in the order of its products; 32 layers are a step.
constexpr LayerShape shapes[] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}};
constexpr int layers = 8, layers_of_step = 32;
constexpr int64_t largest_k = 14336, largest_n = 28672;

/// The linears of some layers at up to so many rows.
class Layers {
 public:
  Layers(const formats::Scheme& scheme, int64_t most_rows, const device::Stream& stream)
      : gpu_(stream.context().properties()), y_(stream.context(), static_cast<size_t>(most_rows * largest_n * 2)) {
    const auto values = bench::random_halves(static_cast<size_t>(most_rows * largest_k), 4);
    x_ = device::DeviceBuffer::copy_of(std::as_bytes(std::span(values)), stream);
    const formats::InputRotation rotation({128, 42}, largest_k);
    factors_ = device::DeviceBuffer::copy_of(std::as_bytes(rotation.factors()), stream);
    const auto words = kernels::rotation_signs(rotation);
    signs_ = device::DeviceBuffer::copy_of(std::as_bytes(std::span(words)), stream);
    for (const LayerShape& shape : shapes) {
      weights_.emplace_back(scheme, "trellis-fragment", shape.n, shape.k, layers, stream);
    }
    stream.synchronize();
  }

  /// The row that is taken for a shape: `named`, or the first that accepts.
  const kernels::KernelRow& kernel(size_t shape, int64_t m, std::string_view named) const {
    const kernels::DevicePass pass = pass_of(shape, 0);
    const kernels::LinearDesc desc{.gpu = gpu_, .passes = {&pass, 1}, .m = m};
    if (named.empty()) return kernels::pick_kernel(desc);
    for (const auto& row : kernels::kernel_registry()) {
      if (row.name == named && row.accepts(desc, nullptr)) return row;
    }
    throw Error(ErrorCode::bad_argument, concat(named, " does not take ", m, " rows here"));
  }
  void prepare(const std::array<const kernels::KernelRow*, 4>& rows, int64_t m, const device::Stream& stream) {
    kernels::WorkspaceSizes sizes;
    for (size_t shape = 0; shape < rows.size(); ++shape) {
      const kernels::DevicePass pass = pass_of(shape, 0);
      sizes.include(rows[shape]->workspace({.gpu = gpu_, .passes = {&pass, 1}, .m = m}));
    }
    workspace_.emplace(sizes, stream);
  }
  void multiply(const kernels::KernelRow& row, size_t shape, int layer, int64_t m, const device::Stream& stream) {
    const kernels::DevicePass pass = pass_of(shape, layer);
    kernels::LinearArgs args;
    args.m = m;
    args.x = x_.data(), args.ldx = pass.k;
    args.y = y_.data(), args.ldy = pass.n;
    args.weights_ready = true;
    args.passes = {&pass, 1};
    args.workspace = workspace_->get();
    kernels::run_kernel(row, args, stream);
  }

 private:
  kernels::DevicePass pass_of(size_t shape, int layer) const {
    kernels::DevicePass pass = weights_[shape].weight(layer);
    pass.table_max = 0x1p-7f;
    pass.rotation = {128, factors_.as<float>(), signs_.as<uint32_t>()};
    return pass;
  }

  const device::Properties& gpu_;
  device::DeviceBuffer x_, y_, factors_, signs_;
  std::vector<bench::RotatingWeight> weights_;
  std::optional<bench::Workspace> workspace_;
};

Json measure(Layers& linears, int64_t m, std::string_view named, const device::Stream& stream) {
  std::array<const kernels::KernelRow*, 4> rows{};
  for (size_t shape = 0; shape < rows.size(); ++shape) rows[shape] = &linears.kernel(shape, m, named);
  linears.prepare(rows, m, stream);
  const auto time = [&](const auto& call) {
    call(0, stream);  // cuBLAS cannot be started within a capture
    stream.synchronize();
    return device::time_calls(stream.context(), call, bench::timing_of(layers)).median;
  };
  Json shapes_us = Json::array();
  for (size_t shape = 0; shape < rows.size(); ++shape) {
    shapes_us.push_back(
        1e6 * time([&](int i, const device::Stream& on) { linears.multiply(*rows[shape], shape, i % layers, m, on); }));
  }
  const double layer = time([&](int i, const device::Stream& on) {
    for (size_t shape = 0; shape < rows.size(); ++shape) linears.multiply(*rows[shape], shape, i % layers, m, on);
  });
  return {{"m", m}, {"kernel", rows[0]->name}, {"step_ms", 1e3 * layers_of_step * layer}, {"us", shapes_us}};
}

int run(const std::vector<std::string>& schemes, const std::vector<int64_t>& rows, const std::string& kernel) {
  device::Context gpu;
  const device::Stream stream(gpu);
  Json report = {{"gpu", gpu.properties().name}, {"steps", Json::array()}};
  for (const auto& scheme : schemes) {
    Layers linears(formats::parse_scheme(scheme), *std::ranges::max_element(rows), stream);
    for (const int64_t m : rows) {
      Json step = {{"scheme", scheme}};
      step.update(measure(linears, m, kernel, stream));
      report["steps"].push_back(step);
    }
  }
  std::cout << report.dump(1) << "\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("linear layers of trellises on the GPU");
  std::vector<int64_t> rows = {1, 2, 4, 8, 16, 64};
  std::vector<std::string> schemes = {"trellis2-w16", "trellis3-w16", "trellis4-w16"};
  std::string kernel;
  app.add_option("--rows", rows, "activation rows")->check(CLI::Range(1, 2048));
  app.add_option("--schemes", schemes, "schemes of trellises");
  app.add_option("--kernel", kernel,
                 "a row of the table of kernels that is to run, in place of the first that accepts");
  CLI11_PARSE(app, argc, argv);
  if (!device::find_gpu()) {
    std::cerr << "needs a GPU\n";
    return 4;
  }
  try {
    return run(schemes, rows, kernel);
  } catch (const Error& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
