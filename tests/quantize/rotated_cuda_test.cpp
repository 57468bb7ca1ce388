// Rotated weights quantized by the GPU: the bytes of the CPU.
#include <limits>
#include <optional>

#include "core/convert.h"
#include "device/properties.h"
#include "gpu.h"
#include "kbit_samples.h"
#include "quantize/quantizer_registry.h"
#include "support.h"

namespace w4q::quantize {
namespace {

class RotatedCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

TEST_F(RotatedCuda, GivesTheBytesOfTheCpu) {
  const QuantizerRow& row = quantizer_row("rotated");
  for (const auto& scheme : formats::scheme_row(formats::SchemeFamily::rotated).schemes()) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {3, 129}, {70, 1000}, {64, 4096}}) {
      for (const test::Distribution& distribution : test::distributions) {
        const std::vector<float> sampled = test::sample(distribution, n, k);
        for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
          if (dtype == DType::f16 && (distribution.name == "1e30" || distribution.name == "largest")) continue;
          std::vector<std::byte> bytes(sampled.size() * static_cast<size_t>(dtype_bits(dtype)) / 8);
          narrow(sampled, dtype, bytes);
          const TensorView view{"w", dtype, {n, k}, bytes};
          const auto finite = [&] {
            try {
              return std::optional(row.run(view, scheme, {}));
            } catch (const Error&) {  // "mixed magnitude" and "heavy tail" leave f16
              return std::optional<QuantizeResult>();
            }
          }();
          if (!finite) continue;
          const auto gpu = row.run_cuda(view, scheme, {}, test::gpu());
          EXPECT_TRUE(bytes_equal(gpu.weight, finite->weight))
              << to_string(scheme) << " " << distribution.name << " " << dtype_name(dtype) << " " << n << " × " << k;
          EXPECT_EQ(gpu.stats.blocks, finite->stats.blocks);
          EXPECT_EQ(gpu.stats.zero_blocks, finite->stats.zero_blocks);
          EXPECT_EQ(gpu.stats.range_exponent, finite->stats.range_exponent);
        }
      }
    }
  }
}

TEST_F(RotatedCuda, NamesWhatIsNotFinite) {
  std::vector<float> values(4 * 300, 1.0f);
  values[2 * 300 + 40] = std::numeric_limits<float>::quiet_NaN();
  const TensorView view{"w", DType::f32, {4, 300}, bytes_of(values)};
  test::expect_error(ErrorCode::bad_file, {"w", "2", "40"}, [&] {
    quantizer_row("rotated").run_cuda(view, formats::parse_scheme("rotated4-d128"), {}, test::gpu());
  });
}

}  // namespace
}  // namespace w4q::quantize
