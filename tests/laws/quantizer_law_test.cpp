// Laws of quantizers: the bytes of the plain definition, valid planes, on every type of weight.
#include "laws/registries.h"
#include "quantize/quantizer_registry.h"
#include "support.h"

namespace w4q {
namespace {

using formats::PlaneRole;
using formats::Scheme;

class QuantizerLaw : public testing::TestWithParam<Scheme> {};
INSTANTIATE_TEST_SUITE_P(Every, QuantizerLaw, testing::ValuesIn(test::every_scheme()),
                         [](const auto& param) { return test::test_name(to_string(param.param)); });

TEST_P(QuantizerLaw, EqualsTheDefinition) {
  const Scheme& scheme = GetParam();
  const auto& scheme_row = formats::scheme_row(scheme.family);
  for (const auto& quantizer : quantize::quantizer_registry()) {
    if (quantizer.needs_statistics || !quantizer.accepts(scheme)) continue;
    for (const auto& [n, k] : test::sizes) {
      for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        const std::vector<float> sampled = test::sample(test::distributions[1], n, k);
        std::vector<std::byte> bytes(sampled.size() * static_cast<size_t>(dtype_bits(dtype)) / 8);
        narrow(sampled, dtype, bytes);
        std::vector<float> values(sampled.size());
        widen(bytes, dtype, values);
        for (const auto& table : formats::codebook_registry()) {
          quantize::QuantizeOptions options;
          options.codebook = table.name;
          const auto result = quantizer.run({"w", dtype, {n, k}, bytes}, scheme, options);
          const auto codebook = result.weight.plane(PlaneRole::codebook).bytes.as<float>();
          EXPECT_TRUE(bytes_equal(result.weight, scheme_row.encode(scheme, values, n, k, codebook)))
              << quantizer.name << " " << dtype_name(dtype) << " " << table.name << " " << n << " × " << k;
          EXPECT_NO_THROW(scheme_row.validate(result.weight, "w"));
        }
      }
    }
  }
}

}  // namespace
}  // namespace w4q
