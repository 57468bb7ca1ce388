// Checkpoints of AutoAWQ and GPTQ as files: what is found in them, and what is refused.
#include <gtest/gtest.h>

#include <map>
#include <memory>

#include "core/text.h"
#include "dialect_samples.h"
#include "support.h"

namespace w4q::checkpoint {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::StoredTensor;
using test::expect_error;

/// One checkpoint of a dialect, in memory until it is read.
class DialectSample {
 public:
  DialectSample(std::string_view dialect, std::string_view scheme, int64_t n, int64_t k)
      : row_(find_dialect(dialect)), weight_(test::sample_integer(formats::parse_scheme(scheme), n, k, 5)) {
    add("layers.0.up_proj", weight_);
    config = {{"quantization_config",
               row_->describe({{"layers.0.up_proj", weight_.scheme, !weight_.scheme.asymmetric}}, {})}};
  }

  void add(const std::string& name, const PackedWeight& weight) {
    for (auto& tensor : row_->encode(weight)) {
      tensors.insert_or_assign(name + tensor.spec.suffix, std::move(tensor));
    }
  }

  const std::filesystem::path& write() {
    std::vector<std::pair<std::string, StoredTensor>> list;
    for (const auto& [name, tensor] : tensors) list.emplace_back(name, StoredTensor{tensor.spec, tensor.bytes.clone()});
    test::write_checkpoint(folder_->path(), config, list);
    return folder_->path();
  }
  QuantizationConfig read() { return test::read_quantization(write()); }
  PackedWeight load() { return test::load_linear(write(), "layers.0.up_proj"); }
  io::Json& quantization() { return config["quantization_config"]; }
  StoredTensor& tensor(const std::string& suffix) { return tensors.at("layers.0.up_proj" + suffix); }
  const PackedWeight& weight() const { return weight_; }
  const DialectRow* row() const { return row_; }

  io::Json config;
  std::map<std::string, StoredTensor> tensors;

 private:
  const DialectRow* row_;
  PackedWeight weight_;
  std::unique_ptr<test::TemporaryFolder> folder_ = std::make_unique<test::TemporaryFolder>();
};

TEST(DialectRead, EveryDialectDetectsItself) {
  for (const std::string dialect : {"awq-gemm", "awq-gemv", "awq-gemv-fast", "awq-marlin", "gptq-v2"}) {
    const bool marlin = dialect == "awq-marlin";
    DialectSample sample(dialect, marlin ? "int4-g128-f16" : "int4-g128-f16-asym", 256, 512);
    const auto found = sample.read();
    ASSERT_NE(found.dialect, nullptr) << dialect;
    EXPECT_EQ(found.dialect->name, dialect);
    EXPECT_TRUE(formats::bytes_equal(sample.load(), sample.weight())) << dialect;
    EXPECT_TRUE(found.notes.empty()) << dialect;
  }
}

/// GPTQModel stores the scales of a BF16 model in BF16.
TEST(DialectRead, ScalesKeepTheirType) {
  for (const auto& [dialect, scheme] :
       {std::pair("awq-gemm", "int4-g128-bf16-asym"), std::pair("awq-gemm", "int4-g64-f32-asym"),
        std::pair("awq-gemv", "int4-g128-bf16-asym"), std::pair("awq-marlin", "int4-g128-bf16"),
        std::pair("gptq-v2", "int4-g128-bf16-asym"), std::pair("gptq-v2", "int8-g32-f32-asym")}) {
    SCOPED_TRACE(concat(dialect, " ", scheme));
    DialectSample sample(dialect, scheme, 256, 512);
    const auto found = sample.read();
    EXPECT_EQ(found.dialect->name, dialect);
    EXPECT_TRUE(found.notes.empty());
    EXPECT_TRUE(formats::bytes_equal(sample.load(), sample.weight()));
    // Of such a checkpoint the type stays; that of another program's becomes what most readers take.
    PackedLinearInfo info = found.linears.begin()->second;
    EXPECT_EQ(sample.row()->fit(info).scheme->scale, sample.weight().scheme.scale);
    info.dialect = nullptr;
    EXPECT_EQ(sample.row()->fit(info).scheme->scale, formats::ScaleType::f16);
  }
}

TEST(DialectRead, GemvFastHasScalesOfF16) {
  DialectSample sample("awq-gemv-fast", "int4-g32-f16-asym", 64, 128);
  sample.tensor(".scales").spec.dtype = DType::bf16;
  expect_error(ErrorCode::bad_file, {"layers.0.up_proj.scales", "expected F16"}, [&] { sample.read(); });
}

// ---- a byte a code --------------------------------------------------------------------------------------------------

/// int8 codes of [64, 128] with scales of this shape and type, under a config.
struct Bytes {
  io::Json config;
  Shape scales;
  DType type = DType::f32;
  std::string suffix = ".weight_scale";
};

formats::PackedWeight load_bytes(const Bytes& bytes) {
  std::vector<std::pair<std::string, StoredTensor>> tensors;
  auto codes = formats::allocate_stored({"", DType::i8, {256, 256}});
  int value = 0;
  for (int8_t& code : codes.bytes.as<int8_t>()) code = static_cast<int8_t>(value++ % 256 - 128);
  auto scales = formats::allocate_stored({"", bytes.type, bytes.scales});
  for (int64_t i = 0; i < element_count(bytes.scales); ++i) {
    const float scale = 0.5f + static_cast<float>(i % 8);
    if (bytes.type == DType::f32) scales.bytes.as<float>()[static_cast<size_t>(i)] = scale;
    if (bytes.type == DType::bf16) scales.bytes.as<uint16_t>()[static_cast<size_t>(i)] = bf16_from_f32(scale);
  }
  tensors.emplace_back("layers.0.up_proj.weight", std::move(codes));
  tensors.emplace_back("layers.0.up_proj" + bytes.suffix, std::move(scales));
  const test::TemporaryFolder folder;
  test::write_checkpoint(folder.path(), {{"quantization_config", bytes.config}}, tensors);
  return test::load_linear(folder.path(), "layers.0.up_proj");
}

io::Json compressed_bytes(const char* format, const char* strategy, io::Json group) {
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"weights", {{"num_bits", 8}, {"type", "int"}, {"strategy", strategy}, {"group_size", std::move(group)}}},
              {"input_activations", {{"num_bits", 8}, {"type", "int"}, {"dynamic", true}}}}}}}};
}

TEST(DialectRead, IntegersOfAByte) {
  const io::Json quark = {{"quant_method", "quark"},
                          {"global_quant_config", {{"weight", {{"dtype", "int8"}, {"qscheme", "per_channel"}}}}}};
  const io::Json modelopt = {{"quant_method", "modelopt"}, {"quant_algo", "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"}};
  const io::Json blocks = {{"quant_method", "blockwise_int8"}, {"weight_block_size", {128, 128}}};
  const Bytes all[] = {{compressed_bytes("int-quantized", "channel", nullptr), {256, 1}, DType::bf16},
                       {compressed_bytes("int-quantized", "tensor", nullptr), {1}},
                       {compressed_bytes("naive-quantized", "group", 64), {256, 4}, DType::bf16},
                       {quark, {256}},
                       {quark, {}},
                       {modelopt, {256}},
                       {{{"quant_method", "w8a8_int8"}}, {256, 1}},
                       {blocks, {2, 2}, DType::f32, ".weight_scale_inv"}};
  for (const Bytes& bytes : all) {
    SCOPED_TRACE(bytes.config.dump() + shape_text(bytes.scales));
    const PackedWeight weight = load_bytes(bytes);
    std::vector<float> row(256);
    for (const int64_t at : {int64_t{0}, int64_t{131}}) {
      formats::scheme_row(weight.scheme.family).decode_row(weight, at, row);
      for (int64_t col = 0; col < 256; ++col) {
        const Shape& shape = bytes.scales;
        const int64_t across = shape.size() == 2 ? shape[1] : 1, count = element_count(shape);
        const int64_t scale_row = count == 1 ? 0 : shape[0] == 2 ? at / 128 : at;
        const auto scale = static_cast<float>((scale_row * across + col * across / 256) % 8) + 0.5f;
        ASSERT_EQ(row[static_cast<size_t>(col)], static_cast<float>((at * 256 + col) % 256 - 128) * scale) << at << col;
      }
    }
  }
}

TEST(DialectRead, IntegersOfAByteThatAreRefused) {
  Bytes wrong{compressed_bytes("int-quantized", "channel", nullptr), {255, 1}};
  expect_error(ErrorCode::bad_file, {"layers.0.up_proj.weight_scale", "[255, 1]"}, [&] { load_bytes(wrong); });
  wrong.scales = {256, 1};
  wrong.config["config_groups"]["group_0"]["weights"]["num_bits"] = 4;
  expect_error(ErrorCode::bad_file, {"layers.0.up_proj.weight[0, 0] is -128", "from -8 to 7"},
               [&] { load_bytes(wrong); });
}

TEST(DialectRead, ShapesDecideTheVersionOfAwq) {
  DialectSample sample("awq-gemv", "int4-g128-f16-asym", 256, 512);
  sample.quantization()["version"] = "GEMM";
  EXPECT_EQ(sample.read().dialect->name, "awq-gemv");
  EXPECT_TRUE(formats::bytes_equal(sample.load(), sample.weight()));
}

TEST(DialectRead, AwqAcceptsItsOwnSpelling) {
  DialectSample sample("awq-gemm", "int4-g32-f16-asym", 64, 128);
  sample.config = {
      {"quantization_config", {{"zero_point", true}, {"q_group_size", 32}, {"w_bit", 4}, {"version", "GEMM"}}}};
  EXPECT_TRUE(formats::bytes_equal(sample.load(), sample.weight()));
}

TEST(DialectRead, ZeroPointsThatAreAllEightAreSymmetric) {
  for (const std::string dialect : {"awq-gemm", "awq-gemv", "awq-gemv-fast", "gptq-v1", "gptq-v2"}) {
    DialectSample sample(dialect, "int4-g64-f16-asym", 64, 192);
    PackedWeight weight = sample.weight().clone();
    std::ranges::fill(weight.plane(PlaneRole::zeros).bytes.as<uint8_t>(), uint8_t{8});
    sample.add("layers.0.up_proj", weight);
    EXPECT_EQ(formats::to_string(sample.load().scheme), "int4-g64-f16") << dialect;
  }
}

TEST(DialectRead, MissingAndMisshapenTensors) {
  for (const std::string dialect : {"awq-gemm", "awq-gemv", "awq-gemv-fast", "gptq-v2"}) {
    for (const std::string suffix : {".qzeros", ".scales"}) {
      DialectSample missing(dialect, "int4-g32-f16-asym", 64, 128);
      missing.tensors.erase("layers.0.up_proj" + suffix);
      expect_error(ErrorCode::bad_file, {"layers.0.up_proj" + suffix}, [&] { missing.read(); });
    }
    DialectSample retyped(dialect, "int4-g32-f16-asym", 64, 128);
    retyped.tensor(".qzeros").spec.dtype = dialect == "awq-gemv-fast" ? DType::bf16 : DType::u32;
    expect_error(ErrorCode::bad_file, {"layers.0.up_proj.qzeros", "wrong type or shape"}, [&] { retyped.read(); });
    DialectSample reshaped(dialect, "int4-g32-f16-asym", 64, 128);
    reshaped.tensor(".qweight").spec.shape = {reshaped.tensor(".qweight").spec.shape[0] *
                                              reshaped.tensor(".qweight").spec.shape[1]};
    expect_error(ErrorCode::bad_file, {"layers.0.up_proj.qweight", "expected a matrix"}, [&] { reshaped.read(); });
  }
}

TEST(DialectRead, WrongGroupSizeInConfig) {
  for (const std::string dialect : {"awq-gemm", "awq-gemv", "gptq-v2"}) {
    DialectSample sample(dialect, "int4-g32-f16-asym", 64, 128);
    sample.quantization()["group_size"] = 64;
    expect_error(ErrorCode::bad_file, {"layers.0.up_proj.", "group_size 64", "found"}, [&] { sample.read(); });
  }
}

TEST(DialectRead, ScalesThatAreNoNumbers) {
  for (const std::string dialect : {"awq-gemm", "gptq-v2"}) {
    DialectSample sample(dialect, "int4-g32-f16-asym", 64, 128);
    sample.tensor(".scales").bytes.as<uint16_t>()[67] = 0x7E00;  // group 1, output 3
    expect_error(ErrorCode::bad_file, {"layers.0.up_proj"}, [&] { sample.load(); });
  }
}

TEST(DialectRead, PaddingOfGemvMustBeZero) {
  DialectSample zeros("awq-gemv", "int4-g32-f16-asym", 64, 128);
  zeros.tensor(".qzeros").bytes.as<uint32_t>()[4] |= 1u << 16;  // field 4 of 4 groups
  expect_error(ErrorCode::bad_file, {"layers.0.up_proj", "padding of its zero points"}, [&] { zeros.load(); });
  DialectSample scales("awq-gemv-fast", "int4-g32-f16-asym", 64, 128);
  scales.tensor(".scales").bytes.as<uint16_t>()[4 * 64 + 1] = 0x3C00;
  expect_error(ErrorCode::bad_file, {"layers.0.up_proj", "padding of its scales"}, [&] { scales.load(); });
}

TEST(DialectRead, OffsetsOfGemvFastAreMultiples) {
  DialectSample sample("awq-gemv-fast", "int4-g32-f16-asym", 64, 128);
  sample.tensor(".qzeros").bytes.as<uint16_t>()[70] = f16_from_f32(-1000.0f);
  expect_error(ErrorCode::bad_file, {"layers.0.up_proj", "offset", "output 6, group 1"}, [&] { sample.load(); });
}

// ---- GPTQ -----------------------------------------------------------------------------------------------------------

/// Without zero points of 0, which version 1 cannot say.
DialectSample version1() {
  DialectSample sample("gptq-v1", "int4-g32-f16-asym", 64, 128);
  PackedWeight weight = sample.weight().clone();
  for (uint8_t& zero : weight.plane(PlaneRole::zeros).bytes.as<uint8_t>()) zero = std::max<uint8_t>(zero, 1);
  sample.add("layers.0.up_proj", weight);
  return sample;
}

TEST(DialectRead, GptqVersion1) {
  DialectSample sample = version1();
  EXPECT_EQ(sample.read().dialect->name, "gptq-v1");
  EXPECT_EQ(formats::to_string(sample.load().scheme), "int4-g32-f16-asym");
  sample.quantization().erase("checkpoint_format");
  EXPECT_EQ(sample.read().dialect->name, "gptq-v1");
}

TEST(DialectRead, GptqConfigOfItsOwnFile) {
  DialectSample sample("gptq-v2", "int3-g32-f16-asym", 64, 128);
  const io::Json side = sample.quantization();
  sample.config = {{"torch_dtype", "bfloat16"}};
  const auto folder = sample.write();
  io::write_file(folder / "quantize_config.json", side.dump(), true);
  EXPECT_TRUE(formats::bytes_equal(test::load_linear(folder, "layers.0.up_proj"), sample.weight()));
  EXPECT_EQ(test::read_quantization(folder).linears.begin()->second.source_dtype, DType::bf16);
}

TEST(DialectRead, ActOrderIsInTheData) {
  DialectSample ordered("gptq-v2", "int4-g32-f16-asym-actorder", 64, 128);
  ordered.quantization()["desc_act"] = false;
  EXPECT_TRUE(formats::bytes_equal(ordered.load(), ordered.weight()));
  DialectSample plain("gptq-v2", "int4-g32-f16-asym", 64, 128);
  plain.quantization()["desc_act"] = true;
  EXPECT_TRUE(formats::bytes_equal(plain.load(), plain.weight()));
  plain.tensors.erase("layers.0.up_proj.g_idx");
  EXPECT_TRUE(formats::bytes_equal(plain.load(), plain.weight()));
}

TEST(DialectRead, GroupIndexOfZerosIsTakenInOrder) {
  DialectSample sample("gptq-v2", "int4-g32-f16-asym", 64, 128);
  std::ranges::fill(sample.tensor(".g_idx").bytes.as<int32_t>(), 0);
  EXPECT_TRUE(formats::bytes_equal(sample.load(), sample.weight()));
  ASSERT_EQ(sample.read().notes.size(), 1u);
  EXPECT_NE(sample.read().notes[0].find("g_idx of zeros"), std::string::npos);
}

TEST(DialectRead, GroupsThatDoNotExist) {
  for (const int32_t group : {-1, 4, 1 << 30}) {
    DialectSample sample("gptq-v2", "int4-g32-f16-asym-actorder", 64, 128);
    sample.tensor(".g_idx").bytes.as<int32_t>()[17] = group;
    expect_error(ErrorCode::bad_file, {"layers.0.up_proj.g_idx[17]", "from 0 to 3"}, [&] { sample.read(); });
  }
}

TEST(DialectRead, BitsThatShapesContradict) {
  DialectSample sample("gptq-v2", "int4-g32-f16-asym", 64, 128);
  sample.quantization()["bits"] = 8;
  expect_error(ErrorCode::bad_file, {"layers.0.up_proj.qweight", "config.json says 8 bits", "4 bits"},
               [&] { sample.read(); });
}

TEST(DialectRead, TheOtherVersionIsSeen) {
  for (const bool second : {false, true}) {
    DialectSample sample(second ? "gptq-v2" : "gptq-v1", "int4-g32-f16-asym", 64, 128);
    PackedWeight weight = sample.weight().clone();
    std::ranges::fill(weight.plane(PlaneRole::zeros).bytes.as<uint8_t>(), uint8_t{8});
    sample.add("layers.0.up_proj", weight);
    sample.quantization()["sym"] = true;
    sample.quantization()["checkpoint_format"] = second ? "gptq" : "gptq_v2";
    expect_error(ErrorCode::bad_file, {"layers.0.up_proj.qzeros", "\"sym\": true", second ? "gptq_v2" : "\"gptq\""},
                 [&] { sample.read(); });
  }
}

TEST(DialectRead, AllOnesInVersion1) {
  DialectSample sample = version1();
  sample.tensor(".qzeros").bytes.as<uint32_t>()[0] |= 15;
  const auto found = sample.read();
  ASSERT_EQ(found.notes.size(), 1u);
  EXPECT_NE(found.notes[0].find("layers.0.up_proj"), std::string::npos);
  EXPECT_EQ(sample.load().plane(PlaneRole::zeros).bytes.as<uint8_t>()[0], 0);
}

TEST(DialectRead, DynamicRules) {
  DialectSample sample("gptq-v2", "int4-g32-f16-asym", 64, 128);
  const auto wide = test::sample_integer(formats::parse_scheme("int8-g64-f16-asym"), 64, 128, 9);
  sample.add("layers.1.down_proj", wide);
  sample.quantization()["dynamic"] = {{"-:.*lm_head", io::Json::object()},
                                      {"+:.*\\.1\\.down_proj$", {{"bits", 8}, {"group_size", 64}}},
                                      {"layers", io::Json::object()}};
  const auto found = sample.read();
  EXPECT_EQ(formats::to_string(found.linears.at("layers.0.up_proj").passes[0].scheme), "int4-g32-f16-asym");
  EXPECT_EQ(formats::to_string(found.linears.at("layers.1.down_proj").passes[0].scheme), "int8-g64-f16-asym");
  EXPECT_TRUE(formats::bytes_equal(test::load_linear(sample.write(), "layers.1.down_proj"), wide));
  sample.quantization()["dynamic"] = {{"(", io::Json::object()}};
  expect_error(ErrorCode::unsupported, {"dynamic"}, [&] { sample.read(); });
  sample.quantization()["dynamic"] = 3;
  expect_error(ErrorCode::bad_file, {"\"dynamic\""}, [&] { sample.read(); });
}

TEST(DialectRead, AutoRoundOverTheWordsOfOthers) {
  DialectSample gptq("gptq-v1", "int4-g32-f16-asym", 64, 128);
  PackedWeight weight = gptq.weight().clone();
  std::ranges::fill(weight.plane(PlaneRole::zeros).bytes.as<uint8_t>(), uint8_t{8});
  gptq.add("layers.0.up_proj", weight);
  gptq.quantization() = {{"quant_method", "auto-round"},
                         {"bits", 4},
                         {"group_size", 32},
                         {"sym", true},
                         {"data_type", "int"},
                         {"packing_format", "auto_round:auto_gptq"},
                         {"extra_config", {{"lm_head", {{"bits", 16}}}}}};
  EXPECT_EQ(gptq.read().dialect->name, "auto-round");
  EXPECT_EQ(formats::to_string(gptq.load().scheme), "int4-g32-f16");
  EXPECT_TRUE(gptq.read().notes.empty());
  DialectSample awq("awq-gemm", "int4-g32-f16-asym", 64, 128);
  awq.quantization() = {{"quant_method", "auto-round"},
                        {"bits", 4},
                        {"group_size", 32},
                        {"sym", false},
                        {"packing_format", "auto_round:auto_awq"}};
  EXPECT_EQ(awq.read().dialect->name, "awq-gemm");
  EXPECT_TRUE(formats::bytes_equal(awq.load(), awq.weight()));
  awq.quantization()["packing_format"] = "auto_round:fp8";
  expect_error(ErrorCode::unsupported, {"auto-round"}, [&] { awq.read(); });
}

TEST(DialectRead, AutoRoundsOwnSettingsOfSomeLinears) {
  for (const std::string key : {"layers.1.down_proj", "1.down_proj", "layers\\.1\\..*_proj"}) {
    DialectSample sample("gptq-v1", "int4-g32-f16-asym", 64, 128);
    PackedWeight weight = sample.weight().clone();
    std::ranges::fill(weight.plane(PlaneRole::zeros).bytes.as<uint8_t>(), uint8_t{7});
    sample.add("layers.0.up_proj", weight);
    auto wide = test::sample_integer(formats::parse_scheme("int8-g64-f16-asym"), 64, 128, 9);
    std::ranges::fill(wide.plane(PlaneRole::zeros).bytes.as<uint8_t>(), uint8_t{127});
    sample.add("layers.1.down_proj", wide);
    sample.quantization() = {{"quant_method", "auto-round"},
                             {"bits", 4},
                             {"group_size", 32},
                             {"sym", false},
                             {"extra_config", {{key, {{"bits", 8}, {"group_size", 64}}}}}};
    const auto found = sample.read();
    EXPECT_EQ(formats::to_string(found.linears.at("layers.0.up_proj").passes[0].scheme), "int4-g32-f16-asym") << key;
    EXPECT_EQ(formats::to_string(found.linears.at("layers.1.down_proj").passes[0].scheme), "int8-g64-f16-asym") << key;
  }
}

TEST(DialectRead, AShuffledOrderThatServersDropIsNoted) {
  DialectSample ordered("gptq-v2", "int4-g32-f16-asym-actorder", 64, 128);
  EXPECT_TRUE(ordered.read().notes.empty());
  ordered.quantization()["desc_act"] = false;
  ASSERT_EQ(ordered.read().notes.size(), 1u);
  EXPECT_NE(ordered.read().notes[0].find("servers drop"), std::string::npos);
}

/// What a dialect's config says of q, k and v of one layer that stay in 16 bit beside a packed one, and experts too.
TEST(DialectWrite, ListsNameWhatServersFuse) {
  const auto scheme = formats::parse_scheme("int4-g32-f16-asym");
  const std::vector<DialectLinear> linears{{"model.layers.0.self_attn.q_proj", scheme, false, 64, 64},
                                           {"model.layers.1.self_attn.o_proj", scheme, false, 64, 64}};
  const std::vector<std::string> kept{"model.layers.0.self_attn.k_proj", "model.layers.1.self_attn.q_proj",
                                      "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.experts.0.gate_proj"};
  const std::string fused = "model.layers.1.self_attn.qkv_proj", mixture = "model.layers.1.mlp.experts";
  for (const auto& [dialect, key] :
       {std::pair("compressed-tensors", "ignore"), std::pair("awq-gemm", "modules_to_not_convert")}) {
    const io::Json list = find_dialect(dialect)->describe(linears, kept)[key];
    EXPECT_EQ(std::ranges::count(list, io::Json(fused)), 1) << dialect << list;
    EXPECT_EQ(std::ranges::count(list, io::Json(mixture)), 1) << dialect << list;
    EXPECT_EQ(std::ranges::count(list, io::Json("model.layers.0.self_attn.qkv_proj")), 0) << dialect << list;
  }
  const io::Json rules = find_dialect("gptq-v2")->describe(linears, kept)["dynamic"];
  EXPECT_TRUE(rules.contains("-:^model\\.layers\\.1\\.self_attn\\.qkv_proj$")) << rules;
  EXPECT_FALSE(rules.contains("-:^model\\.layers\\.0\\.self_attn\\.qkv_proj$")) << rules;
}

TEST(DialectWrite, RulesNameFusedLayersWhosePartsAgree) {
  const auto four = formats::parse_scheme("int4-g32-f16-asym"), eight = formats::parse_scheme("int8-g32-f16-asym");
  std::vector<DialectLinear> linears;
  for (int layer = 0; layer < 3; ++layer) {
    for (const char* part : {"q_proj", "k_proj", "v_proj", "o_proj"}) {
      const bool wide = part[0] != 'o' && (layer == 0 || (layer == 1 && part[0] == 'q'));
      linears.push_back({concat("model.layers.", layer, ".self_attn.", part), wide ? eight : four, false, 64, 64});
    }
  }
  const io::Json rules = find_dialect("gptq-v1")->describe(linears, {})["dynamic"];
  EXPECT_EQ(rules["+:^model\\.layers\\.0\\.self_attn\\.qkv_proj$"]["bits"], 8) << rules;
  EXPECT_FALSE(rules.contains("+:^model\\.layers\\.1\\.self_attn\\.qkv_proj$")) << rules;
}

/// Of AutoRound, whose lists hold paths: fused names too, 16 bits for what stays, and an entry for a packed head.
TEST(DialectWrite, AutoRoundListsWhatIsNotAsMostAre) {
  const auto four = formats::parse_scheme("int4-g32-f16"), eight = formats::parse_scheme("int8-g64-f16");
  std::vector<checkpoint::DialectLinear> linears{{"lm_head", four, true, 64, 64}};
  for (const char* part : {"q_proj", "k_proj", "v_proj"})
    linears.push_back({concat("model.layers.0.self_attn.", part), eight, true, 64, 64});
  for (int layer = 1; layer < 4; ++layer)
    linears.push_back({concat("model.layers.", layer, ".self_attn.q_proj"), four, true, 64, 64});
  const io::Json config =
      find_dialect("auto-round")->describe(linears, {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"});
  EXPECT_EQ(config["quant_method"], "auto-round");
  EXPECT_EQ(config["packing_format"], "auto_round:auto_gptq");
  EXPECT_EQ(config["block_name_to_quantize"], "model.layers");
  EXPECT_EQ(config["bits"], 4);
  const io::Json& extra = config["extra_config"];
  for (const char* part : {"q_proj", "k_proj", "v_proj", "qkv_proj"})
    EXPECT_EQ(extra[concat("model.layers.0.self_attn.", part)]["bits"], 8) << extra;
  for (const char* part : {"gate_proj", "up_proj", "gate_up_proj"})
    EXPECT_EQ(extra[concat("model.layers.0.mlp.", part)]["bits"], 16) << extra;
  EXPECT_EQ(extra["lm_head"]["bits"], 4);
  EXPECT_EQ(extra.size(), 8u) << extra;
}

TEST(DialectWrite, APackedHeadIsATargetOfItsOwn) {
  const auto scheme = formats::parse_scheme("int4-g32-f16");
  const io::Json config =
      find_dialect("compressed-tensors")
          ->describe({{"model.layers.0.mlp.up_proj", scheme, true, 64, 64}, {"lm_head", scheme, true, 64, 64}}, {});
  EXPECT_EQ(config["config_groups"]["group_0"]["targets"], io::Json({"Linear", "lm_head"}));
  EXPECT_TRUE(config["ignore"].empty());
}

TEST(DialectRead, ConfigsThatAreRefused) {
  const std::tuple<const char*, io::Json, ErrorCode, const char*> wrong[] = {
      {"bits", "4", ErrorCode::bad_file, "an integer"},
      {"bits", 9, ErrorCode::bad_file, "an integer"},
      {"group_size", -2, ErrorCode::bad_file, "an integer"},
      {"sym", 1, ErrorCode::bad_file, "true or false"},
      {"pack_dtype", "int64", ErrorCode::unsupported, "int32"},
      {"checkpoint_format", "gptq_p", ErrorCode::unsupported, "gptq_p"},
      {"quant_method", "spqr", ErrorCode::unsupported, "spqr"},
      {"quant_method", "torchao", ErrorCode::unsupported, "torchao"},
      {"quant_method", "hqq", ErrorCode::unsupported, "no integers"},
      {"quant_method", 7, ErrorCode::bad_file, "a text"}};
  for (const auto& [key, value, code, part] : wrong) {
    DialectSample sample("gptq-v2", "int4-g32-f16-asym", 64, 128);
    sample.quantization()[key] = value;
    expect_error(code, {part}, [&] { sample.read(); });
  }
}

/// Every key of every dialect, in every kind that it is not.
TEST(DialectRead, KeysOfAnotherKind) {
  const io::Json huge = 18446744073709551615u, list = io::Json::array({4});
  const std::map<std::string, std::vector<io::Json>> wrong = {
      {"bits", {"4", 4.0, true, list, huge, 1e30, -4, 0}},
      {"group_size", {"128", 128.0, true, list, huge, 1e30, -2}},
      {"zero_point", {"true", 1, 1.0, list}},
      {"sym", {"true", 1, list}},
      {"desc_act", {"true", 1, list}},
      {"version", {4, true, list}},
      {"quant_method", {4, list}}};
  for (const std::string dialect : {"awq-gemm", "awq-gemv", "gptq-v1", "gptq-v2", "marlin"}) {
    for (const auto& [key, values] : wrong) {
      for (const io::Json& value : values) {
        const bool symmetric = dialect == "marlin";
        DialectSample sample(dialect, symmetric ? "int4-g128-f16" : "int4-g128-f16-asym", 256, 512);
        sample.quantization()[key] = value;
        SCOPED_TRACE(concat(dialect, " ", key, " ", value.dump()));
        expect_error(ErrorCode::bad_file, {"quantization_config", key, value.dump(), "expected"},
                     [&] { sample.read(); });
      }
    }
  }
  const std::map<std::string, std::vector<io::Json>> wrong_weights = {
      {"num_bits", {"4", 4.0, true, list, huge, 1e30, 1, 9}},
      {"group_size", {"128", 128.0, true, list, huge, 1e30}},
      {"symmetric", {"true", 1, list}},
      {"dynamic", {"true", 1}},
      {"type", {4, list}},
      {"strategy", {4, true}}};
  for (const auto& [key, values] : wrong_weights) {
    for (const io::Json& value : values) {
      DialectSample sample("compressed-tensors", "int4-g128-f16", 256, 512);
      sample.quantization()["config_groups"]["group_0"]["weights"][key] = value;
      SCOPED_TRACE(concat(key, " ", value.dump()));
      expect_error(ErrorCode::bad_file, {"config_groups.group_0.weights", key, value.dump(), "expected"},
                   [&] { sample.read(); });
    }
  }
}

TEST(DialectRead, WhatIsSaidOfActivationsIsNoted) {
  DialectSample sample("compressed-tensors", "int8-row-f16", 256, 512);
  EXPECT_TRUE(sample.read().notes.empty());
  sample.quantization()["config_groups"]["group_0"]["input_activations"] = {{"num_bits", 8}, {"type", "int"}};
  sample.quantization()["kv_cache_scheme"] = {{"num_bits", 8}, {"type", "float"}};
  const auto notes = sample.read().notes;
  ASSERT_EQ(notes.size(), 2u);
  EXPECT_NE(notes[0].find("input_activations (num_bits 8, type \"int\")"), std::string::npos) << notes[0];
  EXPECT_NE(notes[1].find("kv_cache_scheme"), std::string::npos) << notes[1];
  sample.quantization()["config_groups"]["group_0"]["input_activations"] = 8;
  expect_error(ErrorCode::bad_file, {"group_0", "input_activations", "is 8", "expected an object or null"},
               [&] { sample.read(); });
}

TEST(DialectRead, NothingIsPacked) {
  DialectSample sample("gptq-v2", "int4-g32-f16-asym", 64, 128);
  sample.tensors.clear();
  sample.tensors["model.norm.weight"] = formats::allocate_stored({"", DType::f16, {8}});
  EXPECT_TRUE(sample.read().linears.empty());
}

}  // namespace
}  // namespace w4q::checkpoint
