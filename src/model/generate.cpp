#include "model/generate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/text.h"
#include "kernels/sampling/logits.h"

namespace w4q::model {

bool ends_sequence(const ModelConfig& config, int32_t token) noexcept {
  return std::ranges::find(config.eos_tokens, int64_t{token}) != config.eos_tokens.end();
}

namespace {

/// Behind its last position a model decodes to something, but not to what it would say.
void check_positions(const ModelConfig& config, int64_t prompt, int64_t max_tokens) {
  const auto most = most_positions(config);
  if (!most || prompt <= *most - max_tokens) return;
  const int64_t room = *most - prompt;
  const std::string fits = concat("at most ", room, " new tokens fit behind this prompt");
  throw Error(ErrorCode::bad_argument, concat("a prompt of ", prompt, " tokens and ", max_tokens,
                                              " new ones go beyond the model's ", *most, " positions"))
      .detail("max_position_embeddings of config.json, and its rope scaling where it has one")
      .hint(room > 0 ? fits : concat("a prompt of fewer than ", *most, " tokens"));
}

}  // namespace

void check_generation(const ModelConfig& config, std::span<const int32_t> prompt, int64_t max_tokens,
                      const SamplingOptions& sampling) {
  kernels::check_sampling(sampling);
  if (prompt.empty()) throw Error(ErrorCode::bad_argument, "the prompt has no tokens");
  const auto length = static_cast<int64_t>(prompt.size());
  if (max_tokens < 0 || max_tokens > std::numeric_limits<int64_t>::max() - length) {
    throw Error(ErrorCode::bad_argument, concat("cannot generate ", max_tokens, " tokens"));
  }
  check_positions(config, length, max_tokens);
}

void refuse_logits(int64_t index) {
  throw Error(ErrorCode::bad_file, "the largest logit is NaN or infinite: there is no next token")
      .detail(concat("after ", index, " generated tokens"))
      .hint("w4q verify MODEL --ppl TEXT: the weights are damaged, or activations leave the range of f16");
}

std::vector<int32_t> generate(const Model& model, std::span<const int32_t> prompt, int64_t max_tokens,
                              const SamplingOptions& sampling, const std::function<bool(int32_t)>& on_token,
                              bool int8_activations, const LayerStage& stage) {
  check_generation(model.config(), prompt, max_tokens, sampling);
  Decoder decoder(model, static_cast<int64_t>(prompt.size()) + max_tokens, DType::f32, int8_activations);
  std::vector<float> row(static_cast<size_t>(model.config().vocab_size));
  const MatrixView<float> logits(row.data(), 1, model.config().vocab_size);
  std::vector<int32_t> tokens;
  std::span<const int32_t> next = prompt;
  for (int64_t i = 0; i < max_tokens; ++i) {
    const auto hidden = decoder.forward(next, stage);
    int32_t token = 0;
    if (stage.last()) {
      decoder.logits({hidden.row(hidden.rows - 1), 1, hidden.cols}, logits);
      if (!std::isfinite(row[static_cast<size_t>(kernels::argmax(row))])) refuse_logits(i);
      token = kernels::sample(row, sampling, static_cast<uint64_t>(i));
    }
    tokens.push_back(stage.share(token));
    if (on_token && !on_token(tokens.back())) break;
    if (ends_sequence(model.config(), tokens.back())) break;
    next = std::span(tokens).last(1);
  }
  return tokens;
}

}  // namespace w4q::model
