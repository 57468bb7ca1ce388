#include "pipeline/awq_model.h"

#include <cmath>

#include "core/error.h"
#include "core/text.h"

namespace w4q::pipeline {
namespace {

std::string_view to_string(ScaleTarget::Kind kind) noexcept {
  switch (kind) {
    case ScaleTarget::Kind::norm:
      return "norm";
    case ScaleTarget::Kind::linear:
      return "linear";
    case ScaleTarget::Kind::input_scale:
      return "stored";
    case ScaleTarget::Kind::none:
      break;
  }
  return "none";
}

/// The error of outputs as a distance below the outputs, in dB.
double decibels(const AwqGroupReport& group, double error) { return 10 * std::log10(group.output / error); }

}  // namespace

AwqRun::AwqRun(const AwqRequest& request, const std::filesystem::path& model_folder, const io::Checkpoint& checkpoint,
               const model::ModelConfig& config, const std::filesystem::path& output)
    : options_(request.options), checkpoint_(checkpoint), config_(config) {
  const bool has_text = !request.text.text.empty() || !request.text.ids.empty();
  if (has_text == !request.statistics.empty()) {
    throw Error(ErrorCode::bad_argument, "awq needs calibration text, or a statistics file, one of the two")
        .hint("--calib FILE, --calib-ids FILE or --stats FILE");
  }
  if (!has_text) {
    file_.emplace(StatisticsFile::open(request.statistics, config));
    file_->check_model(model_identity(checkpoint));
    if (!file_->origin().gram) {
      notes_.emplace_back("the statistics have no Gram matrices: searches take input channels as uncorrelated");
    }
    return;
  }
  auto windows = read_windows(model_folder, config, request.text);
  if (windows.samples < request.text.samples) {
    notes_.push_back(
        concat("the calibration text has ", windows.samples, " windows of ", windows.length, " tokens only"));
  }
  CalibrationOptions options;
  options.max_memory = request.max_memory;
  options.spill_at = output;
  calibration_.emplace(checkpoint, config, std::move(windows), options);
  if (calibration_->spilled() > 0) {
    notes_.push_back(concat(calibration_->spilled(), " windows of activations lay on disk between layers"));
  }
}

AwqRun::~AwqRun() = default;

AwqLayer AwqRun::next(const SchemeOf& scheme_of, const quantize::QuantizeOptions& options) {
  ensure(layer_ < config_.layers, "awq: there is no further layer");
  const auto statistics = calibration_ ? calibration_->next() : file_->load(layer_);
  return quantize_layer(checkpoint_, config_, layer_++, statistics, scheme_of, options, options_);
}

std::vector<std::string> linears_with_input_scale(const model::ModelConfig& config, const SchemeOf& scheme_of,
                                                  const AwqOptions& options) {
  std::vector<std::string> result;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto groups = linear_groups(config, layer);
    const auto targets = scale_targets(config, layer, scheme_of, options.input_scales);
    for (size_t i = 0; i < groups.size(); ++i) {
      if (targets[i].kind != ScaleTarget::Kind::input_scale) continue;
      for (const auto& name : groups[i].linears) {
        if (scheme_of(name)) result.push_back(name);
      }
    }
  }
  return result;
}

std::string to_text(const std::vector<AwqGroupReport>& groups) {
  TextTable table({"group", "scales", "alpha", "output SNR dB", "scaled", "clipped"});
  for (const auto& group : groups) {
    table.row({printable(group.name), std::string(to_string(group.target)), fixed(group.alpha, 2),
               fixed(decibels(group, group.plain_error), 2), fixed(decibels(group, group.scaled_error), 2),
               fixed(decibels(group, group.clipped_error), 2)});
  }
  return table.str();
}

io::Json to_json(const std::vector<AwqGroupReport>& groups) {
  io::Json result = io::Json::array();
  for (const auto& group : groups) {
    result.push_back({{"name", group.name},
                      {"scales", to_string(group.target)},
                      {"alpha", group.alpha},
                      {"output", group.output},
                      {"plain_error", group.plain_error},
                      {"scaled_error", group.scaled_error},
                      {"clipped_error", group.clipped_error}});
  }
  return result;
}

}  // namespace w4q::pipeline
