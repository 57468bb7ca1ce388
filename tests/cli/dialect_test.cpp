// Other programs' checkpoints as a user meets them: every dialect made and read, what is refused, and the audit.
#include <algorithm>
#include <cstring>
#include <map>

#include "core/buffer.h"
#include "io/checkpoint.h"
#include "io/checkpoint_writer.h"
#include "io/files.h"
#include "io/output.h"
#include "program.h"
#include "small_model.h"

namespace w4q::test {
namespace {

class Dialect : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder;
    ASSERT_EQ(quantize("asym", {"--scheme", "int4-g128-f16-asym"}).status, 0);
    ASSERT_EQ(quantize("sym", {"--scheme", "int4-g128-f16"}).status, 0);
    // Marlin's words come in 256 outputs, k_proj and v_proj have 128.
    ASSERT_EQ(quantize("wide", {"--scheme", "int4-g128-f16", "--keep", "*.k_proj", "--keep", "*.v_proj"}).status, 0);
    ASSERT_EQ(repack("asym", "awq", "awq-gemm").status, 0);
  }
  static void TearDownTestSuite() { delete folder_; }

  static std::string path(const std::string& name) { return (*folder_ / name).string(); }
  static ProgramResult quantize(const std::string& name, std::vector<std::string> more) {
    more.insert(more.begin(), {"quantize", bundled_model(), "-o", path(name), "--method", "rtn", "--quiet"});
    return run_w4q(more);
  }
  static ProgramResult repack(const std::string& from, const std::string& to, const std::string& dialect,
                              std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"repack", path(from), "-o", path(to), "--to", dialect, "--quiet", "--overwrite"});
    return run_w4q(more);
  }
  static ProgramResult verify(const std::string& name, bool with_base = false) {
    std::vector<std::string> arguments{"verify", path(name), "--quiet"};
    if (with_base) arguments.insert(arguments.end(), {"--base", bundled_model()});
    return run_w4q(arguments);
  }
  static void expect_part(const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in\n" << text;
  }

  static inline TemporaryFolder* folder_ = nullptr;
};

TEST_F(Dialect, EveryOneThereAndBack) {
  const std::pair<const char*, const char*> cases[] = {
      {"awq-gemm", "asym"},  {"awq-gemv", "asym"}, {"awq-gemv-fast", "asym"},          {"awq-marlin", "wide"},
      {"gptq-v1", "sym"},    {"gptq-v2", "asym"},  {"compressed-tensors-0.17", "sym"}, {"marlin", "wide"},
      {"auto-round", "sym"}, {"w4q", "asym"},      {"compressed-tensors", "asym"}};
  for (const auto& [dialect, from] : cases) {
    SCOPED_TRACE(dialect);
    const std::string there = std::string("there-") + dialect, back = std::string("back-") + dialect;
    const auto made = repack(from, there, dialect);
    ASSERT_EQ(made.status, 0) << made.err;
    expect_part(made.out, "codes equal 100 %, zeros equal, scales equal over all linears");
    ASSERT_EQ(repack(there, back, "w4q").status, 0);
    EXPECT_EQ(io::read_file(path(back) + "/model.safetensors"), io::read_file(path(from) + "/model.safetensors"));
  }
}

TEST_F(Dialect, QuantizeToADialectIsTheSameInOneStep) {
  const auto made = quantize("direct", {"--scheme", "int4-g128-f16-asym", "--to", "awq-gemm"});
  ASSERT_EQ(made.status, 0) << made.err;
  expect_part(made.out, "codes equal 100 %, zeros equal, scales equal over all linears");
  for (const char* file : {"/model.safetensors", "/config.json"}) {
    EXPECT_EQ(io::read_file(path("direct") + file), io::read_file(path("awq") + file)) << file;
  }
  expect_part(quantize("direct", {"--scheme", "int4-g128-f16-asym", "--to", "awq-gemm"}).err, "--overwrite");
  EXPECT_EQ(quantize("never", {"--scheme", "int4-g128-f16-asym", "--to", "awk"}).status, 2);
  EXPECT_EQ(quantize("never", {"--scheme", "int3-g128-f16", "--to", "awq-gemm"}).status, 3);
  for (const auto& entry : std::filesystem::directory_iterator(folder_->path())) {
    const std::string name = entry.path().filename().string();
    EXPECT_TRUE(name.find("never") == std::string::npos && name.find("packed") == std::string::npos) << name;
  }
}

TEST_F(Dialect, RefusalsSayWhyAndWhatToDo) {
  ASSERT_EQ(quantize("three", {"--scheme", "int3-g128-f16"}).status, 0);
  expect_part(repack("sym", "never", "marlin").err, "its outputs come in multiples of 256, this linear has 128");
  const auto refused = repack("three", "never", "awq-gemm");
  EXPECT_EQ(refused.status, 3) << refused.err;
  for (const char* part : {"model.layers.0.mlp.down_proj: awq-gemm cannot hold int3-g128-f16", "codes of 3 bits",
                           "--allow-lossy rounds the weights anew"}) {
    expect_part(refused.err, part);
  }
  EXPECT_FALSE(std::filesystem::exists(path("never")));
  const auto lossy = repack("three", "lossy", "awq-gemm", {"--allow-lossy"});
  EXPECT_EQ(lossy.status, 0) << lossy.err;
  expect_part(lossy.out, "relative error");
  expect_part(lossy.out, "NOT LOSSLESS: 28 linears were changed (--allow-lossy)");
}

/// An expert of a stack is left in 16 bit with all of it: its own name is a number.
TEST_F(Dialect, StacksAreLeftAsAWhole) {
  write_small_model(model::architecture_row("gpt_oss"), path("stacks"));
  const auto refused = run_w4q({"quantize", path("stacks"), "-o", path("never"), "--scheme", "int4-g128-f16", "--to",
                                "compressed-tensors", "--quiet"});
  EXPECT_EQ(refused.status, 3) << refused.out;
  expect_part(refused.err, "experts.down_proj.0: compressed-tensors cannot hold");
  expect_part(refused.err, "--keep '*.down_proj.*'");
}

TEST_F(Dialect, InputsThatCannotBeConverted) {
  const auto unknown = repack("asym", "never", "awq");
  EXPECT_EQ(unknown.status, 2) << unknown.err;
  expect_part(unknown.err, "awq-gemm");
  EXPECT_EQ(repack("nothing", "never", "awq-gemm").status, 3);
  const auto same = repack("asym", "asym", "awq-gemm");
  EXPECT_EQ(same.status, 2) << same.err;
  expect_part(same.err, "is the input");
  EXPECT_EQ(run_w4q({"repack", path("asym"), "-o", path("awq"), "--to", "gptq-v2", "--quiet"}).status, 2);  // it exists
}

TEST_F(Dialect, CleanCheckpointsPassTheAudit) {
  for (const bool with_base : {false, true}) {
    const auto clean = verify("awq", with_base);
    EXPECT_EQ(clean.status, 0) << clean.out << clean.err;
    expect_part(clean.out, "28 packed linears read as awq-gemm");
  }
}

TEST_F(Dialect, FaultsAreNamedWithTheirTensor) {
  std::filesystem::copy(path("awq"), path("bad"));
  // A NaN among the scales: the last tensor of layer 0 that is one.
  std::string file = io::read_file(path("bad") + "/model.safetensors");
  uint64_t header = 0;
  std::memcpy(&header, file.data(), sizeof header);
  const io::Json tensors = io::parse_json(file.substr(8, header), "header");
  const std::string name = "model.layers.0.mlp.up_proj.scales";
  const auto begin = static_cast<size_t>(tensors[name]["data_offsets"][0].get<int64_t>());
  file.replace(8 + header + begin, 2, std::string("\x00\x7e", 2));
  io::write_file(path("bad") + "/model.safetensors", file, true);
  for (const bool with_base : {false, true}) {
    const auto bad = verify("bad", with_base);
    EXPECT_EQ(bad.status, 1) << bad.err;
    expect_part(bad.out, name + ": holds NaN at [0, 0]");
    expect_part(bad.out, "verification FAILED");
  }
}

/// A scale that could not be folded has no place in other programs' files.
/// As vendors mix them: attention in FP8, the MLP in NVFP4, with scales for what programs quantize while they run.
TEST_F(Dialect, MixturesOfFloatsAndScalesOfActivations) {
  io::write_file(
      path("mix.json"),
      R"({"rules": [{"match": "*.self_attn.*", "scheme": "fp8-tensor"}, {"match": "*.mlp.*", "scheme": "nvfp4"}]})",
      false);
  const std::string text = bundled_model() + "/own/selfgen.txt";
  ASSERT_EQ(run_w4q({"quantize", bundled_model(), "-o", path("mix"), "--recipe", path("mix.json"), "--quiet"}).status,
            0);
  const auto refused = repack("mix", "never", "modelopt");
  EXPECT_EQ(refused.status, 3);
  expect_part(refused.err, "--activation-scales --calib TEXT measures them");
  EXPECT_EQ(repack("asym", "never", "awq-gemm", {"--cache-scales", "--calib", text}).status, 2);
  EXPECT_EQ(repack("mix", "never", "modelopt", {"--activation-scales"}).status, 2);
  EXPECT_EQ(repack("mix", "never", "modelopt", {"--calib", text}).status, 2);
  ASSERT_EQ(repack("mix", "plain", "compressed-tensors-float").status, 0);
  EXPECT_EQ(io::read_json(path("plain") + "/config.json")["quantization_config"]["format"], "mixed-precision");
  const struct {
    std::string dialect, mlp, attention, keys;
    bool divides;
  } rows[] = {{"compressed-tensors-float", ".input_global_scale", ".input_scale", ".self_attn.k_scale", true},
              {"modelopt", ".input_scale", ".input_scale", ".self_attn.k_proj.k_scale", false}};
  float largest_input = 0;
  for (const auto& row : rows) {
    SCOPED_TRACE(row.dialect);
    const auto made =
        repack("mix", row.dialect, row.dialect,
               {"--activation-scales", "--cache-scales", "--calib", text, "--samples", "2", "--length", "64"});
    ASSERT_EQ(made.status, 0) << made.err;
    expect_part(made.out, "36 scales of activations");  // of 28 linears, and keys and values of 4 layers
    const auto tensors = io::Checkpoint::open(path(row.dialect));
    const auto value = [&](const std::string& name) {
      float result = 0;
      std::memcpy(&result, tensors.load("model.layers.1" + name)->bytes.data(), sizeof result);
      return result;
    };
    EXPECT_EQ(value(".self_attn.q_proj" + row.attention), value(".self_attn.k_proj" + row.attention));
    EXPECT_GT(value(row.keys), 0);
    const float gate = value(".mlp.gate_proj" + row.mlp), largest = row.divides ? 2688 / gate : 2688 * gate;
    if (largest_input != 0) {
      EXPECT_FLOAT_EQ(largest, largest_input);
    }
    largest_input = largest;
    const auto served = run_w4q({"verify", path(row.dialect), "--for", "vllm,sglang"});
    EXPECT_EQ(served.status, 0) << served.out;
    EXPECT_EQ(verify(row.dialect, true).status, 0);
    ASSERT_EQ(repack(row.dialect, row.dialect + "-back", "w4q").status, 0);
    EXPECT_EQ(io::read_file(path(row.dialect) + "-back/model.safetensors"),
              io::read_file(path("mix") + "/model.safetensors"));
  }
  const auto config = io::read_json(path("modelopt") + "/hf_quant_config.json")["quantization"];
  EXPECT_EQ(config["quant_algo"], "MIXED_PRECISION");
  EXPECT_EQ(config["kv_cache_quant_algo"], "FP8");
  EXPECT_EQ(config["quantized_layers"]["model.layers.0.mlp.up_proj"]["quant_algo"], "NVFP4");
  EXPECT_EQ(config["quantized_layers"]["model.layers.0.self_attn.q_proj"]["quant_algo"], "FP8");
}

/// An order of groups that servers do not read goes with --no-act-order, at the price of another rounding.
TEST_F(Dialect, ActOrderGoesWhereItIsAsked) {
  const std::string made = path("ordered");
  ASSERT_EQ(repack("asym", "ordered", "gptq-v2").status, 0);
  io::Json config = io::read_json(made + "/config.json");
  config["quantization_config"]["desc_act"] = true;
  io::write_file(made + "/config.json", config.dump(), true);
  const auto file = io::Checkpoint::open(made);
  std::vector<io::PlannedTensor> plan;
  std::map<std::string, Buffer> bytes;
  for (const auto& [name, info] : file.tensors()) {
    plan.push_back({name, info.dtype, info.shape});
    bytes.emplace(name, Buffer::copy_of(file.load(name)->bytes));
    // Every input of down_proj in the group of its mirror image.
    if (name.ends_with("down_proj.g_idx")) std::ranges::reverse(bytes.at(name).as<int32_t>());
  }
  std::filesystem::create_directories(path("mirrored"));
  io::CheckpointWriter writer(path("mirrored"), plan, {});
  for (const auto& [name, tensor] : bytes) writer.write(name, tensor.bytes());
  writer.finish();
  io::write_file(path("mirrored") + "/config.json", config.dump(), false);
  ASSERT_EQ(repack("mirrored", "kept", "compressed-tensors").status, 0);
  EXPECT_TRUE(io::Checkpoint::open(path("kept")).contains("model.layers.0.mlp.down_proj.weight_g_idx"));
  EXPECT_EQ(run_w4q({"verify", path("kept"), "--for", "vllm"}).status, 1);
  const auto refused = repack("mirrored", "never", "compressed-tensors", {"--no-act-order"});
  EXPECT_EQ(refused.status, 3);
  expect_part(refused.err, "model.layers.0.mlp.down_proj");
  const auto sorted = repack("mirrored", "sorted", "compressed-tensors", {"--no-act-order", "--allow-lossy"});
  ASSERT_EQ(sorted.status, 0) << sorted.err;
  expect_part(sorted.out, "NOT LOSSLESS: 4 linears were changed");
  EXPECT_EQ(run_w4q({"verify", path("sorted"), "--for", "vllm"}).status, 0);
}

TEST_F(Dialect, HummingHoldsIntegersAndFloats) {
  for (const char* scheme : {"int3-g32-bf16-asym", "nvfp4", "fp8-block128"}) {
    SCOPED_TRACE(scheme);
    const std::string name(scheme), there = name + "-humming";
    ASSERT_EQ(run_w4q({"quantize", bundled_model(), "-o", path(name), "--scheme", name, "--quiet"}).status, 0);
    ASSERT_EQ(repack(name, there, "humming").status, 0);
    const auto served = run_w4q({"verify", path(there), "--for", "vllm,sglang"});
    EXPECT_EQ(served.status, 0) << served.out;
    EXPECT_EQ(verify(there, true).status, 0);
    ASSERT_EQ(repack(there, there + "-back", "w4q").status, 0);
    EXPECT_EQ(io::read_file(path(there) + "-back/model.safetensors"), io::read_file(path(name) + "/model.safetensors"));
  }
}

/// Humming turns inputs by a Hadamard matrix: vLLM hands it the size, SGLang does not.
TEST_F(Dialect, HummingRotatesInputsWithoutSigns) {
  const auto made = [&](const std::string& name, const char* seed) {
    return run_w4q({"quantize", bundled_model(), "-o", path(name), "--scheme", "int4-g64-bf16", "--rotate", "64",
                    "--rotation-seed", seed, "--quiet"});
  };
  ASSERT_EQ(made("unsigned", "none").status, 0);
  ASSERT_EQ(repack("unsigned", "turned", "humming").status, 0);
  const auto keys = io::read_json(path("turned") + "/config.json")["quantization_config"];
  EXPECT_EQ(keys["hadamard_block_size"], 64);
  EXPECT_EQ(verify("turned", true).status, 0);
  EXPECT_EQ(run_w4q({"verify", path("turned"), "--for", "vllm"}).status, 0);
  const auto foreign = run_w4q({"verify", path("turned"), "--for", "sglang"});
  EXPECT_EQ(foreign.status, 1);
  expect_part(foreign.out, "hadamard_block_size");
  ASSERT_EQ(repack("turned", "back", "w4q").status, 0);
  EXPECT_EQ(io::read_file(path("back") + "/model.safetensors"), io::read_file(path("unsigned") + "/model.safetensors"));
  EXPECT_EQ(io::read_json(path("back") + "/config.json")["quantization_config"]["linears"],
            io::read_json(path("unsigned") + "/config.json")["quantization_config"]["linears"]);
  const auto others = repack("turned", "never", "compressed-tensors");
  EXPECT_EQ(others.status, 3);
  expect_part(others.err, "its input is rotated, which readers would leave out");
  ASSERT_EQ(made("signed", "3").status, 0);
  const auto refused = repack("signed", "never", "humming");
  EXPECT_EQ(refused.status, 3);
  expect_part(refused.err, "--rotation-seed none");
  const auto anew = repack("signed", "anew", "humming", {"--allow-lossy"});
  EXPECT_EQ(anew.status, 0) << anew.err;
  EXPECT_EQ(verify("anew", true).status, 0);
}

/// A width that no matrix has, or that does not divide what a linear reads, is refused as it is read.
TEST_F(Dialect, HummingsRotationsMustFit) {
  ASSERT_EQ(
      run_w4q({"quantize", bundled_model(), "-o", path("odd-own"), "--scheme", "int4-g32-bf16", "--quiet"}).status, 0);
  ASSERT_EQ(repack("odd-own", "odd", "humming").status, 0);
  auto config = io::read_json(path("odd") + "/config.json");
  for (const auto& [size, said] :
       {std::pair{96, "no power of two"}, {512, "no whole blocks"}, {1024, "an integer from 0 to 512"}}) {
    config["quantization_config"]["hadamard_block_size"] = size;
    io::write_file(path("odd") + "/config.json", config.dump(), true);
    const auto refused = run_w4q({"inspect", path("odd")});
    EXPECT_EQ(refused.status, 3) << size;
    expect_part(refused.err, said);
    expect_part(refused.err, "hadamard_block_size");
  }
}

TEST_F(Dialect, InputScalesAreRefused) {
  const auto awq = run_w4q({"quantize", bundled_model(), "-o", path("scaled"), "--method", "awq", "--calib",
                            bundled_model() + "/own/selfgen.txt", "--samples", "4", "--length", "64", "--keep",
                            "*.up_proj", "--quiet"});
  ASSERT_EQ(awq.status, 0) << awq.err;
  const auto refused = repack("scaled", "never", "awq-gemm");
  EXPECT_EQ(refused.status, 3) << refused.err;
  expect_part(refused.err, "its input is divided by an input_scale, which readers would leave out");
  const auto lossy = repack("scaled", "folded", "awq-gemm", {"--allow-lossy"});
  EXPECT_EQ(lossy.status, 0) << lossy.err;
  expect_part(lossy.out, "NOT LOSSLESS");
  EXPECT_EQ(verify("folded").status, 0);
}

}  // namespace
}  // namespace w4q::test
