#include "verify/weights.h"

#include <cmath>

#include "core/progress.h"
#include "core/text.h"
#include "verify/rescaled.h"
#include "verify/rungs.h"

namespace w4q::verify {

std::string scheme_text(const checkpoint::PackedLinearInfo& info) {
  std::vector<std::string> names;
  for (const auto& pass : info.passes) names.push_back(formats::to_string(pass.scheme));
  return join(names, "+");
}

WeightReport compare_with_base(const model::OpenedModel& candidate, const model::OpenedModel& base) {
  WeightReport report;
  const checkpoint::QuantizationConfig& quantization = candidate.folder.quantization;
  RescaledWeights weights(candidate, base);
  Progress progress("weights", static_cast<int64_t>(quantization.linears.size()), "tensors");
  for (const auto& [name, info] : quantization.linears) {
    if (quantization.rescaled.contains(name + ".weight")) ++report.rescaled;
    const auto error = model::compare_weights(stored_weight(base.folder, name), weights.effective(name));
    report.tensors.push_back({name, scheme_text(info), error});
    report.total.add(error);
    progress.advance(1);
  }
  return report;
}

std::string to_text(const WeightReport& report) {
  TextTable table({"packed weight", "scheme", "SQNR dB", "relative error", "max error", "at row", "column"});
  for (const auto& tensor : report.tensors) {
    table.row({printable(tensor.name), tensor.scheme, fixed(tensor.error.sqnr(), 2), fixed(tensor.error.relative(), 5),
               fixed(tensor.error.max_error, 6), concat(tensor.error.row), concat(tensor.error.col)});
  }
  if (report.rescaled == 0) return table.str();
  return table.str() + concat("folded scales were undone in ", report.rescaled, " of them\n");
}

io::Json to_json(const WeightReport& report) {
  io::Json tensors = io::Json::array();
  for (const auto& tensor : report.tensors) {
    tensors.push_back({{"name", tensor.name},
                       {"scheme", tensor.scheme},
                       {"sqnr_db", tensor.error.sqnr()},
                       {"relative_error", tensor.error.relative()},
                       {"max_error", tensor.error.max_error},
                       {"row", tensor.error.row},
                       {"column", tensor.error.col}});
  }
  return {{"rescaled", report.rescaled},
          {"sqnr_db", report.total.sqnr()},
          {"relative_error", report.total.relative()},
          {"tensors", std::move(tensors)}};
}

CheckRow weights_check() {
  static constexpr Limit limits[] = {{"--min-sqnr", "Fail when the SQNR of the packed weights (dB) is less", true}};
  return {.name = "weights",
          .help = "how far each packed weight is from the base's",
          .limits = limits,
          .needs = {.base = true, .packed = true},
          .run = [](CheckContext& context, Findings& findings) {
            const auto report = compare_with_base(context.candidate(), context.base());
            findings.add("weights", to_text(report), to_json(report));
            const double sqnr = report.total.sqnr();
            findings.checks.add({"weights",
                                 !std::isnan(sqnr),
                                 concat("SQNR ", fixed(sqnr, 2), " dB over ", report.tensors.size(), " packed weights"),
                                 {}});
            if (const auto least = context.limit("--min-sqnr")) {
              findings.checks.add_threshold("SQNR", sqnr, *least, true);
            }
          }};
}

}  // namespace w4q::verify
