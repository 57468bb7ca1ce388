// Laws of schemes: names round-trip, planes have the announced shape, encoding is idempotent, errors are bounded.
#include <algorithm>
#include <map>

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
  for (const auto& [n, k] : test::sizes_of(scheme())) {
    const PackedWeight weight = test::encoded(scheme(), test::sample(test::distributions[0], n, k), n, k);
    const auto specs = row().planes(scheme(), n, k);
    ASSERT_EQ(weight.planes.size(), specs.size());
    for (size_t i = 0; i < specs.size(); ++i) EXPECT_EQ(weight.planes[i].spec, specs[i]);
    EXPECT_NO_THROW(row().validate(weight, "w"));
    EXPECT_DOUBLE_EQ(row().bits_per_weight(scheme(), n, k),
                     8.0 * static_cast<double>(weight.size_bytes()) / static_cast<double>(n * k));
  }
}

/// Choosing codes anew for what was decoded gives the same bytes: codes are chosen against the decoded scale.
TEST_P(SchemeLaw, RecodingWhatWasDecodedChangesNothing) {
  for (const test::Distribution& distribution : test::distributions) {
    if (!test::asks(scheme(), distribution.name)) continue;
    for (const auto& [n, k] : test::sizes_of(scheme())) {
      const PackedWeight once = test::encoded(scheme(), test::sample(distribution, n, k), n, k);
      PackedWeight again = once.clone();
      // Where weights decode to subnormal numbers of fp32, their quotients may round to a neighbour's.
      if (distribution.name == "denormal" && scheme().family != formats::SchemeFamily::integer) continue;
      row().recode(again, test::decode(once));
      EXPECT_TRUE(bytes_equal(again, once)) << distribution.name << " " << n << " × " << k;
    }
  }
}

/// kbit's scales too follow from the decoded weights. For distributions whose blocks stay in the scales' normal range;
/// a block of one sign is left out, since it may decode to a smaller largest magnitude.
class KbitLaw : public SchemeLaw {};
INSTANTIATE_TEST_SUITE_P(Every, KbitLaw, testing::ValuesIn(formats::scheme_row(formats::SchemeFamily::kbit).schemes()),
                         [](const auto& param) { return test::test_name(to_string(param.param)); });

TEST_P(KbitLaw, EncodingWhatWasDecodedChangesNothing) {
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
  constexpr int64_t n = 6;
  constexpr int64_t k = 200;
  for (const test::Distribution& distribution : test::distributions) {
    if (!test::asks(scheme(), distribution.name)) continue;
    const std::vector<float> values = test::sample(distribution, n, k);
    const PackedWeight weight = test::encoded(scheme(), values, n, k);
    std::map<int64_t, double> absmax;
    for (int64_t i = 0; i < n * k; ++i) {
      double& largest = absmax[test::scale_index(weight, i / k, i % k)];
      largest = std::max(largest, std::abs(static_cast<double>(values[static_cast<size_t>(i)])));
    }
    const std::vector<float> decoded = test::decode(weight);
    for (size_t i = 0; i < values.size(); ++i) {
      const int64_t block = test::scale_index(weight, static_cast<int64_t>(i) / k, static_cast<int64_t>(i) % k);
      const double bound = row().error_bound(scheme(), absmax[block], test::table_of(scheme()));
      ASSERT_LE(std::abs(static_cast<double>(values[i]) - static_cast<double>(decoded[i])), bound)
          << distribution.name << " at " << i;
    }
  }
}

TEST_P(SchemeLaw, PlacesAreOneToOneAndHoldTheCodes) {
  const formats::SchemeRow& law = row();
  for (const auto& [n, k] : test::sizes_of(scheme())) {
    const PackedWeight weight = test::encoded(scheme(), test::sample(test::distributions[0], n, k), n, k);
    const auto words = weight.plane(formats::PlaneRole::codes).bytes.as<uint32_t>();
    std::vector<uint32_t> left(words.begin(), words.end());
    std::vector<char> taken(words.size() * 32);
    for (int64_t i = 0; i < n * k * scheme().bits; ++i) {
      const int64_t code = i / scheme().bits;
      const auto at = law.place(scheme(), n, k, code / k, code % k, static_cast<int>(i % scheme().bits));
      ASSERT_TRUE(at.word >= 0 && static_cast<size_t>(at.word) < words.size() && at.bit >= 0 && at.bit < 32);
      char& seen = taken[static_cast<size_t>(at.word * 32 + at.bit)];
      ASSERT_EQ(seen, 0) << n << " × " << k;
      seen = 1;
      left[static_cast<size_t>(at.word)] &= ~(1u << at.bit);
    }
    EXPECT_TRUE(std::ranges::all_of(left, [](uint32_t word) { return word == 0; })) << "bits that belong to no code";
  }
}

}  // namespace
}  // namespace w4q
