// Checkpoints in memory, made as other programs write them or read from a folder, to be changed and written: a wrapped
// mixture of experts with a tower and a layer for further tokens, its linears stored as small floats or integers.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/convert.h"
#include "core/float_formats.h"
#include "core/rng.h"
#include "core/text.h"
#include "core/views.h"
#include "io/checkpoint.h"
#include "io/checkpoint_writer.h"
#include "io/files.h"
#include "io/json.h"

namespace w4q::test {

struct MadeTensor {
  DType dtype = DType::u8;
  Shape shape;
  std::vector<std::byte> bytes;
};

struct MadeCheckpoint {
  io::Json config;
  std::map<std::string, MadeTensor> tensors;

  static MadeCheckpoint of(const std::filesystem::path& folder) {
    MadeCheckpoint made{io::read_json(folder / "config.json"), {}};
    const auto stored = io::Checkpoint::open(folder / "model.safetensors");
    for (const auto& [name, info] : stored.tensors()) {
      const auto loaded = stored.load(name);
      made.tensors[name] = {info.dtype, info.shape, {loaded->bytes.begin(), loaded->bytes.end()}};
    }
    return made;
  }

  /// Takes the place of what is there.
  void write(const std::filesystem::path& folder) const {
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    std::vector<io::PlannedTensor> planned;
    for (const auto& [name, tensor] : tensors) planned.push_back({name, tensor.dtype, tensor.shape});
    io::CheckpointWriter writer(folder, planned, {});
    for (const auto& [name, tensor] : tensors) writer.write(name, tensor.bytes);
    writer.finish();
    std::ofstream(folder / "config.json") << config.dump(2);
  }

  template <class T>
  void put(const std::string& name, DType dtype, Shape shape, const std::vector<T>& values) {
    const auto bytes = std::as_bytes(std::span(values));
    tensors[name] = {dtype, std::move(shape), {bytes.begin(), bytes.end()}};
  }
  template <class T>
  std::span<T> values(const std::string& name) {
    auto& bytes = tensors.at(name).bytes;
    return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  std::vector<std::string> names_with(std::string_view part) const {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : tensors) {
      if (name.find(part) != std::string::npos) names.push_back(name);
    }
    return names;
  }
};

/// How the linears of the layers are stored.
enum class Storage { bf16, fp8_blocks, fp8_channel, fp8_tensor, mxfp4_stack, mxfp4, nvfp4, nvfp4_modelopt, int4 };
inline constexpr std::array small_storages{Storage::fp8_blocks,    Storage::fp8_channel, Storage::fp8_tensor,
                                           Storage::mxfp4_stack,   Storage::mxfp4,       Storage::nvfp4,
                                           Storage::nvfp4_modelopt};

inline std::string_view to_string(Storage storage) {
  constexpr std::array names{"bf16",  "fp8-blocks", "fp8-channel",    "fp8-tensor", "mxfp4-stack",
                             "mxfp4", "nvfp4",      "nvfp4-modelopt", "int4"};
  return names[static_cast<size_t>(storage)];
}

inline constexpr std::array<float, 16> e2m1_values = {0,     .5f,  1,  1.5f,  2,  3,  4,  6,
                                                      -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};

inline uint8_t e2m1_from_f32(float value) {
  const auto magnitudes = std::span(e2m1_values).first(8);
  const auto nearest =
      std::ranges::min_element(magnitudes, {}, [&](float magnitude) { return std::abs(std::abs(value) - magnitude); });
  return static_cast<uint8_t>((nearest - magnitudes.begin()) + (value < 0 ? 8 : 0));
}

/// Writes one matrix as one program does.
class MadeWriter {
 public:
  MadeWriter(MadeCheckpoint& made, Storage storage) : made_(made), storage_(storage) {}

  static constexpr int64_t block = 8;  ///< of fp8_blocks, both ways

  void dense(const std::string& name, const Shape& shape, float size = 0.05f) {
    std::vector<uint16_t> values;
    for (const float value : random(name, element_count(shape), shape.back(), size)) {
      values.push_back(bf16_from_f32(value));
    }
    made_.put(name, DType::bf16, shape, values);
  }

  /// Linears that servers put into one: they share what must be shared.
  void fused(const std::string& path, const std::vector<std::pair<std::string, Shape>>& linears) {
    float largest = 0;
    for (const auto& [name, shape] : linears) {
      for (const float value : random(path + name, element_count(shape), shape[1])) {
        largest = std::max(largest, std::abs(value));
      }
    }
    for (const auto& [name, shape] : linears) matrix(path + name, shape, largest);
  }

  /// gpt-oss: experts [E, n, k] in blocks.
  void stack(const std::string& name, int64_t experts, int64_t n, int64_t k) {
    std::vector<uint8_t> codes, scales;
    const auto values = random(name, experts * n * k, k);
    for (size_t at = 0; at < values.size(); at += 32) {
      const std::span block_values(values.data() + at, 32);
      const float scale = power_scale(block_values, scales);
      pack_e2m1(block_values, scale, codes);
    }
    made_.put(name + "_blocks", DType::u8, {experts, n, k / 32, 16}, codes);
    made_.put(name + "_scales", DType::u8, {experts, n, k / 32}, scales);
  }

 private:
  /// Close to normal, rows of different size, by the name.
  static std::vector<float> random(const std::string& name, int64_t count, int64_t width, float size = 0.05f) {
    uint64_t seed = 7;
    for (const char c : name) seed = seed * 131 + static_cast<uint8_t>(c);
    std::vector<float> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) {
      double sum = -6;
      for (uint64_t j = 0; j < 12; ++j) sum += random_uniform(seed, 12 * i + j);
      const double row = 0.7 + 0.6 * random_uniform(seed + 1, i / static_cast<size_t>(width));
      values[i] = static_cast<float>(sum * row) * size;
    }
    return values;
  }

  static float largest_of(std::span<const float> values) {
    float largest = 0;
    for (const float value : values) largest = std::max(largest, std::abs(value));
    return largest;
  }

  static float power_scale(std::span<const float> values, std::vector<uint8_t>& scales) {
    const int exponent = static_cast<int>(std::floor(std::log2(largest_of(values)))) - 2;
    scales.push_back(static_cast<uint8_t>(exponent + 127));
    return std::ldexp(1.0f, exponent);
  }

  static void pack_e2m1(std::span<const float> values, float scale, std::vector<uint8_t>& codes) {
    for (size_t i = 0; i < values.size(); i += 2) {
      const uint8_t low = e2m1_from_f32(values[i] / scale), high = e2m1_from_f32(values[i + 1] / scale);
      codes.push_back(static_cast<uint8_t>(low | high << 4));
    }
  }

  void matrix(const std::string& path, const Shape& shape, float largest) {
    const auto values = random(path, element_count(shape), shape[1]);
    switch (storage_) {
      case Storage::bf16:
      case Storage::mxfp4_stack:
        return dense(path + ".weight", shape);
      case Storage::fp8_blocks:
        return fp8(path, shape, values, block, block, "_scale_inv", DType::f32,
                   {(shape[0] + block - 1) / block, (shape[1] + block - 1) / block});
      case Storage::fp8_channel:
        return fp8(path, shape, values, 1, shape[1], "_scale", DType::bf16, {shape[0], 1});
      case Storage::fp8_tensor:
        return fp8(path, shape, values, shape[0], shape[1], "_scale", DType::f32, {});
      case Storage::mxfp4:
        return e2m1(path, shape, values, 32, 0);
      case Storage::nvfp4:
      case Storage::nvfp4_modelopt:
        return e2m1(path, shape, values, 16, largest);
      case Storage::int4:
        return int4(path, shape, values);
    }
  }

  void fp8(const std::string& path, const Shape& shape, const std::vector<float>& values, int64_t rows, int64_t cols,
           const char* suffix, DType type, const Shape& form) {
    const int64_t across = (shape[1] + cols - 1) / cols;
    std::vector<float> scales(static_cast<size_t>((shape[0] + rows - 1) / rows * across));
    const auto scale_of = [&](size_t i) -> float& {
      const auto at = static_cast<int64_t>(i);
      return scales[static_cast<size_t>(at / shape[1] / rows * across + at % shape[1] / cols)];
    };
    for (size_t i = 0; i < values.size(); ++i) scale_of(i) = std::max(scale_of(i), std::abs(values[i]));
    std::vector<uint16_t> halves;
    for (float& scale : scales) {
      scale /= 448;
      halves.push_back(bf16_from_f32(scale));
      if (type == DType::bf16) scale = f32_from_bf16(halves.back());
    }
    std::vector<uint8_t> codes;
    for (size_t i = 0; i < values.size(); ++i) {
      codes.push_back(e4m3_from_f32(std::clamp(values[i] / scale_of(i), -448.0f, 448.0f)));
    }
    made_.put(path + ".weight", DType::f8_e4m3, shape, codes);
    if (type == DType::bf16) return made_.put(path + ".weight" + suffix, type, form, halves);
    made_.put(path + ".weight" + suffix, type, form, scales);
  }

  /// MXFP4, or NVFP4 with the largest magnitude that a factor is made of.
  void e2m1(const std::string& path, const Shape& shape, const std::vector<float>& values, size_t group,
            float largest) {
    std::vector<uint8_t> codes, scales;
    const float whole = largest == 0 ? 1 : 6 * 448 / largest;
    for (size_t at = 0; at < values.size(); at += group) {
      const std::span part(values.data() + at, group);
      float scale = 0;
      if (largest == 0) {
        scale = power_scale(part, scales);
      } else {
        scales.push_back(e4m3_from_f32(largest_of(part) / 6 * whole));
        scale = f32_from_e4m3(scales.back()) / whole;
      }
      pack_e2m1(part, scale, codes);
    }
    const bool modelopt = storage_ == Storage::nvfp4_modelopt;
    made_.put(path + (modelopt ? ".weight" : ".weight_packed"), DType::u8, {shape[0], shape[1] / 2}, codes);
    made_.put(path + ".weight_scale", largest == 0 ? DType::u8 : DType::f8_e4m3,
              {shape[0], shape[1] / static_cast<int64_t>(group)}, scales);
    if (largest == 0) return;
    const std::vector<float> factor{modelopt ? 1 / whole : whole};
    made_.put(path + (modelopt ? ".weight_scale_2" : ".weight_global_scale"), DType::f32, modelopt ? Shape{} : Shape{1},
              factor);
  }

  void int4(const std::string& path, const Shape& shape, const std::vector<float>& values) {
    std::vector<uint32_t> words(values.size() / 8);
    std::vector<uint16_t> scales;
    for (size_t at = 0; at < values.size(); at += 32) {
      scales.push_back(bf16_from_f32(largest_of({values.data() + at, 32}) / 7.5f));
      const float scale = f32_from_bf16(scales.back());
      for (size_t i = at; i < at + 32; ++i) {
        const auto code = static_cast<uint32_t>(std::clamp(std::lround(values[i] / scale), -8l, 7l) + 8);
        words[i / 8] |= code << (i % 8 * 4);
      }
    }
    made_.put(path + ".weight_packed", DType::i32, {shape[0], shape[1] / 8}, words);
    made_.put(path + ".weight_scale", DType::bf16, {shape[0], shape[1] / 32}, scales);
    made_.put(path + ".weight_shape", DType::i64, {2}, std::vector<int64_t>{shape[0], shape[1]});
  }

  MadeCheckpoint& made_;
  Storage storage_;
};

inline io::Json made_quantization(Storage storage, const std::vector<std::string>& ignore) {
  const auto compressed = [&](const char* format, io::Json weights) {
    weights["symmetric"] = true;
    weights["dynamic"] = false;
    return io::Json{{"quant_method", "compressed-tensors"},
                    {"format", format},
                    {"version", "0.18.0"},
                    {"ignore", ignore},
                    {"config_groups", {{"group_0", {{"targets", {"Linear"}}, {"weights", std::move(weights)}}}}}};
  };
  switch (storage) {
    case Storage::fp8_blocks:
      return {{"quant_method", "fp8"},
              {"weight_block_size", {MadeWriter::block, MadeWriter::block}},
              {"modules_to_not_convert", ignore}};
    case Storage::fp8_channel:
      return compressed("float-quantized", {{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}});
    case Storage::fp8_tensor:
      return {{"quant_method", "modelopt"}, {"quant_algo", "FP8"}, {"ignore", ignore}};
    case Storage::mxfp4_stack:
      return {{"quant_method", "mxfp4"}, {"modules_to_not_convert", ignore}};
    case Storage::mxfp4:
      return compressed("mxfp4-pack-quantized",
                        {{"num_bits", 4}, {"type", "float"}, {"strategy", "group"}, {"group_size", 32}});
    case Storage::nvfp4:
      return compressed("nvfp4-pack-quantized",
                        {{"num_bits", 4}, {"type", "float"}, {"strategy", "tensor_group"}, {"group_size", 16}});
    case Storage::nvfp4_modelopt:
      return {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}, {"ignore", ignore}};
    case Storage::int4:
      return compressed("pack-quantized",
                        {{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 32}});
    case Storage::bf16:
      break;
  }
  return nullptr;
}

/// 2 layers of 128 channels with 4 experts of 64, a tower, and a layer for further tokens.
inline MadeCheckpoint made_mixture(Storage storage) {
  MadeCheckpoint made;
  MadeWriter writer(made, storage);
  const std::string text = "model.language_model.";
  const bool stacked = storage == Storage::mxfp4_stack;
  std::vector<std::string> ignore{"lm_head", "mtp.layers.0.self_attn.q_proj", "mtp.fc"};
  for (int layer = 0; layer < 2; ++layer) {
    const std::string path = concat(text, "layers.", layer, ".");
    writer.dense(path + "input_layernorm.weight", {128});
    writer.dense(path + "post_attention_layernorm.weight", {128});
    writer.fused(path + "self_attn.", {{"q_proj", {128, 128}}, {"k_proj", {64, 128}}, {"v_proj", {64, 128}}});
    writer.fused(path + "self_attn.", {{"o_proj", {128, 128}}});
    writer.dense(path + "mlp.gate.weight", {4, 128});
    ignore.push_back(path + "mlp.gate");
    if (stacked) {
      for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"}) ignore.push_back(path + "self_attn." + name);
      writer.stack(path + "mlp.experts.gate_up_proj", 4, 128, 128);
      writer.stack(path + "mlp.experts.down_proj", 4, 128, 64);
    }
    for (int expert = 0; expert < 4 && !stacked; ++expert) {
      const std::string one = concat(path, "mlp.experts.", expert, ".");
      writer.fused(one, {{"gate_proj", {64, 128}}, {"up_proj", {64, 128}}});
      writer.fused(one, {{"down_proj", {128, 64}}});
    }
  }
  writer.dense(text + "norm.weight", {128});
  writer.dense(text + "embed_tokens.weight", {160, 128});
  writer.dense("lm_head.weight", {160, 128});
  writer.dense("mtp.layers.0.self_attn.q_proj.weight", {128, 128});
  writer.dense("mtp.fc.weight", {128, 256});
  for (int block = 0; block < 2; ++block) {
    const std::string name = concat("model.visual.blocks.", block, ".attn.qkv");
    writer.dense(name + ".weight", {96, 32});
    ignore.push_back(name);
  }
  writer.dense("model.visual.merger.weight", {128, 32});
  ignore.push_back("model.visual.merger");
  made.config = {{"architectures", {"UnseenForConditionalGeneration"}},
                 {"model_type", "unseen"},
                 {"tie_word_embeddings", false},
                 {"vision_config", {{"depth", 2}, {"hidden_size", 32}}},
                 {"text_config",
                  {{"num_hidden_layers", 2},
                   {"num_experts", 4},
                   {"hidden_size", 128},
                   {"moe_intermediate_size", 64},
                   {"vocab_size", 160},
                   {"mtp_num_hidden_layers", 1}}}};
  io::Json quantization = made_quantization(storage, ignore);
  if (!quantization.is_null()) made.config["quantization_config"] = std::move(quantization);
  return made;
}

}  // namespace w4q::test
