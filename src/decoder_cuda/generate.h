// model::generate() on the GPU.
#pragma once

#include <optional>

#include "device/context.h"
#include "kernels/attention/kv_page.h"
#include "model/generate.h"
#include "model/self_text.h"

namespace w4q::decoder_cuda {

/// As model::generate(), on a GPU with a cache of the given type and residual passes as CudaModel::upload has them: greedy tokens are the CPU's where the two likeliest logits differ by more than the GPU's rounding, drawn ones
/// follow the same distribution. Throws device where this program was built without CUDA.
std::vector<int32_t> generate_cuda(device::Context& gpu, const model::Model& model, std::span<const int32_t> prompt,
                                   int64_t max_tokens, const model::SamplingOptions& sampling, kernels::KvChoice kv,
                                   const std::function<bool(int32_t)>& on_token,
                                   std::optional<int64_t> residual_bytes = {}, bool int8_activations = false,
                                   const model::LayerStage& stage = {});

/// As model::write_text(), one sequence after the other: a draw follows the same distribution, and behind an end of
/// sequence nothing before it is seen any more. `on_token` is called for each token.
std::vector<int32_t> write_text_cuda(device::Context& gpu, const model::Model& model, const model::SelfText& request,
                                     const std::function<void()>& on_token);

}  // namespace w4q::decoder_cuda
