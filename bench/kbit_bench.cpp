// Quantizing with kbit on one core, in bytes of input a second, beside a copy of memory in the same run.
#include <benchmark/benchmark.h>

#include <cstring>
#include <vector>

#include "core/convert.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "quantize/quantizer_registry.h"

namespace w4q::kbit_bench {
namespace {

constexpr int64_t n = 2048;
constexpr int64_t k = 4096;

/// N(0, 0.02) in `dtype`, as the linear layers of a model are.
const std::vector<std::byte>& weights(DType dtype) {
  static std::vector<std::byte> storage[dtype_count];
  std::vector<std::byte>& bytes = storage[static_cast<size_t>(dtype)];
  if (bytes.empty()) {
    std::vector<float> values(static_cast<size_t>(n * k));
    for (size_t i = 0; i < values.size(); ++i) values[i] = 0.02f * static_cast<float>(random_normal(1, i));
    bytes.resize(values.size() * static_cast<size_t>(dtype_bits(dtype)) / 8);
    narrow(values, dtype, bytes);
  }
  return bytes;
}

void report(benchmark::State& state, size_t bytes) {
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * static_cast<int64_t>(bytes));
}

void copy_weights(benchmark::State& state) {
  const std::vector<std::byte>& from = weights(DType::bf16);
  std::vector<std::byte> to(from.size());
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), from.size());
    benchmark::ClobberMemory();
  }
  report(state, from.size());
}

void quantize_kbit(benchmark::State& state, DType dtype, formats::ScaleType scale, bool bnb_compatible) {
  const std::vector<std::byte>& bytes = weights(dtype);
  const TensorView view{"w", dtype, {n, k}, bytes};
  const formats::Scheme scheme{formats::SchemeFamily::kbit, static_cast<int>(state.range(0)), 32, scale};
  quantize::QuantizeOptions options;
  options.bnb_compatible = bnb_compatible;
  set_threads(1);
  for (auto _ : state) {
    benchmark::DoNotOptimize(quantize::quantizer_row("kbit").run(view, scheme, options));
  }
  set_threads(0);
  report(state, bytes.size());
}

using formats::ScaleType;

BENCHMARK(copy_weights);
BENCHMARK_CAPTURE(quantize_kbit, bf16_e4m4, DType::bf16, ScaleType::e4m4, false)->DenseRange(2, 5)->ArgName("bits");
BENCHMARK_CAPTURE(quantize_kbit, bf16_f16, DType::bf16, ScaleType::f16, false)->Arg(4)->ArgName("bits");
BENCHMARK_CAPTURE(quantize_kbit, f16_e4m4, DType::f16, ScaleType::e4m4, false)->Arg(4)->ArgName("bits");
BENCHMARK_CAPTURE(quantize_kbit, f32_e4m4, DType::f32, ScaleType::e4m4, false)->Arg(4)->ArgName("bits");
BENCHMARK_CAPTURE(quantize_kbit, bf16_bnb, DType::bf16, ScaleType::e4m4, true)->Arg(4)->ArgName("bits");

}  // namespace
}  // namespace w4q::kbit_bench
