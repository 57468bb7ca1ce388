#include "pipeline/pairs_cuda.h"

#include <algorithm>

#include "core/error.h"
#include "core/interrupt.h"

namespace w4q::pipeline {
namespace {

const decoder_cuda::CudaObserver nobody;

/// Sees the inputs of one group, and how many rows came before.
template <class See>
decoder_cuda::CudaObserver observe(const std::string& group, int64_t& seen, const See& see) {
  decoder_cuda::CudaObserver observer;
  observer.linear_input = [&group, &seen, see](std::span<const std::string> linears,
                                               const decoder_cuda::CudaMatrix& input) {
    if (linears.front() != group) return;
    see(static_cast<const __half*>(input.data), input.rows);
    seen += input.rows;
  };
  return observer;
}

}  // namespace

PairsCuda::PairsCuda(quantize::CudaWork& work, const model::ModelConfig& config, const CalibrationShape& shape,
                     const PairedChunks& chunks)
    : work_(work),
      shape_(shape),
      chunks_(chunks),
      window_values_(shape.length * config.hidden_size),
      plain_(config, shape.length, chunks.batch, work.stream),
      quantized_(config, shape.length, chunks.batch, work.stream),
      scratch_(work.context, static_cast<size_t>(chunks.batch * window_values_) * sizeof(float)) {}

void PairsCuda::begin(const model::LayerWeights& plain) {
  plain_.load(plain);
  loaded_ = false;
  done_ = 0;
}

void PairsCuda::take(const PairedStates& states) {
  if (states.changed || !loaded_) quantized_.load(states.quantized);
  loaded_ = true;
}

void PairsCuda::for_batches(const PairedStates& states, const Visit& visit) {
  for (int64_t chunk = 0; chunk < chunks_.plain.count(); ++chunk) {
    float* const plain = chunks_.plain.load(chunk, states.plain_others);
    float* const quantized = chunks_.quantized.load(chunk, states.quantized_others);
    visit({plain, quantized, chunks_.plain.windows(chunk)});
    chunks_.plain.store(chunk, plain, states.plain_others);
    chunks_.quantized.store(chunk, quantized, states.quantized_others);
    work_.stream.synchronize();
    check_interrupt();
  }
}

void PairsCuda::advance(const Batch& batch, size_t end) {
  if (done_ >= end) return;
  plain_.run_blocks(batch.plain, batch.windows, done_, end, nobody);
  quantized_.run_blocks(batch.quantized, batch.windows, done_, end, nobody);
}

float* PairsCuda::copy(const float* hidden, int64_t windows) {
  device::copy(device::Way::on_gpu, scratch_.data(), hidden,
               static_cast<size_t>(windows * window_values_) * sizeof(float), work_.stream, "copying hidden states");
  return scratch_.as<float>();
}

quantize::InputPair PairsCuda::pair(const model::InputGroup& group, size_t block, const PairedStates& states,
                                    bool keep) {
  take(states);
  quantize::InputPairCuda sums(work_, group.width);
  const int64_t rows = chunks_.batch * shape_.length;
  captured_ = device::DeviceBuffer(work_.context, static_cast<size_t>(rows * group.width) * sizeof(__half));
  auto* const captured = captured_.as<__half>();
  for_batches(states, [&](const Batch& batch) {
    advance(batch, block);
    int64_t seen = 0, met = 0;
    const auto keep_plain = observe(group.name(), seen, [&](const __half* input, int64_t count) {
      ensure(seen + count <= rows, "calibration: inputs of another shape");
      device::copy(device::Way::on_gpu, captured + seen * group.width, input,
                   static_cast<size_t>(count * group.width) * sizeof(__half), work_.stream, "copying inputs");
    });
    const auto add = observe(group.name(), met, [&](const __half* input, int64_t count) {
      ensure(met + count <= seen, "calibration: inputs of another shape");
      sums.add_rows(captured + met * group.width, input, count);
    });
    plain_.run_blocks(copy(batch.plain, batch.windows), batch.windows, block, block + 1, keep_plain);
    quantized_.run_blocks(copy(batch.quantized, batch.windows), batch.windows, block, block + 1, add);
    ensure(seen == batch.windows * shape_.length && met == seen, "calibration: inputs of another length");
  });
  done_ = std::max(done_, block);
  captured_ = device::DeviceBuffer();
  auto result = keep ? sums.keep(group.name()) : sums.download(group.name());
  work_.release();
  return result;
}

void PairsCuda::finish(const PairedStates& states) {
  take(states);
  const size_t end = plain_.blocks();
  for_batches(states, [&](const Batch& batch) { advance(batch, end); });
  plain_.release();
  quantized_.release();
}

}  // namespace w4q::pipeline
