// Laws of layouts: unpack undoes pack, planes have the announced shapes, `place` is one-to-one and is what pack does.
#include "laws/registries.h"
#include "repack/map_pass.h"
#include "support.h"

namespace w4q {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;

class LayoutLaw : public testing::TestWithParam<test::SchemeAndLayout> {
 protected:
  const formats::Scheme& scheme() const { return GetParam().first; }
  const repack::LayoutRow& layout() const { return repack::layout_row(GetParam().second); }

  PackedWeight canonical(int64_t n, int64_t k) const {
    return test::encoded(scheme(), test::sample(test::distributions[0], n, k), n, k);
  }
};
INSTANTIATE_TEST_SUITE_P(Every, LayoutLaw, testing::ValuesIn(test::every_scheme_and_layout()), [](const auto& param) {
  return test::test_name(to_string(param.param.first) + "_" + param.param.second);
});

TEST_P(LayoutLaw, UnpackUndoesPack) {
  for (const auto& [n, k] : test::sizes_of(scheme())) {
    if (!layout().accepts(scheme(), n, k, nullptr)) continue;
    const PackedWeight weight = canonical(n, k);
    EXPECT_TRUE(bytes_equal(layout().unpack(layout().pack(weight), "w"), weight)) << n << " × " << k;
  }
}

TEST_P(LayoutLaw, PackedPlanesAreThoseAnnounced) {
  for (const auto& [n, k] : test::sizes_of(scheme())) {
    if (!layout().accepts(scheme(), n, k, nullptr)) continue;
    const PackedWeight packed = layout().pack(canonical(n, k));
    const auto specs = layout().planes(scheme(), n, k);
    EXPECT_EQ(packed.layout, layout().name);
    ASSERT_EQ(packed.planes.size(), specs.size());
    for (size_t i = 0; i < specs.size(); ++i) {
      EXPECT_EQ(packed.planes[i].spec, specs[i]);
      EXPECT_EQ(static_cast<int64_t>(packed.planes[i].bytes.size()), byte_count(specs[i].dtype, specs[i].shape));
    }
  }
}

TEST_P(LayoutLaw, PlaceIsOneToOneAndInside) {
  const repack::LayoutRow& row_of_layout = layout();
  const formats::SchemeRow& row_of_scheme = formats::scheme_row(scheme().family);
  for (const auto& [n, k] : test::sizes_of(scheme())) {
    if (!row_of_layout.accepts(scheme(), n, k, nullptr)) continue;
    const auto specs = row_of_layout.planes(scheme(), n, k);
    const int64_t words = element_count(specs[0].shape), scales = element_count(specs[1].shape);
    std::vector<char> taken(static_cast<size_t>(words * 32));
    std::vector<int64_t> block_of(static_cast<size_t>(scales), -1);
    for (int64_t row = 0; row < n; ++row) {
      for (int64_t col = 0; col < k; ++col) {
        const auto block = row_of_scheme.place(scheme(), n, k, row, col, 0).scale;
        for (int bit = 0; bit < scheme().bits; ++bit) {
          const auto place = row_of_layout.place(scheme(), n, k, row, col, bit);
          ASSERT_TRUE(place.bit >= 0 && place.bit < 32 && place.word >= 0 && place.word < words) << row << " " << col;
          ASSERT_TRUE(place.scale >= 0 && place.scale < scales) << row << " " << col << " " << bit;
          char& seen = taken[static_cast<size_t>(place.word * 32 + place.bit)];
          ASSERT_EQ(seen, 0) << row << " " << col << " " << bit;
          seen = 1;
          int64_t& other = block_of[static_cast<size_t>(place.scale)];
          if (other < 0) other = block;
          ASSERT_EQ(other, block);
        }
      }
    }
  }
}

TEST_P(LayoutLaw, PackDoesWhatPlaceSays) {
  for (const auto& [n, k] : test::sizes_of(scheme())) {
    if (!layout().accepts(scheme(), n, k, nullptr)) continue;
    const PackedWeight weight = canonical(n, k);
    const PackedWeight packed = layout().pack(weight);
    EXPECT_TRUE(bytes_equal(packed, repack::pack_by_place(layout(), weight))) << n << " × " << k;
    EXPECT_TRUE(bytes_equal(repack::unpack_by_place(layout(), packed), weight)) << n << " × " << k;
  }
}

TEST_P(LayoutLaw, RefusesSizesOutOfRange) {
  for (const auto& [n, k] : {std::pair{int64_t{0}, int64_t{32}}, {32, 0}, {-1, 32}, {int64_t{1} << 40, 32}}) {
    std::string why;
    EXPECT_FALSE(layout().accepts(scheme(), n, k, &why));
    EXPECT_FALSE(why.empty());
    EXPECT_THROW(layout().planes(scheme(), n, k), Error);
  }
}

}  // namespace
}  // namespace w4q
