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

namespace w4q::repack_bench {
namespace {

constexpr int64_t n = 4096;
constexpr int64_t k = 8192;

/// Every width and kind of word that layouts move.
constexpr std::string_view schemes[] = {"kbit2-b32-e4m4", "kbit3-b32-e4m4", "kbit4-b32-e4m4",
                                        "kbit5-b32-e4m4", "int4-g128-f16",  "int4-g128-f16-asym",
                                        "int3-g128-f16",  "int8-g128-f16",  "int4-g32-f16"};

/// A canonical weight of random codes. The rest is left zero: layouts do not look at it.
formats::PackedWeight random_weight(std::string_view name) {
  const formats::Scheme scheme = formats::parse_scheme(name);
  const auto specs = formats::scheme_row(scheme.family).planes(scheme, n, k);
  formats::PackedWeight weight = formats::allocate_planes(scheme, formats::canonical_layout, n, k, specs);
  const auto words = weight.plane(formats::PlaneRole::codes).bytes.as<uint32_t>();
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(random_bits(1, i));
  return weight;
}

void report(benchmark::State& state, const formats::PackedWeight& weight) {
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) * weight.size_bytes());
}

void copy_codes(benchmark::State& state, std::string_view scheme) {
  const formats::PackedWeight weight = random_weight(scheme);
  const std::vector<std::byte> from(static_cast<size_t>(weight.size_bytes()), std::byte{1});
  std::vector<std::byte> to(from.size());
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), from.size());
    benchmark::ClobberMemory();
  }
  report(state, weight);
}

void copy_planes(benchmark::State& state, std::string_view scheme) {
  const formats::PackedWeight weight = random_weight(scheme);
  for (auto _ : state) benchmark::DoNotOptimize(weight.clone());
  report(state, weight);
}

void pack(benchmark::State& state, const repack::LayoutRow& layout, std::string_view scheme) {
  const formats::PackedWeight weight = random_weight(scheme);
  set_threads(1);
  for (auto _ : state) benchmark::DoNotOptimize(layout.pack(weight));
  report(state, weight);
}

void unpack(benchmark::State& state, const repack::LayoutRow& layout, std::string_view scheme) {
  const formats::PackedWeight packed = layout.pack(random_weight(scheme));
  set_threads(1);
  for (auto _ : state) benchmark::DoNotOptimize(layout.unpack(packed, "w"));
  report(state, packed);
}

/// A pass of every layout of the registry for every scheme that it takes.
const bool registered = [] {
  for (const auto& layout : repack::layout_registry()) {
    for (const std::string_view scheme : schemes) {
      if (!layout.accepts(formats::parse_scheme(scheme), n, k, nullptr)) continue;
      const std::string name = std::string(layout.name) + "/" + std::string(scheme);
      benchmark::RegisterBenchmark(("pack/" + name).c_str(),
                                   [&layout, scheme](auto& state) { pack(state, layout, scheme); });
      benchmark::RegisterBenchmark(("unpack/" + name).c_str(),
                                   [&layout, scheme](auto& state) { unpack(state, layout, scheme); });
    }
  }
  return true;
}();

BENCHMARK_CAPTURE(copy_codes, kbit4, "kbit4-b32-e4m4");
BENCHMARK_CAPTURE(copy_planes, kbit4, "kbit4-b32-e4m4");

}  // namespace
}  // namespace w4q::repack_bench
