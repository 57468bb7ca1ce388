#include "model/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <numbers>

#include "model/architecture.h"
#include "support.h"

namespace w4q::model {
namespace {

using test::expect_error;

/// The keys that every config must have.
io::Json minimal(std::string_view model_type) {
  return io::Json{{"model_type", model_type}, {"vocab_size", 100},        {"hidden_size", 64},
                  {"intermediate_size", 176}, {"num_hidden_layers", 4},   {"num_attention_heads", 32},
                  {"rope_theta", 10000.0},    {"sliding_window", nullptr}};
}

ModelConfig parse(const io::Json& json) { return parse_config(json, "config.json"); }

io::Json with(io::Json json, std::string_view key, io::Json value) {
  json[key] = std::move(value);
  return json;
}

io::Json without(io::Json json, std::string_view key) {
  json.erase(std::string(key));
  return json;
}

TEST(Config, LlamaDefaults) {
  const auto config = parse(without(minimal("llama"), "rope_theta"));
  EXPECT_EQ(config.architecture->model_type, "llama");
  EXPECT_EQ(config.architecture_name, "LlamaForCausalLM");
  EXPECT_EQ(config.kv_heads, 32);
  EXPECT_EQ(config.head_dim, 2);
  EXPECT_EQ(config.max_positions, 2048);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_FALSE(config.tied_embeddings);
  EXPECT_FALSE(config.tie_word_embeddings);
  EXPECT_FALSE(config.qkv_bias || config.output_bias || config.mlp_bias || config.qk_norm);
  EXPECT_EQ(config.rope.type, RopeType::standard);
  EXPECT_EQ(config.rope.theta, 10000);
  EXPECT_EQ(config.sliding_window, std::vector<int64_t>(4, 0));
  EXPECT_EQ(config.bos_token, 1);
  EXPECT_EQ(config.eos_tokens, std::vector<int64_t>{2});
  ASSERT_EQ(config.warnings.size(), 1u);
  EXPECT_NE(config.warnings[0].find("rope_theta"), std::string::npos);
}

TEST(Config, FamiliesDiffer) {
  const auto mistral = parse(without(minimal("mistral"), "sliding_window"));
  EXPECT_EQ(mistral.kv_heads, 8);
  EXPECT_EQ(mistral.max_positions, 131072);
  EXPECT_EQ(mistral.sliding_window, std::vector<int64_t>(4, 4096));

  const auto qwen2 = parse(without(minimal("qwen2"), "rope_theta"));
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.output_bias);
  EXPECT_EQ(qwen2.rope.theta, 1e4);
  EXPECT_FALSE(qwen2.bos_token);
  EXPECT_TRUE(qwen2.eos_tokens.empty());

  const auto qwen3 = parse(minimal("qwen3"));
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_FALSE(qwen3.qkv_bias);
  EXPECT_EQ(qwen3.head_dim, 128);
  EXPECT_EQ(parse(with(minimal("qwen3"), "head_dim", nullptr)).head_dim, 2);
}

TEST(Config, NullAndAbsentHeads) {
  const auto config = parse(with(with(minimal("mistral"), "num_key_value_heads", nullptr), "head_dim", nullptr));
  EXPECT_EQ(config.kv_heads, 32);
  EXPECT_EQ(config.head_dim, 2);
  EXPECT_EQ(config.sliding_window, std::vector<int64_t>(4, 0));
}

TEST(Config, BiasesFollowTheFamily) {
  const auto llama = parse(with(with(minimal("llama"), "attention_bias", true), "mlp_bias", true));
  EXPECT_TRUE(llama.qkv_bias && llama.output_bias && llama.mlp_bias);
  const auto qwen3 = parse(with(with(minimal("qwen3"), "attention_bias", true), "mlp_bias", true));
  EXPECT_TRUE(qwen3.qkv_bias && qwen3.output_bias);
  EXPECT_FALSE(qwen3.mlp_bias);
  EXPECT_FALSE(parse(with(minimal("mistral"), "attention_bias", true)).qkv_bias);
}

TEST(Config, QwenWindows) {
  auto json = with(with(minimal("qwen2"), "sliding_window", 16), "max_window_layers", 3);
  EXPECT_EQ(parse(json).sliding_window, std::vector<int64_t>(4, 0)) << "off without use_sliding_window";
  json["use_sliding_window"] = true;
  EXPECT_EQ(parse(json).sliding_window, (std::vector<int64_t>{0, 0, 0, 16}));
  json["layer_types"] = {"sliding_attention", "full_attention", "full_attention", "sliding_attention"};
  EXPECT_EQ(parse(json).sliding_window, (std::vector<int64_t>{16, 0, 0, 16})) << "layer_types overrides";
  json["use_sliding_window"] = false;
  EXPECT_EQ(parse(json).sliding_window, std::vector<int64_t>(4, 0));
  json["layer_types"] = {"full_attention"};
  expect_error(ErrorCode::bad_file, {"layer_types", "4 layers"}, [&] { parse(json); });
  json["layer_types"] = {"linear_attention", "full_attention", "full_attention", "full_attention"};
  expect_error(ErrorCode::unsupported, {"layer_types", "linear_attention"}, [&] { parse(json); });
}

TEST(Config, SpecialTokens) {
  EXPECT_EQ(parse(with(minimal("llama"), "eos_token_id", {5, 7})).eos_tokens, (std::vector<int64_t>{5, 7}));
  EXPECT_TRUE(parse(with(minimal("llama"), "eos_token_id", nullptr)).eos_tokens.empty());
  EXPECT_FALSE(parse(with(minimal("llama"), "bos_token_id", nullptr)).bos_token);
}

TEST(Config, GenerationConfigNamesTheEnd) {
  const test::TemporaryFolder folder;
  std::ofstream(folder / "config.json") << minimal("llama").dump();
  EXPECT_EQ(read_config(folder.path()).eos_tokens, std::vector<int64_t>{2});
  std::ofstream(folder / "generation_config.json") << R"({"eos_token_id": [8, 9]})";
  EXPECT_EQ(read_config(folder.path()).eos_tokens, (std::vector<int64_t>{8, 9}));
}

TEST(Config, TiedHeadAndDtype) {
  const auto config = parse(with(with(minimal("llama"), "tie_word_embeddings", true), "torch_dtype", "bfloat16"));
  EXPECT_TRUE(config.tied_embeddings);
  EXPECT_EQ(config.dtype, DType::bf16);
  EXPECT_EQ(parse(with(minimal("llama"), "dtype", "float16")).dtype, DType::f16);
}

TEST(Config, RopeInBothStyles) {
  const io::Json scaling = {{"type", "linear"}, {"factor", 3.0}};
  const auto older = parse(with(minimal("llama"), "rope_scaling", scaling));
  EXPECT_EQ(older.rope.type, RopeType::linear);
  EXPECT_EQ(older.rope.factor, 3);
  const io::Json parameters = {{"rope_type", "linear"}, {"factor", 3.0}, {"rope_theta", 5e5}};
  const auto newer = parse(with(without(minimal("llama"), "rope_theta"), "rope_parameters", parameters));
  EXPECT_EQ(newer.rope.type, RopeType::linear);
  EXPECT_EQ(newer.rope.theta, 5e5);
  EXPECT_TRUE(newer.warnings.empty());
  const auto nested = parse(
      with(minimal("llama"), "rope_parameters", {{"full_attention", parameters}, {"sliding_attention", parameters}}));
  EXPECT_EQ(nested.rope.theta, 5e5);
  io::Json other = parameters;
  other["factor"] = 4.0;
  expect_error(ErrorCode::unsupported, {"rope_parameters", "differs"}, [&] {
    parse(with(minimal("llama"), "rope_parameters", {{"full_attention", parameters}, {"sliding_attention", other}}));
  });
}

TEST(Config, YarnDefaults) {
  const auto yarn = [](io::Json extra) {
    io::Json scaling = {{"rope_type", "yarn"}, {"factor", 4.0}};
    scaling.update(extra);
    return parse(with(minimal("llama"), "rope_scaling", scaling)).rope;
  };
  const auto plain = yarn(io::Json::object());
  EXPECT_EQ(plain.original_max_positions, 2048) << "max_position_embeddings where none is given";
  EXPECT_EQ(plain.beta_fast, 32);
  EXPECT_EQ(plain.beta_slow, 1);
  EXPECT_TRUE(plain.truncate);
  EXPECT_DOUBLE_EQ(plain.attention_factor, 0.1 * std::log(4.0) + 1);
  EXPECT_DOUBLE_EQ(yarn({{"mscale", 0.7}, {"mscale_all_dim", 1.2}}).attention_factor,
                   (0.07 * std::log(4.0) + 1) / (0.12 * std::log(4.0) + 1));
  EXPECT_DOUBLE_EQ(yarn({{"mscale", 0.7}}).attention_factor, 0.1 * std::log(4.0) + 1);
  EXPECT_EQ(yarn({{"attention_factor", 1.5}}).attention_factor, 1.5);
  EXPECT_EQ(yarn({{"factor", nullptr}, {"original_max_position_embeddings", 256}}).factor, 8);
}

TEST(Config, RefusesOtherRopeTypesByName) {
  for (const char* type : {"ntk", "mrope"}) {
    expect_error(ErrorCode::unsupported, {type, "supported: default, linear, dynamic, llama3, yarn, longrope"}, [&] {
      parse(with(minimal("llama"), "rope_scaling", {{"type", type}, {"factor", 2.0}}));
    });
  }
}

TEST(Config, RefusesOtherArchitecturesAndActivations) {
  expect_error(ErrorCode::unsupported, {"GPT2LMHeadModel", "that can be decoded", "w4q list"},
               [] { parse(with(minimal("llama"), "architectures", {"GPT2LMHeadModel"})); });
  expect_error(ErrorCode::unsupported, {"mamba"}, [] { parse(minimal("mamba")); });
  expect_error(ErrorCode::bad_file, {"model_type", "MistralForCausalLM"},
               [] { parse(with(minimal("llama"), "architectures", {"MistralForCausalLM"})); });
  expect_error(ErrorCode::unsupported, {"hidden_act", "xielu"},
               [] { parse(with(minimal("llama"), "hidden_act", "xielu")); });
  expect_error(ErrorCode::bad_file, {"architectures"}, [] { parse(without(minimal("llama"), "model_type")); });
}

TEST(Config, RefusesAbsurdSizesNamingTheKey) {
  for (const char* key : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                          "num_key_value_heads", "head_dim", "max_position_embeddings"}) {
    for (const io::Json& value : {io::Json(-1), io::Json(0), io::Json(int64_t{1} << 31), io::Json(UINT64_MAX),
                                  io::Json(1.5), io::Json("8"), io::Json(1e300), io::Json::array()}) {
      expect_error(ErrorCode::bad_file, {key}, [&] { parse(with(minimal("llama"), key, value)); });
    }
  }
  for (const char* key :
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}) {
    expect_error(ErrorCode::bad_file, {key, "missing"}, [&] { parse(without(minimal("llama"), key)); });
  }
  const auto refused = [](std::string_view key, io::Json value, std::string_view part) {
    expect_error(ErrorCode::bad_file, {part}, [&] { parse(with(minimal("llama"), key, std::move(value))); });
  };
  refused("num_hidden_layers", 10001, "10000");
  refused("num_key_value_heads", 3, "evenly");
  refused("head_dim", 63, "not even");
  refused("hidden_size", 65, "multiple");
  refused("head_dim", 1 << 30, "2147483647");
  refused("rms_norm_eps", -1.0, "rms_norm_eps");
  refused("rope_theta", 0, "rope_theta");
  refused("partial_rotary_factor", 2.0, "partial_rotary_factor");
  refused("rope_scaling", "yarn", "rope_scaling");
  refused("rope_scaling", {{"type", "linear"}}, "factor is missing");
  refused("tie_word_embeddings", 1, "tie_word_embeddings");
  expect_error(ErrorCode::bad_file, {"not a JSON object"}, [] { parse(io::Json::array()); });
}

TEST(Config, PositionsThatRopeScalingAddsCount) {
  const auto most = [](const io::Json& rope) {
    auto json = with(with(minimal("llama"), "max_position_embeddings", 1000), "head_dim", 8);
    return most_positions(parse(with(std::move(json), "rope_scaling", rope)));
  };
  EXPECT_EQ(most(nullptr), 1000);
  EXPECT_EQ(most({{"type", "linear"}, {"factor", 2.5}}), 2500);
  EXPECT_EQ(most({{"type", "linear"}, {"factor", 0.5}}), 1000);
  EXPECT_GE(most({{"type", "linear"}, {"factor", 1e300}}), 1000);
  EXPECT_EQ(most({{"type", "dynamic"}, {"factor", 2}}), std::nullopt);
  io::Json scaling = {{"type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", 500}};
  EXPECT_EQ(most(scaling), 2000);
  scaling["original_max_position_embeddings"] = 100;
  EXPECT_EQ(most(scaling), 1000);
  scaling = {{"type", "llama3"}, {"factor", 8}, {"low_freq_factor", 1}, {"high_freq_factor", 4}};
  EXPECT_EQ(most(scaling), 1000);
}

}  // namespace
}  // namespace w4q::model
