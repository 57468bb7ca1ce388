// Headers and configs of checkpoints as programs write them, without a byte of weights.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/text.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace w4q::test {

enum class Words {
  plain,
  awq,
  gptq,
  compressed,
  fp8_blocks,
  fp8_channel,
  nvfp4,
  nvfp4_modelopt,
  mxfp4,
  humming,
  bytes
};

struct MadeHeaders {
  io::Json config;
  std::vector<io::PlannedTensor> tensors;
  Words words = Words::plain;
  int bits = 4;
  int64_t group = 128;
  bool zeros = false;

  void put(const std::string& name, DType dtype, Shape shape) { tensors.push_back({name, dtype, std::move(shape)}); }
  void drop(std::string_view part) {
    std::erase_if(tensors, [&](const auto& tensor) { return tensor.name.find(part) != std::string::npos; });
  }
  io::PlannedTensor& at(const std::string& name) {
    for (auto& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    throw std::out_of_range(name);
  }
  io::Json& quantization() { return config["quantization_config"]; }

  void plain(const std::string& path, int64_t n, int64_t k) { put(path + ".weight", DType::bf16, {n, k}); }
  void linear(const std::string& path, int64_t n, int64_t k) { linear(path, n, k, words, bits); }
  void linear(const std::string& path, int64_t n, int64_t k, Words as, int width) {
    const int64_t groups = group > 0 ? (k + group - 1) / group : 1;
    switch (as) {
      case Words::plain:
        return plain(path, n, k);
      case Words::awq:
        put(path + ".qweight", DType::i32, {k, n / 8});
        put(path + ".qzeros", DType::i32, {groups, n / 8});
        return put(path + ".scales", DType::f16, {groups, n});
      case Words::gptq:
        put(path + ".qweight", DType::i32, {k * width / 32, n});
        put(path + ".qzeros", DType::i32, {groups, n * width / 32});
        put(path + ".scales", DType::f16, {groups, n});
        return put(path + ".g_idx", DType::i32, {k});
      case Words::compressed:
        put(path + ".weight_packed", DType::i32, {n, (k * width + 31) / 32});
        put(path + ".weight_scale", DType::bf16, {n, groups});
        put(path + ".weight_shape", DType::i64, {2});
        if (zeros) put(path + ".weight_zero_point", DType::i32, {(n * width + 31) / 32, groups});
        return;
      case Words::fp8_blocks:
        put(path + ".weight", DType::f8_e4m3, {n, k});
        return put(path + ".weight_scale_inv", DType::f32, {(n + 127) / 128, (k + 127) / 128});
      case Words::fp8_channel:
        put(path + ".weight", DType::f8_e4m3, {n, k});
        return put(path + ".weight_scale", DType::bf16, {n, 1});
      case Words::nvfp4:
        put(path + ".weight_packed", DType::u8, {n, k / 2});
        put(path + ".weight_scale", DType::f8_e4m3, {n, k / 16});
        return put(path + ".weight_global_scale", DType::f32, {1});
      case Words::nvfp4_modelopt:
        put(path + ".weight", DType::u8, {n, k / 2});
        put(path + ".weight_scale", DType::f8_e4m3, {n, k / 16});
        return put(path + ".weight_scale_2", DType::f32, {});
      case Words::mxfp4:
        put(path + ".weight_packed", DType::u8, {n, k / 2});
        return put(path + ".weight_scale", DType::u8, {n, k / 32});
      case Words::humming:
        put(path + ".weight", DType::i32, {n, k * width / 32});
        return put(path + ".weight_scale", DType::bf16, {n, groups});
      case Words::bytes:
        put(path + ".weight", DType::i8, {n, k});
        return put(path + ".weight_scale", DType::bf16, {n, groups});
    }
  }

  /// Of 2 layers, 1024 channels, 8 heads of 128, 4 of keys.
  void attention(const std::string& path) {
    linear(path + "q_proj", 1024, 1024), linear(path + "k_proj", 512, 1024), linear(path + "v_proj", 512, 1024);
    linear(path + "o_proj", 1024, 1024);
  }
};

inline io::Json compressed_quantization(int bits, int64_t group, bool zeros, const char* format = "pack-quantized",
                                        const char* type = "int") {
  const bool nvfp4 = std::string_view(format) == "nvfp4-pack-quantized";
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"ignore", {"lm_head"}},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"weights",
               {{"num_bits", bits},
                {"type", type},
                {"symmetric", !zeros},
                {"strategy", nvfp4       ? "tensor_group"
                             : group > 0 ? "group"
                                         : "channel"},
                {"group_size", group > 0 ? io::Json(group) : io::Json(nullptr)},
                {"actorder", nullptr},
                {"dynamic", false}}},
              {"input_activations", nullptr}}}}}};
}

inline io::Json quantization_of(Words words, int bits, int64_t group, bool zeros) {
  switch (words) {
    case Words::plain:
      return nullptr;
    case Words::awq:
      return {{"quant_method", "awq"}, {"bits", 4},         {"group_size", group},
              {"zero_point", true},    {"version", "gemm"}, {"modules_to_not_convert", {"lm_head"}}};
    case Words::gptq:
      return {{"quant_method", "gptq"}, {"bits", bits},  {"group_size", group},
              {"desc_act", false},      {"sym", !zeros}, {"lm_head", false}};
    case Words::compressed:
      return compressed_quantization(bits, group, zeros);
    case Words::fp8_blocks:
      return {{"quant_method", "fp8"},
              {"activation_scheme", "dynamic"},
              {"weight_block_size", {128, 128}},
              {"modules_to_not_convert", {"lm_head"}}};
    case Words::fp8_channel:
      return compressed_quantization(8, -1, false, "float-quantized", "float");
    case Words::nvfp4:
      return compressed_quantization(4, 16, false, "nvfp4-pack-quantized", "float");
    case Words::nvfp4_modelopt:
      return {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}, {"ignore", {"lm_head"}}};
    case Words::mxfp4:
      return compressed_quantization(4, 32, false, "mxfp4-pack-quantized", "float");
    case Words::bytes:
      return compressed_quantization(bits, group, zeros, "int-quantized");
    case Words::humming:
      return {{"quant_method", "humming"}, {"b_dtype", concat("uint", bits)}, {"bits", bits}, {"group_size", group}};
  }
  return nullptr;
}

/// A dense model, or a mixture of 4 experts.
inline MadeHeaders made_headers(Words words, int bits = 4, int64_t group = 128, bool zeros = false,
                                bool mixture = false) {
  MadeHeaders made{.config = {{"model_type", mixture ? "qwen3_moe" : "llama"},
                              {"hidden_size", 1024},
                              {"intermediate_size", 2048},
                              {"num_hidden_layers", 2},
                              {"num_attention_heads", 8},
                              {"num_key_value_heads", 4},
                              {"vocab_size", 320},
                              {"tie_word_embeddings", false},
                              {"torch_dtype", "float16"}},
                   .tensors = {},
                   .words = words,
                   .bits = bits,
                   .group = group,
                   .zeros = zeros};
  if (words != Words::plain) made.quantization() = quantization_of(words, bits, group, zeros);
  made.plain("model.embed_tokens", 320, 1024), made.plain("lm_head", 320, 1024);
  made.put("model.norm.weight", DType::bf16, {1024});
  if (mixture) made.config["num_experts"] = 4;
  for (int layer = 0; layer < 2; ++layer) {
    const std::string path = concat("model.layers.", layer, ".");
    made.put(path + "input_layernorm.weight", DType::bf16, {1024});
    made.attention(path + "self_attn.");
    if (mixture) made.plain(path + "mlp.gate", 4, 1024);
    for (int expert = 0; expert < (mixture ? 4 : 1); ++expert) {
      const std::string one = mixture ? concat(path, "mlp.experts.", expert, ".") : path + "mlp.";
      const int64_t width = mixture ? 768 : 2048;
      made.linear(one + "gate_proj", width, 1024), made.linear(one + "up_proj", width, 1024);
      made.linear(one + "down_proj", 1024, width);
    }
  }
  return made;
}

}  // namespace w4q::test
