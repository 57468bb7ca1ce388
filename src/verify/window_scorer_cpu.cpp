#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

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
  Scorer(const Model& candidate, std::span<const BaseModel> bases, int64_t capacity, bool int8_activations)
      : candidate_(candidate, capacity, DType::f32, int8_activations), vocab_(candidate.config().vocab_size) {
    for (const auto& base : bases) bases_.emplace_back(*base.model, capacity);
    chunk_ = std::clamp<int64_t>(logit_chunk_values / vocab_, 1, logit_chunk_rows);
    logits_.resize(static_cast<size_t>(chunk_ * vocab_));
    if (!bases_.empty()) base_logits_.resize(logits_.size());
  }

  std::vector<std::vector<LogitComparison>> score(std::span<const int32_t> inputs, int64_t first_scored) {
    candidate_.reset();
    const auto hidden = candidate_.forward(inputs);
    std::vector<MatrixView<const float>> base_hidden;
    for (auto& base : bases_) {
      base.reset();
      base_hidden.push_back(base.forward(inputs));
    }
    std::vector<std::vector<LogitComparison>> tokens(std::max<size_t>(1, bases_.size()));
    if (!all_finite(hidden)) return tokens;
    // The row before a token predicts it.
    const auto last = static_cast<int64_t>(inputs.size()) - 1;
    for (int64_t row = first_scored - 1; row < last; row += chunk_) {
      const int64_t rows = std::min(chunk_, last - row);
      candidate_.logits(slice(hidden, row, rows), {logits_.data(), rows, vocab_});
      const auto ids = inputs.subspan(static_cast<size_t>(row) + 1, static_cast<size_t>(rows));
      if (bases_.empty()) score_alone(ids, tokens.front());
      for (size_t i = 0; i < bases_.size(); ++i) {
        if (!all_finite(base_hidden[i])) continue;
        bases_[i].logits(slice(base_hidden[i], row, rows), {base_logits_.data(), rows, vocab_});
        score_beside(ids, tokens[i]);
      }
    }
    return tokens;
  }

 private:
  static MatrixView<const float> slice(MatrixView<const float> all, int64_t first, int64_t rows) {
    return {all.row(first), rows, all.cols, all.stride};
  }
  std::span<const float> row_of(const std::vector<float>& logits, size_t row) const {
    return std::span(logits).subspan(row * static_cast<size_t>(vocab_), static_cast<size_t>(vocab_));
  }

  void score_alone(std::span<const int32_t> ids, std::vector<LogitComparison>& tokens) const {
    append(ids, tokens, [&](size_t row, int64_t id) {
      LogitComparison token;
      token.nll_b = -kernels::log_softmax_at(row_of(logits_, row), id);
      return token;
    });
  }
  void score_beside(std::span<const int32_t> ids, std::vector<LogitComparison>& tokens) const {
    append(ids, tokens, [&](size_t row, int64_t id) {
      return kernels::compare_logits(row_of(base_logits_, row), row_of(logits_, row), id);
    });
  }

  /// One result for each of the rows whose logits are at hand; `ids` are what they should predict.
  template <class Score>
  static void append(std::span<const int32_t> ids, std::vector<LogitComparison>& tokens, const Score& score) {
    const size_t done = tokens.size();
    tokens.resize(done + ids.size());
    parallel_for(static_cast<int64_t>(ids.size()), 4, [&](int64_t begin, int64_t end) {
      for (auto row = static_cast<size_t>(begin); row < static_cast<size_t>(end); ++row) {
        tokens[done + row] = score(row, ids[row]);
      }
    });
  }

  Decoder candidate_;
  std::vector<Decoder> bases_;
  int64_t vocab_;
  int64_t chunk_ = 1;
  std::vector<float> logits_;
  std::vector<float> base_logits_;
};

}  // namespace

WindowScorer cpu_window_scorer(const Model& candidate, std::span<const BaseModel> bases, int64_t capacity,
                               bool int8_activations) {
  const auto scorer = std::make_shared<Scorer>(candidate, bases, capacity, int8_activations);
  return
      [scorer](std::span<const int32_t> inputs, int64_t first_scored) { return scorer->score(inputs, first_scored); };
}

}  // namespace w4q::verify
