// The table of a layer against what checkpoints hold and what is read from it elsewhere.
#include "model/layer_plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "core/convert.h"
#include "io/checkpoint.h"
#include "model/architecture.h"
#include "model/architecture/blocks.h"
#include "model/decoder.h"
#include "model/model.h"
#include "model/reference_logits.h"
#include "support.h"

namespace w4q::model {
namespace {

/// Every architecture that is there as a checkpoint.
std::vector<std::filesystem::path> folders() {
  std::vector<std::filesystem::path> result;
  for (const auto& root : {test::testdata() / "arch", test::shared_data() / "arch"}) {
    if (!std::filesystem::exists(root)) continue;
    for (const auto& entry : std::filesystem::directory_iterator(root)) {
      if (entry.is_directory()) result.push_back(entry.path());
    }
  }
  return result;
}

TEST(LayerPlan, NamesAndShapesAreThoseOfTheCheckpoint) {
  for (const auto& folder : folders()) {
    const auto config = read_config(folder);
    const auto checkpoint = io::Checkpoint::open(folder);
    std::map<std::string, Shape> planned, stored;
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      const auto plan = layer_plan(config, layer);
      for (const auto& norm : plan.norms()) planned[norm.name + ".weight"] = {norm.size};
      for (const auto& linear : plan.linears()) {
        planned[linear.name + ".weight"] = {linear.n, linear.k};
        if (linear.bias) planned[linear.name + ".bias"] = {linear.n};
      }
    }
    for (const auto& [name, info] : checkpoint.tensors()) {
      if (name.starts_with("model.layers.")) stored[name] = info.shape;
    }
    EXPECT_EQ(planned, stored) << folder;
  }
}

TEST(LayerPlan, SaysTheSameAsTheListOfParametersAndTheirGgufNames) {
  for (const auto& folder : folders()) {
    const auto config = read_config(folder);
    std::map<std::string, std::pair<Shape, std::string>> planned, listed;
    std::set<std::string> rotary;
    const auto add = [&](const std::string& name, const std::string& gguf, const Shape& shape, bool rows) {
      planned[name] = {shape, gguf};
      if (rows) rotary.insert(name);
    };
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      const auto plan = layer_plan(config, layer);
      for (const auto& norm : plan.norms()) add(norm.name + ".weight", norm.gguf + ".weight", {norm.size}, false);
      for (const auto& linear : plan.linears()) {
        add(linear.name + ".weight", linear.gguf + ".weight", {linear.n, linear.k}, linear.rotary_rows);
        if (linear.bias) add(linear.name + ".bias", linear.gguf + ".bias", {linear.n}, linear.rotary_rows);
      }
    }
    for (const auto& parameter : parameters(config)) {
      if (!parameter.name.starts_with("model.layers.")) continue;
      listed[parameter.name] = {parameter.shape, parameter.gguf};
      EXPECT_EQ(parameter.rotary_rows, rotary.contains(parameter.name)) << parameter.name;
    }
    EXPECT_EQ(planned, listed) << folder;
  }
}

/// The whole graph of one layer, as it is published.
TEST(LayerPlan, ALayerOfLlama) {
  auto config = read_config(test::testdata() / "arch" / "llama-yarn");
  const int64_t queries = config.heads * config.head_dim, keys = config.kv_heads * config.head_dim;
  const auto plan = layer_plan(config, 1);
  ASSERT_EQ(plan.blocks.size(), 2u);
  EXPECT_EQ(plan.blocks[0].kind, BlockKind::attention);
  EXPECT_EQ(plan.blocks[1].kind, BlockKind::gated_mlp);
  const auto groups = plan.groups();
  ASSERT_EQ(groups.size(), 4u);
  const std::string layer = "model.layers.1.", attention = layer + "self_attn.", mlp = layer + "mlp.";
  EXPECT_EQ(groups[0].names(), (std::vector{attention + "q_proj", attention + "k_proj", attention + "v_proj"}));
  EXPECT_EQ(groups[1].names(), std::vector{attention + "o_proj"});
  EXPECT_EQ(groups[2].names(), (std::vector{mlp + "gate_proj", mlp + "up_proj"}));
  EXPECT_EQ(groups[3].names(), std::vector{mlp + "down_proj"});
  EXPECT_EQ(groups[0].norm->name, layer + "input_layernorm");
  EXPECT_EQ(groups[1].producer, attention + "v_proj");
  EXPECT_EQ(groups[2].norm->name, layer + "post_attention_layernorm");
  EXPECT_EQ(groups[3].producer, mlp + "up_proj");
  const int64_t widths[] = {config.hidden_size, queries, config.hidden_size, config.intermediate_size};
  const Basis inputs[] = {Basis::stream, Basis::heads, Basis::stream, Basis::own};
  for (size_t i = 0; i < groups.size(); ++i) {
    EXPECT_EQ(groups[i].width, widths[i]);
    EXPECT_EQ(groups[i].inputs, inputs[i]);
  }
  const auto linears = plan.linears();
  const Role roles[] = {Role::query, Role::key, Role::value, Role::output, Role::gate, Role::up, Role::down};
  const Basis outputs[] = {Basis::own, Basis::own, Basis::heads, Basis::stream, Basis::own, Basis::own, Basis::stream};
  const int64_t rows[] = {
      queries, keys, keys, config.hidden_size, config.intermediate_size, config.intermediate_size, config.hidden_size};
  ASSERT_EQ(linears.size(), std::size(roles));
  for (size_t i = 0; i < linears.size(); ++i) {
    EXPECT_EQ(linears[i].position, i);
    EXPECT_EQ(linears[i].role, roles[i]);
    EXPECT_EQ(linears[i].outputs, outputs[i]);
    EXPECT_EQ(linears[i].n, rows[i]);
    EXPECT_EQ(linears[i].rotary_rows, i < 2);
  }
}

TEST(LayerPlan, QueryHeadsThatShareAValueHeadComeFromItsChannels) {
  const auto config = read_config(test::testdata() / "arch" / "llama-yarn");
  const auto groups = input_groups(config, 0);
  const int64_t d = config.head_dim;
  for (int64_t head = 0; head < config.heads; ++head) {
    for (int64_t c = 0; c < d; ++c) {
      EXPECT_EQ(groups[1].producer_channel(head * d + c), head / config.groups() * d + c);
    }
  }
  EXPECT_EQ(groups[3].producer_channel(5), 5);
}

TEST(LayerPlan, RowsAreToldApart) {
  std::set<std::string_view> types, classes;
  for (const auto* row : architectures()) {
    EXPECT_TRUE(types.insert(row->model_type).second);
    EXPECT_TRUE(classes.insert(row->class_name).second);
    EXPECT_EQ(&architecture_row(row->model_type), row);
    EXPECT_NE(row->blocks, nullptr);
  }
}

// ---- blocks that no row has yet, by laws that relate them to those of llama ----------------------------------------

/// The model with a row of its own, and tensors whose name ends with `suffix` changed in every value.
template <class Change>
std::vector<float> logits_of(const ArchitectureRow& row, std::string_view suffix, const Change& change) {
  const auto folder = test::testdata() / "arch" / "llama-yarn";
  OpenedModel opened = open_model(folder);
  const auto source = std::make_shared<const io::Checkpoint>(opened.folder.tensors);
  std::map<std::string, io::DerivedTensor, std::less<>> tensors;
  for (const auto& [name, info] : source->tensors()) {
    if (suffix.empty() || name.find(suffix) == std::string::npos) continue;
    auto make = [source, name = name, change] {
      const auto loaded = source->load(name);
      Buffer values(static_cast<size_t>(element_count(loaded->shape)) * sizeof(float));
      widen(loaded->bytes, loaded->dtype, values.as<float>());
      for (float& value : values.as<float>()) value = change(value);
      return values;
    };
    tensors.emplace(name, io::DerivedTensor{DType::f32, info.dtype, info.shape, std::move(make)});
  }
  opened.config.architecture = &row;
  opened.folder.tensors = io::Checkpoint::derive(source, std::move(tensors), "changed");
  const auto model = Model::of(std::move(opened));
  const std::vector<int32_t> ids = {1, 5, 9, 2, 7, 7, 3, 8};
  Decoder decoder(model, 8);
  std::vector<float> logits(ids.size() * static_cast<size_t>(model.config().vocab_size));
  decoder.logits(decoder.forward(ids), {logits.data(), 8, model.config().vocab_size});
  return logits;
}

/// fp32 sums in another rounding; logits are about 1, changes that the tests would miss are 100 times larger.
constexpr double bound = 1e-4;
const auto same = [](float value) { return value; };

TEST(Blocks, NormsMayBeStoredAsWhatTheyDifferFromOneBy) {
  ArchitectureRow row = architecture_row("llama");
  row.norm_offset = 1;
  const auto expected = logits_of(architecture_row("llama"), "", same);
  const auto below_one = [](float value) { return value - 1; };
  EXPECT_LT(test::largest_difference(logits_of(row, "norm.weight", below_one), expected), bound);
  EXPECT_GT(test::largest_difference(logits_of(row, "", same), expected), 100 * bound);
}

TEST(Blocks, AttentionMayHaveAScaleOfItsOwn) {
  ArchitectureRow row = architecture_row("llama");
  row.blocks = [](const ModelConfig& config, int64_t layer) {
    auto blocks = llama_blocks(config, layer);
    blocks[0].attention.scale = 0.25 / std::sqrt(static_cast<double>(config.head_dim));
    return blocks;
  };
  const auto expected = logits_of(architecture_row("llama"), "q_proj", [](float value) { return value / 4; });
  EXPECT_LT(test::largest_difference(logits_of(row, "", same), expected), bound);
  EXPECT_GT(test::largest_difference(logits_of(row, "q_proj", [](float value) { return value * 0; }), expected),
            100 * bound);
}

TEST(Blocks, LayersMayHaveRotaryEmbeddingsOfTheirOwn) {
  ArchitectureRow none = architecture_row("llama"), first = none, all = none;
  first.blocks = [](const ModelConfig& config, int64_t layer) {
    auto blocks = llama_blocks(config, layer);
    if (layer == 0) blocks[0].attention.rope.theta = 50;
    return blocks;
  };
  all.blocks = [](const ModelConfig& config, int64_t layer) {
    auto other = config;
    other.rope.theta = 50;
    return llama_blocks(other, layer);
  };
  const auto of_none = logits_of(none, "", same), of_first = logits_of(first, "", same);
  const auto of_all = logits_of(all, "", same);
  EXPECT_GT(test::largest_difference(of_none, of_first), 100 * bound);
  EXPECT_GT(test::largest_difference(of_first, of_all), 100 * bound);
}

}  // namespace
}  // namespace w4q::model
