// What a module consists of, how it is named, and what its like in other layers says: each fault is named, and what is
// sound is not.
#include <gmock/gmock.h>

#include "core/rng.h"
#include "made_contents.h"
#include "verify/statistics/blocks.h"

namespace w4q::verify {
namespace {

using test::MadeCheckpoint;
using test::MadeWriter;
using test::Storage;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

const std::string text_layer = "model.language_model.layers.";

class ContentsModules : public MadeContents {
 protected:
  std::string said(const MadeCheckpoint& made) { return faults_of(headers_of(made)); }
};

MadeCheckpoint with_biases() {
  auto made = test::made_mixture(Storage::bf16);
  MadeWriter writer(made, Storage::bf16);
  made.config["vision_config"]["depth"] = 3;
  for (const int block : {0, 1, 2}) {
    const std::string path = concat("model.visual.blocks.", block, ".");
    writer.dense(path + "attn.qkv.weight", {96, 32});
    writer.dense(path + "attn.qkv.bias", {96});
    writer.dense(path + "norm1.weight", {32});
    writer.dense(path + "norm1.bias", {32});
  }
  return made;
}

TEST_F(ContentsModules, BiasesHaveWeights) {
  auto made = with_biases();
  EXPECT_EQ(said(made), "");
  auto lost = made;
  lost.tensors.erase("model.visual.blocks.1.norm1.weight");
  EXPECT_THAT(said(lost), HasSubstr("blocks.1.norm1.weight is missing: its bias is there"));
  // Buffers that are called so have no weight anywhere.
  MadeWriter(made, Storage::bf16).dense("model.language_model.layers.0.mlp.router.bias", {4});
  EXPECT_EQ(said(made), "");
}

/// A file around the text's that ties the head decides, whatever the text's says.
TEST_F(ContentsModules, HeadsThatTheOuterFileTies) {
  auto made = test::made_mixture(Storage::bf16);
  for (const auto& name : made.names_with("lm_head")) made.tensors.erase(name);
  made.config["text_config"]["tie_word_embeddings"] = false;
  made.config["tie_word_embeddings"] = true;
  EXPECT_EQ(said(made), "");
  made.config["tie_word_embeddings"] = false;
  EXPECT_THAT(said(made), HasSubstr("lm_head.weight is missing"));
  // A head of another name.
  const auto table = made.tensors.at(made.names_with("embed_tokens.weight").front());
  made.tensors["model.log_softmax.mlp.weight"] = table;
  EXPECT_EQ(said(made), "");
}

/// Where the file around the text's is silent, some classes tie whatever that says, and some do not heed it.
TEST_F(ContentsModules, HeadsOfTextsWhoseOuterFileIsSilent) {
  auto made = test::made_mixture(Storage::bf16);
  made.config.erase("tie_word_embeddings");
  made.config["text_config"]["tie_word_embeddings"] = true;
  EXPECT_EQ(said(made), "");  // a head of its own is there
  for (const auto& name : made.names_with("lm_head")) made.tensors.erase(name);
  made.config["text_config"]["tie_word_embeddings"] = false;
  EXPECT_THAT(said(made), HasSubstr("lm_head.weight is missing"));
  made.config["architectures"] = {"Mistral3ForConditionalGeneration"};
  EXPECT_EQ(said(made), "");
}

/// Tokens that are read and never said, those of pictures.
TEST_F(ContentsModules, TablesThatAreLongerThanTheHead) {
  auto made = test::made_mixture(Storage::bf16);
  const std::string name = made.names_with("embed_tokens.weight").front();
  const Shape shape = made.tensors.at(name).shape;
  MadeWriter(made, Storage::bf16).dense(name, {shape[0] + 8, shape[1]});
  EXPECT_THAT(said(made), HasSubstr("padded vocabulary"));
  made.config["text_config"]["model_type"] = "mllama_text_model";
  EXPECT_THAT(said(made), Not(HasSubstr("padded vocabulary")));
}

/// Three dimensions are no experts by themselves; a path that only stands in the middle of another leaves nothing out.
TEST_F(ContentsModules, StatesAndEntriesOfLists) {
  auto made = test::made_mixture(Storage::nvfp4);
  MadeWriter(made, Storage::bf16).dense(text_layer + "0.self_attn.slope_rate", {4, 2, 2});
  made.config["quantization_config"]["ignore"].push_back("mlp");
  EXPECT_EQ(said(made).find("slope_rate"), std::string::npos) << said(made);
  EXPECT_EQ(said(made).find("leaves it out by mlp"), std::string::npos) << said(made);
}

TEST_F(ContentsModules, BiasesFit) {
  auto made = with_biases();
  MadeWriter(made, Storage::bf16).dense("model.visual.blocks.1.attn.qkv.weight", {64, 32});
  EXPECT_THAT(said(made), HasSubstr("blocks.1.attn.qkv.bias has 96 values, its weight has shape [64, 32]"));
  // Stored inputs first, as some models store all.
  MadeWriter(made, Storage::bf16).dense("model.visual.blocks.1.attn.qkv.weight", {32, 96});
  EXPECT_THAT(said(made), Not(HasSubstr("values, its weight has shape")));
}

TEST_F(ContentsModules, NormsAreWide) {
  auto made = test::made_mixture(Storage::bf16);
  made.put(text_layer + "1.input_layernorm.weight", DType::f8_e4m3, {128}, std::vector<uint8_t>(128, 0x38));
  EXPECT_THAT(said(made), HasSubstr("layers.1.input_layernorm.weight has type F8_E4M3"));
}

TEST_F(ContentsModules, ScalesHaveOneType) {
  auto made = test::made_mixture(Storage::fp8_blocks);
  EXPECT_EQ(said(made), "");
  const auto scales = [&](const std::string& linear) { return text_layer + linear + ".weight_scale_inv"; };
  const std::string one = scales("1.mlp.experts.2.down_proj");
  const Shape shape = made.tensors.at(one).shape;
  const std::vector<uint16_t> halves(static_cast<size_t>(element_count(shape)), 0x1400);
  auto rounded = made;
  rounded.put(one, DType::f16, shape, halves);
  EXPECT_THAT(said(rounded), HasSubstr("experts.2.down_proj.weight_scale_inv has type F16, the scales of all other"));
  // Where two are so it is a way of writing.
  rounded.put(scales("0.mlp.experts.2.down_proj"), DType::f16, shape, halves);
  EXPECT_THAT(said(rounded), Not(HasSubstr("has type F16")));
}

TEST_F(ContentsModules, NamesAreTheModels) {
  const auto made = test::made_mixture(Storage::bf16);
  for (const char* wrapper : {"module.", "_orig_mod."}) {
    MadeCheckpoint wrapped{made.config, {}};
    for (const auto& [name, tensor] : made.tensors) wrapped.tensors.emplace(wrapper + name, tensor);
    EXPECT_THAT(said(wrapped), HasSubstr("in its name, as programs that train leave it")) << wrapper;
  }
}

TEST_F(ContentsModules, LayersForFurtherTokensStandRight) {
  const auto made = test::made_mixture(Storage::bf16);
  auto fc = made, key = made;
  MadeWriter(fc, Storage::bf16).dense("mtp.fc.weight", {256, 128});
  EXPECT_THAT(said(fc), HasSubstr("mtp.fc is transposed: it has shape [256, 128], [128, 256] expected"));
  MadeWriter(key, Storage::bf16).dense("mtp.layers.0.self_attn.k_proj.weight", {64, 128});
  EXPECT_EQ(said(key), "");
  MadeWriter(key, Storage::bf16).dense("mtp.layers.0.self_attn.k_proj.weight", {128, 64});
  EXPECT_THAT(said(key), HasSubstr("mtp.layers.0.self_attn.k_proj is transposed"));
}

/// An asterisk stands for anything in ModelOpt's lists, and for itself in those of compressed-tensors.
TEST_F(ContentsModules, AnAsteriskNamesNothing) {
  auto made = test::made_mixture(Storage::int4);
  EXPECT_EQ(said(made), "");
  made.config["quantization_config"]["ignore"].push_back("*mlp.gate*");
  EXPECT_THAT(said(made), HasSubstr("leaves out *mlp.gate*, and nothing has that name"));
}

/// Lists have a module's name in memory, files may have the one of an older release.
TEST_F(ContentsModules, ListsNameWhatFilesCallOtherwise) {
  for (const bool older : {false, true}) {
    auto made = test::made_mixture(Storage::bf16);
    MadeCheckpoint stored{test::made_mixture(Storage::fp8_channel).config, {}};
    for (const auto& [name, tensor] : made.tensors) {
      std::string other = name;
      if (older && name.starts_with("model.language_model.")) other = concat("language_model.model.", name.substr(21));
      if (older && name.starts_with("model.visual.")) other = name.substr(6);
      stored.tensors.emplace(other, tensor);
    }
    auto& quantization = stored.config["quantization_config"];
    quantization = {{"quant_method", "modelopt"}, {"quant_algo", "FP8"}};
    const auto says = [&](const char* entry) {
      quantization["ignore"] = {entry};
      return said(stored).find(concat("leaves out ", entry, ", and nothing has that name")) != std::string::npos;
    };
    for (const char* entry : {"model.visual*", "model.language_model.embed_tokens", "model.language_model.layers.0*",
                              "language_model.model.embed_tokens"}) {
      EXPECT_FALSE(says(entry)) << entry << " " << older;
    }
    for (const char* entry :
         {"model.visual_tower*", "model.language_model.embeds", "language_model.model.embeds", "model.projector*"}) {
      EXPECT_TRUE(says(entry)) << entry << " " << older;
    }
  }
}

/// Six layers of four experts, whose inner size is another one from the third layer on.
MadeCheckpoint deep_mixture(Storage storage, int64_t inner = 64) {
  MadeCheckpoint made = test::made_mixture(storage);
  MadeWriter writer(made, storage);
  for (int layer = 2; layer < 6; ++layer) {
    const std::string path = concat(text_layer, layer, ".");
    for (const char* norm : {"input_layernorm.weight", "post_attention_layernorm.weight"})
      writer.dense(path + norm, {128});
    writer.fused(path + "self_attn.", {{"q_proj", {128, 128}}, {"k_proj", {64, 128}}, {"v_proj", {64, 128}}});
    writer.fused(path + "self_attn.", {{"o_proj", {128, 128}}});
    writer.dense(path + "mlp.gate.weight", {4, 128});
    for (int expert = 0; expert < 4; ++expert) {
      writer.fused(concat(path, "mlp.experts.", expert, "."), {{"gate_proj", {inner, 128}}, {"up_proj", {inner, 128}}});
      writer.fused(concat(path, "mlp.experts.", expert, "."), {{"down_proj", {128, inner}}});
    }
    if (made.config.contains("quantization_config") && made.config["quantization_config"].contains("ignore"))
      made.config["quantization_config"]["ignore"].push_back(path + "mlp.gate");
  }
  made.config["text_config"]["num_hidden_layers"] = 6;
  return made;
}

/// The first expert of a mixture in the place of all.
void repeat_first(MadeCheckpoint& made, int layer) {
  const std::string experts = concat(text_layer, layer, ".mlp.experts.");
  for (const auto& name : made.names_with(experts + "0.")) {
    for (const int expert : {1, 2, 3}) {
      std::string other = name;
      made.tensors[other.replace(experts.size(), 1, std::to_string(expert))] = made.tensors.at(name);
    }
  }
}

/// The first half of a router's rows in the place of the second.
void repeat_router(MadeCheckpoint& made, int layer) {
  auto& bytes = made.tensors.at(concat(text_layer, layer, ".mlp.gate.weight")).bytes;
  const auto half = bytes.begin() + static_cast<std::ptrdiff_t>(bytes.size() / 2);
  std::copy(bytes.begin(), half, half);
}

TEST_F(ContentsModules, OneMixtureOfOneExpert) {
  for (const Storage storage : {Storage::int4, Storage::bf16, Storage::nvfp4}) {
    auto made = deep_mixture(storage);
    EXPECT_EQ(said(made), "") << test::to_string(storage);
    repeat_first(made, 3);
    EXPECT_THAT(said(made), HasSubstr("layers.3.mlp.experts.2.down_proj holds the codes of"))
        << test::to_string(storage);
    // A mixture that was made of one MLP is so in all layers.
    for (int layer = 0; layer < 6; ++layer) repeat_first(made, layer);
    EXPECT_THAT(said(made), Not(HasSubstr("holds the codes of"))) << test::to_string(storage);
  }
}

/// The experts of one of two ranks, twice in all layers: their routers tell them apart.
TEST_F(ContentsModules, ExpertsOfOneRankTwice) {
  for (const Storage storage : {Storage::int4, Storage::bf16, Storage::nvfp4}) {
    auto made = deep_mixture(storage);
    for (int layer = 0; layer < 6; ++layer) {
      const std::string experts = concat(text_layer, layer, ".mlp.experts.");
      for (const int expert : {0, 1}) {
        for (const auto& name : made.names_with(concat(experts, expert, "."))) {
          std::string other = name;
          made.tensors[other.replace(experts.size(), 1, std::to_string(expert + 2))] = made.tensors.at(name);
        }
      }
    }
    EXPECT_THAT(said(made), HasSubstr("layers.3.mlp.experts.2.down_proj holds the codes of"))
        << test::to_string(storage);
    // With the rows of their router a mixture was made of them.
    for (int layer = 0; layer < 6; ++layer) repeat_router(made, layer);
    EXPECT_THAT(said(made), Not(HasSubstr("holds the codes of"))) << test::to_string(storage);
  }
}

TEST_F(ContentsModules, RowsOfARouterTwice) {
  auto made = deep_mixture(Storage::bf16);
  repeat_router(made, 2);
  EXPECT_THAT(said(made), HasSubstr("layers.2.mlp.gate has the rows of the first half of its experts twice"));
}

/// A fifth of the blocks of a layer's experts, with their scales.
TEST_F(ContentsModules, BlocksThatWereRoundedToNothing) {
  auto made = deep_mixture(Storage::nvfp4, 256);
  EXPECT_EQ(said(made), "");
  const auto emptied = [&](const std::vector<int>& layers, auto is_chosen) {
    auto changed = made;
    for (const int layer : layers) {
      for (int expert = 0; expert < 4; ++expert) {
        const std::string path = concat(text_layer, layer, ".mlp.experts.", expert, ".up_proj");
        auto codes = changed.values<uint8_t>(path + ".weight_packed");
        auto scales = changed.values<uint8_t>(path + ".weight_scale");
        for (size_t block = 0; block < scales.size(); ++block) {
          if (!is_chosen(block)) continue;
          scales[block] = 0;
          std::ranges::fill(codes.subspan(8 * block, 8), uint8_t{0});
        }
      }
    }
    return said(changed);
  };
  const auto scattered = [](size_t block) { return random_uniform(5, block) < 0.2; };
  EXPECT_THAT(emptied({3}, scattered), HasSubstr("layers.3.mlp.experts.2.up_proj has neither scale nor codes in 2"));
  // Rows and columns that were taken out, and a model that is so in all layers.
  EXPECT_EQ(emptied({3}, [](size_t block) { return block / 8 % 5 == 0; }), "");
  EXPECT_EQ(emptied({3}, [](size_t block) { return block % 8 == 2; }), "");
  EXPECT_EQ(emptied({2, 3, 4, 5}, scattered), "");
}

/// One layer's experts have other scales, and are more than one in ten of a small model's.
TEST(MixtureBlocks, AreHeldAgainstThoseOfOtherLayers) {
  const auto subjects = [](int wrong) {
    std::vector<BlockSubject> made;
    for (int layer = 0; layer < 8; ++layer) {
      for (int expert = 0; expert < 8; ++expert) {
        BlockSubject one{
            concat("model.layers.", layer, ".mlp.experts.", expert, ".up_proj"), "int4-g32-f16 0", "up_proj", {}};
        one.figures.blocks = 1000, one.figures.scale_spread = 0.3;
        one.figures.match = {layer < wrong ? 0.01 : 0.95, 0.02};
        made.push_back(std::move(one));
      }
    }
    return made;
  };
  EXPECT_THAT(block_faults(subjects(0)), IsEmpty());
  EXPECT_THAT(block_faults(subjects(1)), SizeIs(8));
  // Half of a model's scales say nothing of the other half.
  EXPECT_THAT(block_faults(subjects(4)), IsEmpty());
}

/// Eight weights of one role, of which `one` is the last.
std::vector<BlockSubject> beside_sound(const BlockFigures& one, bool all) {
  std::vector<BlockSubject> made;
  for (int layer = 0; layer < 8; ++layer) {
    BlockSubject subject{concat("model.layers.", layer, ".mlp.up_proj"), "int4-g32-f16 0", "up_proj", {}};
    subject.figures.blocks = 4096, subject.figures.scale_spread = 0.3, subject.figures.match = {1, 0.02};
    subject.figures.size = 0.02;
    if (all || layer == 7) subject.figures = one;
    made.push_back(std::move(subject));
  }
  return made;
}

TEST(ScalesOfBlocks, ThatWereAppliedToThemselves) {
  BlockFigures squared;
  squared.blocks = 4096, squared.scale_spread = 0.6, squared.match = {1.95, 0.03}, squared.size = 1e-4;
  EXPECT_THAT(block_faults(beside_sound(squared, false)), SizeIs(1));
  EXPECT_THAT(block_faults(beside_sound(squared, true)), SizeIs(8));
  EXPECT_THAT(join(block_faults(beside_sound(squared, true))), HasSubstr("they are squares of scales"));
  squared.size = 0.01;  // as folded scales of a great range leave one
  EXPECT_THAT(block_faults(beside_sound(squared, false)), IsEmpty());
  EXPECT_THAT(block_faults(beside_sound(squared, true)), IsEmpty());
  squared.size = 1e-4;
  squared.match = {1.7, 0.03};  // within five standard errors of what sound ones may have
  EXPECT_THAT(block_faults(beside_sound(squared, false)), IsEmpty());
}

TEST(ScalesOfBlocks, ThatAreOneNumber) {
  BlockFigures even;
  even.blocks = 4096, even.scale_spread = 0, even.histogram = std::vector<double>(16, 1.0 / 16);
  EXPECT_THAT(join(block_faults(beside_sound(even, false))), HasSubstr("all scales of its 4096 groups are one number"));
  // Weights of one size throughout.
  EXPECT_THAT(block_faults(beside_sound(even, true)), IsEmpty());
}

}  // namespace
}  // namespace w4q::verify
