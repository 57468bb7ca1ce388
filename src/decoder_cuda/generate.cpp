#include "decoder_cuda/generate.h"

#include <cmath>
#include <optional>

#include "core/error.h"
#include "core/rng.h"
#include "decoder_cuda/decoder.h"
#include "kernels/sampling/logits.h"

namespace w4q::decoder_cuda {

namespace {

/// Draws up to `count` tokens behind `prompt`. `take` sees each and ends this by returning false; so does an end of
/// sequence.
void draw(CudaDecoder& decoder, const model::ModelConfig& config, std::span<const int32_t> prompt, int64_t count,
          const model::SamplingOptions& sampling, const std::function<bool(int32_t)>& take) {
  decoder.start(prompt, sampling);
  for (int64_t i = 0; i < count; ++i) {
    // The GPU works on the next token while this one is read; behind an end it works in vain, once.
    if (i + 1 < count) decoder.step();
    const int32_t token = decoder.token(i);
    if (token < 0) model::refuse_logits(i);
    if (!take(token) || model::ends_sequence(config, token)) return;
  }
}

/// The same where several processes hold the model: tokens are drawn on the host by the last one.
void draw_at_stage(CudaDecoder& decoder, const model::ModelConfig& config, std::span<const int32_t> prompt,
                   int64_t count, const model::SamplingOptions& sampling, const model::LayerStage& stage,
                   const std::function<bool(int32_t)>& take) {
  std::vector<float> row(static_cast<size_t>(config.vocab_size));
  std::vector<int32_t> next(prompt.begin(), prompt.end());
  for (int64_t i = 0; i < count; ++i) {
    const CudaMatrix hidden = decoder.forward(next, stage);
    int32_t token = 0;
    if (stage.last()) {
      decoder.logits(hidden.rows - 1, {row.data(), 1, config.vocab_size});
      if (!std::isfinite(row[static_cast<size_t>(kernels::argmax(row))])) model::refuse_logits(i);
      token = kernels::sample(row, sampling, static_cast<uint64_t>(i));
    }
    next = {stage.share(token)};
    if (!take(next.front()) || model::ends_sequence(config, next.front())) return;
  }
}

}  // namespace

std::vector<int32_t> generate_cuda(device::Context& gpu, const model::Model& model, std::span<const int32_t> prompt,
                                   int64_t max_tokens, const model::SamplingOptions& sampling, kernels::KvChoice kv,
                                   const std::function<bool(int32_t)>& on_token, std::optional<int64_t> residual_bytes,
                                   bool int8_activations, const model::LayerStage& stage) {
  model::check_generation(model.config(), prompt, max_tokens, sampling);
  std::vector<int32_t> tokens;
  if (max_tokens == 0) return tokens;
  const CudaModel on_gpu = CudaModel::upload(gpu, model, residual_bytes);
  CudaDecoder decoder(
      on_gpu,
      {.capacity = static_cast<int64_t>(prompt.size()) + max_tokens, .kv = kv, .int8_activations = int8_activations});
  const auto take = [&](int32_t token) {
    tokens.push_back(token);
    return !on_token || on_token(token);
  };
  if (stage.count() > 1) {
    draw_at_stage(decoder, model.config(), prompt, max_tokens, sampling, stage, take);
  } else {
    draw(decoder, model.config(), prompt, max_tokens, sampling, take);
  }
  return tokens;
}

std::vector<int32_t> write_text_cuda(device::Context& gpu, const model::Model& model, const model::SelfText& request,
                                     const std::function<void()>& on_token) {
  model::check_self_text(model.config(), request);
  const CudaModel on_gpu = CudaModel::upload(gpu, model);
  CudaDecoder decoder(on_gpu, {.capacity = request.length});
  std::vector<int32_t> ids(static_cast<size_t>(request.sequences * request.length));
  uint64_t part = 0;
  for (int64_t sequence = 0; sequence < request.sequences; ++sequence) {
    const auto all =
        std::span(ids).subspan(static_cast<size_t>(sequence * request.length), static_cast<size_t>(request.length));
    model::GivenTokens tokens(model.config(), request, sequence);
    const bool talks = request.talks(sequence);
    size_t begin = 0, at = 0;
    const auto put = [&](int32_t token) {
      all[at++] = token;
      if (on_token) on_token();
      return true;
    };
    for (std::optional<int32_t> given = tokens.first(); at < all.size();) {
      for (; given && at < all.size(); given = talks ? tokens.behind(all[at - 1]) : std::nullopt) {
        if (!talks || tokens.begins()) begin = at;
        put(*given);
      }
      const uint64_t seed = random_bits(request.seed, part++);
      if (at == all.size()) break;
      decoder.reset();
      draw(decoder, model.config(), all.subspan(begin, at - begin), std::ssize(all) - static_cast<int64_t>(at),
           {.temperature = 1, .seed = seed}, put);
      given = talks ? tokens.behind(all[at - 1]) : std::optional(tokens.first());
    }
  }
  return ids;
}

}  // namespace w4q::decoder_cuda
