#include "pipeline/layer_cuda.h"

#include <map>
#include <mutex>
#include <utility>

#include "core/error.h"
#include "quantize/group_cuda.h"

namespace w4q::pipeline {
namespace {

std::vector<quantize::GroupCuda::Member> members_of(std::span<const size_t> linears,
                                                    std::span<const std::span<const float>> divisors) {
  std::vector<quantize::GroupCuda::Member> members;
  for (size_t i = 0; i < linears.size(); ++i) members.push_back({linears[i], divisors[i]});
  return members;
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
  if (formats::shares_bits(scheme)) return true;  // such a scheme passes over clips and feedback on both sides
  if (options.steps.has(quantize::StepKind::feedback_outputs) && !quantize::GroupCuda::takes_both_sides(scheme)) {
    return false;
  }
  return scheme.family == formats::SchemeFamily::integer || !options.steps.awq_clips();
}

LayerCuda::LayerCuda(std::shared_ptr<quantize::CudaWork> work, size_t lanes) : impl_(std::make_unique<Impl>()) {
  impl_->lanes.push_back(std::move(work));
  while (impl_->lanes.size() < lanes) {
    impl_->lanes.push_back(std::make_shared<quantize::CudaWork>(impl_->lanes.front()->context));
  }
}
LayerCuda::~LayerCuda() { impl_->lanes.front()->release(); }

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

LayerCuda::Packed LayerCuda::pack(size_t group, size_t linear, const quantize::QuantizeOptions& options,
                                  std::span<const float> divisors, std::span<const float> output_costs) {
  quantize::GroupCuda& own = impl_->at(group);
  auto packed = own.pack(linear, options, {divisors, output_costs});
  return {std::move(packed.result), packed.error, own.damping(linear)};
}

void LayerCuda::drop(size_t group) {
  std::unique_lock lock(impl_->mutex);
  const auto dropped = impl_->groups.extract(group);
  lock.unlock();  // giving memory back takes a while
}

}  // namespace w4q::pipeline
