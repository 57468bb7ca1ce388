// Every rule names what it is seeded with, and in the program that it is about alone; what programs load raises nothing.
#include "serving/prediction.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "core/error.h"
#include "made_headers.h"

namespace w4q::serving {
namespace {

using enum Program;
using test::made_headers;
using test::MadeHeaders;
using test::Words;

Prediction predicted(const MadeHeaders& made, Program program) {
  return predict(StoredModel::planned(made.config, made.tensors), program);
}

std::string text_of(const MadeHeaders& made, Program program) { return to_text(predicted(made, program)); }

// ---- what loads --------------------------------------------------------------------------------------------------------

struct Clean {
  std::string name;
  MadeHeaders made;
  std::vector<Program> loads;  ///< all others refuse it
};

/// … whose inputs are quantized a token.
MadeHeaders with_inputs(MadeHeaders made) {
  made.quantization()["config_groups"]["group_0"]["input_activations"] = {
      {"num_bits", 8}, {"type", "float"}, {"strategy", "token"}, {"symmetric", true}, {"dynamic", true}};
  return made;
}

std::vector<Clean> clean_models() {
  const std::vector<Program> readers{vllm, sglang, transformers}, folders{vllm, sglang, transformers, trt_llm, mlx};
  std::vector<Clean> list;
  for (const bool mixture : {false, true}) {
    const auto add = [&](const char* name, MadeHeaders made, std::vector<Program> loads) {
      list.push_back({std::string(name) + (mixture ? ", a mixture" : ""), std::move(made), std::move(loads)});
    };
    add("16 bit", made_headers(Words::plain, 4, 128, false, mixture), folders);
    add("AWQ", made_headers(Words::awq, 4, 128, false, mixture), {vllm, sglang, transformers, mlx});
    add("GPTQ of 4 bits", made_headers(Words::gptq, 4, 128, false, mixture), readers);
    add("GPTQ of 8 bits", made_headers(Words::gptq, 8, 32, false, mixture), readers);
    add("GPTQ of 3 bits", made_headers(Words::gptq, 3, 128, false, mixture), {transformers});
    add("GPTQ with zero points", made_headers(Words::gptq, 4, 128, true, mixture), {transformers});
    add("int4", made_headers(Words::compressed, 4, 128, false, mixture), readers);
    add("int4, zero points", made_headers(Words::compressed, 4, 32, true, mixture), readers);
    add("int4, whole rows", made_headers(Words::compressed, 4, -1, false, mixture), readers);
    add("int8", made_headers(Words::compressed, 8, 64, false, mixture), readers);
    add("int3", made_headers(Words::compressed, 3, 64, false, mixture), {vllm, transformers});
    add("int7", made_headers(Words::compressed, 7, 64, false, mixture), {vllm, transformers});
    std::vector<Program> of_blocks{vllm, transformers, trt_llm};
    if (mixture) of_blocks.push_back(sglang);  // the dense model is a Llama, whose code there drops scales of blocks
    add("FP8 in blocks", made_headers(Words::fp8_blocks, 8, 128, false, mixture), of_blocks);
    const std::vector<Program> servers{vllm, sglang, transformers, trt_llm}, without{transformers, trt_llm};
    add("FP8 a row", made_headers(Words::fp8_channel, 8, 128, false, mixture), mixture ? without : servers);
    add("FP8 a row, dynamic inputs", with_inputs(made_headers(Words::fp8_channel, 8, 128, false, mixture)), servers);
    if (!mixture) add("NVFP4", made_headers(Words::nvfp4, 4, 16, false, mixture), readers);
    add("NVFP4 of ModelOpt", made_headers(Words::nvfp4_modelopt, 4, 16, false, mixture), {vllm, sglang, trt_llm});
    add("Humming", made_headers(Words::humming, 4, 128, false, mixture), {vllm, sglang});
  }
  for (auto& clean : list) {
    if (clean.name.find("mixture") != std::string::npos && !clean.made.config["quantization_config"].is_null()) {
      auto& quantization = clean.made.quantization();
      if (quantization["quant_method"] == "compressed-tensors") {
        for (const char* router : {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"})
          quantization["ignore"].push_back(router);
      }
    }
  }
  return list;
}

TEST(Prediction, SoundFoldersLoadWhereTheTableSaysSoAndNowhereElse) {
  for (const auto& clean : clean_models()) {
    for (const auto& row : programs()) {
      const bool wanted = std::ranges::find(clean.loads, row.program) != clean.loads.end();
      const Prediction prediction = predicted(clean.made, row.program);
      EXPECT_EQ(prediction.loads(), wanted) << clean.name << "\n" << to_text(prediction);
      EXPECT_TRUE(prediction.right()) << clean.name << "\n" << to_text(prediction);
      if (!wanted || !row.splits) continue;
      EXPECT_EQ(prediction.tensor_parallel.front(), 1) << clean.name;
    }
  }
}

TEST(Prediction, ServersLoadExpertsOfNvfp4) {
  const MadeHeaders made = made_headers(Words::nvfp4, 4, 16, false, true);
  for (const Program program : {vllm, sglang}) {
    const Prediction prediction = predicted(made, program);
    EXPECT_TRUE(prediction.loads() && prediction.right()) << to_text(prediction);
  }
}

// ---- what does not -----------------------------------------------------------------------------------------------------

struct Fault {
  const char* rule;
  const char* name;
  MadeHeaders made;
  std::function<void(MadeHeaders&)> seed;
  Program program;
  const char* says;  ///< part of the finding: the tensor, or the key
};

void replace_linear(MadeHeaders& made, const std::string& path, int64_t n, int64_t k, Words words, int bits = 4) {
  made.drop(path + ".");
  made.linear(path, n, k, words, bits);
}

const std::string q = "model.layers.1.self_attn.q_proj";

/// FP8 in blocks under ModelOpt's name of scales, which have four dimensions there.
void as_modelopt(MadeHeaders& made, bool four) {
  constexpr std::string_view inverse = "_inv";
  for (auto& tensor : made.tensors) {
    if (!tensor.name.ends_with(inverse)) continue;
    tensor.name.resize(tensor.name.size() - inverse.size());
    if (four) tensor.shape = {tensor.shape[0], 1, tensor.shape[1], 1};
  }
}

std::vector<Fault> faults() {
  const MadeHeaders awq = made_headers(Words::awq), gptq = made_headers(Words::gptq),
                    ct = made_headers(Words::compressed);
  const MadeHeaders fp8 = made_headers(Words::fp8_blocks), nvfp4 = made_headers(Words::nvfp4);
  const MadeHeaders modelopt = made_headers(Words::nvfp4_modelopt);
  const MadeHeaders mixture = made_headers(Words::compressed, 4, 128, false, true);
  const auto weights = [](MadeHeaders& made) -> io::Json& {
    return made.quantization()["config_groups"]["group_0"]["weights"];
  };
  const auto with = [](auto change) { return [change](MadeHeaders& made) { change(made.quantization()); }; };
  return {
      {"format", "bitsandbytes", ct, with([](io::Json& json) {
         json = {{"quant_method", "bitsandbytes"}, {"load_in_4bit", true}};
       }),
       vllm, "bitsandbytes"},
      {"format", "w4q's own", ct, with([](io::Json& json) {
         json = {{"quant_method", "w4q"}};
       }),
       transformers, "w4q's own planes"},
      {"format", "exl3", ct, with([](io::Json& json) {
         json = {{"quant_method", "exl3"}};
       }),
       vllm, "EXL3"},
      {"format", "unknown", ct, with([](io::Json& json) {
         json = {{"quant_method", "hqq"}};
       }),
       vllm, "hqq"},
      {"format", "a folder", ct, [](MadeHeaders&) {}, llama_cpp, "gguf"},
      {"no-config", "packed without a word", ct, [](MadeHeaders& made) { made.config.erase("quantization_config"); },
       vllm, "down_proj.weight_packed"},
      {"keys", "sym is missing", gptq, with([](io::Json& json) { json.erase("sym"); }), vllm,
       "quantization_config.sym"},
      {"keys", "zero_point is missing", awq, with([](io::Json& json) { json.erase("zero_point"); }), sglang,
       "zero_point"},
      {"keys", "activation_scheme is missing", fp8, with([](io::Json& json) { json.erase("activation_scheme"); }), vllm,
       "activation_scheme"},
      {"gptq-types", "3 bits", made_headers(Words::gptq, 3), [](MadeHeaders&) {}, vllm, "3 bits"},
      {"gptq-types", "2 bits", made_headers(Words::gptq, 2), [](MadeHeaders&) {}, sglang, "2 bits"},
      {"gptq-types", "zero points", made_headers(Words::gptq, 4, 128, true), [](MadeHeaders&) {}, vllm, "sym"},
      {"gptq-types", "a rule of 3 bits", gptq, with([](io::Json& json) {
         json["dynamic"] = {{"+:.*down_proj", {{"bits", 3}}}};
       }),
       vllm, "dynamic"},
      {"gptq-groups", "groups of 256", made_headers(Words::gptq, 4, 256), [](MadeHeaders&) {}, vllm, "group_size"},
      {"act-order", "desc_act with groups", gptq, with([](io::Json& json) { json["desc_act"] = true; }), vllm,
       "desc_act"},
      {"act-order", "in a rule", gptq, with([](io::Json& json) {
         json["dynamic"] = {{"+:.*o_proj", {{"desc_act", true}}}};
       }),
       vllm, "dynamic"},
      {"awq-bits", "8 bits", awq, with([](io::Json& json) { json["bits"] = 8; }), vllm, "bits"},
      {"awq-version", "gemv", awq,
       [](MadeHeaders& made) {
         made.at(q + ".qweight").shape = {1024, 128}, made.at(q + ".scales").shape = {1024, 8};
       },
       vllm, "q_proj"},
      {"awq-version", "gemv_fast", awq,
       [](MadeHeaders& made) {
         made.at(q + ".qweight") = {q + ".qweight", DType::i16, {256, 1024}};
       },
       transformers, "q_proj"},
      {"awq-zeros", "no qzeros", awq, [](MadeHeaders& made) { made.drop("q_proj.qzeros"); }, vllm, "q_proj"},
      {"gpt-oss", "experts one by one", mixture, [](MadeHeaders& made) { made.config["model_type"] = "gpt_oss"; },
       transformers, "experts.0"},
      {"stacked-experts", "experts of Gemma 4 one by one", mixture,
       [](MadeHeaders& made) { made.config["model_type"] = "gemma4_text"; }, transformers, "experts.0"},
      {"expert-factors", "NVFP4 experts", made_headers(Words::nvfp4, 4, 16, false, true), [](MadeHeaders&) {},
       transformers, "weight_global_scale"},
      {"ct-actorder", "of groups", ct, [&](MadeHeaders& made) { weights(made)["actorder"] = "group"; }, vllm,
       "actorder"},
      {"ct-bits", "3 bits", made_headers(Words::compressed, 3), [](MadeHeaders&) {}, sglang, "num_bits"},
      {"ct-groups", "another format", ct, with([](io::Json& json) { json["format"] = "marlin-24"; }), vllm,
       "marlin-24"},
      {"ct-groups", "NVFP4 in groups of 64", nvfp4, [&](MadeHeaders& made) { weights(made)["group_size"] = 64; }, vllm,
       "groups of 64"},
      {"ct-groups", "FP8 to mlx", made_headers(Words::fp8_channel), [](MadeHeaders&) {}, mlx, "float-quantized"},
      {"ct-floats", "MXFP4 beside experts", made_headers(Words::mxfp4, 4, 32), [](MadeHeaders&) {}, sglang,
       "down_proj"},
      {"ct-kernels", "a byte a code without inputs", made_headers(Words::bytes, 8, -1), [](MadeHeaders&) {}, vllm,
       "input_activations"},
      {"ct-kernels", "… of 3 bits", made_headers(Words::bytes, 3, 64), [](MadeHeaders&) {}, sglang,
       "--to humming holds the same codes"},
      {"ct-kernels", "FP8 of blocks without inputs", made_headers(Words::fp8_channel),
       [&](MadeHeaders& made) {
         weights(made)["strategy"] = "block", weights(made)["block_structure"] = {128, 128};
       },
       sglang, "--to humming holds the same codes"},
      {"ct-kernels", "MXFP8", made_headers(Words::fp8_channel),
       [&](MadeHeaders& made) { weights(made)["strategy"] = "group", weights(made)["group_size"] = 32; }, sglang,
       "MXFP8"},
      {"ct-kernels", "experts of FP8 a row", made_headers(Words::fp8_channel, 8, 128, false, true), [](MadeHeaders&) {},
       vllm, "layers.1.mlp.experts"},
      {"ct-kernels", "experts of FP8 a tensor", made_headers(Words::fp8_channel, 8, 128, false, true),
       [&](MadeHeaders& made) { weights(made)["strategy"] = "tensor"; }, sglang, "--activation-scales"},
      {"modelopt-experts", "FP8 of rows", made_headers(Words::fp8_channel, 8, 128, false, true),
       with([](io::Json& json) {
         json = {{"quant_method", "modelopt"}, {"quant_algo", "FP8_PER_CHANNEL_PER_TOKEN"}, {"ignore", {"lm_head"}}};
       }),
       vllm, "FP8_PER_CHANNEL_PER_TOKEN"},
      {"modelopt-experts", "FP8 of blocks beside others", made_headers(Words::fp8_blocks, 8, 128, false, true),
       [](MadeHeaders& made) {
         as_modelopt(made, true);
         io::Json layers = io::Json::object();
         for (const auto& tensor : made.tensors) {
           if (tensor.name.ends_with("_proj.weight"))
             layers[tensor.name.substr(0, tensor.name.size() - 7)] = {{"quant_algo", "FP8_PB_WO"}};
         }
         made.quantization() = {{"quant_method", "modelopt"},
                                {"quant_algo", "MIXED_PRECISION"},
                                {"quantized_layers", layers},
                                {"ignore", {"lm_head"}}};
       },
       vllm, "whose blocks have weight_scale_inv"},
      {"tensors", "ModelOpt's blocks of two dimensions", fp8,
       [](MadeHeaders& made) {
         as_modelopt(made, false);
         made.quantization() = {{"quant_method", "modelopt"}, {"quant_algo", "FP8_PB_WO"}, {"ignore", {"lm_head"}}};
       },
       vllm, "[8, 1, 8, 1]"},
      {"cache-scheme", "integers", ct, with([](io::Json& json) {
         json["kv_cache_scheme"] = {{"type", "int"}, {"num_bits", 8}, {"strategy", "tensor"}, {"symmetric", true}};
       }),
       vllm, "kv_cache_scheme"},
      {"fp8-keys", "static in blocks", fp8, with([](io::Json& json) { json["activation_scheme"] = "static"; }), vllm,
       "activation_scheme"},
      {"fp8-keys", "blocks unsaid", fp8, with([](io::Json& json) { json.erase("weight_block_size"); }), sglang,
       "weight_block_size"},
      {"fp8-keys", "blocks of 128 to mlx", fp8, [](MadeHeaders&) {}, mlx, "weight_block_size"},
      {"modelopt-algorithm", "INT4_AWQ", modelopt, with([](io::Json& json) { json["quant_algo"] = "INT4_AWQ"; }), vllm,
       "INT4_AWQ"},
      {"mlx-names", "words of a Llama", ct, [](MadeHeaders&) {}, mlx, "compressed-tensors of"},
      {"mlx-names", "ModelOpt's NVFP4", modelopt, [](MadeHeaders&) {}, mlx, "ModelOpt of"},
      {"scale-names", "FP8 in blocks of a Llama", fp8, [](MadeHeaders&) {}, sglang, "weight_scale_inv: llama"},
      {"scale-names", "MXFP8 of ModelOpt", made_headers(Words::fp8_channel),
       [](MadeHeaders& made) {
         for (auto& tensor : made.tensors) {
           if (!tensor.name.ends_with(".weight_scale")) continue;
           const auto name = tensor.name.substr(0, tensor.name.size() - std::string_view("_scale").size());
           tensor = {tensor.name, DType::u8, {tensor.shape[0], made.at(name).shape[1] / 32}};
         }
         made.quantization() = {{"quant_method", "modelopt"}, {"quant_algo", "MXFP8"}, {"ignore", {"lm_head"}}};
       },
       sglang, "weight_scale_inv, the name that its layers have"},
      {"modelopt-mixed", "no NVFP4", made_headers(Words::fp8_channel),
       [](MadeHeaders& made) {
         io::Json layers = io::Json::object();
         for (const auto& tensor : made.tensors) {
           if (tensor.name.ends_with("_proj.weight"))
             layers[tensor.name.substr(0, tensor.name.size() - 7)] = {{"quant_algo", "FP8_PER_CHANNEL_PER_TOKEN"}};
         }
         made.quantization() = {{"quant_method", "modelopt"},
                                {"quant_algo", "MIXED_PRECISION"},
                                {"quantized_layers", layers},
                                {"ignore", {"lm_head"}}};
       },
       sglang, "a layer in NVFP4"},
      {"modelopt-mixed", "no layers", modelopt, with([](io::Json& json) { json["quant_algo"] = "MIXED_PRECISION"; }),
       vllm, "quantized_layers"},
      {"humming-rotations", "of all", made_headers(Words::humming),
       with([](io::Json& json) { json["hadamard_block_size"] = 128; }), sglang, "blocks of 128"},
      {"humming-rotations", "of a rule", made_headers(Words::humming), with([](io::Json& json) {
         json["dynamic"] = {{"+:^model\\.layers\\.1\\.", {{"hadamard_block_size", 64}}}};
       }),
       sglang, "dynamic"},
      {"humming-keys", "no type", made_headers(Words::humming), with([](io::Json& json) { json.erase("b_dtype"); }),
       vllm, "b_dtype"},
      {"layers", "compressed-tensors' under AWQ's name", ct, with([](io::Json& json) {
         json = {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 128}, {"zero_point", true}};
       }),
       mlx, "down_proj"},
      {"layers", "AWQ's under FP8's name", awq, with([](io::Json& json) {
         json = {{"quant_method", "fp8"}, {"activation_scheme", "dynamic"}};
       }),
       trt_llm, "down_proj"},
      {"keys", "a list for groups", ct, with([](io::Json& json) { json["config_groups"] = io::Json::array(); }), mlx,
       "config_groups"},
      {"tensors", "zero points that nobody reads", made_headers(Words::compressed, 4, 128, true),
       [&](MadeHeaders& made) { weights(made)["symmetric"] = true; }, transformers, "weight_zero_point"},
      {"keys", "no groups", ct, with([](io::Json& json) { json.erase("config_groups"); }), trt_llm, "config_groups"},
      {"layers", "q in 16 bit, by no word", ct,
       [](MadeHeaders& made) { replace_linear(made, q, 1024, 1024, Words::plain); }, vllm, "q_proj"},
      {"layers", "q left out, k and v not", ct,
       [](MadeHeaders& made) {
         replace_linear(made, q, 1024, 1024, Words::plain);
         made.quantization()["ignore"].push_back(q);
       },
       vllm, "ignore leaves out 1 of its 3 parts"},
      {"layers", "a packed one in ignore", ct,
       [](MadeHeaders& made) { made.quantization()["ignore"].push_back("re:.*o_proj"); }, vllm, "o_proj"},
      {"layers", "a prefix in ignore", ct,
       [](MadeHeaders& made) {
         replace_linear(made, "model.layers.0.mlp.down_proj", 1024, 2048, Words::plain);
         made.quantization()["ignore"].push_back("model.layers.0.mlp");
       },
       vllm, "down_proj"},
      {"layers", "a suffix, which vllm does not read", ct,
       [](MadeHeaders& made) {
         for (int layer = 0; layer < 2; ++layer)
           replace_linear(made, concat("model.layers.", layer, ".mlp.down_proj"), 1024, 2048, Words::plain);
         made.quantization()["ignore"].push_back("mlp.down_proj");
       },
       vllm, "down_proj"},
      {"layers", "single names in AWQ's list", awq,
       [](MadeHeaders& made) {
         for (const char* part : {"gate_proj", "up_proj"}) {
           replace_linear(made, concat("model.layers.0.mlp.", part), 2048, 1024, Words::plain);
           made.quantization()["modules_to_not_convert"].push_back(concat("model.layers.0.mlp.", part));
         }
       },
       sglang, "gate_proj"},
      {"layers", "a part's name in AWQ's list that is in a packed one's", awq,
       [](MadeHeaders& made) {
         replace_linear(made, "model.layers.0.mlp.down_proj", 1024, 2048, Words::plain);
         made.quantization()["modules_to_not_convert"].push_back("down_proj");
       },
       vllm, "layers.1.mlp.down_proj"},
      {"layers", "a head by the class alone", ct,
       [](MadeHeaders& made) {
         replace_linear(made, "lm_head", 320, 1024, Words::compressed);
         made.quantization()["ignore"] = io::Json::array();
       },
       vllm, "lm_head"},
      {"layers", "a head with lm_head false", gptq,
       [](MadeHeaders& made) { replace_linear(made, "lm_head", 320, 1024, Words::gptq); }, vllm, "lm_head"},
      {"layers", "experts of 0 differ", mixture,
       [](MadeHeaders& made) {
         for (int expert = 0; expert < 4; ++expert)
           replace_linear(made, concat("model.layers.0.mlp.experts.", expert, ".down_proj"), 1024, 768, Words::plain);
         for (int expert = 0; expert < 4; ++expert)
           made.quantization()["ignore"].push_back(concat("model.layers.0.mlp.experts.", expert, ".down_proj"));
       },
       vllm, "another scheme"},
      {"fused", "k of another form", ct,
       [](MadeHeaders& made) {
         replace_linear(made, "model.layers.1.self_attn.k_proj", 512, 1024, Words::fp8_channel);
       },
       trt_llm, "k_proj"},
      {"fused", "q of 8 bits in Humming", made_headers(Words::humming),
       [](MadeHeaders& made) { replace_linear(made, q, 1024, 1024, Words::humming, 8); }, vllm, "q_proj"},
      {"fused", "one expert of 8 bits in Humming", made_headers(Words::humming, 4, 128, false, true),
       [](MadeHeaders& made) {
         replace_linear(made, "model.layers.0.mlp.experts.2.up_proj", 768, 1024, Words::humming, 8);
       },
       sglang, "experts.2.up_proj"},
      {"tensors", "o of 8 bits in Humming, by no rule", made_headers(Words::humming),
       [](MadeHeaders& made) {
         replace_linear(made, "model.layers.1.self_attn.o_proj", 1024, 1024, Words::humming, 8);
       },
       vllm, "o_proj"},
      {"tensors", "k of 8 bits: the types are right", ct,
       [](MadeHeaders& made) { replace_linear(made, q, 1024, 1024, Words::compressed, 8); }, vllm,
       "BF16 [1024, 8]; expected BF16 [1024, 16], by 4-bit compressed-tensors words, symmetric, groups of 128; parts "
       "of "
       "what is loaded as one share a scheme"},
      {"fused", "one expert in 16 bit", mixture,
       [](MadeHeaders& made) { replace_linear(made, "model.layers.0.mlp.experts.2.up_proj", 768, 1024, Words::plain); },
       vllm, "experts.2.up_proj"},
      {"tensors", "k of 8 bits", ct,
       [](MadeHeaders& made) {
         replace_linear(made, "model.layers.0.self_attn.k_proj", 512, 1024, Words::compressed, 8);
         auto& groups = made.quantization()["config_groups"];
         groups["group_1"] = groups["group_0"];
         groups["group_1"]["weights"]["num_bits"] = 8;
         groups["group_1"]["targets"] = {"model.layers.0.self_attn.k_proj"};
       },
       vllm, "k_proj.weight_scale"},
      {"dynamic", "single names in a rule", gptq,
       [](MadeHeaders& made) {
         for (const char* part : {"q_proj", "k_proj", "v_proj"}) {
           replace_linear(made, concat("model.layers.0.self_attn.", part), part[0] == 'q' ? 1024 : 512, 1024,
                          Words::gptq, 8);
           made.quantization()["dynamic"][concat("+:^model\\.layers\\.0\\.self_attn\\.", part, "$")] = {{"bits", 8}};
         }
       },
       vllm, "dynamic"},
      {"routers", "a packed router", mixture,
       [](MadeHeaders& made) { replace_linear(made, "model.layers.0.mlp.gate", 4, 1024, Words::compressed); }, vllm,
       "mlp.gate"},
      {"embeddings", "a packed table", gptq,
       [](MadeHeaders& made) { replace_linear(made, "model.embed_tokens", 320, 1024, Words::gptq); }, vllm,
       "embed_tokens"},
      {"tensors", "scales of other groups", ct,
       [](MadeHeaders& made) {
         made.at(q + ".weight_scale").shape = {1024, 16};
       },
       vllm, "q_proj"},
      {"tensors", "no scales", fp8, [](MadeHeaders& made) { made.drop("1.self_attn.q_proj.weight_scale"); }, vllm,
       "q_proj.weight_scale_inv"},
      {"layers", "scales transposed", gptq,
       [](MadeHeaders& made) {
         made.at(q + ".scales").shape = {1024, 8};
       },
       vllm, "q_proj"},
      {"tensors", "NVFP4 without its factor", nvfp4,
       [](MadeHeaders& made) { made.drop("1.self_attn.q_proj.weight_global_scale"); }, vllm, "weight_global_scale"},
      {"tensors", "zero points beside symmetric true", ct,
       [](MadeHeaders& made) {
         made.put(q + ".weight_zero_point", DType::i32, {128, 8});
       },
       vllm, "weight_zero_point"},
      {"orphans", "scales without codes", ct, [](MadeHeaders& made) { made.drop("1.self_attn.q_proj.weight_packed"); },
       sglang, "q_proj.weight_scale"},
      {"parts", "no up", ct, [](MadeHeaders& made) { made.drop("layers.1.mlp.up_proj"); }, vllm,
       "layers.1.mlp.up_proj"},
      {"parts", "no o", ct, [](MadeHeaders& made) { made.drop("layers.1.self_attn.o_proj"); }, transformers,
       "layers.1.self_attn.o_proj"},
      {"experts", "one is missing", mixture, [](MadeHeaders& made) { made.drop("layers.1.mlp.experts.3."); }, vllm,
       "layers.1.mlp.experts.3.down_proj"},
      {"experts", "one has no up", mixture, [](MadeHeaders& made) { made.drop("layers.1.mlp.experts.2.up_proj"); },
       vllm, "experts.2.up_proj"},
      {"head", "no head", ct, [](MadeHeaders& made) { made.drop("lm_head"); }, vllm, "lm_head"},
      {"head", "fewer rows", ct, [](MadeHeaders& made) { made.config["vocab_size"] = 300; }, vllm, "embed_tokens"},
      {"layer-count", "a layer is missing", ct, [](MadeHeaders& made) { made.drop("layers.1."); }, vllm, "layers.1"},
      {"tensor-parallel", "groups that do not fill the inputs", ct,
       [](MadeHeaders& made) {
         for (int layer = 0; layer < 2; ++layer) {
           made.drop(concat("layers.", layer, ".mlp.down_proj"));
           made.linear(concat("model.layers.", layer, ".mlp.down_proj"), 1024, 2080);
           made.at(concat("model.layers.", layer, ".mlp.down_proj.weight_packed")).shape = {1024, 260};
         }
       },
       vllm, "down_proj"},
      {"no-g-idx", "GPTQ", gptq, [](MadeHeaders&) {}, mlx, "g_idx"},
      {"patterns", "no expression", ct,
       [](MadeHeaders& made) { made.quantization()["ignore"].push_back("re:(unclosed"); }, vllm, "not closed"},
      {"auto-round", "another packing", gptq, with([](io::Json& json) {
         json["quant_method"] = "auto-round";
         json["packing_format"] = "auto_round:exllama";
       }),
       vllm, "packing_format"},
      {"mxfp4-experts", "linears", made_headers(Words::mxfp4, 4, 32), with([](io::Json& json) {
         json = {{"quant_method", "mxfp4"}};
       }),
       vllm, "down_proj"},
  };
}

TEST(Prediction, NamesEverySeededFault) {
  std::set<std::string> seeded;
  for (auto& fault : faults()) {
    fault.seed(fault.made);
    seeded.insert(fault.rule);
    const Prediction prediction = predicted(fault.made, fault.program);
    EXPECT_FALSE(prediction.loads() && prediction.right()) << fault.rule << ": " << fault.name;
    const auto named = std::ranges::any_of(prediction.findings, [&](const Finding& finding) {
      return finding.rule == fault.rule && finding.severity != Severity::note &&
             to_text(finding).find(fault.says) != std::string::npos && !finding.remedy.empty();
    });
    EXPECT_TRUE(named) << fault.rule << ": " << fault.name << "\n" << to_text(prediction);
  }
  // Notes and rules about values have tests of their own.
  const std::set<std::string> elsewhere{"scale-dtype",  "marlin-experts", "group-order",      "factors",
                                        "cache-scales", "gguf-types",     "gptqmodel-experts"};
  for (const Rule& rule : rules()) {
    EXPECT_TRUE(seeded.contains(std::string(rule.id)) || elsewhere.contains(std::string(rule.id))) << rule.id;
    EXPECT_FALSE(rule.asks.empty() || rule.source.empty()) << rule.id;
  }
}

// ---- words in which things are left out --------------------------------------------------------------------------------

TEST(Prediction, LoadsWhatIsLeftOutInTheReadersOwnWords) {
  auto ct = made_headers(Words::compressed);
  auto awq = made_headers(Words::awq);
  for (auto* made : {&ct, &awq}) {
    for (const char* part : {"q_proj", "k_proj", "v_proj"}) {
      const std::string path = concat("model.layers.0.self_attn.", part);
      replace_linear(*made, path, part[0] == 'q' ? 1024 : 512, 1024, Words::plain);
      made->quantization()[made == &ct ? "ignore" : "modules_to_not_convert"].push_back(path);
    }
  }
  EXPECT_TRUE(predicted(ct, vllm).loads()) << text_of(ct, vllm);
  EXPECT_TRUE(predicted(ct, sglang).loads()) << text_of(ct, sglang);
  EXPECT_TRUE(predicted(ct, transformers).loads()) << text_of(ct, transformers);
  EXPECT_TRUE(predicted(awq, vllm).loads()) << text_of(awq, vllm);
  EXPECT_FALSE(predicted(awq, sglang).loads());
  awq.quantization()["modules_to_not_convert"].push_back("model.layers.0.self_attn.qkv_proj");
  EXPECT_TRUE(predicted(awq, sglang).loads()) << text_of(awq, sglang);
}

TEST(Prediction, LoadsSeveralSchemesWhereFusedPartsShareThem) {
  auto made = made_headers(Words::compressed);
  auto& groups = made.quantization()["config_groups"];
  groups["group_1"] = groups["group_0"];
  groups["group_1"]["weights"]["num_bits"] = 8;
  groups["group_1"]["targets"] = {"re:.*self_attn\\.[qkvo]_proj"};
  for (int layer = 0; layer < 2; ++layer) {
    made.drop(concat("layers.", layer, ".self_attn"));
    made.bits = 8;
    made.attention(concat("model.layers.", layer, ".self_attn."));
  }
  EXPECT_TRUE(predicted(made, vllm).loads()) << text_of(made, vllm);
  // SGLang takes the class before the parts of a fused layer.
  groups["group_1"]["targets"].push_back("re:.*self_attn\\.qkv_proj");
  EXPECT_TRUE(predicted(made, sglang).loads()) << text_of(made, sglang);
}

TEST(Prediction, LoadsRulesForFusedNames) {
  auto made = made_headers(Words::gptq);
  made.quantization()["dynamic"] = {{"+:.*self_attn\\.(q|k|v|qkv)_proj", {{"bits", 8}}}};
  for (int layer = 0; layer < 2; ++layer) {
    for (const char* part : {"q_proj", "k_proj", "v_proj"}) {
      replace_linear(made, concat("model.layers.", layer, ".self_attn.", part), part[0] == 'q' ? 1024 : 512, 1024,
                     Words::gptq, 8);
    }
  }
  for (const Program program : {vllm, sglang, transformers})
    EXPECT_TRUE(predicted(made, program).loads()) << text_of(made, program);
}

// ---- GPUs --------------------------------------------------------------------------------------------------------------

TEST(Prediction, SaysOverHowManyGpusItSpreads) {
  using Counts = std::vector<int>;
  EXPECT_EQ(predicted(made_headers(Words::compressed, 4, 128), vllm).tensor_parallel, (Counts{1, 2, 4, 8}));
  EXPECT_EQ(predicted(made_headers(Words::fp8_blocks), vllm).tensor_parallel, (Counts{1, 2, 4, 8}));
  // Experts of 768: 384 = 3 groups of 128, 192 and 96 are none; groups of 64 and 32 allow more.
  EXPECT_EQ(predicted(made_headers(Words::compressed, 4, 128, false, true), vllm).tensor_parallel, (Counts{1, 2}));
  EXPECT_EQ(predicted(made_headers(Words::compressed, 4, 64, false, true), vllm).tensor_parallel, (Counts{1, 2, 4}));
  EXPECT_EQ(predicted(made_headers(Words::compressed, 4, 32, false, true), vllm).tensor_parallel, (Counts{1, 2, 4, 8}));
  EXPECT_EQ(predicted(made_headers(Words::gptq, 4, 128, false, true), vllm).tensor_parallel, (Counts{1, 2}));
  EXPECT_EQ(predicted(made_headers(Words::awq, 4, 128, false, true), sglang).tensor_parallel, (Counts{1, 2}));
  EXPECT_TRUE(predicted(made_headers(Words::compressed), transformers).tensor_parallel.empty());
}

TEST(Prediction, AGroupThatRulesOutGpusIsNoted) {
  const auto prediction = predicted(made_headers(Words::compressed, 4, 128, false, true), vllm);
  const auto noted = std::ranges::any_of(prediction.findings, [](const Finding& finding) {
    return finding.rule == "tensor-parallel" && finding.severity == Severity::note &&
           to_text(finding).find("192 are no multiple of groups of 128") != std::string::npos;
  });
  EXPECT_TRUE(noted) << to_text(prediction);
}

// ---- notes -------------------------------------------------------------------------------------------------------------

TEST(Prediction, NotesScalesThatAreRounded) {
  auto made = made_headers(Words::gptq);
  made.config["torch_dtype"] = "bfloat16";
  const auto prediction = predicted(made, vllm);
  EXPECT_TRUE(prediction.loads());
  EXPECT_NE(to_text(prediction).find("[scale-dtype]"), std::string::npos) << to_text(prediction);
  EXPECT_EQ(text_of(made_headers(Words::gptq), vllm).find("[scale-dtype]"), std::string::npos);
}

TEST(Prediction, NotesExpertsThatMarlinDoesNotTake) {
  auto made = made_headers(Words::compressed, 4, 128, false, true);
  made.config["hidden_size"] = 1088;
  EXPECT_NE(text_of(made, vllm).find("[marlin-experts]"), std::string::npos);
}

TEST(Prediction, NotesWhoLoadsExpertsOfGptq) {
  for (const Words words : {Words::gptq, Words::awq}) {
    EXPECT_NE(text_of(made_headers(words, 4, 128, false, true), transformers).find("[gptqmodel-experts]"),
              std::string::npos);
    EXPECT_EQ(text_of(made_headers(words), transformers).find("[gptqmodel-experts]"), std::string::npos);
  }
}

// ---- programs ----------------------------------------------------------------------------------------------------------

TEST(Programs, AreParsedFromLists) {
  EXPECT_EQ(parse_programs("vllm,mlx"), (std::vector<Program>{vllm, mlx}));
  EXPECT_EQ(parse_programs("all").size(), programs().size());
  EXPECT_THROW(parse_programs("vlm"), Error);
  EXPECT_THROW(parse_programs("vllm,"), Error);
  for (const auto& row : programs()) EXPECT_EQ(&describe(row.program), &row);
}

}  // namespace
}  // namespace w4q::serving
