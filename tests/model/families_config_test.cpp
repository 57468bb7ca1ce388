// Keys that only some architectures have, with values that no model has.
#include <gtest/gtest.h>

#include <set>

#include "model/architecture.h"
#include "small_model.h"
#include "support.h"

namespace w4q::model {
namespace {

/// Numbers of every small config, one after the other absurd: each is refused by name, or makes a model of other sizes.
TEST(FamilyConfigs, AbsurdNumbersAreRefusedOrRead) {
  const std::set<std::string> free = {"bos_token_id", "eos_token_id"};
  for (const auto* row : architectures()) {
    const io::Json config = test::small_config(*row);
    EXPECT_NO_THROW(parse_config(config, "config.json")) << row->model_type;
    for (const auto& [key, value] : config.items()) {
      if (!value.is_number() || free.contains(key)) continue;
      for (const io::Json& absurd : {io::Json(-1), io::Json(int64_t{1} << 31), io::Json(1e300), io::Json("8"),
                                     io::Json::array(), io::Json(int64_t{1} << 62)}) {
        io::Json changed = config;
        changed[key] = absurd;
        try {
          parse_config(changed, "config.json");
        } catch (const Error& error) {
          EXPECT_TRUE(error.code() == ErrorCode::bad_file || error.code() == ErrorCode::unsupported)
              << row->model_type << " " << key << " " << absurd << ": " << error.what();
        }
      }
    }
  }
}

TEST(FamilyConfigs, ListsOfLayersMustFit) {
  for (const char* type : {"qwen3_5_text", "gpt_oss", "gemma2", "gemma4_text", "olmo3"}) {
    io::Json config = test::small_config(architecture_row(type));
    config["layer_types"] = {"full_attention"};
    test::expect_error(ErrorCode::bad_file, {"layer_types"}, [&] { parse_config(config, "config.json"); });
    config["layer_types"] = {"full_attention", "full_attention", "full_attention", "mamba"};
    test::expect_error(ErrorCode::unsupported, {"layer_types", "mamba"}, [&] { parse_config(config, "config.json"); });
  }
}

TEST(FamilyConfigs, MixturesMustFit) {
  io::Json config = test::small_config(architecture_row("qwen3_moe"));
  config["num_experts_per_tok"] = 5;
  test::expect_error(ErrorCode::bad_file, {"num_experts_per_tok", "4 experts"}, [&] { parse_config(config, "c"); });
  config = test::small_config(architecture_row("glm4_moe"));
  config["n_group"] = 3;
  test::expect_error(ErrorCode::bad_file, {"n_group"}, [&] { parse_config(config, "c"); });
  config = test::small_config(architecture_row("qwen3_5_text"));
  config["linear_num_value_heads"] = 3;
  test::expect_error(ErrorCode::bad_file, {"linear_num_value_heads"}, [&] { parse_config(config, "c"); });
}

/// A small config of this type without some keys and with others.
ModelConfig changed(std::string_view type, std::initializer_list<const char*> without, const io::Json& with = {}) {
  io::Json config = test::small_config(architecture_row(type));
  for (const char* key : without) config.erase(key);
  for (const auto& [key, value] : with.items()) config[key] = value;
  return parse_config(config, "config.json");
}

/// What config.json leaves unsaid is what the reference assumes.
TEST(FamilyConfigs, WhatIsLeftUnsaid) {
  for (const char* type : {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}) {
    EXPECT_EQ(changed(type, {"partial_rotary_factor"}).rope.partial_rotary_factor, 0.25) << type;
  }
  for (const char* type : {"glm4", "glm4_moe"}) {
    EXPECT_EQ(changed(type, {"partial_rotary_factor"}).rope.partial_rotary_factor, 0.5) << type;
  }
  for (const char* type : {"gpt_oss", "glm4_moe", "phi3", "olmo2", "olmo3", "mixtral", "ministral3", "exaone4"}) {
    EXPECT_EQ(changed(type, {"rms_norm_eps"}).rms_norm_eps, 1e-5) << type;
  }
  EXPECT_EQ(changed("glm4", {"rms_norm_eps"}).rms_norm_eps, 1.5625e-7);
  for (const char* type : {"gpt_oss", "glm4", "seed_oss"})
    EXPECT_TRUE(changed(type, {"attention_bias"}).qkv_bias) << type;
  for (const char* type : {"smollm3", "ernie4_5_moe", "ernie4_5", "gemma3_text"}) {
    EXPECT_TRUE(changed(type, {"tie_word_embeddings"}).tied_embeddings) << type;
  }
  for (const char* type : {"phi3", "mixtral", "ministral3"}) {
    EXPECT_EQ(changed(type, {"sliding_window"}).sliding_window, std::vector<int64_t>(4, 0)) << type;
  }
  const auto gemma2 = changed("gemma2", {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"});
  EXPECT_EQ(gemma2.logit_cap, 30);
  EXPECT_EQ(gemma2.attention[0].soft_cap, 50);
  EXPECT_EQ(gemma2.attention[0].scale, 1.0 / 16);
  EXPECT_EQ(changed("gemma2", {}, {{"final_logit_softcapping", nullptr}}).logit_cap, 0);
  EXPECT_EQ(changed("gemma3_text", {}, {{"attn_logit_softcapping", 5.0}}).attention[0].soft_cap, 0) << "not read";
  const auto gpt_oss = changed("gpt_oss", {"rope_scaling"}, {{"hidden_act", "anything"}});
  EXPECT_EQ(gpt_oss.rope.type, RopeType::yarn);
  EXPECT_EQ(gpt_oss.rope.factor, 32);
  EXPECT_FALSE(gpt_oss.rope.truncate);
  const auto ministral3 = changed("ministral3", {"rope_parameters"});
  EXPECT_EQ(ministral3.rope.factor, 16);
  EXPECT_EQ(ministral3.attention[0].temperature_length, 16384);
  const auto gemma4 = changed("gemma4_text", {"rope_parameters", "global_head_dim", "hidden_size_per_layer_input"});
  EXPECT_EQ(gemma4.attention[1].rope.type, RopeType::proportional);
  EXPECT_EQ(gemma4.attention[1].head_dim, 512);
  EXPECT_EQ(gemma4.layer_embedding_size, 256);
}

/// Of four layers.
TEST(FamilyConfigs, WindowsOfEachFamily) {
  const io::Json slides = {{"use_sliding_window", true}, {"sliding_window", 7}, {"max_window_layers", 3}};
  EXPECT_EQ(changed("qwen3_moe", {}, slides).sliding_window, std::vector<int64_t>(4, 7)) << "whatever the layer";
  EXPECT_EQ(changed("qwen2_moe", {}, slides).sliding_window, (std::vector<int64_t>{7, 0, 7, 0}));
  EXPECT_EQ(changed("smollm3", {}, slides).sliding_window, (std::vector<int64_t>{0, 0, 0, 7})) << "that do not turn";
  EXPECT_EQ(changed("qwen2_moe", {}, {{"sliding_window", 7}}).sliding_window, std::vector<int64_t>(4, 0));
  EXPECT_EQ(changed("exaone4", {}, {{"sliding_window_pattern", 2}}).sliding_window, (std::vector<int64_t>{6, 0, 6, 0}));
  EXPECT_FALSE(changed("qwen2_moe", {}, {{"qkv_bias", false}}).qkv_bias);
  io::Json listed = {{"sliding_window", 7},
                     {"layer_types", {"full_attention", "sliding_attention", "full_attention", "sliding_attention"}}};
  const std::vector<int64_t> as_listed = {0, 7, 0, 7};
  EXPECT_EQ(changed("smollm3", {}, listed).sliding_window, as_listed) << "whatever use_sliding_window says";
  EXPECT_EQ(changed("mistral", {}, listed).sliding_window, as_listed) << "as the reference's AutoModel does";
  for (const char* type : {"ministral3", "mixtral", "phi3"}) {
    EXPECT_EQ(changed(type, {}, listed).sliding_window, std::vector<int64_t>(4, 7)) << type << " does not read it";
  }
  const io::Json text = test::small_config(architecture_row("mistral"), listed);
  const io::Json outer = {{"architectures", {"Mistral3ForConditionalGeneration"}}, {"text_config", text}};
  EXPECT_EQ(parse_config(outer, "c").sliding_window, std::vector<int64_t>(4, 7)) << "within another model";
}

TEST(FamilyConfigs, QueriesThatAreCutOff) {
  EXPECT_TRUE(changed("olmoe", {}, {{"clip_qkv", nullptr}}).attention.empty());
  const auto clipped = changed("olmoe", {}, {{"clip_qkv", 8.0}});
  ASSERT_EQ(clipped.attention.size(), 4u);
  for (const AttentionConfig& layer : clipped.attention) EXPECT_EQ(layer.clip, 8.0);
  test::expect_error(ErrorCode::bad_file, {"clip_qkv"}, [] { changed("olmoe", {}, {{"clip_qkv", -1.0}}); });
}

/// norm_topk_prob is read where the reference reads it.
TEST(FamilyConfigs, SharesThatAddUpToOne) {
  const io::Json off = {{"norm_topk_prob", false}};
  for (const char* type : {"qwen3_moe", "qwen2_moe", "qwen3_next", "glm4_moe", "olmoe"}) {
    EXPECT_FALSE(changed(type, {}, off).mixture.renormalizes) << type;
  }
  for (const char* type : {"qwen3_5_moe_text", "qwen3_vl_moe_text", "mixtral", "minimax_m2", "gpt_oss", "granitemoe"}) {
    EXPECT_TRUE(changed(type, {}, off).mixture.renormalizes) << type;
  }
}

/// Gemma 4 as it was published, and as later versions of the reference write it.
TEST(FamilyConfigs, LayersByTheirNumbers) {
  const auto published = changed("gemma4_text", {});
  const auto later = changed("gemma4_text", {"global_head_dim"},
                             {{"per_layer_config", {{"1", {{"head_dim", 64}}}, {"3", {{"head_dim", 64}}}}}});
  for (size_t layer = 0; layer < 4; ++layer) {
    EXPECT_EQ(later.attention[layer].head_dim, published.attention[layer].head_dim) << layer;
    EXPECT_EQ(later.attention[layer].rope, published.attention[layer].rope) << layer;
  }
  test::expect_error(ErrorCode::bad_file, {"num_kv_shared_layers", "layer 3 has other heads"}, [] {
    changed("gemma4_text", {"global_head_dim"}, {{"per_layer_config", {{"3", {{"head_dim", 16}}}}}});
  });
  const auto sharing = changed("gemma4_text", {}, {{"attention_k_eq_v", true}});
  EXPECT_TRUE(sharing.attention[1].keys_are_values);
  EXPECT_FALSE(sharing.attention[3].keys_are_values) << "its keys are another layer's";
  EXPECT_EQ(*sharing.attention[3].keys_of, 1);
  const auto ends =
      changed("gemma4_text", {},
              {{"num_kv_shared_layers", 0},
               {"layer_types", {"full_attention", "sliding_attention", "full_attention", "sliding_attention"}}});
  EXPECT_EQ(ends.attention[3].window, 0) << "the last layer sees all, whatever is stated";
}

TEST(FamilyConfigs, TextsThatReadWhatComesLaterAreRefused) {
  for (const char* type : {"gemma2", "gemma3_text"}) {
    test::expect_error(ErrorCode::unsupported, {"use_bidirectional_attention"}, [&] {
      changed(type, {}, {{"use_bidirectional_attention", true}});
    });
  }
  test::expect_error(ErrorCode::unsupported, {"use_bidirectional_attention"}, [] {
    changed("gemma4_text", {}, {{"use_bidirectional_attention", "all"}});
  });
  EXPECT_NO_THROW(changed("gemma4_text", {}, {{"use_bidirectional_attention", "vision"}}));
}

/// Parameters nested by the types of layers, in Gemma 3 and OLMo 3.
TEST(FamilyConfigs, RotaryParametersByTypes) {
  const io::Json nested = {{"rope_parameters",
                            {{"full_attention", {{"rope_type", "linear"}, {"factor", 8}, {"rope_theta", 3e5}}},
                             {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 2e4}}}}}};
  for (const char* type : {"gemma3_text", "olmo3"}) {
    const auto config = changed(type, {"rope_theta"}, nested);
    for (const auto& layer : config.attention) {
      EXPECT_EQ(layer.rope.type, layer.window > 0 ? RopeType::standard : RopeType::linear) << type;
      EXPECT_EQ(layer.rope.theta, layer.window > 0 ? 2e4 : 3e5) << type;
    }
  }
}

/// Parameters in the newer style that are not nested say nothing, as in transformers, which looks for types of layers.
TEST(FamilyConfigs, RotaryParametersWithoutTypes) {
  const io::Json flat = {{"rope_parameters", {{"rope_type", "yarn"}, {"factor", 4}}}, {"rope_theta", 2e4}};
  for (const char* type : {"gemma3_text", "olmo3"}) {
    const auto config = changed(type, {"rope_scaling"}, flat);
    for (const auto& layer : config.attention) {
      EXPECT_EQ(layer.rope.type, RopeType::standard) << type;
      EXPECT_EQ(layer.rope.theta, layer.window == 0 ? 2e4 : type == std::string("olmo3") ? 5e5 : 1e4) << type;
    }
  }
}

/// Of Gemma 3 and OLMo 3, which has no theta of its own for layers with a window.
TEST(FamilyConfigs, RotaryParametersThatTypesLeaveUnsaid) {
  const io::Json nested = {{"full_attention", {{"rope_type", "default"}}}, {"sliding_attention", nullptr}};
  const io::Json thetas = {{"rope_theta", 2e4}, {"rope_local_base_freq", 3e4}, {"rope_parameters", nested}};
  for (const char* type : {"gemma3_text", "olmo3"}) {
    const bool gemma = type == std::string("gemma3_text");
    for (const auto& layer : changed(type, {}, thetas).attention) {
      EXPECT_EQ(layer.rope.theta, layer.window == 0 ? 2e4 : gemma ? 3e4 : 5e5) << type;
    }
    // rope_scaling says more of layers without a window.
    io::Json both = thetas;
    both["rope_parameters"]["full_attention"]["rope_theta"] = 7e4;
    both["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 8.0}};
    for (const auto& layer : changed(type, {}, both).attention) {
      EXPECT_EQ(layer.rope.type, layer.window == 0 ? RopeType::linear : RopeType::standard) << type;
      EXPECT_EQ(layer.rope.theta, layer.window == 0 ? 7e4 : gemma ? 3e4 : 5e5) << type;
    }
  }
}

/// The reference reads `truncate` beside the types of layers, and the positions of training of the type alone.
TEST(FamilyConfigs, YarnOfTypesOfLayers) {
  const io::Json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"rope_theta", 2e4}, {"truncate", false}};
  const io::Json nested = {{"full_attention", yarn}, {"sliding_attention", yarn}};
  for (const char* type : {"gemma3_text", "olmo3", "gemma4_text"}) {
    io::Json json = {{"rope_parameters", nested}, {"original_max_position_embeddings", 16}};
    for (const auto& layer : changed(type, {"rope_scaling"}, json).attention) {
      EXPECT_TRUE(layer.rope.truncate) << type;
      EXPECT_EQ(layer.rope.original_max_positions, 512) << type;
    }
    json["rope_parameters"]["truncate"] = false;
    for (const auto& layer : changed(type, {"rope_scaling"}, json).attention) {
      EXPECT_FALSE(layer.rope.truncate) << type;
    }
  }
  EXPECT_TRUE(changed("olmo3", {}, {{"rope_scaling", yarn}}).rope.truncate);
  EXPECT_FALSE(changed("qwen3", {}, {{"rope_scaling", yarn}}).rope.truncate);
}

/// partial_rotary_factor is of some architectures alone; heads of others turn as a whole, and a warning says so.
TEST(FamilyConfigs, PartsOfHeadsThatTurn) {
  const io::Json half = {{"partial_rotary_factor", 0.5}};
  for (const char* type : {"llama", "mistral", "ministral3", "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_vl_text",
                           "gemma2", "gemma3_text", "gpt_oss", "smollm3", "olmo2", "olmo3"}) {
    const auto config = changed(type, {"rope_parameters", "rope_scaling"}, [&] {
      io::Json json = half;
      json["rope_parameters"] = {{"rope_type", "default"}};
      return json;
    }());
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      const double part = config.attention_of(layer).rope.partial_rotary_factor;
      EXPECT_EQ(part, type == std::string("smollm3") && layer == 3 ? 0 : 1) << type;
    }
    EXPECT_NE(join(config.warnings).find("partial_rotary_factor 0.5 is not read"), std::string::npos) << type;
  }
  for (const char* type :
       {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "glm4_moe", "glm4", "glm", "phi3", "minimax_m2"}) {
    EXPECT_EQ(changed(type, {"rotary_dim"}, half).rope.partial_rotary_factor, 0.5) << type;
    EXPECT_EQ(changed(type, {}, {{"partial_rotary_factor", 0}}).rope.partial_rotary_factor, 0) << type;
  }
  test::expect_error(ErrorCode::unsupported, {"partial_rotary_factor 0.5", "qwen3_moe"}, [] {
    changed("qwen3_moe", {},
            {{"partial_rotary_factor", 0.5}, {"rope_scaling", {{"rope_type", "linear"}, {"factor", 2}}}});
  });
  // MiniMax M2 as it was published, and as later versions of the reference write it.
  EXPECT_EQ(changed("minimax_m2", {}, {{"rotary_dim", 8}}).rope.partial_rotary_factor, 0.25);
  EXPECT_EQ(changed("minimax_m2", {}, {{"rotary_dim", 8}, {"partial_rotary_factor", 0.5}}).rope.partial_rotary_factor,
            0.5);
}

/// The head of one that sees has no bound.
TEST(FamilyConfigs, BoundsOfLogits) {
  const io::Json text = test::small_config(architecture_row("gemma3_text"), {{"final_logit_softcapping", 5.0}});
  EXPECT_EQ(parse_config(text, "c").logit_cap, 5);
  const io::Json outer = {{"architectures", {"Gemma3ForConditionalGeneration"}}, {"text_config", text}};
  EXPECT_EQ(parse_config(outer, "c").logit_cap, 0);
}

/// What transformers takes where config.json is silent, with a warning.
TEST(FamilyConfigs, SizesOfMixturesThatAreUsual) {
  const auto config = changed("qwen3_next", {"num_experts_per_tok", "linear_key_head_dim", "linear_num_value_heads"},
                              {{"num_experts", 16}});
  EXPECT_EQ(config.mixture.chosen, 10);
  EXPECT_EQ(config.delta.key_dim, 128);
  EXPECT_EQ(config.delta.value_heads, 32);
  EXPECT_NE(join(config.warnings).find("num_experts_per_tok is missing; 10 is assumed"), std::string::npos);
  EXPECT_EQ(changed("mixtral", {"num_experts_per_tok", "num_local_experts"}).mixture.experts, 8);
  for (const char* type : {"mixtral", "gpt_oss", "minimax_m2"}) {
    EXPECT_EQ(changed(type, {"num_local_experts"}, {{"num_experts", 6}}).mixture.experts, 6) << type;
  }
  const auto dense = changed("qwen3_moe", {}, {{"mlp_only_layers", {1, 9}}});
  EXPECT_EQ(dense.mixture_layers, (std::vector<bool>{true, false, true, true}));
}

TEST(FamilyConfigs, ActivationsOfGatesAndConvolutions) {
  EXPECT_EQ(changed("gpt_oss", {}).activation_slope, 1.702);
  EXPECT_EQ(changed("gpt_oss", {}, {{"swiglu_alpha", 1.5}}).activation_slope, 1.5);
  const auto config = changed("qwen3_5_text", {}, {{"hidden_act", "gelu"}});
  const auto blocks = layer_plan(config, 0).blocks;
  EXPECT_EQ(blocks[0].kind, BlockKind::delta_net);
  for (const Block& block : blocks) EXPECT_EQ(block.gating.activation, Activation::gelu);
}

/// Layers that read the keys of others have wide MLPs beside their experts as well.
TEST(FamilyConfigs, WideMlpsBesideExperts) {
  const auto config =
      changed("gemma4_text", {},
              {{"enable_moe_block", true}, {"num_experts", 4}, {"top_k_experts", 2}, {"moe_intermediate_size", 32}});
  for (const int64_t layer : {0, 3}) {
    const auto down = find_linear(config, concat("model.layers.", layer, ".mlp.down_proj"));
    ASSERT_TRUE(down.has_value());
    EXPECT_EQ(down->linear.k, layer == 0 ? 96 : 192);
  }
}

TEST(FamilyConfigs, AHeadWithABiasIsRefused) {
  EXPECT_FALSE(changed("ernie4_5_moe", {}).qkv_bias);
  test::expect_error(ErrorCode::unsupported, {"use_bias", "head"}, [] {
    changed("ernie4_5_moe", {}, {{"use_bias", true}});
  });
}

/// What is left as it is where only names and shapes are known.
TEST(FamilyConfigs, NamesThatAreLeft) {
  const std::pair<const char*, std::string_view> names[] = {
      {"model.layers.0.self_attn.b_proj", "decay of a state"},
      {"model.layers.0.self_attn.f_a_proj", "decay of a state"},
      {"model.layers.0.self_attn.g_b_proj", "narrow gate of a state"},
      {"model.layers.0.input_layernorm.W_down", "norm"},
      {"encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "embeddings"},
      {"model.vit.layers.0.mlp.up_proj", "part of a tower for other inputs than text"},
      {"model.merger.mlp.0.linear_1", "part of a tower for other inputs than text"},
      {"model.layers.0.self_attn.kv_b_proj", ""},
      {"model.layers.0.self_attn.g_proj", ""},
  };
  for (const auto& [name, why] : names) EXPECT_EQ(reason_to_leave(name, 2), why) << name;
}

/// Stacks of experts by the names that Aria gives them, inputs first.
TEST(FamilyConfigs, StacksThatAreCalledLayersOfAnMlp) {
  const test::TemporaryFolder folder;
  std::ofstream(folder.path() / "config.json") << R"({"architectures": ["AriaTextForCausalLM"], "hidden_size": 8,
    "moe_num_experts": 3, "num_hidden_layers": 1})";
  const std::string first = "model.layers.0.mlp.experts.fc1.weight", second = "model.layers.0.mlp.experts.fc2.weight";
  io::CheckpointWriter writer(folder.path(), {{first, DType::bf16, {3, 8, 12}}, {second, DType::bf16, {3, 6, 8}}}, {});
  writer.write(first, bytes_of(std::vector<uint16_t>(size_t{3} * 8 * 12)));
  writer.write(second, bytes_of(std::vector<uint16_t>(size_t{3} * 6 * 8)));
  writer.finish();
  const auto stacks = stacked_experts(checkpoint::open_folder(folder.path()));
  ASSERT_EQ(stacks.size(), 2u);
  for (const auto& stack : stacks) EXPECT_TRUE(stack.inputs_first) << stack.name;
  EXPECT_EQ(stacks[0].n, 12);
  EXPECT_EQ(stacks[1].k, 6);
}

/// Where layers and the head stand, the tensors tell.
TEST(FamilyConfigs, NamesOfWrappedModels) {
  const std::pair<const char*, const char*> places[] = {
      {"model.language_model.", "lm_head"}, {"language_model.model.", "language_model.lm_head"},
      {"language_model.model.", "lm_head"}, {"model.language_model.model.", "model.language_model.lm_head"},
      {"language_model.", "lm_head"},       {"model.", "lm_head"}};
  for (const auto& [prefix, head] : places) {
    const test::TemporaryFolder folder;
    const std::string layer = concat(prefix, "layers.0.mlp.up_proj.weight"), last = concat(head, ".weight");
    io::CheckpointWriter writer(folder.path(), {{layer, DType::bf16, {2, 2}}, {last, DType::bf16, {2, 2}}}, {});
    for (const auto& name : {layer, last}) writer.write(name, bytes_of(std::vector<uint16_t>(4)));
    writer.finish();
    ModelConfig config = changed("mistral", {});
    follow_tensors(io::Checkpoint::open(folder.path()), config);
    EXPECT_EQ(config.names, (TensorNames{prefix, head}));
  }
}

/// A file around the text's says whether the head is tied, or nothing does.
TEST(FamilyConfigs, TheOuterFileTiesTheHead) {
  io::Json text = test::small_config(architecture_row("mistral"));
  text["tie_word_embeddings"] = true;
  io::Json outer = {{"architectures", {"Mistral3ForConditionalGeneration"}}, {"text_config", text}};
  EXPECT_FALSE(parse_config(outer, "c").tie_word_embeddings.has_value());
  outer["tie_word_embeddings"] = false;
  EXPECT_EQ(parse_config(outer, "c").tie_word_embeddings, false);
}

/// Where neither file says it, what is stored does.
TEST(FamilyConfigs, WrappedHeadsThatNothingTies) {
  const test::TemporaryFolder folder;
  const ArchitectureRow& row = architecture_row("mistral");
  const io::Json outer = {{"architectures", {"Mistral3ForConditionalGeneration"}},
                          {"text_config", test::small_config(row)}};
  test::write_small_model(row, folder / "m");
  std::ofstream(folder / "m" / "config.json") << outer.dump();
  EXPECT_FALSE(open_model(folder / "m").config.tied_embeddings);
  test::write_small_model(row, folder / "tied", {{"tie_word_embeddings", true}});
  std::ofstream(folder / "tied" / "config.json") << outer.dump();
  EXPECT_TRUE(open_model(folder / "tied").config.tied_embeddings);
  // A head that is stored stands by itself, where its architecture would tie one.
  const ArchitectureRow& ties = architecture_row("gemma2");
  for (const bool tied : {false, true}) {
    test::write_small_model(ties, folder / (tied ? "tied own" : "own"), {{"tie_word_embeddings", tied}});
    io::Json unsaid = test::small_config(ties);
    unsaid.erase("tie_word_embeddings");
    std::ofstream(folder / (tied ? "tied own" : "own") / "config.json") << unsaid.dump();
    EXPECT_EQ(open_model(folder / (tied ? "tied own" : "own")).config.tied_embeddings, tied);
  }
}

/// The same model by itself and as the text of one that sees.
TEST(FamilyConfigs, WrappedModelsAreReadAsTheirText) {
  size_t wrapped = 0;
  for (const auto* row : architectures()) {
    for (const std::string_view wrapper : row->wrappers) {
      if (wrapper.empty()) continue;
      const io::Json text = test::small_config(*row);
      const io::Json outer = {
          {"architectures", {std::string(wrapper)}}, {"model_type", "outer"}, {"text_config", text}};
      const auto inner = parse_config(text, "config.json"), found = parse_config(outer, "config.json");
      EXPECT_EQ(found.architecture, row);
      EXPECT_EQ(found.architecture_name, wrapper);
      EXPECT_EQ(found.hidden_size, inner.hidden_size);
      EXPECT_EQ(found.rope, inner.rope);
      ++wrapped;
    }
  }
  EXPECT_GE(wrapped, 8u);
  const io::Json any = test::small_config(architecture_row("qwen3"));
  for (const std::string_view wrapper : wrappers_of_any()) {
    const auto found = parse_config({{"architectures", {std::string(wrapper)}}, {"text_config", any}}, "config.json");
    EXPECT_EQ(found.architecture, &architecture_row("qwen3")) << wrapper;
  }
  test::expect_error(ErrorCode::unsupported, {"Qwen3_5ForConditionalGeneration", "llama"}, [] {
    parse_config({{"architectures", {"Qwen3_5ForConditionalGeneration"}},
                  {"text_config", test::small_config(architecture_row("llama"))}},
                 "config.json");
  });
}

/// A text_config that states what differs from the usual sizes alone, as Gemma 3 4B's does.
TEST(FamilyConfigs, UsualSizesMayBeLeftOut) {
  const io::Json text = {{"model_type", "gemma3_text"},
                         {"hidden_size", 2560},
                         {"intermediate_size", 10240},
                         {"num_hidden_layers", 34},
                         {"rope_scaling", {{"rope_type", "linear"}, {"factor", 8.0}}},
                         {"sliding_window", 1024}};
  const auto config =
      parse_config({{"architectures", {"Gemma3ForConditionalGeneration"}}, {"text_config", text}}, "config.json");
  EXPECT_EQ(config.vocab_size, 262208);
  EXPECT_EQ(config.heads, 8);
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.hidden_size, 2560);
  ASSERT_FALSE(config.warnings.empty());
  EXPECT_NE(config.warnings.front().find("vocab_size is missing; 262208 is assumed"), std::string::npos);
  const auto llava = parse_config({{"architectures", {"LlavaForConditionalGeneration"}},
                                   {"text_config", {{"model_type", "llama"}, {"vocab_size", 32064}}}},
                                  "config.json");
  EXPECT_EQ(llava.hidden_size, 4096);
  EXPECT_EQ(llava.intermediate_size, 11008);
  EXPECT_EQ(llava.layers, 32);
  EXPECT_EQ(llava.heads, 32);
  // By itself a model states them.
  io::Json alone = test::small_config(architecture_row("llama"));
  alone.erase("num_attention_heads");
  test::expect_error(ErrorCode::bad_file, {"num_attention_heads is missing"}, [&] { parse_config(alone, "c"); });
}

/// Qwen2-VL's config as it was published: the text's keys stand at the top, beside those of the tower.
TEST(FamilyConfigs, TextsAtTheTopOfModelsThatSee) {
  for (const char* type : {"qwen2_vl_text", "qwen2_5_vl_text"}) {
    const ArchitectureRow& row = architecture_row(type);
    io::Json config = test::small_config(row, {{"model_type", "qwen2_vl"}, {"vision_config", io::Json::object()}});
    config["architectures"] = {std::string(row.wrappers[0])};
    const auto found = parse_config(config, "config.json");
    EXPECT_EQ(found.architecture, &row);
    EXPECT_EQ(found.architecture_name, row.wrappers[0]);
    EXPECT_EQ(found.rope, parse_config(test::small_config(row), "config.json").rope);
  }
}

}  // namespace
}  // namespace w4q::model
