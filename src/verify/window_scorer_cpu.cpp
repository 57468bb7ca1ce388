#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "core/parallel.h"
#include "model/decoder.h"
#include "verify/window_scorer.h"

namespace w4q::verify {
namespace {

using kernels::LogitComparison;
using model::Decoder;
using model::Model;

/// Logits of this many values per model are held at a time.
constexpr int64_t logit_chunk_values = int64_t{1} << 22;
constexpr int64_t logit_chunk_rows = 128;

bool all_finite(MatrixView<const float> hidden) {
  for (int64_t r = 0; r < hidden.rows; ++r) {
    if (!std::all_of(hidden.row(r), hidden.row(r) + hidden.cols, [](float value) { return std::isfinite(value); }))
      return false;
  }
  return true;
}

class Scorer {
 public:
  Scorer(const Model& candidate, const Model* base, int64_t capacity, bool int8_activations)
      : candidate_(candidate, capacity, DType::f32, int8_activations), vocab_(candidate.config().vocab_size) {
    if (base != nullptr) base_.emplace(*base, capacity);
    chunk_ = std::clamp<int64_t>(logit_chunk_values / vocab_, 1, logit_chunk_rows);
    logits_.resize(static_cast<size_t>(chunk_ * vocab_));
    if (base_) base_logits_.resize(logits_.size());
  }

  std::vector<LogitComparison> score(std::span<const int32_t> inputs, int64_t first_scored) {
    candidate_.reset();
    const auto hidden = candidate_.forward(inputs);
    MatrixView<const float> base_hidden;
    if (base_) {
      base_->reset();
      base_hidden = base_->forward(inputs);
    }
    if (!all_finite(hidden) || (base_ && !all_finite(base_hidden))) return {};
    std::vector<LogitComparison> tokens;
    // The row before a token predicts it.
    const auto last = static_cast<int64_t>(inputs.size()) - 1;
    for (int64_t row = first_scored - 1; row < last; row += chunk_) {
      score_rows(inputs, row, std::min(chunk_, last - row), hidden, base_hidden, tokens);
    }
    return tokens;
  }

 private:
  void score_rows(std::span<const int32_t> inputs, int64_t first, int64_t rows, MatrixView<const float> hidden,
                  MatrixView<const float> base_hidden, std::vector<LogitComparison>& tokens) {
    const auto slice = [&](MatrixView<const float> all) {
      return MatrixView<const float>(all.row(first), rows, all.cols, all.stride);
    };
    candidate_.logits(slice(hidden), {logits_.data(), rows, vocab_});
    if (base_) base_->logits(slice(base_hidden), {base_logits_.data(), rows, vocab_});
    const size_t done = tokens.size();
    tokens.resize(done + static_cast<size_t>(rows));
    parallel_for(rows, 4, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const std::span<const float> row(logits_.data() + r * vocab_, static_cast<size_t>(vocab_));
        const int64_t id = inputs[static_cast<size_t>(first + r + 1)];
        auto& token = tokens[done + static_cast<size_t>(r)];
        if (base_) {
          token = kernels::compare_logits({base_logits_.data() + r * vocab_, static_cast<size_t>(vocab_)}, row, id);
        } else {
          token.nll_b = -kernels::log_softmax_at(row, id);
        }
      }
    });
  }

  Decoder candidate_;
  std::optional<Decoder> base_;
  int64_t vocab_;
  int64_t chunk_ = 1;
  std::vector<float> logits_;
  std::vector<float> base_logits_;
};

}  // namespace

WindowScorer cpu_window_scorer(const Model& candidate, const Model* base, int64_t capacity, bool int8_activations) {
  const auto scorer = std::make_shared<Scorer>(candidate, base, capacity, int8_activations);
  return
      [scorer](std::span<const int32_t> inputs, int64_t first_scored) { return scorer->score(inputs, first_scored); };
}

}  // namespace w4q::verify
