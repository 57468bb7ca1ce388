// Checkpoints of exllamav3 as files: what is found in them, and what is refused.
#include <gtest/gtest.h>

#include <limits>
#include <map>

#include "core/text.h"
#include "dialect_samples.h"
#include "formats/exl3.h"
#include "support.h"

namespace w4q::checkpoint {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::StoredTensor;
using test::expect_error;

constexpr const char* linear = "layers.0.up_proj";

/// Random codes, scales of ± powers of two.
PackedWeight sample(std::string_view scheme, int64_t n, int64_t k) {
  PackedWeight weight = formats::allocate_canonical(formats::parse_scheme(scheme), n, k);
  uint64_t draw = 0;
  for (uint32_t& word : weight.plane(PlaneRole::codes).bytes.as<uint32_t>()) {
    word = static_cast<uint32_t>(random_bits(3, draw++));
  }
  for (const PlaneRole role : {PlaneRole::scales, PlaneRole::input_scales}) {
    for (uint16_t& bits : weight.plane(role).bytes.as<uint16_t>()) {
      bits = static_cast<uint16_t>(0x3000 | (random_bits(3, draw++) & 0x8C00));
    }
  }
  return weight;
}

class Exl3Files {
 public:
  explicit Exl3Files(std::string_view scheme = "exl3-3", int64_t n = 256, int64_t k = 128)
      : row_(find_dialect("exl3")), weight_(sample(scheme, n, k)) {
    for (auto& tensor : row_->encode(weight_)) {
      const std::string suffix = tensor.spec.suffix;
      put(suffix, std::move(tensor));
    }
    config = {{"quantization_config", row_->describe({{linear, weight_.scheme, true, n, k}}, {})}};
  }

  void put(const std::string& suffix, StoredTensor tensor) {
    tensors.insert_or_assign(linear + suffix, std::move(tensor));
  }
  StoredTensor& tensor(const std::string& suffix) { return tensors.at(linear + suffix); }
  void reshape(const std::string& suffix, DType dtype, Shape shape) {
    put(suffix, formats::allocate_stored({suffix, dtype, std::move(shape)}));
  }

  const std::filesystem::path& write() {
    std::vector<std::pair<std::string, StoredTensor>> list;
    for (const auto& [name, tensor] : tensors) list.emplace_back(name, StoredTensor{tensor.spec, tensor.bytes.clone()});
    test::write_checkpoint(folder_.path(), config, list);
    return folder_.path();
  }
  QuantizationConfig read() { return test::read_quantization(write()); }
  PackedWeight load() { return test::load_linear(write(), linear); }
  const PackedWeight& weight() const { return weight_; }

  io::Json config;
  std::map<std::string, StoredTensor> tensors;

 private:
  const DialectRow* row_;
  PackedWeight weight_;
  test::TemporaryFolder folder_;
};

TEST(DialectExl3, EveryWidthAndCodeIsRead) {
  for (int bits = 1; bits <= 8; ++bits) {
    for (const char* code : {"", "-mcg", "-3inst"}) {
      Exl3Files files(concat("exl3-", bits, code));
      const auto found = files.read();
      ASSERT_NE(found.dialect, nullptr);
      EXPECT_EQ(found.dialect->name, "exl3");
      EXPECT_EQ(formats::to_string(found.linears.at(linear).passes.front().scheme), concat("exl3-", bits, code));
      EXPECT_TRUE(formats::bytes_equal(files.load(), files.weight())) << bits << code;
    }
  }
}

TEST(DialectExl3, TheFileBesideConfigStandsInForIt) {
  Exl3Files files;
  const io::Json quantization = files.config["quantization_config"];
  files.config = io::Json::object();
  const auto folder = files.write();
  io::write_file(folder / "quantization_config.json", quantization.dump(), true);
  EXPECT_EQ(test::read_quantization(folder).linears.size(), 1u);
}

TEST(DialectExl3, SignsOfOlderFilesAreScales) {
  Exl3Files files("exl3-3-3inst");
  files.config["quantization_config"].erase("codebook");
  PackedWeight expected = files.weight().clone();
  for (const auto& [role, scales, signs] :
       {std::tuple{PlaneRole::input_scales, ".suh", ".su"}, std::tuple{PlaneRole::scales, ".svh", ".sv"}}) {
    const auto bits = expected.plane(role).bytes.as<uint16_t>();
    StoredTensor words = formats::allocate_stored({signs, DType::i16, {static_cast<int64_t>(bits.size() / 16)}});
    for (size_t i = 0; i < bits.size(); ++i) {
      const bool negative = random_bits(5, i) % 2 != 0;
      bits[i] = negative ? 0xBC00 : 0x3C00;
      if (negative) words.bytes.as<uint16_t>()[i / 16] |= static_cast<uint16_t>(1u << (i % 16));
    }
    files.tensors.erase(std::string(linear) + scales);
    files.put(signs, std::move(words));
  }
  EXPECT_TRUE(formats::bytes_equal(files.load(), expected));
}

TEST(DialectExl3, BitsOfTheConfigAreAMean) {
  const DialectRow* row = find_dialect("exl3");
  const auto at = [](const char* name, const char* scheme, int64_t n) {
    return DialectLinear{name, formats::parse_scheme(scheme), true, n, 128};
  };
  const io::Json json =
      row->describe({at("a", "exl3-3", 128), at("b", "exl3-4", 384), at("lm_head", "exl3-6", 256)}, {});
  EXPECT_EQ(json["bits"], 3.75);
  EXPECT_EQ(json["head_bits"], 6);
  EXPECT_EQ(json["codebook"], "mul1");
  expect_error(ErrorCode::unsupported, {"b: EXL3 has one codebook", "mcg"}, [&] {
    row->describe({at("a", "exl3-3", 128), at("b", "exl3-4-mcg", 128)}, {});
  });
}

TEST(DialectExl3, ShapesOfCodes) {
  const auto refused = [](const Shape& shape, DType dtype, std::string_view what) {
    Exl3Files files;
    files.reshape(".trellis", dtype, shape);
    expect_error(ErrorCode::bad_file, {"layers.0.up_proj.trellis", what, "found"}, [&] { files.read(); });
  };
  refused({8, 16, 48}, DType::i32, "wrong type or shape");
  refused({8, 16 * 48}, DType::i16, "wrong type or shape");
  refused({8, 16, 0}, DType::i16, "no such width");
  refused({8, 16, 16 * 9}, DType::i16, "no such width");
  refused({8, 16, 47}, DType::i16, "no such width");
  refused({7, 16, 48}, DType::i16, "multiples of 128");
  refused({8, 12, 48}, DType::i16, "multiples of 128");
  refused({0, 16, 48}, DType::i16, "multiples of 128");
}

TEST(DialectExl3, ShapesOfScales) {
  for (const std::string suffix : {".suh", ".svh"}) {
    Exl3Files missing;
    missing.tensors.erase(linear + suffix);
    expect_error(ErrorCode::bad_file, {linear + suffix}, [&] { missing.read(); });
    Exl3Files longer;
    longer.reshape(suffix, DType::f16, {512});
    expect_error(ErrorCode::bad_file, {linear + suffix, "wrong type or shape"}, [&] { longer.read(); });
    Exl3Files retyped;
    retyped.reshape(suffix, DType::bf16, {suffix == ".suh" ? 128 : 256});
    expect_error(ErrorCode::bad_file, {linear + suffix, "wrong type or shape"}, [&] { retyped.read(); });
    Exl3Files both;
    const std::string signs = suffix.substr(0, 3);
    both.reshape(signs, DType::i16, {suffix == ".suh" ? 8 : 16});
    expect_error(ErrorCode::bad_file, {linear + signs, "stands beside"}, [&] { both.read(); });
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      Exl3Files odd;
      odd.tensor(suffix).bytes.as<uint16_t>()[17] = f16_from_f32(bad);
      expect_error(ErrorCode::bad_file, {linear + suffix, "[17]", "finite"}, [&] { odd.load(); });
    }
  }
}

TEST(DialectExl3, TensorsOfTheCode) {
  Exl3Files missing;
  missing.tensors.erase(std::string(linear) + ".mul1");
  expect_error(ErrorCode::bad_file, {"layers.0.up_proj.mul1: is missing", "codebook \"mul1\""},
               [&] { missing.read(); });
  Exl3Files both;
  StoredTensor mcg = formats::allocate_stored({".mcg", DType::i32, {}});
  mcg.bytes.as<uint32_t>()[0] = formats::exl3_mcg;
  both.put(".mcg", std::move(mcg));
  expect_error(ErrorCode::bad_file, {"layers.0.up_proj.mcg", "one code"}, [&] { both.read(); });
  Exl3Files other;
  other.tensor(".mul1").bytes.as<uint32_t>()[0] = 12345;
  expect_error(ErrorCode::bad_file, {"layers.0.up_proj.mul1", "12345", "2212286765"}, [&] { other.read(); });
  Exl3Files several;
  several.reshape(".mul1", DType::i32, {2});
  expect_error(ErrorCode::bad_file, {"layers.0.up_proj.mul1", "wrong type or shape"}, [&] { several.read(); });
}

TEST(DialectExl3, ScalesWithoutCodes) {
  Exl3Files files;
  files.tensors.erase(std::string(linear) + ".trellis");
  expect_error(ErrorCode::bad_file, {"layers.0.up_proj.trellis: is missing"}, [&] { files.read(); });
}

TEST(DialectExl3, NoOtherSchemeBecomesIt) {
  const DialectRow* row = find_dialect("exl3");
  for (const char* scheme : {"trellis3", "kbit3-b32-e4m4", "int4-g128-f16"}) {
    PackedLinearInfo info{"w", 128, 128, DType::f16, {{formats::parse_scheme(scheme), "canonical"}}};
    const DialectFit fit = row->fit(info);
    EXPECT_FALSE(fit.scheme.has_value());
    EXPECT_NE(fit.loses.find("quantize --scheme exl3"), std::string::npos);
  }
}

}  // namespace
}  // namespace w4q::checkpoint
