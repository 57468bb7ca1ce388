#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "decoder_cuda/decoder.h"
#include "device/buffer.h"
#include "kernels/sampling/logits_cuda.h"
#include "verify/window_scorer.h"

namespace w4q::verify {
namespace {

using decoder_cuda::CudaDecoder;
using decoder_cuda::CudaModel;
using kernels::LogitComparison;
using model::Model;

/// A decoder of a model on the GPU. Where single tokens skip pages, all are decoded as such.
struct Side {
  Side(std::shared_ptr<const CudaModel> weights, int64_t capacity, kernels::KvChoice kv, bool int8_activations = false)
      : model(std::move(weights)),
        decoder(
            *model,
            {.capacity = capacity, .kv = kv, .chunk = kv.prunes() ? 1 : 2048, .int8_activations = int8_activations}) {}

  /// Logits of rows first …; `ready` is recorded behind them.
  const float* logits(int64_t first, int64_t rows) {
    const decoder_cuda::CudaMatrix part = decoder.logits(first, rows);
    ready.record(decoder.stream());
    return static_cast<const float*>(part.data);
  }

  std::shared_ptr<const CudaModel> model;  // a candidate may be a base too
  CudaDecoder decoder;
  device::Event ready;
};

std::shared_ptr<const CudaModel> upload(device::Context& gpu, const Model& model,
                                        std::optional<int64_t> residual_bytes = {}) {
  return std::make_shared<const CudaModel>(CudaModel::upload(gpu, model, residual_bytes));
}

class Scorer {
 public:
  Scorer(device::Context& gpu, std::span<const Model* const> candidates, std::span<const BaseModel> bases,
         int64_t capacity, kernels::KvChoice kv, std::optional<int64_t> residual_bytes, bool int8_activations,
         const model::LayerStage& stage)
      : stage_(stage), vocab_(candidates.front()->config().vocab_size) {
    std::map<const Model*, std::shared_ptr<const CudaModel>> models;
    for (const auto* candidate : candidates) {
      auto& weights = models[candidate];
      if (!weights) weights = upload(gpu, *candidate, residual_bytes);
      candidates_.push_back(std::make_unique<Side>(weights, capacity, kv, int8_activations));
    }
    for (const auto& base : bases) {
      auto& weights = models[base.model];
      if (!weights) weights = upload(gpu, *base.model);
      bases_.push_back(std::make_unique<Side>(weights, capacity, base.kv));
    }
    ids_ = device::DeviceBuffer(gpu, static_cast<size_t>(capacity) * sizeof(int32_t));
    for (size_t i = 0; i < candidates.size() * std::max<size_t>(1, bases.size()); ++i) {
      results_.emplace_back(gpu, static_cast<size_t>(capacity) * sizeof(LogitComparison));
    }
  }

  std::vector<std::vector<LogitComparison>> score(std::span<const int32_t> inputs, int64_t first_scored) {
    int64_t step = INT64_MAX;
    for (auto* sides : {&bases_, &candidates_}) {
      for (const auto& side : *sides) {
        side->decoder.reset();
        side->decoder.forward(inputs, stage_);
        step = std::min(step, side->decoder.most_logit_rows());
      }
    }
    if (!stage_.last()) return std::vector<std::vector<LogitComparison>>(results_.size());
    ids_.upload(std::as_bytes(inputs), stream());
    // The row before a token predicts it.
    const int64_t begin = first_scored - 1;
    const auto end = static_cast<int64_t>(inputs.size()) - 1;
    for (int64_t row = begin; row < end; row += step) compare(row, std::min(step, end - row), begin);
    std::vector<std::vector<LogitComparison>> tokens;
    for (auto& results : results_) tokens.push_back(read(results, static_cast<size_t>(end - begin)));
    return tokens;
  }

 private:
  /// Logits are compared in the first candidate's.
  const device::Stream& stream() const { return candidates_.front()->decoder.stream(); }

  std::vector<const float*> logits_of(const std::vector<std::unique_ptr<Side>>& sides, int64_t row, int64_t rows) {
    std::vector<const float*> logits;
    for (const auto& side : sides) {
      compared_.wait(side->decoder.stream());  // the rows before are read out
      logits.push_back(side->logits(row, rows));
      side->ready.wait(stream());
    }
    return logits;
  }

  void compare(int64_t row, int64_t rows, int64_t begin) {
    std::vector<const float*> bases = logits_of(bases_, row, rows);
    if (bases.empty()) bases.push_back(nullptr);
    auto results = results_.begin();
    for (const float* candidate : logits_of(candidates_, row, rows)) {
      for (const float* base : bases) {
        kernels::compare_logits_cuda(base, candidate, rows, vocab_, ids_.as<int32_t>() + row + 1,
                                     results++->as<LogitComparison>() + (row - begin), stream());
      }
    }
    compared_.record(stream());
  }

  std::vector<LogitComparison> read(const device::DeviceBuffer& results, size_t count) const {
    std::vector<LogitComparison> tokens(count);
    results.download(std::as_writable_bytes(std::span(tokens)), stream());
    stream().synchronize();
    const auto finite = [](const LogitComparison& token) {
      return std::isfinite(token.nll_a) && std::isfinite(token.nll_b);
    };
    return std::ranges::all_of(tokens, finite) ? tokens : std::vector<LogitComparison>{};
  }

  const model::LayerStage stage_;
  int64_t vocab_;
  std::vector<std::unique_ptr<Side>> candidates_, bases_;
  device::DeviceBuffer ids_;
  std::vector<device::DeviceBuffer> results_;  // for each candidate one for each base
  device::Event compared_;
};

}  // namespace

WindowScorer cuda_window_scorer(device::Context& gpu, std::span<const Model* const> candidates,
                                std::span<const BaseModel> bases, int64_t capacity, kernels::KvChoice kv,
                                std::optional<int64_t> residual_bytes, bool int8_activations,
                                const model::LayerStage& stage) {
  const auto scorer =
      std::make_shared<Scorer>(gpu, candidates, bases, capacity, kv, residual_bytes, int8_activations, stage);
  return
      [scorer](std::span<const int32_t> inputs, int64_t first_scored) { return scorer->score(inputs, first_scored); };
}

}  // namespace w4q::verify
