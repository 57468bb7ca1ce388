// bitsandbytes' 4-bit tensors against the golden files, and there and back.
#include "formats/dialect/bitsandbytes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "core/rng.h"
#include "formats/lut.h"
#include "io/checkpoint.h"
#include "support.h"

namespace w4q::formats {
namespace {

struct Rng {
  explicit Rng(uint64_t seed_) : seed(seed_) {}
  uint64_t bits() noexcept { return random_bits(seed, next++); }

  uint64_t seed;
  uint64_t next = 0;
};

float golden_offset(const std::string& text) {
  const auto at = text.find("nested_offset\": ");
  return at == std::string::npos ? 0.0f : static_cast<float>(std::stod(text.substr(at + 16)));
}

void expect_golden(const std::string& name, const std::string& type, bool nested) {
  const auto file = io::Checkpoint::open(test::testdata() / "golden" / (name + ".safetensors"));
  const Scheme scheme = parse_scheme(nested ? "lut4-b64-nested" : "lut4-b64-f32");
  std::vector<StoredTensor> theirs;
  std::vector<StoredSpec> specs = bitsandbytes_specs(scheme, 24, 128);
  const std::string state_name = "weight.quant_state.bitsandbytes__" + type;
  specs.push_back({"." + state_name, DType::u8, file.at(state_name).shape});
  for (const StoredSpec& spec : specs) {
    const auto loaded = file.load(spec.suffix.substr(1));
    ASSERT_EQ(loaded->shape, spec.shape) << spec.suffix;
    ASSERT_EQ(loaded->dtype, spec.dtype) << spec.suffix;
    theirs.push_back({spec, Buffer::copy_of(loaded->bytes)});
  }
  const auto state_bytes = theirs.back().bytes.bytes();
  const std::string text(reinterpret_cast<const char*>(state_bytes.data()), state_bytes.size());
  const BitsandbytesState state{type, 64, "float32", 24, 128, nested, golden_offset(text)};
  EXPECT_EQ(to_json_text(state), text);
  const PackedWeight weight = decode_bitsandbytes(state, theirs);
  scheme_row(SchemeFamily::lut).validate(weight, "w");
  EXPECT_EQ(bitsandbytes_type(weight), type);

  const auto ours = encode_bitsandbytes(weight, "float32");
  ASSERT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_EQ(ours[i].spec, theirs[i].spec);
    EXPECT_TRUE(std::ranges::equal(ours[i].bytes.bytes(), theirs[i].bytes.bytes())) << ours[i].spec.suffix;
  }
}

TEST(Bitsandbytes, GoldenTensors) {
  for (const std::string type : {"nf4", "fp4"}) {
    expect_golden("bnb_" + type, type, false);
    expect_golden("bnb_" + type + "_nested", type, true);
  }
}

TEST(Bitsandbytes, EveryBlockAndShapeReturns) {
  Rng rng(5);
  for (int round = 0; round < 200; ++round) {
    const auto n = static_cast<int64_t>(1 + rng.bits() % 40);
    const auto k = static_cast<int64_t>(1 + rng.bits() % 100);
    const bool nested = rng.bits() % 2 == 0;
    const Scheme scheme{SchemeFamily::lut, lut_bits, 32 << (rng.bits() % 8),
                        nested ? ScaleType::nested : ScaleType::f32};
    std::vector<float> values(static_cast<size_t>(n * k));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(random_normal(6, i));
    const auto& table = rng.bits() % 2 == 0 ? nf4_table() : fp4_table();
    const PackedWeight weight = scheme_row(SchemeFamily::lut).encode(scheme, values, n, k, table);
    const auto tensors = encode_bitsandbytes(weight, "bfloat16");
    BitsandbytesState state{std::string(bitsandbytes_type(weight)), scheme.block, "bfloat16", n, k, nested};
    if (nested) state.nested_offset = weight.plane(PlaneRole::nested_offset).bytes.as<float>()[0];
    EXPECT_TRUE(bytes_equal(decode_bitsandbytes(state, tensors), weight)) << to_string(scheme) << " " << n << " " << k;
  }
}

TEST(Bitsandbytes, WritesFloatsAsPythonDoes) {
  const auto offset = [](float value) {
    const std::string text = to_json_text({"nf4", 64, "float16", 1, 1, true, value});
    return text.substr(text.find("offset\": ") + 9);
  };
  EXPECT_EQ(offset(0.5f), "0.5}");
  EXPECT_EQ(offset(2.0f), "2.0}");
  EXPECT_EQ(offset(0.0f), "0.0}");
  EXPECT_EQ(offset(0.1f), "0.10000000149011612}");
  EXPECT_EQ(offset(0x1p-20f), "9.5367431640625e-07}");
}

}  // namespace
}  // namespace w4q::formats
