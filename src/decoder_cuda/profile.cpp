#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "decoder_cuda/decoder_impl.h"

namespace w4q::decoder_cuda {
namespace {

/// Median seconds of a graph of what `work` launches.
double median_seconds(const device::Stream& stream, const std::function<void()>& work) {
  const device::Graph graph(stream, work);
  graph.launch(stream);
  std::vector<double> seconds;
  for (int i = 0; i < 9; ++i) {
    device::Event start, stop;
    start.record(stream);
    graph.launch(stream);
    stop.record(stream);
    stop.synchronize();
    seconds.push_back(stop.seconds_since(start));
  }
  std::ranges::nth_element(seconds, seconds.begin() + 4);
  return seconds[4];
}

/// Of dense layers, which alone are told apart.
constexpr std::string_view short_name(model::Role role) {
  switch (role) {
    case model::Role::query:
      return "q";
    case model::Role::key:
      return "k";
    case model::Role::value:
      return "v";
    case model::Role::output:
      return "o";
    case model::Role::gate:
      return "gate";
    case model::Role::up:
      return "up";
    default:
      return "down";
  }
}

/// The products of one kind in all layers, in the order of a step.
struct ProductPart {
  std::string name;
  std::vector<const CudaBlock*> blocks;
  size_t group;
};

std::string name_of(const model::Block& block, size_t group) {
  std::vector<std::string> parts;
  for (const auto& linear : block.groups[group].linears) parts.emplace_back(short_name(linear.role));
  if (block.kind == model::BlockKind::gated_mlp && group == 0) parts.emplace_back("silu");
  return join(parts);
}

std::vector<ProductPart> product_parts(const std::vector<CudaLayer>& layers) {
  std::vector<ProductPart> parts;
  for (const auto& layer : layers) {
    for (const auto& block : layer.blocks) {
      for (size_t group = 0; group < block.groups.size(); ++group) {
        const std::string name = name_of(block.plan, group);
        auto found = std::ranges::find(parts, name, &ProductPart::name);
        if (found == parts.end()) found = parts.insert(found, {name, {}, group});
        found->blocks.push_back(&block);
      }
    }
  }
  return parts;
}

}  // namespace

std::vector<StepPart> CudaDecoder::time_step_parts() {
  Impl& decoder = *impl_;
  ensure(decoder.position >= 1, "time_step_parts: an empty sequence");
  // Parts of mixtures, delta nets and the like are not told apart: their launches depend on one another.
  if (!has_plain_blocks(decoder.config)) return {};
  std::vector<StepPart> parts;
  const auto& layers = decoder.model.layers();
  const auto count = static_cast<int64_t>(layers.size());
  Activations& a = decoder.runner.activations;
  const auto time = [&](std::string name, int64_t launches, int64_t bytes, const auto& work) {
    parts.push_back({std::move(name), launches, bytes, median_seconds(decoder.stream, work)});
  };
  LayerRunner& runner = decoder.runner;
  runner.begin(decoder.residual.as<float>(), 1);
  const auto multiply = [&](const CudaBlock& block, size_t group) {
    const CudaLinear& linear = block.groups[group];  // of two: the last is added
    const bool attends = block.plan.kind == model::BlockKind::attention;
    const auto* const normed = a.normed.as<__half>();
    if (group > 0) {
      // Which layer's norm it is makes no difference to the time.
      const auto& blocks = layers.front().blocks;
      runner.add_product(block, attends ? a.attended : a.gated,
                         attends ? blocks.back().taken_over() : blocks.front().taken_over());
    } else if (attends) {
      runner.multiplier.multiply(linear, normed, 1, a.qkv.as<float>());
    } else {
      runner.multiplier.multiply_gated(linear, normed, 1, a.gate_up.as<__half>(), a.gated.as<__half>());
    }
  };
  for (const auto& part : product_parts(layers)) {
    int64_t bytes = 0, launches = 0;
    for (const auto* block : part.blocks) {
      bytes += block->groups[part.group].bytes;
      launches += static_cast<int64_t>(block->groups[part.group].products.size());
    }
    time(part.name, launches, bytes, [&] {
      for (const auto* block : part.blocks) multiply(*block, part.group);
    });
  }
  runner.fused = false;
  decoder.single_row = true;
  time("attention", count, decoder.position * decoder.cache.bytes_per_token(), [&] {
    for (size_t i = 0; i < layers.size(); ++i) {
      for (const auto& block : layers[i].blocks) {
        if (block.plan.kind == model::BlockKind::attention) decoder.attend(i, block, 1, 0);
      }
    }
  });
  decoder.single_row = false;
  const int64_t norms = decoder.norm_launches();
  time("norms", norms, 0, [&] {
    for (int64_t i = 0; i < norms; ++i) runner.normalize(layers.front().blocks.front().norm(model::NormRole::input));
  });
  time("head", 1, decoder.model.head().bytes, [&] {
    runner.multiplier.multiply_logits(decoder.model.head(), a.normed.as<__half>(), 1, decoder.logits.as<float>());
  });
  time("token", 1, 0, [&] { decoder.draw(decoder.logits.as<float>()); });
  return parts;
}

}  // namespace w4q::decoder_cuda
