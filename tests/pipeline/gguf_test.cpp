// Whole models into GGUF files and back.
#include <algorithm>
#include <fstream>

#include "core/convert.h"
#include "core/float_formats.h"
#include "core/progress.h"
#include "formats/gguf_blocks.h"
#include "formats/integer.h"
#include "gguf/config.h"
#include "io/files.h"
#include "io/gguf_writer.h"
#include "model/decoder.h"
#include "model/model.h"
#include "pipeline/gguf_export.h"
#include "pipeline/gguf_import.h"
#include "pipeline/quantize_model.h"
#include "small_model.h"
#include "support.h"
#include "tokenizer/token_file.h"
#include "tokenizer/tokenizer.h"
#include "verify/weights/reference.h"

namespace w4q::pipeline {
namespace {

using test::expect_error;
namespace fs = std::filesystem;

class Gguf : public ::testing::Test {
 protected:
  void SetUp() override { set_progress_enabled(false); }

  ConversionReport to_gguf(const fs::path& model, const std::string& to) {
    return export_gguf({.input = model, .output = folder_ / "m.gguf", .to = to, .overwrite = true});
  }
  ConversionReport from_gguf(const std::string& name, const std::string& to = "hf16",
                             const std::string& file = "m.gguf") {
    GgufImportRequest request;
    request.input = folder_ / file;
    request.output = folder_ / name;
    request.to = to;
    return import_gguf(request);
  }

  /// Writes the file again with other metadata and tensors, data filled with zeros.
  void rewrite(const std::function<void(std::vector<io::PlannedGgufTensor>&, io::GgufMetadata&)>& change) {
    const auto file = io::GgufFile::open(folder_ / "m.gguf");
    std::vector<io::PlannedGgufTensor> plan;
    for (const auto& tensor : file.header().tensors) plan.push_back({tensor.name, tensor.type, tensor.shape});
    auto metadata = file.header().metadata;
    change(plan, metadata);
    io::GgufWriter writer(folder_ / "changed.gguf", plan, metadata, true, {});
    for (const auto& tensor : writer.header().tensors) writer.append(tensor.name, std::vector<std::byte>(tensor.size));
    writer.commit();
  }

  /// The logits of some tokens.
  static std::vector<float> logits(const fs::path& folder) {
    const auto model = model::Model::open(folder);
    const auto ids = tokenizer::read_ids(test::testdata() / "w4q-llama-tiny/own/selfgen.ids.u16", 1024);
    constexpr int64_t tokens = 16;
    model::Decoder decoder(model, tokens);
    const auto hidden = decoder.forward(std::span(ids).first(tokens), nullptr);
    std::vector<float> result(tokens * 1024);
    decoder.logits(hidden, MatrixView<float>(result.data(), tokens, 1024));
    return result;
  }

  const fs::path model_ = test::testdata() / "w4q-llama-tiny";
  test::TemporaryFolder folder_;
};

std::string bytes_of_file(const fs::path& path) { return io::read_file(path); }

TEST_F(Gguf, TheBundledModelComesBackByteByByte) {
  for (const std::string to : {"gguf", "gguf-bf16", "gguf-f32"}) {
    SCOPED_TRACE(to);
    const auto written = to_gguf(model_, to);
    EXPECT_TRUE(std::ranges::all_of(written.tensors, [](const auto& tensor) { return tensor.error.changed == 0; }));
    EXPECT_EQ(written.file_bytes, static_cast<int64_t>(fs::file_size(folder_ / "m.gguf")));
    from_gguf(to);
    EXPECT_EQ(bytes_of_file(folder_ / to / "model.safetensors"), bytes_of_file(model_ / "model.safetensors"));
    const auto tokenizer = tokenizer::Tokenizer::open(folder_ / to);
    const std::string text = bytes_of_file(model_ / "own/selfgen.txt").substr(0, 5000);
    EXPECT_EQ(tokenizer.encode(text, true), tokenizer::Tokenizer::open(model_).encode(text, true));
    const auto config = model::read_config(folder_ / to);
    EXPECT_EQ(config.eos_tokens, std::vector<int64_t>{1023});
    EXPECT_EQ(config.bos_token, 1022);
  }
}

/// What a small config of a family has otherwise, for GGUF to be able to say it.
io::Json said_by_gguf(std::string_view type) {
  if (type == "gemma") return {{"tie_word_embeddings", true}};
  if (type == "gemma2") return {{"query_pre_attn_scalar", 32}, {"tie_word_embeddings", true}};
  if (type == "gemma3_text") return {{"query_pre_attn_scalar", 32}, {"sliding_window_pattern", 6}};
  if (type == "qwen2_moe") return {{"norm_topk_prob", false}, {"mlp_only_layers", io::Json::array()}};
  if (type == "glm4_moe") return {{"n_group", 1}, {"topk_group", 1}};
  if (type == "ernie4_5") return {{"use_bias", false}};
  if (type == "seed_oss") return {{"attention_out_bias", false}};
  if (type == "olmoe" || type == "dots1") return {{"num_key_value_heads", 4}};
  if (type == "glm") return {{"head_dim", 16}};
  if (type == "mistral") return {{"sliding_window", 8}};
  if (type == "gpt_oss") return {{"swiglu_limit", 7.0}};
  if (type.starts_with("qwen3_5") || type == "qwen3_next") return {{"linear_key_head_dim", 32}};
  return io::Json::object();
}

struct FamilyCase {
  const model::ArchitectureRow* row;
  std::string name;
  io::Json changes;
};

class GgufFamilies : public testing::TestWithParam<FamilyCase> {
 protected:
  void SetUp() override { set_progress_enabled(false); }
  void to_gguf(const std::string& to) {
    test::write_small_model(*GetParam().row, folder_.path() / "m", GetParam().changes);
    export_gguf({.input = folder_ / "m", .output = folder_ / "m.gguf", .to = to, .overwrite = true});
  }
  void from_gguf(const std::string& name, const std::string& to) {
    GgufImportRequest request;
    request.input = folder_ / "m.gguf";
    request.output = folder_ / name;
    request.to = to;
    import_gguf(request);
  }
  std::vector<float> logits(const std::string& name) {
    const auto model = model::Model::open(folder_ / name);
    const std::vector<int32_t> ids = {5, 150, 17, 33, 4, 99, 120, 7, 7, 61, 12, 140};
    model::Decoder decoder(model, 16);
    const auto hidden = decoder.forward(ids, nullptr);
    std::vector<float> result(ids.size() * 160);
    decoder.logits(hidden, MatrixView<float>(result.data(), std::ssize(ids), 160));
    return result;
  }

  test::TemporaryFolder folder_;
};

/// Tensors and what config.json says.
TEST_P(GgufFamilies, ComeBackByteByByte) {
  to_gguf("gguf");
  from_gguf("back", "hf16");
  const auto before = io::Checkpoint::open(folder_ / "m"), after = io::Checkpoint::open(folder_ / "back");
  for (const auto& [name, info] : before.tensors()) {
    EXPECT_EQ(after.at(name).dtype, info.dtype) << name;
    EXPECT_TRUE(std::ranges::equal(after.load(name)->bytes, before.load(name)->bytes)) << name;
  }
  EXPECT_EQ(after.tensors().size(), before.tensors().size());
  EXPECT_EQ(logits("back"), logits("m"));
}

class GgufMixtures : public GgufFamilies {};

/// Experts keep their codes, each of them, in w4q's own format too.
TEST_P(GgufMixtures, KeepTheirCodes) {
  to_gguf("gguf-q8_0");
  from_gguf("exact", "hf-f32");
  from_gguf("packed", "w4q");
  EXPECT_EQ(logits("packed"), logits("exact"));
}

FamilyCase family_case(std::string_view type) {
  return {&model::architecture_row(type), std::string(type), said_by_gguf(type)};
}

std::vector<FamilyCase> families_with_gguf() {
  std::vector<FamilyCase> cases;
  for (const auto* row : model::architectures()) {
    if (!row->gguf.empty()) cases.push_back(family_case(row->model_type));
  }
  cases.push_back({&model::architecture_row("gemma4_text"),
                   "gemma4_mixture",
                   {{"enable_moe_block", true},
                    {"num_experts", 4},
                    {"top_k_experts", 2},
                    {"moe_intermediate_size", 32},
                    {"num_kv_shared_layers", 0},
                    {"hidden_size_per_layer_input", 0},
                    {"use_double_wide_mlp", false},
                    {"attention_k_eq_v", true},
                    {"num_global_key_value_heads", 1}}});
  io::Json divisors = io::Json::array();
  for (int pair = 0; pair < 6; ++pair) divisors.push_back(1 + 0.3 * pair);
  cases.push_back({&model::architecture_row("phi3"),
                   "phi3_longrope",
                   {{"partial_rotary_factor", 0.75},
                    {"original_max_position_embeddings", 8},
                    {"rope_scaling", {{"type", "longrope"}, {"short_factor", divisors}, {"long_factor", divisors}}}}});
  return cases;
}

std::string case_name(const testing::TestParamInfo<FamilyCase>& param) { return param.param.name; }

INSTANTIATE_TEST_SUITE_P(Gguf, GgufFamilies, testing::ValuesIn(families_with_gguf()), case_name);

INSTANTIATE_TEST_SUITE_P(Gguf, GgufMixtures,
                         testing::Values(family_case("mixtral"), family_case("qwen2_moe"), family_case("qwen3_next"),
                                         family_case("qwen3_5_moe_text"), family_case("gpt_oss")),
                         case_name);

/// What readers take for granted is demanded, not hoped for.
TEST_F(Gguf, WhatReadersWouldComputeOtherwiseIsRefused) {
  const struct {
    std::string_view type;
    io::Json changes;
    std::string_view what;
  } rows[] = {
      {"qwen3_moe", {{"norm_topk_prob", false}}, "norm_topk_prob"},
      {"qwen3_moe", {{"mlp_only_layers", {1}}}, "layer 1 without experts"},
      {"qwen3_moe", {{"attention_bias", true}}, "attention_bias"},
      {"glm4_moe", io::Json::object(), "experts in groups"},
      {"gemma2", io::Json::object(), "query_pre_attn_scalar"},
      {"gemma2", {{"query_pre_attn_scalar", 32}}, "a head that is not the embedding table"},
      {"gemma3_text", {{"query_pre_attn_scalar", 32}}, "the window of layer 2"},
      {"gemma3_text",
       {{"query_pre_attn_scalar", 32}, {"sliding_window_pattern", 6}, {"rope_local_base_freq", 20000}},
       "rope_local_base_freq"},
      {"smollm3", {{"no_rope_layers", {1, 1, 1, 1}}}, "no_rope_layers of layer 3"},
      {"olmoe", io::Json::object(), "fewer key than query heads"},
      {"ernie4_5", io::Json::object(), "use_bias"},
      {"qwen3_5_text", io::Json::object(), "linear_value_head_dim 32, where linear_key_head_dim is 16"},
      {"olmo2", {{"tie_word_embeddings", true}}, "a head that is the embedding table"},
      {"minimax_m2", {{"tie_word_embeddings", true}}, "a head that is the embedding table"},
      {"olmo3", {{"rope_theta", 10000}}, "rope_parameters of layer 0"},
      {"olmo3",
       {{"layer_types", {"full_attention", "sliding_attention", "full_attention", "full_attention"}}},
       "the window of layer 0"},
      {"ministral3",
       {{"rope_parameters",
         {{"rope_type", "yarn"},
          {"factor", 4},
          {"rope_theta", 10000},
          {"attention_factor", 1.5},
          {"original_max_position_embeddings", 8}}}},
       "attention_factor 1.5"},
      {"gpt_oss", io::Json::object(), "swiglu_limit 1"},
      {"gemma4_text", {{"vocab_size_per_layer_input", 128}}, "vocab_size_per_layer_input"},
      {"gemma", io::Json::object(), "a head that is not the embedding table"},
      {"dots1", {{"tie_word_embeddings", true}}, "a head that is the embedding table"},
      {"dots1", {{"attention_bias", true}}, "attention_bias"},
      {"dots1", io::Json::object(), "fewer key than query heads"},
      {"glm", io::Json::object(), "head_dim"},
      {"qwen2_vl_text", {{"rope_scaling", nullptr}}, "mrope_section that is not three parts of 8"},
      {"qwen2_5_vl_text", {{"head_dim", 32}}, "head_dim"},
      {"llama", {{"hidden_act", "gelu"}}, "hidden_act other than silu"},
      {"gemma", {{"hidden_act", "silu"}, {"tie_word_embeddings", true}}, "hidden_act other than gelu"},
      {"qwen3_next", {{"linear_key_head_dim", 32}, {"full_attention_interval", 1}}, "layer_types without a delta net"},
      {"granitemoe", io::Json::object(), "is not written"}};
  for (const auto& row : rows) {
    const auto folder = folder_ / "refused";
    fs::remove_all(folder);
    test::write_small_model(model::architecture_row(row.type), folder, row.changes);
    expect_error(ErrorCode::unsupported, {row.what},
                 [&] { export_gguf({.input = folder, .output = folder_ / "r.gguf", .to = "gguf"}); });
    EXPECT_FALSE(fs::exists(folder_ / "r.gguf")) << row.type;
  }
}

TEST_F(Gguf, AMixtureHasOneTypeForAllExperts) {
  const auto folder = test::testdata() / "w4q-mixture-tiny";
  const auto report = export_gguf({.input = folder, .output = folder_ / "m.gguf", .to = "gguf-q4_k_m"});
  const auto file = io::GgufFile::open(folder_ / "m.gguf");
  EXPECT_EQ(file.find("blk.0.ffn_gate_exps.weight")->shape, (Shape{8, 128, 256}));
  EXPECT_EQ(file.find("blk.0.ffn_gate_exps.weight")->type, GgmlType::q4_k);
  EXPECT_EQ(file.find("blk.0.ffn_gate_inp.weight")->type, GgmlType::f32) << "routers stay as they are";
  EXPECT_EQ(std::ranges::count_if(report.notes, [](const auto& note) { return note.find("ffn_down_exps") < 99; }), 4);
}

TEST_F(Gguf, TheSameInputGivesTheSameBytes) {
  to_gguf(model_, "gguf-q4_0");
  const auto first = bytes_of_file(folder_ / "m.gguf");
  to_gguf(model_, "gguf-q4_0");
  EXPECT_EQ(bytes_of_file(folder_ / "m.gguf"), first);
}

TEST_F(Gguf, F16LosesOnlyTheLowestBitsOfTinyWeights) {
  const auto report = to_gguf(model_, "gguf-f16");
  for (const auto& tensor : report.tensors) {
    // A bf16 keeps 8 bits; an f16 below 2^-14 keeps steps of 2^-24, which is an error of at most 2^-25.
    EXPECT_LE(tensor.error.squared_error, static_cast<double>(tensor.error.changed) * 0x1p-50) << tensor.name;
  }
  from_gguf("hf");
  EXPECT_EQ(model::read_config(folder_ / "hf").dtype, DType::f16);
}

/// RMS error over RMS of the weights. Measured over the layers on 2026-11-21: Q8_0 0.0053 to 0.0056, Q4_0 0.085 to
/// 0.089, Q4_1 0.078 to 0.080; the bounds are a tenth wider.
TEST_F(Gguf, QuantizedFilesStayNearTheModel) {
  const struct {
    std::string to, linear;
    double least, most;
  } rows[] = {
      {"gguf-q8_0", "Q8_0", 0.0048, 0.0062}, {"gguf-q4_0", "Q4_0", 0.076, 0.098}, {"gguf-q4_1", "Q4_1", 0.070, 0.088}};
  for (const auto& row : rows) {
    SCOPED_TRACE(row.to);
    for (const auto& tensor : to_gguf(model_, row.to).tensors) {
      const bool table = tensor.name == "token_embd.weight";
      EXPECT_EQ(tensor.to, tensor.shape.size() == 1 ? "F32" : table ? "Q8_0" : row.linear);
      if (tensor.shape.size() == 1 || table) continue;
      EXPECT_GT(tensor.error.relative(), row.least) << tensor.name;
      EXPECT_LT(tensor.error.relative(), row.most) << tensor.name;
    }
  }
}

TEST_F(Gguf, DecodedBlocksAreTheDecodersValuesInTheRightRows) {
  to_gguf(model_, "gguf-q8_0");
  EXPECT_TRUE(std::ranges::all_of(from_gguf("exact", "hf-f32").tensors,
                                  [](const auto& tensor) { return tensor.error.changed == 0; }));
  const auto exact = io::Checkpoint::open(folder_ / "exact"), original = io::Checkpoint::open(model_);
  for (const auto& [name, info] : original.tensors()) {
    const auto count = static_cast<size_t>(element_count(info.shape));
    std::vector<float> before(count), after(count);
    widen(original.load(name)->bytes, info.dtype, before);
    widen(exact.load(name)->bytes, DType::f32, after);
    // Q8_0 has 127 steps on each side of zero; a row in the wrong place would be off by whole weights.
    float largest = 0;
    for (const float value : before) largest = std::max(largest, std::abs(value));
    for (size_t i = 0; i < count; ++i) ASSERT_NEAR(before[i], after[i], largest / 127 * 0.51f) << name;
  }
}

TEST_F(Gguf, IntegerWeightsKeepTheirCodesAndScales) {
  for (const int bits : {4, 8}) {
    SCOPED_TRACE(bits);
    QuantizeRequest wanted;
    wanted.model = model_;
    wanted.output = folder_ / ("int" + std::to_string(bits));
    wanted.method = "rtn";
    wanted.scheme = {formats::SchemeFamily::integer, bits, 32, formats::ScaleType::f16, false, false};
    quantize_model(wanted);
    const auto report = to_gguf(wanted.output, "gguf");
    for (const auto& tensor : report.tensors) EXPECT_EQ(tensor.error.changed, 0) << tensor.name;
    const auto file = io::GgufFile::open(folder_ / "m.gguf");
    const auto* tensor = file.find("blk.1.ffn_up.weight");
    ASSERT_EQ(tensor->type, bits == 4 ? GgmlType::q4_0 : GgmlType::q8_0);

    const auto packed = model::Model::open(wanted.output);
    const auto& weight =
        std::get<std::shared_ptr<const formats::PackedLinear>>(packed.layers()[1].linear(model::Role::up).matrix)
            ->passes[0];
    std::vector<uint8_t> codes(256), expected(256);
    std::vector<uint16_t> scales(8);
    for (int64_t row = 0; row < weight.n; ++row) {
      const auto blocks =
          file.bytes(*tensor).subspan(static_cast<size_t>(row) * tensor->row_bytes(), tensor->row_bytes());
      bits == 4 ? formats::gguf_unpack_q4_0(blocks, codes, scales) : formats::gguf_unpack_q8_0(blocks, codes, scales);
      formats::integer_read_codes(weight, row, expected);
      ASSERT_EQ(codes, expected);
      const auto stored =
          weight.plane(formats::PlaneRole::scales).bytes.as<uint16_t>().subspan(static_cast<size_t>(row) * 8, 8);
      ASSERT_TRUE(std::ranges::equal(scales, stored));
    }
  }
}

TEST_F(Gguf, BlocksBecomeIntegerWeightsAndComeBackByteByByte) {
  for (const std::string to : {"gguf-q4_0", "gguf-q8_0"}) {
    SCOPED_TRACE(to);
    to_gguf(model_, to);
    const auto report = from_gguf("packed-" + to, "w4q");
    EXPECT_EQ(
        std::ranges::count(report.tensors, to == "gguf-q4_0" ? "int4-g32-f16" : "int8-g32-f16", &ConvertedTensor::to),
        to == "gguf-q4_0" ? 28 : 29);
    const auto first = bytes_of_file(folder_ / "m.gguf");
    fs::rename(folder_ / ("packed-" + to), folder_ / "w4q-llama-tiny");  // the name of the model is that of its folder
    to_gguf(folder_ / "w4q-llama-tiny", "gguf");
    EXPECT_EQ(bytes_of_file(folder_ / "m.gguf"), first);
    fs::remove_all(folder_ / "w4q-llama-tiny");
  }
}

TEST_F(Gguf, OtherSchemesAreDecodedOrRefused) {
  QuantizeRequest wanted;
  wanted.model = model_;
  wanted.output = folder_ / "kbit";
  quantize_model(wanted);
  for (const std::string to : {"gguf", "gguf-q4_0", "gguf-q8_0"}) {
    expect_error(ErrorCode::unsupported, {"kbit4-b32-e4m4 has no equal in GGUF", "gguf-f16"},
                 [&] { to_gguf(wanted.output, to); });
  }
  to_gguf(wanted.output, "gguf-f32");
  from_gguf("decoded", "hf-f32");
  const auto decoded = logits(folder_ / "decoded"), packed = logits(wanted.output);
  // The same weights in other kernels: sums in another order only. Logits are of order 10.
  for (size_t i = 0; i < decoded.size(); ++i) ASSERT_NEAR(decoded[i], packed[i], 1e-3f);
}

TEST_F(Gguf, EveryArchitectureComesBackByteByByte) {
  W4Q_NEEDS_SHARED_DATA();
  for (const char* name :
       {"llama-f16-bias", "llama-plain", "llama-rope-llama3", "mistral-window", "qwen2-bias", "qwen3-qknorm"}) {
    SCOPED_TRACE(name);
    const auto source = test::shared_data() / "arch" / name;
    to_gguf(source, "gguf");
    from_gguf(name);
    EXPECT_EQ(bytes_of_file(folder_ / name / "model.safetensors"), bytes_of_file(source / "model.safetensors"));
    const auto before = model::read_config(source), after = model::read_config(folder_ / name);
    EXPECT_EQ(after.architecture, before.architecture);
    EXPECT_EQ(after.rope.type, before.rope.type);
    EXPECT_EQ(after.rope.theta, before.rope.theta);
    EXPECT_EQ(after.rope.original_max_positions, before.rope.original_max_positions);
    EXPECT_EQ(after.sliding_window, before.sliding_window);
    EXPECT_EQ(after.rms_norm_eps, before.rms_norm_eps);
    EXPECT_EQ(after.qkv_bias, before.qkv_bias);
    EXPECT_EQ(after.output_bias, before.output_bias);
    EXPECT_EQ(after.tied_embeddings, before.tied_embeddings);
    EXPECT_EQ(after.eos_tokens, before.eos_tokens);
  }
}

/// Models of other programs, wrapped ones and MXFP4 among them, compute the same once they have been in a file.
TEST_F(Gguf, FamiliesOfOthersComputeTheSame) {
  W4Q_NEEDS_SHARED_DATA();
  for (const char* name : {"qwen3_5", "gpt-oss", "gpt-oss-mxfp4", "gemma4", "gemma4-moe", "phi3", "phi3-longrope"}) {
    SCOPED_TRACE(name);
    const auto source = test::shared_data() / "families" / name;
    to_gguf(source, "gguf");
    from_gguf(name, "hf-f32");
    // What the folders promise of another implementation's logits.
    const auto report = verify::compare_reference(model::Model::open(folder_ / name), source / "reference.safetensors");
    EXPECT_LE(report.largest(), 1e-4);
  }
}

TEST_F(Gguf, PlansWriteNothing) {
  const auto plan = plan_gguf_export({.input = model_, .output = folder_ / "m.gguf", .to = "gguf-q4_0"});
  EXPECT_FALSE(fs::exists(folder_ / "m.gguf"));
  const auto report = to_gguf(model_, "gguf-q4_0");
  ASSERT_EQ(plan.tensors.size(), report.tensors.size());
  for (size_t i = 0; i < plan.tensors.size(); ++i)
    EXPECT_EQ(plan.tensors[i].bytes_after, report.tensors[i].bytes_after);
  GgufImportRequest request;
  request.input = folder_ / "m.gguf";
  request.output = folder_ / "hf";
  EXPECT_EQ(plan_gguf_import(request).tensors.size(), 38u);
  EXPECT_FALSE(fs::exists(folder_ / "hf"));
}

TEST_F(Gguf, NamesWhatIsMissingOrUnknown) {
  to_gguf(model_, "gguf");
  const auto refuse = [&](ErrorCode code, std::initializer_list<std::string_view> parts, auto change) {
    rewrite(change);
    expect_error(code, parts, [&] { from_gguf("x", "hf16", "changed.gguf"); });
    EXPECT_FALSE(fs::exists(folder_ / "x"));
  };
  refuse(ErrorCode::bad_file, {"\"blk.0.attn_norm.weight\" is missing"},
         [](auto& plan, auto&) { plan.erase(plan.begin() + 1); });
  refuse(ErrorCode::bad_file, {"\"blk.0.attn_norm.weight\" has the wrong shape", "[256]", "[255]"},
         [](auto& plan, auto&) { plan[1].shape = {255}; });
  refuse(ErrorCode::unsupported, {"blk.0.ffn_gate_exps.weight", "no such tensor"}, [](auto& plan, auto&) {
    plan.push_back({"blk.0.ffn_gate_exps.weight", GgmlType::f32, {1}});
  });
  refuse(ErrorCode::unsupported, {"blk.0.attn_q.weight", "IQ1_S cannot be decoded"},
         [](auto& plan, auto&) { plan[2].type = GgmlType::iq1_s; });
  expect_error(ErrorCode::bad_argument, {"--to gguf-q4_0", "hf16, hf-f32, w4q"}, [&] { from_gguf("x", "gguf-q4_0"); });
  expect_error(ErrorCode::bad_argument, {"--to q4", "gguf-q4_0"}, [&] { to_gguf(model_, "q4"); });
}

TEST_F(Gguf, RefusesValuesThatAreNotNumbersOrTooLarge) {
  fs::create_directory(folder_ / "big");
  for (const char* name : {"config.json", "tokenizer.json"}) fs::copy(model_ / name, folder_ / "big" / name);
  const auto change = [&](uint16_t bits) {
    std::string file = bytes_of_file(model_ / "model.safetensors");
    const auto header = io::parse_safetensors(std::as_bytes(std::span(file)), file.size(), "file");
    const auto tensor =
        std::ranges::find(header.tensors, "model.layers.2.self_attn.k_proj.weight", &io::TensorInfo::name);
    std::memcpy(file.data() + header.data_begin + tensor->begin + 2 * (3 * 256 + 5), &bits, 2);
    std::ofstream(folder_ / "big/model.safetensors", std::ios::binary) << file;
  };
  change(bf16_from_f32(70000));
  expect_error(ErrorCode::unsupported, {"model.layers.2.self_attn.k_proj.weight", "too large", "column 5"},
               [&] { to_gguf(folder_ / "big", "gguf-f16"); });
  to_gguf(folder_ / "big", "gguf-bf16");
  change(0x7FC0);
  expect_error(ErrorCode::bad_file, {"k_proj.weight", "not finite"}, [&] { to_gguf(folder_ / "big", "gguf-q8_0"); });
}

TEST_F(Gguf, AModelWithoutATokenizerTravelsToo) {
  fs::create_directory(folder_ / "bare");
  for (const char* name : {"config.json", "model.safetensors"}) fs::copy(model_ / name, folder_ / "bare" / name);
  const auto report = to_gguf(folder_ / "bare", "gguf");
  ASSERT_EQ(report.notes.size(), 1u);
  EXPECT_NE(report.notes[0].find("no tokenizer"), std::string::npos);
  from_gguf("hf");
  EXPECT_FALSE(fs::exists(folder_ / "hf/tokenizer.json"));
  EXPECT_EQ(logits(folder_ / "hf"), logits(model_));
}

}  // namespace
}  // namespace w4q::pipeline
