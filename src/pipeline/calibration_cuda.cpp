#include "pipeline/calibration_cuda.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/interrupt.h"
#include "decoder_cuda/layer_decoder.h"
#include "pipeline/calibrate.h"
#include "pipeline/pairs_cuda.h"
#include "pipeline/window_chunks.h"
#include "quantize/statistics_cuda.h"

namespace w4q::pipeline {
namespace {

/// What one layer takes while it is calibrated or packed, generously: matrices of the widest input in fp64 and fp32,
/// those of every expert's inputs, the weights in fp32 twice, and a rest.
int64_t layer_memory(const model::ModelConfig& config, bool pairs) {
  int64_t weights = 0, widest = 0, experts = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    int64_t squares = 0;
    for (const auto& group : model::input_groups(config, layer)) {
      if (group.expert) squares += group.width * group.width;
    }
    experts = std::max(experts, squares);
    int64_t sum = 0;
    for (const auto& linear : model::layer_plan(config, layer).linears()) {
      widest = std::max(widest, linear.k);
      sum += linear.n * linear.k;
    }
    weights = std::max(weights, sum);
  }
  const int64_t lanes = experts > 0 ? int64_t{4} << 30 : 0;  // which work side by side (calibrated_layer.cpp)
  const int64_t both = pairs ? 16 * widest * widest + 4 * weights + (int64_t{1} << 30) : 0;
  return 32 * widest * widest + 8 * experts + 8 * weights + (int64_t{1} << 30) + lanes + both;
}

/// Windows of `bytes` that stay in GPU memory, whole chunks or all, beside chunks on their way.
int64_t resident_windows(const device::Context& gpu, const model::ModelConfig& config, const CalibrationShape& shape,
                         int64_t chunk, int64_t bytes) {
  const int64_t each = shape.pairs ? 2 * bytes : bytes;
  const int64_t left = gpu.budget_bytes() - layer_memory(config, shape.pairs) - 3 * chunk * bytes;
  const int64_t fit = std::clamp<int64_t>(left / each, 0, shape.samples);
  return fit == shape.samples ? fit : fit / chunk * chunk;
}

}  // namespace

std::shared_ptr<quantize::CudaWork> make_cuda_work(device::Context& gpu) {
  return device::have_cublas() ? std::make_shared<quantize::CudaWork>(gpu) : nullptr;
}

device::Context* gpu_of(const std::shared_ptr<quantize::CudaWork>& work) {
  return work == nullptr ? nullptr : &work->context;
}

void free_memory(const std::shared_ptr<quantize::CudaWork>& work) {
  if (work == nullptr) return;
  work->release();
  work->beside.clear();
  if (const auto& spares = work->stream.spares()) spares->free_all();
}

struct CalibrationCuda::Impl {
  using EmbedLayer = CalibrationCuda::EmbedLayer;

  Impl(std::shared_ptr<quantize::CudaWork> work_, const model::ModelConfig& config_, const CalibrationShape& shape_)
      : work(std::move(work_)),
        config(config_),
        shape(shape_),
        batch(std::clamp<int64_t>(calibration_chunk_rows / shape.length, 1, shape.samples)),
        window_values(shape.length * config.hidden_size),
        decoder(config, shape.length, batch, work->stream, shape.samples),
        own_rows(shape.length, config.layer_embedding_size),
        own_embeddings(work->context, static_cast<size_t>(batch * own_rows.size()) * sizeof(float)),
        resident(resident_windows(work->context, config, shape, batch, window_values * int64_t{sizeof(float)})),
        chunks({shape.samples, batch, window_values}, resident, work->stream),
        scratch(work->context, shape.pairs ? chunks.bytes(0) : 0) {
    if (!shape.pairs) return;
    quantized_chunks.emplace(WindowChunks::Shape{shape.samples, batch, window_values}, resident, work->stream);
    pairs = std::make_unique<PairsCuda>(*work, config, shape, PairedChunks{chunks, *quantized_chunks, batch});
  }

  void observe(std::span<const std::string> linears, const decoder_cuda::CudaMatrix& input) {
    const auto found = numbers.find(linears.front());
    if (found == numbers.end() || !sums[found->second]) return;
    sums[found->second]->add_rows(static_cast<const __half*>(input.data), input.rows);
  }

  /// Pairs go over the layer again: its inputs stay.
  float* passing(float* hidden, int64_t chunk) {
    if (!shape.pairs) return hidden;
    device::copy(device::Way::on_gpu, scratch.data(), hidden, chunks.bytes(chunk), work->stream,
                 "copying hidden states");
    return scratch.as<float>();
  }

  void begin(const model::LayerWeights& weights, const LayerTurn& turn) {
    groups = model::input_groups(config, *turn.layer);
    numbers.clear();
    for (size_t i = 0; i < groups.size(); ++i) numbers.emplace(groups[i].name(), i);
    sums = std::vector<std::optional<quantize::StatisticsCuda>>(groups.size());
    for (size_t i = 0; turn.sums && i < groups.size(); ++i) sums[i].emplace(*work, groups[i].width, shape.gram);
    decoder.load(weights);
  }

  /// The windows of a chunk as the decoder takes them, with what the layer adds of its own.
  decoder_cuda::CudaWindows windows_of(int64_t chunk, const EmbedLayer& embed_layer) {
    const int64_t first = chunk * batch, count = chunks.windows(chunk);
    if (!embed_layer) return {.first = first, .count = count};
    for (int64_t i = 0; i < count; ++i) {
      embed_layer(first + i, own_rows.view());
      device::copy(device::Way::to_gpu, own_embeddings.as<float>() + i * own_rows.size(), own_rows.values.data(),
                   own_rows.values.size() * sizeof(float), work->stream, "copying embeddings of a layer");
      work->stream.synchronize();
    }
    return {first, count, own_embeddings.as<float>()};
  }

  void run_chunk(int64_t chunk, float* hidden, const EmbedLayer& embed_layer, const std::function<void()>& on_window) {
    decoder_cuda::CudaObserver observer;
    observer.linear_input = [&](std::span<const std::string> linears, const decoder_cuda::CudaMatrix& input) {
      observe(linears, input);
    };
    decoder.run(passing(hidden, chunk), windows_of(chunk, embed_layer), observer);
    work->stream.synchronize();
    check_interrupt();
    for (int64_t i = 0; on_window && i < chunks.windows(chunk); ++i) on_window();
  }

  /// Where a chunk that comes from another rank goes: the one before it may be on its way to the next.
  float* arrival(int64_t chunk) {
    auto& buffer = arrived[static_cast<size_t>(chunk % 2)];
    if (buffer.size() == 0) buffer = device::DeviceBuffer(work->context, chunks.bytes(0));
    return buffer.as<float>();
  }

  /// Hands on what the step says, `hidden` being the chunk that it ran.
  void exchange(const Turn& turn, const TurnStep& step, float* hidden, HiddenStates& others) {
    std::vector<ExchangeCuda::Part> sent;
    if (step.sent) sent.push_back({turn.turn.to, hidden, chunks.bytes(*step.sent)});
    if (step.kept_sent) {
      sent.push_back({turn.turn.kept_to, chunks.load(*step.kept_sent, others), chunks.bytes(*step.kept_sent)});
    }
    std::optional<ExchangeCuda::Part> received;
    if (step.received) received = {turn.turn.from, arrival(*step.received), chunks.bytes(*step.received)};
    if (sent.empty() && !received) return;
    ensure(turn.exchange != nullptr, "calibration: hidden states of other ranks, and no way to them");
    turn.exchange->exchange(sent, received);
  }

  LayerStatistics collect(bool keep_gram) {
    LayerStatistics result;
    for (size_t i = 0; i < groups.size() && sums[i]; ++i) {
      result.emplace_back();
      const std::string& name = groups[i].name();
      if (keep_gram && shape.gram) {
        result[i] = sums[i]->channels(name);
        result[i].gpu_gram = std::make_shared<quantize::GramCuda>(sums[i]->gram());
      } else {
        result[i] = sums[i]->download(name);
      }
      sums[i].reset();
    }
    return result;
  }

  const std::shared_ptr<quantize::CudaWork> work;
  const model::ModelConfig& config;
  const CalibrationShape shape;
  const int64_t batch, window_values;
  decoder_cuda::CudaLayerDecoder decoder;
  struct Rows {
    Rows(int64_t rows_, int64_t cols_) : rows(rows_), cols(cols_), values(static_cast<size_t>(rows_ * cols_)) {}
    int64_t size() const { return rows * cols; }
    MatrixView<float> view() { return {values.data(), rows, cols}; }

    int64_t rows, cols;
    std::vector<float> values;
  };
  Rows own_rows;  // of a window
  device::DeviceBuffer own_embeddings;
  const int64_t resident;
  WindowChunks chunks;
  std::optional<WindowChunks> quantized_chunks;  // with pairs
  device::DeviceBuffer scratch;                  // with pairs, for what runs but does not go on
  std::array<device::DeviceBuffer, 2> arrived;   // chunks of other ranks
  std::unique_ptr<PairsCuda> pairs;
  std::vector<model::InputGroup> groups;
  std::unordered_map<std::string, size_t> numbers;            // of groups, by name
  std::vector<std::optional<quantize::StatisticsCuda>> sums;  // one for each of the groups
};

CalibrationCuda::CalibrationCuda(std::shared_ptr<quantize::CudaWork> work, const model::ModelConfig& config,
                                 const CalibrationShape& shape)
    : impl_(std::make_unique<Impl>(std::move(work), config, shape)) {}
CalibrationCuda::~CalibrationCuda() = default;

int64_t CalibrationCuda::resident() const noexcept { return impl_->resident; }

void CalibrationCuda::put(int64_t window, MatrixView<const float> hidden) {
  const auto bytes = static_cast<size_t>(impl_->window_values) * sizeof(float);
  const device::Stream& stream = impl_->work->stream;
  float* const plain = impl_->chunks.window(window);
  device::copy(device::Way::to_gpu, plain, hidden.data, bytes, stream, "copying hidden states");
  if (impl_->quantized_chunks) {
    device::copy(device::Way::on_gpu, impl_->quantized_chunks->window(window), plain, bytes, stream,
                 "copying hidden states");
  }
  stream.synchronize();
}

void CalibrationCuda::begin_pairs(const model::LayerWeights& plain) { impl_->pairs->begin(plain); }

quantize::InputPair CalibrationCuda::pair(const model::InputGroup& group, size_t block, const PairedStates& states,
                                          bool keep) {
  return impl_->pairs->pair(group, block, states, keep);
}

void CalibrationCuda::finish_pairs(const PairedStates& states) { impl_->pairs->finish(states); }

LayerStatistics CalibrationCuda::run(const Turn& turn, HiddenStates& others, const std::function<void()>& on_window) {
  Impl& impl = *impl_;
  const LayerTurn& part = turn.turn;
  if (part.layer) impl.begin(*turn.weights, part);
  for (int64_t step = -1; step <= last_step(part, impl.chunks.count()); ++step) {
    const TurnStep now = step_of(part, impl.chunks.count(), step);
    float* hidden = nullptr;
    if (now.run) {
      hidden = part.from < 0 ? impl.chunks.load(*now.run, others) : impl.arrival(*now.run);
      impl.run_chunk(*now.run, hidden, turn.embed_layer, on_window);
      if (part.to < 0 && !impl.shape.pairs) impl.chunks.store(*now.run, hidden, others);
    }
    impl.exchange(turn, now, hidden, others);
  }
  impl.arrived = {};
  if (!part.layer) return {};
  impl.decoder.release();
  impl.work->release();
  return impl.collect(turn.keep_gram);
}

}  // namespace w4q::pipeline
