#include "decoder_cuda/generate.h"

#include "core/error.h"
#include "core/rng.h"
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

namespace {

/// Draws behind `ids.front()` until `ids` is full or a sequence ends; returns how many there are then.
size_t continue_text(CudaDecoder& decoder, const model::ModelConfig& config, std::span<int32_t> ids, uint64_t seed,
                     const std::function<void()>& on_token) {
  decoder.reset();
  decoder.start(ids.first(1), {.temperature = 1, .seed = seed});
  for (size_t i = 1; i < ids.size(); ++i) {
    if (i + 1 < ids.size()) decoder.step();
    ids[i] = decoder.token(static_cast<int64_t>(i) - 1);
    if (ids[i] < 0) model::refuse_logits(static_cast<int64_t>(i));
    if (on_token) on_token();
    if (model::ends_sequence(config, ids[i])) return i + 1;
  }
  return ids.size();
}

}  // namespace

std::vector<int32_t> write_text_cuda(device::Context& gpu, const model::Model& model, const model::SelfText& request,
                                     const std::function<void()>& on_token) {
  model::check_self_text(model.config(), request);
  const CudaModel on_gpu = CudaModel::upload(gpu, model);
  CudaDecoder decoder(on_gpu, {.capacity = request.length});
  std::vector<int32_t> ids(static_cast<size_t>(request.sequences * request.length));
  uint64_t part = 0;
  for (int64_t sequence = 0; sequence < request.sequences; ++sequence) {
    auto left =
        std::span(ids).subspan(static_cast<size_t>(sequence * request.length), static_cast<size_t>(request.length));
    while (!left.empty()) {
      left.front() = model::first_token(model.config(), request, sequence);
      if (on_token) on_token();
      const uint64_t seed = random_bits(request.seed, part++);
      left = left.subspan(left.size() == 1 ? 1 : continue_text(decoder, model.config(), left, seed, on_token));
    }
  }
  return ids;
}

}  // namespace w4q::decoder_cuda
