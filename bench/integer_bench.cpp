// Quantizing to integer schemes and decoding them, on one core: bytes of bf16 input, and weights, a second.
#include <benchmark/benchmark.h>

#include <vector>

#include "core/float_formats.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "kernels/dequantize/dequantize.h"
#include "quantize/rtn.h"

namespace w4q::integer_bench {
namespace {

constexpr int64_t n = 4096;
constexpr int64_t k = 4096;

const std::vector<uint16_t>& matrix() {
  static const std::vector<uint16_t> values = [] {
    std::vector<uint16_t> result(static_cast<size_t>(n * k));
    for (size_t i = 0; i < result.size(); ++i) result[i] = bf16_from_f32(static_cast<float>(random_normal(1, i)));
    return result;
  }();
  return values;
}

quantize::QuantizeResult quantized(std::string_view scheme, quantize::Clip clip) {
  quantize::QuantizeOptions options;
  if (clip == quantize::Clip::mse) options.steps.add({quantize::StepKind::clip});
  return quantize::quantizer_row("rtn").run({"w", DType::bf16, {n, k}, bytes_of(matrix())},
                                            formats::parse_scheme(scheme), options);
}

void rtn(benchmark::State& state, std::string_view scheme, quantize::Clip clip) {
  set_threads(1);
  matrix();
  for (auto _ : state) benchmark::DoNotOptimize(quantized(scheme, clip));
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * n * k * 2);
}

void fake_quantize(benchmark::State& state, std::string_view scheme, quantize::Clip clip) {
  set_threads(1);
  std::vector<float> values(static_cast<size_t>(n * k));
  for (size_t i = 0; i < values.size(); ++i) values[i] = f32_from_bf16(matrix()[i]);
  const formats::Scheme parsed = formats::parse_scheme(scheme);
  for (auto _ : state) quantize::fake_quantize(parsed, {values.data(), n, k}, clip);
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations()) * n * k);
}

void decode_integers(benchmark::State& state, std::string_view scheme) {
  set_threads(1);
  const auto weight = quantized(scheme, quantize::Clip::min_max).weight;
  constexpr int64_t rows = 64;
  std::vector<float> out(static_cast<size_t>(rows * k));
  for (auto _ : state) {
    for (int64_t row = 0; row < n; row += rows) {
      kernels::dequantize_rows(weight, row, MatrixView<float>(out.data(), rows, k));
    }
  }
  state.SetItemsProcessed(static_cast<int64_t>(state.iterations()) * n * k);
}

using quantize::Clip;

BENCHMARK_CAPTURE(rtn, int4_g128, "int4-g128-f16", Clip::min_max);
BENCHMARK_CAPTURE(rtn, int4_g128_asym, "int4-g128-f16-asym", Clip::min_max);
BENCHMARK_CAPTURE(rtn, int4_g32, "int4-g32-f16", Clip::min_max);
BENCHMARK_CAPTURE(rtn, int3_g128, "int3-g128-f16", Clip::min_max);
BENCHMARK_CAPTURE(rtn, int8_row, "int8-row-bf16", Clip::min_max);
BENCHMARK_CAPTURE(rtn, int4_g128_mse, "int4-g128-f16", Clip::mse);
BENCHMARK_CAPTURE(fake_quantize, int4_g128, "int4-g128-f16-asym", Clip::min_max);
BENCHMARK_CAPTURE(decode_integers, int4_g128, "int4-g128-f16");
BENCHMARK_CAPTURE(decode_integers, int4_g128_asym, "int4-g128-f16-asym");
BENCHMARK_CAPTURE(decode_integers, int3_g128, "int3-g128-f16");
BENCHMARK_CAPTURE(decode_integers, int8_row, "int8-row-bf16");

}  // namespace
}  // namespace w4q::integer_bench
