// The quantizers and packers of two GPUs in one process, at the same time: the bytes of the CPU from both.
#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "core/convert.h"
#include "core/rng.h"
#include "device/properties.h"
#include "formats/scheme_registry.h"
#include "gpu.h"
#include "quantize/quantizer_registry.h"
#include "repack/layout_registry.h"
#include "support.h"

namespace w4q::quantize {
namespace {

TEST(TwoGpus, QuantizeAndPackTheBytesOfTheCpu) {
  std::string why;
  if (!device::find_gpu(&why, 1)) GTEST_SKIP() << "needs two GPUs: " << why;
  constexpr int64_t n = 320, k = 512;
  std::vector<float> values(n * k);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(random_normal(3, i));
  const TensorView view{"w", DType::f32, {n, k}, bytes_of(values)};
  const auto work = [&](int ordinal) {
    device::Context gpu(ordinal);
    for (const auto& [method, name] :
         {std::pair{"kbit", "kbit3-b32-e4m4"}, {"rtn", "int4-g128-f16"}, {"rotated", "rotated4-d128"}}) {
      const auto scheme = formats::parse_scheme(name);
      const QuantizerRow& row = quantizer_row(method);
      const auto expected = row.run(view, scheme, {}).weight;
      EXPECT_TRUE(formats::bytes_equal(row.run_cuda(view, scheme, {}, gpu).weight, expected)) << name;
      for (const auto& layout : repack::layout_registry()) {
        if (layout.pack_cuda == nullptr || !layout.accepts(scheme, n, k, nullptr)) continue;
        const auto packed = layout.pack_cuda(expected, gpu);
        EXPECT_TRUE(formats::bytes_equal(packed, layout.pack(expected))) << name << " " << layout.name;
        EXPECT_TRUE(formats::bytes_equal(layout.unpack_cuda(packed, "w", gpu), expected)) << name << " " << layout.name;
      }
    }
  };
  std::thread other([&] { work(1); });
  work(0);
  other.join();
}

}  // namespace
}  // namespace w4q::quantize
