// Text that a model writes by itself: as good as any for calibration, where the user has none at hand.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "model/model.h"

namespace w4q::model {

struct SelfText {
  int64_t sequences = 128;
  int64_t length = 512;  ///< tokens of each, at most the model's positions
  uint64_t seed = 0;
};

/// [sequences × length] token ids. Each sequence begins with BOS (without one with an end of sequence, else with any
/// token), goes on as the model draws it at temperature 1, and behind an end of sequence with another BOS. The sequences
/// are written side by side, so that a step reads the weights once for many; the same for any number of threads. `on_step`
/// (may be empty) is called once for each token of all sequences, and groups of them. Throws bad_argument for sizes below
/// 1 or beyond the model's positions, bad_file where no token can be drawn.
std::vector<int32_t> write_text(const Model& model, const SelfText& request, const std::function<void()>& on_step = {});

/// Throws as write_text.
void check_self_text(const ModelConfig& config, const SelfText& request);
/// What a sequence begins with.
int32_t first_token(const ModelConfig& config, const SelfText& request, int64_t sequence);

/// Bytes that write_text takes beside the model: keys and values, states and logits of the sequences side by side.
int64_t self_text_memory(const ModelConfig& config, const SelfText& request);

/// How many calls of on_step there will be.
int64_t steps_of(const ModelConfig& config, const SelfText& request);

}  // namespace w4q::model
