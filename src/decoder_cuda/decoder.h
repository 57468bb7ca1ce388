// The decoder on the GPU, with the CPU's model::Decoder as its reference: f16 activations and products with fp32 sums,
// a residual stream in fp32, a paged KV cache.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "decoder_cuda/model.h"
#include "kernels/attention/kv_page.h"
#include "kernels/sampling/logits.h"
#include "kernels/sampling/sampling.h"

namespace w4q::decoder_cuda {

/// Rows in GPU memory, complete once the stream has come there.
struct CudaMatrix {
  const void* data = nullptr;
  DType dtype = DType::f16;  ///< f16 or f32
  int64_t rows = 0, cols = 0;
  const device::Stream* stream = nullptr;
};

/// model::Observer (decoder_layer.h) for activations that stay on the GPU: hidden states are f32, inputs of linear
/// layers f16 as they are multiplied. What is shown is overwritten by later work of the same stream.
struct CudaObserver {
  std::function<void(int64_t index, const CudaMatrix& hidden)> hidden;
  std::function<void(std::span<const std::string> linears, const CudaMatrix& input)> linear_input;
  /// Asked behind that: whether the block may end there, with the residual stream as it was, since nobody wants more of
  /// it. Of mixtures only before the router.
  std::function<bool(std::span<const std::string> linears)> ends_there = {};
};

struct CudaDecoderOptions {
  int64_t capacity = 0;  ///< most positions of one sequence
  kernels::KvChoice kv = {};
  int64_t chunk = 2048;           ///< most tokens that pass through a layer together
  bool graph = true;              ///< single tokens replay a captured graph
  bool overlap = true;            ///< launches begin while the one before still runs, where the GPU can
  bool fuse = true;               ///< norms of single tokens are part of the products around them, where kernels can
  bool int8_activations = false;  ///< of prompts (int8_activations.h)
};

/// One kind of work of a step, run by itself for all layers.
struct StepPart {
  std::string name;      ///< "q, k, v"
  int64_t launches = 0;  ///< in a step
  int64_t bytes = 0;     ///< that a step reads for it
  double seconds = 0;    ///< in a step, its launches back to back in a graph
};

/// A sequence being decoded on the GPU of its model. Not thread-safe; the model may be shared and must outlive it.
class CudaDecoder {
 public:
  /// Throws bad_argument when the capacity is not positive, device when the memory does not suffice, unsupported for
  /// heads of more than 256 values, and for int8 activations as check_int8_activations.
  CudaDecoder(const CudaModel& model, const CudaDecoderOptions& options);
  ~CudaDecoder();
  CudaDecoder(CudaDecoder&&) noexcept;

  /// Forgets the sequence.
  void reset();
  int64_t position() const noexcept;
  const device::Stream& stream() const noexcept;

  /// Appends `ids` to the sequence; hidden states after the final norm, [ids × hidden] f16, until the next call. Errors
  /// as model::Decoder::forward.
  CudaMatrix forward(std::span<const int32_t> ids, const CudaObserver* observer = nullptr);
  /// The same of a model that several processes hold together, each on its GPU: hidden states go over host memory. At a
  /// stage that is not the last there are none.
  CudaMatrix forward(std::span<const int32_t> ids, const model::LayerStage& stage);
  /// Logits of rows first … first + rows − 1 of the last forward, at most most_logit_rows(), f32, until the next call
  /// of it.
  CudaMatrix logits(int64_t first, int64_t rows);
  int64_t most_logit_rows() const noexcept;
  /// The same as fp32 on the host.
  void logits(int64_t first, MatrixView<float> out);

  // Generation: tokens stay on the GPU until they are read.

  /// Appends `prompt` and draws the token behind it: number 0. Errors as forward, and bad_argument for options out of
  /// range.
  void start(std::span<const int32_t> prompt, const kernels::SamplingOptions& sampling);
  /// Queues the decoding of the token drawn last and the draw of the next. Throws bad_argument when the capacity is
  /// used up. Nothing waits.
  void step();
  /// Waits for token `number` of the sequence since start(); −1 where its largest logit was not finite.
  int32_t token(int64_t number);

  /// Share of the pages of all layers that the token decoded last by itself attended to; 1 where none are skipped.
  double kept_pages() const;
  /// Residual passes that come from host memory; null where all are in GPU memory.
  CudaOffload* offload() noexcept;
  /// What a captured step launches; 0 before there is one.
  size_t graph_nodes() const noexcept;
  /// Bytes that a step at the current position reads: weights, norms and the cache.
  int64_t step_bytes() const;
  /// Times the parts of a step at the current position (at least 1). Its activations and the newest entry of the cache
  /// are overwritten: start() or reset() next.
  std::vector<StepPart> time_step_parts();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace w4q::decoder_cuda
