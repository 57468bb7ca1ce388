// Packing and unpacking on the GPU: the bytes, the checks and the messages of the CPU passes (class E0).
#include "repack/map_pass_cuda.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/rng.h"
#include "core/text.h"
#include "device/buffer.h"
#include "device/properties.h"
#include "device/stream.h"
#include "formats/kbit.h"
#include "formats/scheme_registry.h"
#include "gpu.h"
#include "laws/registries.h"
#include "repack/layout_registry.h"
#include "support.h"

namespace w4q::repack {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;
using formats::Scheme;

PackedWeight random_weight(const Scheme& scheme, int64_t n, int64_t k) {
  PackedWeight weight = formats::allocate_canonical(scheme, n, k);
  for (auto& plane : weight.planes) {
    for (size_t i = 0; i < plane.bytes.size(); ++i) {
      plane.bytes.data()[i] = static_cast<std::byte>(1 + random_bits(static_cast<uint64_t>(plane.spec.role), i) % 255);
    }
  }
  return weight;
}

class MapPassCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

constexpr std::pair<int64_t, int64_t> shapes[] = {{1, 1},      {3, 31},     {5, 33},     {64, 95},    {127, 64},
                                                  {128, 1408}, {129, 1056}, {300, 4096}, {1000, 544}, {4096, 4096}};

constexpr std::string_view layouts[] = {"kbit-tile", "kbit-fragment"};

TEST_F(MapPassCuda, PacksAndUnpacksTheBytesOfTheCpu) {
  for (const auto layout : layouts) {
    for (const auto& scheme : formats::scheme_row(formats::SchemeFamily::kbit).schemes()) {
      for (const auto& [n, k] : shapes) {
        const std::string what = concat(layout, " ", to_string(scheme), " ", n, " × ", k);
        const PackedWeight canonical = random_weight(scheme, n, k);
        const PackedWeight expected = layout_row(layout).pack(canonical);
        EXPECT_TRUE(bytes_equal(pack_on_gpu(layout, canonical, test::gpu()), expected)) << "pack " << what;
        EXPECT_TRUE(bytes_equal(unpack_on_gpu(expected, "w", test::gpu()), canonical)) << "unpack " << what;
      }
    }
  }
}

TEST_F(MapPassCuda, EveryPassOfTheRegistryGivesTheBytesOfTheCpu) {
  int tried = 0;
  for (const auto& [scheme, name] : test::every_scheme_and_layout()) {
    const LayoutRow& row = layout_row(name);
    if (row.pack_cuda == nullptr) continue;
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {70, 100}, {300, 513}, {520, 1024}}) {
      if (!row.accepts(scheme, n, k, nullptr)) continue;
      const PackedWeight canonical = test::encoded(scheme, test::sample(test::distributions[0], n, k), n, k);
      const PackedWeight expected = row.pack(canonical);
      const std::string what = concat(name, " ", to_string(scheme), " ", n, " × ", k);
      EXPECT_TRUE(bytes_equal(row.pack_cuda(canonical, test::gpu()), expected)) << "pack " << what;
      EXPECT_TRUE(bytes_equal(row.unpack_cuda(expected, "w", test::gpu()), canonical)) << "unpack " << what;
      ++tried;
    }
  }
  EXPECT_GT(tried, 100);
}

TEST_F(MapPassCuda, TheRegistryOffersThem) {
  for (const auto layout : layouts) {
    const LayoutRow& row = layout_row(layout);
    ASSERT_NE(row.pack_cuda, nullptr);
    ASSERT_NE(row.unpack_cuda, nullptr);
    const PackedWeight canonical = random_weight({.bits = 3}, 70, 100);
    EXPECT_TRUE(bytes_equal(row.unpack_cuda(row.pack_cuda(canonical, test::gpu()), "w", test::gpu()), canonical));
  }
}

/// Sets one bit of a block's codes or scale, whether the weight has the block or not.
void damage(PackedWeight& packed, PlaneRole role, int64_t row, int64_t block) {
  const int last = packed.scheme.bits - 1;
  const auto at = layout_row(packed.layout).place(packed.scheme, packed.n, packed.k, row, 32 * block + 31, last);
  if (role == PlaneRole::codes) {
    packed.plane(role).bytes.as<uint32_t>()[static_cast<size_t>(at.word)] |= 1u << at.bit;
  } else {
    packed.plane(role).bytes.data()[at.scale] = std::byte{1};
  }
}

/// One bit of padding after the other is set: found, named as the CPU names it.
TEST_F(MapPassCuda, FindsPaddingThatIsNotZero) {
  constexpr int64_t n = 130;
  const auto try_place = [](const PackedWeight& packed, int64_t row, int64_t block) {
    for (const auto role : {PlaneRole::codes, PlaneRole::scales}) {
      PackedWeight damaged = packed.clone();
      damage(damaged, role, row, block);
      test::expect_error(ErrorCode::bad_file,
                         {"w", to_string(role), concat("row ", row, ", block ", block), "padding that is not zero"},
                         [&] { unpack_on_gpu(damaged, "w", test::gpu()); });
      test::expect_error(ErrorCode::bad_file, {concat("row ", row, ", block ", block)},
                         [&] { layout_row(damaged.layout).unpack(damaged, "w"); });
    }
  };
  for (const auto layout : layouts) {
    for (int64_t k : {int64_t{96}, int64_t{128}}) {
      for (int bits : {2, 3, 4, 5}) {
        const PackedWeight packed = layout_row(layout).pack(random_weight({.bits = bits}, n, k));
        try_place(packed, 130, 0);
        try_place(packed, layout == "kbit-tile" ? 255 : 191, 3);
        try_place(packed, 131, 1);
        if (k == 96) try_place(packed, 129, 3);
        if (k == 96) try_place(packed, 0, 3);
      }
    }
  }
}

class EachLayout : public MapPassCuda, public testing::WithParamInterface<std::string_view> {};
INSTANTIATE_TEST_SUITE_P(MapPassCuda, EachLayout, testing::ValuesIn(layouts),
                         [](const auto& param) { return param.param == "kbit-tile" ? "tile" : "fragment"; });

TEST_P(EachLayout, WritesNothingBehindThePlanes) {
  constexpr size_t guard = 256;
  const Scheme scheme{.bits = 5, .scale = formats::ScaleType::f16};
  const PackedWeight canonical = random_weight(scheme, 129, 96);
  const PackedWeight expected = layout_row(GetParam()).pack(canonical);
  const device::Stream stream(test::gpu());
  const auto copy = [&](const PackedWeight& weight, PlaneRole role) {
    return device::DeviceBuffer::copy_of(weight.plane(role).bytes.bytes(), stream);
  };
  auto codes = copy(canonical, PlaneRole::codes);
  auto scales = copy(canonical, PlaneRole::scales);
  const auto wanted_codes = expected.plane(PlaneRole::codes).bytes.bytes();
  const auto wanted_scales = expected.plane(PlaneRole::scales).bytes.bytes();
  device::DeviceBuffer packed_codes(test::gpu(), wanted_codes.size() + guard);
  device::DeviceBuffer packed_scales(test::gpu(), wanted_scales.size() + guard);
  packed_codes.fill(0xA5, stream);
  packed_scales.fill(0xA5, stream);
  pack_cuda(GetParam(), scheme, 129, 96, {codes.as<uint32_t>(), scales.data()},
            {packed_codes.as<uint32_t>(), packed_scales.data()}, stream);
  const auto check = [&](const device::DeviceBuffer& buffer, std::span<const std::byte> wanted) {
    std::vector<std::byte> got(buffer.size());
    buffer.download(got, stream);
    stream.synchronize();
    EXPECT_TRUE(std::ranges::equal(std::span(got).first(wanted.size()), wanted));
    EXPECT_TRUE(std::ranges::all_of(std::span(got).subspan(wanted.size()),
                                    [](std::byte value) { return value == std::byte{0xA5}; }));
  };
  check(packed_codes, wanted_codes);
  check(packed_scales, wanted_scales);
}

TEST_F(MapPassCuda, RefusesWhatItCannotMove) {
  const PackedWeight canonical = random_weight({.bits = 4}, 4, 64);
  test::expect_error(ErrorCode::unsupported, {"canonical", "no pass on the GPU"},
                     [&] { pack_on_gpu("canonical", canonical, test::gpu()); });
  test::expect_error(ErrorCode::bad_file, {"another layout"},
                     [&] { pack_on_gpu("kbit-tile", layout_row("kbit-tile").pack(canonical), test::gpu()); });
  const device::Stream stream(test::gpu());
  device::DeviceBuffer memory(test::gpu(), 4096);
  const DeviceBlocks good{memory.as<uint32_t>(), memory.data()};
  const DeviceBlocks bad{memory.as<uint32_t>() + 1, memory.data()};
  test::expect_error(ErrorCode::bad_argument, {"misaligned"},
                     [&] { pack_cuda("kbit-tile", {.bits = 4}, 4, 64, good, bad, stream); });
  test::expect_error(ErrorCode::bad_argument, {"null"},
                     [&] { pack_cuda("kbit-tile", {.bits = 4}, 4, 64, {}, good, stream); });
}

}  // namespace
}  // namespace w4q::repack
