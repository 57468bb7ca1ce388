// Residual passes that come from host memory: the order of copies and products, and which passes stay.
#include "decoder_cuda/offload.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/float_formats.h"
#include "core/rng.h"
#include "decoder_cuda/decoder.h"
#include "decoder_cuda/linear.h"
#include "device/properties.h"
#include "gpu.h"
#include "model/shapes.h"
#include "quantize/passes.h"
#include "quantize/rounding.h"
#include "support.h"

namespace w4q::decoder_cuda {
namespace {

using kernels::LinearWeight;

TEST(ChooseResident, TakesTheMostErrorForAByteThatFits) {
  const OffloadCandidate candidates[] = {{100, 1.0}, {50, 0.9}, {200, 4.0}, {10, 0.01}};
  EXPECT_EQ(choose_resident(candidates, 0), (std::vector<bool>{false, false, false, false}));
  EXPECT_EQ(choose_resident(candidates, 260), (std::vector<bool>{false, true, true, true}));
  EXPECT_EQ(choose_resident(candidates, 199), (std::vector<bool>{true, true, false, true}));
  EXPECT_EQ(choose_resident(candidates, 1000), (std::vector<bool>{true, true, true, true}));
}

class OffloadGpu : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!device::find_gpu(&why)) GTEST_SKIP() << "needs a GPU: " << why;
  }
};

constexpr int64_t k = 512;

LinearWeight random_linear(int64_t n, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(n * k));
  for (size_t i = 0; i < values.size(); ++i) values[i] = 0.02f * static_cast<float>(random_normal(seed, i));
  const TensorView view{"w", DType::f32, {n, k}, bytes_of(values)};
  const formats::Scheme further[] = {formats::parse_scheme("rotated4-d128")};
  const auto plan = quantize::plan_passes(formats::parse_scheme("rotated4-d128"), further, {.shared = seed % 2 == 0});
  auto linear = quantize::quantize_passes(view, plan, [](const TensorView& pass, const formats::Scheme& scheme) {
                  return quantize::rounding_quantizer(scheme).run(pass, scheme, {});
                }).linear;
  return {"w", n, k, std::make_shared<const formats::PackedLinear>(std::move(linear)), {}};
}

/// Layers one after another over the same input; `rounds` times, so that copies go round too.
struct Layers {
  device::Stream stream{test::gpu()};
  std::vector<CudaLinear> linears;
  std::vector<int64_t> first;
  int64_t outputs = 0;

  Layers(const std::vector<LinearWeight>& weights, std::optional<int64_t> budget) {
    for (const auto& weight : weights) {
      const LinearWeight* const one[] = {&weight};
      linears.push_back(upload_linears(one, stream, budget.has_value()));
      first.push_back(outputs);
      outputs += weight.n;
    }
    std::vector<CudaLinear*> all;
    for (auto& linear : linears) all.push_back(&linear);
    if (budget) keep_resident(all, *budget, stream);
  }

  std::vector<float> run(int64_t rows, int rounds, std::chrono::microseconds delay, OffloadTraffic* traffic) {
    std::vector<const CudaLinear*> all;
    for (const auto& linear : linears) all.push_back(&linear);
    CudaMultiplier multiplier(all, rows, stream);
    if (multiplier.offload() != nullptr) multiplier.offload()->delay_copies(delay);
    std::vector<uint16_t> x(static_cast<size_t>(rows * k));
    for (size_t i = 0; i < x.size(); ++i) x[i] = f16_from_f32(static_cast<float>(random_normal(9, i)));
    const auto input = device::DeviceBuffer::copy_of(bytes_of(x), stream);
    device::DeviceBuffer y(test::gpu(), static_cast<size_t>(rows * outputs * rounds) * sizeof(float));
    auto* to = y.as<float>();
    for (int round = 0; round < rounds; ++round) {
      for (const auto& linear : linears) {
        multiplier.multiply(linear, input.as<__half>(), rows, to);
        to += rows * linear.n;
      }
    }
    std::vector<float> result(static_cast<size_t>(rows * outputs * rounds));
    y.download(std::as_writable_bytes(std::span(result)), stream);
    stream.synchronize();
    if (traffic != nullptr && multiplier.offload() != nullptr) *traffic = multiplier.offload()->traffic();
    return result;
  }
};

double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, signal = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(a[i] - b[i], 2);
    signal += std::pow(a[i], 2);
  }
  return std::sqrt(difference / signal);
}

TEST_F(OffloadGpu, ProductsAreThoseOfResidentPassesHoweverLateCopiesAre) {
  std::vector<LinearWeight> weights;
  for (const int64_t n : {192, 64, 320, 255, 101}) weights.push_back(random_linear(n, static_cast<uint64_t>(n)));
  Layers resident(weights, std::nullopt);
  for (const int64_t budget : {0, 80000, 1 << 30}) {
    Layers moved(weights, budget);
    for (const int64_t rows : {1, 40, 150}) {
      const auto expected = resident.run(rows, 3, {}, nullptr);
      OffloadTraffic traffic;
      const auto got = moved.run(rows, 3, {}, &traffic);
      // The first pass's sums are rounded to f16 before the second's are added: 2^-12 in the mean, twice.
      EXPECT_LT(relative_difference(expected, got), 1e-3) << budget << ", " << rows << " rows";
      EXPECT_EQ(traffic.copies > 0, budget < 1 << 30);
      EXPECT_EQ(moved.run(rows, 3, std::chrono::microseconds(3000), nullptr), got);
    }
  }
}

TEST_F(OffloadGpu, RandomModelsAreTheSameWhereverTheirPassesAre) {
  model::ModelConfig shape = model::named_shape("llama3-1b");
  shape.layers = 2;
  shape.vocab_size = 1000;
  const auto passes = formats::parse_schemes("rotated4-d128+rotated4-d128");
  const std::vector<int32_t> prompt = {1, 20, 300, 4, 5};
  std::vector<std::vector<float>> logits;
  for (const std::optional<int64_t> budget : {std::optional<int64_t>(), std::optional<int64_t>(0)}) {
    const CudaModel model = CudaModel::random(test::gpu(), shape, passes, budget);
    CudaDecoder decoder(model, {.capacity = 16, .graph = false});
    EXPECT_EQ(decoder.offload() != nullptr, budget.has_value());
    decoder.forward(prompt);
    auto& row = logits.emplace_back(static_cast<size_t>(shape.vocab_size));
    decoder.logits(4, {row.data(), 1, shape.vocab_size, shape.vocab_size});
  }
  double difference = 0, signal = 0;
  for (size_t i = 0; i < logits[0].size(); ++i) {
    difference += std::pow(logits[0][i] - logits[1][i], 2);
    signal += std::pow(logits[0][i], 2);
  }
  EXPECT_GT(signal, 0);
  // Products of two launches are rounded to f16 twice: 2^-12 in the mean for each of a dozen.
  EXPECT_LT(std::sqrt(difference / signal), 5e-3);
}

}  // namespace
}  // namespace w4q::decoder_cuda
