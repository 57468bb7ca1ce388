#include "core/error.h"
#include "decoder_cuda/generate.h"

namespace w4q::decoder_cuda {

namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::device, "this program was built without CUDA").hint("--device cpu");
}

}  // namespace

std::vector<int32_t> generate_cuda(device::Context&, const model::Model&, std::span<const int32_t>, int64_t,
                                   const model::SamplingOptions&, kernels::KvChoice,
                                   const std::function<bool(int32_t)>&, std::optional<int64_t>, bool,
                                   const model::LayerStage&) {
  refuse();
}

std::vector<int32_t> write_text_cuda(device::Context&, const model::Model&, const model::SelfText&,
                                     const std::function<void()>&) {
  refuse();
}

}  // namespace w4q::decoder_cuda
