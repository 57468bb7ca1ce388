// Rules that look at values of small tensors, and files of GGUF.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "io/gguf.h"
#include "made_checkpoint.h"
#include "serving/prediction.h"
#include "support.h"

namespace w4q::serving {
namespace {

namespace fs = std::filesystem;
using enum Program;
using test::MadeCheckpoint;
using test::Storage;

/// Written, and asked for.
std::string asked(const MadeCheckpoint& made, Program program, bool* right = nullptr) {
  const test::TemporaryFolder folder;
  made.write(folder.path() / "model");
  const auto prediction = predict(StoredModel::open(folder.path() / "model"), program);
  if (right != nullptr) *right = prediction.loads() && prediction.right();
  return to_text(prediction);
}

/// Two linears of GPTQ, 64 by 64 in groups of 32, in the order that is given.
MadeCheckpoint made_gptq(const std::vector<int32_t>& order) {
  MadeCheckpoint made;
  made.config = {{"model_type", "llama"},
                 {"hidden_size", 64},
                 {"num_attention_heads", 2},
                 {"quantization_config",
                  {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 32}, {"desc_act", false}, {"sym", true}}}};
  const std::string path = "model.layers.0.self_attn.o_proj";
  made.put(path + ".qweight", DType::i32, {8, 64}, std::vector<int32_t>(512));
  made.put(path + ".qzeros", DType::i32, {2, 8}, std::vector<int32_t>(16, 0x77777777));
  made.put(path + ".scales", DType::f16, {2, 64}, std::vector<uint16_t>(128, 0x2000));
  made.put(path + ".g_idx", DType::i32, {64}, order);
  return made;
}

TEST(PredictedValues, AnOrderOfGroupsThatServersDrop) {
  std::vector<int32_t> in_order(64), shuffled(64);
  for (int i = 0; i < 64; ++i) in_order[static_cast<size_t>(i)] = i / 32, shuffled[static_cast<size_t>(i)] = i % 2;
  bool right = false;
  EXPECT_EQ(asked(made_gptq(in_order), vllm, &right).find("[group-order]"), std::string::npos);
  EXPECT_TRUE(right);
  for (const Program program : {vllm, sglang}) {
    const std::string text = asked(made_gptq(shuffled), program, &right);
    EXPECT_NE(text.find("o_proj.g_idx"), std::string::npos) << text;
    EXPECT_NE(text.find("[group-order]"), std::string::npos) << text;
    EXPECT_FALSE(right);
  }
  // SGLang reads it where the config says so.
  auto stated = made_gptq(shuffled);
  stated.config["quantization_config"]["desc_act"] = true;
  asked(stated, sglang, &right);
  EXPECT_TRUE(right);
  asked(stated, transformers, &right);
  EXPECT_TRUE(right);
}

TEST(PredictedValues, FactorsOfWhatServersFuse) {
  for (const Storage storage : {Storage::nvfp4, Storage::nvfp4_modelopt}) {
    auto made = test::made_mixture(storage);
    EXPECT_EQ(asked(made, vllm).find("[factors]"), std::string::npos) << asked(made, vllm);
    for (const char* part : {"0.self_attn.k_proj", "1.mlp.experts.2.up_proj"}) {
      auto changed = made;
      for (const auto& name : changed.names_with(part)) {
        if (!name.ends_with("global_scale") && !name.ends_with("scale_2")) continue;
        changed.values<float>(name)[0] *= 1.25f;
      }
      const std::string text = asked(changed, vllm);
      EXPECT_NE(text.find(part), std::string::npos) << text;
      EXPECT_NE(text.find("[factors]"), std::string::npos) << text;
      EXPECT_EQ(asked(changed, transformers).find("[factors]"), std::string::npos);
    }
  }
}

TEST(PredictedValues, ScalesOfTheCache) {
  const std::string path = "model.layers.0.self_attn.";
  const auto with = [&](float key, float value, bool keys = true) {
    auto made = test::made_mixture(Storage::fp8_tensor);
    if (keys) made.put(path + "k_scale", DType::f32, {1}, std::vector<float>{key});
    made.put(path + "v_scale", DType::f32, {1}, std::vector<float>{value});
    return asked(made, vllm);
  };
  EXPECT_EQ(with(0.1f, 0.2f).find("[cache-scales]"), std::string::npos);
  EXPECT_NE(with(0, 0.2f).find("k_scale"), std::string::npos);
  EXPECT_NE(with(0.1f, INFINITY).find("v_scale"), std::string::npos);
  EXPECT_NE(with(0.1f, NAN).find("[cache-scales]"), std::string::npos);
  EXPECT_NE(with(1, 0.2f, false).find("a scale of keys beside it"), std::string::npos);
}

fs::path write_gguf(const fs::path& folder, GgmlType type) {
  io::GgufMetadata metadata;
  const auto header = io::layout_gguf({{"blk.0.ffn_up.weight", type, {32, 256}}}, metadata);
  const fs::path file = folder / "model.gguf";
  std::ofstream out(file, std::ios::binary);
  out << io::serialize_gguf_header(header) << std::string(header.file_size() - header.data_begin, '\0');
  return file;
}

TEST(PredictedValues, TypesOfGgufFiles) {
  const test::TemporaryFolder folder;
  const auto loads = [&](GgmlType type, Program program) {
    return predict(StoredModel::open(write_gguf(folder.path(), type)), program).loads();
  };
  EXPECT_TRUE(loads(GgmlType::q4_k, llama_cpp) && loads(GgmlType::q4_k, sglang) && loads(GgmlType::q4_k, transformers));
  EXPECT_FALSE(loads(GgmlType::q4_k, vllm) || loads(GgmlType::q4_k, mlx) || loads(GgmlType::q4_k, trt_llm));
  EXPECT_TRUE(loads(GgmlType::mxfp4, llama_cpp));
  EXPECT_FALSE(loads(GgmlType::mxfp4, sglang) || loads(GgmlType::nvfp4, transformers) ||
               loads(GgmlType::q5_0, transformers));
  const auto file = write_gguf(folder.path(), GgmlType::mxfp4);
  EXPECT_NE(to_text(predict(StoredModel::open(file), sglang)).find("blk.0.ffn_up.weight: MXFP4"), std::string::npos);
}

}  // namespace
}  // namespace w4q::serving
