#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/rng.h"
#include "core/text.h"
#include "decoder_cuda/model.h"
#include "decoder_cuda/pack.h"
#include "decoder_cuda/rotated.h"
#include "formats/codebook.h"
#include "formats/kbit.h"
#include "formats/rotated.h"
#include "formats/small_float.h"
#include "formats/trellis.h"
#include "kernels/common/random_cuda.h"
#include "kernels/common/table_stretch.h"
#include "kernels/rotated/pack.h"
#include "kernels/rotated/rotate_input.h"
#include "repack/layout_float_fragment.h"
#include "repack/layout_kbit_fragment.h"
#include "repack/layout_registry.h"
#include "repack/layout_trellis_fragment.h"

namespace w4q::decoder_cuda {
namespace {

using device::DeviceBuffer;
using formats::PlaneRole;

bool is_rotated(std::span<const formats::Scheme> passes) {
  const auto rotated = [](const formats::Scheme& scheme) {
    return scheme.family == formats::SchemeFamily::rotated && scheme.block != formats::whole_row;
  };
  return !passes.empty() && std::ranges::all_of(passes, rotated);
}

bool is_trellis(std::span<const formats::Scheme> passes) {
  return passes.size() == 1 && passes.front().family == formats::SchemeFamily::trellis;
}

/// Makes the parts of a model, each from a seed of its own.
class Maker {
 public:
  Maker(std::span<const formats::Scheme> passes, bool offload, const device::Stream& stream)
      : passes_(passes), offload_(offload), stream_(stream) {}

  DeviceBuffer norm(int64_t size) {
    DeviceBuffer buffer(stream_.context(), static_cast<size_t>(size) * sizeof(float));
    kernels::constant_cuda(buffer.as<float>(), size, 1.0f, stream_);
    return buffer;
  }

  /// Outputs of about the magnitude of the inputs.
  DeviceBuffer rows(int64_t n, int64_t k) {
    DeviceBuffer buffer(stream_.context(), static_cast<size_t>(n * k) * 2);
    const float magnitude = std::sqrt(3.0f / static_cast<float>(k));
    kernels::random_halves_cuda(buffer.as<__half>(), n * k, magnitude, ++seed_, stream_);
    return buffer;
  }

  CudaBlock block(const model::Block& plan) {
    CudaBlock block{.plan = plan, .norms = {}, .groups = {}};
    for (const auto& entry : plan.norms) block.norms.push_back(norm(entry.size));
    for (const auto& entry : plan.vectors) block.vectors.push_back(norm(element_count(entry.shape)));
    if (plan.kind == model::BlockKind::mixture) block.mixture = mixture(plan);
    const bool has_shared = block.mixture && block.mixture->joined;
    for (const auto& group : plan.groups) {
      if (group.expert || (has_shared && !block.groups.empty())) continue;
      int64_t n = 0;
      for (const auto& entry : group.linears) n += entry.n;
      const bool routes = group.linears.front().role == model::Role::router;  // which stay in 16 bits
      CudaLinear& made = block.groups.emplace_back(routes ? dense(group.names(), n, group.width)
                                                          : linear(group.names(), n, group.width));
      const bool gated = group.linears.front().role == model::Role::gate && group.linears.size() == 2;
      if (gated) {
        made.products.front().linear.gates = gate_order(made);
      }
      add_bias(group, made, n);
    }
    if (block.mixture) block.join_mixture();
    return block;
  }

  CudaMixture mixture(const model::Block& plan) {
    const bool joined = !passes_.empty() && shared_is_an_expert(plan);
    const int64_t experts = plan.mixture.experts + (joined ? 1 : 0);
    const auto side = [&](size_t first) {
      int64_t n = 0;
      for (const auto& entry : plan.groups[first].linears) n += entry.n;
      std::vector<std::string> names;
      for (size_t i = first; i < 1 + 2 * static_cast<size_t>(experts); i += 2) {
        for (const auto& name : plan.groups[i].names()) names.push_back(name);
      }
      CudaLinear made = linear(std::move(names), experts * n, plan.groups[first].width);
      add_bias(plan.groups[first], made, experts * n);
      return made;
    };
    return mixture_of(plan, side(1), side(2), joined, stream_.context().properties());
  }

  CudaLinear dense(std::vector<std::string> names, int64_t n, int64_t k) {
    const auto packed = std::exchange(passes_, std::span<const formats::Scheme>());
    CudaLinear made = linear(std::move(names), n, k);
    passes_ = packed;
    return made;
  }

  CudaLinear linear(std::vector<std::string> names, int64_t n, int64_t k) {
    CudaLinear linear;
    linear.names = std::move(names);
    linear.n = n;
    linear.k = k;
    CudaProduct product;
    if (is_rotated(passes_)) {
      make_rotated(linear, product);
    } else if (is_trellis(passes_)) {
      make_trellis(linear, product);
    } else if (!passes_.empty()) {
      make_packed(linear, product);
    } else {
      linear.memory.push_back(rows(n, k));
      product.linear.passes = {dense_pass(linear.memory.back(), n, k)};
      linear.bytes = n * k * 2;
    }
    product.scheme = passes_.empty() ? "f16" : formats::to_string(passes_.front());
    product.offloaded.resize(product.linear.passes.size());
    plan_product(product, stream_.context().properties());
    linear.products.push_back(std::move(product));
    return linear;
  }

 private:
  kernels::GateOrder gate_order(const CudaLinear& gated) const {
    if (is_trellis(passes_)) {
      return gated.n % (2 * formats::trellis_rows) == 0 ? kernels::GateOrder::halves : kernels::GateOrder::none;
    }
    const bool turns = gated.n % 64 == 0 && (is_rotated(passes_) || fuses(gated));
    return turns ? kernels::GateOrder::turns : kernels::GateOrder::halves;
  }

  /// Zeros, where the group's linears have one.
  void add_bias(const model::InputGroup& group, CudaLinear& made, int64_t n) {
    if (std::ranges::none_of(group.linears, &model::PlannedLinear::bias)) return;
    made.memory.emplace_back(stream_.context(), static_cast<size_t>(n) * sizeof(float)).fill(0, stream_);
    made.products.front().linear.bias = made.memory.back().as<float>();
  }

  void make_packed(CudaLinear& linear, CudaProduct& product) {
    const formats::Scheme& scheme = passes_.front();
    kernels::DevicePass weight;
    weight.scheme = scheme;
    weight.n = linear.n;
    weight.k = linear.k;
    weight.layout = device_layout(stream_.context().properties(), scheme, linear.n, linear.k);
    const auto specs = repack::layout_row(weight.layout).planes(scheme, linear.n, linear.k);
    const auto allocate = [&](PlaneRole role) -> DeviceBuffer& {
      const auto spec = std::ranges::find(specs, role, &formats::PlaneSpec::role);
      linear.memory.emplace_back(stream_.context(), static_cast<size_t>(byte_count(spec->dtype, spec->shape)));
      linear.bytes += static_cast<int64_t>(linear.memory.back().size());
      return linear.memory.back();
    };
    DeviceBuffer& codes = allocate(PlaneRole::codes);
    weight.codes = codes.as<uint32_t>();
    kernels::random_words_cuda(codes.as<uint32_t>(), static_cast<int64_t>(codes.size() / 4), ++seed_, stream_);
    if (scheme.family == formats::SchemeFamily::small_float) {
      make_float_scales(linear, weight);
      product.linear.passes = {weight};
      return;
    }
    DeviceBuffer& scales = allocate(PlaneRole::scales);
    weight.scales = scales.data();
    const float root = std::sqrt(static_cast<float>(linear.k));
    if (scheme.family == formats::SchemeFamily::integer) {
      // Codes of a few bits deviate by 0.29 · 2^bits from their mean.
      weight.scale_max = 6.0f / static_cast<float>(1 << scheme.bits) / root;
      kernels::random_halves_cuda(scales.as<__half>(), static_cast<int64_t>(scales.size() / 2), weight.scale_max,
                                  ++seed_, stream_);
    } else {
      kernels::random_e4m4_scales_cuda(scales.as<uint8_t>(), static_cast<int64_t>(scales.size()), ++seed_, stream_);
      // Scales average 2^-4.6; the table brings outputs to about the magnitude of the inputs.
      weight.table_max = 40.0f / root;
      auto table = formats::codebook("nf", scheme.bits);
      for (float& value : table) value *= weight.table_max;
      weight.table_stretch = kernels::table_stretch(table);
      weight.product_stretch = kernels::product_stretch(table);
      linear.memory.push_back(DeviceBuffer::copy_of(bytes_of(table), stream_));
      weight.codebook = linear.memory.back().as<float>();
      stream_.synchronize();
    }
    product.linear.passes = {weight};
  }

  /// Scales of 1, and outputs of about the magnitude of the inputs by their factors. Codes are random bits, of E4M3 its NaN
  /// too, which kernels read as ±480.
  void make_float_scales(CudaLinear& linear, kernels::DevicePass& weight) {
    const auto keep = [&](size_t bytes) -> DeviceBuffer& {
      linear.bytes += static_cast<int64_t>(bytes);
      return linear.memory.emplace_back(stream_.context(), bytes);
    };
    const repack::FloatFragmentMap map(weight.n, weight.k);
    const formats::Scheme& scheme = weight.scheme;
    const bool in_blocks = scheme.block == 16 || scheme.block == 32;
    if (in_blocks) {
      DeviceBuffer& scales = keep(static_cast<size_t>(map.tiles() * map.scales_of_tile(scheme.block)));
      scales.fill(scheme.scale == formats::ScaleType::e4m3 ? 0x38 : 0x7F, stream_);
      weight.scales = scales.data();
    } else {
      DeviceBuffer& scales = keep(static_cast<size_t>(2 * map.tiles()) * sizeof(float));
      kernels::constant_cuda(scales.as<float>(), 2 * map.tiles(), 1.0f, stream_);
      weight.scales = scales.data();
    }
    const float code_rms = scheme.bits == 4 ? 2.9f : 150.0f;
    DeviceBuffer& factors = keep(static_cast<size_t>(weight.n) * sizeof(float));
    kernels::constant_cuda(factors.as<float>(), weight.n, 1 / (code_rms * std::sqrt(static_cast<float>(weight.k))),
                           stream_);
    weight.output_factors = factors.as<float>();
    weight.scale_max = 1;
    const auto table = formats::small_float_table(scheme.bits);
    linear.memory.push_back(DeviceBuffer::copy_of(std::as_bytes(table), stream_));
    weight.codebook = linear.memory.back().as<float>();
  }

  /// Behind a rotation of 128, as trellises are.
  void make_trellis(CudaLinear& linear, CudaProduct& product) {
    const auto keep = [&](DeviceBuffer buffer) { return linear.memory.emplace_back(std::move(buffer)).data(); };
    kernels::DevicePass pass;
    pass.scheme = passes_.front();
    pass.layout = "trellis-fragment";
    pass.n = linear.n;
    pass.k = linear.k;
    const repack::TrellisFragmentMap map(pass.n, pass.k);
    DeviceBuffer codes(stream_.context(),
                       static_cast<size_t>(map.tiles() * map.tile_words(pass.scheme.bits)) * sizeof(uint32_t));
    kernels::random_words_cuda(codes.as<uint32_t>(), static_cast<int64_t>(codes.size() / 4), ++seed_, stream_);
    DeviceBuffer scales(stream_.context(), static_cast<size_t>(pass.n) * 2);
    // Outputs of about the magnitude of the inputs, with scales in (−most, most).
    pass.table_max = std::ldexp(1.0f, formats::trellis_usual_exponent);
    pass.scale_max =
        static_cast<float>(std::sqrt(3.0 / static_cast<double>(pass.k)) / formats::trellis_level_rms) / pass.table_max;
    kernels::random_halves_cuda(scales.as<__half>(), pass.n, pass.scale_max, ++seed_, stream_);
    linear.bytes += static_cast<int64_t>(codes.size() + scales.size());
    pass.codes = reinterpret_cast<const uint32_t*>(keep(std::move(codes)));
    pass.scales = keep(std::move(scales));
    const formats::InputRotation rotation({128, 42}, linear.k);
    const auto signs = kernels::rotation_signs(rotation);
    pass.rotation.block = rotation.rotation().block;
    pass.rotation.factors =
        reinterpret_cast<const float*>(keep(DeviceBuffer::copy_of(std::as_bytes(rotation.factors()), stream_)));
    pass.rotation.signs = reinterpret_cast<const uint32_t*>(keep(DeviceBuffer::copy_of(bytes_of(signs), stream_)));
    product.linear.passes = {pass};
    stream_.synchronize();  // factors and signs go
  }

  /// All passes share a rotation, and the table; a residual is a sixteenth of the pass before it.
  void make_rotated(CudaLinear& linear, CudaProduct& product) {
    const auto keep = [&](DeviceBuffer buffer) { return linear.memory.emplace_back(std::move(buffer)).data(); };
    const formats::InputRotation rotation({formats::rotated_group(passes_.front(), linear.k), 42}, linear.k);
    const auto signs = kernels::rotation_signs(rotation);
    const auto* const factors = keep(DeviceBuffer::copy_of(std::as_bytes(rotation.factors()), stream_));
    const auto* const sign_words = keep(DeviceBuffer::copy_of(bytes_of(signs), stream_));
    for (size_t index = 0; index < passes_.size(); ++index) {
      kernels::DevicePass pass;
      pass.scheme = kernels::rotated_device_scheme(passes_[index]);
      pass.layout = "rotated-fragment";
      pass.n = linear.n;
      pass.k = linear.k;
      const int64_t group = formats::rotated_group(pass.scheme, linear.k);
      std::vector<float> levels(size_t{1} << pass.scheme.bits);
      formats::rotated_levels(formats::normal_codebook(pass.scheme.bits), group, levels);
      pass.codebook = reinterpret_cast<const float*>(keep(DeviceBuffer::copy_of(bytes_of(levels), stream_)));
      pass.table_max = formats::table_max(levels);
      pass.table_stretch = kernels::table_stretch(levels);
      pass.table_over_first = 1;
      pass.rotation.block = rotation.rotation().block;
      pass.rotation.factors = reinterpret_cast<const float*>(factors);
      pass.rotation.signs = reinterpret_cast<const uint32_t*>(sign_words);
      make_planes(linear, product, pass, index);
      product.linear.passes.push_back(pass);
      stream_.synchronize();  // levels and signs go
    }
  }

  void make_planes(CudaLinear& linear, CudaProduct& product, kernels::DevicePass& pass, size_t index) {
    const repack::KbitFragmentMap map(pass.n, pass.k);
    DeviceBuffer codes(stream_.context(),
                       static_cast<size_t>(map.tiles() * map.tile_words(pass.scheme.bits)) * sizeof(uint32_t));
    kernels::random_words_cuda(codes.as<uint32_t>(), static_cast<int64_t>(codes.size() / 4), ++seed_, stream_);
    const int64_t group = formats::rotated_group(pass.scheme, pass.k);
    const int64_t count = kernels::norm_count(pass.n, formats::rotated_groups(pass.scheme, pass.k));
    DeviceBuffer norms(stream_.context(), static_cast<size_t>(count) * 2);
    const double part = std::pow(1 / 16.0, static_cast<double>(index));
    pass.scale_max =
        static_cast<float>(part * std::sqrt(3.0 * static_cast<double>(group) / static_cast<double>(pass.k)));
    kernels::random_halves_cuda(norms.as<__half>(), count, pass.scale_max, ++seed_, stream_);
    product.offloaded.emplace_back();
    if (offload_ && index > 0) {
      // Layers differ in what a residual is worth to them.
      pass.resident = false;
      product.offloaded.back() = move_to_host(codes, norms, part * part * (0.5 + random_uniform(seed_, 0)), stream_);
      return;
    }
    pass.codes = codes.as<uint32_t>();
    pass.scales = norms.data();
    linear.bytes += static_cast<int64_t>(codes.size() + norms.size());
    linear.memory.push_back(std::move(codes));
    linear.memory.push_back(std::move(norms));
  }

  std::span<const formats::Scheme> passes_;
  const bool offload_;
  const device::Stream& stream_;
  uint64_t seed_ = 0;
};

/// Schemes of which any bits are a sound weight, and which kernels read.
bool can_be_random(const device::Properties& gpu, std::span<const formats::Scheme> passes) {
  if (passes.empty() || is_trellis(passes)) return true;
  const formats::Scheme& scheme = passes.front();
  if (is_rotated(passes)) {
    return scheme.block >= 32 && scheme.block <= kernels::rotate_input_max_block;
  }
  const bool kbit = scheme.family == formats::SchemeFamily::kbit && scheme.scale == formats::ScaleType::e4m4;
  const bool integer = scheme.family == formats::SchemeFamily::integer && scheme.scale == formats::ScaleType::f16 &&
                       !scheme.asymmetric && !scheme.act_order;
  const bool floats = scheme.family == formats::SchemeFamily::small_float;
  return passes.size() == 1 && (kbit || integer || floats) && !device_layout(gpu, scheme, 64, 256).empty();
}

}  // namespace

CudaModel CudaModel::random(device::Context& gpu, const model::ModelConfig& config,
                            std::span<const formats::Scheme> passes, std::optional<int64_t> residual_bytes) {
  require_gpu_decoder(config);
  const bool experts_stack = passes.empty() || (passes.size() == 1 && passes[0].family == formats::SchemeFamily::kbit);
  if (config.mixture.experts > 0 && !experts_stack) {
    throw Error(ErrorCode::unsupported, "random experts of scheme " + formats::to_string(passes))
        .detail("expected f16, or kbit2-b32-e4m4 to kbit5-b32-e4m4");
  }
  if (!can_be_random(gpu.properties(), passes)) {
    throw Error(ErrorCode::unsupported, "random weights of scheme " + formats::to_string(passes))
        .detail(
            "expected f16, kbit2-b32-e4m4 to kbit5-b32-e4m4, int4 or int8 with f16 scales such as int4-g128-f16, "
            "nvfp4, "
            "mxfp4, mxfp8 or fp8 such as fp8-channel, trellis2 to trellis4, or rotated passes such as "
            "rotated4-d128+rotated4-d128");
  }
  const device::Stream stream(gpu);
  Maker maker(passes, residual_bytes.has_value(), stream);
  CudaModel model(gpu);
  model.config_ = config;
  const int64_t hidden = config.hidden_size;
  for (int64_t i = 0; i < config.layers; ++i) {
    CudaLayer& layer = model.layers_.emplace_back();
    for (const auto& plan : model::layer_plan(config, i).blocks) layer.blocks.push_back(maker.block(plan));
  }
  if (config.layer_embedding_size > 0) {
    const int64_t width = config.layers * config.layer_embedding_size;
    model.layer_embeddings_ = {maker.rows(config.layer_vocab_size, width),
                               maker.dense({"per_layer_model_projection"}, width, hidden),
                               maker.norm(config.layer_embedding_size)};
  }
  model.final_norm_ = maker.norm(hidden);
  model.embeddings_ = maker.rows(config.vocab_size, hidden);
  model.head_ = maker.linear({"lm_head"}, config.vocab_size, hidden);
  if (residual_bytes) model.keep_resident(*residual_bytes, stream);
  stream.synchronize();
  return model;
}

}  // namespace w4q::decoder_cuda
