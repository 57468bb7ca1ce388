#include "quantize/group_cuda.h"

#include "core/error.h"
#include "formats/integer.h"
#include "quantize/feedback.h"
#include "quantize/integer_rows_cuda.h"
#include "quantize/kbit.h"
#include "quantize/kbit_search_cuda.h"
#include "quantize/norm_calibration.h"
#include "quantize/trellis.h"
#include "quantize/weight_cuda.h"

namespace w4q::quantize {

using formats::SchemeFamily;

GroupCuda::Measured GroupCuda::add(const TensorView& weight, const formats::Scheme& scheme,
                                   const QuantizeOptions& options) {
  ensure(takes(scheme), "GroupCuda: no such scheme");
  Linear linear{.name = std::string(weight.name),
                .weight = upload_weight(work_, weight),
                .n = weight.shape[0],
                .k = weight.shape[1],
                .scheme = scheme,
                .clip = options.clip(),
                .table = {}};
  if (scheme.family == SchemeFamily::kbit) linear.table = chosen_table(scheme, options);
  linears_.push_back(std::move(linear));
  Linear& own = linears_.back();
  Measured measured;
  measured.power = gram_->error(own.weight.as<float>(), own.n);
  auto* const difference = work_.errors.get<float>(own.n * own.k);
  rounding_error_cuda(work_, view(own), own.k, nullptr, difference);
  measured.plain = gram_->error(difference, own.n);
  return measured;
}

AwqCudaLinear GroupCuda::view(Linear& linear) const {
  return {linear.weight.as<float>(), linear.n, linear.scheme, linear.clip, linear.table};
}

AwqScales GroupCuda::search(const AwqInput& input, double plain_error, const formats::InputRotation* rotation) {
  std::vector<AwqCudaLinear> views;
  for (Linear& linear : linears_) views.push_back(view(linear));
  if (rotation == nullptr) return search_scales_cuda(work_, views, input, *gram_, plain_error);
  const RotationCuda on_gpu(work_, *rotation);
  return search_scales_cuda(work_, views, input, *gram_, plain_error, &on_gpu);
}

void GroupCuda::follow(std::shared_ptr<GramCuda> gram, DriftCuda drift) {
  ensure(factors_.empty() && sweeps_.empty(), "GroupCuda: linears are packed already");
  gram_ = std::move(gram);
  drift_.emplace(std::move(drift));
}

void GroupCuda::scale(std::span<const float> scales) {
  gram_->divide(scales);
  if (drift_) drift_->divide(scales);
  const float* const device = work_.put(work_.columns, scales.data(), static_cast<int64_t>(scales.size()));
  for (Linear& linear : linears_) multiply_columns_cuda(work_, linear.weight.as<float>(), linear.n, linear.k, device);
}

void GroupCuda::rotate(const formats::InputRotation& rotation) {
  const RotationCuda on_gpu(work_, rotation);
  gram_->rotate(on_gpu);
  if (drift_) drift_->rotate(on_gpu);
  for (Linear& linear : linears_) on_gpu.rotate(work_, linear.weight.as<float>(), linear.n);
  work_.stream.synchronize();  // the factors go
}

const ErrorFactorCuda& GroupCuda::factor(const Linear& linear, double damping) {
  const int64_t block = feedback_block(linear.scheme, linear.k);
  const auto known = factors_.find(block);
  if (known != factors_.end()) return known->second;
  return factors_.try_emplace(block, work_, *gram_, block, damping, linear.name).first->second;
}

FeedbackCuda GroupCuda::feedback(const Linear& linear, const Steps& steps) {
  const Step* step = steps.find(StepKind::feedback);
  if (step == nullptr) return {};
  FeedbackCuda result{&factor(linear, step->damping), nullptr};
  if (!steps.has(StepKind::sweeps) || linear.scheme.family == SchemeFamily::trellis) return result;
  const int64_t block = result.factor->block();
  auto known = sweeps_.find(block);
  if (known == sweeps_.end())
    known = sweeps_.try_emplace(block, work_, *gram_, block, result.factor->damping(), linear.name).first;
  result.sweeps = &known->second;
  return result;
}

double GroupCuda::damping(size_t index) const {
  const auto known = factors_.find(feedback_block(linears_[index].scheme, linears_[index].k));
  return known == factors_.end() ? 0 : known->second.damping();
}

namespace {

/// What errors of outputs cost, on the GPU.
struct OutputCosts {
  OutputCosts(CudaWork& work, const GroupCuda::Rows& rows, int64_t n, double damping, std::string_view name)
      : gram(scaled(work, rows, n)), factor(work, gram, 1, damping, name) {
    ridge = static_cast<float>(factor.damping() * mean_diagonal(gram.diagonal(), name));
  }

  /// Outputs that were divided cost their divisors' squares more.
  static GramCuda scaled(CudaWork& work, const GroupCuda::Rows& rows, int64_t n) {
    GramCuda gram(work, rows.costs, n);
    std::vector<float> by(rows.divisors.begin(), rows.divisors.end());
    for (float& divisor : by) divisor = 1 / divisor;
    if (!by.empty()) gram.divide(by);
    return gram;
  }

  GramCuda gram;
  ErrorFactorCuda factor;
  float ridge = 0;
};

}  // namespace

namespace {

double damping_of(const Steps& steps) {
  const Step* step = steps.find(StepKind::feedback);
  return step != nullptr ? step->damping : Step{}.damping;
}

}  // namespace

void GroupCuda::prepare(std::span<const size_t> linears, const QuantizeOptions& options) {
  for (const size_t index : linears) {
    const Linear& linear = linears_.at(index);
    feedback(linear, options.steps);
    if (drift_) factor(linear, damping_of(options.steps));
  }
  work_.stream.synchronize();
}

int64_t GroupCuda::packing_bytes(size_t index, const Rows& rows) const {
  const auto& [n, k] = std::pair(linears_.at(index).n, linears_.at(index).k);
  // Targets, errors and what sweeps keep of them; E·Eᵀ; of outputs' costs the matrix, its triangle, its factor and what
  // that is factored in.
  const int64_t outputs = rows.costs.empty() ? 0 : n * n * int64_t{sizeof(float)} * 5;
  return 10 * n * k * int64_t{sizeof(float)} + k * k * int64_t{sizeof(float)} + outputs + (int64_t{512} << 20);
}

SharedTable GroupCuda::learn_table(std::span<const Member> members, QuantizeOptions options) {
  std::vector<device::DeviceBuffer> divided;
  std::vector<KbitCudaWeight> weights;
  for (const Member& member : members) {
    Linear& linear = linears_.at(member.index);
    const float* values = linear.weight.as<float>();
    if (!member.divisors.empty()) {
      auto& copy = divided.emplace_back(work_.stream, linear.weight.size());
      device::copy(device::Way::on_gpu, copy.data(), values, copy.size(), work_.stream, "copying weights");
      divide_rows_cuda(work_, copy.as<float>(), linear.n, linear.k,
                       work_.put(work_.rows, member.divisors.data(), linear.n));
      values = copy.as<float>();
    }
    weights.push_back({.name = linear.name, .values = values, .n = linear.n, .k = linear.k});
  }
  const auto mean_squares = gram_->diagonal();
  const CalibratedInput input{mean_squares};
  options.input = &input;
  return shared_table_cuda(work_, weights, linears_.at(members.front().index).scheme, drift_ ? room_for_targets : 1,
                           options);
}

bool GroupCuda::takes_both_sides(const formats::Scheme& scheme) noexcept {
  return takes(scheme) && scheme.block > 0 && scheme.block <= widest_whole_block;
}

void GroupCuda::follow_inputs(CudaWork& work, Linear& linear, const Steps& steps) {
  if (!drift_) return;
  const GramCuda gram(work, *gram_);
  follow_inputs_cuda(work, linear.weight.as<float>(), linear.n, *drift_, gram, factor(linear, damping_of(steps)),
                     move_limit(linear.scheme.bits, drift_->tokens(), linear.k));
}

void GroupCuda::divide_rows(CudaWork& work, Linear& linear, std::span<const float> divisors) {
  if (divisors.empty()) return;
  linear.kept = device::DeviceBuffer(work.stream, linear.weight.size());
  device::copy(device::Way::on_gpu, linear.kept.data(), linear.weight.data(), linear.kept.size(), work.stream,
               "copying weights");
  divide_rows_cuda(work, linear.weight.as<float>(), linear.n, linear.k, work.put(work.rows, divisors.data(), linear.n));
}

TrellisCudaWeight GroupCuda::ready(CudaWork& work, const Member& member, const Steps& steps) {
  Linear& linear = linears_.at(member.index);
  follow_inputs(work, linear, steps);
  divide_rows(work, linear, member.divisors);
  const auto* values = linear.weight.as<float>();
  linear.rounded =
      allocate_trellis(linear.scheme, linear.n, linear.k, trellis_sizes_cuda(work, values, linear.n, linear.k));
  return {values, &*linear.rounded};
}

void GroupCuda::round_together(std::span<const Part> parts, const QuantizeOptions& options) {
  if (!options.steps.has(StepKind::feedback)) return;
  struct Input {
    GroupCuda* group;
    std::vector<Member> members;
  };
  std::vector<Input> wanted;
  int64_t bytes = 0, factoring = 0;
  for (const Part& part : parts) {
    std::map<std::string, std::vector<Member>> by_scheme;
    int64_t rows = 0;
    for (const Member& member : part.members) {
      const Linear& linear = part.group->linears_.at(member.index);
      if (linear.scheme.family != SchemeFamily::trellis) continue;
      by_scheme[to_string(linear.scheme)].push_back(member);
      rows += linear.n + (member.divisors.empty() ? 0 : linear.n);
    }
    for (auto& [scheme, members] : by_scheme) wanted.push_back({part.group, std::move(members)});
    const int64_t k = part.group->gram_->width();
    bytes += trellis_feedback_bytes(rows, k) + k * k * int64_t{sizeof(float)};
    factoring = std::max(factoring, 2 * k * k * int64_t{sizeof(double)});
  }
  // Some is left for errors of outputs, and for what allocations do not fill.
  if (wanted.empty() || bytes + factoring > parts.front().group->work_.context.free_bytes() / 5 * 4) return;
  std::vector<TrellisCudaInput> inputs;
  for (const Input& input : wanted) {
    TrellisCudaInput& ready = inputs.emplace_back();
    for (const Member& member : input.members)
      ready.weights.push_back(input.group->ready(input.group->work_, member, options.steps));
    ready.factor = input.group->feedback(input.group->linears_.at(input.members.front().index), options.steps).factor;
  }
  trellis_feedback_cuda(parts.front().group->work_, inputs);
}

GroupCuda::Packed GroupCuda::pack_trellis(CudaWork& work, size_t index, const QuantizeOptions& options,
                                          const Rows& rows) {
  Linear& linear = linears_.at(index);
  const GramCuda gram(work, *gram_);
  if (!linear.rounded) {
    const TrellisCudaWeight weight = ready(work, {index, rows.divisors}, options.steps);
    if (const ErrorFactorCuda* factor = feedback(linear, options.steps).factor) {
      const TrellisCudaInput alone{{weight}, factor};
      trellis_feedback_cuda(work, {&alone, 1});
    } else {
      trellis_codes_cuda(work, weight);
    }
  }
  Packed packed;
  packed.result.weight = std::move(*linear.rounded);
  packed.result.stats = trellis_stats(packed.result.weight);
  if (options.steps.has(StepKind::fit_norms)) {
    fit_trellis_scales_cuda(work, linear.weight.as<float>(), gram, norm_damping, packed.result.weight);
  }
  const float* divisors = nullptr;
  if (!rows.divisors.empty()) divisors = work.put(work.rows, rows.divisors.data(), linear.n);
  auto* const difference = work.errors.get<float>(linear.n * linear.k);
  trellis_difference_cuda(work, packed.result.weight, linear.original(), divisors, difference);
  packed.error = gram.error(difference, linear.n);
  linear.weight = device::DeviceBuffer();
  linear.kept = device::DeviceBuffer();
  return packed;
}

GroupCuda::Packed GroupCuda::pack(CudaWork& work, size_t index, QuantizeOptions options, const Rows& row_needs) {
  Linear& linear = linears_.at(index);
  if (linear.scheme.family == SchemeFamily::trellis) return pack_trellis(work, index, options, row_needs);
  const std::span<const float> row_scales = row_needs.divisors;
  const GramCuda gram(work, *gram_);
  FeedbackCuda fed_back = feedback(linear, options.steps);
  std::optional<OutputCosts> outputs;
  if (fed_back.factor != nullptr && !row_needs.costs.empty()) {
    outputs.emplace(work, row_needs, linear.n, options.steps.find(StepKind::feedback)->damping, linear.name);
    fed_back.across = &outputs->factor;
    fed_back.outputs = {outputs->gram.data(), outputs->ridge};
  }
  auto* const weight = linear.weight.as<float>();
  follow_inputs(work, linear, options.steps);
  const float* original = weight;
  device::DeviceBuffer kept;
  const bool clips = options.steps.awq_clips();
  if (clips || !row_scales.empty()) {
    kept = device::DeviceBuffer(work.stream, linear.weight.size());
    device::copy(device::Way::on_gpu, kept.data(), weight, kept.size(), work.stream, "copying weights");
    original = kept.as<float>();
  }
  if (clips) search_clip_cuda(work, view(linear), gram);
  const float* rows = nullptr;
  if (!row_scales.empty()) {
    rows = work.put(work.rows, row_scales.data(), linear.n);
    divide_rows_cuda(work, weight, linear.n, linear.k, rows);
  }
  const auto mean_squares = gram.diagonal();
  const CalibratedInput input{mean_squares};
  options.input = &input;
  auto* const difference = work.errors.get<float>(linear.n * linear.k);
  Packed packed;
  if (linear.scheme.family == SchemeFamily::kbit) {
    const KbitCudaWeight values{.name = linear.name,
                                .values = weight,
                                .n = linear.n,
                                .k = linear.k,
                                .feedback = fed_back,
                                .original = original,
                                .rows = rows,
                                .difference = difference};
    packed.result = kbit_cuda(work, values, linear.scheme, options);
  } else {
    packed.result = QuantizeResult{formats::allocate_integer(linear.scheme, linear.n, linear.k), {}};
    packed.result.stats =
        integer_rows_cuda(work, weight, fed_back, options.clip(), original, rows, difference, packed.result.weight);
  }
  packed.error = gram.error(difference, linear.n);
  linear.weight = device::DeviceBuffer();
  return packed;
}

}  // namespace w4q::quantize
