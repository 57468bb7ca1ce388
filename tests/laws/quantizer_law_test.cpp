// Laws of quantizers: the bytes of the plain definition, valid planes, on every type of weight.
#include <cmath>

#include "formats/table/table_format.h"
#include "laws/registries.h"
#include "quantize/quantizer_registry.h"
#include "quantize/rounding.h"
#include "support.h"

namespace w4q {
namespace {

using formats::PlaneRole;
using formats::Scheme;

class QuantizerLaw : public testing::TestWithParam<Scheme> {};
INSTANTIATE_TEST_SUITE_P(Every, QuantizerLaw, testing::ValuesIn(test::every_scheme()),
                         [](const auto& param) { return test::test_name(to_string(param.param)); });

/// A matrix as it comes from a file, and the values that it stands for.
struct Source {
  DType dtype;
  int64_t n, k;
  std::vector<std::byte> bytes;
  std::vector<float> values;

  Source(DType type, int64_t rows, int64_t cols) : dtype(type), n(rows), k(cols) {
    const std::vector<float> sampled = test::sample(test::distributions[1], n, k);
    bytes.resize(sampled.size() * static_cast<size_t>(dtype_bits(dtype)) / 8);
    narrow(sampled, dtype, bytes);
    values.resize(sampled.size());
    widen(bytes, dtype, values);
  }
  TensorView view() const { return {"w", dtype, {n, k}, bytes}; }
};

/// One set of options for each table of schemes that may have several.
std::vector<quantize::QuantizeOptions> table_options(const Scheme& scheme) {
  std::vector<quantize::QuantizeOptions> result(1);
  const formats::SchemeRow& row = formats::scheme_row(scheme.family);
  if (row.table == nullptr || !row.table(scheme).fixed.empty()) return result;
  for (const auto& table : formats::codebook_registry()) {
    result.back().codebook = table.name;
    result.push_back(result.back());
  }
  result.pop_back();
  return result;
}

TEST_P(QuantizerLaw, EqualsTheDefinition) {
  const Scheme& scheme = GetParam();
  const auto& scheme_row = formats::scheme_row(scheme.family);
  for (const auto& quantizer : quantize::quantizer_registry()) {
    if (!quantizer.accepts(scheme)) continue;
    for (const auto& [n, k] : test::sizes_of(scheme)) {
      for (const DType dtype : test::types_of(scheme)) {
        const Source source(dtype, n, k);
        for (const auto& options : table_options(scheme)) {
          const auto result = quantizer.run(source.view(), scheme, options);
          std::span<const float> codebook;
          if (scheme.family != formats::SchemeFamily::integer && scheme.family != formats::SchemeFamily::exl3) {
            codebook = result.weight.plane(PlaneRole::codebook).bytes.as<float>();
          }
          EXPECT_TRUE(bytes_equal(result.weight, scheme_row.encode(scheme, source.values, n, k, codebook)))
              << quantizer.name << " " << dtype_name(dtype) << " " << options.codebook << " " << n << " × " << k;
          EXPECT_NO_THROW(scheme_row.validate(result.weight, "w"));
        }
      }
    }
  }
}

/// A quantizer that searches may choose other bytes; they are valid, and no farther from the weights.
TEST_P(QuantizerLaw, SearchingIsNeverWorse) {
  const Scheme& scheme = GetParam();
  const bool kbit = scheme.family == formats::SchemeFamily::kbit;
  const auto& scheme_row = formats::scheme_row(scheme.family);
  if (!quantize::step_row(quantize::StepKind::search_scales).accepts(scheme, nullptr)) return;
  const bool lut = scheme.family == formats::SchemeFamily::lut;
  const auto& quantizer = quantize::rounding_quantizer(scheme);
  quantize::QuantizeOptions searched;
  searched.steps = {{quantize::StepKind::search_scales}};
  for (const auto& [n, k] : test::sizes) {
    if (lut && k % scheme.block != 0) continue;  // its blocks run across rows
    const Source source(DType::bf16, n, k);
    const auto error = [&](const formats::PackedWeight& weight) {
      const auto decoded = test::decode(weight);
      double sum = 0;
      for (size_t i = 0; i < decoded.size(); ++i) sum += std::pow(double{decoded[i]} - double{source.values[i]}, 2);
      return sum;
    };
    const auto plain = quantizer.run(source.view(), scheme, {}).weight;
    const auto best = quantizer.run(source.view(), scheme, searched).weight;
    EXPECT_NO_THROW(scheme_row.validate(best, "w"));
    EXPECT_LE(error(best), error(plain) * (1 + 1e-5)) << n << " × " << k;  // errors are compared in fp32
    if (!kbit) continue;
    searched.steps.add({quantize::StepKind::learn_table});
    EXPECT_NO_THROW(
        formats::scheme_row(scheme.family).validate(quantizer.run(source.view(), scheme, searched).weight, "w"));
    searched.steps.remove(quantize::StepKind::learn_table);
  }
}

}  // namespace
}  // namespace w4q
