#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "device/buffer.h"
#include "kernels/logits_cuda.h"
#include "model/cuda_decoder.h"
#include "verify/window_scorer.h"

namespace w4q::verify {
namespace {

using kernels::LogitComparison;
using model::CudaDecoder;
using model::CudaModel;
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
    const model::CudaMatrix part = decoder.logits(first, rows);
    ready.record(decoder.stream());
    return static_cast<const float*>(part.data);
  }

  std::shared_ptr<const CudaModel> model;  // the candidate may be its own base
  CudaDecoder decoder;
  device::Event ready;
};

std::shared_ptr<const CudaModel> upload(const Model& model, std::optional<int64_t> residual_bytes = {}) {
  return std::make_shared<const CudaModel>(CudaModel::upload(model, residual_bytes));
}

class Scorer {
 public:
  Scorer(const Model& candidate, std::span<const BaseModel> bases, int64_t capacity, kernels::KvChoice kv,
         std::optional<int64_t> residual_bytes, bool int8_activations)
      : vocab_(candidate.config().vocab_size),
        candidate_(upload(candidate, residual_bytes), capacity, kv, int8_activations) {
    for (const auto& base : bases) {
      auto weights = base.model == &candidate ? candidate_.model : upload(*base.model);
      bases_.push_back(std::make_unique<Side>(std::move(weights), capacity, base.kv));
    }
    ids_ = device::DeviceBuffer(static_cast<size_t>(capacity) * sizeof(int32_t));
    for (size_t i = 0; i < std::max<size_t>(1, bases.size()); ++i) {
      results_.emplace_back(static_cast<size_t>(capacity) * sizeof(LogitComparison));
    }
  }

  std::vector<std::vector<LogitComparison>> score(std::span<const int32_t> inputs, int64_t first_scored) {
    const device::Stream& stream = candidate_.decoder.stream();
    int64_t step = candidate_.decoder.most_logit_rows();
    for (const auto& base : bases_) {
      decode(*base, inputs);
      step = std::min(step, base->decoder.most_logit_rows());
    }
    decode(candidate_, inputs);
    ids_.upload(std::as_bytes(inputs), stream);
    // The row before a token predicts it.
    const int64_t begin = first_scored - 1;
    const auto end = static_cast<int64_t>(inputs.size()) - 1;
    for (int64_t row = begin; row < end; row += step) compare(row, std::min(step, end - row), begin);
    std::vector<std::vector<LogitComparison>> tokens;
    for (auto& results : results_) tokens.push_back(read(results, static_cast<size_t>(end - begin)));
    return tokens;
  }

 private:
  static void decode(Side& side, std::span<const int32_t> inputs) {
    side.decoder.reset();
    side.decoder.forward(inputs);
  }

  void compare(int64_t row, int64_t rows, int64_t begin) {
    const device::Stream& stream = candidate_.decoder.stream();
    std::vector<const float*> logits;
    for (const auto& base : bases_) {
      compared_.wait(base->decoder.stream());  // the rows before are read out
      logits.push_back(base->logits(row, rows));
      base->ready.wait(stream);
    }
    if (logits.empty()) logits.push_back(nullptr);
    const float* const candidate = candidate_.logits(row, rows);
    for (size_t i = 0; i < logits.size(); ++i) {
      kernels::compare_logits_cuda(logits[i], candidate, rows, vocab_, ids_.as<int32_t>() + row + 1,
                                   results_[i].as<LogitComparison>() + (row - begin), stream.get());
    }
    compared_.record(stream);
  }

  std::vector<LogitComparison> read(const device::DeviceBuffer& results, size_t count) const {
    const device::Stream& stream = candidate_.decoder.stream();
    std::vector<LogitComparison> tokens(count);
    results.download(std::as_writable_bytes(std::span(tokens)), stream);
    stream.synchronize();
    const auto finite = [](const LogitComparison& token) {
      return std::isfinite(token.nll_a) && std::isfinite(token.nll_b);
    };
    return std::ranges::all_of(tokens, finite) ? tokens : std::vector<LogitComparison>{};
  }

  int64_t vocab_;
  Side candidate_;
  std::vector<std::unique_ptr<Side>> bases_;
  device::DeviceBuffer ids_;
  std::vector<device::DeviceBuffer> results_;  // one for each base
  device::Event compared_;
};

}  // namespace

WindowScorer cuda_window_scorer(const Model& candidate, std::span<const BaseModel> bases, int64_t capacity,
                                kernels::KvChoice kv, std::optional<int64_t> residual_bytes, bool int8_activations) {
  const auto scorer = std::make_shared<Scorer>(candidate, bases, capacity, kv, residual_bytes, int8_activations);
  return
      [scorer](std::span<const int32_t> inputs, int64_t first_scored) { return scorer->score(inputs, first_scored); };
}

}  // namespace w4q::verify
