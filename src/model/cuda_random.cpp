#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/text.h"
#include "formats/codebook.h"
#include "kernels/random_cuda.h"
#include "model/cuda_model.h"
#include "model/cuda_pack.h"
#include "repack/layout_registry.h"

namespace w4q::model {
namespace {

using device::DeviceBuffer;
using formats::PlaneRole;

/// Makes the parts of a model, each from a seed of its own.
class Maker {
 public:
  Maker(const std::optional<formats::Scheme>& scheme, const device::Stream& stream)
      : scheme_(scheme), stream_(stream) {}

  DeviceBuffer norm(int64_t size) {
    DeviceBuffer buffer(static_cast<size_t>(size) * sizeof(float));
    kernels::constant_cuda(buffer.as<float>(), size, 1.0f, stream_.get());
    return buffer;
  }

  /// Outputs of about the magnitude of the inputs.
  DeviceBuffer rows(int64_t n, int64_t k) {
    DeviceBuffer buffer(static_cast<size_t>(n * k) * 2);
    const float magnitude = std::sqrt(3.0f / static_cast<float>(k));
    kernels::random_halves_cuda(buffer.as<__half>(), n * k, magnitude, ++seed_, stream_.get());
    return buffer;
  }

  CudaLinear linear(std::string name, int64_t n, int64_t k) {
    CudaLinear linear;
    linear.names = {std::move(name)};
    linear.n = n;
    linear.k = k;
    CudaProduct product;
    product.n = n;
    if (scheme_) {
      make_packed(linear, product);
    } else {
      linear.memory.push_back(rows(n, k));
      product.dense = linear.memory.back().as<__half>();
      linear.bytes = n * k * 2;
    }
    linear.products.push_back(product);
    return linear;
  }

 private:
  void make_packed(CudaLinear& linear, CudaProduct& product) {
    kernels::KbitDeviceWeight weight;
    weight.scheme = product.scheme = *scheme_;
    weight.n = linear.n;
    weight.k = linear.k;
    weight.layout = device_layout(*scheme_, linear.n, linear.k);
    const auto specs = repack::layout_row(weight.layout).planes(*scheme_, linear.n, linear.k);
    const auto allocate = [&](PlaneRole role) -> DeviceBuffer& {
      const auto spec = std::ranges::find(specs, role, &formats::PlaneSpec::role);
      linear.memory.emplace_back(static_cast<size_t>(byte_count(spec->dtype, spec->shape)));
      linear.bytes += static_cast<int64_t>(linear.memory.back().size());
      return linear.memory.back();
    };
    DeviceBuffer& codes = allocate(PlaneRole::codes);
    weight.codes = codes.as<uint32_t>();
    kernels::random_words_cuda(codes.as<uint32_t>(), static_cast<int64_t>(codes.size() / 4), ++seed_, stream_.get());
    DeviceBuffer& scales = allocate(PlaneRole::scales);
    weight.scales = scales.data();
    const float root = std::sqrt(static_cast<float>(linear.k));
    if (scheme_->family == formats::SchemeFamily::integer) {
      // Codes of a few bits deviate by 0.29 · 2^bits from their mean.
      weight.scale_max = 6.0f / static_cast<float>(1 << scheme_->bits) / root;
      kernels::random_halves_cuda(scales.as<__half>(), static_cast<int64_t>(scales.size() / 2), weight.scale_max,
                                  ++seed_, stream_.get());
    } else {
      kernels::random_e4m4_scales_cuda(scales.as<uint8_t>(), static_cast<int64_t>(scales.size()), ++seed_,
                                       stream_.get());
      // Scales average 2^-4.6; the table brings outputs to about the magnitude of the inputs.
      weight.table_max = 40.0f / root;
      auto table = formats::codebook("nf", scheme_->bits);
      for (float& value : table) value *= weight.table_max;
      linear.memory.push_back(DeviceBuffer::copy_of(bytes_of(table), stream_));
      weight.codebook = linear.memory.back().as<float>();
      stream_.synchronize();
    }
    product.packed = weight;
  }

  std::optional<formats::Scheme> scheme_;
  const device::Stream& stream_;
  uint64_t seed_ = 0;
};

/// Schemes of which any bits are a sound weight, and which kernels read.
bool can_be_random(const formats::Scheme& scheme) {
  const bool kbit = scheme.family == formats::SchemeFamily::kbit && scheme.scale == formats::ScaleType::e4m4;
  const bool integer = scheme.family == formats::SchemeFamily::integer && scheme.scale == formats::ScaleType::f16 &&
                       !scheme.asymmetric && !scheme.act_order;
  return (kbit || integer) && !device_layout(scheme, 64, 256).empty();
}

}  // namespace

CudaModel CudaModel::random(const ModelConfig& config, const std::optional<formats::Scheme>& scheme) {
  if (scheme && !can_be_random(*scheme)) {
    throw Error(ErrorCode::unsupported, "random weights of scheme " + formats::to_string(*scheme))
        .detail(
            "expected f16, kbit2-b32-e4m4 to kbit5-b32-e4m4, or int4 or int8 with f16 scales such as int4-g128-f16");
  }
  const device::Stream stream;
  Maker maker(scheme, stream);
  CudaModel model;
  model.config_ = config;
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const int64_t query_width = config.heads * config.head_dim, key_width = config.kv_heads * config.head_dim;
  for (int64_t i = 0; i < config.layers; ++i) {
    const std::string prefix = concat("model.layers.", i, ".");
    CudaLayer layer;
    layer.input_norm = maker.norm(hidden);
    layer.post_attention_norm = maker.norm(hidden);
    if (config.qk_norm) {
      layer.q_norm = maker.norm(config.head_dim);
      layer.k_norm = maker.norm(config.head_dim);
    }
    layer.qkv = maker.linear(prefix + "self_attn.qkv", query_width + 2 * key_width, hidden);
    layer.o = maker.linear(prefix + "self_attn.o_proj", hidden, query_width);
    layer.gate_up = maker.linear(prefix + "mlp.gate_up", 2 * inner, hidden);
    layer.down = maker.linear(prefix + "mlp.down_proj", hidden, inner);
    model.layers_.push_back(std::move(layer));
  }
  model.final_norm_ = maker.norm(hidden);
  model.embeddings_ = maker.rows(config.vocab_size, hidden);
  model.head_ = maker.linear("lm_head", config.vocab_size, hidden);
  stream.synchronize();
  return model;
}

}  // namespace w4q::model
