#include <algorithm>

#include "core/error.h"
#include "decoder_cuda/decoder_impl.h"
#include "kernels/elementwise/elementwise_cuda.h"

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

}  // namespace

std::vector<StepPart> CudaDecoder::time_step_parts() {
  Impl& decoder = *impl_;
  ensure(decoder.position >= 1, "time_step_parts: an empty sequence");
  std::vector<StepPart> parts;
  const auto& layers = decoder.model.layers();
  const auto count = static_cast<int64_t>(layers.size());
  Activations& a = decoder.activations;
  const auto time = [&](std::string name, int64_t launches, int64_t bytes, const auto& work) {
    parts.push_back({std::move(name), launches, bytes, median_seconds(decoder.stream, work)});
  };
  const auto products = [&](std::string name, auto member, const auto& multiply) {
    int64_t bytes = 0;
    int64_t launches = 0;
    for (const auto& layer : layers) {
      bytes += (layer.*member).bytes;
      launches += static_cast<int64_t>((layer.*member).products.size());
    }
    time(std::move(name), launches, bytes, [&] {
      for (const auto& layer : layers) multiply(layer.*member);
    });
  };
  CudaMultiplier& multiplier = decoder.multiplier;
  products("q, k, v", &CudaLayer::qkv,
           [&](const CudaLinear& linear) { multiplier.multiply(linear, a.normed.as<__half>(), 1, a.qkv.as<float>()); });
  const CudaLayer& any = layers.front();
  products("o", &CudaLayer::o, [&](const CudaLinear& linear) {
    decoder.add_product(linear, a.attended, 1, &any.gate_up, any.post_attention_norm.as<float>());
  });
  products("gate, up, silu", &CudaLayer::gate_up, [&](const CudaLinear& linear) {
    multiplier.multiply_gated(linear, a.normed.as<__half>(), 1, a.gate_up.as<__half>(), a.gated.as<__half>());
  });
  products("down", &CudaLayer::down, [&](const CudaLinear& linear) {
    decoder.add_product(linear, a.gated, 1, &any.qkv, any.input_norm.as<float>());
  });
  decoder.fused = false;
  decoder.single_row = true;
  time("attention", count, decoder.position * decoder.cache.bytes_per_token(), [&] {
    for (size_t i = 0; i < layers.size(); ++i) decoder.attend(i, 1, 0);
  });
  decoder.single_row = false;
  const int64_t norms = decoder.norm_launches();
  time("norms", norms, 0, [&] {
    for (int64_t i = 0; i < norms; ++i) decoder.normalize(any.input_norm, 1);
  });
  time("head", 1, decoder.model.head().bytes,
       [&] { multiplier.multiply_logits(decoder.model.head(), a.normed.as<__half>(), 1, decoder.logits.as<float>()); });
  time("token", 1, 0, [&] { decoder.draw(decoder.logits.as<float>()); });
  return parts;
}

}  // namespace w4q::decoder_cuda
