// The resident set while streaming a checkpoint much larger than it.
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <fstream>

#include "io/safetensors.h"
#include "program.h"

namespace w4q::test {
namespace {

/// Writes a Llama checkpoint whose weights are a hole in the file: zeros that take no space.
int64_t write_sparse_model(const std::filesystem::path& folder, int layers, int64_t hidden, int64_t intermediate) {
  std::filesystem::create_directories(folder);
  const io::Json config = {{"architectures", {"LlamaForCausalLM"}},
                           {"model_type", "llama"},
                           {"hidden_size", hidden},
                           {"intermediate_size", intermediate},
                           {"num_hidden_layers", layers},
                           {"num_attention_heads", hidden / 128},
                           {"num_key_value_heads", hidden / 512},
                           {"vocab_size", 1024},
                           {"rms_norm_eps", 1e-5},
                           {"rope_theta", 5e5},
                           {"max_position_embeddings", 2048},
                           {"tie_word_embeddings", true},
                           {"torch_dtype", "bfloat16"}};
  std::ofstream(folder / "config.json") << config.dump();
  std::vector<io::PlannedTensor> plan{{"model.embed_tokens.weight", DType::bf16, {1024, hidden}},
                                      {"model.norm.weight", DType::bf16, {hidden}}};
  for (int layer = 0; layer < layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const auto add = [&](const std::string& name, Shape shape) {
      plan.push_back({prefix + name + ".weight", DType::bf16, std::move(shape)});
    };
    add("input_layernorm", {hidden});
    add("post_attention_layernorm", {hidden});
    add("self_attn.q_proj", {hidden, hidden});
    add("self_attn.k_proj", {hidden / 4, hidden});
    add("self_attn.v_proj", {hidden / 4, hidden});
    add("self_attn.o_proj", {hidden, hidden});
    add("mlp.gate_proj", {intermediate, hidden});
    add("mlp.up_proj", {intermediate, hidden});
    add("mlp.down_proj", {hidden, intermediate});
  }
  const auto header = io::layout_safetensors(plan, {{"format", "pt"}});
  const std::string text = io::serialize_safetensors_header(header);
  const auto file = folder / "model.safetensors";
  std::ofstream(file, std::ios::binary) << text;
  const auto size = static_cast<int64_t>(text.size() + header.tensors.back().end);
  std::filesystem::resize_file(file, static_cast<uintmax_t>(size));
  return size;
}

int64_t free_bytes(const std::filesystem::path& folder) {
  struct statvfs info {};
  return ::statvfs(folder.c_str(), &info) == 0
             ? static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize)
             : 0;
}

TEST(Memory, QuantizingTenGigabytesStaysUnderOneGigabyteAndTheLargestTensor) {
  const TemporaryFolder folder;
  constexpr int64_t needed = 4'000'000'000;
  if (free_bytes(folder.path()) < needed) GTEST_SKIP() << "needs 4 GB of free disk for the output";
  // 23 layers of 436 MB each: an 8B model's shapes.
  const int64_t size = write_sparse_model(folder / "m", 23, 4096, 14336);
  ASSERT_GT(size, 10'000'000'000);
  const auto result =
      run_w4q({"quantize", (folder / "m").string(), "-o", (folder / "q").string(), "--k", "3", "--quiet"});
  ASSERT_EQ(result.status, 0) << result.err;
  constexpr int64_t largest = int64_t{14336} * 4096 * 2;
  EXPECT_LT(result.peak_bytes, 1'000'000'000 + largest);
  RecordProperty("peak_megabytes", static_cast<int>(result.peak_bytes / 1'000'000));
  RecordProperty("seconds", static_cast<int>(result.seconds));
}

}  // namespace
}  // namespace w4q::test
