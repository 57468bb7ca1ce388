// Linear layers of rotated passes on the GPU, the shapes of an 8B model at a few rows: one 4-bit pass with its rotation
// beside the kbit product and beside itself on an input that is rotated already, two passes beside cuBLAS f16; cold
// caches, launches that overlap. JSON on stdout.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "cublas_gpu.h"
#include "device/properties.h"
#include "formats/rotation.h"
#include "kernels/linear/device_linear.h"
#include "kernels/rotated/pack.h"

namespace {

using namespace w4q;
using Json = nlohmann::ordered_json;

struct LayerShape {
  int64_t n, k;
  int per_step;  ///< times in one decode step of an 8B model
};
constexpr LayerShape shapes[] = {
    {4096, 4096, 32}, {6144, 4096, 32}, {4096, 14336, 32}, {28672, 4096, 32}, {128256, 4096, 1}};
constexpr int64_t row_counts[] = {1, 2, 8, 16, 32, 64, 128, 256, 512, 2048};
constexpr int64_t most_rows = 2048;

/// What is timed, over the same weights.
class Layer {
 public:
  Layer(const LayerShape& shape, const device::Stream& stream)
      : shape_(shape),
        copies_(std::max(2, device::rotating_copies(stream.context().properties(), shape.n * shape.k * 17 / 32))),
        weights_(formats::parse_scheme("kbit4-b32-e4m4"), "kbit-fragment", shape.n, shape.k, 2 * copies_, stream),
        narrow_(formats::parse_scheme("kbit2-b32-e4m4"), "kbit-fragment", shape.n, shape.k, copies_, stream),
        y_(stream.context(), static_cast<size_t>(most_rows * shape.n * 2)),
        gpu_(stream.context().properties()) {
    const auto values = bench::random_halves(static_cast<size_t>(most_rows * shape.k), 4);
    x_ = device::DeviceBuffer::copy_of(std::as_bytes(std::span(values)), stream);
    const formats::InputRotation first({128, 42}, shape.k), second({128, 1042}, shape.k);
    factors_[0] = device::DeviceBuffer::copy_of(std::as_bytes(first.factors()), stream);
    factors_[1] = device::DeviceBuffer::copy_of(std::as_bytes(second.factors()), stream);
    for (int p = 0; p < 2; ++p) {
      const auto words = kernels::rotation_signs(p == 0 ? first : second);
      signs_[p] = device::DeviceBuffer::copy_of(std::as_bytes(std::span(words)), stream);
      stream.synchronize();
    }
    const auto norms =
        bench::random_halves(static_cast<size_t>(kernels::norm_count(shape.n, (shape.k + 127) / 128)), 5);
    for (int copy = 0; copy < 2 * copies_; ++copy) {
      norms_.push_back(device::DeviceBuffer::copy_of(std::as_bytes(std::span(norms)), stream));
    }
    set_up(stream);
    linear(0, stream, 1, {.passes = 2});
    stream.synchronize();
  }

  struct Way {
    int passes = 1;
    bool shared = true;
    bool rotated = false;  ///< x is
    bool narrow = false;   ///< two bits in the second pass
  };
  void linear(int call, const device::Stream& stream, int64_t m, const Way& way) {
    multiply(passes(call, way), m, way.rotated, stream);
  }
  void product(int call, const device::Stream& stream, int64_t m) {
    multiply({.passes = {weights_.weight(call)}}, m, false, stream);
  }

  int copies() const { return copies_; }

 private:
  kernels::DeviceLinear passes(int call, const Way& way) const {
    kernels::DeviceLinear linear;
    for (int p = 0; p < way.passes; ++p) {
      const bool narrow = way.narrow && p == 1;
      const auto weight = narrow ? narrow_.weight(call) : weights_.weight(way.passes * call + p);
      const auto norms = static_cast<size_t>(way.passes * call + p) % norms_.size();
      const auto rotation = way.shared ? 0 : p;
      linear.passes.push_back({.scheme = {formats::SchemeFamily::rotated, narrow ? 2 : 4, 128, formats::ScaleType::f16},
                               .layout = "rotated-fragment",
                               .n = shape_.n,
                               .k = shape_.k,
                               .codes = weight.codes,
                               .scales = norms_[norms].data(),
                               .codebook = weight.codebook,
                               .table_over_first = 1,
                               .scale_max = 1,
                               .rotation = {128, factors_[rotation].as<float>(), signs_[rotation].as<uint32_t>()}});
    }
    return linear;
  }

  /// Memory for every way.
  void set_up(const device::Stream& stream) {
    const Way ways[] = {
        {}, {.passes = 2}, {.passes = 2, .shared = false}, {.passes = 2, .shared = false, .narrow = true}};
    kernels::WorkspaceSizes sizes;
    const auto include = [&](const kernels::DeviceLinear& linear) {
      sizes.include(kernels::workspace_sizes(gpu_, linear, kernels::plan_launches(gpu_, linear), most_rows));
    };
    for (const Way& way : ways) include(passes(0, way));
    include({.passes = {weights_.weight(0)}});
    workspace_.emplace(sizes, stream);
  }

  /// Times are those of graphs: that a product is planned each time costs nothing there.
  void multiply(const kernels::DeviceLinear& linear, int64_t m, bool rotated, const device::Stream& stream) {
    kernels::LinearCall call;
    call.m = m;
    call.x = x_.data(), call.ldx = shape_.k;
    call.y = y_.data(), call.ldy = shape_.n;
    call.input_rotated = rotated;
    call.weights_ready = true;
    kernels::multiply(linear, kernels::plan_launches(gpu_, linear), call, workspace_->get(), stream);
  }

  LayerShape shape_;
  int copies_;
  bench::RotatingWeight weights_, narrow_;
  std::vector<device::DeviceBuffer> norms_;
  device::DeviceBuffer x_, y_, factors_[2], signs_[2];
  const device::Properties& gpu_;
  std::optional<bench::Workspace> workspace_;
};

constexpr const char* columns[] = {
    "cublas_us",           "kbit4_us",         "rotated4_us",     "rotated4_input_rotated_us",
    "rotated44_shared_us", "rotated44_own_us", "rotated42_own_us"};

/// One shape at several numbers of rows.
std::vector<Json> measure(const LayerShape& shape, const std::vector<int64_t>& rows, const device::Stream& stream) {
  const auto cublas = bench::time_cublas(shape.n, shape.k, rows, stream);
  Layer layer(shape, stream);
  std::vector<Json> result;
  for (const int64_t m : rows) {
    const auto time = [&](auto&& call) {
      return device::time_calls(stream.context(), call, bench::timing_of(layer.copies())).median * 1e6;
    };
    const auto way = [&](const Layer::Way& how) {
      return time([&](int i, const device::Stream& s) { layer.linear(i, s, m, how); });
    };
    result.push_back({{"n", shape.n},
                      {"k", shape.k},
                      {"m", m},
                      {"per_step", shape.per_step},
                      {"cublas_us", cublas.at(m) * 1e6},
                      {"kbit4_us", time([&](int i, const device::Stream& s) { layer.product(i, s, m); })},
                      {"rotated4_us", way({})},
                      {"rotated4_input_rotated_us", way({.rotated = true})},
                      {"rotated44_shared_us", way({.passes = 2})},
                      {"rotated44_own_us", way({.passes = 2, .shared = false})},
                      {"rotated42_own_us", way({.passes = 2, .shared = false, .narrow = true})}});
  }
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("rotated linear layers on the GPU");
  std::vector<int64_t> rows(std::begin(row_counts), std::end(row_counts));
  app.add_option("--rows", rows, "activation rows, ascending")->check(CLI::IsMember(rows));
  CLI11_PARSE(app, argc, argv);
  if (!device::find_gpu()) {
    std::cerr << "needs a GPU\n";
    return 4;
  }
  device::Context gpu;
  const device::Stream stream(gpu);
  Json report = {{"gpu", gpu.properties().name}, {"rows", Json::array()}, {"steps", Json::array()}};
  for (const int64_t m : rows) {
    Json step = {{"m", m}};
    for (const char* column : columns) step[column] = 0.0;
    report["steps"].push_back(step);
  }
  for (const auto& shape : shapes) {
    const auto measured = measure(shape, rows, stream);
    for (size_t i = 0; i < rows.size(); ++i) {
      Json& step = report["steps"][i];
      for (const char* column : columns) {
        step[column] = step[column].get<double>() + shape.per_step * measured[i][column].get<double>();
      }
      report["rows"].push_back(measured[i]);
    }
  }
  std::cout << report.dump(1) << "\n";
  return 0;
}
