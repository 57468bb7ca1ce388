// Laws of schemes: names round-trip, planes have the announced shape, encoding is idempotent, errors are bounded.
#include <algorithm>

#include "laws/registries.h"
#include "support.h"

namespace w4q {
namespace {

using formats::PackedWeight;
using formats::Scheme;

class SchemeLaw : public testing::TestWithParam<Scheme> {
 protected:
  const Scheme& scheme() const { return GetParam(); }
  const formats::SchemeRow& row() const { return formats::scheme_row(GetParam().family); }
};
INSTANTIATE_TEST_SUITE_P(Every, SchemeLaw, testing::ValuesIn(test::every_scheme()),
                         [](const auto& param) { return test::test_name(to_string(param.param)); });

TEST_P(SchemeLaw, NameParsesBack) { EXPECT_EQ(formats::parse_scheme(to_string(scheme())), scheme()); }

TEST_P(SchemeLaw, EncodedPlanesAreThoseAnnouncedAndValid) {
  for (const auto& [n, k] : test::sizes) {
    const PackedWeight weight = test::encoded(scheme(), test::sample(test::distributions[0], n, k), n, k);
    const auto specs = row().planes(scheme(), n, k);
    ASSERT_EQ(weight.planes.size(), specs.size());
    for (size_t i = 0; i < specs.size(); ++i) EXPECT_EQ(weight.planes[i].spec, specs[i]);
    EXPECT_NO_THROW(row().validate(weight, "w"));
    EXPECT_DOUBLE_EQ(row().bits_per_weight(scheme(), n, k),
                     8.0 * static_cast<double>(weight.size_bytes()) / static_cast<double>(n * k));
  }
}

/// Decoding and encoding again gives the same bytes: codes are chosen against the decoded scale. For distributions
/// whose blocks stay in the scales' normal range; a block of one sign is left out, since it may decode to a smaller
/// largest magnitude.
TEST_P(SchemeLaw, EncodingWhatWasDecodedChangesNothing) {
  for (std::string_view name : {"normal", "small normal", "uniform", "heavy tail", "one-hot", "constant", "zero"}) {
    const auto distribution = std::ranges::find(test::distributions, name, &test::Distribution::name);
    for (const auto& [n, k] : test::sizes) {
      const PackedWeight once = test::encoded(scheme(), test::sample(*distribution, n, k), n, k);
      EXPECT_TRUE(bytes_equal(test::encoded(scheme(), test::decode(once), n, k), once))
          << name << " " << n << " × " << k;
    }
  }
}

TEST_P(SchemeLaw, ErrorsAreBoundedBlockByBlock) {
  const std::vector<float> table = formats::codebook("nf", scheme().bits);
  for (const test::Distribution& distribution : test::distributions) {
    const std::vector<float> values = test::sample(distribution, 6, 200);
    const std::vector<float> decoded = test::decode(test::encoded(scheme(), values, 6, 200));
    for (size_t i = 0; i < values.size(); ++i) {
      const auto line = std::span(values).subspan(i / 200 * 200, 200);
      const double bound = row().error_bound(scheme(), test::block_absmax_at(line, i % 200), table);
      ASSERT_LE(std::abs(static_cast<double>(values[i]) - static_cast<double>(decoded[i])), bound)
          << distribution.name << " at " << i;
    }
  }
}

}  // namespace
}  // namespace w4q
