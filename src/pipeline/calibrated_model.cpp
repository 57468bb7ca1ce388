#include "pipeline/calibrated_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "pipeline/calibrated_cost.h"
#include "pipeline/calibration_cuda.h"
#include "pipeline/distill.h"
#include "quantize/awq.h"

namespace w4q::pipeline {
namespace {

using quantize::StepKind;

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
double decibels(const GroupReport& group, double error) { return 10 * std::log10(group.output / error); }

/// The groups of each place in a layer together.
std::string kinds_text(const std::vector<GroupReport>& groups) {
  TextTable table({"groups", "count", "scales", "least alpha", "largest", "output SNR dB", "scaled", "packed"});
  for (const auto& kind : model::by_kind(groups)) {
    std::set<std::string> targets;
    GroupReport sum;
    double least = INFINITY, largest = -INFINITY;
    for (const GroupReport* group : kind.rows) {
      targets.emplace(to_string(group->target));
      least = std::min(least, group->point.alpha);
      largest = std::max(largest, group->point.alpha);
      sum.output += group->output;
      sum.plain_error += group->plain_error;
      sum.scaled_error += group->scaled_error;
      sum.packed_error += group->packed_error;
    }
    table.row({printable(kind.name), concat(kind.rows.size()), model::words_text(targets), fixed(least, 2),
               fixed(largest, 2), fixed(decibels(sum, sum.plain_error), 2), fixed(decibels(sum, sum.scaled_error), 2),
               fixed(decibels(sum, sum.packed_error), 2)});
  }
  return table.str();
}

}  // namespace

void check_calibration(const CalibratedRequest& request, const quantize::Steps& steps) {
  if (steps.any(&quantize::StepRow::needs_text)) {
    if (!request.text.empty()) return;
    throw Error(ErrorCode::bad_argument,
                "targets for quantized inputs (asym) and gradients (feedback2, distill) are made with calibration text")
        .hint("--calib FILE, --calib-ids FILE or --chat FILE, also beside --stats");
  }
  if (request.text.empty() != request.statistics.empty()) return;
  throw Error(ErrorCode::bad_argument,
              "awq, error feedback and norms need calibration text, or a statistics file, one of the two")
      .hint("--calib FILE, --calib-ids FILE, --chat FILE or --stats FILE");
}

CalibratedRun::CalibratedRun(const CalibratedRequest& request, const model::OpenedModel& model,
                             CalibratedPacking packing, const std::filesystem::path& output, LayerOwners owners)
    : model_(model), packing_(std::move(packing)), owners_(std::move(owners)) {
  const quantize::Steps& steps = packing_.options.steps;
  check_calibration(request, steps);
  if (request.gpu != nullptr) {
    gpu_ = make_cuda_work(*request.gpu);
    if (gpu_ == nullptr) notes_.emplace_back("cuBLAS cannot be loaded: calibration ran on the CPU");
  }
  if (!request.statistics.empty()) {
    file_.emplace(StatisticsFile::open(request.statistics, model.config));
    file_->check_model(model_identity(model.folder.tensors));
    products_ = file_->origin().products;
    if (!file_->origin().gram) {
      notes_.emplace_back("the statistics have no Gram matrices: searches take input channels as uncorrelated");
    }
  }
  if (!file_ || steps.any(&quantize::StepRow::needs_text)) read_text(request, output);
}

void CalibratedRun::read_text(const CalibratedRequest& request, const std::filesystem::path& output) {
  const quantize::Steps& steps = packing_.options.steps;
  products_ = products_on(gpu_of(gpu_));
  owners_.ranks->require_same("what they multiply with", products_);
  windows_ = read_windows(*owners_.ranks, model_, request.text, gpu_of(gpu_));
  if (request.text.self) notes_.push_back("calibrated with " + describe_self(request.text));
  if (windows_.samples < request.text.samples) {
    notes_.push_back(
        concat("the calibration text has ", windows_.samples, " windows of ", windows_.length, " tokens only"));
  }
  CalibrationOptions options;
  options.max_memory = request.max_memory;
  options.reserved_memory = calibrated_memory(model_, packing_.scheme_of, steps);
  options.pairs = steps.has(StepKind::asymmetric);
  options.spill_at = output;
  options.gpu = gpu_;
  if (!file_) options.travelling_memory = travelling_memory(model_.config, options, owners_.ranks->size());
  // What would fail behind hours of other steps fails here.
  if (!file_ || options.pairs) require_calibration_memory(model_, windows_, options);
  if (steps.has(StepKind::distill_norms)) {
    require_distill_memory(model_, windows_.length, {.max_memory = request.max_memory});
  }
  if (steps.has(StepKind::feedback_outputs)) walk_back(options);
  if (file_ && !options.pairs) return;  // statistics are at hand, and nothing is walked for
  auto& ranks = options.pairs ? alone_ : *owners_.ranks;
  auto owners = owners_.of;
  if (ranks.size() == 1) {
    for (int& owner : owners) owner = owner == owners_.ranks->rank() ? 0 : -1;
  }
  walk_.emplace(ranks, model_, windows_, options, std::move(owners), ranks.size());
  const auto* calibration = walk_->calibration();
  if (calibration != nullptr && calibration->spilled() > 0) {
    notes_.push_back(concat(calibration->spilled(), " windows of activations lay on disk between layers"));
  }
}

/// Costs get half of what is left beside the walk and the packing; hidden states the rest.
void CalibratedRun::walk_back(CalibrationOptions& options) {
  const CalibrationWindows windows = gradient_windows(windows_);
  GradientOptions back{.max_memory = options.max_memory, .spill_at = options.spill_at, .gpu = gpu_};
  int64_t kept = std::numeric_limits<int64_t>::max();
  if (options.max_memory > 0) {
    const int64_t forth = calibration_memory(model_, windows_.length, true) + options.reserved_memory +
                          options.travelling_memory + (options.pairs ? pairs_memory(model_, windows_.length) : 0);
    const int64_t fixed = std::max(gradient_memory(model_, windows.length, false), forth);
    kept = std::min(std::max<int64_t>(0, options.max_memory - fixed) / 2, output_costs_bytes(model_.config));
    back.reserved_memory = kept;
    options.reserved_memory += kept;
  }
  costs_.emplace(model_, windows, back, kept);
}

CalibratedRun::~CalibratedRun() = default;

namespace {

/// A layer that is quantized while its own inputs are looked at.
class LayerPairs : public PairedInputs {
 public:
  LayerPairs(const model::OpenedModel& model, int64_t layer, Calibration& calibration, bool keep)
      : calibration_(calibration), weights_(model::load_layer(model, layer)), keep_(keep) {}

  std::optional<quantize::InputPair> of(size_t group) override {
    return calibration_.pair(group, weights_, std::exchange(changed_, std::vector<std::string>{}), keep_);
  }

  void take(const std::string& linear, Values weight) override {
    for (auto& own : weights_.linears) {
      if (own.name != linear) continue;
      const auto values = std::make_shared<const Values>(std::move(weight));
      const TensorView view{linear, DType::f32, values->shape, bytes_of(values->values)};
      own.matrix = kernels::LinearWeight::Dense{view, values};
      if (changed_) changed_->push_back(linear);
      return;
    }
    ensure(false, "a packed linear that its layer has not");
  }

  void finish() { calibration_.finish(weights_, changed_); }

 private:
  Calibration& calibration_;
  model::LayerWeights weights_;
  bool keep_;
  ChangedLinears changed_;  ///< since inputs were asked for; nothing: that was never
};

}  // namespace

CalibratedLayer CalibratedRun::next() {
  ensure(layer_ < model_.config.layers, "CalibratedRun: there is no further layer");
  const bool on_gpu = gpu_ != nullptr && packs_on_gpu(model_.config, layer_, packing_);
  std::optional<LayerPairs> paired;
  LayerStatistics statistics;
  if (in_pairs()) {
    auto& calibration = *walk_->calibration();
    const bool decodes = !file_ && needs_statistics(model_.config, layer_, packing_);
    if (decodes) statistics = calibration.next(on_gpu);
    if (!decodes) calibration.next_without_statistics();
    paired.emplace(model_, layer_, calibration, on_gpu);
  } else if (!file_) {
    statistics = walk_->next(layer_, on_gpu);
  }
  if (file_) statistics = file_->load(layer_);
  CalibratedLayer layer = quantize_layer(model_, layer_, statistics, packing_,
                                         {.gpu = on_gpu ? gpu_ : nullptr,
                                          .paired = paired ? &*paired : nullptr,
                                          .costs = costs_ ? costs_->layer(layer_) : LayerCosts{}});
  if (paired) paired->finish();
  ++layer_;
  return layer;
}

CalibratedLayer CalibratedRun::layer(int64_t index) {
  // Behind layers that are quantized on the way others see other inputs.
  while (in_pairs() && layer_ < index) next();
  layer_ = index;
  return next();
}

void CalibratedRun::finish() {
  if (walk_ && !in_pairs()) walk_->finish();
  walk_.reset();
  costs_.reset();
  free_memory(gpu_);
}

std::string describe(const ExpertCounts& experts) {
  if (experts.idle + experts.scarce == 0) return {};
  return concat("of ", experts.all, " experts ", experts.idle,
                " were sent no token of the calibration text and are rounded as they are, ", experts.scarce,
                " fewer than they have input channels, which leaves out scales of these, and costs of their outputs; "
                "give more text");
}

std::vector<std::string> linears_with_input_scale(const model::ModelConfig& config, const SchemeOf& scheme_of,
                                                  const quantize::Steps& steps) {
  std::vector<std::string> result;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto groups = model::input_groups(config, layer);
    const auto targets = wanted_targets(config, layer, scheme_of, steps);
    for (size_t i = 0; i < groups.size(); ++i) {
      if (targets[i].kind != ScaleTarget::Kind::input_scale) continue;
      for (const auto& name : groups[i].names()) {
        if (scheme_of(name)) result.push_back(name);
      }
    }
  }
  return result;
}

std::string to_text(const std::vector<GroupReport>& groups, model::Detail detail) {
  if (!model::names_all(detail, groups.size())) return kinds_text(groups);
  TextTable table({"group", "scales", "alpha", "output SNR dB", "scaled", "packed"});
  for (const auto& group : groups) {
    table.row({printable(group.name), std::string(to_string(group.target)),
               group.point.by_weights ? concat(fixed(group.point.alpha, 2), " / w") : fixed(group.point.alpha, 2),
               fixed(decibels(group, group.plain_error), 2), fixed(decibels(group, group.scaled_error), 2),
               fixed(decibels(group, group.packed_error), 2)});
  }
  return table.str();
}

io::Json to_json(const std::vector<GroupReport>& groups) {
  io::Json result = io::Json::array();
  for (const auto& group : groups) {
    result.push_back({{"name", group.name},
                      {"scales", to_string(group.target)},
                      {"alpha", group.point.alpha},
                      {"by_weights", group.point.by_weights},
                      {"output", group.output},
                      {"plain_error", group.plain_error},
                      {"scaled_error", group.scaled_error},
                      {"packed_error", group.packed_error}});
  }
  return result;
}

}  // namespace w4q::pipeline
