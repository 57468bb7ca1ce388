#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

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

/// A model on the GPU with its decoder. Where single tokens skip pages, all are decoded as such.
struct Side {
  Side(const Model& model_, int64_t capacity, kernels::KvChoice kv, std::optional<int64_t> residual_bytes = {},
       bool int8_activations = false)
      : model(CudaModel::upload(model_, residual_bytes)),
        decoder(
            model,
            {.capacity = capacity, .kv = kv, .chunk = kv.prunes() ? 1 : 2048, .int8_activations = int8_activations}) {}

  /// Logits of rows first …; `ready` is recorded behind them.
  const float* logits(int64_t first, int64_t rows) {
    const model::CudaMatrix part = decoder.logits(first, rows);
    ready.record(decoder.stream());
    return static_cast<const float*>(part.data);
  }

  CudaModel model;
  CudaDecoder decoder;
  device::Event ready;
};

class Scorer {
 public:
  Scorer(const Model& candidate, const Model* base, int64_t capacity, kernels::KvChoice kv, kernels::KvChoice base_kv,
         std::optional<int64_t> residual_bytes, bool int8_activations)
      : vocab_(candidate.config().vocab_size), candidate_(candidate, capacity, kv, residual_bytes, int8_activations) {
    if (base != nullptr) base_.emplace(*base, capacity, base_kv);
    ids_ = device::DeviceBuffer(static_cast<size_t>(capacity) * sizeof(int32_t));
    results_ = device::DeviceBuffer(static_cast<size_t>(capacity) * sizeof(LogitComparison));
  }

  std::vector<LogitComparison> score(std::span<const int32_t> inputs, int64_t first_scored) {
    for (Side* side : sides()) {
      side->decoder.reset();
      side->decoder.forward(inputs);
    }
    const device::Stream& stream = candidate_.decoder.stream();
    ids_.upload(std::as_bytes(inputs), stream);
    // The row before a token predicts it.
    const int64_t begin = first_scored - 1;
    const auto end = static_cast<int64_t>(inputs.size()) - 1;
    int64_t step = candidate_.decoder.most_logit_rows();
    if (base_) step = std::min(step, base_->decoder.most_logit_rows());
    for (int64_t row = begin; row < end; row += step) compare(row, std::min(step, end - row), begin);
    std::vector<LogitComparison> tokens(static_cast<size_t>(end - begin));
    results_.download(std::as_writable_bytes(std::span(tokens)), stream);
    stream.synchronize();
    const auto finite = [](const LogitComparison& token) {
      return std::isfinite(token.nll_a) && std::isfinite(token.nll_b);
    };
    return std::ranges::all_of(tokens, finite) ? tokens : std::vector<LogitComparison>{};
  }

 private:
  std::vector<Side*> sides() {
    if (base_) return {&*base_, &candidate_};
    return {&candidate_};
  }

  void compare(int64_t row, int64_t rows, int64_t begin) {
    const device::Stream& stream = candidate_.decoder.stream();
    const float* base = nullptr;
    if (base_) {
      compared_.wait(base_->decoder.stream());  // the rows before are read out
      base = base_->logits(row, rows);
      base_->ready.wait(stream);
    }
    const float* const logits = candidate_.logits(row, rows);
    kernels::compare_logits_cuda(base, logits, rows, vocab_, ids_.as<int32_t>() + row + 1,
                                 results_.as<LogitComparison>() + (row - begin), stream.get());
    compared_.record(stream);
  }

  int64_t vocab_;
  Side candidate_;
  std::optional<Side> base_;
  device::DeviceBuffer ids_, results_;
  device::Event compared_;
};

}  // namespace

WindowScorer cuda_window_scorer(const Model& candidate, const Model* base, int64_t capacity, kernels::KvChoice kv,
                                kernels::KvChoice base_kv, std::optional<int64_t> residual_bytes,
                                bool int8_activations) {
  const auto scorer =
      std::make_shared<Scorer>(candidate, base, capacity, kv, base_kv, residual_bytes, int8_activations);
  return
      [scorer](std::span<const int32_t> inputs, int64_t first_scored) { return scorer->score(inputs, first_scored); };
}

}  // namespace w4q::verify
