// Linear layers on the GPU, every format that has kernels and all shapes of an 8B model: time, bandwidth, share of the
// read floor for the same bytes, and ratio to cuBLAS f16, all in one process with cold caches. JSON on stdout, a line
// of progress per shape on stderr.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/text.h"
#include "cublas_gpu.h"
#include "device/ceilings.h"
#include "device/properties.h"
#include "kernels/linear/int8_rows.h"

namespace {

using namespace w4q;
using Json = nlohmann::ordered_json;

struct LayerShape {
  int64_t n, k;
  int per_step;  ///< times in one decode step of an 8B model
};
constexpr LayerShape shapes[] = {{4096, 4096, 32},  {6144, 4096, 32},  {14336, 4096, 0}, {4096, 14336, 32},
                                 {28672, 4096, 32}, {128256, 4096, 1}, {16384, 2048, 0}};
constexpr int64_t row_counts[] = {1, 2, 4, 8, 16, 32, 64, 128, 512, 2048};
constexpr int64_t most_rows = 2048;

/// A scheme in the layout that its kernels read, and the one of the yardstick kernel, if there is one.
struct Format {
  std::string_view scheme, layout, reference_layout;
  int64_t most_rows;
  bool int8_activations = false;  ///< from 17 rows on
  int64_t least_rows() const { return int8_activations ? kernels::least_int8_rows : 1; }
  formats::Scheme parsed() const { return formats::parse_scheme(scheme); }
};
constexpr Format all_formats[] = {{"kbit2-b32-e4m4", "kbit-fragment", "kbit-tile", most_rows},
                                  {"kbit3-b32-e4m4", "kbit-fragment", "kbit-tile", most_rows},
                                  {"kbit4-b32-e4m4", "kbit-fragment", "kbit-tile", most_rows},
                                  {"kbit5-b32-e4m4", "kbit-fragment", "kbit-tile", most_rows},
                                  {"nvfp4", "float-fragment", "", most_rows},
                                  {"fp8-block128", "float-fragment", "", most_rows},
                                  {"int4-g128-f16", "marlin", "", most_rows},
                                  {"int4-g32-f16", "marlin", "", most_rows},
                                  {"int8-g128-f16", "marlin", "", most_rows},
                                  {"int4-g32-f16", "interleaved", "", 64},
                                  {"int4-g128-f16", "marlin", "", most_rows, true},
                                  {"int4-g32-f16", "marlin", "", most_rows, true},
                                  {"int8-g128-f16", "marlin", "", most_rows, true}};
std::string name_of(const Format& format) {
  return concat(format.scheme, " ", format.layout, format.int8_activations ? " int8" : "");
}

struct Call {
  int64_t m = 1;
  int copies = 2;       ///< of the weight, used in turn; one stays in the L2 cache if it fits
  bool overlap = true;  ///< each call may fetch its first weights while the one before it still runs, as in a decoder
  std::string_view layout = "";  ///< another than the weight's
  bool int8_activations = false;
};

device::Timing time_layer(const bench::RotatingWeight& weights, const LayerShape& shape, const Call& call,
                          const device::Stream& stream) {
  const auto values = bench::random_halves(static_cast<size_t>(call.m * shape.k), 4);
  const auto x = device::DeviceBuffer::copy_of(std::as_bytes(std::span(values)), stream);
  device::DeviceBuffer y(stream.context(), static_cast<size_t>(call.m * shape.n * 2));
  std::vector<kernels::DeviceLinear> linears;
  for (int copy = 0; copy < call.copies; ++copy) {
    linears.push_back({.passes = {weights.weight(copy)}});
    if (!call.layout.empty()) linears.back().passes.front().layout = call.layout;
  }
  const auto plan = kernels::plan_launches(stream.context().properties(), linears.front(), call.int8_activations);
  bench::Workspace workspace(kernels::workspace_sizes(stream.context().properties(), linears.front(), plan, call.m),
                             stream);
  const auto launch = [&](int index, const device::Stream& on) {
    kernels::LinearCall product;
    product.m = call.m;
    product.x = x.data();
    product.ldx = shape.k;
    product.y = y.data();
    product.ldy = shape.n;
    product.weights_ready = call.overlap;
    product.int8_activations = call.int8_activations;
    kernels::multiply(linears[static_cast<size_t>(index % call.copies)], plan, product, workspace.get(), on);
  };
  launch(0, stream);  // cuBLAS cannot be started within a capture
  stream.synchronize();
  return device::time_calls(stream.context(), launch, bench::timing_of(call.copies));
}

/// Bytes that a kernel must read, by n · k weights: without padding.
int64_t weight_bytes(const LayerShape& shape, const Format& format) {
  const formats::Scheme scheme = format.parsed();
  const bool byte = scheme.scale == formats::ScaleType::e4m4 || scheme.scale == formats::ScaleType::e4m3;
  const int scale_bits = byte ? 8 : 16;
  if (bench::RotatingWeight::has_tile_scales(scheme)) return shape.n * shape.k + shape.n / 64 * (shape.k / 64) * 8;
  return shape.n * shape.k * scheme.bits / 8 + shape.n * shape.k / scheme.block * scale_bits / 8;
}

/// Weights a second of the decoding alone: the slope between two weights that stay in the L2 cache.
double decoding_rate(const Format& format, const device::Stream& stream) {
  constexpr LayerShape small = {2048, 4096, 0};
  constexpr LayerShape large = {8192, 4096, 0};
  const auto seconds = [&](const LayerShape& shape) {
    const bench::RotatingWeight weight(format.parsed(), format.layout, shape.n, shape.k, 1, stream);
    return time_layer(weight, shape, {.copies = 1}, stream).median;
  };
  return static_cast<double>((large.n - small.n) * large.k) / (seconds(large) - seconds(small));
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

/// What is known of an RTX 4090 (docs/notes/kernels/kbit.md), for the projection.
struct Rtx4090 {
  static constexpr double bandwidth = 940e9;  ///< bytes a second that the best public decoder reaches
  static constexpr double lanes_per_second = 128 * 128 * 2.52e9;
  /// Weights a second that its tensor cores take with fp32 sums: 512 FLOP a clock and multiprocessor, 16 a weight.
  static constexpr double tensor_rate = 512.0 / 16 * 128 * 2.52e9;
};

class Bench {
 public:
  /// `warm`: also without changing the weight between calls, which leaves it in the L2 cache if it fits.
  Bench(std::vector<int64_t> rows, std::vector<Format> formats, bool warm)
      : rows_(std::move(rows)), formats_(std::move(formats)), warm_(warm) {}

  void run(const LayerShape& shape) {
    const auto cublas = bench::time_cublas(shape.n, shape.k, row_counts, stream_);
    for (const auto& [m, seconds] : cublas) cublas_step_[m] += shape.per_step * seconds;
    for (const Format& format : formats_) {
      const int copies = std::max(2, device::rotating_copies(gpu_.properties(), weight_bytes(shape, format)));
      const bench::RotatingWeight weights(format.parsed(), format.layout, shape.n, shape.k, copies, stream_);
      for (const int64_t m : rows_) {
        if (m < format.least_rows() || m > format.most_rows) continue;
        const Call call{.m = m, .copies = copies, .int8_activations = format.int8_activations};
        measure(shape, format, call, weights, cublas.at(m));
      }
      std::cerr << concat(shape.n, " × ", shape.k, " ", name_of(format), "\n");
    }
  }

  Json report(const device::Properties& gpu) {
    const auto ceilings = device::measure_ceilings(gpu_);
    Json report = {{"gpu", gpu.name},
                   {"sm", gpu.sm},
                   {"read_gbs", ceilings.read * 1e-9},
                   {"write_gbs", ceilings.write * 1e-9},
                   {"copy_gbs", ceilings.copy * 1e-9},
                   {"rows", rows_json_}};
    for (const auto& [key, step] : steps_) {
      report["steps"].push_back({{"format", key.first},
                                 {"m", key.second},
                                 {"ms", step.overlapping * 1e3},
                                 {"ms_without_overlap", step.alone * 1e3},
                                 {"cublas_ms", cublas_step_[key.second] * 1e3}});
    }
    for (const Format& format : formats_) {
      const std::string name = name_of(format);
      if (points_[name].size() < 2) continue;
      const double rate = decoding_rate(format, stream_);
      const double per_clock = rate / gpu.multiprocessors / clock();
      report["formats"].push_back({{"format", name},
                                   {"fit", fit(points_[name])},
                                   {"fit_without_overlap", fit(alone_points_[name])},
                                   {"decoding_gweights_per_s", rate * 1e-9},
                                   {"decoding_weights_per_clock_and_sm", per_clock},
                                   {"rtx4090_projected", project(format, per_clock)}});
    }
    return report;
  }

 private:
  struct Step {
    double overlapping = 0, alone = 0;
  };

  void measure(const LayerShape& shape, const Format& format, Call call, const bench::RotatingWeight& weights,
               double cublas) {
    const std::string name = name_of(format);
    const auto bytes = static_cast<double>(weight_bytes(shape, format));
    const double floor = device::read_floor_seconds(gpu_, weight_bytes(shape, format));
    const auto timing = time_layer(weights, shape, call, stream_);
    call.overlap = false;
    const auto alone = time_layer(weights, shape, call, stream_);
    steps_[{name, call.m}].overlapping += shape.per_step * timing.median;
    steps_[{name, call.m}].alone += shape.per_step * alone.median;
    Json row = {{"n", shape.n},
                {"k", shape.k},
                {"format", name},
                {"m", call.m},
                {"us", timing.median * 1e6},
                {"us_min", timing.least * 1e6},
                {"us_max", timing.most * 1e6},
                {"us_without_overlap", alone.median * 1e6},
                {"us_loads_only", floor * 1e6},
                {"gbs", bytes / timing.median * 1e-9},
                {"percent_of_read_floor", 100 * floor / timing.median},
                {"times_cublas", cublas / timing.median}};
    if (warm_) {
      const double warm = time_layer(weights, shape, {.m = call.m, .copies = 1}, stream_).median;
      row["us_warm_l2"] = warm * 1e6;
      row["gbs_warm_l2"] = bytes / warm * 1e-9;
    }
    if (call.m == 1) {
      points_[name].emplace_back(bytes, timing.median);
      alone_points_[name].emplace_back(bytes, alone.median);
      if (!format.reference_layout.empty()) {
        call.layout = format.reference_layout;
        row["times_reference_kernel"] = time_layer(weights, shape, call, stream_).median / timing.median;
      }
    }
    rows_json_.push_back(std::move(row));
  }

  double clock() const {
    int kilohertz = 0;
    cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, gpu_.ordinal());
    return kilohertz * 1e3;
  }

  /// One decode step of the 8B model: the slower of bytes and decoding, plus what a launch costs here without overlap,
  /// which sm_89 does not have.
  Json project(const Format& format, double per_clock) {
    const double rate = std::min(per_clock / 128 * Rtx4090::lanes_per_second, Rtx4090::tensor_rate);
    const double launch = fit(alone_points_[name_of(format)]).at("t0_us").get<double>() * 1e-6;
    double seconds = 0;
    for (const LayerShape& shape : shapes) {
      const double reading = static_cast<double>(weight_bytes(shape, format)) / Rtx4090::bandwidth;
      const double decoding = static_cast<double>(shape.n * shape.k) / rate;
      seconds += shape.per_step * (std::max(reading, decoding) + launch);
    }
    return {{"step_ms", seconds * 1e3}, {"decoding_gweights_per_s", rate * 1e-9}};
  }

  std::vector<int64_t> rows_;
  std::vector<Format> formats_;
  bool warm_;
  device::Context gpu_;
  device::Stream stream_{gpu_};
  Json rows_json_ = Json::array();
  std::map<std::pair<std::string, int64_t>, Step> steps_;
  std::map<int64_t, double> cublas_step_;
  std::map<std::string, std::vector<std::pair<double, double>>> points_, alone_points_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("linear layers on the GPU");
  std::vector<int64_t> rows(std::begin(row_counts), std::end(row_counts));
  std::vector<std::string> wanted;
  std::vector<int64_t> outputs;
  bool warm = false;
  app.add_option("--rows", rows, "activation rows")->check(CLI::IsMember(rows));
  app.add_option("--formats", wanted, "only formats whose name contains one of these");
  app.add_option("--outputs", outputs, "only the shapes with these many outputs");
  app.add_flag("--warm", warm, "also the time with one weight, which stays in the L2 cache");
  CLI11_PARSE(app, argc, argv);
  const auto gpu = device::find_gpu();
  if (!gpu) {
    std::cerr << "no GPU\n";
    return 4;
  }
  std::vector<Format> formats;
  std::ranges::copy_if(all_formats, std::back_inserter(formats), [&](const Format& format) {
    return wanted.empty() || std::ranges::any_of(wanted, [&](const std::string& part) {
             return name_of(format).find(part) != std::string::npos;
           });
  });
  Bench bench(rows, formats, warm);
  for (const LayerShape& shape : shapes) {
    if (outputs.empty() || std::find(outputs.begin(), outputs.end(), shape.n) != outputs.end()) bench.run(shape);
  }
  std::cout << bench.report(*gpu).dump(1) << "\n";
  return 0;
}
