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

/// A decoder and what it made of the window.
struct Side {
  Side(const Model& model, int64_t capacity, bool int8_activations)
      : decoder(model, capacity, DType::f32, int8_activations) {}

  void decode(std::span<const int32_t> inputs, const model::LayerStage& stage) {
    decoder.reset();
    hidden = decoder.forward(inputs, stage);
    finite = all_finite(hidden);
  }
  /// Logits of hidden states first … , as many as there are rows in `out`.
  void predict(int64_t first, MatrixView<float> out) const {
    if (finite) decoder.logits({hidden.row(first), out.rows, hidden.cols, hidden.stride}, out);
  }

  Decoder decoder;
  MatrixView<const float> hidden;
  bool finite = false;
  std::vector<float> logits;
};

class Scorer {
 public:
  Scorer(std::span<const Model* const> candidates, std::span<const BaseModel> bases, int64_t capacity,
         bool int8_activations, const model::LayerStage& stage)
      : stage_(stage), vocab_(candidates.front()->config().vocab_size) {
    for (const auto* candidate : candidates) candidates_.emplace_back(*candidate, capacity, int8_activations);
    for (const auto& base : bases) bases_.emplace_back(*base.model, capacity, false);
    chunk_ = std::clamp<int64_t>(logit_chunk_values / vocab_, 1, logit_chunk_rows);
    for (auto* sides : {&candidates_, &bases_}) {
      for (auto& side : *sides) side.logits.resize(static_cast<size_t>(chunk_ * vocab_));
    }
  }

  std::vector<std::vector<LogitComparison>> score(std::span<const int32_t> inputs, int64_t first_scored) {
    for (auto* sides : {&candidates_, &bases_}) {
      for (auto& side : *sides) side.decode(inputs, stage_);
    }
    std::vector<std::vector<LogitComparison>> tokens(candidates_.size() * std::max<size_t>(1, bases_.size()));
    if (!stage_.last()) return tokens;
    // The row before a token predicts it.
    const auto last = static_cast<int64_t>(inputs.size()) - 1;
    for (int64_t row = first_scored - 1; row < last; row += chunk_) {
      const int64_t rows = std::min(chunk_, last - row);
      for (auto* sides : {&candidates_, &bases_}) {
        for (auto& side : *sides) side.predict(row, {side.logits.data(), rows, vocab_});
      }
      const auto ids = inputs.subspan(static_cast<size_t>(row) + 1, static_cast<size_t>(rows));
      auto list = tokens.begin();
      for (const auto& candidate : candidates_) {
        if (bases_.empty()) score_alone(candidate, ids, *list++);
        for (const auto& base : bases_) score_beside(candidate, base, ids, *list++);
      }
    }
    return tokens;
  }

 private:
  std::span<const float> row_of(const Side& side, size_t row) const {
    return std::span(side.logits).subspan(row * static_cast<size_t>(vocab_), static_cast<size_t>(vocab_));
  }

  void score_alone(const Side& candidate, std::span<const int32_t> ids, std::vector<LogitComparison>& tokens) const {
    if (!candidate.finite) return;
    append(ids, tokens, [&](size_t row, int64_t id) {
      LogitComparison token;
      token.nll_b = -kernels::log_softmax_at(row_of(candidate, row), id);
      return token;
    });
  }
  void score_beside(const Side& candidate, const Side& base, std::span<const int32_t> ids,
                    std::vector<LogitComparison>& tokens) const {
    if (!candidate.finite || !base.finite) return;
    append(ids, tokens, [&](size_t row, int64_t id) {
      return kernels::compare_logits(row_of(base, row), row_of(candidate, row), id);
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

  const model::LayerStage stage_;
  std::vector<Side> candidates_, bases_;
  int64_t vocab_;
  int64_t chunk_ = 1;
};

}  // namespace

WindowScorer cpu_window_scorer(std::span<const Model* const> candidates, std::span<const BaseModel> bases,
                               int64_t capacity, bool int8_activations, const model::LayerStage& stage) {
  const auto scorer = std::make_shared<Scorer>(candidates, bases, capacity, int8_activations, stage);
  return
      [scorer](std::span<const int32_t> inputs, int64_t first_scored) { return scorer->score(inputs, first_scored); };
}

}  // namespace w4q::verify
