// Checkpoints of compressed-tensors, Marlin and bitsandbytes as files: what is found in them, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>

#include "checkpoint/fused.h"
#include "core/rng.h"
#include "dialect_samples.h"
#include "formats/lut.h"
#include "support.h"

namespace w4q::checkpoint {
namespace {

using formats::PackedWeight;
using formats::StoredTensor;
using test::expect_error;

const std::string up = "layers.0.up_proj";
const std::string query = "layers.0.q_proj";

/// Two linears of a dialect, in memory until they are read.
class Sample {
 public:
  Sample(std::string_view dialect, PackedWeight first, PackedWeight second) : row_(find_dialect(dialect)) {
    add(up, std::move(first));
    add(query, std::move(second));
    describe();
  }

  void describe(const std::vector<std::string>& kept = {}) {
    config = {{"quantization_config", row_->describe(linears_, kept)}};
  }
  QuantizationConfig read() { return test::read_quantization(write()); }
  void expect_returns() {
    for (const auto& [name, weight] : weights_) {
      EXPECT_TRUE(bytes_equal(test::load_linear(write(), name), weight)) << name;
    }
  }
  const DialectRow* row() const { return row_; }
  io::Json& quantization() { return config["quantization_config"]; }
  StoredTensor& tensor(const std::string& name) { return tensors.at(name); }

  io::Json config;
  std::map<std::string, StoredTensor> tensors;

 private:
  void add(const std::string& name, PackedWeight weight) {
    for (auto& tensor : row_->encode(weight)) tensors.insert_or_assign(name + tensor.spec.suffix, std::move(tensor));
    linears_.push_back({name, weight.scheme, !weight.scheme.asymmetric});
    weights_.emplace(name, std::move(weight));
  }
  std::filesystem::path write() {
    folder_ = std::make_unique<test::TemporaryFolder>();
    std::vector<std::pair<std::string, StoredTensor>> list;
    for (const auto& [name, tensor] : tensors) list.emplace_back(name, StoredTensor{tensor.spec, tensor.bytes.clone()});
    test::write_checkpoint(folder_->path(), config, list);
    return folder_->path();
  }

  const DialectRow* row_;
  std::vector<DialectLinear> linears_;
  std::map<std::string, PackedWeight> weights_;
  std::unique_ptr<test::TemporaryFolder> folder_;
};

PackedWeight integers(std::string_view scheme, int64_t n, int64_t k) {
  return test::sample_integer(formats::parse_scheme(scheme), n, k, 3);
}

PackedWeight table(std::string_view scheme, const std::array<float, formats::lut_entries>& entries, int64_t n,
                   int64_t k) {
  std::vector<float> values(static_cast<size_t>(n * k));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(random_normal(9, i));
  const auto& row = formats::scheme_row(formats::SchemeFamily::lut);
  return row.encode(formats::parse_scheme(scheme), values, n, k, entries);
}

TEST(DialectFormats, CompressedTensorsWithTwoGroupsOfTheConfig) {
  for (const std::string dialect : {"compressed-tensors", "compressed-tensors-0.17"}) {
    Sample sample(dialect, integers("int3-g32-bf16-asym", 64, 128), integers("int6-row-f16", 32, 128));
    const auto found = sample.read();
    ASSERT_NE(found.dialect, nullptr);
    EXPECT_EQ(found.dialect->name, dialect);
    EXPECT_EQ(sample.quantization()["config_groups"].size(), 2u);
    sample.expect_returns();
  }
}

TEST(DialectFormats, CompressedTensorsFindsTheCloserTarget) {
  Sample sample("compressed-tensors", integers("int4-g32-bf16", 64, 128), integers("int8-row-f16", 32, 128));
  auto& groups = sample.quantization()["config_groups"];
  // A class, a pattern from the start of the path, and the path itself, which wins.
  groups["group_0"]["targets"] = {"Linear", "re:.*q_proj"};
  groups["group_1"]["targets"] = {query};
  sample.expect_returns();
  groups["group_1"]["targets"] = {"re:layers\\.\\d+\\.q_"};
  groups["group_0"]["targets"] = {"Linear"};
  sample.expect_returns();
  groups["group_1"]["targets"] = {"re:q_proj"};  // not at the start
  EXPECT_THROW(sample.read(), Error);
}

/// transformers has other names for what stands around a text model: the list is of expressions that find both.
TEST(DialectFormats, NamesAroundATextModelAreFoundWherever) {
  const std::vector<std::string> plain{"lm_head", "model.layers.0.mlp.gate"};
  EXPECT_EQ(names_wherever(plain, {"model.layers.0.mlp.up_proj"}), plain);
  const auto found = names_wherever(
      {"language_model.lm_head", "vision_tower.layers.0.q_proj", "language_model.model.layers.1.mlp.up_proj"},
      {"language_model.model.layers.0.mlp.up_proj"});
  EXPECT_EQ(found, (std::vector<std::string>{R"(re:(.*\.)?lm_head$)", R"(re:(.*\.)?vision_tower\.layers\.0\.q_proj$)",
                                             R"(re:(.*\.)?language_model\.(model\.)?layers\.1\.mlp\.up_proj$)"}));
}

TEST(DialectFormats, CompressedTensorsWithOneScaleOrder) {
  Sample sample("compressed-tensors", integers("int4-row-f16", 8, 64), integers("int4-row-f16", 8, 64));
  auto& weights = sample.quantization()["config_groups"]["group_0"]["weights"];
  weights["strategy"] = "tensor";
  for (const auto& name : {up, query}) {
    auto& scale = sample.tensor(name + ".weight_scale");
    scale.spec.shape = {1};
    scale.bytes = Buffer::copy_of(scale.bytes.bytes().first(2));
  }
  EXPECT_EQ(sample.read().linears.size(), 2u);
}

TEST(DialectFormats, CompressedTensorsRefuses) {
  const auto sample = [] {
    return Sample("compressed-tensors", integers("int3-g32-bf16", 64, 128), integers("int3-g32-bf16", 32, 128));
  };
  auto wrong = sample();
  wrong.quantization()["format"] = "marlin-24";
  expect_error(ErrorCode::unsupported, {"marlin-24", "only pack-quantized"}, [&] { wrong.read(); });
  wrong = sample();
  wrong.quantization()["config_groups"]["group_0"]["weights"]["type"] = "float";
  expect_error(ErrorCode::unsupported, {"weights of type float"}, [&] { wrong.read(); });
  wrong = sample();
  wrong.quantization()["config_groups"]["group_0"]["weights"]["num_bits"] = 4;
  expect_error(ErrorCode::bad_file, {".weight_packed", "wrong number of words"}, [&] { wrong.read(); });
  wrong = sample();
  wrong.quantization()["config_groups"]["group_0"]["weights"]["symmetric"] = false;
  expect_error(ErrorCode::bad_file, {".weight_zero_point"}, [&] { wrong.read(); });
  wrong = sample();
  wrong.quantization()["config_groups"]["group_0"]["targets"] = {up};
  expect_error(ErrorCode::bad_file, {query, "no target"}, [&] { wrong.read(); });
  // Shapes that both packings have.
  Sample unclear("compressed-tensors", integers("int3-row-bf16", 8, 100), integers("int3-row-bf16", 8, 100));
  unclear.expect_returns();
  unclear.quantization()["version"] = "0.17.0";
  expect_error(ErrorCode::unsupported, {"two packings"}, [&] { unclear.read(); });
  EXPECT_FALSE(
      find_dialect("compressed-tensors-0.17")
          ->fit(test::dialect_info(*find_dialect("compressed-tensors"), formats::parse_scheme("int3-row-bf16"), 8, 100))
          .scheme);
}

TEST(DialectFormats, Marlin) {
  Sample sample("marlin", integers("int4-g128-f16", 256, 256), integers("int4-g128-f16", 512, 128));
  EXPECT_EQ(sample.read().dialect->name, "marlin");
  sample.expect_returns();
  sample.quantization()["group_size"] = -1;
  expect_error(ErrorCode::bad_file, {up + ".s", "expected F16 [1, 256]", "group_size -1"}, [&] { sample.read(); });
}

TEST(DialectFormats, Bitsandbytes) {
  for (const bool fp4 : {false, true}) {
    const auto& entries = fp4 ? formats::fp4_table() : formats::nf4_table();
    Sample sample(fp4 ? "bitsandbytes-fp4" : "bitsandbytes-nf4", table("lut4-b64-nested", entries, 24, 100),
                  table("lut4-b128-f32", entries, 7, 33));
    EXPECT_EQ(sample.read().dialect, sample.row());
    sample.expect_returns();
    // The codes may stand under another type.
    auto& codes = sample.tensor(up + ".weight");
    codes.spec.dtype = DType::bf16;
    codes.spec.shape = {600, 1};
    sample.expect_returns();
  }
}

TEST(DialectFormats, BitsandbytesRefuses) {
  const std::string state = up + ".weight.quant_state.bitsandbytes__nf4";
  const auto refused = [&](std::string_view from, std::string_view to, std::string_view part) {
    Sample sample("bitsandbytes-nf4", table("lut4-b64-f32", formats::nf4_table(), 24, 64),
                  table("lut4-b64-f32", formats::nf4_table(), 24, 64));
    auto& tensor = sample.tensor(state);
    std::string text(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
    text.replace(text.find(from), from.size(), to);
    tensor.bytes = Buffer::copy_of(std::as_bytes(std::span(text)));
    tensor.spec.shape = {static_cast<int64_t>(text.size())};
    expect_error(ErrorCode::bad_file, {up, part}, [&] { sample.read(); });
  };
  refused("\"nf4\"", "\"fp4\"", "which its name does not");
  refused("\"blocksize\": 64", "\"blocksize\": 65", "blocksize 65 does not exist");
  refused("\"blocksize\": 64", "\"blocksize\": 128", ".weight.absmax");
  refused("[24, 64]", "[24, 65]", ".weight: wrong number of bytes");
  refused("[24, 64]", "24", "not that of a matrix");
  refused("\"shape\"", "\"form\"", "has no \"shape\"");
  refused("{", "[", "");
  // Integers have no place in a table.
  const auto& row = *find_dialect("bitsandbytes-nf4");
  const PackedLinearInfo info{"w", 8, 64, DType::f16, {{formats::parse_scheme("int4-g32-f16"), "canonical"}}};
  EXPECT_FALSE(row.fit(info).scheme);
  EXPECT_NE(row.refuses(table("lut4-b64-f32", formats::fp4_table(), 8, 64)), "");
}

}  // namespace
}  // namespace w4q::checkpoint
