// Tokenizing the bundled text: bytes of text per second on one thread.
#include <benchmark/benchmark.h>

#include "io/files.h"
#include "tokenizer/tokenizer.h"

namespace w4q::tokenizer_bench {
namespace {

using tokenizer::Tokenizer;

const std::filesystem::path folder = std::filesystem::path(W4Q_TESTDATA) / "w4q-llama-tiny";
const std::filesystem::path styles = std::filesystem::path(W4Q_TESTDATA) / "tokenizers";

std::string text() { return io::read_file(folder / "own" / "selfgen.txt"); }

void count_bytes(benchmark::State& state, size_t bytes) {
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(bytes));
}

/// Byte-level BPE behind a regular expression, as in Llama 3.
void encode_byte_level(benchmark::State& state) {
  const Tokenizer tokenizer = Tokenizer::open(folder);
  const std::string input = text();
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer.encode(input, false));
  count_bytes(state, input.size());
}
BENCHMARK(encode_byte_level)->Unit(benchmark::kMillisecond);

/// The whole text is one word, as in Llama 2.
void encode_one_word(benchmark::State& state) {
  const auto path = styles / "llama2.json";
  const Tokenizer tokenizer = Tokenizer::parse(io::read_file(path), path.native());
  const std::string input = text();
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer.encode(input, false));
  count_bytes(state, input.size());
}
BENCHMARK(encode_one_word)->Unit(benchmark::kMillisecond);

void decode_text(benchmark::State& state) {
  const Tokenizer tokenizer = Tokenizer::open(folder);
  const std::string input = text();
  const auto ids = tokenizer.encode(input, false);
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer.decode(ids, false));
  count_bytes(state, input.size());
}
BENCHMARK(decode_text)->Unit(benchmark::kMillisecond);

void open_file(benchmark::State& state) {
  const std::string json = io::read_file(folder / "tokenizer.json");
  for (auto _ : state) benchmark::DoNotOptimize(Tokenizer::parse(json, "tokenizer.json").vocab_size());
  count_bytes(state, json.size());
}
BENCHMARK(open_file)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace w4q::tokenizer_bench
