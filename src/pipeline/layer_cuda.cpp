#include "pipeline/layer_cuda.h"

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "core/lanes.h"
#include "core/stopwatch.h"
#include "quantize/group_cuda.h"

namespace w4q::pipeline {
namespace {

std::vector<quantize::GroupCuda::Member> members_of(std::span<const size_t> linears,
                                                    std::span<const std::span<const float>> divisors) {
  std::vector<quantize::GroupCuda::Member> members;
  for (size_t i = 0; i < linears.size(); ++i) members.push_back({linears[i], divisors[i]});
  return members;
}

/// The next layer takes what this one has left, unless that is much of what is free.
void settle_spares(quantize::CudaWork& work, std::span<const std::shared_ptr<quantize::CudaWork>> lanes) noexcept {
  int64_t spare = 0;
  for (const auto& lane : lanes) spare += lane->stream.spares()->bytes();
  try {
    if (4 * spare <= work.context.free_bytes()) return;
  } catch (const Error&) {  // whoever asks the GPU next hears of it
  }
  work.beside.clear();
  for (const auto& lane : lanes) lane->stream.spares()->free_all();
}

}  // namespace

struct LayerCuda::Impl {
  std::vector<std::shared_ptr<quantize::CudaWork>> lanes;
  std::mutex mutex;  ///< guards the map, not what stands in it
  std::map<size_t, quantize::GroupCuda> groups;

  quantize::CudaWork& work(size_t group) { return *lanes[group % lanes.size()]; }
  quantize::GroupCuda& at(size_t group) {
    const std::lock_guard lock(mutex);
    return groups.at(group);
  }
};

bool LayerCuda::takes(const formats::Scheme& scheme, const quantize::QuantizeOptions& options) {
  if (options.bnb_compatible || !quantize::GroupCuda::takes(scheme)) return false;
  if (!options.rotation().identity() && !quantize::RotationCuda::takes(options.rotation())) return false;
  const auto has = [&](quantize::StepKind kind) { return options.steps.has(kind); };
  if (formats::shares_bits(scheme)) {  // such a scheme passes over clips
    return !has(quantize::StepKind::feedback_outputs) && !has(quantize::StepKind::sweeps);
  }
  if (has(quantize::StepKind::feedback_outputs) && !quantize::GroupCuda::takes_both_sides(scheme)) {
    return false;
  }
  return scheme.family == formats::SchemeFamily::integer || !options.steps.awq_clips();
}

LayerCuda::LayerCuda(std::shared_ptr<quantize::CudaWork> work, size_t lanes) : impl_(std::make_unique<Impl>()) {
  auto& beside = work->beside;
  while (beside.size() + 1 < lanes) beside.push_back(std::make_shared<quantize::CudaWork>(work->context));
  impl_->lanes.push_back(std::move(work));
  for (size_t lane = 1; lane < lanes; ++lane) impl_->lanes.push_back(beside[lane - 1]);
  for (const auto& lane : impl_->lanes) {
    if (lanes > 1) lane->stream.keep_spares();
  }
}

LayerCuda::~LayerCuda() {
  impl_->groups.clear();
  quantize::CudaWork& work = *impl_->lanes.front();
  work.release();
  if (impl_->lanes.size() > 1) settle_spares(work, impl_->lanes);
}

void LayerCuda::add_group(size_t group, const quantize::InputStatistics& statistics) {
  auto& work = impl_->work(group);
  auto gram = statistics.gpu_gram;
  if (gram == nullptr) gram = std::make_shared<quantize::GramCuda>(work, statistics);
  gram->use(work);
  const std::lock_guard lock(impl_->mutex);
  impl_->groups.try_emplace(group, work, std::move(gram));
}

void LayerCuda::follow(size_t group, const quantize::InputPair& pair) {
  ensure(pair.quantized.gpu_gram != nullptr && pair.gpu_drift != nullptr, "LayerCuda: inputs that are not on the GPU");
  impl_->at(group).follow(pair.quantized.gpu_gram, std::move(*pair.gpu_drift));
}

LayerCuda::Measured LayerCuda::add(size_t group, const TensorView& weight, const formats::Scheme& scheme,
                                   const quantize::QuantizeOptions& options) {
  const auto measured = impl_->at(group).add(weight, scheme, options);
  return {measured.power, measured.plain};
}

quantize::AwqScales LayerCuda::search(size_t group, const quantize::AwqInput& input, double plain_error,
                                      const formats::InputRotation* rotation) {
  return impl_->at(group).search(input, plain_error, rotation);
}

void LayerCuda::rotate(size_t group, const formats::InputRotation& rotation) { impl_->at(group).rotate(rotation); }

void LayerCuda::scale(size_t group, std::span<const float> scales) { impl_->at(group).scale(scales); }

quantize::SharedTable LayerCuda::learn_table(size_t group, std::span<const size_t> linears,
                                             std::span<const std::span<const float>> divisors,
                                             const quantize::QuantizeOptions& options) {
  return impl_->at(group).learn_table(members_of(linears, divisors), options);
}

void LayerCuda::round_together(std::span<const Part> parts, const quantize::QuantizeOptions& options) {
  std::vector<quantize::GroupCuda::Part> own;
  for (const Part& part : parts) {
    own.push_back({&impl_->at(part.group), members_of(part.linears, part.divisors)});
  }
  quantize::GroupCuda::round_together(own, options);
}

namespace {

/// So many linears of a group at once: q, k and v.
constexpr size_t most_lanes = 3;

/// How many of `wanted` fit beside each other into what is free, of which some is left for what allocations do not fill.
size_t lanes_for(const quantize::GroupCuda& group, std::span<const LayerCuda::Wanted> wanted, int64_t free_bytes) {
  std::vector<int64_t> bytes;
  for (const auto& one : wanted) bytes.push_back(group.packing_bytes(one.linear, {one.divisors, one.output_costs}));
  std::ranges::sort(bytes, std::greater<>());
  size_t lanes = 0;
  for (int64_t left = free_bytes / 5 * 4; lanes < std::min(bytes.size(), most_lanes); ++lanes) {
    if (bytes[lanes] > left) break;
    left -= bytes[lanes];
  }
  return std::max<size_t>(1, lanes);
}

}  // namespace

void LayerCuda::pack(size_t group, std::span<const Wanted> wanted, const std::function<void(size_t, Packed)>& done) {
  quantize::GroupCuda& own = impl_->at(group);
  quantize::CudaWork& work = impl_->work(group);
  size_t lanes = 1;
  if (impl_->lanes.size() == 1) {
    std::vector<size_t> linears;
    for (const Wanted& one : wanted) linears.push_back(one.linear);
    own.prepare(linears, wanted.front().options);
    lanes = lanes_for(own, wanted, work.context.free_bytes());
  }
  std::vector<std::unique_ptr<quantize::CudaWork>> others;
  while (others.size() + 1 < lanes) others.push_back(std::make_unique<quantize::CudaWork>(work.context));
  run_lanes(lanes, wanted.size(), [&](size_t lane, size_t at) {
    const Wanted& one = wanted[at];
    const Stopwatch watch;
    quantize::CudaWork& with = lane == 0 ? work : *others[lane - 1];
    auto packed = own.pack(with, one.linear, one.options, {one.divisors, one.output_costs});
    done(at, {std::move(packed.result), packed.error, own.damping(one.linear), watch.seconds()});
  });
}

void LayerCuda::drop(size_t group) {
  std::unique_lock lock(impl_->mutex);
  const auto dropped = impl_->groups.extract(group);
  lock.unlock();  // giving memory back takes a while
}

}  // namespace w4q::pipeline
