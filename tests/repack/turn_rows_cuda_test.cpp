// Rows that take turns as they stand in a layout, on the GPU: the bytes of packing the stacked canonical rows (class
// E0), for every scheme of every layout that a kernel reads.
#include "repack/turn_rows_cuda.h"

#include <gtest/gtest.h>

#include "core/text.h"
#include "device/buffer.h"
#include "device/properties.h"
#include "gpu.h"
#include "laws/registries.h"
#include "repack/turned.h"
#include "support.h"

namespace w4q::repack {
namespace {

using device::DeviceBuffer;
using formats::PackedWeight;
using formats::PlaneRole;

class TurnRowsCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

std::vector<std::byte> turned(const PackedWeight& first, const PackedWeight& second, PlaneRole role) {
  const device::Stream stream(test::gpu());
  const auto a = DeviceBuffer::copy_of(first.plane(role).bytes.bytes(), stream);
  const auto b = DeviceBuffer::copy_of(second.plane(role).bytes.bytes(), stream);
  DeviceBuffer both(test::gpu(), 2 * a.size());
  both.fill(0xA5, stream);
  turn_rows_cuda(first.layout, first.scheme, role, first.n, first.k, {a.data(), b.data(), both.data()}, stream);
  std::vector<std::byte> result(both.size());
  both.download(result, stream);
  stream.synchronize();
  return result;
}

TEST_F(TurnRowsCuda, GivesTheBytesOfPackingTheStack) {
  int tried = 0;
  for (const auto& [scheme, layout] : test::every_scheme_and_layout()) {
    const bool floats = layout == "float-fragment";
    if (!floats && layout != "kbit-fragment" && layout != "rotated-fragment" && layout != "marlin" &&
        layout != "interleaved") {
      continue;
    }
    if (formats::shares_rows(scheme)) continue;  // whose scales are no rows
    if (scheme.act_order) continue;              // planes of random bytes have no groups; the codes are those of others
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{64, 64}, {128, 320}, {704, 256}}) {
      const LayoutRow& row = layout_row(layout);
      if (!row.accepts(scheme, n, k, nullptr)) continue;
      const auto a = test::random_planes(scheme, n, k, 1), b = test::random_planes(scheme, n, k, 2);
      const auto first = row.pack(a), second = row.pack(b), both = row.pack(test::in_turn(a, b));
      for (const PlaneRole role : {PlaneRole::codes, PlaneRole::scales, PlaneRole::zeros}) {
        if (role == PlaneRole::zeros && !scheme.asymmetric) continue;
        if (floats && role == PlaneRole::scales && scheme.block == formats::whole_row) continue;  // in no place
        const auto got = turned(first, second, role);
        EXPECT_TRUE(same_bytes(got, both.plane(role).bytes.bytes()))
            << layout << " " << to_string(scheme) << " " << n << " × " << k << ", " << formats::to_string(role);
        ++tried;
      }
    }
  }
  EXPECT_GT(tried, 60);
}

TEST_F(TurnRowsCuda, RefusesWhatHasPaddingOrNoPass) {
  const device::Stream stream(test::gpu());
  const auto scheme = formats::parse_scheme("kbit4-b32-e4m4");
  test::expect_error(ErrorCode::bad_argument, {"65 × 64", "multiples of 64"},
                     [&] { turn_rows_cuda("kbit-fragment", scheme, PlaneRole::codes, 65, 64, {}, stream); });
  test::expect_error(ErrorCode::unsupported, {"kbit-tile"},
                     [&] { turn_rows_cuda("kbit-tile", scheme, PlaneRole::codes, 64, 64, {}, stream); });
}

}  // namespace
}  // namespace w4q::repack
