// Names, sizes and rope scaling between GGUF metadata and Hugging Face's.
#include <set>

#include "gguf/config.h"
#include "gguf/rope.h"
#include "gguf/rotary_rows.h"
#include "gguf/tensor_map.h"
#include "io/gguf_writer.h"
#include "model/architecture.h"
#include "model/model.h"
#include "small_model.h"
#include "support.h"

namespace w4q::gguf {
namespace {

using test::expect_error;

TEST(GgufNames, EveryParameterHasOneOfItsOwn) {
  for (const char* name : {"llama", "mistral", "qwen2", "qwen3"}) {
    io::Json json = {{"model_type", name},
                     {"vocab_size", 32},
                     {"hidden_size", 16},
                     {"intermediate_size", 8},
                     {"num_hidden_layers", 12},
                     {"num_attention_heads", 4},
                     {"attention_bias", name != std::string("qwen2")},
                     {"num_key_value_heads", 2},
                     {"mlp_bias", name == std::string("llama")}};
    std::set<std::string> seen;
    for (const auto& parameter : model::parameters(model::parse_config(json, name))) {
      EXPECT_TRUE(seen.insert(parameter.gguf).second) << parameter.gguf;
      const bool rotates = parameter.name.find("q_proj") != std::string::npos ||  // and no norm of queries
                           parameter.name.find("k_proj") != std::string::npos;
      EXPECT_EQ(parameter.rotary_rows, rotates) << parameter.name;
      EXPECT_EQ(parameter.name == "model.layers.11.mlp.up_proj.weight", parameter.gguf == "blk.11.ffn_up.weight");
    }
    EXPECT_TRUE(seen.contains("token_embd.weight") && seen.contains("output_norm.weight"));
    EXPECT_TRUE(seen.contains("output.weight") && seen.contains("blk.0.attn_norm.weight"));
  }
}

TEST(GgufNames, EveryFamilyThatIsWrittenHasThemAll) {
  size_t written = 0;
  for (const auto* row : model::architectures()) {
    if (row->gguf.empty()) continue;
    ++written;
    std::set<std::pair<std::string, int64_t>> seen;
    for (const auto& parameter : model::parameters(model::parse_config(test::small_config(*row), "config.json"))) {
      EXPECT_FALSE(parameter.gguf.empty()) << row->model_type << " " << parameter.name;
      EXPECT_TRUE(seen.emplace(parameter.gguf, parameter.gguf_part).second) << row->model_type << " " << parameter.gguf;
    }
  }
  EXPECT_EQ(written, 35u);
}

/// Each value of a parameter stands in one place of one tensor, and no two tensors have one name.
TEST(GgufNames, TensorsOfAFileHoldParametersWhole) {
  for (const auto* row : model::architectures()) {
    if (row->gguf.empty()) continue;
    const auto config = model::parse_config(test::small_config(*row), "config.json");
    std::set<std::pair<std::string, int64_t>> seen;
    for (const auto& parameter : model::parameters(config)) {
      SCOPED_TRACE(concat(row->model_type, " ", parameter.name));
      const auto [rows, columns] = matrix_size(parameter.shape);
      std::vector<int> held(static_cast<size_t>(rows * columns));
      for (const auto& file : file_parts(config, parameter)) {
        EXPECT_TRUE(seen.emplace(file.name, file.part).second) << file.name;
        EXPECT_EQ(element_count(file.shape), file.rows.size() * file.columns.size());
        EXPECT_EQ(file.shape.back(), file.columns.size());
        for (int64_t r = 0; r < file.rows.size(); ++r) {
          for (int64_t c = 0; c < file.columns.size(); ++c) {
            ++held.at(static_cast<size_t>(file.rows(r) * columns + file.columns(c)));
          }
        }
      }
      EXPECT_TRUE(std::ranges::all_of(held, [](int times) { return times == 1; }));
    }
  }
}

/// Four value heads of two channels, two of them for each of two key heads: in a file those that come first come first.
TEST(GgufNames, ValueHeadsAreTiledAndProjectionsTakenApart) {
  const auto part = [](std::string_view type, const std::string& name) {
    const auto config = model::parse_config(
        test::small_config(model::architecture_row(type), {{"linear_key_head_dim", 2}, {"linear_value_head_dim", 2}}),
        "config.json");
    for (const auto& parameter : model::parameters(config)) {
      for (auto& file : file_parts(config, parameter)) {
        if (file.name == name) return file;
      }
    }
    throw std::runtime_error(name);
  };
  const auto listed = [](const Order& order) {
    std::vector<int64_t> result;
    for (int64_t i = 0; i < order.size(); ++i) result.push_back(order(i));
    return result;
  };
  const std::vector<int64_t> tiled{0, 1, 4, 5, 2, 3, 6, 7};
  EXPECT_EQ(listed(part("qwen3_5_text", "blk.0.ssm_out.weight").columns), tiled);
  EXPECT_EQ(listed(part("qwen3_5_text", "blk.0.attn_gate.weight").rows), tiled);
  EXPECT_EQ(listed(part("qwen3_5_text", "blk.0.ssm_a").columns), (std::vector<int64_t>{0, 2, 1, 3}));
  EXPECT_EQ(listed(part("qwen3_5_text", "blk.0.ssm_conv1d.weight").rows),
            (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15}));
  // q, k, v and gate of a key head have 2, 2, 4 and 4 rows.
  EXPECT_EQ(listed(part("qwen3_next", "blk.0.attn_qkv.weight").rows),
            (std::vector<int64_t>{0, 1, 12, 13, 2, 3, 14, 15, 4, 5, 6, 7, 16, 17, 18, 19}));
  EXPECT_EQ(listed(part("qwen3_next", "blk.0.attn_gate.weight").rows),
            (std::vector<int64_t>{8, 9, 10, 11, 20, 21, 22, 23}));
  EXPECT_TRUE(part("qwen3_next", "blk.0.ssm_out.weight").columns.is_plain(8));
  const auto blocks = part("qwen3_5_text", "blk.0.ssm_out.weight").columns.blocks(2);
  EXPECT_EQ(listed(blocks.value()), (std::vector<int64_t>{0, 2, 1, 3}));
  EXPECT_FALSE(part("qwen3_5_text", "blk.0.ssm_out.weight").columns.blocks(4).has_value());
}

/// GLM-4V, one head of eight rows of which four turn: pairs are neighbours in folders, half of what turns apart in files.
TEST(GgufNames, NeighboursThatTurnComeApart) {
  const auto config = model::parse_config(
      test::small_config(model::architecture_row("glm4v_text"), {{"head_dim", 8}, {"num_attention_heads", 2}}),
      "config.json");
  for (const auto& parameter : model::parameters(config)) {
    const auto parts = file_parts(config, parameter);
    const bool turns = parameter.name.find("layers.0.self_attn.q_proj") != std::string::npos;
    if (!turns) continue;
    const bool bias = parameter.name.ends_with(".bias");
    const Order& order = bias ? parts.front().columns : parts.front().rows;
    std::vector<int64_t> listed;
    for (int64_t i = 0; i < order.size(); ++i) listed.push_back(order(i));
    EXPECT_EQ(listed, (std::vector<int64_t>{0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15})) << parameter.name;
  }
}

/// −e^x, and back to the x that bf16 holds.
TEST(GgufNames, DecaysComeBack) {
  FilePart part;
  part.decays = true;
  for (const float x : {-3.5f, -0.0078125f, 0.25f, 1.0f, 2.765625f}) EXPECT_EQ(part.from_file(part.to_file(x)), x);
}

TEST(GgufNames, RotaryRowsAreABijectionThatPairsHalves) {
  for (const int64_t head_dim : {2, 4, 64, 96, 128}) {
    for (int64_t row = 0; row < 3 * head_dim; ++row) {
      EXPECT_EQ(rotary_row_from_gguf(rotary_row_to_gguf(row, head_dim), head_dim), row);
      EXPECT_EQ(rotary_row_to_gguf(rotary_row_from_gguf(row, head_dim), head_dim), row);
    }
    // Channels i and i + head_dim/2 rotate together: in GGUF they are 2i and 2i + 1.
    for (int64_t i = 0; i < head_dim / 2; ++i) {
      EXPECT_EQ(rotary_row_to_gguf(head_dim + i, head_dim), head_dim + 2 * i);
      EXPECT_EQ(rotary_row_to_gguf(head_dim + i + head_dim / 2, head_dim), head_dim + 2 * i + 1);
    }
  }
}

TEST(GgufKeys, ReadsEveryWidthAndNamesFileAndKey) {
  const io::GgufMetadata metadata = {{"general.architecture", std::string("llama")},
                                     {"llama.a", uint64_t{7}},
                                     {"llama.b", int8_t{-7}},
                                     {"llama.huge", ~uint64_t{0}},
                                     {"llama.eps", 1e-5f},
                                     {"llama.same", io::GgufArray(std::vector<int32_t>{4, 4, 4})},
                                     {"llama.differ", io::GgufArray(std::vector<int32_t>{4, 8})},
                                     {"flag", true}};
  const GgufKeys keys(metadata, "m.gguf");
  EXPECT_EQ(keys.integer("%.a"), 7);
  EXPECT_EQ(keys.integer("%.b"), -7);
  EXPECT_EQ(keys.integer("%.missing"), std::nullopt);
  EXPECT_EQ(keys.integer("%.same"), 4);
  EXPECT_EQ(keys.number("%.eps"), 1e-5);  // not the double nearest to the f32
  EXPECT_EQ(keys.number("%.a"), 7.0);
  EXPECT_EQ(keys.size("%.missing", 3), 3);
  expect_error(ErrorCode::bad_file, {"m.gguf: llama.missing", "missing"}, [&] { keys.size("%.missing"); });
  expect_error(ErrorCode::bad_file, {"llama.b", "is -7"}, [&] { keys.size("%.b"); });
  expect_error(ErrorCode::bad_file, {"llama.huge", "expected an integer", "u64"}, [&] { keys.integer("%.huge"); });
  expect_error(ErrorCode::bad_file, {"flag", "expected an integer", "bool"}, [&] { keys.integer("flag"); });
  expect_error(ErrorCode::unsupported, {"differs between layers"}, [&] { keys.integer("%.differ"); });
  expect_error(ErrorCode::bad_file, {"expected a string", "got f32"}, [&] { keys.text("%.eps"); });
  expect_error(ErrorCode::bad_file, {"an array of strings", "array of i32"}, [&] { keys.texts("%.same"); });
}

class GgufConfig : public ::testing::Test {
 protected:
  /// A file with the metadata, the embedding table and the named vectors.
  io::GgufFile file_with(const io::GgufMetadata& metadata, const std::vector<std::string>& more = {},
                         const std::vector<float>& factors = {}) {
    std::vector<io::PlannedGgufTensor> plan = {{"token_embd.weight", GgmlType::f32, {4, 2}}};
    for (const auto& name : more) plan.push_back({name, GgmlType::f32, {1}});
    if (!factors.empty())
      plan.push_back({std::string(rope_factors_tensor), GgmlType::f32, {static_cast<int64_t>(factors.size())}});
    io::GgufWriter writer(folder_ / "m.gguf", plan, metadata, true, {});
    writer.append("token_embd.weight", std::vector<std::byte>(32));
    for (const auto& name : more) writer.append(name, std::vector<std::byte>(4));
    if (!factors.empty()) writer.append(rope_factors_tensor, bytes_of(factors));
    writer.commit();
    return io::GgufFile::open(folder_ / "m.gguf");
  }

  io::Json config_of(const io::GgufMetadata& metadata, const std::vector<std::string>& more = {},
                     const std::vector<float>& factors = {}) {
    const auto file = file_with(metadata, more, factors);
    return config_from_gguf(file, GgufKeys(file.header().metadata, "m.gguf"), DType::bf16);
  }

  /// What a converter writes for a tiny Llama.
  static io::GgufMetadata llama() {
    return {{"general.architecture", std::string("llama")},
            {"llama.block_count", uint32_t{2}},
            {"llama.context_length", uint32_t{128}},
            {"llama.embedding_length", uint32_t{64}},
            {"llama.feed_forward_length", uint32_t{96}},
            {"llama.attention.head_count", uint32_t{4}},
            {"llama.rope.freq_base", 10000.0f},
            {"llama.attention.layer_norm_rms_epsilon", 1e-6f}};
  }
  static io::GgufMetadata llama_and(std::string key, io::GgufValue value) {
    auto metadata = llama();
    metadata.push_back({std::move(key), std::move(value)});
    return metadata;
  }

  test::TemporaryFolder folder_;
};

TEST_F(GgufConfig, ReadsAPlainLlama) {
  const auto config = model::parse_config(config_of(llama(), {"output.weight"}), "config");
  EXPECT_EQ(config.architecture->model_type, "llama");
  EXPECT_EQ(config.vocab_size, 4);
  EXPECT_EQ(config.kv_heads, 4);
  EXPECT_EQ(config.head_dim, 16);
  EXPECT_FALSE(config.tied_embeddings);
  EXPECT_FALSE(config.qkv_bias);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.dtype, DType::bf16);
  EXPECT_TRUE(model::parse_config(config_of(llama()), "config").tied_embeddings);
  const auto biased = model::parse_config(
      config_of(llama(), {"blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias"}), "config");
  EXPECT_TRUE(biased.qkv_bias && biased.output_bias && biased.mlp_bias);
}

TEST_F(GgufConfig, RefusesWhatItWouldComputeDifferently) {
  const auto refuse = [&](ErrorCode code, std::initializer_list<std::string_view> parts,
                          const io::GgufMetadata& metadata, const std::vector<std::string>& more = {}) {
    expect_error(code, parts, [&] { config_of(metadata, more); });
  };
  auto other = llama();
  other[0].value = std::string("mamba");
  refuse(ErrorCode::unsupported, {"general.architecture", "mamba", "llama, mistral3, qwen2, qwen2moe, qwen3"}, other);
  auto incomplete = llama();
  incomplete.erase(incomplete.begin() + 1);
  refuse(ErrorCode::bad_file, {"llama.block_count", "missing"}, incomplete);
  refuse(ErrorCode::bad_file, {"llama.expert_used_count", "missing"}, llama_and("llama.expert_count", uint32_t{8}));
  auto mixed = llama();
  for (auto& entry : mixed) {
    if (entry.key.starts_with("llama.")) entry.key.replace(0, 5, "qwen2");
  }
  mixed[0].value = std::string("qwen2");
  mixed.push_back({"qwen2.expert_count", uint32_t{8}});
  refuse(ErrorCode::unsupported, {"qwen2.expert_count", "is 8"}, mixed);
  refuse(ErrorCode::unsupported, {"llama.logit_scale"}, llama_and("llama.logit_scale", 0.5f));
  refuse(ErrorCode::unsupported, {"llama.attention.value_length", "16 channels"},
         llama_and("llama.attention.value_length", uint32_t{8}));
  refuse(ErrorCode::unsupported, {"llama.rope.dimension_count"}, llama_and("llama.rope.dimension_count", uint32_t{8}));
  refuse(ErrorCode::unsupported, {"llama.rope.scaling.type", "longrope"},
         llama_and("llama.rope.scaling.type", std::string("longrope")));
  refuse(ErrorCode::unsupported, {"blk.0.attn_output.bias"}, llama(), {"blk.0.attn_q.bias"});
  refuse(ErrorCode::bad_file, {"llama.rope.freq_base", "expected an integer"}, [] {
    auto metadata = llama();
    metadata[6].value = std::string("many");
    return metadata;
  }());
  expect_error(ErrorCode::unsupported, {"rope_freqs.weight", "Llama 3"}, [&] {
    config_of(llama(), {}, {1, 1, 1, 1, 2, 3, 8, 8});
  });
  expect_error(ErrorCode::bad_file, {"rope_freqs.weight", "expected F32 [8]"}, [&] { config_of(llama(), {}, {1, 2}); });
}

/// config.json → metadata and factors → config.json.
TEST_F(GgufConfig, EveryRopeScalingComesBack) {
  const io::Json scalings[] = {
      nullptr,
      {{"rope_type", "linear"}, {"factor", 2.5}},
      {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32}},
      {{"rope_type", "yarn"},
       {"factor", 4.0},
       {"original_max_position_embeddings", 32},
       {"beta_fast", 32.0},
       {"beta_slow", 1.0}},
      {{"rope_type", "llama3"},
       {"factor", 8.0},
       {"low_freq_factor", 1.0},
       {"high_freq_factor", 4.0},
       {"original_max_position_embeddings", 8192}},
      {{"rope_type", "llama3"},
       {"factor", 32.0},
       {"low_freq_factor", 2.0},
       {"high_freq_factor", 3.0},
       {"original_max_position_embeddings", 64}},
  };
  for (const auto& scaling : scalings) {
    SCOPED_TRACE(scaling.dump());
    const io::Json json = {{"model_type", "llama"},      {"vocab_size", 4},
                           {"hidden_size", 64},          {"intermediate_size", 96},
                           {"num_hidden_layers", 2},     {"num_attention_heads", 4},
                           {"rope_theta", 500000.0},     {"max_position_embeddings", 128},
                           {"rope_scaling", scaling},    {"rms_norm_eps", 1e-5},
                           {"tie_word_embeddings", true}};
    const auto config = model::parse_config(json, "config");
    std::vector<std::string> notes;
    auto metadata = config_to_gguf(config, notes);
    metadata.insert(metadata.begin(), {"general.architecture", std::string(config.architecture->gguf)});
    EXPECT_TRUE(notes.empty());
    const auto factors = rope_factors_to_gguf(config);
    const auto values = factors.empty() ? std::vector<float>() : factors.front().values;
    const auto back = model::parse_config(config_of(metadata, {}, values), "back").rope;
    EXPECT_EQ(back.type, config.rope.type);
    EXPECT_EQ(back.theta, config.rope.theta);
    EXPECT_EQ(back.factor, config.rope.factor);
    EXPECT_EQ(back.low_freq_factor, config.rope.low_freq_factor);
    EXPECT_EQ(back.high_freq_factor, config.rope.high_freq_factor);
    EXPECT_EQ(back.original_max_positions, config.rope.original_max_positions);
    EXPECT_EQ(back.beta_fast, config.rope.beta_fast);
    EXPECT_EQ(back.beta_slow, config.rope.beta_slow);
    EXPECT_EQ(back.attention_factor, config.rope.attention_factor);
  }
}

TEST_F(GgufConfig, ALlama3FileOfOthersHasTheParametersOfThePublishedModels) {
  model::RopeConfig rope;
  rope.type = model::RopeType::llama3;
  rope.theta = 10000;
  rope.factor = 8;
  rope.original_max_positions = 8192;
  const auto config = config_of(llama(), {}, llama3_factors(rope, 16));  // no parameters beside the tensor
  EXPECT_EQ(config["rope_scaling"]["factor"], 8.0);
  EXPECT_EQ(config["rope_scaling"]["original_max_position_embeddings"], 8192);
}

TEST_F(GgufConfig, SaysWhyItCannotBeWritten) {
  const auto refuse = [](std::string_view part, const io::Json& change) {
    io::Json json = {{"model_type", "qwen2"},    {"vocab_size", 4},
                     {"hidden_size", 64},        {"intermediate_size", 96},
                     {"num_hidden_layers", 2},   {"num_attention_heads", 4},
                     {"num_key_value_heads", 4}, {"max_position_embeddings", 128}};
    json.update(change);
    std::vector<std::string> notes;
    expect_error(ErrorCode::unsupported, {part, "GGUF"},
                 [&] { config_to_gguf(model::parse_config(json, "config"), notes); });
  };
  refuse("rope type dynamic", {{"rope_scaling", {{"rope_type", "dynamic"}, {"factor", 2.0}}}});
  refuse("attention_factor", {{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}, {"attention_factor", 1.5}}}});
  refuse("beta_fast 16 and beta_slow 1",
         {{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}, {"beta_fast", 16.0}}}});
  refuse("rope type llama3 of qwen2", {{"rope_scaling",
                                        {{"rope_type", "llama3"},
                                         {"factor", 8.0},
                                         {"low_freq_factor", 1.0},
                                         {"high_freq_factor", 4.0},
                                         {"original_max_position_embeddings", 64}}}});
  refuse("sliding windows", {{"use_sliding_window", true}, {"sliding_window", 8}, {"max_window_layers", 1}});
  refuse("attention_bias of Qwen3", {{"model_type", "qwen3"}, {"attention_bias", true}});
}

}  // namespace
}  // namespace w4q::gguf
