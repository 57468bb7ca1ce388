#include "pipeline/calibrated_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "kernels/linear/gemm.h"
#include "pipeline/calibration_cuda.h"
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

void check_sources(const CalibratedRequest& request) {
  if (request.text.empty() != request.statistics.empty()) return;
  throw Error(ErrorCode::bad_argument,
              "awq, error feedback and norms need calibration text, or a statistics file, one of the two")
      .hint("--calib FILE, --calib-ids FILE, --chat FILE or --stats FILE");
}

/// Multiplications a second of matrix products on all threads.
double measured_rate() {
  constexpr int64_t rows = 64, cols = 512, tasks = 32;
  const std::vector<float> a(rows * cols, 0.5f), b(cols * cols, 0.25f);
  double best = 1e9;
  for (int repeat = 0; repeat < 3; ++repeat) {
    const Stopwatch watch;
    parallel_for(tasks, 1, [&](int64_t, int64_t) {
      std::vector<float> c(rows * cols);
      kernels::gemm_nn({a.data(), rows, cols}, {b.data(), cols, cols}, {c.data(), rows, cols});
    });
    best = std::min(best, watch.seconds());
  }
  return static_cast<double>(tasks * rows * cols * cols) / best;
}

/// How much longer a multiplication of the factorization takes than one of a product: an estimate.
constexpr double factor_slowness = 20;

/// Of the tokens that a group sees: experts see those that are sent to them.
double share_of(const model::ModelConfig& config, const model::InputGroup& group) {
  return group.expert ? static_cast<double>(config.mixture.chosen) / static_cast<double>(config.mixture.experts) : 1.0;
}

/// Multiplications that the layers of a model ask for.
double multiplications(const CalibratedRequest& request, const model::OpenedModel& model, const SchemeOf& scheme_of,
                       const quantize::Steps& steps) {
  const double tokens =
      request.statistics.empty() ? static_cast<double>(request.text.samples * request.text.length) : 0;
  // Beside the points of the search and the clips: the outputs themselves, plain and packed. Feedback takes half of one
  // product for the targets, and about as much inside the blocks; each of three sweeps takes one, and two of them as
  // much again inside the blocks.
  const bool feedback = steps.has(StepKind::feedback), both = steps.has(StepKind::feedback_outputs);
  const double products = 3 + (steps.has(StepKind::awq) ? 2 * quantize::awq_alphas : 0) + (feedback ? 1 : 0) +
                          (steps.has(StepKind::sweeps) ? 4 : 0) + (steps.has(StepKind::fit_norms) ? 1 : 0);
  double sum = 0;
  for (int64_t layer = 0; layer < model.config.layers; ++layer) {
    for (const auto& group : model::input_groups(model.config, layer)) {
      const auto k = static_cast<double>(group.width);
      const double rows = tokens * share_of(model.config, group);
      sum += rows * k * k / 2;  // the Gram matrix
      // Its factor, at the speed of a plain fp64 loop rather than of a product.
      if (feedback) sum += k * k * k / 6 * factor_slowness;
      for (const auto& linear : group.linears) {
        const auto n = static_cast<double>(linear.n);
        sum += rows * n * k + (scheme_of(linear.name) ? products * n * k * k : 0);
        // Forth, forth again and back, sums over tokens, their factor, and what rows are worth to each other.
        if (both) sum += rows * n * (3 * k + n / 2) + n * n * (n / 6 * factor_slowness + k / 2);
      }
    }
  }
  return sum;
}

}  // namespace

CalibratedRun::CalibratedRun(const CalibratedRequest& request, const model::OpenedModel& model,
                             CalibratedPacking packing, const std::filesystem::path& output)
    : model_(model), packing_(std::move(packing)) {
  check_sources(request);
  if (request.gpu != nullptr) {
    gpu_ = make_cuda_work(*request.gpu);
    if (gpu_ == nullptr) notes_.emplace_back("cuBLAS cannot be loaded: calibration ran on the CPU");
  }
  const bool both = packing_.options.steps.has(StepKind::feedback_outputs);
  if (both && !request.statistics.empty()) {
    throw Error(ErrorCode::bad_argument,
                "feedback along both sides needs calibration text: statistics have no gradients")
        .hint("--calib, --calib-ids, --chat or none of them instead of --stats");
  }
  if (!request.statistics.empty()) {
    file_.emplace(StatisticsFile::open(request.statistics, model.config));
    file_->check_model(model_identity(model.folder.tensors));
    products_ = file_->origin().products;
    if (!file_->origin().gram) {
      notes_.emplace_back("the statistics have no Gram matrices: searches take input channels as uncorrelated");
    }
    return;
  }
  products_ = gpu_ == nullptr ? std::string(kernels::gemm_library())
                              : concat("cuBLAS, ", printable(request.gpu->properties().name));
  auto windows = read_windows(model, request.text, gpu_of(gpu_));
  if (request.text.self) notes_.push_back("calibrated with " + describe_self(request.text));
  if (windows.samples < request.text.samples) {
    notes_.push_back(
        concat("the calibration text has ", windows.samples, " windows of ", windows.length, " tokens only"));
  }
  CalibrationOptions options;
  options.max_memory = request.max_memory;
  options.reserved_memory = calibrated_memory(model, packing_.scheme_of, packing_.options.steps);
  options.spill_at = output;
  options.gpu = gpu_;
  if (both) walk_back(windows, options);
  calibration_.emplace(model, std::move(windows), options);
  if (calibration_->spilled() > 0) {
    notes_.push_back(concat(calibration_->spilled(), " windows of activations lay on disk between layers"));
  }
}

/// Costs get half of what is left beside the walk and the packing; hidden states the rest.
void CalibratedRun::walk_back(const CalibrationWindows& windows, CalibrationOptions& options) {
  GradientOptions back{.max_memory = options.max_memory, .spill_at = options.spill_at};
  int64_t kept = std::numeric_limits<int64_t>::max();
  if (options.max_memory > 0) {
    const int64_t fixed = std::max(gradient_memory(model_, windows.length, false),
                                   calibration_memory(model_, windows.length, true) + options.reserved_memory);
    kept = std::min(std::max<int64_t>(0, options.max_memory - fixed) / 2, output_costs_bytes(model_.config));
    back.reserved_memory = kept;
    options.reserved_memory += kept;
  }
  costs_.emplace(model_, windows, back, kept);
}

CalibratedRun::~CalibratedRun() = default;

CalibratedLayer CalibratedRun::next() {
  ensure(layer_ < model_.config.layers, "CalibratedRun: there is no further layer");
  const bool on_gpu = gpu_ != nullptr && packs_on_gpu(model_.config, layer_, packing_);
  const auto statistics = calibration_ ? calibration_->next(on_gpu) : file_->load(layer_);
  const LayerCosts costs = costs_ ? costs_->layer(layer_) : LayerCosts{};
  CalibratedLayer layer = quantize_layer(model_, layer_, statistics, packing_, on_gpu ? gpu_ : nullptr, costs);
  ++layer_;
  notes_.insert(notes_.end(), layer.notes.begin(), layer.notes.end());
  experts_.add(layer.experts);
  if (layer_ == model_.config.layers && experts_.idle + experts_.scarce > 0) {
    notes_.push_back(concat("of ", experts_.all, " experts ", experts_.idle,
                            " were sent no token of the calibration text and are rounded as they are, ",
                            experts_.scarce, " fewer than they have input channels; give more text"));
  }
  return layer;
}

CalibratedCost calibrated_cost(const CalibratedRequest& request, const model::OpenedModel& model,
                               const SchemeOf& scheme_of, const quantize::Steps& steps) {
  check_sources(request);
  CalibratedCost cost;
  cost.memory = calibration_memory(model, request.text.length, true) + calibrated_memory(model, scheme_of, steps);
  if (request.statistics.empty()) {
    cost.memory +=
        request.text.samples * request.text.length * model.config.hidden_size * static_cast<int64_t>(sizeof(float));
    if (request.max_memory > 0) cost.memory = std::min(cost.memory, request.max_memory);
  }
  cost.seconds = multiplications(request, model, scheme_of, steps) / measured_rate();
  return cost;
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

std::string to_text(const std::vector<GroupReport>& groups) {
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
