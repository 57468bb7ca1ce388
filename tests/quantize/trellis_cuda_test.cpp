// Trellises on the GPU: the bytes of the CPU where columns are rounded by themselves, its codes but for the order of sums
// with feedback.
#include <gtest/gtest.h>

#include "core/convert.h"
#include "core/text.h"
#include "device/properties.h"
#include "feedback_samples.h"
#include "gpu.h"
#include "quantize/awq.h"
#include "quantize/awq_cuda.h"
#include "quantize/group_cuda.h"
#include "quantize/norm_calibration.h"
#include "quantize/trellis.h"
#include "support.h"

namespace w4q::quantize {
namespace {

using formats::parse_scheme;
using formats::Scheme;
using test::Layer;
using test::RandomMatrix;

class TrellisCuda : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
    work = std::make_unique<CudaWork>(test::gpu());
  }
  std::shared_ptr<GramCuda> gram(const Layer& layer) { return std::make_shared<GramCuda>(*work, layer.gram_view()); }

  std::unique_ptr<CudaWork> work;
};

std::vector<Scheme> schemes() {
  std::vector<Scheme> result;
  for (int bits = formats::trellis_min_bits; bits <= formats::trellis_max_bits; ++bits) {
    for (int window = formats::trellis_min_window; window <= formats::trellis_max_window; ++window) {
      result.push_back(parse_scheme(concat("trellis", bits, "-w", window)));
    }
  }
  return result;
}

/// Normal weights with some rows of zeros, and one far out.
std::vector<float> sample(int64_t n, int64_t k) {
  auto values = RandomMatrix(n, k, static_cast<uint64_t>(n + k)).values;
  for (int64_t row = 5; row < n; row += 13) std::fill_n(values.begin() + row * k, k, 0.0f);
  values.back() = 200;
  return values;
}

void expect_bytes_of_the_cpu(const Scheme& scheme, DType dtype, int64_t n, int64_t k) {
  const auto values = sample(n, k);
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(dtype_bits(dtype)) / 8);
  narrow(values, dtype, bytes);
  const TensorView view{"w", dtype, {n, k}, bytes};
  const QuantizerRow& row = quantizer_row("trellis");
  const auto cpu = row.run(view, scheme, {}), gpu = row.run_cuda(view, scheme, {}, test::gpu());
  EXPECT_TRUE(bytes_equal(gpu.weight, cpu.weight))
      << to_string(scheme) << " " << dtype_name(dtype) << " " << n << " × " << k;
  EXPECT_EQ(gpu.stats.blocks, cpu.stats.blocks);
  EXPECT_EQ(gpu.stats.zero_blocks, cpu.stats.zero_blocks);
  EXPECT_EQ(gpu.stats.range_exponent, cpu.stats.range_exponent);
}

/// Whole strips, strips whose last rows fill no window, some, and nearly all of one.
TEST_F(TrellisCuda, GivesTheBytesOfTheCpu) {
  for (const Scheme& scheme : schemes()) {
    expect_bytes_of_the_cpu(scheme, DType::bf16, 129, 3);
    expect_bytes_of_the_cpu(scheme, DType::f32, 127, 2);
  }
}

TEST_F(TrellisCuda, GivesTheBytesOfTheCpuForEveryShapeAndType) {
  for (const char* name : {"trellis2-w8", "trellis3-w9", "trellis4-w10", "trellis3-w12"}) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {2, 70}, {125, 33}, {300, 200}}) {
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        expect_bytes_of_the_cpu(parse_scheme(name), dtype, n, k);
      }
    }
  }
}

TEST_F(TrellisCuda, NamesAWeightThatIsNotFinite) {
  auto values = sample(140, 64);
  values[64 * 133 + 7] = INFINITY;
  const TensorView view{"w", DType::f32, {140, 64}, bytes_of(values)};
  test::expect_error(ErrorCode::bad_file, {"w", "133", "7"},
                     [&] { quantizer_row("trellis").run_cuda(view, parse_scheme("trellis2-w8"), {}, test::gpu()); });
}

double equal_share(const formats::PackedWeight& left, const formats::PackedWeight& right) {
  const auto a = test::decode(left), b = test::decode(right);
  size_t equal = 0;
  for (size_t i = 0; i < a.size(); ++i) equal += a[i] == b[i] ? 1 : 0;
  return static_cast<double>(equal) / static_cast<double>(a.size());
}

QuantizeOptions feedback(bool norms = false) {
  QuantizeOptions options;
  options.steps.add({StepKind::feedback});
  if (norms) options.steps.add({StepKind::fit_norms});
  return options;
}

/// Two weights of one input side by side, the rows of one divided at last, and beside them one that reads another input.
TEST_F(TrellisCuda, FeedbackIsThatOfTheCpu) {
  const Layer layer(200, 300);
  const RandomMatrix second(130, 300, 5);
  const std::vector<float> divisors(130, 0.5f);
  for (const char* name : {"trellis2-w10", "trellis3-w9", "trellis4-w10", "trellis3-w12"}) {
    const Scheme scheme = parse_scheme(name);
    GroupCuda group(*work, gram(layer));
    group.add(layer.view(), scheme, {});
    group.add({"v", DType::f32, {130, 300}, bytes_of(second.values)}, scheme, {});
    const Layer narrow(70, 100);
    GroupCuda neighbour(*work, gram(narrow));
    neighbour.add(narrow.view(), scheme, {});
    const std::vector<GroupCuda::Part> parts{{&group, {{0, {}}, {1, divisors}}}, {&neighbour, {{0, {}}}}};
    GroupCuda::round_together(parts, feedback());
    const double beyond = narrow.error(neighbour.pack(0, feedback(), {}).result);
    EXPECT_NEAR(beyond, narrow.error(narrow.fed_back(scheme)), 0.05 * beyond) << name;
    const auto first = group.pack(0, feedback(), {});
    const auto expected = layer.fed_back(scheme);
    // A target that falls to the other side of a threshold by rounding changes the rest of its strip, for no worse.
    EXPECT_GE(equal_share(first.result.weight, expected.weight), 0.99) << name;
    EXPECT_NEAR(layer.error(first.result), layer.error(expected), 0.01 * layer.error(expected)) << name;
    EXPECT_NEAR(first.error, layer.error(first.result), 1e-4 * first.error) << name;

    Layer other(130, 300);
    other.weight = second;
    for (float& value : other.weight.values) value /= 0.5f;
    const auto beside = group.pack(1, feedback(), {divisors, {}});
    EXPECT_GE(equal_share(beside.result.weight, other.fed_back(scheme).weight), 0.99) << name;
    EXPECT_NEAR(beside.error, 0.25 * other.error(beside.result), 1e-4 * beside.error) << name;
  }
}

/// Strips that are few have two multiprocessors each, where a GPU has clusters; 67 do not on an H100, which has 132.
TEST_F(TrellisCuda, WithoutCorrelationFeedbackIsRounding) {
  for (const auto& [n, k] : {std::pair<int64_t, int64_t>{250, 40}, {67 * 128 - 3, 2}}) {
    const RandomMatrix weight(n, k, 1);
    const TensorView view{"w", DType::f32, {n, k}, bytes_of(weight.values)};
    std::vector<float> identity(static_cast<size_t>(k * k));
    for (int64_t i = 0; i < k; ++i) identity[static_cast<size_t>(i * k + i)] = 1;
    for (const char* name : {"trellis2-w16", "trellis3-w16", "trellis4-w16", "trellis3-w11"}) {
      const Scheme scheme = parse_scheme(name);
      GroupCuda group(*work, std::make_shared<GramCuda>(*work, MatrixView<const float>(identity.data(), k, k)));
      group.add(view, scheme, {});
      EXPECT_TRUE(bytes_equal(group.pack(0, feedback(), {}).result.weight,
                              quantizer_row("trellis").run(view, scheme, {}).weight))
          << name << " " << n << " × " << k;
    }
  }
}

TEST_F(TrellisCuda, WithoutFeedbackTheBytesOfAGroupAreTheCpus) {
  const Layer layer(200, 90);
  for (const char* name : {"trellis2-w8", "trellis3-w14"}) {
    const Scheme scheme = parse_scheme(name);
    GroupCuda group(*work, gram(layer));
    group.add(layer.view(), scheme, {});
    EXPECT_TRUE(bytes_equal(group.pack(0, {}, {}).result.weight, layer.plain(scheme).weight)) << name;
  }
}

TEST_F(TrellisCuda, ScalesByLeastSquaresAreTheCpus) {
  const Layer layer(200, 300);
  const Scheme scheme = parse_scheme("trellis3-w9");
  const auto pack = [&](const QuantizeOptions& options) {
    GroupCuda group(*work, gram(layer));
    group.add(layer.view(), scheme, {});
    return group.pack(0, options, {});
  };
  auto expected = pack(feedback()).result;
  const double before = layer.error(expected);
  calibrate_norms(expected.weight, layer.weight, layer.gram_view(), norm_damping);
  const auto found = pack(feedback(true));
  EXPECT_LT(found.error, before);
  EXPECT_NEAR(found.error, layer.error(expected), 1e-4 * found.error);
  // A quotient on the edge between two halves.
  EXPECT_GE(equal_share(found.result.weight, expected.weight), 0.99);
}

TEST_F(TrellisCuda, ScalesOfInputsAreTheCpus) {
  const Layer layer(200, 300);
  std::vector<float> mean_abs;
  for (int64_t c = 0; c < layer.k; ++c) mean_abs.push_back(std::sqrt(layer.gram_view().row(c)[c]));
  for (const char* name : {"trellis2-w8", "trellis3-w12", "trellis4-w9"}) {
    const Scheme scheme = parse_scheme(name);
    const formats::InputRotation rotation({128, 42}, layer.k);
    for (const bool rotates : {false, true}) {
      const Rounding plain = rounding_of(scheme, layer.k, {});
      const std::vector<AwqLinear> linears = {{layer.weight, rotates ? test::in_basis(plain, rotation) : plain}};
      const auto cpu = search_scales(linears, {mean_abs, layer.gram_view(), {}, {}});
      GroupCuda group(*work, gram(layer));
      const auto measured = group.add(layer.view(), scheme, {});
      const auto found = group.search({mean_abs, {}, {}, {}}, measured.plain, rotates ? &rotation : nullptr);
      EXPECT_NEAR(found.plain_error, cpu.plain_error, 1e-4 * cpu.plain_error) << name;
      EXPECT_NEAR(found.error, cpu.error, 1e-4 * cpu.error) << name;
      EXPECT_EQ(found.point.alpha, cpu.point.alpha) << name;
    }
  }
}

}  // namespace
}  // namespace w4q::quantize
