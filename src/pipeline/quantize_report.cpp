#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include "core/text.h"
#include "pipeline/quantize_model.h"

namespace w4q::pipeline {
namespace {

/// How far an error lies below the outputs.
double decibels(double power, double error) { return 10 * std::log10(power / error); }

const std::vector<std::string> output_head{"output dB, plain", "packed"};

std::vector<std::string> output_cells(const std::optional<OutputError>& error) {
  if (!error) return {"", ""};
  return {fixed(decibels(error->power, error->plain), 2), fixed(decibels(error->power, error->packed), 2)};
}

void append(std::vector<std::string>& cells, const std::vector<std::string>& more) {
  cells.insert(cells.end(), more.begin(), more.end());
}

std::string kinds_text(const QuantizeReport& report, bool calibrated) {
  std::vector<std::string> head{"linear", "count", "scheme"};
  append(head, model::KindError::head());
  if (calibrated) append(head, output_head);
  TextTable table(head);
  for (const auto& kind : model::by_kind(report.tensors)) {
    std::set<std::string> schemes;
    model::KindError error;
    std::optional<OutputError> output;
    for (const QuantizedTensor* tensor : kind.rows) {
      schemes.insert(tensor->scheme);
      error.add(tensor->error);
      if (!tensor->output) continue;
      if (!output) output.emplace();
      output->power += tensor->output->power;
      output->plain += tensor->output->plain;
      output->packed += tensor->output->packed;
    }
    std::vector<std::string> row{printable(kind.name), concat(kind.rows.size()), model::words_text(schemes)};
    append(row, error.cells());
    if (calibrated) append(row, output_cells(output));
    table.row(row);
  }
  return table.str();
}

std::string tensors_text(const QuantizeReport& report, bool calibrated, model::Detail detail) {
  std::vector<std::string> head{"tensor", "scheme", "SQNR dB", "relative error", "max error", "2^e"};
  if (calibrated) append(head, output_head);
  TextTable table(head);
  for (const QuantizedTensor* tensor :
       model::named_rows(report.tensors, detail, [](const QuantizedTensor& row) { return row.error.sqnr(); })) {
    std::vector<std::string> row{printable(tensor->name),           tensor->scheme,
                                 fixed(tensor->error.sqnr(), 2),    fixed(tensor->error.relative(), 5),
                                 fixed(tensor->error.max_error, 6), concat(tensor->stats.range_exponent)};
    if (calibrated) append(row, output_cells(tensor->output));
    table.row(row);
  }
  return table.str();
}

}  // namespace

std::vector<std::string> steps_of(const QuantizeRequest& request) {
  const auto& steps = request.options.steps;
  const bool weighted = request.calibrated && steps.any(&quantize::StepRow::searches);
  std::vector<std::string> words;
  if (request.allocation) words.emplace_back("bits allocated");
  for (const quantize::StepRow& row : quantize::step_registry()) {
    if (const quantize::Step* step = steps.find(row.kind)) row.describe(*step, request.options, words);
    // All that tries what errors come out stands before.
    if (weighted && row.kind == quantize::StepKind::clip) words.emplace_back("weighted by calibration");
  }
  return words;
}

std::vector<std::string> QuantizeReport::warnings() const {
  std::vector<std::string> result;
  for (const auto& tensor : tensors) {
    if (tensor.stats.saturated_scales > 0) {
      result.push_back(concat(printable(tensor.name), ": ", tensor.stats.saturated_scales, " of ", tensor.stats.blocks,
                              " block scales saturated"));
    }
    if (tensor.stats.subnormal_scales > 0) {
      result.push_back(
          concat(printable(tensor.name), ": ", tensor.stats.subnormal_scales, " of ", tensor.stats.blocks,
                 " block scales are subnormal: the tensor's magnitudes span more than the scale type does"));
    }
  }
  return result;
}

std::string to_text(const QuantizeReport& report, model::Detail detail) {
  const bool calibrated =
      std::ranges::any_of(report.tensors, [](const auto& tensor) { return tensor.output.has_value(); });
  const bool short_table = !model::names_all(detail, report.tensors.size());
  std::string text =
      short_table ? concat(kinds_text(report, calibrated), "\nthe worst of them (--verbose: all)\n") : "";
  text += tensors_text(report, calibrated, detail);
  if (report.plan.allocation) text += "\n" + to_text(*report.plan.allocation, detail);
  if (!report.groups.empty()) text += "\n" + to_text(report.groups, detail);
  text +=
      concat("\n", report.plan.packed_tensors(), " tensors packed at ", fixed(report.plan.packed_bits_per_weight(), 3),
             " bits per weight, SQNR ", fixed(report.total.sqnr(), 2), " dB; ", human_bytes(report.plan.bytes_before()),
             " → ", human_bytes(report.file_bytes), " in ", human_seconds(report.seconds), "\n");
  if (!report.plan.steps.empty()) text += "steps: " + join(report.plan.steps, " → ") + "\n";
  for (const auto& note : report.plan.notes) text += "note: " + note + "\n";
  for (const auto& warning : report.warnings()) text += "warning: " + warning + "\n";
  return text;
}

io::Json to_json(const QuantizeReport& report) {
  io::Json tensors = io::Json::array();
  for (const auto& tensor : report.tensors) {
    tensors.push_back({{"name", tensor.name},
                       {"scheme", tensor.scheme},
                       {"sqnr_db", tensor.error.sqnr()},
                       {"relative_error", tensor.error.relative()},
                       {"max_error", tensor.error.max_error},
                       {"blocks", tensor.stats.blocks},
                       {"zero_blocks", tensor.stats.zero_blocks},
                       {"saturated_scales", tensor.stats.saturated_scales},
                       {"subnormal_scales", tensor.stats.subnormal_scales},
                       {"range_exponent", tensor.stats.range_exponent},
                       {"seconds", tensor.seconds}});
    if (!tensor.output) continue;
    tensors.back()["output"] = {{"power", tensor.output->power},
                                {"plain_error", tensor.output->plain},
                                {"packed_error", tensor.output->packed}};
  }
  io::Json result = {{"tensors", std::move(tensors)},
                     {"groups", to_json(report.groups)},
                     {"packed_tensors", report.plan.packed_tensors()},
                     {"packed_bits_per_weight", report.plan.packed_bits_per_weight()},
                     {"sqnr_db", report.total.sqnr()},
                     {"bytes_before", report.plan.bytes_before()},
                     {"file_bytes", report.file_bytes},
                     {"seconds", report.seconds},
                     {"steps", report.plan.steps},
                     {"notes", report.plan.notes},
                     {"warnings", report.warnings()}};
  if (report.plan.allocation) result["allocation"] = to_json(*report.plan.allocation);
  return result;
}

}  // namespace w4q::pipeline
