// Builds without CUDA: nobody asks for these, because no device can be chosen.
#include "core/error.h"
#include "pipeline/calibration_cuda.h"
#include "pipeline/distill_cuda.h"
#include "pipeline/gradients_cuda.h"
#include "pipeline/layer_cuda.h"

namespace w4q::pipeline {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::device, "this program was built without CUDA").hint("--device cpu");
}

}  // namespace

std::shared_ptr<quantize::CudaWork> make_cuda_work(device::Context&) { refuse(); }

device::Context* gpu_of(const std::shared_ptr<quantize::CudaWork>&) { return nullptr; }
void free_memory(const std::shared_ptr<quantize::CudaWork>&) {}

struct CalibrationCuda::Impl {};
CalibrationCuda::CalibrationCuda(std::shared_ptr<quantize::CudaWork>, const model::ModelConfig&,
                                 const CalibrationShape&) {
  refuse();
}
CalibrationCuda::~CalibrationCuda() = default;
int64_t CalibrationCuda::resident() const noexcept { return 0; }
void CalibrationCuda::put(int64_t, MatrixView<const float>) { refuse(); }
LayerStatistics CalibrationCuda::run(const Turn&, HiddenStates&, const std::function<void()>&) { refuse(); }
void CalibrationCuda::begin_pairs(const model::LayerWeights&) { refuse(); }
quantize::InputPair CalibrationCuda::pair(const model::InputGroup&, size_t, const PairedStates&, bool) { refuse(); }
void CalibrationCuda::finish_pairs(const PairedStates&) { refuse(); }

struct ExchangeCuda::Impl {};
ExchangeCuda::ExchangeCuda(ranks::Ranks&, quantize::CudaWork&) { refuse(); }
ExchangeCuda::~ExchangeCuda() = default;
const std::string& ExchangeCuda::way() const noexcept {
  static const std::string none;
  return none;
}
void ExchangeCuda::exchange(std::span<const Part>, const std::optional<Part>&) { refuse(); }

struct DistillCuda::Impl {};
bool DistillCuda::takes(const model::ModelConfig&) { return false; }
DistillCuda::DistillCuda(std::shared_ptr<quantize::CudaWork>, const model::ModelConfig&, int64_t, int64_t, Layers) {
  refuse();
}
DistillCuda::~DistillCuda() = default;
void DistillCuda::load_heads(const DistilledHead&, const DistilledHead&) { refuse(); }
void DistillCuda::keep_layers() { refuse(); }
void DistillCuda::load_teacher(const model::LayerWeights&) { refuse(); }
void DistillCuda::keep_expected(int64_t) { refuse(); }
int64_t DistillCuda::keeps() const noexcept { return 0; }
void DistillCuda::put_expected(int64_t, MatrixView<const float>) { refuse(); }
void DistillCuda::teach(int64_t, MatrixView<float>) { refuse(); }
void DistillCuda::put_norms(int64_t, const model::LayerWeights&) { refuse(); }
void DistillCuda::put_final_norm(std::span<const float>) { refuse(); }
void DistillCuda::put(size_t, MatrixView<const float>) { refuse(); }
void DistillCuda::forward(size_t) { refuse(); }
double DistillCuda::divergence(const Expected&) { refuse(); }
double DistillCuda::loss(size_t, const Expected&) { refuse(); }
void DistillCuda::back(size_t) { refuse(); }
std::vector<double> DistillCuda::take_sums(const model::PlannedNorm&) { refuse(); }

struct GradientsCuda::Impl {};
bool GradientsCuda::takes(const model::ModelConfig&) { return false; }
GradientsCuda::GradientsCuda(std::shared_ptr<quantize::CudaWork>, const model::ModelConfig&, int64_t, int64_t) {
  refuse();
}
GradientsCuda::~GradientsCuda() = default;
void GradientsCuda::load(const model::LayerWeights&) { refuse(); }
bool GradientsCuda::keeps(int64_t) const { return false; }
void GradientsCuda::put(int64_t, MatrixView<const float>) { refuse(); }
void GradientsCuda::forward(int64_t, MatrixView<const float>) { refuse(); }
void GradientsCuda::fetch(MatrixView<float>) { refuse(); }
void GradientsCuda::load_head(std::span<const float>, const kernels::LinearWeight&) { refuse(); }
double GradientsCuda::loss(int64_t, std::span<const int32_t>, MatrixView<float>) { refuse(); }
void GradientsCuda::back(int64_t, MatrixView<const float>, MatrixView<float>) { refuse(); }
void GradientsCuda::take_costs(std::span<float>) { refuse(); }

struct LayerCuda::Impl {};
bool LayerCuda::takes(const formats::Scheme&, const quantize::QuantizeOptions&) { return false; }
LayerCuda::LayerCuda(std::shared_ptr<quantize::CudaWork>, size_t) { refuse(); }
LayerCuda::~LayerCuda() = default;
void LayerCuda::add_group(size_t, const quantize::InputStatistics&) { refuse(); }
void LayerCuda::follow(size_t, const quantize::InputPair&) { refuse(); }
LayerCuda::Measured LayerCuda::add(size_t, const TensorView&, const formats::Scheme&,
                                   const quantize::QuantizeOptions&) {
  refuse();
}
quantize::AwqScales LayerCuda::search(size_t, const quantize::AwqInput&, double, const formats::InputRotation*) {
  refuse();
}
void LayerCuda::rotate(size_t, const formats::InputRotation&) { refuse(); }
void LayerCuda::scale(size_t, std::span<const float>) { refuse(); }
quantize::SharedTable LayerCuda::learn_table(size_t, std::span<const size_t>, std::span<const std::span<const float>>,
                                             const quantize::QuantizeOptions&) {
  refuse();
}
void LayerCuda::round_together(std::span<const Part>, const quantize::QuantizeOptions&) { refuse(); }
void LayerCuda::pack(size_t, std::span<const Wanted>, const std::function<void(size_t, Packed)>&) { refuse(); }
void LayerCuda::drop(size_t) { refuse(); }

}  // namespace w4q::pipeline
