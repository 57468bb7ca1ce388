#include "pipeline/layer_cuda.h"

#include <utility>

#include "quantize/group_cuda.h"

namespace w4q::pipeline {

struct LayerCuda::Impl {
  std::shared_ptr<quantize::CudaWork> work;
  std::vector<std::unique_ptr<quantize::GroupCuda>> groups;
};

bool LayerCuda::takes(const formats::Scheme& scheme, const quantize::QuantizeOptions& options) {
  // Sweeps and targets for quantized inputs are the CPU's, and what they go on from is made there too.
  if (options.sweeps() || options.steps.any(&quantize::StepRow::needs_text) || options.bnb_compatible ||
      !quantize::GroupCuda::takes(scheme))
    return false;
  if (!options.rotation().identity() && !quantize::RotationCuda::takes(options.rotation())) return false;
  return scheme.family == formats::SchemeFamily::integer || !options.steps.awq_clips();
}

LayerCuda::LayerCuda(std::shared_ptr<quantize::CudaWork> work) : impl_(std::make_unique<Impl>()) {
  impl_->work = std::move(work);
}
LayerCuda::~LayerCuda() { impl_->work->release(); }

size_t LayerCuda::add_group(const quantize::InputStatistics& statistics) {
  auto gram = statistics.gpu_gram != nullptr ? statistics.gpu_gram
                                             : std::make_shared<quantize::GramCuda>(*impl_->work, statistics);
  impl_->groups.push_back(std::make_unique<quantize::GroupCuda>(*impl_->work, std::move(gram)));
  return impl_->groups.size() - 1;
}

LayerCuda::Measured LayerCuda::add(size_t group, const TensorView& weight, const formats::Scheme& scheme,
                                   const quantize::QuantizeOptions& options) {
  const auto measured = impl_->groups[group]->add(weight, scheme, options);
  return {measured.power, measured.plain};
}

quantize::AwqScales LayerCuda::search(size_t group, const quantize::AwqInput& input, double plain_error,
                                      const formats::InputRotation* rotation) {
  return impl_->groups[group]->search(input, plain_error, rotation);
}

void LayerCuda::rotate(size_t group, const formats::InputRotation& rotation) { impl_->groups[group]->rotate(rotation); }

void LayerCuda::scale(size_t group, std::span<const float> scales) { impl_->groups[group]->scale(scales); }

LayerCuda::Packed LayerCuda::pack(size_t group, size_t linear, const quantize::QuantizeOptions& options,
                                  std::span<const float> rows) {
  quantize::GroupCuda& own = *impl_->groups[group];
  auto packed = own.pack(linear, options, rows);
  return {std::move(packed.result), packed.error, own.damping(linear)};
}

void LayerCuda::drop(size_t group) { impl_->groups[group].reset(); }

}  // namespace w4q::pipeline
