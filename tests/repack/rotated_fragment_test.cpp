// rotated-fragment beside kbit-fragment, and what it refuses. That it is a layout at all is what the laws say.
#include <gtest/gtest.h>

#include "core/rng.h"
#include "formats/kbit.h"
#include "formats/rotated.h"
#include "repack/layout_registry.h"
#include "repack/layout_rotated_fragment.h"
#include "support.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;

const LayoutRow& fragment() { return layout_row("rotated-fragment"); }

/// Random codes and norms.
PackedWeight random_weight(const Scheme& scheme, int64_t n, int64_t k) {
  PackedWeight weight = formats::allocate_planes(scheme, formats::canonical_layout, n, k,
                                                 formats::scheme_row(scheme.family).planes(scheme, n, k));
  const auto words = weight.plane(PlaneRole::codes).bytes.as<uint32_t>();
  for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<uint32_t>(random_bits(1, i));
  auto& norms = weight.plane(PlaneRole::scales).bytes;
  for (size_t i = 0; i < norms.size(); ++i) norms.data()[i] = static_cast<std::byte>(1 + random_bits(2, i) % 100);
  std::ranges::copy(formats::normal_codebook(scheme.bits), weight.plane(PlaneRole::codebook).bytes.as<float>().begin());
  return weight;
}

TEST(RotatedFragment, IsWhatATargetTakes) {
  const Scheme scheme = formats::parse_scheme("rotated4-d128");
  for (const std::string_view target : {"sm80", "sm89", "sm90"}) {
    EXPECT_EQ(layout_for_target(target, scheme, 11000, 4097).name, "rotated-fragment");
  }
}

TEST(RotatedFragment, CodesStandAsInKbitFragment) {
  const Scheme scheme = formats::parse_scheme("rotated3-d64"), kbit = formats::parse_scheme("kbit3-b32-e4m4");
  const PackedWeight weight = random_weight(scheme, 130, 256);
  PackedWeight codes = formats::allocate_canonical(kbit, 130, 256);
  codes.plane(PlaneRole::codes).bytes = weight.plane(PlaneRole::codes).bytes.clone();
  const auto expected = layout_row("kbit-fragment").pack(codes);
  const auto packed = fragment().pack(weight);
  EXPECT_TRUE(
      std::ranges::equal(packed.plane(PlaneRole::codes).bytes.bytes(), expected.plane(PlaneRole::codes).bytes.bytes()));
}

TEST(RotatedFragment, RefusesNormsOfRowsThatAreNotThere) {
  for (const char* name : {"rotated4-d128", "rotated4-d128-e4m4", "rotated2-d32-f32", "rotated5-row"}) {
    const Scheme scheme = formats::parse_scheme(name);
    PackedWeight packed = fragment().pack(random_weight(scheme, 70, 256));
    const int64_t groups = formats::rotated_groups(scheme, 256);
    auto& norms = packed.plane(PlaneRole::scales);
    const int64_t size = dtype_bits(norms.spec.dtype) / 8;
    norms.bytes.data()[norm_place(100, groups - 1, groups) * size + size - 1] = std::byte{1};
    test::expect_error(ErrorCode::bad_file, {"w", "scales", "padding", "row 100"},
                       [&] { fragment().unpack(packed, "w"); });
  }
}

TEST(RotatedFragment, RefusesOtherPlanes) {
  PackedWeight packed = fragment().pack(random_weight(formats::parse_scheme("rotated4-d128"), 64, 256));
  packed.plane(PlaneRole::scales).spec.shape = {2, 1, 64};
  test::expect_error(ErrorCode::bad_file, {"w", "scales"}, [&] { fragment().unpack(packed, "w"); });
  std::string why;
  EXPECT_FALSE(fragment().accepts(formats::parse_scheme("kbit4-b32-e4m4"), 64, 64, &why));
  EXPECT_EQ(why, "it holds rotated schemes only");
}

}  // namespace
}  // namespace w4q::repack
