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

/// Which widths the linears of each kind have.
std::string kinds_text(const MixReport& report) {
  TextTable table({"linear", "mean bits", "linears × width"});
  for (const auto& kind : model::by_kind(report.linears)) {
    std::map<int, int64_t> widths;
    double sum = 0;
    for (const LinearEffect* linear : kind.rows) {
      ++widths[linear->bits];
      sum += linear->bits;
    }
    table.row({printable(kind.name), fixed(sum / static_cast<double>(kind.rows.size()), 2), widths_text(widths)});
  }
  return table.str();
}

std::string effects_text(const MixReport& report) {
  std::vector<std::string> head{"linear", "bits"};
  std::map<int, int64_t> widths;
  for (const auto& linear : report.linears) {
    for (const auto& [bits, divergence] : linear.divergences) ++widths[bits];
  }
  for (const auto& [bits, count] : widths) head.push_back(concat("KL with it at ", bits));
  TextTable table(head);
  for (const auto& linear : report.linears) {
    std::vector<std::string> row{printable(linear.name), concat(linear.bits)};
    for (const auto& [bits, count] : widths) {
      const auto found = linear.divergences.find(bits);
      row.push_back(found == linear.divergences.end() ? "" : fixed(found->second, 5));
    }
    table.row(row);
  }
  return table.str();
}

std::string mix_text(const MixReport& report, model::Detail detail) {
  const bool all = model::names_all(detail, report.linears.size());
  return concat("\n", all ? effects_text(report) : kinds_text(report),
                all ? "all else" : "effects of linears with all else at ", report.base_bits, " bits, KL ",
                fixed(report.base_divergence, 5), "\nmeasured on ", report.windows, " × ", report.length,
                " tokens: KL ", fixed(report.divergence, 5),
                report.neighbour ? ", of the neighbouring widths mixed by layers: no mix was better"
                                 : concat(" as chosen, ", fixed(report.neighbour_divergence, 5),
                                          " of the neighbouring widths mixed by layers"),
                "; of ", report.exchanges_tried, " exchanges ", report.exchanges_taken, " helped\n");
}

io::Json mix_json(const MixReport& report) {
  io::Json linears = io::Json::array();
  for (const auto& linear : report.linears) {
    io::Json effects = io::Json::object();
    for (const auto& [bits, divergence] : linear.divergences) effects[concat(bits)] = divergence;
    linears.push_back({{"name", linear.name}, {"bits", linear.bits}, {"kl_alone", std::move(effects)}});
  }
  return {{"windows", report.windows},
          {"length", report.length},
          {"kl", report.divergence},
          {"kl_of_neighbours", report.neighbour_divergence},
          {"neighbours_chosen", report.neighbour},
          {"base_bits", report.base_bits},
          {"base_kl", report.base_divergence},
          {"exchanges_tried", report.exchanges_tried},
          {"exchanges_taken", report.exchanges_taken},
          {"linears", std::move(linears)}};
}

}  // namespace

std::string to_text(const AllocationReport& report, model::Detail detail) {
  TextTable table({"bits", "bits/weight", report.measured ? "expected KL" : "relative error", "tensors × width"});
  const auto row = [&](const std::string& what, const AllocationPoint& point) {
    table.row({what, fixed(point.bits_per_weight, 3), fixed(point.divergence, 5), widths_text(point.tensors)});
  };
  for (const auto& point : report.uniform) row("uniform", point);
  for (const auto& point : report.frontier) row("allocated", point);
  row("chosen", report.chosen);
  return report.mix ? table.str() + mix_text(*report.mix, detail) : table.str();
}

io::Json to_json(const AllocationReport& report) {
  io::Json result = {{"chosen", point_json(report.chosen)},
                     {"uniform", points_json(report.uniform)},
                     {"frontier", points_json(report.frontier)},
                     {"measured", report.measured},
                     {"seconds", report.seconds}};
  if (report.mix) result["mix"] = mix_json(*report.mix);
  return result;
}

}  // namespace w4q::pipeline
