#include "decoder_cuda/generate.h"

#include "core/error.h"
#include "decoder_cuda/decoder.h"

namespace w4q::decoder_cuda {

std::vector<int32_t> generate_cuda(device::Context& gpu, const model::Model& model, std::span<const int32_t> prompt,
                                   int64_t max_tokens, const model::SamplingOptions& sampling, kernels::KvChoice kv,
                                   const std::function<bool(int32_t)>& on_token, std::optional<int64_t> residual_bytes,
                                   bool int8_activations) {
  model::check_generation(model.config(), prompt, max_tokens, sampling);
  std::vector<int32_t> tokens;
  if (max_tokens == 0) return tokens;
  const CudaModel on_gpu = CudaModel::upload(gpu, model, residual_bytes);
  CudaDecoder decoder(
      on_gpu,
      {.capacity = static_cast<int64_t>(prompt.size()) + max_tokens, .kv = kv, .int8_activations = int8_activations});
  decoder.start(prompt, sampling);
  for (int64_t i = 0; i < max_tokens; ++i) {
    // The GPU works on the next token while this one is read; behind an end it works in vain, once.
    if (i + 1 < max_tokens) decoder.step();
    tokens.push_back(decoder.token(i));
    if (tokens.back() < 0) model::refuse_logits(i);
    if (on_token && !on_token(tokens.back())) break;
    if (model::ends_sequence(model.config(), tokens.back())) break;
  }
  return tokens;
}

}  // namespace w4q::decoder_cuda
