// Rotations folded into the weights of a model: it computes the same.
#include <cmath>
#include <fstream>
#include <map>
#include <memory>
#include <set>

#include "core/parallel.h"
#include "core/text.h"
#include "model/architecture.h"
#include "model/opened.h"
#include "model/reference_logits.h"
#include "model/turn_weight.h"
#include "small_model.h"
#include "support.h"

namespace w4q::model {
namespace {

using formats::InputRotation;
using formats::Rotation;
using test::expect_error;
using DerivedTensors = std::map<std::string, io::DerivedTensor, std::less<>>;

std::filesystem::path tiny() { return test::testdata() / "w4q-llama-tiny"; }

std::vector<float> floats(const io::Checkpoint& checkpoint, const std::string& name) {
  const auto loaded = checkpoint.load(name);
  std::vector<float> values(static_cast<size_t>(element_count(loaded->shape)));
  widen(loaded->bytes, loaded->dtype, values);
  return values;
}

/// `model` with other values for some tensors, in fp32.
OpenedModel with(OpenedModel model, const std::map<std::string, std::vector<float>>& values) {
  DerivedTensors tensors;
  for (const auto& [name, data] : values) {
    const Shape shape = model.folder.tensors.contains(name) ? model.folder.tensors.at(name).shape
                                                            : Shape{static_cast<int64_t>(data.size())};
    tensors[name] = {DType::f32, DType::f32, shape, [data] { return Buffer::copy_of(bytes_of(data)); }};
  }
  model.folder.tensors = io::Checkpoint::derive(std::make_shared<io::Checkpoint>(std::move(model.folder.tensors)),
                                                std::move(tensors), "test");
  return model;
}

/// All of it in fp32: nothing that is folded is rounded to 16 bit.
OpenedModel in_fp32(const std::filesystem::path& folder) {
  OpenedModel model = open_plain_model(folder, std::nullopt);
  std::map<std::string, std::vector<float>> values;
  for (const auto& [name, info] : model.folder.tensors.tensors()) values[name] = floats(model.folder.tensors, name);
  return with(std::move(model), values);
}

std::vector<float> logits(OpenedModel model) {
  std::vector<int32_t> ids(48);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * 37 % 96);
  return test::decode(Model::of(std::move(model)), ids, {ids.size()});
}

double largest(const std::vector<float>& values) {
  return std::abs(*std::ranges::max_element(values, {}, [](float value) { return std::abs(value); }));
}

/// Folds `folder` in fp32 and says how far its logits are from those of before, as a share of the largest.
double change(const std::filesystem::path& folder, uint64_t seed) {
  const auto before = logits(in_fp32(folder));
  OpenedModel model = in_fp32(folder);
  const auto rotations = widest_rotations(model.config, seed);
  const auto after = logits(fold_rotations(std::move(model), rotations));
  return test::largest_difference(before, after) / largest(before);
}

/// fp32 carries 6e-8, a decoder of 3 to 8 layers some tens of roundings in a row. Measured 5e-7 to 2.2e-6.
constexpr double fp32_size = 1e-5;

TEST(Fold, EveryArchitectureComputesTheSame) {
  for (const auto& entry : std::filesystem::directory_iterator(test::testdata() / "arch")) {
    EXPECT_LT(change(entry.path(), 0), fp32_size) << entry.path();
  }
  EXPECT_LT(change(tiny(), 1), fp32_size);
}

/// Norms of 1 + w, mixtures by name and stacked either way, delta nets, biases of stacks, fused matrices; those that
/// have norms before the sum cannot.
TEST(Fold, EveryRowComputesTheSameOrSaysWhyNot) {
  const std::set<std::string_view> refused = {"gemma2",     "gemma3_text", "gemma4_text", "glm4",
                                              "glm4v_text", "olmo2",       "olmo3",       "exaone4"};
  for (const auto* row : architectures()) {
    const test::TemporaryFolder folder;
    test::write_small_model(*row, folder / "m");
    SCOPED_TRACE(row->model_type);
    if (refused.contains(row->model_type)) {
      expect_error(ErrorCode::unsupported, {"a norm before the sum"}, [&] { open_plain_model(folder / "m", 1); });
      continue;
    }
    EXPECT_LT(change(folder / "m", 2), 1e-4);  // experts of nearly equal scores trade their places; measured 6e-6
    const auto folded = open_plain_model(folder / "m", 2);
    for (const auto& stack : folded.apart) {
      const auto whole = floats(folded.folder.tensors, stack.name);
      const auto last = floats(folded.folder.tensors, stack.expert(stack.experts - 1));
      const auto size = static_cast<size_t>(stack.n * stack.k), begin = whole.size() - size;
      const size_t step = stack.inputs_first ? static_cast<size_t>(stack.n) : 1;
      EXPECT_EQ(whole[begin + step], last[1]) << stack.name;
    }
  }
}

TEST(Fold, EveryReferenceComputesTheSame) {
  W4Q_NEEDS_SHARED_DATA();
  for (const auto& entry : std::filesystem::directory_iterator(test::shared_data() / "arch")) {
    if (!entry.is_directory()) continue;
    EXPECT_LT(change(entry.path(), 0), fp32_size) << entry.path();
    // And the reference, which another implementation computed from the weights as they are.
    const test::ReferenceLogits reference(entry.path() / "reference.safetensors");
    const auto model = Model::of(open_plain_model(entry.path(), 3));
    const auto found = test::decode(model, reference.ids(), {96});
    EXPECT_LT(test::largest_difference(reference.logits(), found), 1e-4) << entry.path();
  }
}

TEST(Fold, NormsAreOneAndTheHeadStandsAlone) {
  const auto before = open_plain_model(tiny(), std::nullopt);
  ASSERT_TRUE(before.config.tied_embeddings);
  const auto after = open_plain_model(tiny(), 5);
  EXPECT_FALSE(after.config.tied_embeddings);
  EXPECT_EQ(after.folder.config["tie_word_embeddings"], false);
  for (const char* name : {"model.norm.weight", "model.layers.2.input_layernorm.weight",
                           "model.layers.3.post_attention_layernorm.weight"}) {
    EXPECT_EQ(floats(after.folder.tensors, name), std::vector<float>(256, 1.0f)) << name;
  }
  EXPECT_EQ(after.folder.tensors.at("lm_head.weight").shape, (Shape{1024, 256}));
  EXPECT_EQ(after.folder.tensors.at("lm_head.weight").dtype, DType::f32);
  EXPECT_EQ(after.folder.tensors.stored_dtype("lm_head.weight"), DType::bf16);
  ASSERT_EQ(after.notes.size(), 3u);
  EXPECT_NE(after.notes[1].find("down_proj"), std::string::npos);
  EXPECT_NE(after.notes[2].find("524 kB"), std::string::npos) << after.notes[2];
}

/// A channel that a norm makes 64 times as loud, and its readers 64 times as quiet: nothing is left of it.
TEST(Fold, OutliersOfNormsVanish) {
  const std::string prefix = "model.layers.1.", norm_name = prefix + "input_layernorm.weight";
  OpenedModel model = in_fp32(tiny());
  std::map<std::string, std::vector<float>> loud{{norm_name, floats(model.folder.tensors, norm_name)}};
  loud[norm_name][17] *= 64;
  for (const char* reader : {"q_proj", "k_proj", "v_proj"}) {
    const std::string name = concat(prefix, "self_attn.", reader, ".weight");
    auto values = floats(model.folder.tensors, name);
    for (size_t i = 17; i < values.size(); i += 256) values[i] /= 64;
    loud[name] = std::move(values);
  }
  const FoldedRotations rotations{{256, 0}, {64, 0}};
  const auto calm = fold_rotations(in_fp32(tiny()), rotations);
  const auto folded = fold_rotations(with(std::move(model), loud), rotations);
  for (const auto& [name, values] : loud) {
    EXPECT_EQ(floats(folded.folder.tensors, name), floats(calm.folder.tensors, name)) << name;
  }
}

/// One of the residual stream is spread over all channels.
TEST(Fold, OutliersOfTheStreamAreSpread) {
  const std::string name = "model.embed_tokens.weight";
  OpenedModel model = in_fp32(tiny());
  auto table = floats(model.folder.tensors, name);
  for (size_t i = 17; i < table.size(); i += 256) table[i] = 16;
  const auto folded = fold_rotations(with(std::move(model), {{name, table}}), {{256, 0}, {64, 0}});
  EXPECT_LT(largest(floats(folded.folder.tensors, name)), 3);  // 16 / √256, and what was there
}

TEST(Fold, BytesDependOnTheSeedAndNotOnThreads) {
  const auto bytes = [](uint64_t seed) {
    const auto model = open_plain_model(tiny(), seed);
    std::vector<float> all;
    for (const char* name : {"v_proj", "o_proj"}) {
      const auto values = floats(model.folder.tensors, concat("model.layers.1.self_attn.", name, ".weight"));
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  };
  set_threads(1);
  const auto one = bytes(0);
  set_threads(3);
  EXPECT_EQ(one, bytes(0));
  set_threads(0);
  EXPECT_NE(one, bytes(1));
}

TEST(Fold, RotationsFitTheModel) {
  ModelConfig config;
  config.head_dim = 96;
  for (const auto& [hidden, block] : std::vector<std::pair<int64_t, int64_t>>{
           {4096, 4096}, {3584, 512}, {896, 128}, {5120, 1024}, {1000, formats::whole_row}, {96, 32}}) {
    config.hidden_size = hidden;
    EXPECT_EQ(widest_rotations(config, 7), (FoldedRotations{{block, 7}, {formats::whole_row, 7}})) << hidden;
  }
}

TEST(Fold, RecordIsReadBack) {
  const auto model = open_plain_model(tiny(), 9);
  EXPECT_EQ(read_folded_rotations(model.folder.config, "config.json"),
            (FoldedRotations{{256, 9}, {formats::whole_row, 9}}));
  EXPECT_EQ(model.folder.tensors.derivation(), "hadamard256-s9, heads hadamard-row-s9");
  EXPECT_EQ(read_folded_rotations(io::Json::object(), "config.json"), std::nullopt);
  for (const char* damaged : {R"({"folded_rotations": 3})", R"({"folded_rotations": {"residual": "none"}})",
                              R"({"folded_rotations": {"residual": "none", "heads": 1}})"}) {
    expect_error(ErrorCode::bad_file, {"config.json", "folded_rotations"},
                 [&] { read_folded_rotations(io::parse_json(damaged, "x"), "config.json"); });
  }
  expect_error(ErrorCode::unsupported, {"unknown rotation"}, [&] {
    read_folded_rotations(io::parse_json(R"({"folded_rotations": {"residual": "x", "heads": "none"}})", "x"), "c");
  });
}

TEST(Fold, Refusals) {
  const FoldedRotations rotations{{256, 0}, {64, 0}};
  expect_error(ErrorCode::bad_argument, {"folded into this model already", "hadamard256-s2"},
               [&] { fold_rotations(open_plain_model(tiny(), 2), rotations); });
  expect_error(ErrorCode::unsupported, {"adapter.weight", "no parameter of LlamaForCausalLM", "--fold-rotations"}, [&] {
    fold_rotations(with(open_plain_model(tiny(), {}), {{"adapter.weight", {1, 2}}}), rotations);
  });
  expect_error(ErrorCode::unsupported, {"a rotation of blocks of 3"}, [&] {
    fold_rotations(open_plain_model(tiny(), {}), {{3, 0}, {64, 0}});
  });

  const std::string name = "model.layers.0.mlp.down_proj.weight";
  OpenedModel model = open_plain_model(tiny(), std::nullopt);
  auto values = floats(model.folder.tensors, name);
  values[768 * 3 + 11] = INFINITY;
  const auto folded = fold_rotations(with(std::move(model), {{name, values}}), rotations);
  expect_error(ErrorCode::bad_file, {name, "NaN or infinity", "row 3, column 11"},
               [&] { folded.folder.tensors.load(name); });
}

/// Of one that sees: what its projector puts into the stream is turned as embeddings are.
class FoldWrapped : public testing::Test {
 protected:
  /// With these rows of 64 channels beside the text model, the first of which is an embedding, too.
  OpenedModel opened(const std::string& class_name, const std::vector<std::string>& rows) {
    const auto path = folder_ / "m";
    std::filesystem::remove_all(path);
    test::write_small_model(architecture_row("qwen3_vl_text"), path, {{"tie_word_embeddings", true}});
    io::Json text = io::read_json(path / "config.json");
    text.erase("architectures");
    const io::Json config = {{"architectures", {class_name}}, {"tie_word_embeddings", true}, {"text_config", text}};
    std::ofstream(path / "config.json") << config.dump();
    OpenedModel model = in_fp32(path);
    auto table = floats(model.folder.tensors, table_);
    std::map<std::string, std::vector<float>> values{{table_, table}};
    for (const auto& row : rows) values[row] = std::vector<float>(table.begin(), table.begin() + 64);
    return with(std::move(model), values);
  }

  const std::string table_ = "model.embed_tokens.weight";
  test::TemporaryFolder folder_;
};

TEST_F(FoldWrapped, ProjectorsAreTurned) {
  const std::string writer = "model.visual.merger.linear_fc2.bias",
                    deep = "model.visual.deepstack_merger_list.1.linear_fc2.bias",
                    inner = "model.visual.blocks.1.mlp.linear_fc2.bias";
  const auto model = opened("Qwen3VLForConditionalGeneration", {writer, deep, inner});
  const auto before = logits(model);
  const auto row = floats(model.folder.tensors, inner);
  const auto folded = fold_rotations(model, widest_rotations(model.config, 1));
  const auto table = floats(folded.folder.tensors, table_);
  const std::vector<float> turned(table.begin(), table.begin() + 64);
  EXPECT_EQ(floats(folded.folder.tensors, writer), turned);
  EXPECT_EQ(floats(folded.folder.tensors, deep), turned);
  EXPECT_EQ(floats(folded.folder.tensors, inner), row);
  EXPECT_EQ(folded.folder.config["text_config"]["tie_word_embeddings"], false);
  EXPECT_LT(test::largest_difference(before, logits(folded)) / largest(before), fp32_size);
}

TEST_F(FoldWrapped, WhatIsNotKnownIsRefused) {
  const auto refused = [&](const std::string& class_name, const std::string& row,
                           std::initializer_list<std::string_view> said) {
    auto model = opened(class_name, {row});
    const auto rotations = widest_rotations(model.config, 1);
    expect_error(ErrorCode::unsupported, said, [&] { fold_rotations(std::move(model), rotations); });
  };
  const std::string wrapper = "Qwen3VLForConditionalGeneration";
  refused(wrapper, "mtp.norm.weight", {"mtp.norm.weight: predicts further tokens", "behind the final norm"});
  refused(wrapper, "model.visual.norm.weight", {"no projector of " + wrapper});
  refused("Ovis2ForConditionalGeneration", "model.vision_model.norm.weight",
          {"model.vision_model.norm.weight: part of a tower", "Ovis2ForConditionalGeneration", "is not known"});
}

TEST(TurnWeight, ProductsStay) {
  const InputRotation rotation({formats::whole_row, 1}, 12);
  std::vector<float> weight(24 * 36), x(36), products(24), turned(24);
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(i * 29 % 31) - 15;
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 13 % 17) - 8;
  const auto multiply = [&](std::vector<float>& y) {
    for (size_t r = 0; r < y.size(); ++r) {
      y[r] = 0;
      for (size_t c = 0; c < x.size(); ++c) y[r] += weight[r * 36 + c] * x[c];
    }
  };
  const auto each = [&](std::vector<float>& values) {
    for (size_t i = 0; i < values.size(); i += 12) rotation.rotate(std::span(values).subspan(i, 12));
  };
  multiply(products);
  const MatrixView<float> matrix(weight.data(), 24, 36);
  turn_inputs(matrix, rotation);
  turn_outputs(matrix, rotation);
  each(x);
  each(products);
  multiply(turned);
  // Sums of 36 products below 120: fp32 leaves 36 · 120 · 2^-24 · a few.
  EXPECT_LT(test::largest_difference(products, turned), 2e-3);
}

TEST(TurnWeight, NormsMultiplyColumns) {
  std::vector<float> weight{1, 2, 3, 4};
  multiply_columns({weight.data(), 2, 2}, std::vector<float>{10, 100});
  EXPECT_EQ(weight, (std::vector<float>{10, 200, 30, 400}));
}

}  // namespace
}  // namespace w4q::model
