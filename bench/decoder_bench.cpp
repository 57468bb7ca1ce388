// The CPU decoder on a model of 28 M weights: windows of 512 tokens beside the fp32 peak of the same matrix product in
// the same run, single tokens, and decoding of packed rows. Floating point operations are two per product of linear
// layers, head and visible attention.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>

#include "core/convert.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "formats/codebook.h"
#include "formats/scheme_registry.h"
#include "io/checkpoint_writer.h"
#include "kernels/dequantize/dequantize.h"
#include "kernels/linear/gemm.h"
#include "model/decoder.h"

namespace w4q::decoder_bench {
namespace {

constexpr int64_t window = 512;

constexpr std::string_view config_text = R"({
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408,
  "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
  "max_position_embeddings": 2048, "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "tie_word_embeddings": true
})";

std::vector<float> random_values(int64_t count, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(random_uniform(seed, i) - 0.5) * 0.1f;
  }
  return values;
}

/// Writes a model with random weights, bf16 or packed, to a folder of its own and opens it. The folder is gone again
/// when this returns; the mapped files stay readable.
model::Model random_model(std::optional<formats::Scheme> scheme) {
  const auto folder = std::filesystem::temp_directory_path() / ("w4q-bench-" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  io::Json config = io::parse_json(config_text, "config");
  checkpoint::QuantizationConfig quantization;
  quantization.method = "kbit";
  std::vector<io::PlannedTensor> plan;
  std::map<std::string, std::vector<std::byte>> data;
  const auto add = [&](io::PlannedTensor tensor, std::vector<std::byte> bytes) {
    data[tensor.name] = std::move(bytes);
    plan.push_back(std::move(tensor));
  };
  for (const auto& parameter : model::parameters(model::parse_config(config, "config"))) {
    const auto values = random_values(element_count(parameter.shape), plan.size());
    if (scheme && parameter.linear && parameter.name != "model.embed_tokens.weight") {
      const std::string linear = parameter.name.substr(0, parameter.name.rfind('.'));
      const int64_t n = parameter.shape[0], k = parameter.shape[1];
      const auto packed =
          formats::scheme_row(scheme->family).encode(*scheme, values, n, k, formats::codebook("nf", scheme->bits));
      for (const auto& plane : packed.planes) {
        const auto bytes = plane.bytes.bytes();
        add({checkpoint::plane_name(linear, 0, plane.spec.role), plane.spec.dtype, plane.spec.shape},
            {bytes.begin(), bytes.end()});
      }
      quantization.linears[linear] = {linear, n, k, DType::bf16, {{*scheme, packed.layout}}};
      continue;
    }
    std::vector<std::byte> bytes(values.size() * 2);
    narrow(values, DType::bf16, bytes);
    add({parameter.name, DType::bf16, parameter.shape}, std::move(bytes));
  }
  io::CheckpointWriter writer(folder, plan, {});
  for (const auto& [name, bytes] : data) writer.write(name, bytes);
  writer.finish();
  if (scheme) checkpoint::write_quantization_config(quantization, config);
  std::ofstream(folder / "config.json") << config.dump();
  auto opened = model::Model::open(folder);
  std::filesystem::remove_all(folder);
  return opened;
}

/// Bits 0: the bf16 model.
const model::Model& the_model(int bits) {
  static std::map<int, std::unique_ptr<model::Model>> models;
  auto& slot = models[bits];
  if (!slot) {
    slot = std::make_unique<model::Model>(
        random_model(bits == 0 ? std::nullopt : std::optional(formats::Scheme{.bits = bits})));
  }
  return *slot;
}

/// Operations of one window behind `past` positions: two per weight and token, and two products of each visible key.
double window_operations(const model::ModelConfig& config, int64_t tokens, int64_t past) {
  double weights = static_cast<double>(config.vocab_size * config.hidden_size);
  for (const auto& parameter : model::parameters(config)) {
    if (parameter.linear && parameter.name.find(".layers.") != std::string::npos) {
      weights += static_cast<double>(element_count(parameter.shape));
    }
  }
  const auto t = static_cast<double>(tokens), keys = t * static_cast<double>(past) + t * (t + 1) / 2;
  const double attention = 2 * keys * static_cast<double>(config.heads * config.head_dim * config.layers);
  return 2 * (weights * t + attention);
}

/// Operations a second of a large product on all threads, the best of several.
double measure_peak() {
  constexpr int64_t size = 1024;
  const auto a = random_values(size * size, 1), b = random_values(size * size, 2);
  std::vector<float> c(a.size());
  double best = 0;
  for (int repeat = 0; repeat < 20; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    parallel_for(size, size / threads(), [&](int64_t begin, int64_t end) {
      kernels::gemm_nt({a.data(), size, size}, {b.data() + begin * size, end - begin, size},
                       {c.data() + begin, size, end - begin, size});
    });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, 2.0 * size * size * size / seconds.count());
  }
  return best;
}

double peak() {
  static const double value = measure_peak();
  return value;
}

void gemm_peak(benchmark::State& state) {
  double best = 0;
  for (auto _ : state) best = std::max(best, measure_peak());
  state.counters["GFLOP/s"] = best * 1e-9;
  state.SetLabel(std::string(kernels::gemm_library()));
}

void prefill(benchmark::State& state) {
  const model::Model& model = the_model(static_cast<int>(state.range(0)));
  const int64_t vocab = model.config().vocab_size;
  model::Decoder decoder(model, window);
  std::vector<int32_t> ids(window);
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<int32_t>(random_bits(3, i) % static_cast<uint64_t>(vocab));
  std::vector<float> logits(static_cast<size_t>(window * vocab));
  double best = 1e30;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    decoder.reset();
    decoder.logits(decoder.forward(ids), {logits.data(), window, vocab});
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::min(best, seconds.count());
  }
  const double rate = window_operations(model.config(), window, 0) / best;
  state.counters["GFLOP/s"] = rate * 1e-9;
  state.counters["of_peak"] = rate / peak();
  state.counters["tokens/s"] = static_cast<double>(window) / best;
}

void single_tokens(benchmark::State& state) {
  const model::Model& model = the_model(static_cast<int>(state.range(0)));
  const int64_t vocab = model.config().vocab_size;
  model::Decoder decoder(model, window);
  std::vector<float> logits(static_cast<size_t>(vocab));
  const std::vector<int32_t> id = {7};
  for (auto _ : state) {
    if (decoder.position() == window) decoder.reset();
    decoder.logits(decoder.forward(id), {logits.data(), 1, vocab});
  }
  state.counters["tokens/s"] = benchmark::Counter(static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

/// Decodes packed rows on one core; bytes are those of the fp32 result.
void dequantize(benchmark::State& state) {
  constexpr int64_t n = 256, k = 4096;
  const formats::Scheme scheme{.bits = static_cast<int>(state.range(0))};
  const auto packed = formats::scheme_row(scheme.family)
                          .encode(scheme, random_values(n * k, 4), n, k, formats::codebook("nf", scheme.bits));
  std::vector<float> rows(64 * k);
  int64_t begin = 0;
  for (auto _ : state) {
    kernels::dequantize_rows(packed, begin, {rows.data(), 64, k});
    begin = (begin + 64) % n;
    benchmark::ClobberMemory();
  }
  state.counters["weights/s"] =
      benchmark::Counter(static_cast<double>(state.iterations() * 64 * k), benchmark::Counter::kIsRate);
  state.SetBytesProcessed(state.iterations() * 64 * k * int64_t{sizeof(float)});
}

BENCHMARK(gemm_peak)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(prefill)->ArgName("bits")->Arg(0)->Arg(3)->Arg(4)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(single_tokens)->ArgName("bits")->Arg(0)->Arg(3)->Arg(4)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(dequantize)->ArgName("bits")->DenseRange(2, 5)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace w4q::decoder_bench
