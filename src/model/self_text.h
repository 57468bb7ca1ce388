// Text that a model writes by itself: as good as any for calibration, where the user has none at hand.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "model/model.h"

namespace w4q::model {

struct SelfText {
  int64_t sequences = 128;
  int64_t length = 512;  ///< tokens of each, at most the model's positions
  uint64_t seed = 0;
  /// Of a chat template: what stands before a user's words, and between these and the answer. Where the first is there every
  /// second sequence is a conversation.
  std::vector<int32_t> opening = {}, answer = {};

  bool talks(int64_t sequence) const noexcept { return !opening.empty() && sequence % 2 == 1; }
};

/// What of a sequence is not drawn. The request outlives it.
class GivenTokens {
 public:
  GivenTokens(const ModelConfig& config, const SelfText& request, int64_t sequence)
      : config_(config), request_(request), sequence_(sequence) {}

  int32_t first();
  /// What stands behind `last`; nothing: what is drawn.
  std::optional<int32_t> behind(int32_t last);
  /// Whether a conversation begins with the one that was given last.
  bool begins() const noexcept { return !answers_ && at_ == 1; }

 private:
  std::optional<int32_t> next();

  const ModelConfig& config_;
  const SelfText& request_;
  int64_t sequence_;
  bool answers_ = false, was_given_ = false;
  size_t at_ = 0;  ///< of the part that stands before what is said now
};

/// [sequences × length] token ids. Each sequence begins with BOS (without one with an end of sequence, else with any
/// token), goes on as the model draws it at temperature 1, and behind an end of sequence with another BOS. Of a
/// conversation the model draws the user's words, then its answer, then those of another one. The sequences
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
