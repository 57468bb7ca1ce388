// Every architecture that is listed: what it decodes to, however a sequence is cut, and what it must hold.
#include <gtest/gtest.h>

#include <set>

#include "io/checkpoint.h"
#include "model/architecture.h"
#include "model/decoder.h"
#include "model/decoder_layer.h"
#include "reference_logits.h"
#include "small_model.h"
#include "support.h"

namespace w4q::model {
namespace {

using test::decode;
using test::largest_difference;

/// Sums are taken in another order. Measured: 1.2e-5 with mixtures, 6.3e-5 where logits of attention are not scaled.
constexpr double order_tolerance = 2e-4;
/// What the families' reference promises; 1.7e-5 was measured.
constexpr double family_tolerance = 1e-4;

std::vector<int32_t> some_ids(int64_t count, int64_t vocabulary) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int32_t>((i * 37 + i * i * 11 + 5) % vocabulary));
  return ids;
}

class EveryArchitecture : public testing::TestWithParam<const ArchitectureRow*> {
 protected:
  void SetUp() override { test::write_small_model(*GetParam(), folder_.path() / "m"); }

  test::TemporaryFolder folder_;
};

TEST_P(EveryArchitecture, DecodesTheSameInAnyChunks) {
  const Model model = Model::open(folder_.path() / "m");
  const auto ids = some_ids(40, model.config().vocab_size);
  const auto whole = decode(model, ids, {1 << 20});
  EXPECT_TRUE(std::ranges::all_of(whole, [](float value) { return std::isfinite(value); }));
  EXPECT_LT(largest_difference(decode(model, ids, {1}), whole), order_tolerance);
  EXPECT_LT(largest_difference(decode(model, ids, {3, 20, 1, 1, 9}), whole), order_tolerance);
}

/// A decoder that is used again begins anew.
TEST_P(EveryArchitecture, ForgetsASequence) {
  const Model model = Model::open(folder_.path() / "m");
  Decoder decoder(model, 64);
  const auto ids = some_ids(12, model.config().vocab_size), others = some_ids(30, 97);
  const auto first = test::values_of(decoder.forward(ids));
  decoder.reset();
  decoder.forward(others);
  decoder.reset();
  EXPECT_EQ(test::values_of(decoder.forward(ids)), first);
}

/// The future changes nothing.
TEST_P(EveryArchitecture, IsCausal) {
  const Model model = Model::open(folder_.path() / "m");
  auto ids = some_ids(24, model.config().vocab_size);
  const auto whole = decode(model, ids, {1 << 20});
  ids.resize(15);
  const auto begun = decode(model, ids, {1 << 20});
  const std::vector<float> same(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(begun.size()));
  EXPECT_LT(largest_difference(begun, same), order_tolerance);
}

/// Every parameter says something: without it, or with another one in its place, logits change.
TEST_P(EveryArchitecture, EveryTensorIsRead) {
  const auto path = folder_.path() / "m";
  const auto ids = some_ids(24, 160);
  const auto expected = decode(Model::open(path), ids, {1 << 20});
  const auto source = std::make_shared<const io::Checkpoint>(io::Checkpoint::open(path));
  int asked = 0, idle = 0;  // experts by themselves: some may be sent no token
  for (const auto& [name, info] : source->tensors()) {
    const bool last_layers = name.find("layers.1.") != std::string::npos || name.find("layers.2.") != std::string::npos;
    if (last_layers) continue;                              // of four layers the first and the last
    if (name.ends_with("layers.3.layer_scalar")) continue;  // a scale of the stream is lost in the norm behind it
    if (!reason_to_carry(read_config(path), name).empty()) continue;
    OpenedModel opened = open_model(path);
    std::map<std::string, io::DerivedTensor, std::less<>> changed;
    changed.emplace(name, io::DerivedTensor{DType::f32, info.dtype, info.shape, [source, name = name, info = info] {
                                              const auto loaded = source->load(name);
                                              Buffer values(static_cast<size_t>(element_count(info.shape)) * 4);
                                              widen(loaded->bytes, loaded->dtype, values.as<float>());
                                              float turn = 0;
                                              for (float& value : values.as<float>()) value += std::sin(turn += 0.7f);
                                              return values;
                                            }});
    opened.folder.tensors = io::Checkpoint::derive(source, std::move(changed), "changed");
    if (opened.config.mixture.experts > 0) {
      opened.apart = stacked_experts(opened.folder);
      opened.folder.tensors = take_apart(std::move(opened.folder.tensors), opened.apart);
    }
    const auto found = decode(Model::of(std::move(opened)), ids, {1 << 20});
    const bool read = largest_difference(found, expected) > 1e-5;
    if (layer_numbers(module_path(name)).expert < 0) {
      EXPECT_TRUE(read) << name;
    } else {
      ++(read ? asked : idle);
    }
  }
  EXPECT_LE(idle, asked);
}

TEST_P(EveryArchitecture, HoldsWhatItMust) {
  const auto model = open_model(folder_.path() / "m");
  std::set<std::string> stacks;
  for (const auto& stack : model.apart) stacks.insert(stack.name);
  std::set<std::string> listed;
  for (const auto& parameter : parameters(model)) {
    EXPECT_TRUE(listed.insert(parameter.name).second) << parameter.name;
    check_weight(model.folder.tensors, parameter.name, parameter.shape);
    if (!parameter.linear) continue;
    const auto module = module_path(parameter.name);
    const bool outside = is_head(module) || is_embedding(module);
    EXPECT_EQ(parameter.left, outside ? "" : reason_to_leave(module, model.config.layers)) << parameter.name;
  }
  for (const auto& [name, info] : model.folder.tensors.tensors()) {
    EXPECT_TRUE(listed.contains(name) || stacks.contains(name) || !reason_to_carry(model.config, name).empty()) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Decoder, EveryArchitecture, testing::ValuesIn(architectures().begin(), architectures().end()),
                         [](const auto& param) { return test::row_name(param.param); });

TEST(Families, AreWhatTheReferenceSays) {
  W4Q_NEEDS_SHARED_DATA();
  const std::set<std::string> unknown = {"cohere2", "deepseek-v3", "deepseek-v3-fp8", "llama4", "starcoder2"};
  size_t known = 0;
  for (const auto& entry : std::filesystem::directory_iterator(test::shared_data() / "families")) {
    if (!std::filesystem::exists(entry.path() / "reference.safetensors")) continue;
    SCOPED_TRACE(entry.path());
    auto opened = open_model(entry.path());
    EXPECT_EQ(opened.config.architecture == nullptr, unknown.contains(entry.path().filename().string()));
    if (opened.config.architecture == nullptr) continue;
    ++known;
    const Model model = Model::of(std::move(opened));
    const test::ReferenceLogits reference(entry.path() / "reference.safetensors");
    const auto whole = decode(model, reference.ids(), {1 << 20});
    EXPECT_LT(largest_difference(whole, reference.logits()), family_tolerance);
    // Longer texts than the original positions turn otherwise from there on.
    if (model.config().rope.type == RopeType::longrope) continue;
    EXPECT_LT(largest_difference(decode(model, reference.ids(), {1}), whole), order_tolerance);
    EXPECT_LT(largest_difference(decode(model, reference.ids(), {7, 64, 1}), whole), order_tolerance);
  }
  EXPECT_EQ(known, 29u);
}

/// The mixture and the hybrid that are bundled, against the program that trained them (testdata/train_small_models.py).
/// Measured: 6e-5.
TEST(TrainedModels, DecodeAsTheProgramThatTrainedThem) {
  for (const char* name : {"w4q-mixture-tiny", "w4q-hybrid-tiny"}) {
    const auto folder = test::testdata() / name;
    const test::ReferenceLogits reference(folder / "reference.safetensors");
    const auto found = decode(Model::open(folder), reference.ids(), {1 << 20});
    EXPECT_LT(largest_difference(found, reference.logits()), family_tolerance) << name;
  }
}

/// What a layer adds of its own is the same whether all layers' is made at once or one's alone: sums are taken in another order
/// at most.
TEST(LayerEmbeddings, OfOneLayerAreItsPartOfAll) {
  const test::TemporaryFolder folder;
  test::write_small_model(architecture_row("gemma4_text"), folder.path() / "m");
  const Model model = Model::open(folder.path() / "m");
  const auto& config = model.config();
  const auto& own = *model.layer_embeddings();
  const auto ids = some_ids(9, config.vocab_size);
  const int64_t rows = std::ssize(ids), size = config.layer_embedding_size;
  std::vector<float> hidden(static_cast<size_t>(rows * config.hidden_size));
  std::vector<float> all(static_cast<size_t>(rows * config.layers * size)), one(static_cast<size_t>(rows * size));
  const MatrixView<float> states(hidden.data(), rows, config.hidden_size);
  embed(config, model.embeddings(), ids, states);
  embed_layers(config, own, ids, states, {all.data(), rows, config.layers * size});
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    embed_layer(config, own, {config, own, layer}, ids, states, {one.data(), rows, size});
    std::vector<float> expected;
    for (int64_t row = 0; row < rows; ++row) {
      const auto begin = all.begin() + (row * config.layers + layer) * size;
      expected.insert(expected.end(), begin, begin + size);
    }
    EXPECT_LT(largest_difference(one, expected), 1e-5) << layer;
  }
}

}  // namespace
}  // namespace w4q::model
