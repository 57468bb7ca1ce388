#include "model/model.h"

#include <gtest/gtest.h>

#include <fstream>

#include "formats/codebook.h"
#include "formats/scheme_registry.h"
#include "io/checkpoint_writer.h"
#include "model/reference_logits.h"
#include "support.h"

namespace w4q::model {
namespace {

using test::expect_error;

/// A checkpoint being made up: config and tensors, all fp32.
struct Draft {
  io::Json config;
  std::map<std::string, std::pair<Shape, std::vector<float>>> tensors;

  /// A complete random model of the architecture, its parameters as the list says.
  explicit Draft(const std::filesystem::path& source) : config(io::read_json(source / "config.json")) {
    const auto checkpoint = io::Checkpoint::open(source);
    for (const auto& [name, info] : checkpoint.tensors()) {
      const auto loaded = checkpoint.load(name);
      std::vector<float> values(static_cast<size_t>(element_count(info.shape)));
      widen(loaded->bytes, loaded->dtype, values);
      tensors[name] = {info.shape, std::move(values)};
    }
  }

  void write(const std::filesystem::path& folder) const {
    std::vector<io::PlannedTensor> plan;
    for (const auto& [name, tensor] : tensors) plan.push_back({name, DType::f32, tensor.first});
    io::CheckpointWriter writer(folder, plan, {});
    for (const auto& [name, tensor] : tensors) writer.write(name, bytes_of(tensor.second));
    writer.finish();
    std::ofstream(folder / "config.json") << config.dump();
  }

  Model open() const {
    const test::TemporaryFolder folder;
    write(folder.path());
    return Model::open(folder.path());
  }
};

const std::filesystem::path qwen3 = test::testdata() / "arch" / "qwen3-dynamic";
const std::filesystem::path llama = test::testdata() / "arch" / "llama-yarn";

TEST(Model, ParametersAreExactlyTheStoredTensors) {
  for (const char* name : {"llama-yarn", "mistral-window", "qwen2-window", "qwen3-dynamic"}) {
    const Model model = Model::open(test::testdata() / "arch" / name);
    std::map<std::string, Shape> expected, found;
    for (const auto& parameter : parameters(model.config())) expected[parameter.name] = parameter.shape;
    for (const auto& [tensor, info] : model.folder().tensors.tensors()) found[tensor] = info.shape;
    EXPECT_EQ(expected, found) << name;
  }
}

TEST(Model, NamesWhatIsMissingOrMisshapen) {
  Draft missing(llama);
  missing.tensors.erase("model.layers.1.mlp.up_proj.bias");
  expect_error(ErrorCode::bad_file, {"model.layers.1.mlp.up_proj.bias"}, [&] { missing.open(); });
  Draft misshapen(llama);
  misshapen.tensors["model.layers.2.self_attn.k_proj.weight"].first = {32, 24};
  expect_error(ErrorCode::mismatch, {"model.layers.2.self_attn.k_proj.weight", "[24, 32]", "[32, 24]"},
               [&] { misshapen.open(); });
}

TEST(Model, IgnoresOldFrequencyTensors) {
  Draft draft(llama);
  const std::string name = "model.layers.0.self_attn.rotary_emb.inv_freq";
  draft.tensors[name] = {{12}, std::vector<float>(12, 1.0f)};
  EXPECT_NO_THROW(draft.open());
  EXPECT_TRUE(is_derived_tensor(name));
  EXPECT_FALSE(is_derived_tensor("model.norm.weight"));
}

TEST(Model, AMissingHeadIsTiedOnlyWhenTheConfigIsSilent) {
  Draft draft(llama);
  draft.tensors.erase("lm_head.weight");
  expect_error(ErrorCode::bad_file, {"lm_head.weight"}, [&] { draft.open(); });
  draft.config.erase("tie_word_embeddings");
  const Model model = draft.open();
  EXPECT_TRUE(model.config().tied_embeddings);
  EXPECT_EQ(&model.head(), &model.embeddings());
  ASSERT_FALSE(model.config().warnings.empty());
  EXPECT_NE(model.config().warnings.back().find("lm_head"), std::string::npos);
}

TEST(Model, ATiedHeadWinsOverAStoredOne) {
  Draft draft(qwen3);
  draft.tensors["lm_head.weight"] = {{96, 32}, std::vector<float>(96 * 32, 7.0f)};
  const Model model = draft.open();
  EXPECT_EQ(&model.head(), &model.embeddings());
}

/// Packs every linear of `draft`, embeddings included, and puts the decoded values in the draft's place.
void write_packed(Draft& draft, const formats::Scheme& scheme, const std::filesystem::path& folder) {
  const auto& row = formats::scheme_row(scheme.family);
  checkpoint::QuantizationConfig quantization;
  quantization.method = "kbit";
  std::vector<io::PlannedTensor> plan;
  std::map<std::string, std::vector<std::byte>> bytes;
  const auto add = [&](io::PlannedTensor tensor, std::span<const std::byte> data) {
    bytes[tensor.name].assign(data.begin(), data.end());
    plan.push_back(std::move(tensor));
  };
  for (auto& [name, tensor] : draft.tensors) {
    auto& [shape, values] = tensor;
    if (shape.size() != 2) {
      add({name, DType::f32, shape}, bytes_of(values));
      continue;
    }
    const std::string linear = name.substr(0, name.size() - std::string_view(".weight").size());
    const auto packed = row.encode(scheme, values, shape[0], shape[1], formats::codebook("nf", scheme.bits));
    for (const auto& plane : packed.planes) {
      add({checkpoint::plane_name(linear, 0, plane.spec.role), plane.spec.dtype, plane.spec.shape},
          plane.bytes.bytes());
    }
    for (int64_t r = 0; r < shape[0]; ++r) {
      row.decode_row(packed, r, {values.data() + r * shape[1], static_cast<size_t>(shape[1])});
    }
    quantization.linears[linear] = {linear, shape[0], shape[1], DType::bf16, {{scheme, packed.layout}}};
  }
  io::CheckpointWriter writer(folder, plan, {});
  for (const auto& [name, data] : bytes) writer.write(name, data);
  writer.finish();
  io::Json config = draft.config;
  checkpoint::write_quantization_config(quantization, config);
  std::ofstream(folder / "config.json") << config.dump();
}

TEST(Model, PackedDecodesAsItsDecodedWeights) {
  for (const auto& source : {qwen3, llama}) {
    Draft draft(source);
    const test::TemporaryFolder folder;
    write_packed(draft, {.bits = 3}, folder.path());
    const Model packed = Model::open(folder.path());
    EXPECT_FALSE(packed.folder().quantization.linears.empty());
    const auto ids = test::ReferenceLogits(source / "reference.safetensors").ids();
    EXPECT_EQ(test::decode(packed, ids, {1 << 20}), test::decode(draft.open(), ids, {1 << 20}));
  }
}

}  // namespace
}  // namespace w4q::model
