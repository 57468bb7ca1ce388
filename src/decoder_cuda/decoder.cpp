#include "decoder_cuda/decoder.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/text.h"
#include "decoder_cuda/decoder_impl.h"
#include "device/copy.h"
#include "kernels/linear/int8_rows.h"
#include "model/decoder.h"
#include "model/int8_activations.h"

namespace w4q::decoder_cuda {
namespace {

using device::DeviceBuffer;
using kernels::StepState;

/// Logits of this many values are held at a time.
constexpr int64_t logit_values = int64_t{1} << 25;

/// As model/int8_activations.h, of what was uploaded.
void check_int8_activations(const CudaModel& uploaded) {
  bool any = false;
  for (const auto* linear : linears_of(uploaded.layers())) {
    if (!linear->widened.empty()) model::refuse_int8_activations(linear->widened.front(), "a scheme without kernels");
    for (const CudaProduct& product : linear->products) {
      if (!product.packed()) continue;
      if (!product.int8_plan) model::refuse_int8_activations(join(linear->names), product.scheme);
      any = true;
    }
  }
  if (!any) model::refuse_int8_activations("any layer", "weights of 16 bits");
}

}  // namespace

namespace {

/// Of the attention of any layer.
size_t workspace_of(const device::Properties& gpu, const model::ModelConfig& config,
                    const CudaDecoderOptions& options) {
  size_t bytes = 256;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const model::AttentionConfig attention = config.attention_of(layer);
    if (config.has_delta_net(layer) || attends_plainly(attention)) continue;
    const kernels::DecodeAttentionShape shape{static_cast<int>(attention.heads), static_cast<int>(attention.kv_heads),
                                              attention.head_dim, options.kv.type, options.capacity};
    bytes = std::max(bytes, kernels::decode_attention_workspace(gpu, shape));
  }
  return bytes;
}

}  // namespace

CudaDecoder::Impl::Impl(const CudaModel& model_, const CudaDecoderOptions& options_)
    : model(model_),
      gpu(model.context()),
      config(model.config()),
      options(options_),
      chunk(std::clamp<int64_t>(std::min(options.chunk, options.capacity), 1, 1 << 15)),
      logit_rows(std::clamp<int64_t>(logit_values / config.vocab_size, 1, std::min<int64_t>(options.capacity, 1024))),
      cache(key_shapes(config, options.kv.type), pages_for(options.capacity), stream),
      ropes(config, options.capacity, stream),
      runner(config, model.layers(), model.linears(),
             {.rows = chunk,
              .product_rows = std::max(chunk, logit_rows),
              .fuse = options.fuse,
              .overlap = options.overlap,
              .int8_activations = options.int8_activations},
             stream),
      residual(device_matrix<float>(gpu, chunk, config.hidden_size)),
      ids_on_gpu(device_matrix<int32_t>(gpu, chunk, 1)),
      projected(device_matrix<float>(gpu, chunk, config.layers * config.layer_embedding_size)),
      layer_embeddings(device_matrix<float>(gpu, chunk, config.layers * config.layer_embedding_size)),
      logits(device_matrix<float>(gpu, logit_rows, config.vocab_size)),
      attention_workspace(gpu, workspace_of(gpu.properties(), config, options)),
      state(gpu, sizeof(StepState)),
      staged_ids(gpu, static_cast<size_t>(chunk) * sizeof(int32_t)),
      drawn(gpu, static_cast<size_t>(options.capacity + 1) * sizeof(int32_t)),
      staged_state(gpu, sizeof(StepState)) {
  if (options.int8_activations) check_int8_activations(model);
  attention_workspace.fill(0, stream);
  delta.resize(model.layers().size());
  for (size_t layer = 0; layer < delta.size(); ++layer) {
    if (!config.has_delta_net(static_cast<int64_t>(layer))) continue;
    delta[layer] = device_matrix<float>(gpu, 1, config.delta.history_size() + config.delta.state_size());
  }
  graphs = std::ranges::all_of(mixtures_of(model.layers()), [](const auto* mixture) { return mixture->routes(); });
  const auto pairs = static_cast<size_t>(ropes.steps(runner.usual).pairs);
  step_cosine = DeviceBuffer(gpu, pairs * sizeof(float));
  step_sine = DeviceBuffer(gpu, pairs * sizeof(float));
  if (options.kv.prunes()) {
    std::vector<int32_t> all(static_cast<size_t>(options.capacity));
    std::iota(all.begin(), all.end(), 0);
    positions = DeviceBuffer::copy_of(std::as_bytes(std::span(all)), stream);
    kept = DeviceBuffer(gpu, static_cast<size_t>(config.layers * config.heads) * sizeof(int32_t));
    kept.fill(0, stream);
    stream.synchronize();  // `all` goes
  }
  stream.synchronize();
}

CudaDecoder::CudaDecoder(const CudaModel& model, const CudaDecoderOptions& options) {
  if (options.capacity < 1 || options.capacity > (int64_t{1} << 31) - 1) {
    throw Error(ErrorCode::bad_argument, concat("a context of ", options.capacity, " positions cannot be held"));
  }
  impl_ = std::make_unique<Impl>(model, options);
}
CudaDecoder::~CudaDecoder() = default;
CudaDecoder::CudaDecoder(CudaDecoder&&) noexcept = default;

void CudaDecoder::reset() {
  impl_->position = 0;
  impl_->hidden_rows = 0;
  impl_->cache.clear();
}

int64_t CudaDecoder::position() const noexcept { return impl_->position; }
const device::Stream& CudaDecoder::stream() const noexcept { return impl_->stream; }
int64_t CudaDecoder::most_logit_rows() const noexcept { return impl_->logit_rows; }
double CudaDecoder::kept_pages() const {
  const Impl& decoder = *impl_;
  if (!decoder.options.kv.prunes() || decoder.position == 0) return 1;
  std::vector<int32_t> counts(decoder.kept.size() / sizeof(int32_t));
  decoder.kept.download(std::as_writable_bytes(std::span(counts)), decoder.stream);
  decoder.stream.synchronize();
  int64_t used = 0;
  int64_t all = 0;
  for (const int32_t count : counts) {
    used += count;
    if (count > 0) all += pages_for(decoder.position);  // every key head keeps at least one
  }
  return all > 0 ? static_cast<double>(used) / static_cast<double>(all) : 1;
}

CudaOffload* CudaDecoder::offload() noexcept { return impl_->runner.multiplier.offload(); }
size_t CudaDecoder::graph_nodes() const noexcept { return impl_->graph.nodes(); }

int64_t CudaDecoder::step_bytes() const {
  return impl_->model.bytes_per_token() + impl_->position * impl_->cache.bytes_per_token();
}

void CudaDecoder::Impl::begin_call(std::span<const int32_t> ids) {
  model::check_ids(ids, position, options.capacity, config.known_ids());
  const auto rows = static_cast<int64_t>(ids.size());
  cache.grow(position + rows);
  const auto bytes = static_cast<size_t>(rows * config.hidden_size) * sizeof(__half);
  if (hidden.size() < bytes) {
    stream.synchronize();
    hidden = DeviceBuffer(gpu, bytes);
  }
  ropes.set_call(position, rows, stream);
  runner.multiplier.set_int8_activations(options.int8_activations && rows >= kernels::least_int8_rows);
}

void CudaDecoder::Impl::end_call(int64_t rows) {
  runner.multiplier.set_int8_activations(false);
  hidden_rows = rows;
}

CudaMatrix CudaDecoder::forward(std::span<const int32_t> ids, const CudaObserver* observer) {
  Impl& decoder = *impl_;
  ensure(decoder.model.begins() && decoder.model.ends(), "CudaDecoder: layers are missing");
  const auto rows = static_cast<int64_t>(ids.size());
  decoder.begin_call(ids);
  for (int64_t row = 0; row < rows; row += decoder.chunk) {
    decoder.run_chunk(ids.subspan(static_cast<size_t>(row), static_cast<size_t>(std::min(decoder.chunk, rows - row))),
                      row, observer);
  }
  decoder.end_call(rows);
  return {decoder.hidden.data(), DType::f16, rows, decoder.config.hidden_size, &decoder.stream};
}

CudaMatrix CudaDecoder::forward(std::span<const int32_t> ids, const model::LayerStage& stage) {
  if (stage.count() == 1) return forward(ids);
  Impl& decoder = *impl_;
  const auto rows = static_cast<int64_t>(ids.size());
  const int64_t width = decoder.config.hidden_size;
  std::vector<float> states(static_cast<size_t>(std::min(decoder.chunk, rows) * width));
  decoder.begin_call(ids);
  for (int64_t row = 0; row < rows; row += decoder.chunk) {
    const int64_t count = std::min(decoder.chunk, rows - row);
    decoder.run_chunk_of_stage(ids.subspan(static_cast<size_t>(row), static_cast<size_t>(count)), row,
                               {states.data(), count, width}, stage);
  }
  decoder.end_call(rows);
  return {decoder.hidden.data(), DType::f16, stage.last() ? rows : 0, width, &decoder.stream};
}

CudaMatrix CudaDecoder::logits(int64_t first, int64_t rows) {
  Impl& decoder = *impl_;
  const int64_t vocab = decoder.config.vocab_size;
  if (first < 0 || rows < 1 || first > decoder.hidden_rows - rows || rows > decoder.logit_rows) {
    throw Error(ErrorCode::bad_argument, concat("logits of rows ", first, " to ", first + rows - 1))
        .detail(
            concat("the last call decoded ", decoder.hidden_rows, " rows; at most ", decoder.logit_rows, " at a time"));
  }
  const __half* const hidden = decoder.hidden.as<__half>() + first * decoder.config.hidden_size;
  decoder.runner.multiplier.multiply_logits(decoder.model.head(), hidden, rows, decoder.logits.as<float>());
  decoder.finish_logits(rows);
  return {decoder.logits.data(), DType::f32, rows, vocab, &decoder.stream};
}

void CudaDecoder::logits(int64_t first, MatrixView<float> out) {
  Impl& decoder = *impl_;
  for (int64_t row = 0; row < out.rows; row += decoder.logit_rows) {
    const int64_t count = std::min(decoder.logit_rows, out.rows - row);
    const CudaMatrix part = logits(first + row, count);
    const size_t width = static_cast<size_t>(part.cols) * sizeof(float);
    device::copy_rows(device::Way::from_gpu, {out.row(row), static_cast<size_t>(out.stride) * sizeof(float)},
                      {part.data, width}, width, static_cast<size_t>(count), decoder.stream, "copying logits");
  }
  decoder.stream.synchronize();
}

void CudaDecoder::start(std::span<const int32_t> prompt, const kernels::SamplingOptions& sampling) {
  kernels::check_sampling(sampling);
  Impl& decoder = *impl_;
  const CudaMatrix hidden = forward(prompt);
  logits(hidden.rows - 1, 1);
  decoder.sampling = sampling;
  decoder.graph = {};
  decoder.steps = 0;
  decoder.stream.synchronize();  // the staged state of an earlier start
  const StepState state{static_cast<int32_t>(decoder.position - 1), 0, 0};
  std::ranges::copy(std::as_bytes(std::span(&state, 1)), decoder.staged_state.bytes().begin());
  decoder.state.upload(decoder.staged_state.bytes(), decoder.stream);
  decoder.draw(decoder.logits.as<float>());
  decoder.mark_token();
}

void CudaDecoder::step() {
  Impl& decoder = *impl_;
  if (decoder.position >= decoder.options.capacity) {
    throw Error(ErrorCode::bad_argument, concat("the context of ", decoder.options.capacity, " positions is full"));
  }
  decoder.cache.grow(decoder.position + 1);
  // The first step runs as it is: what is loaded or set up on first use does not belong into a graph. Passes that come
  // from host memory are on their way from one step to the next, which no graph of a step can hold.
  if (!decoder.options.graph || !decoder.graphs || decoder.steps == 0 ||
      decoder.runner.multiplier.offload() != nullptr) {
    decoder.launch_step();
  } else {
    if (!decoder.graph) decoder.graph = device::Graph(decoder.stream, [&] { decoder.launch_step(); });
    decoder.graph.launch(decoder.stream);
  }
  ++decoder.steps;
  ++decoder.position;
  decoder.mark_token();
}

int32_t CudaDecoder::token(int64_t number) {
  Impl& decoder = *impl_;
  ensure(number >= 0 && number <= decoder.steps, "token: not drawn yet");
  // A slot that a later token has taken since waits for that one.
  decoder.events[static_cast<size_t>(number) % token_events].synchronize();
  return reinterpret_cast<const int32_t*>(decoder.drawn.bytes().data())[number];
}

}  // namespace w4q::decoder_cuda
