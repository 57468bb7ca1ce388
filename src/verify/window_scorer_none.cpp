#include "core/error.h"
#include "verify/window_scorer.h"

namespace w4q::verify {

WindowScorer cuda_window_scorer(device::Context&, std::span<const model::Model* const>, std::span<const BaseModel>,
                                int64_t, kernels::KvChoice, std::optional<int64_t>, bool, const model::LayerStage&) {
  throw Error(ErrorCode::device, "this program was built without CUDA").hint("--device cpu");
}

}  // namespace w4q::verify
