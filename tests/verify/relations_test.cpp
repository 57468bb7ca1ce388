// What weights that are stored as matrices say of each other: pairs of rows that turn together, what was never learnt, and
// the same of a model whose architecture is not known.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>

#include "core/rng.h"
#include "made_checkpoint.h"
#include "made_statistics.h"
#include "support.h"
#include "verify/contents/contents.h"
#include "verify/statistics/norms.h"
#include "verify/statistics/statistics.h"

namespace w4q::verify {
namespace {

using test::MadeCheckpoint;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

MadeCheckpoint tiny() { return MadeCheckpoint::of(test::testdata() / "w4q-llama-tiny"); }

/// Rows of heads of 64, as programs store them whose neighbouring rows turn together.
void put_pairs_in_turn(MadeCheckpoint& made, const std::string& name) {
  constexpr size_t head = 64;
  auto& tensor = made.tensors.at(name);
  const size_t rows = static_cast<size_t>(tensor.shape[0]), width = tensor.bytes.size() / rows;
  const auto before = tensor.bytes;
  for (size_t row = 0; row < rows; ++row) {
    const size_t in_head = row % head, to = row - in_head + (in_head % (head / 2)) * 2 + in_head / (head / 2);
    std::copy_n(before.begin() + static_cast<std::ptrdiff_t>(row * width), width,
                tensor.bytes.begin() + static_cast<std::ptrdiff_t>(to * width));
  }
}

TEST(Relations, RowsThatTurnTogether) {
  auto made = tiny();
  EXPECT_THAT(statistics_faults(made), IsEmpty());
  for (const char* role : {"q_proj", "k_proj"})
    put_pairs_in_turn(made, concat("model.layers.2.self_attn.", role, ".weight"));
  EXPECT_THAT(statistics_faults(made), Contains(HasSubstr("as heads whose neighbouring rows turn together")));
}

TEST(Relations, EmbeddingsThatWereNeverLearnt) {
  auto made = tiny();
  auto values = made.values<uint16_t>("model.embed_tokens.weight");
  for (size_t i = 0; i + 1 < values.size(); i += 2) {
    const double radius = std::sqrt(-2 * std::log((static_cast<double>(random_bits(3, i) >> 11) + 1) * 0x1p-53));
    const double angle = 2 * 3.14159265358979 * static_cast<double>(random_bits(4, i) >> 11) * 0x1p-53;
    values[i] = bf16_from_f32(static_cast<float>(0.02 * radius * std::cos(angle)));
    values[i + 1] = bf16_from_f32(static_cast<float>(0.02 * radius * std::sin(angle)));
  }
  EXPECT_THAT(statistics_faults(made), Contains(HasSubstr("embed_tokens.weight: its rows and columns")));
}

/// By names alone, where the architecture is none that is known.
TEST(Relations, OfAnUnknownArchitecture) {
  auto made = tiny();
  made.config["architectures"] = {"SomethingForCausalLM"};
  made.config["model_type"] = "something";
  EXPECT_THAT(statistics_faults(made), IsEmpty());
  std::swap(made.tensors.at("model.layers.1.mlp.down_proj.weight"),
            made.tensors.at("model.layers.3.mlp.down_proj.weight"));
  EXPECT_THAT(statistics_faults(made), Contains(HasSubstr("down_proj")));
}

/// Norms as large as their neighbours', but for one: a note, for models have such norms.
TEST(Relations, ANormOfAnotherSize) {
  MadeCheckpoint made;
  made.config = {{"architectures", {"SomethingForCausalLM"}}, {"model_type", "something"}, {"num_hidden_layers", 9}};
  for (int layer = 0; layer < 9; ++layer) {
    std::vector<uint16_t> values(128);
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = bf16_from_f32(0.3f + 0.05f * static_cast<float>(layer) + 0.001f * static_cast<float>(i));
    made.put(concat("model.layers.", layer, ".input_layernorm.weight"), DType::bf16, {128}, values);
  }
  EXPECT_THAT(statistics_faults(made), IsEmpty());
  for (auto& value : made.values<uint16_t>("model.layers.4.input_layernorm.weight"))
    value = bf16_from_f32(10 * f32_from_bf16(value));
  EXPECT_THAT(statistics_faults(made), IsEmpty());
  EXPECT_THAT(statistics_of(made).warnings, Contains(HasSubstr("layers.4.input_layernorm.weight: is")));
}

// ---- what config.json claims ----

std::vector<std::string> claim_faults(const MadeCheckpoint& made) {
  const test::TemporaryFolder folder;
  made.write(folder / "made");
  const auto check = check_contents({folder / "made", made.config, io::Checkpoint::open(folder / "made")});
  return check ? check->faults : std::vector<std::string>{};
}

TEST(Claims, SymAgreesWithZeroPoints) {
  MadeCheckpoint made;
  made.config["quantization_config"] = {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 32}, {"sym", true}};
  for (int layer = 0; layer < 6; ++layer) {
    made.put(concat("model.layers.", layer, ".mlp.up_proj.qzeros"), DType::i32, {1, 4},
             std::vector<uint32_t>(4, 0x77777777u));
  }
  EXPECT_THAT(claim_faults(made), IsEmpty());
  auto other = made;
  other.config["quantization_config"]["sym"] = false;
  EXPECT_THAT(claim_faults(other), IsEmpty());  // all programs read it
  other.values<uint32_t>("model.layers.3.mlp.up_proj.qzeros")[2] = 0x76777777u;
  EXPECT_THAT(claim_faults(other), IsEmpty());
  other.config["quantization_config"]["sym"] = true;
  EXPECT_THAT(claim_faults(other), Contains(HasSubstr("has zero points that differ")));
  other.config["quantization_config"].erase("quant_method");
  other.config["quantization_config"]["desc_act"] = false;
  EXPECT_THAT(claim_faults(other), Contains(HasSubstr("but without quant_method")));
}

TEST(Claims, CachesAndInputs) {
  auto made = test::made_mixture(test::Storage::fp8_channel);
  made.config["quantization_config"]["kv_cache_scheme"] = {{"dynamic", false}, {"num_bits", 8}, {"type", "float"}};
  EXPECT_THAT(claim_faults(made), Contains(HasSubstr("promises measured scales of the cache")));
  made.config["quantization_config"]["kv_cache_scheme"] = nullptr;
  for (const auto& name : made.names_with(".weight_scale"))
    made.put(name.substr(0, name.rfind('.')) + ".input_scale", DType::f32, {1}, std::vector<float>{0.02f});
  EXPECT_THAT(claim_faults(made), IsEmpty());
  made.values<float>(made.names_with("layers.1.self_attn.k_proj.input_scale").front())[0] = 50;
  EXPECT_THAT(claim_faults(made), Contains(HasSubstr("the two read the same")));
}

TEST(Claims, SizesOfAnUnknownArchitecture) {
  const auto made = test::made_mixture(test::Storage::bf16);
  EXPECT_THAT(claim_faults(made), IsEmpty());
  const auto with = [&](const char* key, const io::Json& value) {
    auto changed = made;
    (changed.config.contains("text_config") ? changed.config["text_config"] : changed.config)[key] = value;
    return claim_faults(changed);
  };
  EXPECT_THAT(with("hidden_size", 999), Contains(HasSubstr("says hidden_size 999")));
  EXPECT_THAT(with("num_experts_per_tok", 999), Contains(HasSubstr("chooses 999 of")));
  EXPECT_THAT(with("rms_norm_eps", 0.5), Contains(HasSubstr("has an eps of norms of 0.5")));
  auto twice = made;
  const auto gate = made.names_with("layers.1.mlp.experts.2.gate_proj.weight").front();
  const auto up = made.names_with("layers.1.mlp.experts.2.up_proj.weight").front();
  twice.tensors[up] = twice.tensors[gate];
  EXPECT_THAT(claim_faults(twice), Contains(HasSubstr("experts.2.up_proj holds the codes of")));
}

TEST(Claims, CodesOfZeroThroughout) {
  auto made = test::made_mixture(test::Storage::fp8_channel);
  for (auto& code : made.values<uint8_t>(made.names_with("layers.1.self_attn.o_proj.weight").front())) code = 0;
  EXPECT_THAT(claim_faults(made), Contains(HasSubstr("o_proj has codes of")));
}

}  // namespace
}  // namespace w4q::verify
