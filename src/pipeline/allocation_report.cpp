#include "pipeline/allocation_report.h"

#include "core/text.h"

namespace w4q::pipeline {
namespace {

std::string widths_text(const std::map<int, int64_t>& tensors) {
  std::vector<std::string> parts;
  for (const auto& [bits, count] : tensors) parts.push_back(concat(count, "×", bits));
  return join(parts, " ");
}

io::Json point_json(const AllocationPoint& point) {
  io::Json tensors = io::Json::object();
  for (const auto& [bits, count] : point.tensors) tensors[concat(bits)] = count;
  return {{"bits_per_weight", point.bits_per_weight}, {"divergence", point.divergence}, {"tensors", tensors}};
}

io::Json points_json(const std::vector<AllocationPoint>& points) {
  io::Json result = io::Json::array();
  for (const auto& point : points) result.push_back(point_json(point));
  return result;
}

}  // namespace

std::string to_text(const AllocationReport& report) {
  TextTable table({"bits", "bits/weight", report.measured ? "expected KL" : "relative error", "tensors × width"});
  const auto row = [&](const std::string& what, const AllocationPoint& point) {
    table.row({what, fixed(point.bits_per_weight, 3), fixed(point.divergence, 5), widths_text(point.tensors)});
  };
  for (const auto& point : report.uniform) row("uniform", point);
  for (const auto& point : report.frontier) row("allocated", point);
  row("chosen", report.chosen);
  return table.str();
}

io::Json to_json(const AllocationReport& report) {
  return {{"chosen", point_json(report.chosen)},
          {"uniform", points_json(report.uniform)},
          {"frontier", points_json(report.frontier)},
          {"measured", report.measured},
          {"seconds", report.seconds}};
}

}  // namespace w4q::pipeline
