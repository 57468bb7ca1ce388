#include "decoder_cuda/layer_gradient.h"

#include <algorithm>
#include <array>
#include <memory>
#include <utility>
#include <variant>

#include "core/convert.h"
#include "core/error.h"
#include "core/parallel.h"
#include "device/copy.h"
#include "device/cublas.h"
#include "kernels/gradient/gradient_cuda.h"
#include "model/rope_table.h"

namespace w4q::decoder_cuda {
namespace {

using device::DeviceBuffer;
using model::Block;
using model::BlockKind;
using model::NormRole;
using model::Role;
using model::VectorRole;

DeviceBuffer floats(int64_t count, const device::Stream& stream) {
  return DeviceBuffer(stream.context(), static_cast<size_t>(count) * sizeof(float));
}

DeviceBuffer put(std::span<const float> values, UploadRing& ring) { return ring.copy_of(std::as_bytes(values)); }

void copy(const float* from, float* to, int64_t count, const device::Stream& stream) {
  device::copy(device::Way::on_gpu, to, from, static_cast<size_t>(count) * sizeof(float), stream,
               "copying activations");
}

bool takes_block(const Block& block) {
  if (block.kind == BlockKind::gated_mlp) return block.groups.front().linears.size() == 2;
  if (block.kind != BlockKind::attention) return false;
  const model::AttentionConfig& attention = block.attention;
  const auto& linears = block.groups.front().linears;
  const bool plain = linears.size() == 3 && linears[0].role == Role::query && linears[1].role == Role::key &&
                     linears[2].role == Role::value;
  return plain && !attention.output_gate && !attention.sinks && !attention.keys_are_values && !attention.value_norm &&
         !attention.keys_of && attention.soft_cap == 0 && attention.temperature == 0 && attention.clip == 0;
}

/// What a block keeps of its way forward for its way back.
struct Kept {
  DeviceBuffer input, normed, queries_before, keys_before, queries, keys, values, gates, ups, mixed, last;
};

/// Memory that grows to the largest request.
class Room {
 public:
  float* get(int64_t count, const device::Stream& stream) {
    if (buffer_.size() < static_cast<size_t>(count) * sizeof(float)) {
      buffer_ = {};
      buffer_ = floats(count, stream);
    }
    return buffer_.as<float>();
  }

 private:
  DeviceBuffer buffer_;
};

float* grown(DeviceBuffer& buffer, int64_t count, const device::Stream& stream) {
  if (buffer.size() < static_cast<size_t>(count) * sizeof(float)) {
    buffer = {};
    buffer = floats(count, stream);
  }
  return buffer.as<float>();
}

/// y [rows, n] = x · Wᵀ + b, or from `gradient` by y to that by x.
class Products {
 public:
  explicit Products(const device::Stream& stream)
      : stream_(stream), workspace_(stream.context(), device::cublas_workspace_bytes) {}

  void forward(const DecodedLinear& linear, const float* x, int64_t rows, float* y) {
    device::CublasFloatProduct product{.m = rows, .n = linear.n, .k = linear.k};
    product.a = x;
    product.lda = linear.k;
    product.b = values_of(linear);
    product.ldb = linear.k;
    product.b_transposed = true;
    product.c = y;
    product.ldc = linear.n;
    run(product);
    if (linear.bias.size() > 0) kernels::add_bias_cuda(y, linear.bias.as<float>(), rows, linear.n, stream_);
  }
  void back(const DecodedLinear& linear, const float* gradient, int64_t rows, float* by_x, bool add) {
    device::CublasFloatProduct product{.m = rows, .n = linear.k, .k = linear.n};
    product.a = gradient;
    product.lda = linear.n;
    product.b = values_of(linear);
    product.ldb = linear.k;
    product.c = by_x;
    product.ldc = linear.k;
    product.add = add;
    run(product);
  }
  void* workspace() { return workspace_.data(); }

  /// Linears of f16 are at hand in fp32 until the next call.
  void widen(std::span<const DecodedLinear> linears) {
    at_hand_ = linears;
    if (widened_.size() < linears.size()) widened_ = std::vector<Room>(linears.size());
    for (size_t i = 0; i < linears.size(); ++i) {
      const DecodedLinear& linear = linears[i];
      const int64_t count = linear.n * linear.k;
      if (linear.type == Decoded::f32) continue;
      kernels::widen_values_cuda(linear.matrix.data(), DType::f16, count, widened_[i].get(count, stream_), stream_);
    }
  }

 private:
  const float* values_of(const DecodedLinear& linear) {
    if (linear.type == Decoded::f32) return linear.matrix.as<float>();
    const auto found = std::ranges::find(at_hand_, &linear, [](const DecodedLinear& own) { return &own; });
    ensure(found != at_hand_.end(), "gradients: a linear of a layer that was not entered");
    return widened_[static_cast<size_t>(found - at_hand_.begin())].get(linear.n * linear.k, stream_);
  }
  void run(device::CublasFloatProduct& product) {
    product.workspace = workspace_.data();
    product.tensor_cores = true;
    device::cublas_multiply(product, stream_);
  }

  const device::Stream& stream_;
  DeviceBuffer workspace_;
  std::span<const DecodedLinear> at_hand_;
  std::vector<Room> widened_;  ///< of those
};

}  // namespace

namespace {

/// Rows that are decoded at a time.
constexpr int64_t decoded_rows = 64;

DeviceBuffer decode_packed(const kernels::LinearWeight& weight, Decoded type, UploadRing& ring) {
  const auto row_bytes = static_cast<size_t>(weight.k) * (type == Decoded::f32 ? sizeof(float) : sizeof(uint16_t));
  const size_t size = static_cast<size_t>(weight.n) * row_bytes;
  const auto bytes = std::make_unique_for_overwrite<std::byte[]>(size);
  parallel_for(weight.n, decoded_rows, [&](int64_t begin, int64_t end) {
    std::byte* const to = bytes.get() + static_cast<size_t>(begin) * row_bytes;
    const auto count = static_cast<size_t>((end - begin) * weight.k);
    if (type == Decoded::f32) {
      return kernels::decode_rows(weight, begin, end, {reinterpret_cast<float*>(to), end - begin, weight.k});
    }
    const auto values = std::make_unique_for_overwrite<float[]>(count);
    kernels::decode_rows(weight, begin, end, {values.get(), end - begin, weight.k});
    narrow(std::span(values.get(), count), DType::f16, {to, count * sizeof(uint16_t)});
  });
  return ring.copy_of({bytes.get(), size});
}

/// As it is stored, and widened there.
DeviceBuffer upload_plain(const kernels::LinearWeight& weight, const TensorView& stored, UploadRing& ring) {
  if (stored.dtype == DType::f32) return ring.copy_of(stored.bytes);
  DeviceBuffer result = floats(weight.n * weight.k, ring.stream());
  std::byte* const narrow_values = ring.scratch(stored.bytes.size());
  ring.copy(narrow_values, stored.bytes);
  kernels::widen_values_cuda(narrow_values, stored.dtype, weight.n * weight.k, result.as<float>(), ring.stream());
  return result;
}

}  // namespace

DecodedLinear decode_linear(const kernels::LinearWeight& weight, Decoded type, UploadRing& ring) {
  const auto* plain = std::get_if<kernels::LinearWeight::Dense>(&weight.matrix);
  const bool as_stored = plain != nullptr && type == Decoded::f32;
  DecodedLinear result{weight.n, weight.k, type, {}, {}};
  result.matrix = as_stored ? upload_plain(weight, plain->view, ring) : decode_packed(weight, type, ring);
  if (!weight.bias.empty()) result.bias = put(weight.bias, ring);
  return result;
}

namespace {

DecodedLayer::Angles angles_of(const Block& block, int64_t length, UploadRing& ring) {
  const model::RopeConfig& rope = block.attention.rope;
  if (block.kind != BlockKind::attention || rope.partial_rotary_factor == 0) return {};
  const model::RopeTable table(rope, block.attention.head_dim);
  const int64_t pairs = table.pairs();
  std::vector<float> cosines(static_cast<size_t>(length * pairs)), sines(cosines.size());
  table.fill(0, {cosines.data(), length, pairs}, {sines.data(), length, pairs});
  return {pairs, put(cosines, ring), put(sines, ring)};
}

}  // namespace

DecodedLayer decode_layer(const model::LayerWeights& weights, Decoded type, int64_t length, UploadRing& ring) {
  DecodedLayer result{weights.plan, {}, {}, {}, {}};
  for (const auto& linear : weights.linears) result.linears.push_back(decode_linear(linear, type, ring));
  for (const auto& norm : weights.norms) result.norms.push_back(put(norm, ring));
  for (const Block& block : weights.plan.blocks) {
    const auto* factor = block.vector(VectorRole::layer_scale);
    result.factors.push_back(factor == nullptr ? 1.0f : weights.vectors[factor->position].front());
    result.angles.push_back(angles_of(block, length, ring));
  }
  return result;
}

void put_norm(DecodedLayer& layer, size_t position, std::span<const float> weights, const device::Stream& stream) {
  layer.norms[position].upload(std::as_bytes(weights), stream);
  stream.synchronize();
}

struct CudaLayerGradient::Impl {
  Impl(const model::ModelConfig& config_, int64_t length_, const device::Stream& stream_)
      : config(config_), length(length_), stream(stream_), products(stream_) {}

  int64_t hidden() const { return config.hidden_size; }
  int64_t values() const { return length * hidden(); }
  float eps() const { return static_cast<float>(config.rms_norm_eps); }

  // ---- one block

  const model::PlannedLinear& first(const Block& block, size_t index) const {
    return block.groups.front().linears[index];
  }
  const model::PlannedLinear& last(const Block& block) const { return block.groups.back().linears.front(); }
  const DecodedLinear& weight(const DecodedLayer& layer, const model::PlannedLinear& linear) const {
    return layer.linears[linear.position];
  }

  kernels::NormedRows norm_of(const DecodedLayer& layer, const model::PlannedNorm& norm, const float* x,
                              int64_t count) const {
    return {x, layer.norms[norm.position].as<float>(), eps(), count / norm.size, norm.size};
  }
  void normalize(const DecodedLayer& layer, const model::PlannedNorm* norm, const float* x, int64_t count,
                 float* y) const {
    if (norm != nullptr) {
      kernels::norm_rows_cuda(norm_of(layer, *norm, x, count), y, stream);
    } else if (x != y) {
      copy(x, y, count, stream);
    }
  }
  void norm_back(const DecodedLayer& layer, const model::PlannedNorm* norm, const float* x, int64_t count,
                 float* gradient, const CudaNormObserver& norms) const {
    if (norm == nullptr) return;
    if (norms) norms(*norm, x, gradient, count / norm->size);
    kernels::norm_rows_gradient_cuda(norm_of(layer, *norm, x, count), gradient, stream);
  }

  kernels::AttendedRows attended(const Block& block, const Kept& kept) const {
    const model::AttentionConfig& attention = block.attention;
    return {.queries = kept.queries.as<float>(),
            .keys = kept.keys.as<float>(),
            .values = kept.values.as<float>(),
            .length = length,
            .heads = attention.heads,
            .kv_heads = attention.kv_heads,
            .head_dim = attention.head_dim,
            .window = attention.window,
            .scale = attention.scale};
  }
  float* attention_scratch(const kernels::AttendedRows& rows) {
    return scores.get(kernels::attended_rows_scratch(rows) / int64_t{sizeof(float)}, stream);
  }

  /// Turns heads, or gradients by turned heads back.
  void turn(const DecodedLayer& layer, const Block& block, float* x, int64_t heads, bool back) const {
    const DecodedLayer::Angles& angles = layer.angles[static_cast<size_t>(&block - layer.plan.blocks.data())];
    if (angles.pairs == 0) return;
    kernels::rotate_rows_cuda({.x = x,
                               .count = length,
                               .heads = heads,
                               .head_dim = block.attention.head_dim,
                               .cosine = angles.cosines.as<float>(),
                               .sine = angles.sines.as<float>(),
                               .pairs = angles.pairs,
                               .neighbours = block.attention.rope.neighbours,
                               .back = back},
                              stream);
  }

  void attend(const DecodedLayer& layer, const Block& block, Kept& kept) {
    const int64_t queries = length * first(block, 0).n, keys = length * first(block, 1).n;
    const float* const x = kept.normed.as<float>();
    float* const raw_queries = grown(kept.queries_before, queries, stream);
    float* const raw_keys = grown(kept.keys_before, keys, stream);
    products.forward(weight(layer, first(block, 0)), x, length, raw_queries);
    products.forward(weight(layer, first(block, 1)), x, length, raw_keys);
    products.forward(weight(layer, first(block, 2)), x, length, grown(kept.values, keys, stream));
    normalize(layer, block.norm(NormRole::query), raw_queries, queries, grown(kept.queries, queries, stream));
    normalize(layer, block.norm(NormRole::key), raw_keys, keys, grown(kept.keys, keys, stream));
    turn(layer, block, kept.queries.as<float>(), block.attention.heads, false);
    turn(layer, block, kept.keys.as<float>(), block.attention.kv_heads, false);
    const auto rows = attended(block, kept);
    kernels::attend_rows_cuda(rows, grown(kept.mixed, queries, stream), attention_scratch(rows), products.workspace(),
                              stream);
  }

  void gate(const DecodedLayer& layer, const Block& block, Kept& kept) {
    const int64_t count = length * first(block, 0).n;
    const float* const x = kept.normed.as<float>();
    products.forward(weight(layer, first(block, 0)), x, length, grown(kept.gates, count, stream));
    products.forward(weight(layer, first(block, 1)), x, length, grown(kept.ups, count, stream));
    kernels::gate_rows_cuda(block.gating, kept.gates.as<float>(), kept.ups.as<float>(), count,
                            grown(kept.mixed, count, stream), stream);
  }

  void forward(const DecodedLayer& layer, size_t index, float* x, Kept& kept) {
    const Block& block = layer.plan.blocks[index];
    copy(x, grown(kept.input, values(), stream), values(), stream);
    normalize(layer, block.norm(NormRole::input), x, values(), grown(kept.normed, values(), stream));
    block.kind == BlockKind::attention ? attend(layer, block, kept) : gate(layer, block, kept);
    float* const output = grown(kept.last, values(), stream);
    products.forward(weight(layer, last(block)), kept.mixed.as<float>(), length, output);
    float* const added = by_output.get(values(), stream);
    normalize(layer, block.norm(NormRole::output), output, values(), added);
    kernels::scale_values_cuda(added, static_cast<float>(block.output_scale), values(), stream);
    kernels::add_values_cuda(x, added, values(), stream);
    kernels::scale_values_cuda(x, layer.factors[index], values(), stream);
  }

  void backward(const DecodedLayer& layer, size_t index, float* gradient, Kept& kept,
                const CudaGradientObserver& observer, const CudaNormObserver& norms) {
    const Block& block = layer.plan.blocks[index];
    kernels::scale_values_cuda(gradient, layer.factors[index], values(), stream);
    float* const out = by_output.get(values(), stream);
    copy(gradient, out, values(), stream);
    kernels::scale_values_cuda(out, static_cast<float>(block.output_scale), values(), stream);
    norm_back(layer, block.norm(NormRole::output), kept.last.as<float>(), values(), out, norms);
    if (observer) observer(last(block), kept.mixed.as<float>(), out, length);
    const int64_t mixed = length * last(block).k;
    float* const by_mixed = mixed_room.get(mixed, stream);
    products.back(weight(layer, last(block)), out, length, by_mixed, false);
    std::vector<const float*> by = block.kind == BlockKind::attention ? attend_back(layer, block, kept, by_mixed, norms)
                                                                      : gate_back(block, kept, by_mixed);
    float* const in = by_input.get(values(), stream);
    for (size_t i = 0; i < by.size(); ++i) {
      if (observer) observer(first(block, i), kept.normed.as<float>(), by[i], length);
      products.back(weight(layer, first(block, i)), by[i], length, in, i > 0);
    }
    norm_back(layer, block.norm(NormRole::input), kept.input.as<float>(), values(), in, norms);
    kernels::add_values_cuda(gradient, in, values(), stream);
  }

  std::vector<const float*> gate_back(const Block& block, const Kept& kept, const float* by_mixed) {
    const int64_t count = length * first(block, 0).n;
    float *const by_gates = by_first[0].get(count, stream), *const by_ups = by_first[1].get(count, stream);
    kernels::gate_rows_gradient_cuda(block.gating, kept.gates.as<float>(), kept.ups.as<float>(), by_mixed, count,
                                     by_gates, by_ups, stream);
    return {by_gates, by_ups};
  }

  std::vector<const float*> attend_back(const DecodedLayer& layer, const Block& block, const Kept& kept,
                                        const float* by_mixed, const CudaNormObserver& norms) {
    const int64_t queries = length * first(block, 0).n, keys = length * first(block, 1).n;
    float *const by_queries = by_first[0].get(queries, stream), *const by_keys = by_first[1].get(keys, stream),
                 *const by_values = by_first[2].get(keys, stream);
    const auto rows = attended(block, kept);
    kernels::attend_rows_gradient_cuda(rows, by_mixed, by_queries, by_keys, by_values, attention_scratch(rows),
                                       products.workspace(), stream);
    turn(layer, block, by_queries, block.attention.heads, true);
    turn(layer, block, by_keys, block.attention.kv_heads, true);
    norm_back(layer, block.norm(NormRole::query), kept.queries_before.as<float>(), queries, by_queries, norms);
    norm_back(layer, block.norm(NormRole::key), kept.keys_before.as<float>(), keys, by_keys, norms);
    return {by_queries, by_keys, by_values};
  }

  const model::ModelConfig& config;
  const int64_t length;
  const device::Stream& stream;
  Products products;
  std::vector<Kept> blocks;
  Room scores, by_output, by_input, mixed_room, through;
  std::array<Room, 3> by_first;
};

bool CudaLayerGradient::takes(const model::ModelConfig& config) {
  if (config.layer_embedding_size > 0) return false;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    if (!std::ranges::all_of(model::layer_plan(config, layer).blocks, takes_block)) return false;
  }
  return true;
}

CudaLayerGradient::CudaLayerGradient(const model::ModelConfig& config, int64_t length, const device::Stream& stream)
    : impl_(std::make_unique<Impl>(config, length, stream)) {}
CudaLayerGradient::~CudaLayerGradient() = default;

void CudaLayerGradient::enter(const DecodedLayer& layer) { impl_->products.widen(layer.linears); }

void CudaLayerGradient::forward(const DecodedLayer& layer, float* x) {
  Impl& impl = *impl_;
  impl.blocks.resize(std::max(impl.blocks.size(), layer.plan.blocks.size()));
  for (size_t b = 0; b < layer.plan.blocks.size(); ++b) impl.forward(layer, b, x, impl.blocks[b]);
}

void CudaLayerGradient::run(const DecodedLayer& layer, const float* x, float* gradient,
                            const CudaGradientObserver& observer, const CudaNormObserver& norms) {
  Impl& impl = *impl_;
  float* const hidden = impl.through.get(impl.values(), impl.stream);
  copy(x, hidden, impl.values(), impl.stream);
  forward(layer, hidden);
  for (size_t b = layer.plan.blocks.size(); b-- > 0;)
    impl.backward(layer, b, gradient, impl.blocks[b], observer, norms);
}

struct CudaLossGradient::Impl {
  /// Rows whose logits exist together.
  static constexpr int64_t logit_rows = 512;

  Impl(const model::ModelConfig& config_, std::span<const float> final_norm, const kernels::LinearWeight& head_,
       int64_t length_, UploadRing& ring)
      : config(config_),
        length(length_),
        stream(ring.stream()),
        products(stream),
        norm(put(final_norm, ring)),
        head(decode_linear(head_, Decoded::f32, ring)),
        losses(stream.context(), static_cast<size_t>(logit_rows) * sizeof(double)),
        next(stream.context(), static_cast<size_t>(logit_rows) * sizeof(int32_t)) {}

  kernels::NormedRows normed_rows(const float* x, int64_t rows) const {
    return {x, norm.as<float>(), static_cast<float>(config.rms_norm_eps), rows, config.hidden_size};
  }
  /// Products of the head with normed rows.
  kernels::LogitRows logits(const float* x, int64_t rows) {
    float* const y = normed.get(rows * config.hidden_size, stream);
    kernels::norm_rows_cuda(normed_rows(x, rows), y, stream);
    float* const to = logit_room.get(rows * head.n, stream);
    products.forward(head, y, rows, to);
    return {to, rows, head.n, config.logit_scale, config.logit_cap};
  }
  double sum_losses(int64_t rows) {
    std::vector<double> values(static_cast<size_t>(rows));
    device::copy(device::Way::from_gpu, values.data(), losses.data(), values.size() * sizeof(double), stream,
                 "copying losses");
    stream.synchronize();
    double sum = 0;
    for (const double value : values) sum += value;
    return sum;
  }
  /// Logits hold the gradient by them: x becomes that by x.
  void back(const kernels::LogitRows& logits, float* x, const CudaNormObserver& norms) {
    float* const by = normed.get(logits.rows * config.hidden_size, stream);
    products.back(head, logits.products, logits.rows, by, false);
    if (norms) norms(model::final_norm_plan(config), x, by, logits.rows);
    kernels::norm_rows_gradient_cuda(normed_rows(x, logits.rows), by, stream);
    copy(by, x, logits.rows * config.hidden_size, stream);
  }

  const model::ModelConfig& config;
  const int64_t length;
  const device::Stream& stream;
  Products products;
  DeviceBuffer norm;
  DecodedLinear head;
  DeviceBuffer losses, next;
  Room normed, logit_room;
};

CudaLossGradient::CudaLossGradient(const model::ModelConfig& config, std::span<const float> final_norm,
                                   const kernels::LinearWeight& head, int64_t length, UploadRing& ring)
    : impl_(std::make_unique<Impl>(config, final_norm, head, length, ring)) {}
CudaLossGradient::~CudaLossGradient() = default;

void CudaLossGradient::put_norm(std::span<const float> weights) {
  impl_->norm.upload(std::as_bytes(weights), impl_->stream);
  impl_->stream.synchronize();
}

double CudaLossGradient::run(std::span<const int32_t> ids, float* x) {
  Impl& impl = *impl_;
  std::vector<int32_t> next(ids.begin() + 1, ids.end());
  next.push_back(-1);
  double sum = 0;
  for (int64_t first = 0; first < impl.length; first += Impl::logit_rows) {
    const int64_t rows = std::min(Impl::logit_rows, impl.length - first);
    float* const here = x + first * impl.config.hidden_size;
    impl.next.upload(std::as_bytes(std::span(next).subspan(static_cast<size_t>(first), static_cast<size_t>(rows))),
                     impl.stream);
    const auto logits = impl.logits(here, rows);
    kernels::cross_entropy_rows_cuda(logits, impl.next.as<int32_t>(), impl.losses.as<double>(), impl.stream);
    sum += impl.sum_losses(rows);
    impl.back(logits, here, {});
  }
  return sum;
}

double CudaLossGradient::run(CudaLossGradient& teacher, const float* expected, float* x, bool wanted,
                             const CudaNormObserver& norms) {
  Impl& impl = *impl_;
  double sum = 0;
  for (int64_t first = 0; first < impl.length; first += Impl::logit_rows) {
    const int64_t rows = std::min(Impl::logit_rows, impl.length - first), at = first * impl.config.hidden_size;
    const auto taught = teacher.impl_->logits(expected + at, rows);
    const auto logits = impl.logits(x + at, rows);
    kernels::divergence_rows_cuda(taught, logits, impl.losses.as<double>(), impl.stream);
    sum += impl.sum_losses(rows);
    if (wanted) impl.back(logits, x + at, norms);
  }
  return sum;
}

}  // namespace w4q::decoder_cuda
