// Whole checkpoints from one dialect to another: bytes, configs, proofs, refusals, and what loss is allowed.
#include "pipeline/convert_model.h"

#include <gtest/gtest.h>

#include "core/progress.h"
#include "dialect_samples.h"
#include "io/files.h"
#include "support.h"

namespace w4q::pipeline {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::StoredTensor;
using test::expect_error;

constexpr const char* up = "model.layers.0.mlp.up_proj";
constexpr const char* down = "model.layers.0.mlp.down_proj";

class Convert : public ::testing::Test {
 protected:
  Convert() { set_progress_enabled(false); }

  PackedWeight sample(std::string_view scheme, int64_t n = 256, int64_t k = 512) {
    return test::sample_integer(formats::parse_scheme(scheme), n, k, seed_++);
  }

  /// A checkpoint of w4q with these linears, a 16-bit one and a norm.
  void write_own(const std::vector<std::pair<std::string, const PackedWeight*>>& linears,
                 const io::WriteOptions& options = {}) {
    checkpoint::QuantizationConfig quantization;
    quantization.method = "rtn";
    std::vector<std::pair<std::string, StoredTensor>> tensors;
    for (const auto& [name, weight] : linears) {
      quantization.linears[name] = {name, weight->n, weight->k, DType::bf16, {{weight->scheme, "canonical"}}};
      for (const auto& plane : weight->planes) {
        tensors.emplace_back(checkpoint::plane_name(name, 0, plane.spec.role),
                             StoredTensor{{"", plane.spec.dtype, plane.spec.shape}, plane.bytes.clone()});
      }
    }
    tensors.emplace_back("model.layers.0.self_attn.o_proj.weight",
                         formats::allocate_stored({"", DType::bf16, {64, 64}}));
    tensors.emplace_back("model.norm.weight", formats::allocate_stored({"", DType::bf16, {64}}));
    io::Json config = {{"model_type", "llama"}, {"torch_dtype", "bfloat16"}};
    checkpoint::write_quantization_config(quantization, config);
    test::write_checkpoint(folder_ / "own", config, tensors, options);
    io::write_file(folder_ / "own" / "tokenizer.json", "{}", true);
  }

  ConvertReport convert(const std::string& from, const std::string& to, const std::string& dialect,
                        bool allow_lossy = false) {
    return convert_model({.input = folder_ / from,
                          .output = folder_ / to,
                          .to = dialect,
                          .allow_lossy = allow_lossy,
                          .overwrite = true});
  }
  void expect_refused(const std::string& dialect, std::initializer_list<std::string_view> parts) {
    expect_error(ErrorCode::unsupported, parts, [&] { convert("own", "refused", dialect); });
    EXPECT_FALSE(std::filesystem::exists(folder_ / "refused"));
  }
  std::string bytes(const std::string& name, const std::string& file = "model.safetensors") const {
    return io::read_file(folder_ / name / file);
  }
  io::Json config(const std::string& name) const {
    return io::read_json(folder_ / name / "config.json")["quantization_config"];
  }

  test::TemporaryFolder folder_;
  uint64_t seed_ = 1;
};

TEST_F(Convert, EveryRowThereAndBack) {
  const auto a = sample("int4-g128-f16"), b = sample("int4-g128-f16", 256, 256);
  write_own({{up, &a}, {down, &b}});
  const std::string own = bytes("own");
  for (const auto& target : convert_targets()) {
    if (!test::keeps_codes(target, a.scheme, a.n, a.k)) continue;
    SCOPED_TRACE(target);
    const auto there = convert("own", "there", target);
    EXPECT_TRUE(there.proof().complete());
    EXPECT_EQ(there.proof().codes, a.n * a.k + b.n * b.k);
    EXPECT_EQ(there.carried, 2);
    EXPECT_TRUE(std::filesystem::exists(folder_ / "there" / "tokenizer.json"));
    EXPECT_EQ(test::read_quantization(folder_ / "there").linears.size(), 2u);
    const auto back = convert("there", "back", "w4q");
    // Of 4 bits, both packings of compressed-tensors are the same: the newer is found.
    EXPECT_TRUE(target.starts_with(back.from)) << back.from;
    EXPECT_EQ(bytes("back"), own);
    EXPECT_FALSE(std::filesystem::exists(folder_ / "back" / "quantize_config.json"));
  }
}

TEST_F(Convert, ShardsGiveTheSame) {
  const auto a = sample("int4-g128-f16-asym"), b = sample("int4-g128-f16-asym");
  write_own({{up, &a}, {down, &b}}, {.max_shard_bytes = 50'000});
  ASSERT_TRUE(std::filesystem::exists(folder_ / "own" / "model.safetensors.index.json"));
  convert("own", "sharded", "awq-gemm");
  write_own({{up, &a}, {down, &b}});
  convert("own", "whole", "awq-gemm");
  EXPECT_EQ(bytes("sharded"), bytes("whole"));
}

TEST_F(Convert, ConfigsSayWhatTheReadersNeed) {
  const auto a = sample("int4-g128-f16"), b = sample("int8-row-f16-asym");
  write_own({{up, &a}, {down, &a}});
  convert("own", "awq", "awq-gemm");
  EXPECT_EQ(config("awq"), io::Json::parse(R"({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true,
      "version": "gemm", "modules_to_not_convert": ["model.layers.0.self_attn.o_proj"], "converted_by": "w4q"})"));
  write_own({{up, &a}, {down, &b}});
  convert("own", "gptq", "gptq-v2");
  const io::Json gptq = config("gptq");
  EXPECT_EQ(gptq["quant_method"], "gptq");
  EXPECT_EQ(gptq["checkpoint_format"], "gptq_v2");
  const auto& rules = gptq["dynamic"];
  EXPECT_TRUE(rules.contains("-:^model\\.layers\\.0\\.self_attn\\.o_proj$"));
  // Of gate and up there is up alone, so that its rule is that of both.
  EXPECT_EQ(rules.size(), 3u) << rules.dump();
  EXPECT_FALSE(gptq.contains("modules_in_block_to_quantize"));
  EXPECT_EQ(io::read_json(folder_ / "gptq" / "quantize_config.json"), gptq);
  convert("gptq", "again", "gptq-v2");
  EXPECT_EQ(bytes("again"), bytes("gptq"));
  convert("gptq", "back", "w4q");
  EXPECT_TRUE(formats::bytes_equal(test::load_linear(folder_ / "back", down), b));
}

/// transformers minds no rules, but what is listed, and looks for layers of plain models alone.
TEST_F(Convert, GptqOfWrappedModelsListsWhatIsPacked) {
  const auto a = sample("int4-g128-f16");
  const std::string inner = "model.language_model.layers.0.mlp.up_proj";
  write_own({{inner, &a}});
  convert("own", "wrapped", "gptq-v1");
  const io::Json wrapped = config("wrapped");
  EXPECT_EQ(wrapped["block_name_to_quantize"], "model.language_model.layers");
  EXPECT_EQ(wrapped["modules_in_block_to_quantize"], io::Json::array({io::Json::array({inner})}));
  convert("wrapped", "again", "gptq-v1");
  EXPECT_EQ(bytes("again"), bytes("wrapped"));
  // By names that are no modules of transformers.
  write_own({{"language_model.model.layers.0.mlp.up_proj", &a}});
  convert("own", "other", "gptq-v1");
  EXPECT_FALSE(config("other").contains("block_name_to_quantize"));
}

TEST_F(Convert, DryRunWritesNothing) {
  const auto a = sample("int4-g128-f16");
  write_own({{up, &a}});
  const auto report = plan_convert({.input = folder_ / "own", .output = folder_ / "none", .to = "gptq-v1"});
  EXPECT_FALSE(report.done);
  EXPECT_EQ(report.linears.size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "none"));
}

TEST_F(Convert, ReportsProof) {
  const auto a = sample("int4-g128-f16-asym");
  write_own({{up, &a}});
  const auto report = convert("own", "there", "awq-gemm");
  EXPECT_NE(to_text(report).find("codes equal 100 %, zeros equal, scales equal"), std::string::npos);
  const auto json = to_json(report);
  EXPECT_EQ(json["proof"]["codes_equal"], a.n * a.k);
  EXPECT_EQ(json["proof"]["complete"], true);
  EXPECT_EQ(json["linears"][0]["lossless"], true);
}

// ---- what cannot be held --------------------------------------------------------------------------------------------

TEST_F(Convert, ActOrderToAwq) {
  const auto a = sample("int4-g128-f16-asym-actorder");
  write_own({{up, &a}});
  expect_refused("awq-gemm", {up, "act-order", "--allow-lossy"});
  const auto report = convert("own", "lossy", "awq-gemm", true);
  EXPECT_NE(report.linears[0].loses.find("act-order"), std::string::npos);
  // Rounding anew to 15 steps of a range that uniform codes fill: the step's share of it, 1/15 / √12, over 1/√12.
  EXPECT_GT(report.linears[0].error.relative(), 0.01);
  EXPECT_LT(report.linears[0].error.relative(), 0.2);
  convert("own", "kept", "gptq-v2");
  convert("kept", "back", "w4q");
  EXPECT_EQ(bytes("back"), bytes("own"));
}

TEST_F(Convert, ZeroPointOfZeroToVersion1) {
  auto a = sample("int4-g128-f16-asym");
  const auto zeros = a.plane(PlaneRole::zeros).bytes.as<uint8_t>();
  for (uint8_t& zero : zeros) zero = std::max<uint8_t>(zero, 1);
  zeros[5] = 0;
  write_own({{up, &a}});
  expect_refused("gptq-v1", {up, "row 1, group 1 has the zero point 0", "--allow-lossy"});
  const auto report = convert("own", "lossy", "gptq-v1", true);
  // Only the group's codes of 15 change their value: about one in 16 of 128.
  EXPECT_GT(report.linears[0].error.changed, 0);
  EXPECT_LE(report.linears[0].error.changed, 30);
  EXPECT_EQ(report.linears[0].proof.zeros_equal, report.linears[0].proof.zeros - 1);
  EXPECT_TRUE(convert("own", "kept", "gptq-v2").proof().complete());
}

TEST_F(Convert, ScalesOutsideTheRangeOfF16) {
  auto a = sample("int4-g128-bf16");
  write_own({{up, &a}});
  EXPECT_TRUE(convert("own", "fits", "gptq-v1").proof().complete());
  a.plane(PlaneRole::scales).bytes.as<uint16_t>()[9] = bf16_from_f32(0x1p20f);
  write_own({{up, &a}});
  expect_refused("gptq-v1", {up, "row 2, group 1", "F16", "--allow-lossy"});
  EXPECT_TRUE(convert("own", "kept", "compressed-tensors").proof().complete());
}

TEST_F(Convert, SizesThatDoNotFit) {
  const auto a = sample("int4-g32-f16-asym", 60, 100);
  write_own({{up, &a}});
  expect_refused("awq-gemm", {up, "multiples of 8", "60"});
  expect_refused("gptq-v2", {up, "multiples of 32"});
  const auto b = sample("int4-g32-f16-asym", 64, 104);
  write_own({{up, &b}});
  expect_refused("awq-gemm", {up, "groups of 32 do not divide the 104 inputs"});
}

TEST_F(Convert, WidthsThatDoNotFit) {
  const auto a = sample("int3-g128-f16-asym");
  write_own({{up, &a}});
  expect_refused("awq-gemv", {up, "codes of 3 bits", "--allow-lossy"});
  EXPECT_TRUE(convert("own", "kept", "gptq-v2").proof().complete());
}

TEST_F(Convert, OneGroupSizeForAwq) {
  const auto a = sample("int4-g128-f16-asym"), b = sample("int4-g64-f16-asym");
  write_own({{up, &a}, {down, &b}});
  expect_refused("awq-gemm", {"one group_size"});
  EXPECT_TRUE(convert("own", "kept", "gptq-v2").proof().complete());
}

TEST_F(Convert, EmbeddingsAndHeads) {
  const auto a = sample("int4-g128-f16");
  write_own({{"model.embed_tokens", &a}});
  expect_refused("gptq-v2", {"model.embed_tokens", "--embeddings"});
  write_own({{"lm_head", &a}});
  expect_refused("awq-gemm", {"lm_head"});
  convert("own", "head", "gptq-v2");
  EXPECT_EQ(config("head")["lm_head"], true);
}

TEST_F(Convert, NamesThatAwqCannotTellApart) {
  const auto a = sample("int4-g128-f16");
  write_own({{"model.layers.0.self_attn.o_proj_b", &a}});
  expect_refused("awq-gemm", {"o_proj_b", "modules_to_not_convert"});
}

TEST_F(Convert, UnknownNamesAndUnpackedInput) {
  const auto a = sample("int4-g128-f16");
  write_own({{up, &a}});
  expect_error(ErrorCode::bad_argument, {"awq-gemm"}, [&] { convert("own", "x", "awq"); });
  test::write_checkpoint(folder_ / "plain", io::Json::object(), {});
  expect_error(ErrorCode::bad_argument, {"no packed tensors"}, [&] { convert("plain", "x", "w4q"); });
}

TEST_F(Convert, OnlyOutputsOfW4qAreReplaced) {
  const auto a = sample("int4-g128-f16");
  write_own({{up, &a}});
  convert("own", "awq", "awq-gemm");
  convert("own", "awq", "gptq-v1");  // --overwrite
  auto json = io::read_json(folder_ / "awq" / "config.json");
  json["quantization_config"].erase("converted_by");
  io::write_file(folder_ / "awq" / "config.json", json.dump(), true);
  expect_error(ErrorCode::bad_argument, {"awq"}, [&] { convert("own", "awq", "awq-gemm"); });
}

}  // namespace
}  // namespace w4q::pipeline
