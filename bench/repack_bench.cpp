// Packing into a layout and unpacking again, on one core, in bytes of codes and scales a second. Beside it what
// the machine can do in the same run: copying the planes into fresh memory, as a pass has to.
#include <benchmark/benchmark.h>

#include <cstring>
#include <string>
#include <vector>

#include "core/parallel.h"
#include "core/rng.h"
#include "formats/scheme_registry.h"
#include "repack/layout_registry.h"

namespace w4q {
namespace {

constexpr int64_t n = 4096;
constexpr int64_t k = 8192;

/// A canonical weight of random codes. Its table is left empty: layouts do not read it.
formats::PackedWeight random_weight(int bits) {
  const formats::Scheme scheme{formats::SchemeFamily::kbit, bits, 32, formats::ScaleType::e4m4};
  const auto specs = formats::scheme_row(scheme.family).planes(scheme, n, k);
  formats::PackedWeight weight = formats::allocate_planes(scheme, formats::canonical_layout, n, k, specs);
  const auto words = weight.plane(formats::PlaneRole::codes).bytes.as<uint32_t>();
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(random_bits(1, i));
  return weight;
}

void report(benchmark::State& state, const formats::PackedWeight& weight) {
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * weight.size_bytes());
}

void memory_copy(benchmark::State& state) {
  const formats::PackedWeight weight = random_weight(static_cast<int>(state.range(0)));
  const std::vector<std::byte> from(static_cast<size_t>(weight.size_bytes()), std::byte{1});
  std::vector<std::byte> to(from.size());
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), from.size());
    benchmark::ClobberMemory();
  }
  report(state, weight);
}

void copy_planes(benchmark::State& state) {
  const formats::PackedWeight weight = random_weight(static_cast<int>(state.range(0)));
  for (auto _ : state) benchmark::DoNotOptimize(weight.clone());
  report(state, weight);
}

void pack(benchmark::State& state, const repack::LayoutRow& layout) {
  const formats::PackedWeight weight = random_weight(static_cast<int>(state.range(0)));
  set_threads(1);
  for (auto _ : state) benchmark::DoNotOptimize(layout.pack(weight));
  report(state, weight);
}

void unpack(benchmark::State& state, const repack::LayoutRow& layout) {
  const formats::PackedWeight packed = layout.pack(random_weight(static_cast<int>(state.range(0))));
  set_threads(1);
  for (auto _ : state) benchmark::DoNotOptimize(layout.unpack(packed, "w"));
  report(state, packed);
}

/// A pass of every layout of the registry.
const bool registered = [] {
  for (const auto& layout : repack::layout_registry()) {
    const std::string name(layout.name);
    benchmark::RegisterBenchmark(("pack/" + name).c_str(), [&layout](auto& state) { pack(state, layout); })
        ->DenseRange(2, 5)
        ->ArgName("bits");
    benchmark::RegisterBenchmark(("unpack/" + name).c_str(), [&layout](auto& state) { unpack(state, layout); })
        ->DenseRange(2, 5)
        ->ArgName("bits");
  }
  return true;
}();

BENCHMARK(memory_copy)->Arg(4)->ArgName("bits");
BENCHMARK(copy_planes)->Arg(4)->ArgName("bits");

}  // namespace
}  // namespace w4q

BENCHMARK_MAIN();
