// Norms that the GPU makes of stored scales: those of rotated_planes, bit for bit.
#include "kernels/rotated/norms_cuda.h"

#include <gtest/gtest.h>

#include "core/text.h"
#include "device/buffer.h"
#include "device/properties.h"
#include "formats/rotated.h"
#include "gpu.h"
#include "kernels/rotated/pack.h"
#include "laws/registries.h"

namespace w4q::kernels {
namespace {

using formats::PackedWeight;
using formats::PlaneRole;

class NormsCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

std::vector<uint16_t> norms_of(const PackedWeight& weight, NormOrder order, float largest) {
  const device::Stream stream(test::gpu());
  const auto scales = device::DeviceBuffer::copy_of(weight.plane(PlaneRole::scales).bytes.bytes(), stream);
  const int64_t groups = formats::rotated_groups(weight.scheme, weight.k);
  const NormSource source{.scales = scales.data(),
                          .type = weight.scheme.scale,
                          .order = order,
                          .n = weight.n,
                          .groups = groups,
                          .exponent = norm_exponent(weight.scheme.scale, largest)};
  std::vector<uint16_t> norms(static_cast<size_t>(norm_count(weight.n, groups)));
  device::DeviceBuffer on_gpu(test::gpu(), norms.size() * 2);
  on_gpu.fill(0xA5, stream);
  norms_cuda(source, on_gpu.as<uint16_t>(), stream);
  on_gpu.download(std::as_writable_bytes(std::span(norms)), stream);
  stream.synchronize();
  return norms;
}

TEST_F(NormsCuda, AreThoseOfTheCpu) {
  for (const char* name : {"rotated4-d64", "rotated2-d128", "rotated4-row", "rotated3-d32-e4m4", "rotated5-d64-e4m4",
                           "rotated4-d128-f32", "kbit4-b32-e4m4", "kbit3-b32-f16"}) {
    const auto scheme = formats::parse_scheme(name);
    // Magnitudes over 60 powers of two: norms beneath what f16 holds, too.
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 33}, {100, 200}, {192, 320}}) {
      for (const auto& distribution : {test::distributions[0], test::distributions[9]}) {
        const PackedWeight canonical = test::encoded(scheme, test::sample(distribution, n, k), n, k);
        const RotatedPlanes expected = rotated_planes(canonical);
        float largest = 0x1p-14f;
        for (int64_t i = 0; i < element_count(canonical.plane(PlaneRole::scales).spec.shape); ++i) {
          largest = std::max(largest, formats::load_scale(canonical.plane(PlaneRole::scales), static_cast<size_t>(i)));
        }
        const std::string what = concat(name, " ", n, " × ", k, " ", distribution.name);
        EXPECT_EQ(norms_of(canonical, NormOrder::canonical, largest), expected.norms) << what;
        const bool rotated = scheme.family == formats::SchemeFamily::rotated;
        if (!rotated && (n % 64 != 0 || k % 64 != 0)) continue;
        const PackedWeight packed = repack::layout_row(rotated ? "rotated-fragment" : "kbit-fragment").pack(canonical);
        const NormOrder order = rotated ? NormOrder::rotated_fragment : NormOrder::kbit_fragment;
        EXPECT_EQ(norms_of(packed, order, largest), expected.norms) << what << ", stored";
      }
    }
  }
}

}  // namespace
}  // namespace w4q::kernels
