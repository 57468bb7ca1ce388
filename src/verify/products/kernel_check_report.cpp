#include <algorithm>
#include <cmath>
#include <map>

#include "core/text.h"
#include "verify/products/kernel_check.h"
#include "verify/products/kernel_share.h"
#include "verify/rungs.h"

namespace w4q::verify {
namespace {

std::string scientific(double value) {
  std::ostringstream out;
  out.precision(2);
  out << std::scientific << value;
  return out.str();
}

}  // namespace

double KernelError::error() const noexcept {
  return std::isnan(to_cpu) || std::isnan(to_fp64) ? to_cpu + to_fp64 : std::max(to_cpu, to_fp64);
}

Check KernelReport::verdict() const {
  Check check{"relative error of the GPU's products", true, {}, {}};
  const KernelError* nearest = nullptr;
  for (const auto& layer : layers) {
    if (nearest == nullptr || !(layer.error() / layer.bound <= nearest->error() / nearest->bound)) nearest = &layer;
    if (layer.passed()) continue;
    check.faults.push_back(concat(printable(layer.name), ": ", layer.kernels, ": ", scientific(layer.error()),
                                  ", at most ", scientific(layer.bound)));
  }
  check.passed = check.faults.empty();
  if (nearest == nullptr) return check;
  check.detail = concat(nearest->error(), check.passed ? " is at most " : " is not at most ", nearest->bound);
  return check;
}

std::string to_text(const KernelReport& report) {
  // One line per scheme and set of kernels; the JSON has every layer.
  struct Line {
    int64_t layers = 0;
    const KernelError* worst = nullptr;
  };
  std::map<std::pair<std::string, std::string>, Line> lines;
  for (const auto& layer : report.layers) {
    Line& line = lines[{layer.scheme, layer.kernels}];
    ++line.layers;
    if (line.worst == nullptr || !(layer.to_fp64 <= line.worst->to_fp64)) line.worst = &layer;
  }
  TextTable table({"scheme", "kernels", "layers", "worst layer", "to fp64", "to the CPU", "of rounding to int8"});
  for (const auto& [key, line] : lines) {
    table.row({key.first, key.second, concat(line.layers), line.worst->name, scientific(line.worst->to_fp64),
               scientific(line.worst->to_cpu), line.worst->rounding > 0 ? scientific(line.worst->rounding) : ""});
  }
  return table.str();
}

io::Json to_json(const KernelReport& report) {
  io::Json layers = io::Json::array();
  for (const auto& layer : report.layers) {
    layers.push_back({{"name", layer.name},
                      {"scheme", layer.scheme},
                      {"kernels", layer.kernels},
                      {"to_fp64", layer.to_fp64},
                      {"to_cpu", layer.to_cpu},
                      {"bound", layer.bound}});
    if (layer.rounding > 0) layers.back()["rounding"] = layer.rounding;
  }
  return layers;
}

CheckRow kernels_check() {
  return {.name = "kernels",
          .option = "--kernels",
          .help = "Check every linear layer's product on this GPU",
          .needs = {.gpu = true},
          .shared = true,
          .run = [](CheckContext& context, Findings& findings) {
            auto& ranks = ranks::world();
            const auto stage = kernel_stage(ranks, context.candidate());
            const auto report = check_kernels(*context.options().gpu, context.model(model::Planes::canonical, stage),
                                              context.options().int8_activations, ranks, stage);
            findings.add("kernels", to_text(report), to_json(report));
            findings.checks.add(report.verdict());
          }};
}

}  // namespace w4q::verify
