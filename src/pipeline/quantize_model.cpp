#include "pipeline/quantize_model.h"

#include <algorithm>
#include <cmath>
#include <future>
#include <iterator>
#include <map>
#include <memory>
#include <set>

#include "core/buffer.h"
#include "core/convert.h"
#include "core/error.h"
#include "core/float_formats.h"
#include "core/parallel.h"
#include "core/parallel_in_turn.h"
#include "core/progress.h"
#include "core/rng.h"
#include "core/stopwatch.h"
#include "core/text.h"
#include "io/output.h"
#include "model/layer_gradient.h"
#include "model/model.h"
#include "model/opened.h"
#include "model/stored_sizes.h"
#include "pipeline/allocate.h"
#include "pipeline/calibrated_cost.h"
#include "pipeline/distill_output.h"
#include "pipeline/kept_values.h"
#include "pipeline/layer_cuda.h"
#include "pipeline/output_rules.h"
#include "pipeline/quantize_record.h"
#include "pipeline/quantize_units.h"
#include "pipeline/rank_cost.h"
#include "pipeline/run_cost.h"
#include "pipeline/scale_folding.h"
#include "pipeline/select_tensors.h"
#include "pipeline/shared_factor.h"
#include "pipeline/shared_output.h"
#include "quantize/rounding.h"

namespace w4q::pipeline {
namespace {

using model::OpenedModel;
using quantize::StepKind;

/// A preset goes as far as statistics do; who names a step that reads the text hears that there is none.
bool statistics_alone(const QuantizeRequest& request) {
  return !request.preset.empty() && request.calibrated && request.calibrated->text.empty() &&
         !request.calibrated->statistics.empty();
}

/// Whether the head is packed to EXL3, which stores it beside the embeddings even where these are tied to it.
bool has_own_head(const QuantizeRequest& request, const OpenedModel& source) {
  if (!request.recipe) return request.lm_head && request.scheme.family == formats::SchemeFamily::exl3;
  const auto* rule = request.recipe->find(source.config.names.head);
  return rule != nullptr && rule->scheme && rule->scheme->family == formats::SchemeFamily::exl3;
}

OpenedModel open_source(const QuantizeRequest& request) {
  OpenedModel source = model::open_plain_model(request.model, request.options.steps.fold_seed());
  return has_own_head(request, source) ? model::untied(std::move(source)) : source;
}

/// A preset leaves out what a model has no way for; who names such a step hears that there is none.
void settle_gradients(QuantizeRequest& request, const OpenedModel& source) {
  auto& steps = request.options.steps;
  if (source.folded && !request.preset.empty()) steps.remove(StepKind::distill_norms);
  if (source.folded && steps.has(StepKind::distill_norms)) {
    throw Error(ErrorCode::bad_argument, "distill and fold do not go together")
        .detail("where rotations are folded into a model its norms have no weights of their own");
  }
  if (request.preset.empty()) return model::require_gradients(source.config, "gradients (feedback2, distill)");
  if (!model::obstacle_to_gradients(source.config).empty()) {
    steps = steps.without(&quantize::StepRow::needs_gradients);
  }
}

/// Steps of trellises that only the CPU has, which would take a GPU's place for minutes or hours.
constexpr StepKind steps_of_rings[] = {StepKind::feedback_outputs, StepKind::sweeps};

/// Of these, what the preset has and the device has not; who names such a step beside a preset without it gets it.
std::vector<StepKind> rings_left_out(const QuantizeRequest& request) {
  std::vector<StepKind> result;
  const bool on_gpu = request.gpu != nullptr && request.scheme.family == formats::SchemeFamily::trellis;
  if (!on_gpu || request.preset.empty()) return result;
  const auto wanted = quantize::preset_steps(request.preset, request.scheme);
  std::ranges::copy_if(steps_of_rings, std::back_inserter(result), [&](StepKind kind) { return wanted.has(kind); });
  return result;
}

/// The request with what follows from the model and the device: a preset leaves out what it has no way for there.
QuantizeRequest settled(QuantizeRequest request, const OpenedModel& source) {
  const bool needs_statistics = request.options.steps.any(&quantize::StepRow::needs_statistics);
  if (needs_statistics && !request.calibrated) request.calibrated.emplace();  // which will say what it lacks
  if (request.calibrated) {
    model::require_decoder(source.config, "calibration");
    request.calibrated->text = fitted(std::move(request.calibrated->text), source.config);
  }
  if (statistics_alone(request)) request.options.steps = request.options.steps.without(&quantize::StepRow::needs_text);
  for (const StepKind kind : rings_left_out(request)) request.options.steps.remove(kind);
  if (request.options.steps.any(&quantize::StepRow::needs_gradients)) settle_gradients(request, source);
  // The rotation of a rotated scheme belongs to it, whatever is folded.
  if (auto* rotate = request.options.steps.find(StepKind::rotate)) {
    rotate->folded = source.folded.has_value() && request.scheme.family != formats::SchemeFamily::rotated;
  }
  return request;
}

using Quantizer = std::function<quantize::QuantizeResult(const TensorView&, const formats::Scheme&,
                                                         const quantize::QuantizeOptions&)>;

/// The quantizer as it runs on the chosen device; on the CPU where the method has no other way or `on_gpu` is false.
Quantizer run_of(const QuantizeRequest& request, const formats::Scheme& scheme, bool on_gpu = true) {
  // What calibration does not see, embeddings and head, is rounded as it is, and so is what a recipe names and what is
  // none of the method's schemes.
  const bool rounds = request.calibrated || request.recipe || scheme.family != request.scheme.family;
  const quantize::QuantizerRow& row =
      rounds ? quantize::rounding_quantizer(scheme) : quantize::quantizer_row(request.method);
  if (!on_gpu || request.gpu == nullptr || row.run_cuda == nullptr) return row.run;
  return [run = row.run_cuda, gpu = request.gpu](const TensorView& weight, const formats::Scheme& to,
                                                 const quantize::QuantizeOptions& options) {
    return run(weight, to, options, *gpu);
  };
}

/// A recipe's schemes take the options as they are: a step that means nothing to one of them is a mistake.
quantize::QuantizeOptions options_of(const QuantizeRequest& request, const formats::Scheme& scheme) {
  return request.recipe ? request.options : quantize::options_of_pass(request.options, request.scheme, scheme);
}

/// The units that are worked on side by side take no more than this much.
constexpr int64_t room_beside = int64_t{512} << 20;

/// Bytes of a tensor while it is worked on. Beside its planes a packed one needs at most one fp32 value per block of 32.
int64_t bytes_at_work(const TensorPlan& tensor) {
  return tensor.bytes_before + (tensor.scheme ? tensor.bytes_after + tensor.weights() / 8 : 0);
}

/// Whether a tensor is worked on by one thread, others beside it: one so small that the work of a thread is less than
/// what it costs to share it, with other threads or with a GPU. So are the thousands of experts of a mixture, where each
/// weight is rounded by itself or carried along. Searches have work enough to share.
bool goes_beside_others(const TensorPlan& tensor, const OpenedModel& source, const QuantizeRequest& request) {
  constexpr int64_t largest = int64_t{16} << 20;
  if (bytes_at_work(tensor) > std::min(largest, room_beside / threads())) return false;
  const io::Checkpoint& tensors = source.folder.tensors;
  if (tensors.stored_dtype(tensor.name) != tensors.at(tensor.name).dtype) return false;  // computed, on all threads
  if (!tensor.scheme) return true;
  using formats::SchemeFamily;
  const auto family = tensor.scheme->family;
  const bool light =
      family == SchemeFamily::kbit || family == SchemeFamily::integer || family == SchemeFamily::small_float;
  return light && tensor.is_plain() && !options_of(request, *tensor.scheme).searches();
}

/// Seconds per weight of this method on this machine with the threads in use, measured on a small random matrix; `beside`: on one
/// for each thread.
double sample_seconds_per_weight(const QuantizeRequest& request, const formats::Scheme& scheme, bool beside) {
  // A search over rings of bits takes microseconds for a weight.
  const bool slow = formats::shares_bits(scheme);
  const bool fed_back_by_cpu =
      slow && request.options.steps.has(StepKind::feedback) && !LayerCuda::takes(scheme, request.options);
  const auto run = run_of(request, scheme, !beside && !fed_back_by_cpu);
  const int64_t count = beside ? threads() : 1;
  const int64_t rows = slow ? 256 : 512, cols = slow ? 512 : 2048;
  std::vector<uint16_t> values(static_cast<size_t>(rows * cols));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = bf16_from_f32(static_cast<float>(random_uniform(1, i) - 0.5) * 0.1f);
  const TensorView view{"sample", DType::bf16, {rows, cols}, bytes_of(values)};
  double best = 1e9;
  const int repeats = slow || request.options.searches() ? 1 : 3;
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const Stopwatch watch;
    parallel_in_turn(count, [&](int64_t) { run(view, scheme, options_of(request, scheme)); });
    best = std::min(best, watch.seconds());
  }
  return best / static_cast<double>(count * rows * cols);
}

/// Memory that tensors leave to one another where they are computed when they are loaded, as of small floats: that of the
/// largest and, to some limit, of others.
size_t widened_bytes(const Plan& plan, const OpenedModel& source) {
  constexpr size_t least = size_t{256} << 20;
  const io::Checkpoint& tensors = source.folder.tensors;
  size_t largest = 0;
  for (const auto& tensor : plan.tensors) {
    const bool widens = tensor.scheme && tensors.stored_dtype(tensor.name) != tensors.at(tensor.name).dtype;
    if (widens) largest = std::max(largest, static_cast<size_t>(tensors.at(tensor.name).size()));
  }
  return largest == 0 ? 0 : std::max(largest, least);
}

/// Of the tensors that are worked on side by side as many as there are threads.
int64_t bytes_beside(const Plan& plan, const OpenedModel& source, const QuantizeRequest& request) {
  int64_t largest = 0, count = 0;
  for (const auto& tensor : plan.tensors) {
    if (!goes_beside_others(tensor, source, request)) continue;
    largest = std::max(largest, bytes_at_work(tensor));
    ++count;
  }
  return std::min<int64_t>(count, threads()) * largest;
}

void estimate_tensors(Plan& plan, const OpenedModel& source, const QuantizeRequest& request) {
  int64_t largest = 0;
  for (const auto& tensor : plan.tensors) {
    if (!tensor.scheme && !request.options.steps.has(StepKind::fold)) continue;  // copied a piece at a time
    int64_t bytes = bytes_at_work(tensor);
    if (!tensor.is_plain()) bytes += 4 * tensor.weights();  // rotated, or what is left over
    if (request.options.steps.has(StepKind::fold)) bytes += 4 * tensor.weights();
    largest = std::max(largest, bytes);
  }
  largest = std::max(largest, bytes_beside(plan, source, request));
  plan.tensor_memory = base_memory + largest + static_cast<int64_t>(widened_bytes(plan, source));
}

/// Of the run that `request` asks for, what was chosen for it before included.
void estimate(Plan& plan, const OpenedModel& source, const QuantizeRequest& request) {
  estimate_tensors(plan, source, request);
  plan.expected_memory = plan.tensor_memory;
  const auto first = std::find_if(plan.tensors.begin(), plan.tensors.end(), [](const auto& t) { return t.scheme; });
  if (first == plan.tensors.end()) return;
  std::vector<std::pair<quantize::Steps, double>> known;
  MachineSpeed speed;
  speed.seconds_per_weight = [&](const QuantizeRequest& other) {
    const auto& steps = other.options.steps;
    const auto found = std::ranges::find(known, steps, &std::pair<quantize::Steps, double>::first);
    if (found != known.end()) return found->second;
    return known
        .emplace_back(steps,
                      sample_seconds_per_weight(other, *first->scheme, goes_beside_others(*first, source, other)))
        .second;
  };
  double rate = 0;
  speed.products = [&] { return rate = rate == 0 ? measured_product_rate() : rate; };
  if (plan.allocation) plan.costs.push_back({"choosing bits", plan.allocation->seconds, plan.allocation->memory});
  const auto parts = run_costs(source, request, plan, speed);
  plan.costs.insert(plan.costs.end(), parts.begin(), parts.end());
  for (const auto& part : plan.costs) {
    plan.expected_seconds += part.seconds;
    plan.expected_memory = std::max(plan.expected_memory, part.memory);
  }
  if (request.preset.empty()) return;
  const auto settle = [&](QuantizeRequest other) { return settled(std::move(other), source); };
  plan.presets = preset_costs(source, request, plan, speed, settle);
}

/// The schemes of a plan by module path.
std::map<std::string, formats::Scheme, std::less<>> schemes_of(const Plan& plan) {
  std::map<std::string, formats::Scheme, std::less<>> result;
  for (const auto& tensor : plan.tensors) {
    if (tensor.scheme) result.emplace(model::module_path(tensor.name), *tensor.scheme);
  }
  return result;
}

SchemeOf lookup(const Plan& plan) {
  return [schemes = schemes_of(plan)](std::string_view module) -> std::optional<formats::Scheme> {
    const auto found = schemes.find(module);
    return found == schemes.end() ? std::nullopt : std::optional(found->second);
  };
}

/// Modules whose input scale will be stored.
ScaledModules input_scales(const OpenedModel& source, const QuantizeRequest& request, const Plan& plan) {
  if (!request.calibrated) return {};
  const auto names = linears_with_input_scale(source.config, lookup(plan), request.options.steps);
  return {names.begin(), names.end()};
}

/// The cheapest preset that has the same steps; the one itself: none.
std::string cheapest_alike(const std::string& preset, const formats::Scheme& scheme) {
  for (auto& name : quantize::preset_names()) {
    if (name == preset || quantize::preset_steps(name, scheme) == quantize::preset_steps(preset, scheme)) return name;
  }
  return preset;
}

void note_same_preset(const QuantizeRequest& request, Plan& plan) {
  if (request.preset.empty() || request.recipe) return;
  const std::string same = cheapest_alike(request.preset, request.scheme);
  if (same == request.preset) return;
  plan.notes.push_back(
      concat("--quality ", request.preset, " has the steps of ", same, " for ", formats::to_string(request.scheme)));
}

void note_rings_left_out(const std::vector<StepKind>& kinds, Plan& plan) {
  if (kinds.empty()) return;
  std::vector<std::string> names;
  for (const StepKind kind : kinds) names.emplace_back(quantize::step_row(kind).name);
  plan.notes.push_back(concat("without ", join(names, ", "),
                              ": of trellises a GPU has no way for them; --quality best --feedback2 --sweeps has the "
                              "CPU make them"));
}

void note_what_is_left_out(const QuantizeRequest& request, const OpenedModel& source, Plan& plan) {
  if (request.preset.empty()) return;
  const auto rings = rings_left_out(request);
  note_rings_left_out(rings, plan);
  std::vector<std::string> names;
  for (const auto& step : quantize::preset_steps(request.preset, request.scheme)) {
    const auto& row = quantize::step_row(step.kind);
    if (std::ranges::count(rings, step.kind) > 0) continue;
    if (row.needs_text && !request.options.steps.has(step.kind)) names.emplace_back(row.name);
  }
  if (names.empty()) return;
  const std::string obstacle = model::obstacle_to_gradients(source.config);
  const std::string why = statistics_alone(request) ? ", which read the calibration text; give --calib too"
                          : obstacle.empty()        ? ": a folded model's norms have no weights of their own"
                                             : concat(": ", obstacle, ", through which gradients find no way back");
  plan.notes.push_back(concat("without ", join(names, ", "), why));
}

/// Targets want both models to have the same tokens at the same place.
void note_experts_without_targets(const QuantizeRequest& request, const OpenedModel& source, Plan& plan) {
  if (!request.options.steps.has(StepKind::asymmetric) || source.config.mixture.experts == 0) return;
  const auto count = std::ranges::count_if(plan.tensors, [&](const TensorPlan& tensor) {
    if (!tensor.scheme) return false;
    const auto place = model::find_linear(source.config, model::module_path(tensor.name));
    return place && place->group.expert;
  });
  if (count == 0) return;
  plan.notes.push_back(concat("without asym in ", count, " linears of experts: ",
                              "behind quantized layers the router may send them other tokens"));
}

Plan make_plan(const OpenedModel& source, const QuantizeRequest& request) {
  Plan plan = select_tensors(source, request);
  const auto scaled = input_scales(source, request, plan);
  for (auto& tensor : plan.tensors) {
    if (scaled.contains(model::module_path(tensor.name))) tensor.bytes_after += tensor.shape[1] * 4;
  }
  if (plan.packed_tensors() == 0 && !request.options.steps.has(StepKind::fold)) {
    throw Error(ErrorCode::bad_argument, "nothing to quantize: every tensor would be kept in 16 bit")
        .hint("check the recipe and --keep");
  }
  for (const auto& tensor : plan.tensors) {
    if (!request.calibrated || !tensor.scheme) continue;
    const auto place = model::find_linear(source.config, model::module_path(tensor.name));
    if (!place || tensor.rotation == run_time_rotation(request.options, place->group)) continue;
    throw Error(ErrorCode::unsupported, concat(printable(tensor.name), ": ", tensor.scheme_text(),
                                               " cannot be quantized from calibration activations"))
        .detail("the first passes of all layers have one rotation then");
  }
  plan.steps = steps_of(request);
  note_what_is_left_out(request, source, plan);
  note_same_preset(request, plan);
  note_experts_without_targets(request, source, plan);
  for (const auto& warning : source.folder.tensors.warnings()) plan.notes.push_back(warning);
  for (const auto& warning : source.config.warnings) plan.notes.push_back(warning);
  plan.notes.insert(plan.notes.end(), source.notes.begin(), source.notes.end());
  return plan;
}

std::vector<io::PlannedTensor> planned_output(const Plan& plan, const ScaledModules& scaled,
                                              checkpoint::QuantizationConfig& quantization) {
  std::vector<io::PlannedTensor> result;
  for (const auto& tensor : plan.tensors) {
    for (auto& planned : planned_of(tensor, scaled)) result.push_back(std::move(planned));
    if (tensor.scheme) quantization.linears.emplace(model::module_path(tensor.name), packed_info(tensor, scaled));
  }
  return result;
}

void write_planes(const std::string& module, size_t pass, const formats::PackedWeight& weight,
                  io::CheckpointWriter& writer) {
  for (const auto& plane : weight.planes) {
    writer.write(checkpoint::plane_name(module, pass, plane.spec.role), plane.bytes.bytes());
  }
}

quantize::PassesResult quantize_passes(const TensorPlan& tensor, const TensorView& weight,
                                       const QuantizeRequest& request, float factor, bool on_gpu) {
  const auto run = [&](const TensorView& view, const formats::Scheme& scheme) {
    auto options = options_of(request, scheme);
    options.tensor_factor = factor;
    return run_of(request, scheme, on_gpu)(view, scheme, options);
  };
  if (tensor.is_plain()) {
    auto quantized = run(weight, *tensor.scheme);
    quantize::PassesResult result{{tensor.name, tensor.dtype, {}}, quantized.stats};
    result.linear.passes.push_back(std::move(quantized.weight));
    return result;
  }
  std::vector<quantize::Pass> passes{{*tensor.scheme, tensor.rotation}};
  for (const auto& pass : tensor.residual) passes.push_back({pass.scheme, pass.rotation});
  return quantize::quantize_passes(weight, passes, run);
}

/// Quantizes one tensor, writes its planes, and measures the error with the decoder that will read them. `alone`: by all
/// threads, or by the GPU; else by this thread, others beside it.
QuantizedTensor quantize_tensor(const TensorPlan& tensor, const OpenedModel& source, const QuantizeRequest& request,
                                SharedFactors& factors, io::CheckpointWriter& writer, bool alone) {
  const std::string module(model::module_path(tensor.name));
  auto loaded = std::make_shared<const io::LoadedTensor>(source.folder.tensors.load(tensor.name));
  QuantizedTensor result{.name = tensor.name, .scheme = tensor.scheme_text(), .stats = {}, .error = {}, .output = {}};
  const Stopwatch watch;
  auto quantized = quantize_passes(tensor, loaded->view(), request, factors.of(module), alone);
  result.seconds = watch.seconds();
  result.stats = quantized.stats;
  auto packed = std::make_shared<formats::PackedLinear>(std::move(quantized.linear));
  packed->name = module;
  // What waits for the file system does so beside what computes, where threads are to be had.
  auto written = std::async(alone ? std::launch::async : std::launch::deferred, [&] {
    for (size_t pass = 0; pass < packed->passes.size(); ++pass)
      write_planes(module, pass, packed->passes[pass], writer);
  });
  const kernels::LinearWeight reference{
      module, tensor.shape[0], tensor.shape[1], kernels::LinearWeight::Dense{loaded->view(), loaded}, {}};
  const kernels::LinearWeight candidate{
      module, tensor.shape[0], tensor.shape[1], std::shared_ptr<const formats::PackedLinear>(packed), {}};
  result.error = model::compare_weights(reference, candidate);
  written.get();
  return result;
}

/// An integer scheme without a scale for its largest weights would cut them off: an outlier is what it must not lose.
void refuse_saturated(const TensorPlan& tensor, const quantize::QuantizeStats& stats, const OpenedModel& source) {
  if (tensor.scheme->family != formats::SchemeFamily::integer || stats.saturated_scales == 0) return;
  const auto loaded = source.folder.tensors.load(tensor.name);
  const auto element = static_cast<size_t>(dtype_bits(loaded->dtype)) / 8;
  const int64_t k = tensor.shape[1];
  std::vector<float> values(static_cast<size_t>(k));
  float largest = 0;
  int64_t row = 0, column = 0;
  for (int64_t r = 0; r < tensor.shape[0]; ++r) {
    widen(loaded->bytes.subspan(static_cast<size_t>(r * k) * element, values.size() * element), loaded->dtype, values);
    const auto found = std::ranges::max_element(values, {}, [](float value) { return std::abs(value); });
    if (std::abs(*found) <= std::abs(largest)) continue;
    largest = *found, row = r, column = found - values.begin();
  }
  formats::Scheme wider = *tensor.scheme;
  wider.scale = formats::ScaleType::bf16;
  throw Error(ErrorCode::bad_file, concat(printable(tensor.name), ": ", stats.saturated_scales, " of ", stats.blocks,
                                          " scales of ", formats::to_string(*tensor.scheme), " would be too large"))
      .detail(concat("the largest weight is ", largest, " at row ", row, ", column ", column))
      .hint(concat("keep this tensor at 16 bit (--keep)",
                   wider == *tensor.scheme ? "" : concat(", or choose ", formats::to_string(wider))));
}

/// Quantizes a calibrated layer at a time as the tensors of the plan, which stand in model order, come to it.
class CalibratedTensors {
 public:
  CalibratedTensors(const OpenedModel& source, const QuantizeRequest& request, const Plan& plan, LayerOwners owners)
      : run_(*request.calibrated, source, {lookup(plan), request.options, residual_of(plan)}, request.output,
             std::move(owners)) {}

  const std::vector<std::string>& notes() const noexcept { return run_.notes(); }
  const std::string& products() const noexcept { return run_.products(); }
  const CalibrationWindows& windows() const noexcept { return run_.windows(); }
  const std::shared_ptr<quantize::CudaWork>& gpu() const noexcept { return run_.gpu(); }

  /// Quantizes a layer; they come in order.
  void run(int64_t layer, QuantizeRecord& record) {
    layer_ = run_.layer(layer);
    record.groups = layer_.groups;
    record.rescaled = layer_.rescaled;
    record.notes = layer_.notes;
    record.experts = layer_.experts;
  }

  void finish() {
    run_.finish();
    layer_ = {};
  }

  /// Writes `tensor` if it is one of the layer that was run; false when it is not.
  bool write(const TensorPlan& tensor, QuantizeRecord& record, io::CheckpointWriter& writer) {
    const auto kept = layer_.tensors.find(tensor.name);
    if (kept != layer_.tensors.end()) {
      writer.write(tensor.name, kept->second.bytes());
      return true;
    }
    const std::string module(model::module_path(tensor.name));
    const auto found = layer_.linears.find(module);
    if (!tensor.scheme || found == layer_.linears.end()) return false;
    const CalibratedLinear& linear = found->second;
    const auto& passes = linear.linear.passes;
    for (size_t pass = 0; pass < passes.size(); ++pass) write_planes(module, pass, passes[pass], writer);
    if (!linear.input_scale.empty()) writer.write(checkpoint::input_scale_name(module), bytes_of(linear.input_scale));
    record.tensors.push_back({.name = tensor.name,
                              .scheme = tensor.scheme_text(),
                              .stats = linear.stats,
                              .error = linear.error,
                              .output = linear.output,
                              .seconds = linear.seconds});
    return true;
  }

 private:
  static decltype(CalibratedPacking::residual) residual_of(const Plan& plan) {
    decltype(CalibratedPacking::residual) result;
    for (const auto& tensor : plan.tensors) {
      auto& passes = result[std::string(model::module_path(tensor.name))];
      for (const auto& pass : tensor.residual) passes.push_back({pass.scheme, pass.rotation});
    }
    return result;
  }

  CalibratedRun run_;
  CalibratedLayer layer_;  // the latest
};

/// The parts of the work that are this rank's, one after the other.
class Quantizing {
 public:
  Quantizing(const OpenedModel& source, const QuantizeRequest& request, const Plan& plan,
             const std::vector<PlanUnit>& units, SharedWork& work, io::CheckpointWriter& writer)
      : source_(source),
        request_(request),
        plan_(plan),
        units_(units),
        work_(work),
        writer_(writer),
        factors_(source, lookup(plan)),
        progress_("quantize", work.cost(), "bytes") {
    if (request.calibrated) calibrated_.emplace(source, request, plan, owners());
  }

  /// Layers first: ranks walk through them together.
  void run() {
    const BufferReuse reuse(widened_bytes(plan_, source_));
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      if (units_[unit].layer && work_.mine(unit)) run(unit);
    }
    if (calibrated_) calibrated_->finish();
    std::vector<size_t> beside;  // one another, in their order
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      if (units_[unit].layer || !work_.mine(unit)) continue;
      if (goes_beside_others(*units_[unit].tensors.front(), source_, request_)) {
        beside.push_back(unit);
        continue;
      }
      run_beside(beside);
      run(unit);
    }
    run_beside(beside);
  }

  const std::optional<CalibratedTensors>& calibrated() const noexcept { return calibrated_; }

 private:
  LayerOwners owners() const {
    LayerOwners owners{request_.sharing.ranks, std::vector<int>(static_cast<size_t>(source_.config.layers), -1)};
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      if (units_[unit].layer) owners.of[static_cast<size_t>(*units_[unit].layer)] = work_.owner(unit);
    }
    return owners;
  }

  /// Units of one tensor each, one thread to each.
  void run_beside(std::vector<size_t>& units) {
    parallel_in_turn(static_cast<int64_t>(units.size()), [&](int64_t i) { run(units[static_cast<size_t>(i)], false); });
    units.clear();
  }

  void run(size_t unit, bool alone = true) {
    QuantizeRecord record;
    if (units_[unit].layer) calibrated_->run(*units_[unit].layer, record);
    for (const TensorPlan* tensor : units_[unit].tensors) {
      write(*tensor, record, alone);
      progress_.advance(tensor->bytes_before);
    }
    work_.done(unit, to_json(record));
  }

  void write(const TensorPlan& tensor, QuantizeRecord& record, bool alone) {
    if (calibrated_ && calibrated_->write(tensor, record, writer_)) {
    } else if (tensor.scheme) {
      record.tensors.push_back(quantize_tensor(tensor, source_, request_, factors_, writer_, alone));
    } else {
      keep(tensor.name, record);
    }
    if (tensor.scheme) refuse_saturated(tensor, record.tensors.back().stats, source_);
  }

  void keep(const std::string& name, QuantizeRecord& record) {
    const auto& tensors = source_.folder.tensors;
    KeptValues values(tensors.stored_dtype(name));
    writer_.copy(tensors, name, [&](int64_t offset, auto bytes) { values.add(offset, bytes); });
    if (auto note = values.note(name)) record.notes.push_back(std::move(*note));
  }

  const OpenedModel& source_;
  const QuantizeRequest& request_;
  const Plan& plan_;
  const std::vector<PlanUnit>& units_;
  SharedWork& work_;
  io::CheckpointWriter& writer_;
  SharedFactors factors_;
  std::optional<CalibratedTensors> calibrated_;
  Progress progress_;
};

/// What the records of all parts say together.
void add_records(const std::vector<io::Json>& records, QuantizeReport& report,
                 checkpoint::QuantizationConfig& quantization) {
  ExpertCounts experts;
  for (const auto& json : records) {
    QuantizeRecord record = quantize_record(json);
    std::ranges::move(record.tensors, std::back_inserter(report.tensors));
    std::ranges::move(record.groups, std::back_inserter(report.groups));
    std::ranges::move(record.notes, std::back_inserter(report.plan.notes));
    quantization.rescaled.merge(record.rescaled);
    experts.add(record.experts);
  }
  for (const auto& tensor : report.tensors) report.total.add(tensor.error);
  if (auto note = describe(experts); !note.empty()) report.plan.notes.push_back(std::move(note));
}

/// The norms that were distilled, where that is asked for, of a model that is written.
std::vector<std::string> distill(const OpenedModel& source, const QuantizeRequest& request,
                                 const std::optional<CalibratedTensors>& calibrated,
                                 const checkpoint::QuantizationConfig& quantization, io::CheckpointWriter& writer,
                                 QuantizeReport& report) {
  const auto* step = request.options.steps.find(StepKind::distill_norms);
  if (step == nullptr || !calibrated) return {};
  const DistillOptions how{.steps = step->rounds,
                           .max_memory = request.calibrated->max_memory,
                           .spill_at = request.output,
                           .gpu = calibrated->gpu()};
  auto distilled = distill_output(source, calibrated->windows(), how, quantization, writer);
  report.plan.notes.push_back(std::move(distilled.note));
  return std::move(distilled.tuned);
}

/// The request with bits chosen where that is asked for.
Allocated chosen(const OpenedModel& source, const QuantizeRequest& request) {
  if (request.allocation) return allocate(source, request);
  Allocated same;
  same.request = request;
  return same;
}

void add_allocation(Plan& plan, const QuantizeRequest& wanted, AllocationReport report) {
  plan.notes.insert(plan.notes.end(), report.notes.begin(), report.notes.end());
  plan.allocation = std::move(report);
  plan.steps = steps_of(wanted);
}

/// config.json and what else stands beside the weights. A model that was folded and not packed is marked as ours.
std::vector<std::string> write_companions(const OpenedModel& source, const QuantizeRequest& request,
                                          const checkpoint::QuantizationConfig& quantization,
                                          const std::string& products, const std::vector<std::string>& tuned,
                                          const std::filesystem::path& to) {
  const auto& from = source.folder.path;
  io::Json config = source.folder.config;
  if (!tuned.empty()) config[std::string(checkpoint::tuned_norms_key)] = tuned;
  if (request.options.steps.has(StepKind::asymmetric)) config[std::string(checkpoint::moved_targets_key)] = true;
  if (!quantization.linears.empty()) {
    if (!products.empty()) config["quantization_config"] = {{std::string(products_mark), products}};
    return carry_companions(from, to, std::move(config), quantization, request.write);
  }
  config[std::string(conversion_mark)] = "w4q";
  return carry_companions(from, to, config, request.write);
}

}  // namespace

std::vector<std::filesystem::path> inputs_of(const QuantizeRequest& request) {
  std::vector<std::filesystem::path> inputs = request.read_files;
  inputs.push_back(request.model);
  if (const auto& calibrated = request.calibrated) {
    for (const auto& path :
         {calibrated->text.text, calibrated->text.ids, calibrated->text.chat.path, calibrated->statistics}) {
      if (!path.empty()) inputs.push_back(path);
    }
  }
  return inputs;
}

Plan plan_quantize(const QuantizeRequest& given) {
  const OpenedModel source = open_source(given);
  const QuantizeRequest wanted = settled(given, source);
  Allocated allocated = chosen(source, wanted);
  const QuantizeRequest& request = allocated.request;
  Plan plan = make_plan(source, request);
  if (wanted.allocation) add_allocation(plan, wanted, std::move(allocated.report));
  const bool cuts = wanted.calibrated && wanted.calibrated->text.is_cut;
  if (cuts) plan.notes.push_back("calibrated with " + describe_self(wanted.calibrated->text));
  estimate(plan, source, request);
  if (request.planned_ranks > 0) plan.ranks = plan_ranks(source, request, plan, request.planned_ranks);
  return plan;
}

QuantizeReport quantize_model(const QuantizeRequest& given) {
  const Stopwatch watch;
  const OpenedModel source = open_source(given);
  checkpoint::check_digests(given.model, source.folder.tensors);
  const QuantizeRequest wanted = settled(given, source);
  Sharing sharing = wanted.sharing;
  if (wanted.calibrated) sharing.products = products_on(wanted.calibrated->gpu.get());
  SharedFolder output(sharing, wanted.output, wanted.overwrite, inputs_of(wanted), former_outputs(wanted.model));
  Allocated allocated = chosen(source, wanted);
  const QuantizeRequest& request = allocated.request;
  QuantizeReport report;
  report.plan = make_plan(source, request);
  if (wanted.allocation) {
    add_allocation(report.plan, wanted, std::move(allocated.report));
    // The run itself reads statistics that were made for the choice.
    const bool wrote = wanted.calibrated && wanted.calibrated->text.self;
    if (wrote) report.plan.notes.push_back("calibrated with " + describe_self(wanted.calibrated->text));
  }
  checkpoint::QuantizationConfig quantization;
  quantization.method = request.method;
  const auto scaled = input_scales(source, request, report.plan);
  const auto planned = planned_output(report.plan, scaled, quantization);
  const auto units = units_of(report.plan, source.config, request.calibrated.has_value());

  io::CheckpointWriter writer(output.staging(), planned, with_companions(request.write, given.model),
                              output.shard_files());
  SharedWork work(output, writer, work_of(units, scaled));
  std::optional<Quantizing> quantizing;
  quantizing.emplace(source, request, report.plan, units, work, writer).run();
  const auto records = work.gather();
  const auto& calibrated = quantizing->calibrated();
  std::vector<std::string> tuned;
  if (output.ranks().first()) {
    add_records(records, report, quantization);
    tuned = distill(source, request, calibrated, quantization, writer, report);
    if (calibrated) add_notes(report, calibrated->notes());
    add_notes(report, output.notes());
  }
  report =
      finished(std::move(report), writer, output, watch, checkpoint::bases_through(source.folder), [&](const auto& to) {
        return write_companions(source, request, quantization, calibrated ? calibrated->products() : "", tuned, to);
      });
  quantizing.reset();
  if (wanted.allocation) output.ranks().barrier();  // nobody reads the statistics any more, which go now
  return report;
}

}  // namespace w4q::pipeline
