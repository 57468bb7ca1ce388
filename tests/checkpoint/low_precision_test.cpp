// Small floats under the names and configs of several programs: each is the weights that it stands for.
#include "checkpoint/low_precision.h"

#include <gtest/gtest.h>

#include <fstream>

#include "core/error.h"
#include "made_checkpoint.h"
#include "support.h"

namespace w4q::checkpoint {
namespace {

using test::MadeCheckpoint;
using test::Storage;

class LowPrecision : public testing::Test {
 protected:
  Folder opened(const MadeCheckpoint& made, FloatForm floats = FloatForm::decoded) {
    made.write(folder_ / "made");
    for (const auto& [file, text] : beside_) std::ofstream(folder_ / "made" / file) << text.dump();
    return open_folder(folder_ / "made", true, floats);
  }

  std::vector<float> values(const MadeCheckpoint& made, const std::string& name) {
    const Folder folder = opened(made);
    const auto loaded = folder.tensors.load(name);
    const auto values = reinterpret_cast<const float*>(loaded->bytes.data());
    EXPECT_EQ(loaded->dtype, DType::f32);
    return {values, values + element_count(loaded->shape)};
  }

  test::TemporaryFolder folder_;
  std::map<std::string, io::Json> beside_;
};

const std::string q_proj = "model.language_model.layers.1.self_attn.q_proj";
const std::string expert = "model.language_model.layers.1.mlp.experts.2.down_proj";

void rename(MadeCheckpoint& made, std::string_view end, std::string_view to) {
  for (const auto& name : made.names_with(end)) {
    if (!name.ends_with(end)) continue;
    made.tensors[name.substr(0, name.size() - end.size()) + std::string(to)] = std::move(made.tensors[name]);
    made.tensors.erase(name);
  }
}

/// What wrapped models say of their text model (Kimi-K2.5), and the key of the first files of compressed-tensors.
TEST_F(LowPrecision, ConfigsInOtherPlaces) {
  auto made = test::made_mixture(Storage::fp8_channel);
  const auto expected = values(made, q_proj + ".weight");
  const io::Json stated = made.config["quantization_config"];
  made.config.erase("quantization_config");
  auto nested = made;
  nested.config["text_config"]["quantization_config"] = stated;
  EXPECT_EQ(values(nested, q_proj + ".weight"), expected);
  EXPECT_FALSE(opened(nested).config["text_config"].contains("quantization_config"));
  auto old = made;
  old.config["compression_config"] = stated;
  old.config["compression_config"].erase("quant_method");
  EXPECT_EQ(values(old, q_proj + ".weight"), expected);
}

/// Weights that were widened beside a config that still tells of the small floats.
TEST_F(LowPrecision, APromiseThatNoMatrixKeepsIsLeftOut) {
  auto made = test::made_mixture(Storage::bf16);
  made.config["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  const Folder folder = opened(made);
  EXPECT_FALSE(folder.small_floats);
  EXPECT_FALSE(folder.config.contains("quantization_config"));
  ASSERT_EQ(folder.quantization.notes.size(), 1u);
  EXPECT_NE(folder.quantization.notes[0].find("promises small floats"), std::string::npos);
}

/// Older exports of ModelOpt say nothing in config.json.
TEST_F(LowPrecision, HfQuantConfigAlone) {
  auto made = test::made_mixture(Storage::nvfp4_modelopt);
  const auto expected = values(made, q_proj + ".weight");
  const io::Json stated = made.config["quantization_config"];
  made.config.erase("quantization_config");
  beside_["hf_quant_config.json"] = {
      {"producer", {{"name", "modelopt"}, {"version", "0.29.0"}}},
      {"quantization", {{"quant_algo", "NVFP4"}, {"group_size", 16}, {"exclude_modules", stated["ignore"]}}}};
  EXPECT_EQ(values(made, q_proj + ".weight"), expected);
  EXPECT_EQ(opened(made, FloatForm::packed).quantization.method, "modelopt");
}

TEST_F(LowPrecision, MethodsOfOtherPrograms) {
  struct Row {
    Storage storage;
    io::Json config;
  };
  const Row rows[] = {
      {Storage::fp8_channel, {{"quant_method", "fbgemm_fp8"}, {"activation_scale_ub", 1200.0}}},
      {Storage::fp8_channel, {{"quant_method", "auto-round"}, {"data_type", "fp"}, {"bits", 8}}},
      {Storage::mxfp4, {{"quant_method", "auto-round"}, {"data_type", "mx_fp"}, {"bits", 4}, {"group_size", 32}}},
      {Storage::nvfp4, {{"quant_method", "auto-round"}, {"data_type", "nv_fp"}, {"bits", 4}, {"group_size", 16}}},
  };
  for (const Row& row : rows) {
    auto made = test::made_mixture(row.storage);
    const auto expected = values(made, q_proj + ".weight");
    made.config["quantization_config"] = row.config;
    EXPECT_EQ(values(made, q_proj + ".weight"), expected) << row.config;
    EXPECT_TRUE(opened(made).small_floats);
  }
}

/// "X.scale" beside "X.weight"; experts are two codes of E2M1 in an I8.
TEST_F(LowPrecision, NamesOfDeepSeekV4) {
  auto made = test::made_mixture(Storage::mxfp4);
  const auto expected = values(made, q_proj + ".weight");
  rename(made, ".weight_packed", ".weight");
  rename(made, ".weight_scale", ".scale");
  for (auto& [name, tensor] : made.tensors) {
    if (name.ends_with(".scale")) tensor.dtype = DType::f8_e8m0;
    if (tensor.dtype == DType::u8) tensor.dtype = DType::i8;
  }
  made.config["quantization_config"] = {{"quant_method", "fp8"}, {"scale_fmt", "ue8m0"}};
  EXPECT_EQ(values(made, q_proj + ".weight"), expected);
  EXPECT_THROW(open_packed_folder(folder_ / "made"), Error);  // no dialect has these names
}

/// Experts [E, n, k] with scales [E, n/8, k/8].
TEST_F(LowPrecision, StacksOfFp8) {
  auto made = test::made_mixture(Storage::fp8_blocks);
  const auto expected = values(made, expert + ".weight");
  const std::string stack = "model.language_model.layers.1.mlp.experts.down_proj";
  for (const char* end : {".weight", ".weight_scale_inv"}) {
    test::MadeTensor whole;
    for (int i = 0; i < 4; ++i) {
      const auto name = concat("model.language_model.layers.1.mlp.experts.", i, ".down_proj", end);
      const auto& part = made.tensors.at(name);
      whole.dtype = part.dtype, whole.shape = {4, part.shape[0], part.shape[1]};
      whole.bytes.insert(whole.bytes.end(), part.bytes.begin(), part.bytes.end());
      made.tensors.erase(name);
    }
    made.tensors[stack + (std::string_view(end) == ".weight" ? "" : "_scale_inv")] = std::move(whole);
  }
  EXPECT_EQ(values(made, stack + ".2.weight"), expected);
}

/// LLM.int8 has the largest magnitude of each row beside codes of ±127.
TEST_F(LowPrecision, Int8OfBitsandbytes) {
  auto made = test::made_mixture(Storage::bf16);
  const std::vector<int8_t> codes{127, -127, 0, 64, 1, -2, 3, -4};
  made.tensors.erase(q_proj + ".weight");
  made.put(q_proj + ".weight", DType::i8, {2, 4}, codes);
  made.put(q_proj + ".SCB", DType::f32, {2}, std::vector<float>{0.5f, 2});
  made.put(q_proj + ".weight_format", DType::u8, {}, std::vector<uint8_t>{0});
  made.config["quantization_config"] = {{"quant_method", "bitsandbytes"}, {"load_in_8bit", true}};
  const auto found = values(made, q_proj + ".weight");
  for (size_t i = 0; i < codes.size(); ++i) {
    EXPECT_EQ(found[i], static_cast<float>(codes[i]) * ((i < 4 ? 0.5f : 2.0f) / 127)) << i;
  }
  made.values<uint8_t>(q_proj + ".weight_format")[0] = 1;
  EXPECT_THROW(opened(made), Error);
}

/// What AWQ of ModelOpt multiplies inputs by is a part of the weights.
TEST_F(LowPrecision, FactorsOfInputs) {
  auto made = test::made_mixture(Storage::nvfp4_modelopt);
  auto expected = values(made, q_proj + ".weight");
  std::vector<float> factors(128);
  for (size_t i = 0; i < factors.size(); ++i) factors[i] = 1 + static_cast<float>(i) / 64;
  made.put(q_proj + ".pre_quant_scale", DType::f32, {128}, factors);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] *= factors[i % 128];
  EXPECT_EQ(values(made, q_proj + ".weight"), expected);
  EXPECT_EQ(opened(made, FloatForm::either).quantization.linears.size(), 0u);
}

/// MLX: a dense stream of codes in words, groups with a scale and an offset each.
TEST_F(LowPrecision, GroupsOfMlx) {
  constexpr int64_t n = 2, k = 64;
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    MadeCheckpoint made;
    made.config["quantization"] = {{"group_size", 32}, {"bits", 4}, {"mode", "affine"}};
    made.config["quantization"]["x"] = {{"group_size", 32}, {"bits", bits}};
    std::vector<uint32_t> words(static_cast<size_t>(n * k * bits / 32));
    std::vector<float> expected;
    for (int64_t i = 0; i < n * k; ++i) {
      const auto code = static_cast<uint64_t>(i * 37 % (1 << bits));
      const int64_t at = i * bits;
      words[static_cast<size_t>(at / 32)] |= static_cast<uint32_t>(code << at % 32);
      if (at % 32 + bits > 32) words[static_cast<size_t>(at / 32) + 1] |= static_cast<uint32_t>(code >> (32 - at % 32));
      const auto group = static_cast<float>(i / 32);
      expected.push_back(static_cast<float>(code) * (0.5f + group) - 3 - group);
    }
    made.put("x.weight", DType::u32, {n, k * bits / 32}, words);
    made.put("x.scales", DType::f32, {n, 2}, std::vector<float>{0.5f, 1.5f, 2.5f, 3.5f});
    made.put("x.biases", DType::f32, {n, 2}, std::vector<float>{-3, -4, -5, -6});
    EXPECT_EQ(values(made, "x.weight"), expected) << bits;
    auto folder = opened(made);
    EXPECT_FALSE(folder.tensors.contains("x.scales"));
    EXPECT_FALSE(folder.config.contains("quantization"));
    EXPECT_EQ(folder.few_bits, bits < 4);
    auto lacking = made;
    lacking.tensors.erase("x.biases");
    EXPECT_THROW(opened(lacking), Error);
    made.config["quantization"]["x"]["bits"] = bits == 4 ? 8 : 4;
    EXPECT_THROW(opened(made), Error);
  }
}

TEST_F(LowPrecision, StacksAndFloatsOfMlx) {
  MadeCheckpoint made;
  made.config["quantization_config"] = {{"group_size", 32}, {"bits", 4}, {"mode", "mxfp4"}};
  made.put("y.weight", DType::u32, {2, 1, 4}, std::vector<uint32_t>(8, 0x7654'3210u));
  made.put("y.scales", DType::u8, {2, 1, 1}, std::vector<uint8_t>{127, 128});
  const auto second = values(made, "y.1.weight");
  ASSERT_EQ(second.size(), 32u);
  const std::vector<float> eight = {0, 1, 2, 3, 4, 6, 8, 12};
  EXPECT_EQ(std::vector<float>(second.begin() + 8, second.begin() + 16), eight);
}

/// mlx-lm turns convolutions of delta nets round and adds one to the norms of their models; where it did not, all is as it is.
TEST_F(LowPrecision, DeltaNetsOfMlx) {
  const std::string layer = "model.layers.0.", convolution = layer + "linear_attn.conv1d.weight";
  const auto folder = [&](const Shape& shape) {
    MadeCheckpoint made;
    made.config["quantization"] = {{"group_size", 32}, {"bits", 8}, {"mode", "affine"}};
    made.put(convolution, DType::f32, shape, std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8});
    for (const char* norm : {"input_layernorm.weight", "self_attn.q_norm.weight", "linear_attn.norm.weight"})
      made.put(layer + norm, DType::f32, {2}, std::vector<float>{1.5f, 0.25f});
    return made;
  };
  using Values = std::vector<float>;
  const auto turned = folder({2, 4, 1});
  EXPECT_EQ(opened(turned).tensors.at(convolution).shape, (Shape{2, 1, 4}));
  EXPECT_EQ(values(turned, convolution), (Values{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(values(turned, layer + "input_layernorm.weight"), (Values{0.5f, -0.75f}));
  EXPECT_EQ(values(turned, layer + "self_attn.q_norm.weight"), (Values{0.5f, -0.75f}));
  EXPECT_EQ(values(turned, layer + "linear_attn.norm.weight"), (Values{1.5f, 0.25f}));
  const auto plain = folder({2, 1, 4});
  EXPECT_EQ(opened(plain).tensors.at(convolution).shape, (Shape{2, 1, 4}));
  EXPECT_EQ(values(plain, layer + "input_layernorm.weight"), (Values{1.5f, 0.25f}));
}

/// ModelOpt: two outputs a byte, in two's complement, and factors of inputs.
TEST_F(LowPrecision, Int4OfModelOpt) {
  MadeCheckpoint made;
  made.config["quantization_config"] = {{"quant_method", "modelopt"}, {"quant_algo", "W4A16_AWQ"}, {"group_size", 2}};
  made.put("x.weight", DType::u8, {1, 4}, std::vector<uint8_t>{0x1f, 0x70, 0x8a, 0x25});
  made.put("x.weight_scale", DType::f32, {2, 2}, std::vector<float>{0.5f, 2, 1, 0.25f});
  made.put("x.pre_quant_scale", DType::f32, {4}, std::vector<float>{1, 1, 2, 4});
  const std::vector<float> expected = {-0.5f, 0, -24, 40, 1, 7, -4, 2};
  EXPECT_EQ(values(made, "x.weight"), expected);
  made.config["quantization_config"]["quant_algo"] = "W4A8_AWQ";
  EXPECT_THROW(opened(made), Error);
}

}  // namespace
}  // namespace w4q::checkpoint
