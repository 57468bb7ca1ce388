// Models of architectures that w4q does not know: quantized, repacked and verified by names and shapes alone.
#include <fstream>
#include <map>

#include "checkpoint/folder.h"
#include "core/float_formats.h"
#include "core/rng.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "io/checkpoint.h"
#include "io/checkpoint_writer.h"
#include "io/files.h"
#include "program.h"

namespace w4q::test {
namespace {

namespace fs = std::filesystem;

class AnyModel : public OnBundledModel {
 protected:
  static ProgramResult run(std::vector<std::string> arguments, int status = 0) {
    arguments.emplace_back("--quiet");
    auto result = run_w4q(arguments);
    EXPECT_EQ(result.status, status) << join(arguments, " ") << "\n" << result.out << result.err;
    return result;
  }

  static void write_config(const fs::path& folder, const io::Json& config) {
    std::ofstream(folder / "config.json") << config.dump(2);
  }

  /// A wrapped mixture with a tower, a head for further tokens and what else is no linear of a layer.
  std::string unseen_model() const {
    const std::map<std::string, Shape> shapes = {
        {"lm_head.weight", {96, 64}},
        {"model.language_model.embed_tokens.weight", {96, 64}},
        {"model.language_model.layers.0.input_layernorm.weight", {64}},
        {"model.language_model.layers.0.linear_attn.conv1d.weight", {64, 1, 4}},
        {"model.language_model.layers.0.linear_attn.in_proj_a.weight", {4, 64}},
        {"model.language_model.layers.0.linear_attn.in_proj_qkv.weight", {96, 64}},
        {"model.language_model.layers.0.linear_attn.out_proj.weight", {64, 32}},
        {"model.language_model.layers.0.mlp.experts.0.down_proj.weight", {64, 32}},
        {"model.language_model.layers.0.mlp.experts.1.down_proj.weight", {64, 32}},
        {"model.language_model.layers.0.mlp.gate.weight", {2, 64}},
        {"model.language_model.layers.0.mlp.stacked.gate_up_proj", {2, 64, 64}},
        {"model.language_model.layers.0.mlp.stacked.down_proj", {2, 32, 64}},
        {"model.language_model.layers.1.eh_proj.weight", {64, 128}},
        {"model.visual.blocks.0.attn.qkv.weight", {96, 32}},
        {"mtp.layers.0.self_attn.q_proj.weight", {64, 64}},
    };
    std::vector<io::PlannedTensor> planned;
    for (const auto& [name, shape] : shapes) planned.push_back({name, DType::bf16, shape});
    const fs::path folder = path("unseen");
    fs::create_directories(folder);
    io::CheckpointWriter writer(folder, planned, {});
    uint64_t seed = 0;
    for (const auto& [name, shape] : shapes) {
      std::vector<uint16_t> values(static_cast<size_t>(element_count(shape)));
      ++seed;
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = bf16_from_f32(static_cast<float>(random_uniform(seed, i) - 0.5));
      }
      writer.write(name, bytes_of(values));
    }
    writer.finish();
    write_config(folder, {{"architectures", {"UnseenForConditionalGeneration"}},
                          {"model_type", "unseen"},
                          {"text_config", {{"num_hidden_layers", 1}, {"num_experts", 2}, {"hidden_size", 64}}}});
    return folder.string();
  }

  /// The bundled model under a name that nobody knows.
  std::string renamed_model() const {
    const std::string folder = copy_bundled_model(path("renamed"));
    io::Json config = io::read_json(folder + "/config.json");
    config["architectures"] = {"UnseenForCausalLM"};
    config["model_type"] = "unseen";
    write_config(folder, config);
    return folder;
  }
};

void expect_same_tensors(const std::string& a, const std::string& b) {
  const auto ours = io::Checkpoint::open(a), theirs = io::Checkpoint::open(b);
  ASSERT_EQ(ours.tensors().size(), theirs.tensors().size());
  for (const auto& [name, info] : theirs.tensors()) {
    ASSERT_TRUE(ours.contains(name)) << name;
    const auto left = ours.load_stored(name), right = theirs.load_stored(name);
    EXPECT_TRUE(std::ranges::equal(left->bytes, right->bytes)) << name;
  }
}

TEST_F(AnyModel, OfAKnownOneTheBytesAreTheSame) {
  const std::string renamed = renamed_model();
  for (const std::vector<std::string>& options :
       std::vector<std::vector<std::string>>{{"--k", "4"},
                                             {"--method", "rtn", "--scheme", "int4-g128-f16-asym", "--lm-head"},
                                             {"--k", "3", "--embeddings"}}) {
    const std::string name = join(options, "");
    quantize(name, options);
    std::vector<std::string> arguments{"quantize", renamed, "-o", path(name + "-renamed")};
    arguments.insert(arguments.end(), options.begin(), options.end());
    run(arguments);
    expect_same_tensors(path(name + "-renamed"), path(name));
  }
}

TEST_F(AnyModel, LinearsOfLayersArePackedAndTheRestStays) {
  const std::string model = unseen_model();
  const auto plan = run({"quantize", model, "-o", path("k4"), "--k", "4", "--dry-run", "--json"}).json();
  std::map<std::string, std::string> why;
  std::vector<std::string> packed;
  for (const auto& tensor : plan["tensors"]) {
    if (tensor["scheme"].is_string()) packed.push_back(tensor["name"]);
    if (tensor.contains("why")) why[tensor["name"]] = tensor["why"];
  }
  const std::string layer = "model.language_model.layers.0.";
  EXPECT_EQ(packed, (std::vector<std::string>{
                        layer + "linear_attn.in_proj_qkv.weight", layer + "linear_attn.out_proj.weight",
                        layer + "mlp.experts.0.down_proj.weight", layer + "mlp.experts.1.down_proj.weight",
                        layer + "mlp.stacked.down_proj.0.weight", layer + "mlp.stacked.down_proj.1.weight",
                        layer + "mlp.stacked.gate_up_proj.0.weight", layer + "mlp.stacked.gate_up_proj.1.weight"}));
  EXPECT_EQ(why[layer + "mlp.gate.weight"], "router");
  EXPECT_EQ(why[layer + "linear_attn.conv1d.weight"], "3 dimensions");
  EXPECT_EQ(why["mtp.layers.0.self_attn.q_proj.weight"], "predicts further tokens");
  EXPECT_EQ(why["model.language_model.layers.1.eh_proj.weight"], "predicts further tokens");
  EXPECT_EQ(why["lm_head.weight"], "head: --lm-head");

  run({"quantize", model, "-o", path("k4"), "--k", "4"});
  run({"repack", path("k4"), "-o", path("sm89"), "--target", "sm89"});
  for (const char* name : {"k4", "sm89"}) {
    const auto kept = io::Checkpoint::open(path(name)), all = io::Checkpoint::open(model);
    for (const auto& [tensor, info] : all.tensors()) {
      if (std::ranges::find(packed, tensor) != packed.end() || tensor.find("stacked") != std::string::npos) continue;
      ASSERT_TRUE(kept.contains(tensor)) << tensor;
      EXPECT_TRUE(std::ranges::equal(kept.load(tensor)->bytes, all.load(tensor)->bytes)) << tensor;
    }
    const auto verified = run({"verify", path(name), "--base", model});
    EXPECT_NE(verified.out.find("verified: digests, base, structure, codes, finite, statistics, weights"),
              std::string::npos)
        << verified.out;
    EXPECT_NE(verified.out.find("judged by names and shapes"), std::string::npos) << verified.out;
  }
}

/// Inputs first: an expert that is packed is the transpose of its slice, whichever tensor of the mixture tells it.
TEST_F(AnyModel, StackedExpertsArePackedOneByOne) {
  const std::string model = unseen_model();
  run({"quantize", model, "-o", path("int8"), "--method", "rtn", "--scheme", "int8-g32-f32"});
  run({"verify", path("int8"), "--base", model});
  const std::string stack = "model.language_model.layers.0.mlp.stacked.gate_up_proj";
  const auto whole = io::Checkpoint::open(model);
  const auto stored = whole.load(stack);
  const auto folder = checkpoint::open_folder(path("int8"));
  const auto* const info = folder.quantization.find(stack + ".1");
  ASSERT_NE(info, nullptr);
  const auto expert = checkpoint::load_canonical(folder.tensors, *info);
  const auto* const from = reinterpret_cast<const uint16_t*>(stored->bytes.data());
  std::vector<float> values(64);
  for (size_t row = 0; row < 64; ++row) {
    formats::decode_linear_row(expert, static_cast<int64_t>(row), values);
    for (size_t col = 0; col < 64; ++col) {
      // Half a step of 8 bits over magnitudes of at most 0.5.
      ASSERT_NEAR(values[col], f32_from_bf16(from[(64 + col) * 64 + row]), 0.5 / 254 * 1.01) << row << " " << col;
    }
  }
}

TEST_F(AnyModel, AStackThatIsKeptStaysOneTensor) {
  const std::string model = unseen_model();
  run({"quantize", model, "-o", path("kept"), "--k", "4", "--keep", "*.stacked.*"});
  const std::string stack = "model.language_model.layers.0.mlp.stacked.down_proj";
  EXPECT_TRUE(io::Checkpoint::open(path("kept")).contains(stack));
  EXPECT_FALSE(io::Checkpoint::open(path("kept")).contains(stack + ".0.weight"));
  run({"verify", path("kept"), "--base", model});
}

TEST_F(AnyModel, ARecipeMayNameWhatIsLeft) {
  const std::string model = unseen_model();
  std::ofstream(path("recipe.json")) << R"({"rules": [{"match": "mtp.*", "scheme": "kbit4-b32-e4m4"}]})";
  run({"quantize", model, "-o", path("mtp"), "--recipe", path("recipe.json")});
  EXPECT_TRUE(io::Checkpoint::open(path("mtp")).contains("mtp.layers.0.self_attn.q_proj.0.codes"));
  run({"verify", path("mtp"), "--base", model});
}

TEST_F(AnyModel, FaultsAreNamedAllTheSame) {
  const std::string model = unseen_model();
  run({"quantize", model, "-o", path("k4"), "--k", "4"});
  const std::string other = path("other");
  fs::copy(model, other, fs::copy_options::recursive);
  // The base has a tensor that the candidate lacks, and another value of one that was kept.
  std::fstream stream(other + "/model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
  stream.seekp(-1, std::ios::end);
  stream.put('\x7f');
  stream.close();
  const auto changed = run({"verify", path("k4"), "--base", other}, 1);
  EXPECT_NE(changed.out.find("mtp.layers.0.self_attn.q_proj.weight was kept, but its bytes differ"), std::string::npos)
      << changed.out;
}

TEST_F(AnyModel, WhatNeedsADecoderSaysSo) {
  const std::string model = renamed_model();
  const std::string text = (fs::path(bundled_model()) / "own" / "selfgen.txt").string();
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"quantize", model, "-o", path("x"), "--k", "4", "--quality", "good", "--calib", text},
           {"quantize", model, "-o", path("x"), "--k", "4", "--fold-rotations"},
           {"calibrate", model, "-o", path("x"), "--text", text},
           {"verify", model, "--ppl", text},
           {"generate", model, "--prompt", "a"}}) {
    const auto result = run(arguments, 3);
    EXPECT_NE(result.err.find("needs a model that w4q can decode"), std::string::npos) << result.err;
    EXPECT_FALSE(fs::exists(path("x")));
  }
}

/// FP8 in blocks, MXFP4, NVFP4, INT4: read as the weights that they stand for, which another program's logits confirm.
TEST_F(AnyModel, LowPrecisionSourcesBesideTheRepository) {
  W4Q_NEEDS_SHARED_DATA();
  for (const char* name : {"qwen3-fp8", "deepseek-v3-fp8", "gpt-oss-mxfp4", "qwen3-nvfp4-ct", "qwen3-int4-ct"}) {
    const fs::path model = path(concat(name, "-source"));
    fs::create_directories(model);
    for (const char* file : {"config.json", "model.safetensors"}) {
      fs::copy(shared_data() / "families" / name / file, model / file);
    }
    run({"quantize", model, "-o", path(name), "--k", "4"});
    run({"repack", path(name), "-o", path(concat(name, "-sm89")), "--target", "sm89"});
    run({"verify", path(concat(name, "-sm89")), "--base", model});
    if (std::string_view(name).starts_with("qwen3")) {
      const fs::path reference = shared_data() / "families" / name / "reference.safetensors";
      run({"verify", model, "--reference", reference, "--max-diff", "1e-4"});
    }
  }
}

TEST_F(AnyModel, EveryFamilyBesideTheRepository) {
  W4Q_NEEDS_SHARED_DATA();
  int families = 0;
  for (const auto& entry : fs::directory_iterator(shared_data() / "families")) {
    if (!fs::exists(entry.path() / "config.json")) continue;
    if (io::read_json(entry.path() / "config.json").contains("quantization_config")) continue;
    const std::string model = entry.path().string(), name = entry.path().filename().string();
    run({"quantize", model, "-o", path(name), "--k", "4"});
    run({"repack", path(name), "-o", path(name + "-sm89"), "--target", "sm89"});
    run({"verify", path(name + "-sm89"), "--base", model});
    ++families;
  }
  EXPECT_GE(families, 29);
}

}  // namespace
}  // namespace w4q::test
