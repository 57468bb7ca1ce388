// The layouts of integer schemes against the words that other programs make of the same codes, zeros and scales.
#include <gtest/gtest.h>

#include <cstring>

#include "formats/integer.h"
#include "io/checkpoint.h"
#include "repack/layout_registry.h"
#include "support.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;

class Golden {
 public:
  explicit Golden(const std::string& name)
      : file_(io::Checkpoint::open(test::testdata() / "golden" / (name + ".safetensors"))) {}

  std::vector<std::byte> bytes(std::string_view tensor) const {
    const auto loaded = file_.load(tensor);
    return {loaded->bytes.begin(), loaded->bytes.end()};
  }
  const Shape& shape(std::string_view tensor) const { return file_.at(tensor).shape; }

  /// Canonical planes of the codes `codes` U8 [k, n]; zeros U8 and scales F16 stand as [groups, n], empty: left zero.
  PackedWeight canonical(std::string_view scheme, std::string_view codes, std::string_view zeros = {},
                         std::string_view scales = {}) const {
    const int64_t k = shape(codes)[0];
    const int64_t n = shape(codes)[1];
    PackedWeight weight = formats::allocate_integer(formats::parse_scheme(scheme), n, k);
    const std::vector<std::byte> values = bytes(codes);
    std::vector<uint8_t> line(static_cast<size_t>(k));
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t col = 0; col < k; ++col) {
        line[static_cast<size_t>(col)] = std::to_integer<uint8_t>(values[static_cast<size_t>(col * n + row)]);
      }
      formats::integer_write_codes(weight, row, line);
    }
    if (!zeros.empty()) transpose(bytes(zeros), n, 1, weight.plane(PlaneRole::zeros));
    if (!scales.empty()) transpose(bytes(scales), n, 2, weight.plane(PlaneRole::scales));
    return weight;
  }

 private:
  static void transpose(const std::vector<std::byte>& from, int64_t n, int64_t width, formats::Plane& to) {
    const auto groups = static_cast<int64_t>(from.size()) / n / width;
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t group = 0; group < groups; ++group) {
        std::memcpy(to.bytes.data() + (row * groups + group) * width, from.data() + (group * n + row) * width,
                    static_cast<size_t>(width));
      }
    }
  }

  io::Checkpoint file_;
};

/// Packs, compares the planes with the file's tensors, and unpacks again.
void expect_words(const Golden& golden, std::string_view layout, const PackedWeight& canonical,
                  std::initializer_list<std::pair<PlaneRole, std::string_view>> planes) {
  const PackedWeight packed = layout_row(layout).pack(canonical);
  for (const auto& [role, tensor] : planes) {
    EXPECT_TRUE(std::ranges::equal(packed.plane(role).bytes.bytes(), golden.bytes(tensor))) << layout << " " << tensor;
    EXPECT_EQ(packed.plane(role).spec.shape, golden.shape(tensor)) << layout << " " << tensor;
  }
  EXPECT_TRUE(bytes_equal(layout_row(layout).unpack(packed, "w"), canonical)) << layout;
}

TEST(GoldenWords, Awq) {
  const Golden golden("awq_gemm");
  expect_words(golden, "awq", golden.canonical("int4-g32-f16-asym", "in.codes", "in.zeros", "in.scales"),
               {{PlaneRole::codes, "qweight"}, {PlaneRole::zeros, "qzeros"}, {PlaneRole::scales, "scales"}});
}

TEST(GoldenWords, Gptq) {
  for (const int bits : {2, 3, 4, 8}) {
    const Golden golden("gptq_" + std::to_string(bits) + "bit");
    const std::string scheme = "int" + std::to_string(bits) + "-g32-f16-asym";
    // Version 2 stores zeros as they are; version 1 is the dialect's business.
    expect_words(golden, "gptq", golden.canonical(scheme, "in.codes", "in.zeros", "in.scales"),
                 {{PlaneRole::codes, "qweight"}, {PlaneRole::zeros, "qzeros_v2"}, {PlaneRole::scales, "scales"}});
  }
}

TEST(GoldenWords, GptqWithActOrder) {
  const Golden golden("gptq_4bit_descact");
  PackedWeight weight = golden.canonical("int4-g32-f16-asym-actorder", "in.codes", "in.zeros", "scales");
  const auto index = golden.bytes("g_idx");
  std::ranges::copy(index, weight.plane(PlaneRole::group_index).bytes.data());
  expect_words(golden, "gptq", weight,
               {{PlaneRole::codes, "qweight"}, {PlaneRole::scales, "scales"}, {PlaneRole::group_index, "g_idx"}});
  // The decoder's values, [k, n] in the file: powers of two make them exact.
  formats::integer_validate(weight, "w");
  const auto wanted = golden.bytes("dequant");
  std::vector<float> line(128);
  for (int64_t row = 0; row < weight.n; ++row) {
    formats::scheme_row(weight.scheme.family).decode_row(weight, row, line);
    for (int64_t col = 0; col < weight.k; ++col) {
      float value = 0;
      std::memcpy(&value, wanted.data() + 4 * (col * weight.n + row), sizeof value);
      ASSERT_EQ(line[static_cast<size_t>(col)], value) << row << " " << col;
    }
  }
}

TEST(GoldenWords, MarlinOfIst) {
  const Golden grouped("marlin_ist_g128");
  expect_words(grouped, "marlin", grouped.canonical("int4-g128-f16", "in.codes", {}, "in.scales"),
               {{PlaneRole::codes, "B"}, {PlaneRole::scales, "s"}});
  const Golden single("marlin_ist_gm1");
  expect_words(single, "marlin", single.canonical("int4-row-f16", "in.codes", {}, "in.scales"),
               {{PlaneRole::codes, "B"}, {PlaneRole::scales, "s"}});
}

TEST(GoldenWords, MarlinOfVllm) {
  const Golden golden("marlin_vllm");
  expect_words(golden, "marlin", golden.canonical("int4-g128-f16-asym", "in.codes4", "in.zeros"),
               {{PlaneRole::codes, "repack4"}, {PlaneRole::zeros, "marlin_zp"}});
  expect_words(golden, "marlin", golden.canonical("int8-g128-bf16", "in.codes8"), {{PlaneRole::codes, "repack8"}});
}

TEST(GoldenWords, MarlinWithActOrder) {
  const Golden golden("marlin_vllm_actorder");
  // With one input to a group, any order is the order of some group_index.
  PackedWeight weight = golden.canonical("int4-g1-f16-actorder", "in.codes");
  const auto perm = golden.bytes("in.perm");
  const auto index = weight.plane(PlaneRole::group_index).bytes.as<int32_t>();
  for (size_t i = 0; i < index.size(); ++i) {
    int32_t input = 0;
    std::memcpy(&input, perm.data() + 4 * i, sizeof input);
    index[static_cast<size_t>(input)] = static_cast<int32_t>(i);
  }
  expect_words(golden, "marlin", weight, {{PlaneRole::codes, "repack4"}});
}

TEST(GoldenWords, Interleaved) {
  const Golden golden("block_interleaved");
  expect_words(golden, "interleaved", golden.canonical("int4-g32-f16", "in.codes"), {{PlaneRole::codes, "W_packed"}});
}

}  // namespace
}  // namespace w4q::repack
