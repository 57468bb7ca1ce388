// Models of architectures that w4q does not know: quantized, repacked and verified by names and shapes alone.
#include <fstream>
#include <map>
#include <set>

#include "checkpoint/folder.h"
#include "core/float_formats.h"
#include "core/rng.h"
#include "core/text.h"
#include "formats/scheme_registry.h"
#include "io/checkpoint.h"
#include "io/checkpoint_writer.h"
#include "io/files.h"
#include "made_checkpoint.h"
#include "model/architecture.h"
#include "program.h"
#include "small_model.h"

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

/// What the codes and scales of a linear stand for, by the formulas of docs/dialects.md; of a stack the first expert,
/// inputs first.
std::vector<float> stands_for(MadeCheckpoint& made, const std::string& path) {
  std::vector<float> values;
  const auto e2m1 = [&](const std::string& codes, const std::string& scales, size_t group, float whole, bool divides) {
    const auto bytes = made.values<uint8_t>(codes), stored = made.values<uint8_t>(scales);
    const bool power = whole == 0;
    for (size_t i = 0; i < bytes.size() * 2; ++i) {
      const uint8_t scale = stored[i / group];
      const float factor = power     ? std::ldexp(1.0f, scale - 127)
                           : divides ? f32_from_e4m3(scale) / whole
                                     : f32_from_e4m3(scale) * whole;
      values.push_back(e2m1_values[(bytes[i / 2] >> (i % 2 * 4)) & 15] * factor);
    }
  };
  if (made.tensors.contains(path + "_blocks")) {
    e2m1(path + "_blocks", path + "_scales", 32, 0, false);
    const Shape shape = made.tensors.at(path + "_blocks").shape;
    const auto n = static_cast<size_t>(shape[1]), k = static_cast<size_t>(shape[2] * 32);
    std::vector<float> turned(n * k);
    for (size_t i = 0; i < n * k; ++i) turned[i % k * n + i / k] = values[i];
    return turned;
  }
  const std::string weight = path + ".weight";
  if (made.tensors.contains(weight + "_global_scale")) {
    e2m1(weight + "_packed", weight + "_scale", 16, made.values<float>(weight + "_global_scale")[0], true);
  } else if (made.tensors.contains(weight + "_scale_2")) {
    e2m1(weight, weight + "_scale", 16, made.values<float>(weight + "_scale_2")[0], false);
  } else if (made.tensors.contains(weight + "_packed")) {
    e2m1(weight + "_packed", weight + "_scale", 32, 0, false);
  } else {
    const bool inverse = made.tensors.contains(weight + "_scale_inv");
    const std::string scales = weight + (inverse ? "_scale_inv" : "_scale");
    const bool halves = made.tensors.at(scales).dtype == DType::bf16;
    const auto cols = static_cast<size_t>(made.tensors.at(weight).shape[1]);
    const auto codes = made.values<uint8_t>(weight);
    for (size_t i = 0; i < codes.size(); ++i) {
      const size_t row = i / cols, col = i % cols, block = MadeWriter::block;
      const size_t at = inverse ? row / block * (cols / block) + col / block : halves ? row : 0;
      const float scale = halves ? f32_from_bf16(made.values<uint16_t>(scales)[at]) : made.values<float>(scales)[at];
      values.push_back(f32_from_e4m3(codes[i]) * scale);
    }
  }
  return values;
}

TEST_F(AnyModel, SmallFloatsBecomeTheWeightsThatTheyStandFor) {
  for (const Storage storage : small_storages) {
    const std::string name(to_string(storage)), model = path(name);
    MadeCheckpoint made = made_mixture(storage);
    made.write(model);
    run({"verify", model});
    run({"repack", model, "-o", path(name + "-f32"), "--to", "hf-f32"});
    run({"verify", path(name + "-f32"), "--base", model});
    const std::string layer = "model.language_model.layers.1.";
    const bool stacked = storage == Storage::mxfp4_stack;
    const std::string linear = layer + (stacked ? "mlp.experts.down_proj" : "mlp.experts.3.down_proj");
    const auto expected = stands_for(made, linear);
    const auto written = io::Checkpoint::open(path(name + "-f32"));
    const auto loaded = written.load(stacked ? linear : linear + ".weight");
    ASSERT_EQ(loaded->dtype, DType::f32) << name;
    EXPECT_EQ(loaded->shape, (stacked ? Shape{4, 64, 128} : Shape{128, 64})) << name;
    const std::span found(reinterpret_cast<const float*>(loaded->bytes.data()), 64 * 128);
    EXPECT_TRUE(std::ranges::equal(found, std::span(expected).first(64 * 128))) << name;

    const auto report = run({"repack", model, "-o", path(name + "-16"), "--to", "hf16", "--json"}).json();
    run({"verify", path(name + "-16"), "--base", model});
    int64_t changed = 0;
    for (const auto& tensor : report["tensors"]) changed += tensor["values_changed"].get<int64_t>();
    // Powers of two lose nothing; other scales do, and how many values that is is said.
    EXPECT_EQ(changed == 0, storage == Storage::mxfp4 || storage == Storage::mxfp4_stack) << name;
    const std::string notes = report["notes"].dump();
    EXPECT_EQ(notes.find(concat(changed, " values are not BF16")) != std::string::npos, changed > 0) << notes;
    for (const char* kept : {"mtp.fc.weight", "model.visual.blocks.1.attn.qkv.weight"}) {
      EXPECT_TRUE(
          std::ranges::equal(io::Checkpoint::open(path(name + "-16")).load(kept)->bytes, made.tensors.at(kept).bytes));
    }
  }
}

/// Powers of two and the values of E2M1 have a place in tables: nothing is rounded, whatever layout they go to.
void expect_same_values(const std::string& packed, const std::string& model, std::string_view scheme = "kbit4-b32-") {
  const auto ours = checkpoint::open_folder(packed), theirs = checkpoint::open_folder(model);
  int64_t linears = 0;
  for (const auto& [name, info] : theirs.tensors.tensors()) {
    if (theirs.tensors.stored_dtype(name) == info.dtype) continue;  // not decoded
    const auto* const plan = ours.quantization.find(name.substr(0, name.size() - 7));
    ASSERT_NE(plan, nullptr) << name;
    EXPECT_TRUE(formats::to_string(plan->passes.front().scheme).starts_with(scheme));
    const auto linear = checkpoint::load_canonical(ours.tensors, *plan);
    const auto expected = theirs.tensors.load(name);
    std::vector<float> row(static_cast<size_t>(plan->k));
    for (int64_t n = 0; n < plan->n; ++n) {
      formats::decode_linear_row(linear, n, row);
      const auto* const values = reinterpret_cast<const float*>(expected->bytes.data()) + n * plan->k;
      ASSERT_TRUE(std::ranges::equal(row, std::span(values, row.size()))) << name << " row " << n;
    }
    ++linears;
  }
  EXPECT_EQ(ours.quantization.linears.size(), static_cast<size_t>(linears));
  EXPECT_GT(linears, 0);
}

TEST_F(AnyModel, Mxfp4BecomesTablesOfTheSameValues) {
  for (const Storage storage : {Storage::mxfp4, Storage::mxfp4_stack}) {
    const std::string name(to_string(storage)), model = path(name);
    MadeCheckpoint made = made_mixture(storage);
    // One matrix with scales that span more octaves than E4M4 has, one far below it, and a block of zeros whose scale
    // is beyond all.
    const auto stored = made.names_with(storage == Storage::mxfp4 ? ".weight_scale" : "_scales");
    auto wide = made.values<uint8_t>(stored[0]), low = made.values<uint8_t>(stored[1]);
    wide[0] = 127 - 20, wide[1] = 127 + 10;
    for (uint8_t& scale : low) scale = static_cast<uint8_t>(scale - 20);
    auto zeros = made.values<uint8_t>(made.names_with(storage == Storage::mxfp4 ? ".weight_packed" : "_blocks")[1]);
    std::ranges::fill(zeros.first(16), uint8_t{0x80});
    low[0] = 0;
    made.write(model);
    run({"repack", model, "-o", path(name + "-w4q"), "--to", "w4q"});
    run({"repack", model, "-o", path(name + "-sm89"), "--target", "sm89"});
    expect_same_values(path(name + "-w4q"), model, "mxfp4");
    expect_same_values(path(name + "-sm89"), model);
    const auto verified = run({"verify", path(name + "-w4q"), "--base", model, "--no-limits"});
    EXPECT_NE(verified.out.find("weights"), std::string::npos) << verified.out;
    // And back to the bytes that it came of.
    const bool stacked = storage == Storage::mxfp4_stack;
    run({"repack", path(name + "-w4q"), "-o", path(name + "-back"), "--to",
         stacked ? "gpt-oss" : "compressed-tensors-float"});
    const auto back = io::Checkpoint::open(path(name + "-back"));
    EXPECT_EQ(back.tensors().size(), made.tensors.size());
    for (const auto& [tensor, stored] : made.tensors) {
      EXPECT_EQ(back.at(tensor).shape, stored.shape) << tensor;
      EXPECT_TRUE(std::ranges::equal(back.load(tensor)->bytes, stored.bytes)) << tensor;
    }
  }
}

/// A mixture whose gates and ups take turns: its experts in stacks, all else in 16 bit.
TEST_F(AnyModel, StacksOfGptOssAreWritten) {
  const fs::path model = path("m");
  write_small_model(model::architecture_row("gpt_oss"), model);
  run({"quantize", model, "-o", path("q"), "--scheme", "mxfp4", "--quality", "fast", "--to", "gpt-oss"});
  const auto written = io::Checkpoint::open(path("q"));
  const std::string experts = "model.layers.1.mlp.experts.";
  EXPECT_EQ(written.at(experts + "gate_up_proj_blocks").shape, (Shape{4, 192, 2, 16}));
  EXPECT_EQ(written.at(experts + "gate_up_proj_scales").shape, (Shape{4, 192, 2}));
  EXPECT_FALSE(written.contains(experts + "gate_up_proj"));
  EXPECT_EQ(written.at("model.layers.1.self_attn.q_proj.weight").dtype, DType::bf16);
  const auto verified = run({"verify", path("q"), "--base", model});
  EXPECT_NE(verified.out.find("weights"), std::string::npos) << verified.out;
  run({"verify", path("q"), "--for", "sglang,transformers"});
  // There and back.
  run({"repack", path("q"), "-o", path("w4q"), "--to", "w4q"});
  run({"verify", path("w4q"), "--base", model});
  run({"repack", path("w4q"), "-o", path("again"), "--to", "gpt-oss"});
  EXPECT_EQ(io::read_file(path("again") + "/model.safetensors"), io::read_file(path("q") + "/model.safetensors"));
  EXPECT_EQ(io::read_json(path("again") + "/config.json"), io::read_json(path("q") + "/config.json"));
}

TEST_F(AnyModel, StacksHoldExpertsAlone) {
  const fs::path model = path("m");
  write_small_model(model::architecture_row("gpt_oss"), model);
  run({"quantize", model, "-o", path("all"), "--scheme", "mxfp4"});
  const auto attention = run({"repack", path("all"), "-o", path("x"), "--to", "gpt-oss"}, 3);
  EXPECT_NE(attention.err.find("self_attn"), std::string::npos) << attention.err;
  run({"quantize", model, "-o", path("less"), "--scheme", "mxfp4", "--keep", "*.self_attn.*", "--keep",
       "*.down_proj.2"});
  const auto missing = run({"repack", path("less"), "-o", path("x"), "--to", "gpt-oss"}, 3);
  EXPECT_NE(missing.err.find("down_proj_blocks: expert 2 is not packed"), std::string::npos) << missing.err;
  EXPECT_FALSE(fs::exists(path("x")));
}

/// The published layout, whose logits another program computed.
TEST_F(AnyModel, GptOssGoesThereAndBack) {
  W4Q_NEEDS_SHARED_DATA();
  const fs::path families = shared_data() / "families";
  for (const char* name : {"gpt-oss", "gpt-oss-mxfp4"}) {
    fs::create_directories(path(name));
    for (const char* file : {"config.json", "model.safetensors"}) {
      fs::copy(families / name / file, fs::path(path(name)) / file);
    }
  }
  const std::string theirs = path("gpt-oss-mxfp4");
  run({"verify", theirs});
  run({"repack", theirs, "-o", path("w4q"), "--to", "w4q"});
  run({"repack", path("w4q"), "-o", path("back"), "--to", "gpt-oss"});
  const auto before = io::Checkpoint::open(theirs), after = io::Checkpoint::open(path("back"));
  EXPECT_EQ(before.tensors().size(), after.tensors().size());
  for (const auto& [tensor, info] : before.tensors()) {
    EXPECT_TRUE(std::ranges::equal(before.load(tensor)->bytes, after.load(tensor)->bytes)) << tensor;
  }
  run({"verify", path("back"), "--base", theirs, "--reference", families / "gpt-oss-mxfp4/reference.safetensors",
       "--max-diff", "1e-4"});
  run({"quantize", path("gpt-oss"), "-o", path("q"), "--scheme", "mxfp4", "--to", "gpt-oss"});
  run({"verify", path("q"), "--base", path("gpt-oss")});
}

TEST_F(AnyModel, GptOssBecomesTablesOfTheSameValues) {
  W4Q_NEEDS_SHARED_DATA();
  const fs::path model = path("gpt-oss");
  fs::create_directories(model);
  for (const char* file : {"config.json", "model.safetensors"}) {
    fs::copy(shared_data() / "families" / "gpt-oss-mxfp4" / file, model / file);
  }
  run({"repack", model, "-o", path("sm89"), "--target", "sm89"});
  expect_same_values(path("sm89"), model);
  run({"verify", path("sm89"), "--base", model});
  for (const auto& [name, info] : checkpoint::open_folder(path("sm89")).quantization.linears) {
    EXPECT_EQ(formats::to_string(info.passes.front().scheme), "kbit4-b32-e4m4") << name;
  }
}

TEST_F(AnyModel, WhatIsNotPackedCannotBeDecoded) {
  const std::string model = unseen_model();
  const auto result = run({"repack", model, "-o", path("x"), "--to", "hf16"}, 2);
  EXPECT_NE(result.err.find("holds nothing to decode"), std::string::npos) << result.err;
  const auto gguf = run({"repack", model, "-o", path("x.gguf"), "--to", "gguf"}, 3);
  EXPECT_NE(gguf.err.find("needs a model that w4q can decode"), std::string::npos) << gguf.err;
}

/// What stays in 16 bit is named as servers ask for it.
TEST_F(AnyModel, CompressedTensorsNamesWhatIsLeft) {
  const std::string model = unseen_model();
  run({"quantize", model, "-o", path("int4"), "--method", "rtn", "--scheme", "int4-g32-bf16"});
  run({"repack", path("int4"), "-o", path("ct"), "--to", "compressed-tensors"});
  const io::Json config = io::read_json(path("ct") + "/config.json");
  std::set<std::string> ignore;
  for (const auto& entry : config["quantization_config"]["ignore"]) ignore.insert(entry.get<std::string>());
  const std::string layer = "model.language_model.layers.";
  EXPECT_EQ(ignore,
            (std::set<std::string>{"lm_head", layer + "0.linear_attn.in_proj_a", layer + "0.linear_attn.in_proj_ba",
                                   layer + "0.mlp.gate", layer + "1.eh_proj", "model.visual.blocks.0.attn.qkv",
                                   "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.self_attn.qkv_proj"}));
  run({"verify", path("ct"), "--base", model});
}

/// Experts of a stack: other programs' formats have each by the name that readers know, gates and ups apart; 16 bit has
/// the stack again.
TEST_F(AnyModel, StackedExpertsGetTheNamesThatReadersKnow) {
  const fs::path model = path("stacked");
  write_small_model(model::architecture_row("qwen3_5_moe_text"), model);
  run({"quantize", model, "-o", path("int4"), "--method", "rtn", "--scheme", "int4-g32-bf16"});
  run({"repack", path("int4"), "-o", path("ct"), "--to", "compressed-tensors"});
  run({"verify", path("ct"), "--base", model});
  const auto written = io::Checkpoint::open(path("ct"));
  const std::string experts = "model.layers.1.mlp.experts.";
  for (const char* part : {"gate_proj", "up_proj", "down_proj"}) {
    EXPECT_TRUE(written.contains(concat(experts, "3.", part, ".weight_packed"))) << part;
  }
  EXPECT_FALSE(written.contains(experts + "gate_up_proj.3.weight_packed"));
  for (const char* from : {"int4", "ct"})
    run({"repack", path(from), "-o", path(concat(from, "-f32")), "--to", "hf-f32"});
  const auto stacks = io::Checkpoint::open(path("int4-f32")), apart = io::Checkpoint::open(path("ct-f32"));
  const auto whole = stacks.load(experts + "gate_up_proj");
  ASSERT_EQ(whole->shape, (Shape{4, 128, 64}));
  const auto half = whole->bytes.size() / 8;
  for (const auto& [part, place] : {std::pair{"2.gate_proj.weight", 4}, std::pair{"2.up_proj.weight", 5}}) {
    const auto one = apart.load(concat(experts, part));
    ASSERT_EQ(one->shape, (Shape{64, 64}));
    EXPECT_TRUE(std::ranges::equal(one->bytes, whole->bytes.subspan(static_cast<size_t>(place) * half, half))) << part;
  }
  run({"verify", path("int4-f32"), "--base", model});
}

/// Programs that know experts as stacks alone find them again in 16 bit, whatever the codes were and under whichever names.
TEST_F(AnyModel, StacksComeBackAsStacks) {
  for (const auto& [type, module, end] : {std::tuple{"gpt_oss", "mlp.experts.down_proj", ""},
                                          std::tuple{"granitemoe", "block_sparse_moe.output_linear", ".weight"}}) {
    const std::string stack = concat("model.layers.1.", module, end);
    const fs::path model = path(concat(type, "-model"));
    write_small_model(model::architecture_row(type), model);
    for (const char* scheme : {"int4-g32-bf16", "fp8-channel-bf16"}) {
      const bool integers = std::string_view(scheme).starts_with("int4");
      const std::string name = concat(type, integers ? "-int4" : "-fp8");
      run({"quantize", model, "-o", path(name), "--scheme", scheme, "--to",
           integers ? "compressed-tensors" : "compressed-tensors-float"});
      run({"repack", path(name), "-o", path(name + "-f32"), "--to", "hf-f32"});
      const auto source = io::Checkpoint::open(model), written = io::Checkpoint::open(path(name + "-f32"));
      ASSERT_TRUE(written.contains(stack)) << name;
      EXPECT_EQ(written.at(stack).shape, source.at(stack).shape) << name;
      EXPECT_EQ(written.tensors().size(), source.tensors().size()) << name;
      run({"verify", path(name + "-f32"), "--base", model});
    }
  }
}

/// What transformers loads of models whose experts are no linears there: attention packed, stacks as they were.
TEST_F(AnyModel, StacksThatAreKeptAreNotMissed) {
  const fs::path model = path("stacked");
  write_small_model(model::architecture_row("gpt_oss"), model);
  run({"quantize", model, "-o", path("int4"), "--method", "rtn", "--scheme", "int4-g32-bf16", "--keep", "*experts*"});
  run({"repack", path("int4"), "-o", path("ct"), "--to", "compressed-tensors"});
  run({"verify", path("ct"), "--base", model});
  EXPECT_TRUE(io::Checkpoint::open(path("ct")).contains("model.layers.1.mlp.experts.gate_up_proj"));
}

/// Rotations are folded into mixtures and delta nets, stacks among them, and what is kept is turned too.
TEST_F(AnyModel, MixturesAndDeltaNetsAreFolded) {
  for (const char* type : {"qwen3_5_moe_text", "gpt_oss"}) {
    const fs::path model = path(type);
    write_small_model(model::architecture_row(type), model);
    run({"quantize", model, "-o", path(concat(type, "-kept")), "--fold-rotations", "--keep", "*"});
    run({"verify", path(concat(type, "-kept")), "--base", model});
    run({"quantize", model, "-o", path(concat(type, "-k4")), "--fold-rotations", "--k", "4"});
    run({"verify", path(concat(type, "-k4")), "--base", model});
  }
}

TEST_F(AnyModel, EveryFamilyBesideTheRepository) {
  W4Q_NEEDS_SHARED_DATA();
  int folders = 0;
  for (const char* kind : {"families", "arch"}) {
    for (const auto& entry : fs::directory_iterator(shared_data() / kind)) {
      if (!fs::exists(entry.path() / "config.json")) continue;
      const std::string name = entry.path().filename().string(), model = path(name);
      fs::create_directories(model);
      for (const char* file : {"config.json", "model.safetensors"})
        fs::copy(entry.path() / file, fs::path(model) / file);
      run({"quantize", model, "-o", path(name + "-k4"), "--k", "4"});
      run({"repack", path(name + "-k4"), "-o", path(name + "-sm89"), "--target", "sm89"});
      run({"verify", path(name + "-sm89"), "--base", model});
      // Groups of 32 do not fill inputs of 16 and 48.
      const bool narrow = name == "gemma4" || name.starts_with("deepseek-v3");
      run({"quantize", model, "-o", path(name + "-int4"), "--method", "rtn", "--scheme",
           narrow ? "int4-g16-bf16" : "int4-g32-bf16"});
      run({"repack", path(name + "-int4"), "-o", path(name + "-packed"), "--target", "sm89"});
      run({"repack", path(name + "-packed"), "-o", path(name + "-ct"), "--to", "compressed-tensors"});
      run({"verify", path(name + "-ct"), "--base", model});
      ++folders;
    }
  }
  EXPECT_GE(folders, 40);
}

}  // namespace
}  // namespace w4q::test
