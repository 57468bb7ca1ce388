// AutoAWQ's and GPTQ's dialects against the tensors that their own programs make of the same codes, zeros and scales.
#include <gtest/gtest.h>

#include <cstring>
#include <optional>

#include "checkpoint/dialect/dialect.h"
#include "dialect_samples.h"
#include "io/checkpoint.h"
#include "support.h"

namespace w4q::checkpoint {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::StoredTensor;

class Golden {
 public:
  explicit Golden(const std::string& name)
      : file_(io::Checkpoint::open(test::testdata() / "golden" / (name + ".safetensors"))) {}

  Buffer bytes(std::string_view tensor) const { return Buffer::copy_of(file_.load(tensor)->bytes); }
  const io::TensorInfo& info(std::string_view tensor) const { return file_.at(tensor); }

  /// Canonical planes of codes U8 [k, n]; zeros U8 and scales F16 [groups, n].
  PackedWeight canonical(const std::string& scheme, std::string_view scales) const {
    const Shape& shape = info("in.codes").shape;
    const int64_t k = shape[0], n = shape[1];
    PackedWeight weight = formats::allocate_integer(formats::parse_scheme(scheme), n, k);
    const int64_t groups = formats::integer_groups(weight.scheme, k);
    const Buffer codes = bytes("in.codes"), zeros = weight.scheme.asymmetric ? bytes("in.zeros") : Buffer{};
    const Buffer values = bytes(scales);
    std::vector<uint8_t> line(static_cast<size_t>(k));
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t col = 0; col < k; ++col) {
        line[static_cast<size_t>(col)] = codes.as<uint8_t>()[static_cast<size_t>(col * n + row)];
      }
      formats::integer_write_codes(weight, row, line);
      for (int64_t group = 0; group < groups; ++group) {
        const auto from = static_cast<size_t>(group * n + row), to = static_cast<size_t>(row * groups + group);
        weight.plane(PlaneRole::scales).bytes.as<uint16_t>()[to] = values.as<uint16_t>()[from];
        if (weight.scheme.asymmetric) {
          weight.plane(PlaneRole::zeros).bytes.as<uint8_t>()[to] = zeros.as<uint8_t>()[from];
        }
      }
    }
    return weight;
  }

 private:
  io::Checkpoint file_;
};

using Names = std::vector<std::pair<std::string, std::string>>;  // suffix, tensor of the file

/// Both ways: planes → the file's tensors, the file's tensors → planes.
void expect_tensors(const Golden& golden, std::string_view dialect, const PackedWeight& weight, const Names& names) {
  SCOPED_TRACE(std::string(dialect) + " " + formats::to_string(weight.scheme));
  const DialectRow* row = find_dialect(dialect);
  ASSERT_NE(row, nullptr);
  const auto written = row->encode(weight);
  std::vector<StoredTensor> read;
  for (const auto& tensor : written) {
    const auto name = std::ranges::find(names, tensor.spec.suffix, &Names::value_type::first);
    ASSERT_NE(name, names.end()) << tensor.spec.suffix;
    const io::TensorInfo& expected = golden.info(name->second);
    EXPECT_EQ(tensor.spec.dtype, expected.dtype) << name->second;
    EXPECT_EQ(tensor.spec.shape, expected.shape) << name->second;
    EXPECT_TRUE(std::ranges::equal(tensor.bytes.bytes(), golden.bytes(name->second).bytes())) << name->second;
    read.push_back({{tensor.spec.suffix, expected.dtype, expected.shape}, golden.bytes(name->second)});
  }
  const auto info = test::dialect_info(*row, weight.scheme, weight.n, weight.k);
  EXPECT_TRUE(formats::bytes_equal(row->decode(info, std::move(read)), weight));
}

TEST(DialectGolden, AutoAwq) {
  const Names names = {{".qweight", "qweight"}, {".qzeros", "qzeros"}, {".scales", "scales"}};
  for (const auto& [file, dialect] :
       Names{{"awq_gemm", "awq-gemm"}, {"awq_gemv", "awq-gemv"}, {"awq_gemv_fast", "awq-gemv-fast"}}) {
    const Golden golden(file);
    expect_tensors(golden, dialect, golden.canonical("int4-g32-f16-asym", "in.scales"), names);
  }
}

TEST(DialectGolden, AutoAwqMarlin) {
  const Names names = {{".qweight", "B"}, {".scales", "s"}};
  const Golden grouped("marlin_ist_g128"), single("marlin_ist_gm1");
  expect_tensors(grouped, "awq-marlin", grouped.canonical("int4-g128-f16", "in.scales"), names);
  expect_tensors(single, "awq-marlin", single.canonical("int4-row-f16", "in.scales"), names);
}

TEST(DialectGolden, Gptq) {
  for (const int bits : {2, 3, 4, 8}) {
    const Golden golden("gptq_" + std::to_string(bits) + "bit");
    const std::string width = "int" + std::to_string(bits);
    for (const std::string version : {"v1", "v2"}) {
      Names names = {
          {".qweight", "qweight"}, {".qzeros", "qzeros_" + version}, {".scales", "scales"}, {".g_idx", "g_idx"}};
      PackedWeight weight = golden.canonical(width + "-g32-f16-asym", "in.scales");
      expect_tensors(golden, "gptq-" + version, weight, names);
      // The same with the symmetric zero everywhere.
      names[1].second = "qzeros_sym_" + version;
      std::ranges::fill(weight.plane(PlaneRole::zeros).bytes.as<uint8_t>(),
                        static_cast<uint8_t>(formats::integer_symmetric_zero(bits)));
      expect_tensors(golden, "gptq-" + version, weight, names);
    }
  }
}

TEST(DialectGolden, GptqWithActOrder) {
  const Golden golden("gptq_4bit_descact");
  PackedWeight weight = golden.canonical("int4-g32-f16-asym-actorder", "scales");
  weight.plane(PlaneRole::group_index).bytes = golden.bytes("g_idx");
  expect_tensors(golden, "gptq-v1", weight,
                 {{".qweight", "qweight"}, {".qzeros", "qzeros_v1"}, {".scales", "scales"}, {".g_idx", "g_idx"}});
}

/// The word of the specification for the symmetric zero point, v1 and v2.
TEST(DialectGolden, SymmetricZeroWords) {
  const std::pair<int, std::vector<uint32_t>> expected[] = {
      {2, {0x55555555, 0xAAAAAAAA}},
      {3, {0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D, 0x24924924, 0x49249249, 0x92492492}},
      {4, {0x77777777, 0x88888888}},
      {8, {0x7F7F7F7F, 0x80808080}}};
  for (const auto& [bits, words] : expected) {
    const formats::Scheme scheme{formats::SchemeFamily::integer, bits, 32, formats::ScaleType::f16, true, false};
    PackedWeight weight = test::sample_integer(scheme, 32, 32, 1);
    std::ranges::fill(weight.plane(PlaneRole::zeros).bytes.as<uint8_t>(), static_cast<uint8_t>(1 << (bits - 1)));
    const size_t half = words.size() / 2;
    for (const bool second : {false, true}) {
      const auto tensors = find_dialect(second ? "gptq-v2" : "gptq-v1")->encode(weight);
      const auto found = formats::stored(tensors, ".qzeros").bytes.as<uint32_t>();
      EXPECT_TRUE(std::ranges::equal(found.first(half), std::span(words).subspan(second ? half : 0, half))) << bits;
    }
  }
}

}  // namespace
}  // namespace w4q::checkpoint
