// Opening and reading safetensors: headers per second, and GB/s through the map and through zstd frames, beside the
// machine's own memory copy.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "core/rng.h"
#include "core/views.h"
#include "io/checkpoint.h"
#include "io/checkpoint_writer.h"

namespace w4q::io_bench {
namespace {

namespace fs = std::filesystem;

/// A checkpoint of `count` bf16 tensors of `rows` × `cols`, named as in a large model, removed at exit.
class BenchCheckpoint {
 public:
  BenchCheckpoint(std::string_view name, int64_t count, int64_t rows, int64_t cols, bool compress)
      : folder_(fs::temp_directory_path() / ("w4q-bench-" + std::string(name) + "-" + std::to_string(::getpid()))) {
    fs::create_directories(folder_);
    std::vector<io::PlannedTensor> plan;
    for (int64_t i = 0; i < count; ++i) {
      plan.push_back({"model.layers." + std::to_string(i / 10) + ".mlp.experts." + std::to_string(i % 10) + ".weight",
                      DType::bf16,
                      {rows, cols}});
    }
    io::WriteOptions options;
    options.compress = compress;
    io::CheckpointWriter writer(folder_, plan, options);
    // Normal weights: what zstd finds to save in bf16 depends on their exponents.
    Buffer data(static_cast<size_t>(rows * cols * 2));
    for (size_t i = 0; i < data.size() / 2; ++i) {
      const float value = static_cast<float>(random_normal(1, i)) * 0.02f;
      std::memcpy(data.data() + 2 * i, reinterpret_cast<const std::byte*>(&value) + 2, 2);
    }
    for (const auto& tensor : plan) writer.write(tensor.name, data.bytes());
    writer.finish();
  }
  ~BenchCheckpoint() {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  BenchCheckpoint(const BenchCheckpoint&) = delete;
  BenchCheckpoint& operator=(const BenchCheckpoint&) = delete;

  const fs::path& folder() const noexcept { return folder_; }

 private:
  fs::path folder_;
};

void open_10000_tensors(benchmark::State& state) {
  const BenchCheckpoint files("open", 10'000, 1, 8, false);
  int64_t header_bytes = 0;
  for (auto _ : state) {
    const auto checkpoint = io::Checkpoint::open(files.folder());
    header_bytes = checkpoint.file_bytes() - checkpoint.total_bytes();
    benchmark::DoNotOptimize(checkpoint.tensors().size());
  }
  state.SetBytesProcessed(state.iterations() * header_bytes);
}
BENCHMARK(open_10000_tensors)->Unit(benchmark::kMillisecond);

/// Copies every tensor into one buffer: pages in, copies, releases.
void read_tensors(benchmark::State& state, bool compress) {
  constexpr int64_t rows = 2048;
  constexpr int64_t cols = 4096;
  const BenchCheckpoint files(compress ? "zstd" : "plain", 8, rows, cols, compress);
  const auto checkpoint = io::Checkpoint::open(files.folder());
  Buffer target(static_cast<size_t>(rows * cols * 2));
  for (auto _ : state) {
    for (const auto& [name, info] : checkpoint.tensors()) {
      const auto tensor = checkpoint.load(name);
      std::memcpy(target.data(), tensor->bytes.data(), target.size());
      benchmark::ClobberMemory();
    }
  }
  state.SetBytesProcessed(state.iterations() * checkpoint.total_bytes());
  state.counters["file/content"] =
      static_cast<double>(checkpoint.file_bytes()) / static_cast<double>(checkpoint.total_bytes());
}
BENCHMARK_CAPTURE(read_tensors, mapped, false)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK_CAPTURE(read_tensors, zstd, true)->Unit(benchmark::kMillisecond)->UseRealTime();

/// What the machine can do with the same bytes already in memory.
void copy_memory(benchmark::State& state) {
  constexpr size_t size = size_t{2048} * 4096 * 2;
  const std::vector<std::byte> source(size, std::byte{1});
  Buffer target(size);
  for (auto _ : state) {
    std::memcpy(target.data(), source.data(), size);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(size));
}
BENCHMARK(copy_memory)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace w4q::io_bench
