// Rounding to nearest on the GPU: the bytes, the counts and the refusals of the CPU (class E0).
#include <gtest/gtest.h>

#include <limits>

#include "core/convert.h"
#include "core/text.h"
#include "device/properties.h"
#include "formats/scheme_registry.h"
#include "gpu.h"
#include "kbit_samples.h"
#include "quantize/quantizer_registry.h"
#include "support.h"

namespace w4q::quantize {
namespace {

class RtnCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

Buffer stored(const std::vector<float>& values, DType dtype) {
  Buffer bytes(values.size() * static_cast<size_t>(dtype_bits(dtype)) / 8);
  narrow(values, dtype, bytes.bytes());
  return bytes;
}

TEST_F(RtnCuda, GivesTheBytesOfTheCpu) {
  const QuantizerRow& row = quantizer_row("rtn");
  int tried = 0;
  for (const auto& scheme : formats::scheme_row(formats::SchemeFamily::integer).schemes()) {
    if (!row.accepts(scheme)) continue;
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {3, 33}, {70, 513}, {64, 1024}}) {
      for (const auto& distribution : test::distributions) {
        const auto values = test::sample(distribution, n, k);
        for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
          const Buffer bytes = stored(values, dtype);
          const TensorView view{"w", dtype, {n, k}, bytes.bytes()};
          for (const Clip clip : {Clip::min_max, Clip::mse}) {
            QuantizeOptions options;
            if (clip == Clip::mse) options.steps = {{StepKind::clip}};
            QuantizeResult cpu;
            try {
              cpu = row.run(view, scheme, options);
            } catch (const Error&) {  // the samples leave the range of f16
              EXPECT_THROW(row.run_cuda(view, scheme, options, test::gpu()), Error);
              continue;
            }
            const QuantizeResult gpu = row.run_cuda(view, scheme, options, test::gpu());
            const std::string what = concat(to_string(scheme), " ", n, " × ", k, " ", dtype_name(dtype));
            ASSERT_TRUE(bytes_equal(gpu.weight, cpu.weight)) << what;
            EXPECT_EQ(gpu.stats.blocks, cpu.stats.blocks) << what;
            EXPECT_EQ(gpu.stats.zero_blocks, cpu.stats.zero_blocks) << what;
            EXPECT_EQ(gpu.stats.saturated_scales, cpu.stats.saturated_scales) << what;
            EXPECT_EQ(gpu.stats.subnormal_scales, cpu.stats.subnormal_scales) << what;
            ++tried;
          }
        }
      }
    }
  }
  EXPECT_GT(tried, 500);
}

TEST_F(RtnCuda, NamesTheFirstValueThatIsNotFinite) {
  std::vector<float> values(40 * 96, 0.5f);
  values[7 * 96 + 35] = std::numeric_limits<float>::quiet_NaN();
  values[30 * 96 + 2] = std::numeric_limits<float>::infinity();
  const Buffer bytes = stored(values, DType::bf16);
  const TensorView view{"layers.0.up.weight", DType::bf16, {40, 96}, bytes.bytes()};
  test::expect_error(ErrorCode::bad_file, {"layers.0.up.weight", "row 7", "column 35"}, [&] {
    quantizer_row("rtn").run_cuda(view, formats::parse_scheme("int4-g32-f16"), {}, test::gpu());
  });
}

}  // namespace
}  // namespace w4q::quantize
